"""The decoding loops over an engine: plain (AR), with a draft tree (DDTree), and of rounds that the host starts ahead of their results.
They give the same tokens, greedy or sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from kdgen.drafters.base import BlockDraft, Candidates, Drafter, DraftLogits, Proposal
from kdgen.drafters.dflash import DFlashDrafter
from kdgen.errors import BackendError, KdgenError
from kdgen.plan.ir import MAX_CANDIDATES, MAX_NODES, MAX_PATH, Plan
from kdgen.runtime.budget import Budgets, FixedBudget, budget_for
from kdgen.runtime.engine import Engine, Verified
from kdgen.runtime.rounds import Rounds, budgets_for, step_costs
from kdgen.spec.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Decoded:
    """New tokens (a final stop token included) and what they cost.

    ``acceptance_lengths`` has one entry a verify step, the root counted; it is empty for plain decoding. ``target_forwards`` counts
    decode or verify steps, not the prefill. ``prepare_seconds`` went into recording rounds and measuring them. ``budgets`` has each
    draft tree's, as ``acceptance_lengths``.
    """

    tokens: tuple[int, ...]
    acceptance_lengths: tuple[int, ...]
    target_forwards: int
    prefill_seconds: float
    decode_seconds: float
    prepare_seconds: float = 0.0
    budgets: tuple[int, ...] = ()

    @property
    def tokens_per_forward(self) -> float:
        """The first token comes from the prompt's forward, which is not counted."""
        return (len(self.tokens) - 1) / self.target_forwards if self.target_forwards else 0.0


#: Called with the new tokens of each step as they are decided, the first after the prompt; a loop ends with whatever it raises.
Emit = Callable[[tuple[int, ...]], None]


#: Makes what chooses each round's budget, when the prompt is there; called with the token after it.
Choose = Callable[[int], Budgets]


def through_stop(tokens: Sequence[int], stops: Container[int]) -> tuple[int, ...]:
    """``tokens`` up to the first of ``stops``, which is kept: a tree may go on behind it."""
    return tuple(tokens[: next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))])


def same_rows(plain: NDArray[np.generic], drafted: NDArray[np.generic]) -> bool:
    """Whether cache rows [layers, length, width] are equal by bits as far as ``plain`` goes: a tree that holds a stop token may have
    committed more behind it."""
    return plain.tobytes() == drafted[:, : plain.shape[1]].tobytes()


def _ignore(tokens: tuple[int, ...]) -> None:
    """Emits nothing."""


class Target(Protocol):
    """What the loops need of an engine."""

    @property
    def plan(self) -> Plan: ...

    def reset(self, sequence: int = 0, sampling: Sampling = GREEDY) -> None: ...

    def prefill(self, tokens: Sequence[int]) -> int: ...

    def decode(self) -> int: ...

    def verify(self, proposal: Proposal, budget: int) -> Verified: ...


def prefill(engine: Target, prompt: Sequence[int], chunk: int | None = None, sampling: Sampling = GREEDY) -> int:
    """Reset, commit ``prompt`` in chunks and return the first new token.

    Raises KdgenError for an empty prompt or one that fills the context.
    """
    limits = engine.plan.limits
    if not prompt:
        raise KdgenError("the prompt is empty: give at least one token id")
    if len(prompt) >= limits.max_context:
        raise KdgenError(f"a prompt of {len(prompt)} tokens leaves no room in a context of {limits.max_context}: raise --context")
    chunk = min(chunk or limits.max_tokens, limits.max_tokens)
    engine.reset(sampling=sampling)
    token = -1
    for start in range(0, len(prompt), chunk):
        token = engine.prefill(prompt[start : start + chunk])
    return token


