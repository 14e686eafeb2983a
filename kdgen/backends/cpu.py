"""The CPU backend: a C++ compiler compiles the generated kernels unchanged, and each GPU thread runs on a fiber, optionally with a checker.

``templates/lib/cpu`` holds the primitives for the CPU and the runtime (``runtime/``). This module compiles both through the cache and calls
them. docs/cpu-backend.md says what is modelled and what is not.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import os
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kdgen.backends import host_compiler, line_table
from kdgen.backends.base import AllGather, Argument, Backend, DeviceArray, Pointer
from kdgen.backends.cpu_library import kernel_libraries, runtime
from kdgen.backends.cpu_runtime import MAP_NORESERVE, Allocation, Error, Kernel, Launch, Mapped, Runtime, open_library
from kdgen.backends.shared import SharedGather, shared_memory
from kdgen.codegen.source import Source
from kdgen.errors import BackendError, CompileError
from kdgen.plan.ir import ITEM_BYTES, DType
from kdgen.plan.shard import Exchange
from kdgen.ranks.group import EXCHANGE_SECONDS, Group

Mode = Literal["plain", "shuffled", "checker"]

SHARED_LIMIT = 227 << 10  # the most dynamic shared memory of a block, in bytes
MAX_BLOCK = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
PATIENCE_MS = int(EXCHANGE_SECONDS * 1000)  # the longest that a block waits for words of other ranks
ALONE_MS = 2000  # the longest that it waits if there are no other ranks, so that the words can only be missing
SLICE_MS = 50  # the longest that a launch runs before Python handles signals such as Ctrl-C
MAX_OS_THREADS = 32

NUMPY_DTYPES: dict[DType, np.dtype[np.generic]] = {
    "f32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "i32": np.dtype(np.int32),
    "f64": np.dtype(np.float64),
    "u8": np.dtype(np.uint8),
}

_SHUFFLED, _LATE_COPIES, _CHECK, _OVERLAPS = 1, 2, 4, 8  # LaunchFlags in runtime/state.h
_FLAGS: dict[Mode, int] = {"plain": 0, "shuffled": _SHUFFLED | _LATE_COPIES, "checker": _SHUFFLED | _LATE_COPIES | _CHECK}
_FINISHED, _FAILED = 0, 1  # LaunchResult in runtime/runtime.cpp
_LINE_FLAG = 0x80000000
_NO_THREAD = 0xFFFFFFFF


@dataclass(frozen=True)
class _LoadedKernel:
    source: Source
    address: int  # of its EmuKernel structure
    parameters: str
    library: Path
    early: int  # bit i: memory behind parameter i may be used before the kernel's griddepcontrol.wait


class CpuBackend(Backend):
    """Runs kernels on this machine's processor.

    ``plain`` runs threads in order, and blocks on up to ``threads`` OS threads (by default all of the machine's). ``shuffled`` runs
    threads and blocks in an order drawn from ``seed``, and completes asynchronous copies as late as the kernel's waits allow. ``checker``
    also does so, and stops at the first race, uninitialised, misaligned or out-of-bounds access, missing wait for a copy, or divergence.
    Unless a kernel has a bug, results do not depend on the mode, the seed or the number of OS threads.
    """

    name = "cpu"

    def __init__(self, mode: Mode = "plain", seed: int = 0, threads: int | None = None) -> None:
        """Raises BackendError for an unknown ``mode`` or ``threads`` below 1. A missing compiler is found only at the first use."""
        if mode not in _FLAGS:
            raise BackendError(f"unknown mode {mode!r} of the CPU backend; there are {', '.join(_FLAGS)}")
        if threads is not None and threads < 1:
            raise BackendError(f"threads is {threads}; at least one OS thread must run the kernels")
        self.mode = mode
        self.seed = seed
        wanted = threads if threads is not None else _cpu_count()
        self._os_threads = min(wanted, MAX_OS_THREADS) if mode == "plain" else 1
        self.description = f"CPU emulator ({mode})"
        self._kernels: dict[str, _LoadedKernel] = {}
        self._used_early: dict[str, int] = {}  # by kernel: bits of the parameters used before its wait
        self._shared: SharedGather | None = None
        self._share_of_memory: int | None = None  # bytes that this rank may use
        self._lock = threading.Lock()

    # ---- kernels ----------------------------------------------------------

    def load(self, sources: Sequence[Source]) -> None:
        if not sources:
            return
        names = [source.name for source in sources]
        if len(set(names)) != len(names):
            raise CompileError(f"several sources have the same kernel name: {', '.join(sorted(names))}")
        for source in sources:
            if not 1 <= source.block <= MAX_BLOCK:
                raise CompileError(f"kernel {source.name}: a block has {source.block} threads; it may have 1 to {MAX_BLOCK}")
            if not 0 <= source.smem <= SHARED_LIMIT:
                raise CompileError(f"kernel {source.name}: {source.smem} bytes of dynamic shared memory; a block may have {SHARED_LIMIT}")
        compiler = host_compiler.find()
        paths = kernel_libraries(compiler, sources, self.mode == "checker", self.compiling_kernels)
        runtime(compiler)  # the kernels' libraries are linked with it
        loaded = {}
        libraries = {path: open_library(path) for path in dict.fromkeys(paths)}
        for source, path in zip(sources, paths, strict=True):
            entry = Kernel.in_dll(libraries[path], f"emu_kernel_{source.name}")
            parameters = bytes(entry.parameters).decode()
            early = _early_parameters(source) if source.overlaps else 0
            loaded[source.name] = _LoadedKernel(source, ctypes.addressof(entry), parameters, path, early)
        with self._lock:
            self._kernels.update(loaded)

    def launch(self, kernel: str, grid: tuple[int, int, int], block: int, smem: int, args: Sequence[Argument]) -> None:
        loaded = self._kernels.get(kernel)
        if loaded is None:
            raise BackendError(f"kernel {kernel} is not loaded")
        _check_launch(loaded, grid, block, smem)
        slots = _slots(loaded, args)
        launch = Launch(
            kernel=loaded.address,
            slots=ctypes.addressof(slots),
            slot_count=len(args),
            grid=grid,
            threads=block,
            shared_bytes=min(smem * loaded.source.cluster, SHARED_LIMIT),  # on the CPU, a cluster is one block
            os_threads=self._os_threads,
            flags=_FLAGS[self.mode] | (_OVERLAPS if loaded.source.overlaps else 0),
            seed=self.seed & 0xFFFFFFFFFFFFFFFF,
            slice_ms=SLICE_MS,
            patience_ms=ALONE_MS if self.group is None else PATIENCE_MS,
            early=loaded.early,
        )
        runtime = self._runtime
        with runtime.lock:
            while (result := runtime.launch(launch)) not in (_FINISHED, _FAILED):
                pass  # between slices Python handles signals: Ctrl-C raises here, and the rest of the launch is abandoned
        self._used_early[kernel] = self._used_early.get(kernel, 0) | int(launch.used_early)
        if result == _FAILED:
            earlier = next((each for each in self._kernels.values() if each.address == launch.error.earlier), loaded)
            raise BackendError(_explain(loaded, launch.error, args, earlier))

    def unused_early(self, kernel: str) -> tuple[str, ...]:
        """Parameters that the plan lets a kernel use before its wait (``Source.early``), but no launch has so far. Only in checker mode."""
        source, used = self._kernels[kernel].source, self._used_early.get(kernel, 0)
        return tuple(name for i, name in enumerate(_parameter_names(source)) if name in source.early and not used >> i & 1)

    def synchronize(self) -> None:
        """Does not wait, as launches end before they return. The checker then treats later kernels as not overlapping earlier ones."""
        if self.mode == "checker":
            self._runtime.settle()

    # ---- ranks ------------------------------------------------------------

    def join(self, group: Group) -> Exchange:
        """All ranks are processes of this host and share its OS threads."""
        self._os_threads = max(1, self._os_threads // group.ranks)
        self._shared = SharedGather(group, self._runtime.signal, self._runtime.wait)
        self.group = group
        self.description += f", one of {group.ranks} ranks"
        if (available := _memory_available()) is not None:  # measured here, because no rank allocates anything before all have joined
            self._share_of_memory = available // group.ranks
        return "gather"

    def inbox(self, shape: tuple[int, ...], dtype: DType) -> tuple[DeviceArray, DeviceArray]:
        """Kernels wait for words in it, block by block, so all ranks must run blocks in the same order: with the same mode and seed."""
        if self.group is None:
            return super().inbox(shape, dtype)
        order = "in order" if self.mode == "plain" else f"{self.mode} {self.seed}"
        if len(set(self.group.exchange(order.encode()))) > 1:
            raise BackendError(
                "ranks that reach each other's memory must run their blocks in the same order, but these have different modes or seeds"
            )
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        room = -(-nbytes // 4096) * 4096
        memory = shared_memory(self.group, self.group.ranks * room)
        first = memory.ctypes.data
        mine = Mapped(self._runtime, memory, first + self.group.rank * room, nbytes)
        addresses = first + room * np.arange(self.group.ranks, dtype=np.uint64)
        table = self.to_device(addresses.view(np.int32).reshape(-1, 2), "i32")
        return DeviceArray(shape, dtype, mine.address, nbytes, mine), table

    def gather(self, work: AllGather) -> None:
        if self._shared is None:
            return super().gather(work)
        source, target = (_view(pointer.array)[pointer.offset :] for pointer in (work.source, work.target))
        ranks = self._shared.ranks
        if work.nbytes > len(source) or work.nbytes * ranks > len(target):
            sizes = f"{_describe(work.source.array)} to {_describe(work.target.array)}"
            raise BackendError(f"{work.name}: {work.nbytes} bytes of each of {ranks} ranks do not fit, from {sizes}")
        self._shared.run(source[: work.nbytes], target[: work.nbytes * ranks], work.name)
        if self.mode == "checker":
            self._runtime.host_wrote(work.target.array.address + work.target.offset, work.nbytes * ranks)
        self.synchronize()

    # ---- memory -----------------------------------------------------------

    @functools.cached_property
    def _runtime(self) -> Runtime:
        return runtime(host_compiler.find())

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        allocation = Allocation(self._runtime, nbytes, self.mode == "checker")
        return DeviceArray(shape, dtype, allocation.address, nbytes, allocation)

    def vast(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """Zeros of which only touched pages take memory, for indices beyond the machine's memory. They have no guard zones.

        Raises BackendError when the system has no such range of addresses for this process.
        """
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        try:
            memory = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE), np.uint8)
        except OSError as error:
            raise BackendError(f"{nbytes} bytes of address space cannot be reserved: {error.strerror}") from error
        return DeviceArray(shape, dtype, memory.ctypes.data, nbytes, Mapped(self._runtime, memory, memory.ctypes.data, nbytes))

    def memory_limit(self) -> int | None:
        """Bytes that the system can give without swapping; with several ranks, an equal share of that."""
        return _memory_available() if self._share_of_memory is None else self._share_of_memory

    def to_host(self, array: DeviceArray, rows: int | None = None) -> npt.NDArray[np.generic]:
        self.synchronize()
        return _view(array).view(NUMPY_DTYPES[array.dtype]).reshape(array.shape)[:rows].copy()

    def copy(self, array: DeviceArray, source: int, target: int, count: int) -> None:
        self.synchronize()
        values = _view(array).view(NUMPY_DTYPES[array.dtype])[source : source + count].copy()
        self.write(array, values, target)

    def write(self, array: DeviceArray, values: npt.NDArray[np.generic], offset: int = 0) -> None:
        """Raises BackendError when the dtype differs, the values are not C-contiguous, or they do not fit."""
        expected = NUMPY_DTYPES[array.dtype]
        if values.dtype != expected:
            raise BackendError(f"write of {values.dtype} values into {_describe(array)}; it holds {expected}")
        if not values.flags.c_contiguous:
            raise BackendError(f"write into {_describe(array)}: the values are not C-contiguous")
        start = offset * expected.itemsize
        if offset < 0 or start + values.nbytes > array.nbytes:
            held = array.nbytes // expected.itemsize
            raise BackendError(f"write of {values.size} elements at {offset} into {_describe(array)}, which has {held}")
        _view(array)[start : start + values.nbytes] = values.reshape(-1).view(np.uint8)
        if self.mode == "checker":
            self._runtime.host_wrote(array.address + start, values.nbytes)
        self.synchronize()

    def free(self, array: DeviceArray) -> None:
        _allocation(array).free()

    def forget(self, array: DeviceArray) -> None:
        """Make its contents uninitialised again, as in new memory."""
        _allocation(array)
        self._runtime.forget(array.address, array.nbytes)

    def label(self, array: DeviceArray, name: str) -> None:
        """Call this memory ``name`` in error messages."""
        _allocation(array).label = name


# ---- arguments and checks -------------------------------------------------


def _cpu_count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_available() -> int | None:
    """Bytes that the system can give without swapping. Linux grants more, but kills processes that use it."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _allocation(array: DeviceArray) -> Allocation:
    """The live memory behind ``array``. Raises BackendError when it was freed or belongs to another backend."""
    allocation = array.handle
    if not isinstance(allocation, Allocation):
        raise BackendError(f"{array.dtype}{list(array.shape)} is not memory of the CPU backend")
    if not allocation.address:
        raise BackendError(f"{array.dtype}{list(array.shape)} is used after it was freed")
    if not allocation.address <= array.address <= array.address + array.nbytes <= allocation.address + allocation.nbytes:
        raise BackendError(f"{array.dtype}{list(array.shape)} lies outside the memory that it was made from")
    return allocation


def _view(array: DeviceArray) -> npt.NDArray[np.uint8]:
    """The array's bytes in place."""
    _allocation(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.address))


