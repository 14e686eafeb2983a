"""The two decoding loops over an engine: plain (AR) and with a draft tree (DDTree). They give the same tokens, greedy or sampled."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from kdgen.drafters.base import Drafter, Proposal
from kdgen.engine import Verified
from kdgen.errors import KdgenError
from kdgen.plan.ir import MAX_NODES, MAX_PATH, Plan
from kdgen.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Decoded:
    """New tokens (a final stop token included) and what they cost.

    ``acceptance_lengths`` has one entry a verify step, the root counted; it is empty for plain decoding. ``target_forwards`` counts
    decode or verify steps, not the prefill.
    """

    tokens: tuple[int, ...]
    acceptance_lengths: tuple[int, ...]
    target_forwards: int
    prefill_seconds: float
    decode_seconds: float


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


def _limit(engine: Target, prompt: Sequence[int], max_new_tokens: int) -> int:
    """New tokens that fit: prompt and output together fill the context at most."""
    if max_new_tokens < 1:
        raise KdgenError(f"max_new_tokens must be at least 1, not {max_new_tokens}")
    return min(max_new_tokens, engine.plan.limits.max_context - len(prompt))
