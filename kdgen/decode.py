"""The decoding loops over an engine: plain (AR), with a draft tree (DDTree), and of rounds that the host starts ahead of their results.
They give the same tokens, greedy or sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kdgen.budget import Budgets
from kdgen.drafters.base import Drafter, Proposal
from kdgen.engine import Verified
from kdgen.errors import BackendError, KdgenError
from kdgen.plan.ir import MAX_NODES, MAX_PATH, Plan
from kdgen.rounds import Rounds
from kdgen.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Decoded:
    """New tokens (a final stop token included) and what they cost.

    ``acceptance_lengths`` has one entry a verify step, the root counted; it is empty for plain decoding. ``target_forwards`` counts
    decode or verify steps, not the prefill. ``prepare_seconds`` went into recording rounds and measuring them.
    """

    tokens: tuple[int, ...]
    acceptance_lengths: tuple[int, ...]
    target_forwards: int
    prefill_seconds: float
    decode_seconds: float
    prepare_seconds: float = 0.0


#: Called with the new tokens of each step as they are decided, the first after the prompt; a loop ends with whatever it raises.
Emit = Callable[[tuple[int, ...]], None]


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
    """One token a forward."""
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
    budget: int,
    block_size: int = 8,
    stop: Iterable[int] = (),
    chunk: int | None = None,
    sampling: Sampling = GREEDY,
    emit: Emit = _ignore,
) -> Decoded:
    """A draft tree of at most ``budget`` nodes a forward, at most ``block_size`` - 1 deep (DDTree, arXiv 2604.12989).

    Raises KdgenError for a block size outside 2 … 16 or a budget outside 0 … 63.
    """
    if not 2 <= block_size <= MAX_PATH:
        raise KdgenError(f"a block size lies between 2 and {MAX_PATH}, not at {block_size}")
    if not 0 <= budget < MAX_NODES:
        raise KdgenError(f"a budget lies between 0 and {MAX_NODES - 1}, not at {budget}")
    stops, limit = frozenset(stop), _limit(engine, prompt, max_new_tokens)
    began = time.perf_counter()
    tokens = [prefill(engine, prompt, chunk, sampling)]
    ready = time.perf_counter()
    emit((tokens[0],))
    lengths: list[int] = []
    while len(tokens) < limit and tokens[-1] not in stops:
        # a deeper tree than the tokens still wanted would be cut away again
        depths = min(block_size - 1, limit - len(tokens) - 1)
        step = engine.verify(drafter.propose([*prompt, *tokens], depths), budget)
        lengths.append(len(step.accepted))
        new = (*step.accepted[1:], step.next_token)
        end = next((i + 1 for i, token in enumerate(new) if token in stops), len(new))  # a tree may go on behind a stop
        tokens += new[:end]
        emit(new[:end])
    return Decoded(tuple(tokens), tuple(lengths), len(lengths), ready - began, time.perf_counter() - ready)


def decode_rounds(
    rounds: Rounds,
    prompt: Sequence[int],
    max_new_tokens: int,
    budgets: Callable[[int], Budgets],
    stop: Iterable[int] = (),
    chunk: int | None = None,
    sampling: Sampling = GREEDY,
    emit: Emit = _ignore,
    ahead: int | None = None,
) -> Decoded:
    """Rounds with the drafter on the device, or plain ones, of which ``ahead`` (None: as many as the backend gains from) are started
    before the results of the last are read.

    ``budgets`` makes what chooses each round's budget, given the root token behind the prompt. Rounds started behind the last token
    leave no trace: the engine ends as plain decoding does, and they are not counted.
    """
    engine = rounds.engine
    stops, limit = frozenset(stop), _limit(engine, prompt, max_new_tokens)
    ahead = engine.backend.rounds_ahead if ahead is None else ahead
    began = time.perf_counter()
    tokens = [prefill(engine, prompt, chunk, sampling)]
    ready = time.perf_counter()
    emit((tokens[0],))
    preparing = time.perf_counter()
    rounds.begin(len(prompt))
    chooser = budgets(tokens[0])
    prepared = time.perf_counter()
    lengths: list[int] = []
    try:
        while len(tokens) < limit and tokens[-1] not in stops:
            while rounds.running <= ahead and rounds.may_start and (not rounds.running or len(tokens) + rounds.running < limit):
                rounds.start(chooser.choose())
            done = rounds.finish()
            chooser.observe(done.budget, done.nodes, done.log_probs)
            new = done.tokens[: limit - len(tokens)]
            lengths.append(len(new))
            end = next((i + 1 for i, token in enumerate(new) if token in stops), len(new))
            tokens += new[:end]
            emit(new[:end])
    except BackendError:
        raise  # of a device that failed nothing can be put right
    except BaseException:
        rounds.end(len(prompt) + len(tokens) - 1, tokens[-1])
        raise
    rounds.end(len(prompt) + len(tokens) - 1, tokens[-1])
    drafted = any(rounds.budgets)
    decode_seconds = time.perf_counter() - prepared
    return Decoded(tuple(tokens), tuple(lengths) if drafted else (), len(lengths), ready - began, decode_seconds, prepared - preparing)


def _limit(engine: Target, prompt: Sequence[int], max_new_tokens: int) -> int:
    """New tokens that fit: prompt and output together fill the context at most."""
    if max_new_tokens < 1:
        raise KdgenError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    return min(max_new_tokens, engine.plan.limits.max_context - len(prompt))