def _describe(array: DeviceArray) -> str:
    allocation = array.handle
    label = allocation.label if isinstance(allocation, Allocation) else ""
    shape = f"{array.dtype}{list(array.shape)}"
    return f"{label} ({shape})" if label else shape


def _check_launch(loaded: _LoadedKernel, grid: tuple[int, int, int], block: int, smem: int) -> None:
    source = loaded.source
    if not 1 <= block <= source.block:
        raise BackendError(f"kernel {source.name}: launched with {block} threads in a block; its launch bound is {source.block}")
    if any(not 1 <= n <= limit for n, limit in zip(grid, MAX_GRID, strict=True)) or math.prod(grid) > MAX_GRID[0]:
        raise BackendError(f"kernel {source.name}: grid {grid} is impossible; each dimension must be 1 to {MAX_GRID}")
    if not 0 <= smem <= SHARED_LIMIT:
        raise BackendError(f"kernel {source.name}: {smem} bytes of dynamic shared memory; a block may have {SHARED_LIMIT}")
    if smem > source.smem:
        raise BackendError(f"kernel {source.name}: launched with {smem} bytes of dynamic shared memory; it was built for {source.smem}")


def _slots(loaded: _LoadedKernel, args: Sequence[Argument]) -> ctypes.Array[ctypes.c_uint64]:
    """The arguments as the thunk reads them. Raises BackendError when they do not fit the kernel's parameters."""
    name = loaded.source.name
    if len(args) != len(loaded.parameters):
        raise BackendError(f"kernel {name}: {len(args)} arguments given, {len(loaded.parameters)} parameters declared")
    values = []
    for i, (arg, kind) in enumerate(zip(args, loaded.parameters, strict=True)):
        if isinstance(arg, Pointer):
            if kind != "p":
                raise BackendError(f"kernel {name}: argument {i} is a pointer; the parameter is an integer")
            _allocation(arg.array)
            if not 0 <= arg.offset <= arg.array.nbytes:
                raise BackendError(f"kernel {name}: argument {i} starts {arg.offset} bytes into {_describe(arg.array)}")
            values.append(arg.array.address + arg.offset)
        else:
            if kind != "i":
                raise BackendError(f"kernel {name}: argument {i} is an integer; the parameter is a pointer")
            if not -(2**31) <= arg < 2**31:
                raise BackendError(f"kernel {name}: argument {i} is {arg}, which does not fit an int32")
            values.append(int(arg) & 0xFFFFFFFF)
    return (ctypes.c_uint64 * len(values))(*values)


