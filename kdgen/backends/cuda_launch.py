"""The GPU backend's decisions before it calls the driver. They are pure functions, so that tests need no GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdgen.backends.base import Argument, Launch, Pointer

#: The first compute capability with clusters, and with launches that may start before the previous one has ended.
OVERLAP_SINCE = (9, 0)
#: Launches are recorded for contexts that are multiples of this and of an eighth of the next power of two.
CONTEXT_STEP = 1024
RESERVED_SMEM = 1024  #: bytes of shared memory that CUDA reserves for each block
OPT_IN_SMEM = 48 * 1024  #: bytes of dynamic shared memory that a kernel may use without setting an attribute


@dataclass(frozen=True)
class Shape:
    """The driver's arguments for a launch. ``cluster`` is the number of blocks in a cluster, or None; with clusters, ``grid`` counts
    them. ``block`` is the number of threads in a block. ``early`` lets the launch start before the previous one has ended."""

    grid: tuple[int, int, int]
    cluster: int | None
    block: int
    smem: int
    early: bool


def blocks_of_cluster(capability: tuple[int, int], cluster: int) -> int:
    """The number of blocks among which a kernel's threads are divided: 1 if the GPU has no clusters."""
    return cluster if capability >= OVERLAP_SINCE else 1


def shape_of(launch: Launch, capability: tuple[int, int], blocks: int, waits_itself: bool, after_collective: bool) -> Shape:
    """The driver's arguments for ``launch``; ``blocks`` is the result of ``blocks_of_cluster``. Only a kernel that executes
    griddepcontrol.wait may start early, and none after a collective, which never executes griddepcontrol.launch_dependents."""
    early = waits_itself and capability >= OVERLAP_SINCE and not after_collective
    return Shape(launch.grid, blocks if blocks > 1 else None, launch.block // blocks, launch.smem, early)


def scalar(arg: Argument) -> np.generic:
    """``arg`` as a NumPy scalar of the parameter's type, because cuda.core passes its bytes unchanged."""
    return np.uint64(address_of(arg)) if isinstance(arg, Pointer) else np.int32(arg)


def address_of(pointer: Pointer) -> int:
    return pointer.array.address + pointer.offset


def recorded_context(context: int) -> int:
    """The context for which launches are recorded: ``context`` rounded up, more coarsely the longer it is."""
    step = max(CONTEXT_STEP, 1 << max(0, (context - 1).bit_length() - 3))
    return -(-context // step) * step


def needs_opt_in(dynamic_smem: int) -> bool:
    """Whether a kernel needs an attribute set before it may use this many bytes of dynamic shared memory."""
    return dynamic_smem > OPT_IN_SMEM


def carveout(blocks: int, smem: int, of_processor: int) -> int:
    """The percentage of a multiprocessor's ``of_processor`` bytes to use as shared memory: as much as ``blocks`` blocks of ``smem`` bytes
    need, rounded up, but at least half."""
    needed = blocks * (smem + RESERVED_SMEM)
    return min(100, max(50, -(-100 * needed // of_processor)))


def address_table(addresses: Sequence[int]) -> npt.NDArray[np.int32]:
    """i32 [ranks, 2]: each address, the low word first."""
    return np.array(addresses, np.uint64).view(np.int32).reshape(-1, 2)


def seconds(milliseconds: float) -> float:
    """The time between two events, from CUDA's milliseconds to seconds."""
    return milliseconds / 1e3


def elements(shape: Sequence[int], rows: int | None = None) -> tuple[tuple[int, ...], int]:
    """The shape of an array's first ``rows`` (None: of the whole array), and its number of elements."""
    first = tuple(shape) if rows is None else (min(rows, shape[0]), *shape[1:])
    return first, math.prod(first)


class Ring:
    """The order in which a mailbox's slots are posted and taken: in turn, at most as many waiting as there are slots."""

    def __init__(self, slots: int) -> None:
        self._slots, self._posted, self._taken = slots, 0, 0

    def post(self) -> int:
        """The slot to post to. Raises ValueError when all slots wait to be taken."""
        if self._posted - self._taken == self._slots:
            raise ValueError("the mailbox is full: take a copy before posting another")
        self._posted += 1
        return (self._posted - 1) % self._slots

    def take(self) -> int:
        """The slot to take. Raises IndexError when none waits."""
        if self._taken == self._posted:
            raise IndexError("the mailbox is empty: post a copy before taking one")
        self._taken += 1
        return (self._taken - 1) % self._slots

    def clear(self) -> None:
        self._taken = self._posted
