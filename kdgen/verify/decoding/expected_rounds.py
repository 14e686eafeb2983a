"""What decoding with drafts must do in each step, computed on the host from plain decoding's tokens, the drafts, and the reference's trees.

Right tokens do not show how many forwards they took. Here a step's accepted nodes are those of the reference's tree through which plain
decoding's continuation passes. From these follow the numbers of steps and rounds, and the recorded units.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import Backend
from kdgen.drafters.base import Candidates, DeviceDraftRequest, Drafter, DraftLogits
from kdgen.errors import BackendError
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES
from kdgen.reference.tree import build_tree, ranked_rows
from kdgen.runtime.budget import Budgets
from kdgen.runtime.decode import decode_plain, prefill
from kdgen.runtime.engine import Engine
from kdgen.runtime.request import Request
from kdgen.spec.sampling import GREEDY, Sampling
from kdgen.verify.kernels.tolerances import EPS32

Array = NDArray[Any]


@dataclass(frozen=True)
class Course:
    """Plain decoding of a request: its new ``tokens`` and the cache rows [layers, committed, width] of all but the last."""

    prompt: tuple[int, ...]
    sampling: Sampling
    tokens: tuple[int, ...]
    rows: Array


@dataclass(frozen=True)
class Drafted:
    """What the model's own drafter gives behind a course's tokens, the first of them and each later one, in blocks of ``block_size`` rows.

    ``candidates`` are the device's; ``logits`` [block_size - 1, vocab_size] are what they were taken from.
    """

    block_size: int
    logits: tuple[NDArray[np.float32], ...]
    candidates: tuple[Candidates, ...]

    def problem(self) -> str:
        """Where candidates are not the best of their logits, in order; empty if nowhere."""
        for place, (logits, found) in enumerate(zip(self.logits, self.candidates, strict=True)):
            tokens, log_probs = ranked_rows(logits, found.tokens.shape[1])
            if not np.array_equal(found.tokens, tokens):
                return f"candidates after token {place} are not the best of the draft's logits"
            if error := far_from(found.log_probs, log_probs):
                return f"log-probabilities of candidates after token {place} are off by {error:.3g}"
        return ""


class KnownDrafter:
    """Proposes from the host what the model's own drafter gives on the device; with ``chain`` each depth's best candidate alone."""

    name = "known"

    def __init__(self, course: Course, drafted: Drafted, chain: bool = False) -> None:
        self._first, self._drafted, self._width = len(course.prompt) + 1, drafted, 1 if chain else MAX_CANDIDATES

    def propose(self, context: Sequence[int], depths: int) -> Candidates:
        found = self._drafted.candidates[len(context) - self._first]
        depths = min(depths, found.depths)
        return Candidates(found.tokens[:depths, : self._width], found.log_probs[:depths, : self._width])


def far_from(log_probs: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    """The largest error of float32 log-probabilities of a whole vocabulary, where that is more than roundings explain; else 0."""
    error = np.abs(log_probs.astype(np.float64) - expected)
    return float(error.max(initial=0.0)) if (error > 64 * EPS32 * (1 + np.abs(expected))).any() else 0.0


def plain_course(engine: Engine, prompt: Sequence[int], new_tokens: int, sampling: Sampling = GREEDY) -> Course:
    """Decode plainly. The engine's context must have room for all of it."""
    decoded = decode_plain(engine, Request(prompt, new_tokens, sampling=sampling))
    return Course(tuple(prompt), sampling, decoded.tokens, np.ascontiguousarray(engine.cache_rows()))


