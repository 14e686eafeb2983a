"""All-gathers of GPU ranks through NCCL, which need three of its functions.

``pip install 'kdgen[multi]'`` installs the library and nccl4py, NVIDIA's Python bindings. Without those, ctypes calls a library installed
by something else (torch's nvidia-nccl, the system); the three functions have not changed since NCCL 2.0.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any, Protocol

from kdgen.errors import BackendError
from kdgen.ranks.group import Group

_UNIQUE_ID_BYTES = 128
_INT8, _INT32 = 0, 2  # ncclDataType_t


class Calls(Protocol):
    """NCCL's functions. Each raises BackendError with NCCL's message."""

    def unique_id(self) -> bytes: ...

    def join(self, ranks: int, unique_id: bytes, rank: int) -> None:
        """Create this process's communicator. Returns when all ranks have called it."""

    def all_gather(self, source: int, target: int, count: int, kind: int, stream: int) -> None: ...


class Nccl:
    """A communicator of all ranks of ``group`` on the current GPU. Creating it waits for all ranks.

    Raises BackendError when the library is missing, or NCCL refuses, for example two ranks on one GPU.
    """

    def __init__(self, group: Group) -> None:
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # switches would sum in another order; all-gathers need no sums
        calls, problem = None, ""
        try:
            calls = open_calls()
        except BackendError as error:
            problem = str(error)
        missing = [str(rank) for rank, said in enumerate(group.exchange(problem.encode())) if said]
        if missing or calls is None:
            why = problem or f"rank {missing[0]} lacks it"
            raise BackendError(f"ranks that cannot reach each other's memory need NCCL: pip install 'kdgen[multi]' ({why})")
        self._calls = calls
        calls.join(group.ranks, group.exchange(b"" if group.rank else calls.unique_id())[0], group.rank)

    def all_gather(self, source: int, target: int, nbytes: int, stream: int) -> None:
        """Copy ``nbytes`` from every rank's address ``source`` to ``target``, in ``stream`` or in the graph that captures it."""
        count, kind = (nbytes // 4, _INT32) if nbytes % 4 == 0 else (nbytes, _INT8)
        self._calls.all_gather(source, target, count, kind, stream)


def open_calls() -> Calls:
    """nccl4py if it is installed, otherwise the library by ctypes. Raises BackendError if neither is installed."""
    try:
        return _Nccl4py(importlib.import_module("nccl.bindings.nccl"))
    except ImportError:
        return _Library(library_path())


class _Nccl4py:
    def __init__(self, bindings: Any) -> None:
        self._bindings = bindings
        self._communicator: Any = None
        self._called("get_version")  # loads the library

    def unique_id(self) -> bytes:
        return bytes(self._called("get_unique_id"))

    def join(self, ranks: int, unique_id: bytes, rank: int) -> None:
        self._communicator = self._called("comm_init_rank", ranks, self._bindings.UniqueId.from_buffer(unique_id), rank)

    def all_gather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:
        self._called("all_gather", source, target, count, kind, self._communicator, stream)

    def _called(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._bindings, name)(*arguments)
        except (self._bindings.NCCLError, RuntimeError) as error:  # RuntimeError if the library is missing or old
            raise BackendError(f"{name}: {error}") from error


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_char * _UNIQUE_ID_BYTES),)


class _Library:
    def __init__(self, path: str) -> None:
        try:
            self._library = library = ctypes.CDLL(path)
        except OSError as error:
            raise BackendError(str(error)) from None
        library.ncclGetErrorString.restype = ctypes.c_char_p
        library.ncclCommInitRank.argtypes = (ctypes.c_void_p, ctypes.c_int, _UniqueId, ctypes.c_int)
        library.ncclAllGather.argtypes = (
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p,
        )  # fmt: skip
        self._communicator = ctypes.c_void_p()

    def unique_id(self) -> bytes:
        found = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(found)), "ncclGetUniqueId")
        return bytes(found)

    def join(self, ranks: int, unique_id: bytes, rank: int) -> None:
        unique = _UniqueId.from_buffer_copy(unique_id)
        self._check(self._library.ncclCommInitRank(ctypes.byref(self._communicator), ranks, unique, rank), "ncclCommInitRank")

    def all_gather(self, source: int, target: int, count: int, kind: int, stream: int) -> None:
        self._check(self._library.ncclAllGather(source, target, count, kind, self._communicator, stream), "ncclAllGather")

    def _check(self, status: int, what: str) -> None:
        if status:
            raise BackendError(f"{what}: {self._library.ncclGetErrorString(status).decode(errors='replace')}; NCCL_DEBUG=WARN says more")


def library_path() -> str:
    """The NCCL library of the wheel if it is installed, otherwise the name for the system's loader."""
    try:
        spec = importlib.util.find_spec("nvidia.nccl")
    except ImportError:
        spec = None
    for folder in (spec.submodule_search_locations or []) if spec else []:
        if (path := Path(folder) / "lib" / "libnccl.so.2").is_file():
            return str(path)
    return "libnccl.so.2"
