"""Who calls NCCL, and what is said where nobody can. The library itself needs GPUs: tests/gpu/test_multi_gpu.py."""

from __future__ import annotations

import sys
import types
from typing import Any, cast

import pytest

from kdgen.backends import nccl
from kdgen.backends.nccl import Nccl
from kdgen.errors import BackendError
from kdgen.ranks.group import Group


class FakeGroup:
    """One of two ranks, of which the other has no problem; rank 0's id is the second thing exchanged."""

    ranks = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.said: list[bytes] = []

    def exchange(self, data: bytes) -> list[bytes]:
        self.said.append(data)
        return [data, b""] if len(self.said) == 1 else [data or b"id from rank 0", b""]


class Bindings(types.ModuleType):
    """nccl4py's, of a library that is not there, or that does nothing."""

    class NCCLError(Exception):
        pass

    class UniqueId:
        @staticmethod
        def from_buffer(data: bytes) -> str:
            return f"unique {data.decode()}"

    def __init__(self, present: bool = True, refuses: bool = False) -> None:
        super().__init__("nccl.bindings.nccl")
        self.present, self.refuses = present, refuses
        self.calls: list[tuple[Any, ...]] = []

    def get_version(self) -> int:
        if not self.present:
            raise RuntimeError("Failure finding libnccl.so.2")
        return 23203

    def get_unique_id(self) -> bytes:
        return b"id"

    def comm_init_rank(self, *arguments: Any) -> str:
        if self.refuses:
            raise self.NCCLError("invalid usage")
        self.calls.append(arguments)
        return "communicator"

    def all_gather(self, *arguments: Any) -> None:
        self.calls.append(arguments)


def installed(monkeypatch: pytest.MonkeyPatch, bindings: Bindings | None) -> None:
    for name in ("nccl", "nccl.bindings"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name) if bindings else None)
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", bindings)


def open_nccl(rank: int = 0) -> Nccl:
    return Nccl(cast(Group, FakeGroup(rank)))


@pytest.mark.parametrize(("rank", "unique"), [(0, "unique id"), (1, "unique id from rank 0")])
def test_nccl4py_where_it_is(monkeypatch: pytest.MonkeyPatch, rank: int, unique: str) -> None:
    """Rank 0's id joins them; whole words go as integers, anything else as bytes."""
    bindings = Bindings()
    installed(monkeypatch, bindings)
    found = open_nccl(rank)
    found.all_gather(16, 32, 28, 7)
    found.all_gather(16, 32, 27, 7)
    assert bindings.calls == [(2, unique, rank), (16, 32, 7, 2, "communicator", 7), (16, 32, 27, 0, "communicator", 7)]


def test_what_nccl_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Bindings(refuses=True))
    with pytest.raises(BackendError, match="comm_init_rank: invalid usage"):
        open_nccl()


def test_bindings_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, Bindings(present=False))
    with pytest.raises(BackendError, match=r"pip install 'kdgen\[multi\]' \(get_version: Failure finding"):
        open_nccl()


def test_neither_bindings_nor_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, None)
    monkeypatch.setattr(nccl, "library_path", lambda: "libno-nccl.so")
    with pytest.raises(BackendError, match=r"need NCCL: pip install 'kdgen\[multi\]' \(libno-nccl.so"):
        open_nccl()
