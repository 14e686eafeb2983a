"""The CPU backend: generated kernels, unchanged, compiled by a C++ compiler and run on fibers, optionally under a checker.

``templates/lib/cpu`` holds the CPU side of the primitives and the runtime (``runtime/``); this module compiles both through the
cache and drives them. What is modelled and what is not: docs/cpu-backend.md.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import hashlib
import math
import mmap
import os
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np
import numpy.typing as npt

from kdgen.backends import host_compiler, line_table
from kdgen.backends.base import AllGather, Argument, Backend, DeviceArray, Pointer
from kdgen.backends.host_compiler import HostCompiler
from kdgen.backends.shared import SharedGather, bind, shared_memory
from kdgen.codegen.cache import Cache
from kdgen.codegen.source import Source
from kdgen.errors import BackendError, CompileError
from kdgen.files.resources import templates_dir
from kdgen.files.temporary import scratch_folder
from kdgen.plan.ir import ITEM_BYTES, DType
from kdgen.plan.shard import Exchange
from kdgen.ranks.group import EXCHANGE_SECONDS, Group

Mode = Literal["plain", "shuffled", "checker"]

SCHEMA = 1  # of what is cached; raise it when the meaning of an entry changes
SHARED_LIMIT = 227 << 10  # dynamic shared memory a block may have, in bytes
MAX_BLOCK = 1024
MAX_GRID = (2**31 - 1, 65535, 65535)
PATIENCE_MS = int(EXCHANGE_SECONDS * 1000)  # how long a block may wait for other ranks' words
ALONE_MS = 2000  # and for words that nobody else can send, where no rank has joined
SLICE_MS = 50  # how long a launch may go on before Ctrl-C is looked at
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
_MAP_NORESERVE = 0x4000  # Linux promises the memory, however much; Python names it from 3.13 on
_LINE_FLAG = 0x80000000
_LIBRARY_OF = ".in"  # an entry of the cache that holds the key of the library that has a kernel
_NO_THREAD = 0xFFFFFFFF


class _Kernel(ctypes.Structure):
    """EmuKernel in emulator.h."""

    _fields_ = (("call", ctypes.c_void_p), ("parameters", ctypes.c_char_p))


class _Error(ctypes.Structure):
    """EmuError in runtime/state.h."""

    _fields_ = (
        ("text", ctypes.c_char * 1024),
        ("block", ctypes.c_uint32 * 3),
        ("thread", ctypes.c_uint32),
        ("where", ctypes.c_uint32),
        ("other", ctypes.c_uint32),
        ("buffer", ctypes.c_uint64),
        ("earlier", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):
    """EmuLaunch in runtime/state.h."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("slot_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("os_threads", ctypes.c_uint32),
        ("flags", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("slice_ms", ctypes.c_uint32),
        ("patience_ms", ctypes.c_uint32),
        ("next_block", ctypes.c_uint32),
        ("early", ctypes.c_uint64),
        ("used_early", ctypes.c_uint64),
        ("error", _Error),
    )


@dataclass(frozen=True)
class _LoadedKernel:
    source: Source
    address: int  # of its EmuKernel
    parameters: str
    library: Path
    early: int  # a bit a parameter that may be read or written through before the kernel waits


class _Runtime:
    """The runtime library, loaded once a process: allocations and fibers are its own, whoever launches."""

    def __init__(self, path: Path) -> None:
        # Held over every call, and over all the slices of a launch. Reentrant, because the garbage collector may free memory
        # in the middle of a method.
        self.lock = threading.RLock()
        # A forked child has only the thread that forked: it must not inherit a launch half done by another.
        os.register_at_fork(before=self.lock.acquire, after_in_parent=self.lock.release, after_in_child=self.lock.release)
        library = _open_library(path)
        self.image = path.read_bytes()  # kernels are linked with it, when the cache may have been cleared
        self._launch = library.emu_launch
        self._launch.argtypes = (ctypes.c_void_p,)
        self._alloc = library.emu_alloc
        self._alloc.argtypes = (ctypes.c_size_t,)
        self._alloc.restype = ctypes.c_void_p
        self._free = library.emu_free
        self._free.argtypes = (ctypes.c_void_p,)
        self._free.restype = None
        self._watch = library.emu_watch
        self._watch.argtypes = (ctypes.c_void_p,)
        self._host_wrote = library.emu_host_wrote
        self._host_wrote.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._host_wrote.restype = None
        self._forget = library.emu_forget
        self._forget.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._forget.restype = None
        self._adopt, self._disown = library.emu_adopt, library.emu_disown
        for each in (self._adopt, self._disown):
            each.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
            each.restype = None
        self._settle = library.emu_settle
        self._settle.argtypes = ()
        self._settle.restype = None
        self.signal, self.wait = bind(library)

    def launch(self, launch: _Launch) -> int:
        return int(self._launch(ctypes.addressof(launch)))

    def alloc(self, nbytes: int, watched: bool) -> int:
        with self.lock:
            address = self._alloc(nbytes)
            if not address or (watched and not self._watch(address)):
                raise BackendError(f"out of memory for {nbytes} bytes of device memory")
        return int(address)

    def free(self, address: int) -> None:
        with self.lock:
            self._free(address)

    def host_wrote(self, address: int, nbytes: int) -> None:
        with self.lock:
            self._host_wrote(address, nbytes)

    def adopt(self, address: int, nbytes: int) -> None:
        with self.lock:
            self._adopt(address, nbytes)

    def disown(self, address: int, nbytes: int) -> None:
        with self.lock:
            self._disown(address, nbytes)

    def forget(self, address: int, nbytes: int) -> None:
        with self.lock:
            self._forget(address, nbytes)

    def settle(self) -> None:
        with self.lock:
            self._settle()


