"""The inboxes of ranks: simulated ones, in which a single process that runs a kernel as rank 1 has the other ranks' words, and a check of a
rank's own after many steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdgen.backends.base import DeviceArray
from kdgen.plan.memory import rounds_of
from kdgen.runtime.engine import Engine
from kdgen.verify.kernels.harness import SURPLUS_ROWS, Harness

Array = NDArray[Any]

RANK = 1
SPARE_ROWS = 3  #: rows of a step beyond those that it has, as a host's bound may have
_ROUND = 6  #: of the rows so far


def _words(values: Array, round_: int) -> Array:
    """Four-byte values as words of a round: i32 [..., 2]."""
    return np.stack([values.view(np.int32), np.full(values.shape, round_, np.int32)], axis=-1)


class Inboxes:
    """Every rank's inbox [turn, from rank, rows, width] of words of old rounds; ``receive`` puts new ones into this rank's."""

    def __init__(self, harness: Harness, ranks: int, width: int, count: int, blocks: int) -> None:
        """``count``: rows of the step. A row has the rounds of ``blocks`` blocks."""
        self._harness, self._count = harness, count
        self.rows = count + SPARE_ROWS
        stale = harness.rng.integers(-9, 9, (ranks, 2, ranks, self.rows, width)).astype(np.int32)
        self._before = _words(stale, _ROUND - 1)
        self._turn = (_ROUND + 1) % 2
        self._rounds = np.full((count + SURPLUS_ROWS, blocks), _ROUND, np.int32)  # a block may look at its row's before it knows of rows

    def receive(self, parts: Array, mine: bool = False) -> Inboxes:
        """``parts`` [ranks, count, width] is what each rank sends this one in the next round, this rank included if ``mine``."""
        others = [rank for rank in range(len(parts)) if mine or rank != RANK]
        self._before[RANK, self._turn, others, : self._count] = _words(parts[others], _ROUND + 1)
        return self

    def arguments(self) -> dict[str, DeviceArray | int]:
        """The inboxes' addresses, this rank, the inboxes' rows and the rounds, by the names of kernels' parameters."""
        self._arrays = [self._harness.input(each) for each in self._before]
        addresses = np.array([array.address for array in self._arrays], np.uint64)
        self._given = self._harness.input(self._rounds)
        inboxes = self._harness.input(addresses.view(np.int32).reshape(-1, 2))
        return {"inboxes": inboxes, "my_rank": RANK, "rows": self.rows, "rounds": self._given}

    def check(self, sent: Array | None, to: Array | None = None) -> None:
        """Every other rank has got ``sent`` [count, width] in its place, or those of it whose column ``to`` [ranks, width] says so;
        nothing else has changed, and the blocks that ran know it."""
        for rank, array in enumerate(self._arrays):
            expected = self._before[rank].copy()
            if rank != RANK and sent is not None:
                columns = np.ones(sent.shape[1], bool) if to is None else to[rank]
                expected[self._turn, RANK, : self._count, columns] = _words(sent, _ROUND + 1)[:, columns].swapaxes(0, 1)
            self._harness.findings.equal(f"inbox of rank {rank}", self._harness.read(array), expected)
        rounds = self._rounds.copy()
        rounds[: self._count] += 1
        self._harness.findings.equal("rounds", self._harness.read(self._given), rounds)

    def sent(self, width: int) -> Array:
        """The first ``width`` floats of each row, which every rank has got from this one; nothing else has changed, the round neither."""
        after = [self._harness.read(array) for array in self._arrays]
        place = (self._turn, RANK, slice(0, self._count), slice(0, width))
        values: Array = np.ascontiguousarray(after[0][place][..., 0]).view(np.float32)
        for rank, got in enumerate(after):
            expected = self._before[rank].copy()
            expected[place] = _words(values, _ROUND + 1)
            self._harness.findings.equal(f"inbox of rank {rank}", got, expected)
        self._harness.findings.equal("rounds", self._harness.read(self._given), self._rounds)
        return values


def words_out_of_place(engine: Engine) -> str:
    """What is wrong with the words that a rank's steps, whatever their rows, have left in its inboxes; empty when nothing is.

    A word of a row's round lies in that round's turn and in that row. One that lies elsewhere may be taken for another row's, or
    overwritten before it is read, depending on which rank is faster.
    """
    for inbox in (each for each in engine.plan.buffers if each.role == "inbox"):
        rounds = engine.read(inbox.name)[..., 1]  # [turn, from rank, rows, width]
        last = engine.read(rounds_of(inbox.name)).max(axis=1)
        turn = np.arange(2).reshape(2, 1, 1, 1)
        if not rounds.any():
            return f"{inbox.name} holds no word"
        if wrong := int(((rounds != 0) & ((rounds % 2 != turn) | (rounds > last[:, None]))).sum()):
            return f"{wrong} words in {inbox.name} are in another row or turn than their round's"
    return ""
