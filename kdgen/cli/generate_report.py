"""The report of ``kdgen generate``: tokens, times, draft trees and versions."""

from __future__ import annotations

import platform
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from kdgen import __version__
from kdgen.cli.output import size_text
from kdgen.codegen.compile import nvrtc_version
from kdgen.plan.ir import Compute
from kdgen.runtime.decode import Decoded
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import Opened
from kdgen.spec.sampling import Sampling


@dataclass(frozen=True)
class Timings:
    """Seconds. ``build`` is for making and compiling kernels, ``load`` for loading weights; the others are times of the reported run.

    ``prepare`` is for recording rounds as graphs and measuring them. ``first_token`` counts from the process's start; null if unknown.
    """

    build: float
    load: float
    prefill: float
    prepare: float
    decode: float
    first_token: float | None


@dataclass(frozen=True)
class BudgetUse:
    """The forwards with one tree budget, and the tokens that they gave."""

    budget: int
    forwards: int
    tokens: int


@dataclass(frozen=True)
class Versions:
    kdgen: str
    python: str
    numpy: str
    nvrtc: str | None  #: null on the CPU backend


@dataclass(frozen=True)
class Generated:
    """What was decoded, and how.

    ``acceptance_lengths`` has the number of accepted nodes of each draft tree, its root counted; it is empty without drafts.
    ``target_forwards`` leaves the prompt out. ``exact`` says whether plain decoding gave the same tokens and the same bits in every cache
    row; null without --check-exact. ``text`` is the tokens' text; null if the prompt was token ids and --text was not given.
    """

    model: str
    spec: str
    spec_sha256: str
    backend: str
    dtype: Compute
    prompt_tokens: int
    draft: str
    budget: int | Literal["auto"]
    block_size: int
    sampling: Sampling
    tokens: tuple[int, ...]
    acceptance_lengths: tuple[int, ...]
    target_forwards: int
    budgets: tuple[BudgetUse, ...]  #: empty without drafts
    text: str | None
    stopped: bool  #: by an end-of-sequence token
    interrupted: bool  #: by Ctrl-C
    exact: bool | None
    timings: Timings
    versions: Versions


@dataclass(frozen=True)
class Run:
    """How to decode: the command's options after defaults are resolved."""

    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[int, ...]
    draft: str
    chain: bool
    budget: int | Literal["auto"]
    block_size: int
    chunk: int | None
    seed: int
    sampling: Sampling


def report_of(
    model: str, opened: Opened, run: Run, decoded: Decoded, timings: Timings, text: str | None, interrupted: bool, exact: bool | None
) -> Generated:
    engine = opened.engine
    on_gpu = engine.backend.name == "cuda"
    return Generated(
        model=model,
        spec=engine.spec.name,
        spec_sha256=engine.plan.spec_sha256,
        backend=engine.backend.description,
        dtype=engine.plan.compute,
        prompt_tokens=len(run.prompt),
        draft=run.draft,
        budget=run.budget,
        block_size=run.block_size,
        sampling=run.sampling,
        tokens=decoded.tokens,
        acceptance_lengths=decoded.acceptance_lengths,
        target_forwards=decoded.target_forwards,
        budgets=_uses(decoded),
        text=text,
        stopped=decoded.tokens[-1] in run.stop,
        interrupted=interrupted,
        exact=exact,
        timings=timings,
        versions=Versions(__version__, platform.python_version(), np.__version__, nvrtc_version() if on_gpu else None),
    )


def _uses(decoded: Decoded) -> tuple[BudgetUse, ...]:
    forwards, tokens = Counter(decoded.budgets), Counter[int]()
    for budget, length in zip(decoded.budgets, decoded.acceptance_lengths, strict=False):  # an interrupted run has no budgets
        tokens[budget] += length
    return tuple(BudgetUse(budget, forwards[budget], tokens[budget]) for budget in sorted(forwards))


def summary(report: Generated, engine: Engine) -> str:
    weights = size_text(sum(weight.total_bytes for weight in (*engine.plan.weights, *engine.plan.draft_weights)))
    times = report.timings
    forwards = "1 forward" if report.target_forwards == 1 else f"{report.target_forwards} forwards"
    lines = [
        f"{report.spec}: {weights} of weights, {report.dtype} on {report.backend}; kernels {times.build:.1f} s, weights {times.load:.1f} s",
        f"{report.prompt_tokens} prompt tokens in {times.prefill:.3f} s, {len(report.tokens)} new ones in {times.decode:.3f} s"
        f"{' (end of sequence)' if report.stopped else ' (interrupted)' if report.interrupted else ''}: {forwards}"
        + (f", {sum(report.acceptance_lengths) / len(report.acceptance_lengths):.2f} tokens each" if report.acceptance_lengths else ""),
    ]
    if report.budget == "auto" and report.budgets:
        lines.append("budgets: " + ", ".join(f"{use.budget} in {use.forwards} forwards" for use in report.budgets))
    began = []
    if not report.interrupted and (report.budget == "auto" or times.prepare >= 0.005):  # less would show as 0.00
        began.append(f"rounds recorded{' and measured' if report.budget == 'auto' else ''} in {times.prepare:.2f} s")
    if not report.interrupted and times.first_token is not None:
        began.append(f"first token {times.first_token:.1f} s after the process started")
    if began:
        lines.append("; ".join(began))
    if report.exact is not None:
        lines.append(f"same tokens and cache bits as plain decoding: {'yes' if report.exact else 'NO'}")
    return "\n".join(lines)
