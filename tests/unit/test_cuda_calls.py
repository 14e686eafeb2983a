"""What the GPU backend decides and what it asks of the driver, in which order, without a GPU: tests/fake_gpu.py stands for one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from kdgen.backends import cuda_launch
from kdgen.backends.base import DeviceArray, Launch, Pointer
from kdgen.backends.cuda import CudaBackend
from kdgen.backends.cuda_launch import Ring, Shape, blocks_of_cluster, carveout, elements, needs_opt_in, recorded_context, scalar, shape_of
from kdgen.codegen.source import Source
from kdgen.errors import BackendError
from kdgen.plan.arch import arch_of_device, target_for
from tests.fake_gpu import MILLISECONDS, FakeGpu

ARRAY = DeviceArray((4,), "f32", 1 << 41, 16, 1)


# ---- decisions ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("capability", "cluster", "waits", "after_collective", "expected"),
    [
        ((9, 0), 1, True, False, Shape((5, 6, 7), None, 256, 100, True)),
        ((9, 0), 1, False, False, Shape((5, 6, 7), None, 256, 100, False)),
        ((9, 0), 1, True, True, Shape((5, 6, 7), None, 256, 100, False)),
        ((9, 0), 4, True, False, Shape((5, 6, 7), 4, 64, 100, True)),
        ((12, 0), 2, True, False, Shape((5, 6, 7), 2, 128, 100, True)),
        ((8, 9), 4, True, False, Shape((5, 6, 7), None, 256, 100, False)),
    ],
)
def test_shapes_of_launches(capability: tuple[int, int], cluster: int, waits: bool, after_collective: bool, expected: Shape) -> None:
    launch = Launch("k", (5, 6, 7), 256, 100, ())
    assert shape_of(launch, capability, blocks_of_cluster(capability, cluster), waits, after_collective) == expected


def test_arguments_have_their_parameters_types() -> None:
    """cuda.core passes a NumPy scalar's bytes: a pointer is 8 of them, an int 4, with its sign."""
    pointer, number = scalar(Pointer(ARRAY, 12)), scalar(-3)
    assert (pointer.dtype, int(pointer)) == (np.dtype(np.uint64), (1 << 41) + 12)
    assert (number.dtype, int(number)) == (np.dtype(np.int32), -3)


@pytest.mark.parametrize(
    ("context", "recorded"),
    [(1, 1024), (1024, 1024), (1025, 2048), (8192, 8192), (8193, 10240), (16384, 16384), (16385, 20480), (100_000, 114688)],
)
def test_contexts_that_are_recorded(context: int, recorded: int) -> None:
    assert recorded_context(context) == recorded


def test_recorded_contexts_are_few_and_never_too_short() -> None:
    found = [recorded_context(context) for context in range(1, 70_000)]
    assert found == sorted(found) and all(context <= each for context, each in enumerate(found, 1))
    assert all(each - context < max(1024, context / 4) for context, each in enumerate(found, 1))
    assert len(set(found)) == 8 + 4 + 4 + 4 + 1, "to 8192, 16384, 32768, 65536, and one beyond"


def test_shared_memory_of_a_multiprocessor() -> None:
    """Percent of 228 KiB: blocks with the KiB that CUDA takes of each, rounded up, at least half, at most all."""
    assert carveout(1, 227 << 10, 228 << 10) == 100 == carveout(3, 227 << 10, 228 << 10)
    assert carveout(2, (70 << 10) - 1024, 228 << 10) == 62  # 61.4
    assert carveout(4, 27 << 10, 100 << 10) == 100
    assert carveout(1, 0, 228 << 10) == carveout(16, 1024, 228 << 10) == 50
    assert not needs_opt_in(49152) and needs_opt_in(49153)


def test_addresses_in_two_words() -> None:
    table = cuda_launch.address_table([0x7FFF_8000_0010, 5])
    assert table.dtype == np.int32 and table.tolist() == [[0x8000_0010 - (1 << 32), 0x7FFF], [5, 0]]


def test_rows_of_an_array() -> None:
    assert elements((5, 3, 2)) == ((5, 3, 2), 30) and elements((5, 3, 2), 2) == ((2, 3, 2), 12)
    assert elements((5, 3), 9) == ((5, 3), 15) and elements(()) == ((), 1)


def test_slots_are_taken_in_the_order_in_which_they_were_posted() -> None:
    ring = Ring(2)
    assert [ring.post(), ring.post(), ring.take(), ring.post(), ring.take(), ring.take()] == [0, 1, 0, 0, 1, 0]
    with pytest.raises(IndexError):
        ring.take()
    assert [ring.post(), ring.post()] == [1, 0]
    with pytest.raises(ValueError, match="the mailbox is full"):
        ring.post()
    ring.clear()
    assert [ring.post(), ring.take()] == [1, 1]