def _declarations(source: Source) -> tuple[str, ...]:
    """The declarations of the kernel's parameters."""
    code = re.sub(r"//.*", "", source.text)
    head = code.partition("__global__")[2].partition("{")[0]
    return tuple(each.strip() for each in head[head.rindex("(") + 1 : head.rindex(")")].split(",") if each.strip())


def _parameter_names(source: Source) -> tuple[str, ...]:
    return tuple(re.split(r"[\s*]+", declaration)[-1] for declaration in _declarations(source))


def _early_parameters(source: Source) -> int:
    """A bit for each parameter that the kernel may use before its wait. Raises CompileError when ``source.early`` has an unknown name."""
    names = _parameter_names(source)
    if unknown := [name for name in source.early if name not in names]:
        raise CompileError(f"kernel {source.name} has no parameter {', '.join(unknown)}, which the plan lets it use before its wait")
    host_only = ["__restrict__" in declaration for declaration in _declarations(source)]
    return sum(1 << i for i, (name, only) in enumerate(zip(names, host_only, strict=True)) if only or name in source.early)


def _explain(loaded: _LoadedKernel, error: Error, args: Sequence[Argument], earlier: _LoadedKernel) -> str:
    """The runtime's error, with the names of kernel, block, thread, source lines and buffers, also those of an ``earlier`` launch."""

    def place(where: int, kernel: _LoadedKernel = loaded) -> str:
        if where & _LINE_FLAG:
            return f"{kernel.source.name}.cu:{where & ~_LINE_FLAG}"
        found = line_table.lookup(kernel.library, where) if where else None
        return f"{found.file}:{found.line}" if found else ""

    text = bytes(error.text).decode(errors="replace")
    if error.buffer:
        text = text.replace("{buffer}", _buffer_name(int(error.buffer), args))
    text = text.replace("{other}", place(error.other, earlier) or "unknown line").replace("{earlier}", f"kernel {earlier.source.name}")
    thread = "" if error.thread == _NO_THREAD else f" block {tuple(error.block)} thread {error.thread}"
    here = place(error.where)
    places = dict.fromkeys((here, place(error.other)))
    shown = "".join(f"\n  {where}: {line}" for where in places if (line := _line_of(loaded.source, where)))
    return f"kernel {loaded.source.name}{thread}{f' at {here}' if here else ''}: {text}{shown}"


def _line_of(source: Source, place: str) -> str:
    """The line of the kernel's text at ``place``, NAME.cu:LINE, as there is no such file on disk. Empty for other places."""
    name, _, number = place.rpartition(":")
    lines = source.text.split("\n")
    return lines[int(number) - 1].strip() if name == f"{source.name}.cu" and 0 < int(number) <= len(lines) else ""


def _buffer_name(address: int, args: Sequence[Argument]) -> str:
    for i, arg in enumerate(args):
        if isinstance(arg, Pointer) and isinstance(arg.array.handle, Allocation) and arg.array.handle.address == address:
            return f"{_describe(arg.array)}, argument {i}"
    return f"the buffer at {address:#x}, which is not an argument"


# ---- building -------------------------------------------------------------