def decode_plain(
    engine: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    stop: Iterable[int] = (),
    chunk: int | None = None,
    sampling: Sampling = GREEDY,
    emit: Emit = _ignore,
) -> Decoded:
    """Decode ``max_new_tokens`` tokens after ``prompt`` (token ids), or up to the first of ``stop``, which is kept; one token a forward.

    The engine starts anew with sequence 0. ``chunk`` bounds the prompt tokens of a forward; ``emit`` is called with each step's tokens.
    Raises KdgenError for an empty prompt, one that fills the context, or no tokens asked for.
    """
    stops, limit = frozenset(stop), _limit(engine, prompt, max_new_tokens)
    began = time.perf_counter()
    tokens = [prefill(engine, prompt, chunk, sampling)]
    ready = time.perf_counter()
    emit((tokens[0],))
    forwards = 0
    while len(tokens) < limit and tokens[-1] not in stops:
        tokens.append(engine.decode())
        emit((tokens[-1],))
        forwards += 1
    return Decoded(tuple(tokens), (), forwards, ready - began, time.perf_counter() - ready)


def decode_tree(
    engine: Target,
    prompt: Sequence[int],
    max_new_tokens: int,
    drafter: Drafter,
    budget: int | Choose,
    block_size: int = 8,
    stop: Iterable[int] = (),
    chunk: int | None = None,
    sampling: Sampling = GREEDY,
    emit: Emit = _ignore,
) -> Decoded:
    """A draft tree of at most ``budget`` nodes a forward, at most ``block_size`` - 1 deep (DDTree, arXiv 2604.12989).

    The drafter may be anywhere, so the host goes from step to step. Raises KdgenError for a block size outside 2 … 16 or a budget
    outside 0 … 63.
    """
    if not 2 <= block_size <= MAX_PATH:
        raise KdgenError(f"a block size lies between 2 and {MAX_PATH}, not at {block_size}")
    if isinstance(budget, int) and not 0 <= budget < MAX_NODES:
        raise KdgenError(f"a budget lies between 0 and {MAX_NODES - 1}, not at {budget}")
    stops, limit = frozenset(stop), _limit(engine, prompt, max_new_tokens)
    began = time.perf_counter()
    tokens = [prefill(engine, prompt, chunk, sampling)]
    ready = time.perf_counter()
    emit((tokens[0],))
    preparing = time.perf_counter()
    chooser = FixedBudget(budget) if isinstance(budget, int) else budget(tokens[0])
    prepared = time.perf_counter()
    lengths: list[int] = []
    budgets: list[int] = []
    while len(tokens) < limit and tokens[-1] not in stops:
        # a deeper tree than the tokens still wanted would be cut away again
        depths = min(block_size - 1, limit - len(tokens) - 1)
        proposal = drafter.propose([*prompt, *tokens], depths)
        budgets.append(chooser.choose() if proposal.depths else 0)
        step = engine.verify(proposal, budgets[-1])
        if proposal.depths:  # a drafter with nothing to say shows nothing
            chooser.observe(budgets[-1], [row - step.rows[0] for row in step.rows], _log_probs(proposal))
        lengths.append(len(step.accepted))
        new = through_stop((*step.accepted[1:], step.next_token), stops)
        tokens += new
        emit(new)
    seconds = time.perf_counter() - prepared
    return Decoded(tuple(tokens), tuple(lengths), len(lengths), ready - began, seconds, prepared - preparing, tuple(budgets))


def _log_probs(proposal: Proposal) -> NDArray[np.float32] | None:
    """What a drafter on the host expects; None where it is not on the host."""
    if isinstance(proposal, Candidates):
        return proposal.log_probs
    return proposal.log_probs(MAX_CANDIDATES) if isinstance(proposal, DraftLogits) else None


