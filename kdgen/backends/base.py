"""What a backend is: memory, a way to load generated kernels, and launches. Nothing model-specific."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kdgen.codegen.source import Source
from kdgen.errors import BackendError
from kdgen.plan.ir import DType, Family
from kdgen.plan.shard import Exchange
from kdgen.ranks.group import Group


@dataclass(frozen=True)
class DeviceArray:
    """Contiguous device memory: ``address`` is the device pointer, ``handle`` belongs to the backend that made it."""

    shape: tuple[int, ...]
    dtype: DType
    address: int
    nbytes: int
    handle: object


@dataclass(frozen=True)
class Pointer:
    """A device address as a kernel argument: ``array`` starting at ``offset`` bytes."""

    array: DeviceArray
    offset: int = 0


Argument = Pointer | int  #: an ``int`` is passed as int32


@dataclass(frozen=True)
class Launch:
    """A loaded kernel with everything a launch needs. ``args`` hold device addresses, so their arrays must stay allocated."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    smem: int
    args: tuple[Argument, ...]


@dataclass(frozen=True)
class AllGather:
    """A collective: ``nbytes`` of every rank's ``source`` go to every rank's ``target``, one rank after another."""

    name: str
    source: Pointer
    target: Pointer
    nbytes: int


Work = Launch | AllGather  #: what a step consists of
Replay = Callable[[], None]  #: starts the work it was recorded from, in order


class Mailbox:
    """Copies of some arrays as they are at one point among the launches, to be read later and in order; two may wait to be read.

    This one suits a device whose launches end before they return.
    """

    def __init__(self, backend: Backend, arrays: Sequence[DeviceArray]) -> None:
        self._backend, self._arrays = backend, tuple(arrays)
        self._posted: deque[tuple[npt.NDArray[np.generic], ...]] = deque()

    def post(self) -> None:
        """Copy the arrays behind everything launched so far, without waiting for it."""
        self._posted.append(tuple(self._backend.to_host(array) for array in self._arrays))

    def take(self) -> tuple[npt.NDArray[np.generic], ...]:
        """The oldest copies not yet taken; waits for them, and for nothing launched behind them."""
        return self._posted.popleft()

    def clear(self) -> None:
        """Forget what was not taken. Everything launched must have ended."""
        self._posted.clear()


class Backend(ABC):
    """One device. Launches are ordered with respect to each other and to copies; ``to_host`` waits for them."""

    name: str
    description: str  #: the device in words, for reports
    #: Entered, with "23 kernels for DEVICE", while ``load`` compiles what the cache does not have.
    compiling: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    group: Group | None = None  #: the ranks that this backend has joined
    family: Family = "generic"  #: whose plan an engine takes here
    #: Rounds worth starting before the results of the last are read: none where a launch ends before it returns.
    rounds_ahead: int = 0
    #: Multiprocessors, which grids may be sized by; where there are none, few, so that a block gets several tiles.
    processors: int = 3

    @abstractmethod
    def load(self, sources: Sequence[Source]) -> None:
        """Make kernels launchable by name (compiled through the cache). Loading again under one name replaces it.

        Raises CompileError (kernel, template text, compiler log) or BackendError (no compiler, no driver).
        """

    def compiling_kernels(self, count: int) -> AbstractContextManager[object]:
        """What ``load`` enters while it compiles so many kernels."""
        return self.compiling(f"{count} kernel{'s' if count > 1 else ''} for {self.description}")

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """Uninitialised memory, 256-byte aligned (the CPU backend fills it with 0xff, which is NaN)."""

    def memory_limit(self) -> int | None:
        """Bytes that all arrays together can never exceed, if that is known before trying."""
        return None

    @abstractmethod
    def to_host(self, array: DeviceArray, rows: int | None = None) -> npt.NDArray[np.generic]:
        """A copy, in NumPy dtypes (bf16 as ml_dtypes.bfloat16), of all of it or of its first ``rows``."""

    @abstractmethod
    def write(self, array: DeviceArray, values: npt.NDArray[np.generic], offset: int = 0) -> None:
        """Copy ``values`` (C-contiguous, the array's dtype) into ``array`` from element ``offset`` of its flat view."""

    @abstractmethod
    def free(self, array: DeviceArray) -> None:
        """Give memory back. The array must not be used again."""

    @abstractmethod
    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, smem: int, args: Sequence[Argument]) -> None:
        """Start a loaded kernel. Raises BackendError naming the kernel when the launch is refused or (CPU) the kernel misbehaves."""

    def join(self, group: Group) -> Exchange:
        """Become one of several ranks, whose backends all join; ``gather`` and ``inbox`` need it. Returns the best exchange they have.

        Raises BackendError when this backend cannot exchange anything with the others'.
        """
        raise BackendError(f"{self.description} cannot be one of several ranks")

    def inbox(self, shape: tuple[int, ...], dtype: DType) -> tuple[DeviceArray, DeviceArray]:
        """Zeros that kernels of all ranks may write to, and the addresses of every rank's, i32 [ranks, 2] (the low word first).

        All ranks call it alike. Raises BackendError when memory cannot be shared.
        """
        raise BackendError(f"{self.description} shares no memory with other ranks: --exchange gather does without")

    def agreed(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """What rank 0 measured, for ranks must choose alike; ``seconds`` itself where there are no others."""
        return dict(seconds) if self.group is None else self.group.agreed(seconds)

    def gather(self, work: AllGather) -> None:
        """Start a collective. Every rank starts the same ones in the same order. Raises BackendError when another rank is gone."""
        raise BackendError(f"{work.name}: {self.description} has not joined other ranks")

    def start(self, work: Work) -> None:
        """Start a launch or a collective."""
        if isinstance(work, AllGather):
            self.gather(work)
        else:
            self.launch(work.kernel, work.grid, work.block, work.smem, work.args)

    def record(self, work: Sequence[Work]) -> Replay:
        """``work`` as one unit that can be started many times. Raises BackendError as ``launch`` and ``gather`` do."""
        recorded = tuple(work)

        def replay() -> None:
            for each in recorded:
                self.start(each)

        return replay

    def recorded_context(self, context: int) -> int:
        """The context, at least ``context``, that launches are recorded for, so that one record serves many lengths."""
        return context

    def mailbox(self, arrays: Sequence[DeviceArray]) -> Mailbox:
        """A way to read ``arrays`` behind the launches that write them."""
        return Mailbox(self, arrays)

    def timer(self) -> Callable[[], float]:
        """Start a stopwatch behind what was launched; calling the value waits for the device and gives the seconds between."""
        self.synchronize()
        began = time.perf_counter()

        def stop() -> float:
            self.synchronize()
            return time.perf_counter() - began

        return stop

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything launched has ended."""

    def to_device(self, values: npt.NDArray[np.generic], dtype: DType) -> DeviceArray:
        """``values`` (already of the NumPy dtype that matches ``dtype``) as a new device array."""
        array = self.empty(values.shape, dtype)
        self.write(array, np.ascontiguousarray(values))
        return array
