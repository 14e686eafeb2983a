"""A GPU that records what CudaBackend asks of its driver: numba's arrays and stream, cuda.core's launches and graphs.

What is put into the stream happens only when something waits for it, as on a GPU that is behind: a result that is read too early is seen.
"""

from __future__ import annotations

import enum
import gc
import sys
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kdgen.backends import cuda as cuda_module
from kdgen.backends.cuda import CudaBackend
from kdgen.backends.gpu import Gpu
from kdgen.codegen.compile import Cubin
from kdgen.codegen.source import Source

MILLISECONDS = 2.0  #: that each thing in the stream takes
Effect = Callable[..., None]  #: what a kernel does, given its arguments: flat arrays for addresses, integers


class Status(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1


class Stream:
    handle = 77

    def __init__(self, log: list[Any]) -> None:
        self.log, self.name = log, "stream"
        self.waiting: list[Callable[[], None]] = []
        self.clock = 0.0

    def add(self, work: Callable[[], None]) -> int:
        self.waiting.append(work)
        return len(self.waiting)

    def drain(self, count: int | None = None) -> None:
        for _ in range(len(self.waiting) if count is None else count):
            self.clock += MILLISECONDS
            self.waiting.pop(0)()

    def synchronize(self) -> None:
        self.log.append("synchronize")
        self.drain()

    def create_graph_builder(self) -> Builder:
        return Builder(self)


class Event:
    def __init__(self, stream: Stream, timing: bool) -> None:
        self.stream, self.timing, self.time = stream, timing, -1.0

    def record(self, stream: Stream) -> None:
        assert stream is self.stream
        self.time = -1.0
        stream.add(self._pass)

    def _pass(self) -> None:
        self.time = self.stream.clock

    def synchronize(self) -> None:
        self.stream.log.append("event")
        while self.time < 0:
            assert self.stream.waiting, "the event was not recorded"
            self.stream.drain(1)

    def elapsed_time(self, end: Event) -> float:
        assert self.timing and end.timing and self.time >= 0 and end.time >= 0
        return end.time - self.time


class Array:
    """numba's device array: a view of a block of bytes."""

    def __init__(self, stream: Stream, data: npt.NDArray[Any], address: int) -> None:
        self.stream, self.data, self.address = stream, data, address
        self.device_ctypes_pointer = types.SimpleNamespace(value=address)

    def __getitem__(self, chosen: slice) -> Array:
        begin = (chosen.start or 0) * self.data.itemsize
        return Array(self.stream, self.data[chosen], self.address + begin)

    def copy_to_host(self, to: npt.NDArray[Any] | None = None, *, stream: Stream) -> npt.NDArray[Any]:
        assert stream is self.stream
        target = np.full_like(self.data, 99) if to is None else to
        stream.add(lambda: np.copyto(target, self.data))
        return target

    def copy_to_device(self, values: npt.NDArray[Any], *, stream: Stream) -> None:
        assert stream is self.stream and values.dtype == self.data.dtype and values.shape == self.data.shape
        kept = values.copy()
        stream.add(lambda: np.copyto(self.data, kept))


class Builder:
    name = "graph"

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.nodes: list[Callable[[], None]] = []
        self.building = False

    def begin_building(self) -> None:
        self.building = True

    def end_building(self) -> Builder:
        self.building = False
        return self

    def complete(self) -> Builder:
        assert not self.building
        return self

    def upload(self, stream: Stream) -> None:
        self.stream.log.append("upload")

    def launch(self, stream: Stream) -> None:
        self.stream.log.append(("graph", len(self.nodes)))
        for node in self.nodes:
            stream.add(node)


class FakeGpu:
    """What ``log`` holds: launches as ("launch", where, kernel, config, arguments), attributes as (name, kernel, value), and words."""

    def __init__(self, capability: tuple[int, int] = (9, 0)) -> None:
        self.log: list[Any] = []
        self.gpu = Gpu("Test", capability, 132, 228 << 10, 80 << 30, (13, 0))
        self.stream = Stream(self.log)
        self.arrays: list[weakref.ref[Array]] = []
        self.memory: dict[int, npt.NDArray[Any]] = {}
        self.effects: dict[str, Effect] = {}
        self.refused: set[str] = set()
        self.blocks_together = 2
        self._next = 1 << 40

    # ---- numba.cuda

    def numba(self) -> types.ModuleType:
        module = types.ModuleType("numba.cuda")
        clear = types.SimpleNamespace(clear=self._clear)
        manager = types.SimpleNamespace(deallocations=clear)
        module.__dict__.update(
            stream=lambda: self.stream,
            device_array=self._array,
            pinned_array=lambda count, dtype: np.full(count, 99, dtype),
            event=lambda timing=True: Event(self.stream, timing),
            current_context=lambda: types.SimpleNamespace(memory_manager=manager),
        )
        return module

    def _array(self, count: int, dtype: np.dtype[Any], *, stream: Stream) -> Array:
        assert stream is self.stream
        array = Array(stream, np.zeros(count, dtype), self._next)
        self.memory[self._next] = array.data
        self._next += -(-max(1, array.data.nbytes) // 256) * 256
        self.arrays.append(weakref.ref(array))
        return array

    def _clear(self) -> None:
        gc.collect()
        self.log.append(("live arrays", sum(each() is not None for each in self.arrays)))

    # ---- cuda.core

    def core(self) -> types.ModuleType:
        module = types.ModuleType("cuda.core")
        device = types.SimpleNamespace(set_current=lambda: None, create_stream=lambda stream: stream)
        module.__dict__.update(
            Device=lambda number: device,
            LaunchConfig=lambda **config: config,
            launch=self._launch,
            ObjectCode=types.SimpleNamespace(from_cubin=lambda code, name: types.SimpleNamespace(get_kernel=self._kernel)),
        )
        return module

    def _kernel(self, name: str) -> Any:
        def together(block: int, smem: int) -> int:
            self.log.append(("occupancy", name, (block, smem)))
            return self.blocks_together

        return types.SimpleNamespace(
            name=name, handle=name, num_arguments=2, occupancy=types.SimpleNamespace(max_active_blocks_per_multiprocessor=together)
        )

    def _launch(self, where: Stream | Builder, config: dict[str, Any], kernel: Any, *arguments: np.generic) -> None:
        self.log.append(("launch", where.name, kernel.name, config, arguments))

        def run() -> None:
            given = [self._at(int(each)) if each.dtype == np.uint64 else int(each) for each in arguments]
            self.effects.get(kernel.name, lambda *_: None)(*given)

        if isinstance(where, Builder):
            assert where.building
            where.nodes.append(run)
        else:
            where.add(run)

    def _at(self, address: int) -> npt.NDArray[Any]:
        base = max(each for each in self.memory if each <= address)
        data = self.memory[base]
        return data[(address - base) // data.itemsize :]

    # ---- cuda.bindings.driver

    def driver(self) -> types.ModuleType:
        module = types.ModuleType("cuda.bindings.driver")
        attributes = types.SimpleNamespace(
            CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES="most dynamic", CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT="carveout"
        )

        def set_attribute(attribute: str, value: int, handle: str, device: int) -> tuple[Status]:
            self.log.append((attribute, handle, value))
            return (self._status(attribute),)

        def load(function: str) -> tuple[Status]:
            self.log.append(("load", function))
            return (self._status("load"),)

        module.__dict__.update(
            CUresult=Status, CUfunction_attribute=attributes, CUdevice=int, cuKernelSetAttribute=set_attribute, cuFuncLoad=load,
            cuKernelGetFunction=lambda handle: (Status.CUDA_SUCCESS, handle),
        )  # fmt: skip
        return module

    def _status(self, name: str) -> Status:
        return Status.CUDA_ERROR_INVALID_VALUE if name in self.refused else Status.CUDA_SUCCESS

    # ---- for tests

    def launches(self) -> list[tuple[str, str, dict[str, Any], tuple[np.generic, ...]]]:
        return [each[1:] for each in self.log if each[0] == "launch"]

    def open(self, monkeypatch: pytest.MonkeyPatch) -> CudaBackend:
        """A CudaBackend on this GPU; its kernels have two parameters each and as much static shared memory as their text says."""
        import cuda.bindings

        numba = types.ModuleType("numba")
        numba.__dict__["cuda"] = self.numba()
        monkeypatch.setitem(sys.modules, "numba", numba)
        monkeypatch.setitem(sys.modules, "cuda.core", self.core())
        driver = self.driver()
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", driver)
        monkeypatch.setattr(cuda.bindings, "driver", driver, raising=False)
        monkeypatch.setattr(cuda_module, "find_gpu", lambda: self.gpu)
        monkeypatch.setattr(cuda_module, "compile_all", self._compile)
        return CudaBackend()

    def _compile(self, work: Sequence[tuple[Source, str]], *_: Any, **__: Any) -> list[Cubin]:
        self.log += [("compile", source.name, arch) for source, arch in work]
        return [
            Cubin(source.name, arch, b"code", 32, int(source.text or 0), source.smem, 0, 0, 0, "", 0.0, False, "13.0")
            for source, arch in work
        ]