@pytest.mark.parametrize(
    ("capability", "arch", "family"),
    [((8, 0), "sm_80", "generic"), ((9, 0), "sm_90a", "sm_90a"), ((10, 0), "sm_100", "generic"), ((12, 0), "sm_120a", "generic")],
)
def test_a_gpu_gets_the_plan_of_its_capability(
    capability: tuple[int, int], arch: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert arch_of_device(*capability) == arch and target_for(arch).family == family
    fake = FakeGpu(capability)
    backend = fake.open(monkeypatch)
    assert (backend.arch, backend.family, backend.processors, backend.rounds_ahead) == (arch, family, 132, 1)
    backend.load([Source("k", "", 32, 0)])
    assert fake.log[0] == ("compile", "k", arch)
    assert backend.memory_limit() == 80 << 30 and "80 GiB" in backend.description


# ---- calls ----------------------------------------------------------------------------------------------------------------


def loaded(monkeypatch: pytest.MonkeyPatch, fake: FakeGpu, *sources: Source) -> CudaBackend:
    backend = fake.open(monkeypatch)
    backend.load(sources or [Source("add", "", 256, 0, overlaps=True), Source("plain", "", 128, 1000), Source("wide", "", 512, 0, True, 4)])
    return backend


def ints(backend: CudaBackend, *values: int) -> DeviceArray:
    return backend.to_device(np.array(values, np.int32), "i32")


def test_kernels_are_loaded_with_their_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    small, large = Source("small", "500", 128, 48 << 10), Source("large", "16", 512, 100 << 10, cluster=2)
    loaded(monkeypatch, fake, small, large)
    two_of = {name: carveout(2, smem, 228 << 10) for name, smem in (("small", (48 << 10) + 500), ("large", (100 << 10) + 16))}
    assert two_of == {"small": 50, "large": 89}
    assert fake.log[2:] == [
        ("occupancy", "small", (128, 48 << 10)),
        ("carveout", "small", 50),
        ("most dynamic", "large", 100 << 10),
        ("occupancy", "large", (256, 100 << 10)),  # threads of one block of the cluster
        ("carveout", "large", 89),
    ]


@pytest.mark.parametrize("attribute", ["most dynamic", "carveout"])
def test_a_refusal_names_the_kernel(monkeypatch: pytest.MonkeyPatch, attribute: str) -> None:
    fake = FakeGpu()
    fake.refused.add(attribute)
    with pytest.raises(BackendError, match="refused: CUDA_ERROR_INVALID_VALUE"):
        loaded(monkeypatch, fake, Source("large", "", 512, 100 << 10))


def test_launches_have_their_attributes_and_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    backend = loaded(monkeypatch, fake)
    x = ints(backend, 1, 2, 3)
    backend.launch("add", (3, 2, 1), 256, 0, [Pointer(x, 4), -1])
    backend.launch("plain", (1, 1, 1), 64, 1000, [Pointer(x), 7])
    backend.launch("wide", (9, 1, 1), 512, 0, [Pointer(x), 0])
    configs = [
        dict(grid=(3, 2, 1), cluster=None, block=256, shmem_size=0, programmatic_stream_serialization=True),
        dict(grid=(1, 1, 1), cluster=None, block=64, shmem_size=1000, programmatic_stream_serialization=False),
        dict(grid=(9, 1, 1), cluster=4, block=128, shmem_size=0, programmatic_stream_serialization=True),
    ]
    assert [(where, name, config) for where, name, config, _ in fake.launches()] == [
        ("stream", name, config) for name, config in zip(("add", "plain", "wide"), configs, strict=True)
    ]
    assert [int(value) for value in fake.launches()[0][3]] == [x.address + 4, -1]


@pytest.mark.parametrize(
    ("kernel", "smem", "args", "said"),
    [
        ("none", 0, 2, "kernel none is not loaded"),
        ("plain", 1001, 2, "1001 bytes of dynamic shared memory, but loaded for 1000"),
        ("plain", 0, 3, "3 arguments, 2 expected"),
    ],
)
def test_launches_that_cannot_be(monkeypatch: pytest.MonkeyPatch, kernel: str, smem: int, args: int, said: str) -> None:
    fake = FakeGpu()
    with pytest.raises(BackendError, match=said):
        loaded(monkeypatch, fake).launch(kernel, (1, 1, 1), 32, smem, [0] * args)
    assert not fake.launches()


def test_loading_again_replaces_what_was_known(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    backend = loaded(monkeypatch, fake, Source("k", "", 256, 0, overlaps=True, cluster=2))
    backend.load([Source("k", "", 256, 0)])
    backend.launch("k", (1, 1, 1), 256, 0, [0, 0])
    (_, _, config, _), *_ = fake.launches()
    assert (config["cluster"], config["block"], config["programmatic_stream_serialization"]) == (None, 256, False)


def test_values_go_there_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = loaded(monkeypatch, FakeGpu())
    x = backend.to_device(np.arange(12, dtype=np.float32).reshape(4, 3), "f32")
    assert x.nbytes == 48 and x.address % 256 == 0
    backend.write(x, np.array([[50, 51]], np.float32), offset=4)
    assert backend.to_host(x).tolist() == [[0, 1, 2], [3, 50, 51], [6, 7, 8], [9, 10, 11]]
    assert backend.to_host(x, rows=2).tolist() == [[0, 1, 2], [3, 50, 51]]
    halves = np.array([1.5, -2.0], ml_dtypes.bfloat16)
    assert backend.to_host(backend.to_device(halves, "bf16")).tolist() == [1.5, -2.0]
    for values, offset in ((np.zeros(2, np.float32), 11), (np.zeros(1, np.float32), -1), (np.zeros(1, np.int32), 0)):
        with pytest.raises(ValueError, match=r"do not fit|needs C-contiguous"):
            backend.write(x, values, offset)


def test_memory_is_freed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    backend = loaded(monkeypatch, fake)
    x, y = ints(backend, 1), ints(backend, 2)
    backend.synchronize()
    backend.free(x)
    assert fake.log[-1] == ("live arrays", 1)
    assert backend.to_host(y).tolist() == [2]
    for again in (backend.to_host, backend.free):
        with pytest.raises(ValueError, match="was freed"):
            again(x)


def test_a_timer_counts_what_lies_between(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    backend = loaded(monkeypatch, fake)
    for _ in range(2):  # before it
        backend.launch("add", (1, 1, 1), 32, 0, [0, 0])
    stop = backend.timer()
    for _ in range(5):
        backend.launch("add", (1, 1, 1), 32, 0, [0, 0])
    assert stop() == pytest.approx((5 + 1) * MILLISECONDS / 1000), "five launches and the event's own place, in seconds"


# ---- mailboxes and graphs -------------------------------------------------------------------------------------------------


def increment(x: Any, by: int) -> None:
    x[0] += by


def test_a_mailbox_is_read_behind_its_event_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values as they were where they were posted, in order, and nothing launched behind them is waited for."""
    fake = FakeGpu()
    fake.effects["add"] = increment
    backend = loaded(monkeypatch, fake)
    x, y = ints(backend, 10, 0, 0), ints(backend, 5)
    box = backend.mailbox([x, y])
    backend.launch("add", (1, 1, 1), 32, 0, [Pointer(x), 1])
    box.post()
    backend.launch("add", (1, 1, 1), 32, 0, [Pointer(x), 2])
    box.post()
    backend.launch("add", (1, 1, 1), 32, 0, [Pointer(x), 4])
    with pytest.raises(ValueError, match="the mailbox is full"):
        box.post()
    first = box.take()
    assert [each.tolist() for each in first] == [[11, 0, 0], [5]]
    assert len(fake.stream.waiting) == 5, "the second add, its two copies and event, and the third add have not begun"
    box.post()
    assert box.take()[0].tolist() == [13, 0, 0]
    assert box.take()[0].tolist() == [17, 0, 0]
    assert first[0].tolist() == [11, 0, 0], "what was taken is a copy"
    box.post()
    backend.synchronize()
    box.clear()
    with pytest.raises(IndexError):
        box.take()


def test_a_graph_has_the_launches_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    fake.effects |= {"add": increment, "plain": lambda x, by: np.multiply(x[:1], by, out=x[:1])}
    backend = loaded(monkeypatch, fake)
    x = ints(backend, 1)
    work = [Launch(name, (2, 1, 1), 32, 0, (Pointer(x), by)) for name, by in (("add", 2), ("plain", 3), ("add", 1))]
    fake.log.clear()
    replay = backend.record(work)
    assert [each for each in fake.log if each[0] == "load"] == [("load", "add"), ("load", "plain")], "each kernel's code, once, before"
    assert [(where, name) for where, name, _, _ in fake.launches()] == [("graph", "add"), ("graph", "plain"), ("graph", "add")]
    assert fake.log[:2] == [("load", "add"), ("load", "plain")] and fake.log[-1] == "upload"
    assert backend.to_host(x).tolist() == [1], "recording runs nothing"
    replay()
    replay()
    assert backend.to_host(x).tolist() == [((1 + 2) * 3 + 1 + 2) * 3 + 1]
    assert [each for each in fake.log if each[0] == "graph"] == [("graph", 3)] * 2


def test_a_kernel_that_does_not_load_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()
    fake.refused.add("load")
    with pytest.raises(BackendError, match="kernel add does not load: CUDA_ERROR_INVALID_VALUE"):
        loaded(monkeypatch, fake).record([Launch("add", (1, 1, 1), 32, 0, (0, 0))])


def test_failures_name_what_was_launched_since_the_last_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeGpu()

    def fail(*_: Any) -> None:
        raise RuntimeError("an illegal address")

    fake.effects["plain"] = fail
    backend = loaded(monkeypatch, fake)
    backend.launch("wide", (1, 1, 1), 32, 0, [0, 0])
    backend.synchronize()
    for name in ("add", "plain", "add"):
        backend.launch(name, (1, 1, 1), 32, 0, [0, 0])
    with pytest.raises(BackendError, match=r"waiting for kernels \(launched: add, plain; with CUDA_LAUNCH_BLOCKING=1 .*an illegal address"):
        backend.synchronize()
