"""What the GPU backend decides before it calls the driver: data in, data out, so that it is tested without a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdgen.backends.base import Argument, Launch, Pointer

#: The first compute capability with clusters and with launches that may start before the one before them has ended.
OVERLAP_SINCE = (9, 0)
#: Contexts that launches are recorded for are multiples of this, and of an eighth of the next power of two.
CONTEXT_STEP = 1024
RESERVED_SMEM = 1024  #: bytes of shared memory that CUDA itself takes for each block
OPT_IN_SMEM = 48 * 1024  #: bytes of dynamic shared memory that a kernel has without asking


@dataclass(frozen=True)
class Shape:
    """A launch as the driver takes it. ``grid`` counts clusters where there are any; ``cluster`` is their blocks, None without them;
    ``block`` the threads of one block; ``early``: it may start before the launch before it has ended."""

    grid: tuple[int, int, int]
    cluster: int | None
    block: int
    smem: int
    early: bool


def blocks_of_cluster(capability: tuple[int, int], cluster: int) -> int:
    """How many blocks a kernel's threads are divided among: one where the GPU has no clusters."""
    return cluster if capability >= OVERLAP_SINCE else 1


def shape_of(launch: Launch, capability: tuple[int, int], blocks: int, waits_itself: bool, after_collective: bool) -> Shape:
    """``blocks`` is what ``blocks_of_cluster`` says. Only a kernel that waits by itself may start early, and none behind a collective,
    which gives no permission."""
    early = waits_itself and capability >= OVERLAP_SINCE and not after_collective
    return Shape(launch.grid, blocks if blocks > 1 else None, launch.block // blocks, launch.smem, early)


def scalar(arg: Argument) -> np.generic:
    """cuda.core passes a NumPy scalar's bytes as they are, so its type has to be the parameter's."""
    return np.uint64(address_of(arg)) if isinstance(arg, Pointer) else np.int32(arg)


def address_of(pointer: Pointer) -> int:
    return pointer.array.address + pointer.offset


def recorded_context(context: int) -> int:
    """The context that launches are recorded for: ``context`` rounded up, more coarsely where it is longer."""
    step = max(CONTEXT_STEP, 1 << max(0, (context - 1).bit_length() - 3))
    return -(-context // step) * step


def needs_opt_in(dynamic_smem: int) -> bool:
    """Whether the driver must be asked before a kernel may have so many bytes of dynamic shared memory."""
    return dynamic_smem > OPT_IN_SMEM


def carveout(blocks: int, smem: int, of_processor: int) -> int:
    """Percent of a multiprocessor's ``of_processor`` bytes for shared memory: what ``blocks`` of ``smem`` bytes need, rounded up, but at
    least half."""
    needed = blocks * (smem + RESERVED_SMEM)
    return min(100, max(50, -(-100 * needed // of_processor)))


def address_table(addresses: Sequence[int]) -> npt.NDArray[np.int32]:
    """i32 [ranks, 2]: each address, the low word first."""
    return np.array(addresses, np.uint64).view(np.int32).reshape(-1, 2)


def seconds(milliseconds: float) -> float:
    """What events measure between them, in seconds."""
    return milliseconds / 1e3


def elements(shape: Sequence[int], rows: int | None = None) -> tuple[tuple[int, ...], int]:
    """The shape of an array's first ``rows``, all of them with None, and how many elements that is."""
    first = tuple(shape) if rows is None else (min(rows, shape[0]), *shape[1:])
    return first, math.prod(first)


class Ring:
    """Which of a mailbox's slots is posted to next and which is taken: in turn, and no more wait than there are slots."""

    def __init__(self, slots: int) -> None:
        self._slots, self._posted, self._taken = slots, 0, 0

    def post(self) -> int:
        """Raises ValueError when every slot waits to be taken."""
        if self._posted - self._taken == self._slots:
            raise ValueError("the mailbox is full: take before you post again")
        self._posted += 1
        return (self._posted - 1) % self._slots

    def take(self) -> int:
        """Raises IndexError when nothing waits."""
        if self._taken == self._posted:
            raise IndexError("nothing was posted that was not taken")
        self._taken += 1
        return (self._taken - 1) % self._slots

    def clear(self) -> None:
        self._taken = self._posted
