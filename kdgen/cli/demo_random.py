"""``kdgen demo SPEC``: the main job on any model small enough, with random weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import click
import numpy as np

from kdgen.backends import open_backend
from kdgen.cli.output import compile_note, emit_json, emit_table, status
from kdgen.drafters.base import Drafter
from kdgen.drafters.ngram import NgramDrafter
from kdgen.drafters.synthetic import AdversarialDrafter, RandomDrafter, ReplayDrafter
from kdgen.errors import KdgenError
from kdgen.plan.build import build_plan
from kdgen.plan.ir import Compute, Limits
from kdgen.runtime.decode import Decoded, decode_plain, decode_tree
from kdgen.runtime.engine import Engine
from kdgen.runtime.pipeline import context_for, start_engine
from kdgen.runtime.request import Request
from kdgen.spec.model import Spec, load_spec
from kdgen.weights.random import random_weights

PROMPT_TOKENS = 16
MOST_WEIGHTS = 4e9  #: bytes


@dataclass(frozen=True)
class Row:
    """One way of decoding. ``exact``: the tokens, and the bits of every committed cache row, are those of plain decoding."""

    method: str
    exact: bool
    forwards: int
    tokens_per_forward: float
    seconds: float


@dataclass(frozen=True)
class Demo:
    spec: str
    compute: str
    backend: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    tree_tokens: tuple[int, ...]
    rows: tuple[Row, ...]
    exact: bool
    note: str


def run(
    spec_name: str, max_new_tokens: int, draft: str | None, error_rate: float | None, budget: int, block_size: int, dtype: Compute | None,
    backend: str | None, seed: int, as_json: bool,
) -> bool:  # fmt: skip
    """Decode, print, and say whether no draft tree changed anything."""
    spec = load_spec(spec_name)
    with status() as say:
        report, engine = _demo(spec, max_new_tokens, draft, error_rate, budget, block_size, dtype, backend, seed, say)
    if as_json:
        emit_json("kdgen.demo/1", report)
    else:
        _print(report, engine, budget, block_size)
    return report.exact


def _demo(
    spec: Spec, max_new_tokens: int, draft: str | None, error_rate: float | None, budget: int, block_size: int, dtype: Compute | None,
    backend: str | None, seed: int, say: Callable[[str], None],
) -> tuple[Demo, Engine]:  # fmt: skip
    say(f"{spec.name}: generating and compiling kernels")
    engine = _engine(spec, dtype, backend, seed, max_new_tokens)
    prompt = tuple(int(t) for t in np.random.default_rng(seed).integers(0, spec.vocab_size, PROMPT_TOKENS))
    say("decoding plainly")
    plain = decode_plain(engine, Request(prompt, max_new_tokens))
    cache = engine.cache_rows().tobytes()
    committed = engine.length()
    rows, trees = [_row("plain", plain, True)], []
    for label, drafter in _drafters(spec, (*prompt, *plain.tokens), draft, error_rate, seed):
        say(f"decoding with draft trees: {label}")
        tree = decode_tree(engine, Request(prompt, max_new_tokens, drafter=drafter, budget=budget, block_size=block_size))
        same_cache = engine.length() == committed and engine.cache_rows().tobytes() == cache
        trees.append(tree)
        rows.append(_row(f"tree, {label}", tree, tree.tokens == plain.tokens and same_cache))
    exact = all(row.exact for row in rows)
    where = engine.backend.description
    return Demo(
        spec.name, engine.plan.compute, where, prompt, plain.tokens, trees[0].tokens, tuple(rows), exact, note_on_times(engine)
    ), engine


def note_on_times(engine: Engine) -> str:
    if engine.backend.name == "cuda":
        return "a step of a new size is recorded; from then on it is one CUDA graph"
    return "on the CPU every GPU thread is emulated: compare forwards, not seconds"


def _engine(spec: Spec, dtype: Compute | None, backend: str | None, seed: int, max_new_tokens: int) -> Engine:
    plan = build_plan(spec, dtype, Limits(max_context=context_for(spec, PROMPT_TOKENS, max_new_tokens)))
    size = sum(w.total_bytes for w in plan.weights)
    if size > MOST_WEIGHTS:
        raise KdgenError(f"{spec.name} has {size / 1e9:.0f} GB of weights, too many for a demonstration: try `kdgen demo tiny`")
    opened = open_backend(backend, seed)
    opened.compiling = compile_note
    return start_engine(spec, plan, opened, random_weights(spec, seed).__getitem__)


def _drafters(spec: Spec, truth: tuple[int, ...], draft: str | None, error_rate: float | None, seed: int) -> Iterator[tuple[str, Drafter]]:
    """What to compare, with a label for each."""
    for rate in (0.0, 0.2) if error_rate is None else (error_rate,):
        if draft in (None, "replay"):
            yield f"replay wrong {rate:.0%} of the time", ReplayDrafter(truth, spec.vocab_size, rate, seed)
    if draft in (None, "ngram"):
        yield "ngram (prompt lookup)", NgramDrafter()
    if draft in (None, "random"):
        yield "random", RandomDrafter(spec.vocab_size, seed)
    if draft in (None, "adversarial"):
        yield "adversarial (always wrong)", AdversarialDrafter(truth, spec.vocab_size, seed=seed)


def _row(method: str, decoded: Decoded, exact: bool) -> Row:
    return Row(method, exact, decoded.target_forwards, decoded.tokens_per_forward, decoded.decode_seconds)


def _print(report: Demo, engine: Engine, budget: int, block_size: int) -> None:
    spec = engine.spec
    click.echo(
        f"{report.spec}: {spec.num_hidden_layers} layers, hidden {spec.hidden_size}, {spec.n_routed_experts or 'no'} experts, "
        f"random weights; {report.compute} on {report.backend}"
    )
    click.echo(f"{len(engine.plan.kernels)} kernels generated for these shapes; trees of at most {budget} nodes, block {block_size}\n")
    click.echo(f"prompt       {_ids(report.prompt)}")
    click.echo(f"plain        {_ids(report.tokens)}")
    click.echo(f"draft tree   {_ids(report.tree_tokens)}\n")
    emit_table(
        ("decoding", "target forwards", "tokens a forward", "seconds", "same tokens and cache bits"),
        [(r.method, str(r.forwards), f"{r.tokens_per_forward:.2f}", f"{r.seconds:.3f}", "yes" if r.exact else "NO") for r in report.rows],
        right=(1, 2, 3),
    )
    click.echo(f"\ngreedy-exact: {'yes' if report.exact else 'NO'}. About the times: {report.note}.")


def _ids(tokens: tuple[int, ...]) -> str:
    return " ".join(map(str, tokens))
