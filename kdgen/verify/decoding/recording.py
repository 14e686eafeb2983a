"""Engines that record, for every committed token, the bits of its logits and cache row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kdgen.drafters.base import Proposal
from kdgen.plan.ir import Plan
from kdgen.runtime.engine import Draft, Engine, Verified
from kdgen.spec.sampling import GREEDY, Sampling


class RecordingEngine:
    """A ``decode.Target`` over an engine. ``logits`` has one float32 row [vocab_size] a committed token, in order."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.logits: list[NDArray[np.float32]] = []

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    def reset(self, sequence: int = 0, sampling: Sampling = GREEDY) -> None:
        self.engine.reset(0, sampling)
        self.logits = []

    def prefill(self, tokens: Sequence[int]) -> int:
        token = self.engine.prefill(tokens, every_logit=True)
        self.logits += list(self.engine.logits(len(tokens)))
        return token

    def decode(self) -> int:
        token = self.engine.decode()
        self.logits += list(self.engine.logits(1))
        return token

    def verify(self, proposal: Proposal, budget: int) -> Verified:
        step = self.engine.verify(proposal, budget)
        self.logits += list(self.engine.logits(max(step.rows) + 1)[list(step.rows)])
        return step

    def cache_rows(self) -> NDArray[np.generic]:
        """Committed cache rows, [layers, length, cache_row_dim]."""
        return self.engine.cache_rows()


class RecordingSequences:
    """A ``batch.Target`` over an engine. ``logits[sequence]`` has one float32 row [vocab_size] a committed token, in order.

    Every other prefill computes logits of its chunks' last rows alone; those of the others are None.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.logits: list[list[NDArray[np.float32] | None]] = [[] for _ in range(engine.plan.limits.max_sequences)]
        self._every = False

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    def reset(self, sequence: int = 0, sampling: Sampling = GREEDY) -> None:
        self.engine.reset(sequence, sampling)
        self.logits[sequence] = []

    def prefill_many(self, chunks: Sequence[tuple[int, Sequence[int]]]) -> tuple[int, ...]:
        self._every = not self._every
        roots = self.engine.prefill_many(chunks, self._every)
        counts = [len(tokens) if self._every else 1 for _, tokens in chunks]
        rows = iter(self.engine.logits(sum(counts)))
        for (sequence, tokens), count in zip(chunks, counts, strict=True):
            self.logits[sequence] += [None] * (len(tokens) - count) + [next(rows) for _ in range(count)]
        return roots

    def decode_many(self, sequences: Sequence[int]) -> tuple[int, ...]:
        roots = self.engine.decode_many(sequences)
        for sequence, row in zip(sequences, self.engine.logits(len(sequences)), strict=True):
            self.logits[sequence].append(row)
        return roots

    def verify_many(self, drafts: Sequence[Draft]) -> tuple[Verified, ...]:
        steps = self.engine.verify_many(drafts)
        rows = self.engine.logits(max(row for step in steps for row in step.rows) + 1)
        for draft, step in zip(drafts, steps, strict=True):
            self.logits[draft.sequence] += list(rows[list(step.rows)])
        return steps

    def cache_rows(self, sequence: int) -> NDArray[np.generic]:
        """Committed cache rows, [layers, length, cache_row_dim]."""
        return self.engine.cache_rows(sequence)


def differing_bits(a: NDArray[np.generic], b: NDArray[np.generic]) -> int:
    """How many elements of two equally shaped arrays differ in their bits (so that -0 is not 0, and a NaN equals itself)."""
    word = {2: np.uint16, 4: np.uint32, 8: np.uint64}[a.dtype.itemsize]
    return int(np.count_nonzero(np.ascontiguousarray(a).view(word) != np.ascontiguousarray(b).view(word)))
