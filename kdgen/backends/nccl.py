"""All-gathers of GPU ranks through NCCL, by the four of its functions that this takes.

The library comes with ``pip install 'kdgen[multi]'``, or with whatever else brought ``nvidia-nccl``; a system's own will do.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

from kdgen.errors import BackendError
from kdgen.ranks import Group

_UNIQUE_ID_BYTES = 128
_INT8, _INT32 = 0, 2  # ncclDataType_t


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _UNIQUE_ID_BYTES),)


def library_path() -> str:
    """The NCCL library of the wheel if there is one, else the name that the system's loader may know."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ImportError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / "lib" / "libnccl.so.2").is_file():
            return str(path)
    return "libnccl.so.2"


class Nccl:
    """A communicator of all ranks of ``group``, on the GPU that is current. All ranks make theirs at once.

    Raises BackendError when the library is missing, or NCCL refuses (two ranks on one GPU, say).
    """

    def __init__(self, group: Group) -> None:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # sums in switches have an order of their own, and all-gathers need none
        try:
            self._library: ctypes.CDLL | None = ctypes.CDLL(library_path())
            problem = ""
        except OSError as error:
            self._library, problem = None, str(error)
        missing = [str(rank) for rank, said in enumerate(group.exchange(problem.encode())) if said]
        if missing:
            why = problem or f"rank {missing[0]} lacks it"
            raise BackendError(f"ranks that do not reach each other's memory need NCCL: pip install 'kdgen[multi]' ({why})")
        assert self._library is not None
        self._library.ncclGetErrorString.restype = ctypes.c_char_p
        self._library.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int)
        self._library.ncclAllGather.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        )  # fmt: skip
        unique = _UniqueId()
        if group.rank == 0:
            self._check(self._library.ncclGetUniqueId(ctypes.byref(unique)), "ncclGetUniqueId")
        unique = _UniqueId.from_buffer_copy(group.exchange(bytes(unique))[0])
        self._communicator = ctypes.c_void_p()
        self._check(self._library.ncclCommInitRank(ctypes.byref(self._communicator), group.ranks, unique, group.rank), "ncclCommInitRank")

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """``nbytes`` from address ``source`` of every rank to ``target``, in ``stream`` or in what it is captured to."""
        assert self._library is not None
        count, kind = (nbytes // 4, _INT32) if nbytes % 4 == 0 else (nbytes, _INT8)
        self._check(self._library.ncclAllGather(source, target, count, kind, self._communicator, stream), "ncclAllGather")

    def _check(self, status: int, what: str) -> None:
        if status and self._library is not None:
            raise BackendError(f"{what}: {self._library.ncclGetErrorString(status).decode(errors='replace')}; NCCL_DEBUG=WARN says more")
