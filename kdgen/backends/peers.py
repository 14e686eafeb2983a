"""Memory of one GPU that other processes map through CUDA's interprocess handles."""

from __future__ import annotations

import ctypes
from typing import Any

from kdgen.errors import BackendError
from kdgen.ranks.group import Group

_HANDLE_BYTES = 64


def shared_zeros(group: Group, nbytes: int) -> tuple[int, list[int]]:
    """Zeros on this rank's GPU that all ranks reach. Returns their address, and the address here of every rank's zeros.

    All ranks call it with the same size. The memory is never freed. Raises BackendError on every rank when one cannot share or reach it.
    """
    mine, handle, problem = 0, b"", ""
    try:
        mine = _zeros(nbytes)
        handle = _export(mine)
    except BackendError as error:
        problem = str(error)
    addresses = []
    for rank, theirs in enumerate(group.exchange(handle)):
        try:
            addresses.append(mine if rank == group.rank else _open(theirs) if theirs else 0)
        except BackendError as error:
            problem = problem or f"memory of rank {rank}: {error}"
    problems = [said.decode() for said in group.exchange(problem.encode())]
    for rank, said in enumerate(problems):
        if said:
            raise BackendError(f"rank {rank}: {said}")
    return mine, addresses


def _zeros(nbytes: int) -> int:
    from cuda.bindings import driver

    address = _ok(driver.cuMemAlloc(nbytes))
    _ok(driver.cuMemsetD8(address, 0, nbytes))
    _ok(driver.cuCtxSynchronize())
    return int(address)


def _export(address: int) -> bytes:
    from cuda.bindings import driver

    return ctypes.string_at(_ok(driver.cuIpcGetMemHandle(address)).getPtr(), _HANDLE_BYTES)


def _open(handle: bytes) -> int:
    from cuda.bindings import driver

    received = driver.CUipcMemHandle()
    ctypes.memmove(received.getPtr(), handle, _HANDLE_BYTES)
    flag = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
    return int(_ok(driver.cuIpcOpenMemHandle(received, flag)))


def _ok(result: tuple[Any, ...]) -> Any:
    """The value that a driver call returned after its status. Raises BackendError unless the status is success."""
    status, *values = result
    if int(status) != 0:
        raise BackendError(f"the NVIDIA driver reports {status.name}")
    return values[0] if values else None
