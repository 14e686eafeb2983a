"""What ranks on GPUs ask of the driver, without one: who shares memory, who gathers, and what waits for that."""

from __future__ import annotations

import ctypes
import sys
import types
from typing import Any, cast

import numpy as np
import pytest

from kdgen.backends import peers
from kdgen.backends.base import AllGather, Launch, Pointer
from kdgen.backends.cuda import CudaBackend
from kdgen.codegen.source import Source
from kdgen.errors import BackendError
from kdgen.ranks.group import Group
from tests.fake_gpu import FakeGpu


def opened(monkeypatch: pytest.MonkeyPatch, fake: FakeGpu) -> CudaBackend:
    backend = fake.open(monkeypatch)
    backend.load([Source("add", "", 256, 0, overlaps=True)])
    return backend


class Pair:
    """A rank of two, whose other one exchanges ``theirs``, one after another."""

    ranks, one_host = 2, True

    def __init__(self, rank: int = 0, theirs: tuple[bytes, ...] = ()) -> None:
        self.rank, self.theirs, self.said = rank, list(theirs), list[bytes]()

    def exchange(self, data: bytes) -> list[bytes]:
        self.said.append(data)
        other = self.theirs.pop(0) if self.theirs else b""
        return [data, other] if self.rank == 0 else [other, data]

    def check(self) -> None:
        pass


class FakeNccl:
    def __init__(self, fake: FakeGpu) -> None:
        self.fake = fake

    def all_gather(self, *arguments: int) -> None:
        self.fake.log.append(("gather", *arguments))


def test_no_kernel_starts_early_behind_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    backend = opened(monkeypatch, fake)
    x = backend.to_device(np.array([1, 2], np.int32), "i32")
    gather = AllGather("gather_x", Pointer(x, 4), Pointer(x), 4)
    with pytest.raises(BackendError, match="has not joined other ranks"):
        backend.gather(gather)
    monkeypatch.setattr("kdgen.backends.cuda.shared_zeros", lambda group, nbytes: (0, [0, 0]))
    assert backend.join(cast(Group, Pair())) == "peer" and backend.description.endswith("one of 2 ranks")
    monkeypatch.setattr("kdgen.backends.cuda.Nccl", lambda group: FakeNccl(fake))
    launch = Launch("add", (1, 1, 1), 32, 0, (0, 0))
    backend.record([launch, gather, launch, launch])
    backend.start(gather)
    backend.start(launch)
    backend.start(launch)
    backend.start(gather)
    backend.record([launch])  # a graph begins anew
    early = [config["programmatic_stream_serialization"] for _, _, config, _ in fake.launches()]
    assert early == [True, False, True, False, True, True]
    assert [each for each in fake.log if each[0] == "gather"] == [("gather", x.address + 4, x.address, 4, 77)] * 3


def test_ranks_that_cannot_share_memory_gather(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(group: Group, nbytes: int) -> tuple[int, list[int]]:
        raise BackendError("no peer access")

    backend = opened(monkeypatch, FakeGpu())
    monkeypatch.setattr("kdgen.backends.cuda.shared_zeros", refuse)
    assert backend.join(cast(Group, Pair())) == "gather"
    apart = Pair()
    apart.one_host = False
    assert backend.join(cast(Group, apart)) == "gather"


def test_an_inbox_is_known_by_every_ranks_address(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = opened(monkeypatch, FakeGpu())
    with pytest.raises(BackendError, match="shares no memory"):
        backend.inbox((4, 2), "f64")
    sizes = []

    def zeros(group: Group, nbytes: int) -> tuple[int, list[int]]:
        sizes.append(nbytes)
        return 0x7000_0000_0000, [0x7000_0000_0000, 0x7100_9000_0000]

    monkeypatch.setattr("kdgen.backends.cuda.shared_zeros", zeros)
    backend.join(cast(Group, Pair()))
    box, table = backend.inbox((4, 2), "f64")
    assert (box.shape, box.address, box.nbytes, sizes[-1]) == ((4, 2), 0x7000_0000_0000, 64, 64)
    assert backend.to_host(table).view(np.uint32).tolist() == [[0, 0x7000], [0x9000_0000, 0x7100]]


class MemoryDriver(types.ModuleType):
    """The driver's calls for memory that processes share; an allocation's handle is its address in eight bytes and 56 more."""

    def __init__(self, refuses: str = "") -> None:
        super().__init__("cuda.bindings.driver")
        self.log: list[Any] = []
        self.refuses = refuses
        self.CUipcMem_flags = types.SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
        self.CUipcMemHandle = self.Handle

    class Handle:
        def __init__(self) -> None:
            self.bytes = ctypes.create_string_buffer(64)

        def getPtr(self) -> int:
            return ctypes.addressof(self.bytes)

    def _status(self, name: str, *arguments: Any) -> Any:
        self.log.append((name, *arguments))
        return _Status(name == self.refuses)

    def cuMemAlloc(self, nbytes: int) -> tuple[Any, int]:
        return self._status("alloc", nbytes), 4096

    def cuMemsetD8(self, address: int, value: int, count: int) -> tuple[Any]:
        return (self._status("set", address, value, count),)

    def cuCtxSynchronize(self) -> tuple[Any]:
        return (self._status("synchronize"),)

    def cuIpcGetMemHandle(self, address: int) -> tuple[Any, Any]:
        handle = self.Handle()
        handle.bytes.raw = address.to_bytes(8, "little") + bytes(range(56))
        return self._status("export", address), handle

    def cuIpcOpenMemHandle(self, handle: Any, flag: int) -> tuple[Any, int]:
        return self._status("open", bytes(handle.bytes.raw), flag), 8192


class _Status:
    name = "CUDA_ERROR_X"

    def __init__(self, failed: bool) -> None:
        self.failed = failed

    def __int__(self) -> int:
        return int(self.failed)


def memory_driver(monkeypatch: pytest.MonkeyPatch, refuses: str = "") -> MemoryDriver:
    import cuda.bindings

    driver = MemoryDriver(refuses)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
    monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
    return driver


@pytest.mark.parametrize("rank", [0, 1])
def test_memory_of_ranks_is_zero_before_it_is_shared(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    driver = memory_driver(monkeypatch)
    theirs = bytes(range(100, 164))
    mine, everywhere = peers.shared_zeros(cast(Group, Pair(rank, (theirs, b""))), 640)
    assert driver.log == [("alloc", 640), ("set", 4096, 0, 640), ("synchronize",), ("export", 4096), ("open", theirs, 1)]
    assert mine == 4096 and everywhere == ([4096, 8192] if rank == 0 else [8192, 4096])


def test_every_rank_says_which_one_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    memory_driver(monkeypatch, "open")
    with pytest.raises(BackendError, match="rank 0: memory of rank 1: the NVIDIA driver reports CUDA_ERROR_X"):
        peers.shared_zeros(cast(Group, Pair(0, (bytes(64), b""))), 64)
    memory_driver(monkeypatch, "alloc")
    pair = Pair(0, (bytes(64), b""))
    with pytest.raises(BackendError, match="rank 0: the NVIDIA driver reports CUDA_ERROR_X"):
        peers.shared_zeros(cast(Group, pair), 64)
    assert pair.said[0] == b"", "the others learn that there is no handle"
    memory_driver(monkeypatch)
    with pytest.raises(BackendError, match="rank 1: no room"):
        peers.shared_zeros(cast(Group, Pair(0, (b"", b"no room"))), 64)
