"""The CPU backend's runtime library through ctypes: its structures, its calls, and the memory that it watches."""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kdgen.backends.shared import bind
from kdgen.errors import BackendError

MAP_NORESERVE = 0x4000  # Linux reserves any amount of addresses; a name in Python's mmap from 3.13 on


class Kernel(ctypes.Structure):
    """EmuKernel in emulator.h."""

    _fields_ = (("call", ctypes.c_void_p), ("parameters", ctypes.c_char_p))


class Error(ctypes.Structure):
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


class Launch(ctypes.Structure):
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
        ("error", Error),
    )


def open_library(path: Path) -> ctypes.CDLL:
    """Load the library. Raises BackendError when that fails, for example when the cache is on a file system mounted noexec."""
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise BackendError(f"a compiled library cannot be loaded: {error}; KDGEN_CACHE_DIR names another folder for it") from error


class Runtime:
    """The runtime library. A process loads it once, because it owns all allocations and fibers."""

    def __init__(self, path: Path) -> None:
        # Held during every call, and during all slices of a launch. Reentrant, because the garbage collector may free memory
        # within a method.
        self.lock = threading.RLock()
        # A forked child has only the thread that forked: it must not inherit a launch half done by another.
        os.register_at_fork(before=self.lock.acquire, after_in_parent=self.lock.release, after_in_child=self.lock.release)
        library = open_library(path)
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

    def launch(self, launch: Launch) -> int:
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


class Allocation:
    """Memory with guard zones. It is freed by ``free``, or with the last reference to this object."""

    def __init__(self, runtime: Runtime, nbytes: int, watched: bool) -> None:
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


class Mapped(Allocation):
    """Memory of a NumPy array, which other processes may share. The system frees it with the last process that maps it."""

    def __init__(self, runtime: Runtime, memory: npt.NDArray[np.uint8], address: int, nbytes: int) -> None:
        self._runtime, self._memory = runtime, memory
        self.address, self.nbytes, self.label = address, nbytes, ""
        runtime.adopt(memory.ctypes.data, memory.nbytes)

    def free(self) -> None:
        if self.address:
            self._runtime.disown(self._memory.ctypes.data, self._memory.nbytes)
            self.address, self._memory = 0, np.empty(0, np.uint8)