def drafted_along(engine: Engine, course: Course, block_size: int, count: int) -> Drafted:
    """Draft a block behind each of the course's first ``count`` tokens, nothing having been committed but the course, token by token."""
    root = prefill(engine, course.prompt, sampling=course.sampling)
    if root != course.tokens[0]:
        raise BackendError(f"the token after the prompt is {root}, but was {course.tokens[0]} before")
    depths, width = block_size - 1, min(MAX_CANDIDATES, engine.spec.vocab_size)
    shape = engine.backend.to_device(np.array([[depths, width, MAX_NODES - 1, 1]], np.int32), "i32")
    logits, candidates = [], []
    for _ in range(count):
        engine.begin_rounds(engine.block_rows(DeviceDraftRequest(depths, block_size)))
        for work in engine.work("draft", block_size, engine.length() + block_size, instead={"draft_shape": shape}):
            engine.backend.start(work)
        rows = engine.read("draft_logits").reshape(-1, engine.spec.vocab_size)[1:block_size]
        logits.append(rows.astype(np.float32, copy=False))
        tokens, log_probs = (engine.read(f"candidate_{name}")[0, :depths, :width] for name in ("tokens", "log_probs"))
        candidates.append(Candidates(tokens.astype(np.int32), log_probs.astype(np.float32)))
        engine.decode()
    return Drafted(block_size, tuple(logits), tuple(candidates))


# ---- trees --------------------------------------------------------------------------------------------------------------


def accepted(tokens: Array, log_probs: Array, budget: int, following: Sequence[int]) -> tuple[int, ...]:
    """The nodes, root first, that the target accepts of the tree over candidates [depths, width], when ``following`` are its tokens."""
    tree = build_tree(tokens, log_probs, budget)
    path = [0]
    for token in following:
        child = [node for node in range(1, tree.size + 1) if tree.parents[node] == path[-1] and tree.tokens[node - 1] == token]
        if not child:
            break
        path.append(child[0])
    return tuple(path)


def accepted_of(proposal: Candidates | DraftLogits, budget: int, following: Sequence[int]) -> tuple[int, ...]:
    """The same for a proposal from the host."""
    if not budget or not proposal.depths:
        return (0,)
    if isinstance(proposal, Candidates):
        return accepted(proposal.tokens, proposal.log_probs, budget, following)
    return accepted(*ranked_rows(proposal.logits, min(budget, MAX_CANDIDATES)), budget, following)


def to_stop(tokens: Sequence[int], stops: Container[int]) -> tuple[int, ...]:
    """``tokens`` up to the first of ``stops``, which is among them."""
    kept: list[int] = []
    for token in tokens:
        kept.append(token)
        if token in stops:
            break
    return tuple(kept)


@dataclass(frozen=True)
class Steps:
    """Of draft-tree decoding: tokens that each step commits, and its budget."""

    accepted: tuple[int, ...]
    budgets: tuple[int, ...]


def tree_steps(
    prompt: Sequence[int], truth: Sequence[int], drafter: Drafter, chooser: Budgets, block_size: int, stops: Container[int] = ()
) -> Steps:
    """The steps in which a ``drafter`` on the host leads to ``truth``, or to as much of it as ends with a stop."""
    known = 1
    lengths: list[int] = []
    budgets: list[int] = []
    while known < len(truth) and truth[known - 1] not in stops:
        depths = min(block_size - 1, len(truth) - known - 1)
        proposal = drafter.propose([*prompt, *truth[:known]], depths)
        assert not isinstance(proposal, DeviceDraftRequest), "the host does not know what the device drafts; KnownDrafter does"
        budgets.append(chooser.choose() if proposal.depths else 0)
        path = accepted_of(proposal, budgets[-1], truth[known:])
        if proposal.depths:
            chooser.observe(
                budgets[-1], path, proposal.log_probs(MAX_CANDIDATES) if isinstance(proposal, DraftLogits) else proposal.log_probs
            )
        lengths.append(len(path))
        known += len(to_stop(truth[known : known + len(path)], stops))
    return Steps(tuple(lengths), tuple(budgets))


# ---- rounds -------------------------------------------------------------------------------------------------------------


class Turns:
    """Budgets in turn, and what was observed of each round."""

    def __init__(self, budgets: Sequence[int]) -> None:
        self._budgets = itertools.cycle(budgets)
        self.nodes: list[tuple[int, ...]] = []
        self.log_probs: list[NDArray[np.float32] | None] = []
        self.budgets: list[int] = []

    def choose(self) -> int:
        return next(self._budgets)

    def observe(self, budget: int, nodes: Sequence[int], log_probs: NDArray[np.float32] | None) -> None:
        self.budgets.append(budget)
        self.nodes.append(tuple(nodes))
        self.log_probs.append(log_probs)


