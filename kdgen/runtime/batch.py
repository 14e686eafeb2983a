"""Several requests decoded together over one engine, each exactly as it would be alone; they join and leave between steps.

A step is at most two forwards: one of the prompts' next chunks, one of everything that decodes, with trees or without. Which
requests share a step depends on when they came, and changes no bit of any of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from kdgen.plan.ir import Plan
from kdgen.runtime.engine import Draft, Verified
from kdgen.runtime.request import Output, Request
from kdgen.spec.sampling import GREEDY, Sampling


@dataclass(frozen=True)
class Finished:
    """A request's new tokens, its stop token included. ``forwards`` counts those that decoded, not the prompt's.

    The cache of its ``sequence`` keeps what it holds until the next step.
    """

    number: int
    sequence: int
    tokens: tuple[int, ...]
    forwards: int


class BatchEngine(Protocol):
    """What a batch needs of an engine."""

    @property
    def plan(self) -> Plan: ...

    def reset(self, sequence: int = 0, sampling: Sampling = GREEDY) -> None: ...

    def prefill_many(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, ...]: ...

    def decode_many(self, sequences: Sequence[int]) -> tuple[int, ...]: ...

    def verify_many(self, drafts: Sequence[Draft]) -> tuple[Verified, ...]: ...


@dataclass
class _Running:
    """A request that has a sequence of the engine. It decodes once its whole prompt is ``prefilled``."""

    number: int
    output: Output
    prefilled: int = 0
    forwards: int = 0

    @property
    def request(self) -> Request:
        return self.output.request

    @property
    def decodes(self) -> bool:
        return self.prefilled == len(self.request.prompt)

    def draft(self, sequence: int) -> Draft:
        """Its part of a verify step."""
        proposal = self.output.proposal()
        return Draft(sequence, proposal, self.request.budget if proposal.depths else 0)

    def finish(self, sequence: int) -> Finished:
        return Finished(self.number, sequence, tuple(self.output.tokens), self.forwards)


class Batch:
    """Requests over the engine's ``limits.max_sequences`` sequences; those beyond them wait, first come, first served."""

    def __init__(self, engine: BatchEngine) -> None:
        self._engine = engine
        self._waiting: deque[_Running] = deque()
        self._running: dict[int, _Running] = {}  # by sequence
        self._count = 0

    def add(self, request: Request) -> int:
        """Queue a request; returns its number. Raises KdgenError when its prompt fills the context."""
        self._waiting.append(_Running(self._count, Output(request, self._engine.plan.limits.max_context)))
        self._count += 1
        return self._count - 1

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def step(self) -> tuple[Finished, ...]:
        """Advance every running request; returns those that are done, whose sequences are free from now on."""
        self._admit()
        decoding = [sequence for sequence, running in self._running.items() if running.decodes]
        self._prefill()
        self._decode(decoding)
        done = [sequence for sequence, running in self._running.items() if running.decodes and running.output.done]
        return tuple(self._running.pop(sequence).finish(sequence) for sequence in done)

    def run(self) -> Iterator[Finished]:
        """Step until nothing is left to do."""
        while not self.idle:
            yield from self.step()

    def _admit(self) -> None:
        for sequence in range(self._engine.plan.limits.max_sequences):
            if self._waiting and sequence not in self._running:
                self._running[sequence] = self._waiting.popleft()
                self._engine.reset(sequence, self._running[sequence].request.sampling)

    def _prefill(self) -> None:
        """The next chunk of every prompt, as far as one forward has room."""
        room = self._engine.plan.limits.max_tokens
        chunks: list[tuple[int, Sequence[int]]] = []
        for sequence, running in self._running.items():
            prompt, start = running.request.prompt, running.prefilled
            part = prompt[start : start + min(running.request.chunk or room, room)]
            if part:
                chunks.append((sequence, part))
                room -= len(part)
        if not chunks:
            return
        for (sequence, chunk), token in zip(chunks, self._engine.prefill_many(chunks), strict=True):
            running = self._running[sequence]
            running.prefilled += len(chunk)
            if running.decodes:
                running.output.add((token,))

    def _decode(self, sequences: Sequence[int]) -> None:
        running = [self._running[sequence] for sequence in sequences]
        for each in running:
            each.forwards += 1
        if all(each.request.drafter is None for each in running):
            if running:
                for each, token in zip(running, self._engine.decode_many(sequences), strict=True):
                    each.output.add((token,))
            return
        drafts = [each.draft(sequence) for each, sequence in zip(running, sequences, strict=True)]
        for each, step in zip(running, self._engine.verify_many(drafts), strict=True):
            each.output.add((*step.accepted[1:], step.next_token))


def decode_together(engine: BatchEngine, requests: Iterable[Request]) -> tuple[Finished, ...]:
    """Every request's result, in the order given."""
    batch = Batch(engine)
    for request in requests:
        batch.add(request)
    return tuple(sorted(batch.run(), key=lambda finished: finished.number))