class _Allocation:
    """Guarded memory; given back when freed, or when nobody holds it any more."""

    def __init__(self, runtime: _Runtime, nbytes: int, watched: bool) -> None:
        self._runtime = runtime
        self.nbytes = nbytes
        self.address = runtime.alloc(max(nbytes, 1), watched)
        self.label = ""

    def free(self) -> None:
        if self.address:
            self._runtime.free(self.address)
            self.address = 0

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            self.free()


class _Mapped(_Allocation):
    """Memory that NumPy holds, and this process may share with others; it goes with the last of them."""

    def __init__(self, runtime: _Runtime, memory: npt.NDArray[np.uint8], address: int, nbytes: int) -> None:
        self._runtime, self._memory = runtime, memory
        self.address, self.nbytes, self.label = address, nbytes, ""
        runtime.adopt(memory.ctypes.data, memory.nbytes)

    def free(self) -> None:
        if self.address:
            self._runtime.disown(self._memory.ctypes.data, self._memory.nbytes)
            self.address, self._memory = 0, np.empty(0, np.uint8)


class CpuBackend(Backend):
    """Runs kernels on this machine's processor.

    ``plain`` runs threads in order, blocks on up to ``threads`` OS threads (all of the machine's by default). ``shuffled`` runs
    threads and blocks in an order drawn from ``seed`` and finishes asynchronous copies as late as the kernel's waits allow.
    ``checker`` does that too, and stops at the first race, uninitialised, misaligned or out-of-bounds access, unwaited copy or
    divergence. Results do not depend on the mode, the seed or the number of OS threads, unless a kernel has a bug.
    """

    name = "cpu"

    def __init__(self, mode: Mode = "plain", seed: int = 0, threads: int | None = None) -> None:
        """Raises BackendError when ``mode`` or ``threads`` is nonsense. A missing compiler shows at the first use."""
        if mode not in _FLAGS:
            raise BackendError(f"no CPU backend mode {mode!r}; there are {', '.join(_FLAGS)}")
        if threads is not None and threads < 1:
            raise BackendError(f"threads is {threads}; at least one OS thread must run the kernels")
        self.mode = mode
        self.seed = seed
        wanted = threads if threads is not None else _cpu_count()
        self._os_threads = min(wanted, MAX_OS_THREADS) if mode == "plain" else 1
        self.description = f"CPU emulator ({mode})"
        self._kernels: dict[str, _LoadedKernel] = {}
        self._used_early: dict[str, int] = {}  # of a kernel, a bit a parameter
        self._shared: SharedGather | None = None
        self._share_of_memory: int | None = None  # bytes, of a rank
        self._lock = threading.Lock()

    # ---- kernels ----------------------------------------------------------

    def load(self, sources: Sequence[Source]) -> None:
        if not sources:
            return
        names = [source.name for source in sources]
        if len(set(names)) != len(names):
            raise CompileError(f"one load names a kernel twice: {', '.join(sorted(names))}")
        for source in sources:
            if not 1 <= source.block <= MAX_BLOCK:
                raise CompileError(f"kernel {source.name}: a block of {source.block} threads; 1 to {MAX_BLOCK} are possible")
            if not 0 <= source.smem <= SHARED_LIMIT:
                raise CompileError(f"kernel {source.name}: {source.smem} bytes of dynamic shared memory; a block may have {SHARED_LIMIT}")
        compiler = host_compiler.find()
        paths = _kernel_libraries(compiler, sources, self.mode == "checker", self.compiling_kernels)
        _runtime(compiler)  # which those are linked with
        loaded = {}
        libraries = {path: _open_library(path) for path in dict.fromkeys(paths)}
        for source, path in zip(sources, paths, strict=True):
            entry = _Kernel.in_dll(libraries[path], f"emu_kernel_{source.name}")
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
        launch = _Launch(
            kernel=loaded.address,
            slots=ctypes.addressof(slots),
            slot_count=len(args),
            grid=grid,
            threads=block,
            shared_bytes=min(smem * loaded.source.cluster, SHARED_LIMIT),  # here a cluster is one block
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
                pass  # between slices Python sees signals: Ctrl-C raises here, and the rest of the launch never happens
        self._used_early[kernel] = self._used_early.get(kernel, 0) | int(launch.used_early)
        if result == _FAILED:
            earlier = next((each for each in self._kernels.values() if each.address == launch.error.earlier), loaded)
            raise BackendError(_explain(loaded, launch.error, args, earlier))

    def unused_early(self, kernel: str) -> tuple[str, ...]:
        """What the plan lets a loaded kernel use before it waits (``Source.early``), and no launch so far has. Known in checker mode."""
        source, used = self._kernels[kernel].source, self._used_early.get(kernel, 0)
        return tuple(name for i, name in enumerate(_parameter_names(source)) if name in source.early and not used >> i & 1)

    def synchronize(self) -> None:
        """Nothing to wait for: a launch returns when it has ended. For the checker, kernels that come overlap none of those before."""
        if self.mode == "checker":
            self._runtime.settle()

    # ---- ranks ------------------------------------------------------------

    def join(self, group: Group) -> Exchange:
        """The others are processes of this host. They share its OS threads."""
        self._os_threads = max(1, self._os_threads // group.ranks)
        self._shared = SharedGather(group, self._runtime.signal, self._runtime.wait)
        self.group = group
        self.description += f", one of {group.ranks} ranks"
        if (available := _memory_available()) is not None:  # looked at here, for no rank loads anything before all have joined
            self._share_of_memory = available // group.ranks
        return "gather"

    def inbox(self, shape: tuple[int, ...], dtype: DType) -> tuple[DeviceArray, DeviceArray]:
        """Its words are waited for inside kernels, block by block, so all ranks must run blocks in one order: by one mode and seed."""
        if self.group is None:
            return super().inbox(shape, dtype)
        order = "in order" if self.mode == "plain" else f"{self.mode} {self.seed}"
        if len(set(self.group.exchange(order.encode()))) > 1:
            raise BackendError("ranks that reach each other's memory run their blocks in one order, and these have other modes or seeds")
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        room = -(-nbytes // 4096) * 4096
        memory = shared_memory(self.group, self.group.ranks * room)
        first = memory.ctypes.data
        mine = _Mapped(self._runtime, memory, first + self.group.rank * room, nbytes)
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
            raise BackendError(f"{work.name}: {work.nbytes} bytes of {ranks} ranks do not fit {sizes}")
        self._shared.run(source[: work.nbytes], target[: work.nbytes * ranks], work.name)
        if self.mode == "checker":
            self._runtime.host_wrote(work.target.array.address + work.target.offset, work.nbytes * ranks)
        self.synchronize()

    # ---- memory -----------------------------------------------------------

    @functools.cached_property
    def _runtime(self) -> _Runtime:
        return _runtime(host_compiler.find())

    def empty(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        allocation = _Allocation(self._runtime, nbytes, self.mode == "checker")
        return DeviceArray(shape, dtype, allocation.address, nbytes, allocation)

    def vast(self, shape: tuple[int, ...], dtype: DType) -> DeviceArray:
        """Zeros, of which only the pages that are touched take memory: for indices beyond what a machine could fill. Nothing guards it.

        Raises BackendError when the system gives this process no such range of addresses.
        """
        nbytes = math.prod(shape) * ITEM_BYTES[dtype]
        try:
            memory = np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE), np.uint8)
        except OSError as error:
            raise BackendError(f"no {nbytes} bytes of addresses: {error.strerror}") from error
        return DeviceArray(shape, dtype, memory.ctypes.data, nbytes, _Mapped(self._runtime, memory, memory.ctypes.data, nbytes))

    def memory_limit(self) -> int | None:
        """What the system can give without swapping; among ranks, an equal share of it."""
        return _memory_available() if self._share_of_memory is None else self._share_of_memory

    def to_host(self, array: DeviceArray, rows: int | None = None) -> npt.NDArray[np.generic]:
        self.synchronize()
        return _view(array).view(NUMPY_DTYPES[array.dtype]).reshape(array.shape)[:rows].copy()

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
        """Make its contents nothing, as they are in new memory."""
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
    """Bytes that the system can give without swapping. Linux promises more, and ends processes when it is used."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def _allocation(array: DeviceArray) -> _Allocation:
    """The live memory behind ``array``. Raises BackendError when it was freed or belongs to another backend."""
    allocation = array.handle
    if not isinstance(allocation, _Allocation):
        raise BackendError(f"{array.dtype}{list(array.shape)} is not memory of the CPU backend")
    if not allocation.address:
        raise BackendError(f"{array.dtype}{list(array.shape)} was freed and is used again")
    if not allocation.address <= array.address <= array.address + array.nbytes <= allocation.address + allocation.nbytes:
        raise BackendError(f"{array.dtype}{list(array.shape)} lies outside the memory that it was made from")
    return allocation


def _view(array: DeviceArray) -> npt.NDArray[np.uint8]:
    """The array's bytes in place."""
    _allocation(array)
    return np.ctypeslib.as_array((ctypes.c_uint8 * array.nbytes).from_address(array.address))


def _describe(array: DeviceArray) -> str:
    allocation = array.handle
    label = allocation.label if isinstance(allocation, _Allocation) else ""
    shape = f"{array.dtype}{list(array.shape)}"
    return f"{label} ({shape})" if label else shape


def _check_launch(loaded: _LoadedKernel, grid: tuple[int, int, int], block: int, smem: int) -> None:
    source = loaded.source
    if not 1 <= block <= source.block:
        raise BackendError(f"kernel {source.name}: launched with {block} threads a block; its launch bound is {source.block}")
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
    """The kernel's parameters as they are declared."""
    code = re.sub(r"//.*", "", source.text)
    head = code.partition("__global__")[2].partition("{")[0]
    return tuple(each.strip() for each in head[head.rindex("(") + 1 : head.rindex(")")].split(",") if each.strip())


def _parameter_names(source: Source) -> tuple[str, ...]:
    return tuple(re.split(r"[\s*]+", declaration)[-1] for declaration in _declarations(source))


def _early_parameters(source: Source) -> int:
    """A bit for each parameter that the kernel may use before it waits. Raises CompileError for a name that is none of them."""
    names = _parameter_names(source)
    if unknown := [name for name in source.early if name not in names]:
        raise CompileError(f"kernel {source.name} has no parameter {', '.join(unknown)}, which it is to use before it waits")
    host_only = ["__restrict__" in declaration for declaration in _declarations(source)]
    return sum(1 << i for i, (name, only) in enumerate(zip(names, host_only, strict=True)) if only or name in source.early)


def _explain(loaded: _LoadedKernel, error: _Error, args: Sequence[Argument], earlier: _LoadedKernel) -> str:
    """The runtime's error with kernel, block, thread, source lines and buffers by name; of an ``earlier`` launch, too."""

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
    """The line of a kernel's text that ``place``, NAME.cu:LINE, names: the text exists in memory alone. Empty for other places."""
    name, _, number = place.rpartition(":")
    lines = source.text.split("\n")
    return lines[int(number) - 1].strip() if name == f"{source.name}.cu" and 0 < int(number) <= len(lines) else ""


def _buffer_name(address: int, args: Sequence[Argument]) -> str:
    for i, arg in enumerate(args):
        if isinstance(arg, Pointer) and isinstance(arg.array.handle, _Allocation) and arg.array.handle.address == address:
            return f"{_describe(arg.array)}, argument {i}"
    return f"the buffer at {address:#x}, which is no argument"


# ---- building -------------------------------------------------------------


def _library_root() -> Path:
    return templates_dir() / "lib" / "cpu"


@functools.cache
def _library_hash(root: Path) -> str:
    """Of every header and of the runtime."""
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*")):
        if path.is_file():
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _key(*parts: object) -> str:
    return hashlib.sha256(repr((SCHEMA, *parts)).encode()).hexdigest()


@functools.cache
def _scratch() -> Path:
    """Where libraries live that the cache would not take; gone with the process."""
    kept = contextlib.ExitStack()
    atexit.register(kept.close)
    return kept.enter_context(scratch_folder("cpu"))


def _cached_library(
    key: str, text: str, *, compiler: HostCompiler, flags: Sequence[str], options: Sequence[str], what: str, linked: bytes = b""
) -> Path:
    """The shared library built from ``text``, from the cache if it is there and whole. ``options`` are the linker's, ``linked`` is the
    library that it needs."""
    cache = Cache.default()
    found = cache.get("cpu", key, ".so")
    if found is not None:
        return found
    with scratch_folder("cpu") as folder:
        source, output, other = (folder / name for name in ("unit.cpp", "unit.so", "linked.so"))
        source.write_text(text)
        if linked:
            other.write_bytes(linked)
        compiler.build(source, output, flags=flags, libraries=(*([str(other)] if linked else ()), *options), what=what)
        data = output.read_bytes()
    stored = cache.put("cpu", key, ".so", data)
    if stored is not None:
        return stored
    path = _scratch() / f"{key}.{threading.get_ident()}.so"
    path.write_bytes(data)
    return path


def _open_library(path: Path) -> ctypes.CDLL:
    """Raises BackendError where the library cannot be loaded: a cache on a file system mounted noexec, say."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"a compiled library cannot be loaded: {error}; KDGEN_CACHE_DIR names another folder to keep it in") from error


_runtime_lock = threading.Lock()


@functools.cache
def _runtime_for(compiler: HostCompiler, root: Path) -> _Runtime:
    key = _key("runtime", compiler.identity, compiler.flags, _library_hash(root))
    text = '#include "runtime/runtime.cpp"\n'  # a path in it would have to be quoted
    path = _cached_library(
        key,
        text,
        compiler=compiler,
        flags=("-O3", f"-I{root}"),
        options=(f"-Wl,-soname,libkdgen-cpu-{key[:16]}.so", "-pthread"),
        what="the CPU backend's runtime",
    )
    return _Runtime(path)


def _runtime(compiler: HostCompiler) -> _Runtime:
    """The one runtime of this process. Raises CompileError when it does not build."""
    with _runtime_lock:
        return _runtime_for(compiler, _library_root())


def _unit(sources: Sequence[Source]) -> str:
    """All kernels as one translation unit, each under its own file name, with their exports."""
    parts = ['#include "primitives.cuh"\n']
    for source in sources:
        parts.append(f'#line 1 "{source.name}.cu"\n{source.code}\n')
    parts.append('#line 1 "exports"\n')
    parts.extend(f"EMU_EXPORT({source.name})\n" for source in sources)
    return "".join(parts)


def _kernel_libraries(
    compiler: HostCompiler, sources: Sequence[Source], checker: bool, compiling: Callable[[int], AbstractContextManager[object]]
) -> list[Path]:
    """The library that has each kernel. Those that no library in the cache has are compiled together, into one, while ``compiling`` their
    number is entered.

    A plan for another context, or for a rank, has mostly the same kernels, and compiling takes longer than running them once.
    """
    root, cache = _library_root(), Cache.default()
    flags = ("-O1", *(("-DEMU_CHECKER", *compiler.checker_flags) if checker else ()))
    built_with = (compiler.identity, compiler.flags, flags, _library_hash(root))
    keys = [_key("kernel", *built_with, _unit([source])) for source in sources]
    named = [(cache.read("cpu", key, _LIBRARY_OF) or b"").decode() for key in keys]  # of each kernel, the key of its library
    there = {key: cache.get("cpu", key, ".so") for key in dict.fromkeys(named) if key}
    found = [there.get(key) for key in named]
    missing = [source for source, path in zip(sources, found, strict=True) if path is None]
    if not missing:
        return [path for path in found if path]
    new_key = _key("kernels", *built_with, _unit(missing))
    with compiling(len(missing)):
        new = _kernel_library(new_key, compiler, _runtime(compiler), missing, (*flags, f"-I{root}"))
    for key, path in zip(keys, found, strict=True):
        if path is None:
            cache.put("cpu", key, _LIBRARY_OF, new_key.encode())
    return [path or new for path in found]


def _kernel_library(key: str, compiler: HostCompiler, runtime: _Runtime, sources: Sequence[Source], flags: Sequence[str]) -> Path:
    text, what = _unit(sources), f"kernel {', '.join(source.name for source in sources)}"
    try:
        return _cached_library(key, text, compiler=compiler, flags=flags, options=("-Wl,-z,defs",), what=what, linked=runtime.image)
    except CompileError as error:
        log = str(error).partition(":\n")[2]
        blamed = [s.name for s in sources if re.search(rf"(?<![\w.]){re.escape(s.name)}\.cu:\d+", log)]
        if not blamed:
            raise
        raise CompileError(f"kernel {', '.join(blamed)}: {' '.join(compiler.command)} failed:\n{log}") from error