@dataclass(frozen=True)
class Ask:
    """How a course is decoded again: up to ``new_tokens``, or one of ``stops``, with ``ahead`` rounds started before results are read."""

    new_tokens: int
    block: DeviceDraftRequest | None
    ahead: int
    stops: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Expected:
    """What must come of it. ``accepted`` tokens, ``budgets`` and accepted ``nodes`` are those of each round that was read, ``started``
    counts those thrown away, too. ``units`` are (budget, context) of what must be recorded. ``emitted`` are the tokens shown, step by step,
    and ``begun`` counts the rounds that are started before each step is shown.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    budgets: tuple[int, ...]
    nodes: tuple[tuple[int, ...], ...]
    log_probs: tuple[Array | None, ...]
    started: int
    units: frozenset[tuple[int, int]]
    emitted: tuple[tuple[int, ...], ...]
    begun: tuple[int, ...]


def expected_rounds(
    course: Course, drafted: Drafted | None, ask: Ask, budgets: Sequence[int], chooser: Budgets, backend: Backend, max_context: int
) -> Expected:
    """Rounds of ``budgets`` as ``chooser`` chooses among them, in a context of ``max_context`` tokens.

    A round is started while no more than ``ahead`` run, all that run may end in full within the context, and, beside the one whose
    results are read next, as long as another token than theirs is wanted.
    """
    length, rows = len(course.prompt), ask.block.block_size if ask.block else 0
    limit, tokens = min(ask.new_tokens, max_context - length), list(course.tokens[:1])
    lengths: list[int] = []
    nodes: list[tuple[int, ...]] = []
    drafts: list[Array | None] = []
    emitted, begun = [tuple(tokens)], [0]
    started: list[int] = []
    units: set[tuple[int, int]] = set()

    def unit(budget: int, reach: int) -> tuple[int, int]:
        return budget, backend.recorded_context(reach + max(budget + 1, rows))

    if limit > 1 and tokens[0] not in ask.stops:
        units |= {unit(budget, length) for budget in budgets}
    while len(tokens) < limit and tokens[-1] not in ask.stops:
        while True:
            ahead = started[len(lengths) :]
            reach = length + sum(1 + _depths(ask.block, budget) for budget in ahead)
            if len(ahead) > ask.ahead or reach > max_context or (ahead and len(tokens) + len(ahead) >= limit):
                break
            started.append(chooser.choose())
            units.add(unit(started[-1], reach))
        budget, known = started[len(lengths)], length - len(course.prompt) + 1
        path, log_probs = _round(course, drafted, ask.block, budget, known)
        chooser.observe(budget, path, log_probs)
        nodes.append(path)
        drafts.append(log_probs)
        length += len(path)
        new = course.tokens[known : known + len(path)][: limit - len(tokens)]
        lengths.append(len(new))
        new = to_stop(new, ask.stops)
        tokens += new
        emitted.append(new)
        begun.append(len(started))
    done = tuple(started[: len(lengths)])
    return Expected(
        tuple(tokens), tuple(lengths), done, tuple(nodes), tuple(drafts), len(started), frozenset(units), tuple(emitted), tuple(begun)
    )  # fmt: skip


def _depths(block: DeviceDraftRequest | None, budget: int) -> int:
    return block.depths if block is not None and budget else 0


def _round(
    course: Course, drafted: Drafted | None, block: DeviceDraftRequest | None, budget: int, known: int
) -> tuple[tuple[int, ...], Array | None]:
    """A round behind ``known`` new tokens: its accepted nodes, and the draft's log-probabilities, float32 [depths, width]."""
    if not budget:
        return (0,), None
    assert drafted is not None and block is not None
    found, width = drafted.candidates[known - 1], min(budget, MAX_CANDIDATES, block.width or budget)
    log_probs = found.log_probs[: block.depths, :width]
    return accepted(found.tokens[: block.depths, :width], log_probs, budget, course.tokens[known:]), log_probs