def decode_rounds(
    rounds: Rounds,
    prompt: Sequence[int],
    max_new_tokens: int,
    choose: Choose,
    stop: Iterable[int] = (),
    chunk: int | None = None,
    sampling: Sampling = GREEDY,
    emit: Emit = _ignore,
    ahead: int | None = None,
) -> Decoded:
    """Rounds with the drafter on the device, or plain ones, of which ``ahead`` (None: as many as the backend gains from) are started
    before the results of the last are read.

    Rounds started behind the last token leave no trace: the engine ends as plain decoding does, and they are not counted.
    """
    engine = rounds.engine
    stops, limit = frozenset(stop), _limit(engine, prompt, max_new_tokens)
    ahead = engine.backend.rounds_ahead if ahead is None else ahead
    began = time.perf_counter()
    tokens = [prefill(engine, prompt, chunk, sampling)]
    ready = time.perf_counter()
    emit((tokens[0],))
    if limit == 1 or tokens[0] in stops:
        return Decoded(tuple(tokens), (), 0, ready - began, 0.0)
    preparing = time.perf_counter()
    rounds.begin(len(prompt))
    chooser = choose(tokens[0])
    prepared = time.perf_counter()
    lengths: list[int] = []
    budgets: list[int] = []
    try:
        while len(tokens) < limit and tokens[-1] not in stops:
            while rounds.running <= ahead and rounds.may_start and (not rounds.running or len(tokens) + rounds.running < limit):
                rounds.start(chooser.choose())
            done = rounds.finish()
            chooser.observe(done.budget, done.nodes, done.log_probs)
            new = done.tokens[: limit - len(tokens)]
            lengths.append(len(new))
            budgets.append(done.budget)
            new = through_stop(new, stops)
            tokens += new
            emit(new)
    except BackendError:
        raise  # of a device that failed nothing can be put right
    except BaseException:
        rounds.end(len(prompt) + len(tokens) - 1, tokens[-1])
        raise
    seconds = time.perf_counter() - prepared
    rounds.end(len(prompt) + len(tokens) - 1, tokens[-1])
    trees = (tuple(lengths), tuple(budgets)) if any(rounds.budgets) else ((), ())
    return Decoded(tuple(tokens), trees[0], len(lengths), ready - began, seconds, prepared - preparing, trees[1])


class Decoder:
    """Decodes over one engine the fastest way there is, and keeps the rounds that it recorded and measured."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._rounds: dict[tuple[BlockDraft | None, tuple[int, ...]], Rounds] = {}
        self._step_costs: dict[int, float] = {}

    def decode(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        drafter: Drafter | None,
        budget: int | Literal["auto"],
        block_size: int = 8,
        stop: Iterable[int] = (),
        chunk: int | None = None,
        sampling: Sampling = GREEDY,
        emit: Emit = _ignore,
    ) -> Decoded:
        """Rounds where nothing is drafted or the drafter is on the device, steps where the host drafts; ``auto`` measures what pays."""
        engine, auto = self._engine, budget == "auto"
        if drafter is not None and not isinstance(drafter, DFlashDrafter):
            steps = self._choose_steps if budget == "auto" else budget
            return decode_tree(engine, prompt, max_new_tokens, drafter, steps, block_size, stop, chunk, sampling, emit)
        block = drafter.propose(prompt, block_size - 1) if drafter else None
        kind = (block, budgets_for(block) if budget == "auto" else (budget if block else 0,))
        if kind not in self._rounds:
            self._rounds[kind] = Rounds(engine, *kind)
        rounds = self._rounds[kind]

        def choose(root: int) -> Budgets:
            return budget_for(rounds.costs(root)) if auto and block else FixedBudget(rounds.budgets[0])

        return decode_rounds(rounds, prompt, max_new_tokens, choose, stop, chunk, sampling, emit)

    def _choose_steps(self, root: int) -> Budgets:
        if not self._step_costs:
            self._step_costs = step_costs(self._engine, root)
        return budget_for(self._step_costs)


def _limit(engine: Target, prompt: Sequence[int], max_new_tokens: int) -> int:
    """New tokens that fit: prompt and output together fill the context at most."""
    if max_new_tokens < 1:
        raise KdgenError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    return min(max_new_tokens, engine.plan.limits.max_context - len(prompt))
