"""Memory that CPU ranks of one host share, and an all-gather through it.

The memory is an unnamed file that every rank maps, so the system frees it when the processes end, however they end. Each rank counts its
collectives in its own flag. A rank that waits for other flags checks every few milliseconds whether a rank is lost.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kdgen.errors import BackendError
from kdgen.ranks.group import Group

FLAG_BYTES = 64  #: one cache line for each rank
WAIT_MS = 20

Signal = Callable[[int, int], None]  #: (address of a flag, count)
#: (address of the first flag, flags, words from one to the next, count, milliseconds): whether all flags reached the count in time
Wait = Callable[[int, int, int, int, int], int]


class SharedGather:
    """All-gathers among the ranks of ``group``. ``signal`` and ``wait`` are functions of the runtime that also order memory accesses.

    Raises BackendError when the ranks are on several hosts, or shared memory cannot be allocated.
    """

    def __init__(self, group: Group, signal: Signal, wait: Wait) -> None:
        if not group.one_host:
            raise BackendError("CPU ranks share memory, so all must run on one host")
        self._group, self._signal, self._wait = group, signal, wait
        self.ranks = group.ranks
        self._count = 0
        self._room = 0  # bytes of a rank's slot; there are two slots, used in turn
        self._memory: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)

    def run(self, source: npt.NDArray[np.uint8], target: npt.NDArray[np.uint8], name: str) -> None:
        """Copy every rank's ``source`` to ``target``, which is ``ranks`` times as long. Raises BackendError when a rank is lost."""
        group, size = self._group, len(source)
        if size > self._room:
            self._grow(size)
        self._count += 1
        slot = group.ranks * (FLAG_BYTES + self._count % 2 * self._room)
        slots = self._memory[slot : slot + group.ranks * self._room].reshape(group.ranks, self._room)
        slots[group.rank, :size] = source
        count, flags = self._count & 0xFFFFFFFF, self._memory.ctypes.data
        self._signal(flags + group.rank * FLAG_BYTES, count)
        # A slot is reused two collectives later. By then every rank has started the collective between, so it has read this slot.
        while not self._wait(flags, group.ranks, FLAG_BYTES // 4, count, WAIT_MS):
            group.check()
            for rank in tuple(group.left):  # a rank that has ended has sent its part already, or never will
                if not self._wait(flags + rank * FLAG_BYTES, 1, 0, count, 0):
                    raise BackendError(f"{name}: rank {rank} has ended, and rank {group.rank} waits for it")
        target.reshape(group.ranks, size)[...] = slots[:, :size]

    def _grow(self, size: int) -> None:
        """Make the slots larger. All ranks do so in the same collective, because their sizes are equal."""
        self._room = 1 << (size - 1).bit_length()
        self._memory = shared_memory(self._group, self.ranks * (FLAG_BYTES + 2 * self._room))
        self._count = 0


def shared_memory(group: Group, nbytes: int) -> npt.NDArray[np.uint8]:
    """Zeros that all ranks of ``group`` map. All ranks call it with the same size. The memory is freed with the last array over it.

    Raises BackendError when it cannot be allocated, or a rank is lost.
    """
    with contextlib.ExitStack() as files:
        path = b""
        if group.rank == 0:
            try:
                file = files.enter_context(os.fdopen(os.memfd_create("kdgen-ranks"), "wb"))
                os.posix_fallocate(file.fileno(), 0, nbytes)
            except OSError as error:
                raise BackendError(
                    f"{nbytes} bytes for {group.ranks} ranks to share cannot be allocated: {error.strerror or error}"
                ) from error
            path = f"/proc/{os.getpid()}/fd/{file.fileno()}".encode()
        try:
            with Path(os.fsdecode(group.exchange(path)[0])).open("r+b") as shared:
                memory = np.frombuffer(mmap.mmap(shared.fileno(), nbytes), np.uint8)
            group.exchange(b"")  # every rank has mapped it
        except OSError as error:
            raise BackendError(f"the ranks' shared memory cannot be opened: {error.strerror or error}") from error
    return memory


def bind(library: ctypes.CDLL) -> tuple[Signal, Wait]:
    """The runtime's ``emu_signal`` and ``emu_wait``."""
    library.emu_signal.argtypes = (ctypes.c_void_p, ctypes.c_uint32)
    library.emu_signal.restype = None
    library.emu_wait.argtypes = (ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint, ctypes.c_uint32, ctypes.c_uint)
    return library.emu_signal, library.emu_wait
