"""The interface of a backend: device memory, loading of generated kernels, and launches. Nothing here is specific to a model."""

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
    """A loaded kernel's name and all values that its launch needs. ``args`` hold device addresses, so their arrays must stay allocated."""

    kernel: str
    grid: tuple[int, int, int]
    block: int
    smem: int
    args: tuple[Argument, ...]


@dataclass(frozen=True)
class AllGather:
    """A collective: it copies ``nbytes`` of every rank's ``source`` to every rank's ``target``, in the order of ranks."""

    name: str
    source: Pointer
    target: Pointer
    nbytes: int


Work = Launch | AllGather  #: a part of a step
Replay = Callable[[], None]  #: starts the recorded work, in order


class Mailbox:
    """Copies of some arrays, made at a point between launches and read later, in order. At most two copies may wait to be read.

    This class is for devices whose launches end before they return.
    """

    def __init__(self, backend: Backend, arrays: Sequence[DeviceArray]) -> None:
        self._backend, self._arrays = backend, tuple(arrays)
        self._posted: deque[tuple[npt.NDArray[np.generic], ...]] = deque()

    def post(self) -> None:
        """Copy the arrays after everything launched so far, without waiting for it."""
        self._posted.append(tuple(self._backend.to_host(array) for array in self._arrays))

    def take(self) -> tuple[npt.NDArray[np.generic], ...]:
        """The oldest copies not yet taken. Waits for them, and not for anything launched after them."""
        return self._posted.popleft()

    def clear(self) -> None:
        """Discard copies that were not taken. Everything launched must have ended."""
        self._posted.clear()


class Backend(ABC):
    """One device. Launches and copies run in the order in which they are started; ``to_host`` waits for them."""

    name: str
    description: str  #: the device's name for reports
    #: Called with "23 kernels for DEVICE"; ``load`` enters the result while it compiles kernels that the cache lacks.
    compiling: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext
    group: Group | None = None  #: the ranks that this backend has joined
    family: Family = "generic"  #: the hardware family whose plan an engine uses here
    #: Rounds to start before the results of the last one are read; 0 if a launch ends before it returns.
    rounds_ahead: int = 0
    #: Multiprocessors, by which grids may be sized. The CPU has none; its number is small, so that a block gets several tiles.
    processors: int = 3

    @abstractmethod
    def load(self, sources: Sequence[Source]) -> None:
        """Compile kernels through the cache and make them launchable by name. Another kernel of the same name is replaced.

        Raises CompileError (kernel, template text, compiler log) or BackendError (no compiler, no driver).
        """

    def compiling_kernels(self, count: int) -> AbstractContextManager[object]:
        """The context in which ``load`` compiles ``count`` kernels."""
        return self.compiling(f"{count} kernel{'s' if count > 1 else ''} for {self.description}")

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """Uninitialised memory, aligned to 256 bytes. The CPU backend fills it with 0xff, which is NaN."""

    def memory_limit(self) -> int | None:
        """The most bytes that all arrays together can have; None if that is unknown."""
        return None

    @abstractmethod
    def to_host(self, array: DeviceArray, rows: int | None = None) -> npt.NDArray[np.generic]:
        """A copy of the array, or of its first ``rows``, in NumPy dtypes (bf16 as ml_dtypes.bfloat16)."""

    @abstractmethod
    def write(self, array: DeviceArray, values: npt.NDArray[np.generic], offset: int = 0) -> None:
        """Copy ``values`` (C-contiguous, the array's dtype) into ``array`` from element ``offset`` of its flat view."""

    @abstractmethod
    def copy(self, array: DeviceArray, source: int, target: int, count: int) -> None:
        """Copy ``count`` elements of ``array``'s flat view from element ``source`` on to element ``target`` on. The two do not overlap."""

    @abstractmethod
    def free(self, array: DeviceArray) -> None:
        """Free the array's memory. The array must not be used again."""

    @abstractmethod
    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, smem: int, args: Sequence[Argument]) -> None:
        """Start a loaded kernel. Raises BackendError, with the kernel's name, when the launch is refused or the kernel fails on the CPU."""

    def join(self, group: Group) -> Exchange:
        """Join the other ranks' backends, before ``gather`` or ``inbox``. All ranks call it. Returns the fastest exchange that works.

        Raises BackendError when this backend cannot exchange data with the others.
        """
        raise BackendError(f"{self.description} cannot be one of several ranks")

    def inbox(self, shape: tuple[int, ...], dtype: DType) -> tuple[DeviceArray, DeviceArray]:
        """Zeros that kernels of all ranks may write to, and the addresses of every rank's, i32 [ranks, 2] (the low word first).

        All ranks call it with the same arguments. Raises BackendError when memory cannot be shared.
        """
        raise BackendError(f"{self.description} shares no memory with other ranks: choose --exchange gather, which needs none")

    def agreed(self, seconds: Mapping[int, float]) -> dict[int, float]:
        """Rank 0's ``seconds``, because all ranks must choose the same; without other ranks ``seconds`` itself."""
        return dict(seconds) if self.group is None else self.group.agreed(seconds)

    def gather(self, work: AllGather) -> None:
        """Start a collective. All ranks start the same ones, in one order. Raises BackendError when another rank has ended."""
        raise BackendError(f"{work.name}: {self.description} has not joined other ranks")

    def start(self, work: Work) -> None:
        """Start a launch or a collective."""
        if isinstance(work, AllGather):
            self.gather(work)
        else:
            self.launch(work.kernel, work.grid, work.block, work.smem, work.args)

    def record(self, work: Sequence[Work]) -> Replay:
        """A function that starts all of ``work``, any number of times. Raises BackendError as ``launch`` and ``gather`` do."""
        recorded = tuple(work)

        def replay() -> None:
            for each in recorded:
                self.start(each)

        return replay

    def recorded_context(self, context: int) -> int:
        """The context for which launches are recorded: ``context`` rounded up, so that one recording serves many lengths."""
        return context

    def mailbox(self, arrays: Sequence[DeviceArray]) -> Mailbox:
        """A mailbox that copies ``arrays`` after the launches that write them."""
        return Mailbox(self, arrays)

    def timer(self) -> Callable[[], float]:
        """Start a stopwatch after what was launched. Calling the value waits for the device and returns the seconds since then."""
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
