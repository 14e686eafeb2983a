"""Choosing a backend, and looking for a GPU where there may be none."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable

import pytest

from kdgen.backends import backend_names, open_backend
from kdgen.backends.cpu import CpuBackend
from kdgen.backends.cuda import CudaBackend
from kdgen.backends.gpu import Gpu, cuda_unusable, find_gpu, use_gpu
from kdgen.codegen.source import Source
from kdgen.errors import BackendError, KdgenError
from kdgen.runtime.model import random_model
from kdgen.runtime.pipeline import open_engine


class FakeDriver:
    """libcuda with what a test wants it to say."""

    def __init__(self, status: int = 0, count: int = 1, version: int = 13000, capability: tuple[int, int] = (9, 0)) -> None:
        self.status, self.count, self.version, self.capability = status, count, version, capability

    started = False

    def cuInit(self, flags: int) -> int:
        self.started = True
        return self.status

    def cuCtxGetCurrent(self, out: object) -> int:
        return 0 if self.started else 3

    def cuGetErrorName(self, status: int, text: object) -> int:
        text._obj.value = b"CUDA_ERROR_NO_DEVICE"  # type: ignore[attr-defined]
        return 0

    def cuDeviceGetCount(self, out: object) -> int:
        return self._set(out, self.count)

    def cuDriverGetVersion(self, out: object) -> int:
        return self._set(out, self.version)

    def cuDeviceGet(self, out: object, ordinal: int) -> int:
        return self._set(out, ordinal)

    def cuDeviceGetName(self, buffer: object, length: int, device: int) -> int:
        buffer.value = b"NVIDIA Test"  # type: ignore[attr-defined]
        return 0

    def cuDeviceTotalMem_v2(self, out: object, device: int) -> int:
        return self._set(out, 80 << 30)

    def cuDeviceGetAttribute(self, out: object, attribute: int, device: int) -> int:
        return self._set(out, {16: 132, 75: self.capability[0], 76: self.capability[1], 81: 228 << 10}[attribute])

    def _set(self, out: object, value: int) -> int:
        out._obj.value = value  # type: ignore[attr-defined]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[[FakeDriver], None]:
    monkeypatch.delenv("NUMBA_DISABLE_CUDA", raising=False)
    return lambda fake: monkeypatch.setattr(ctypes, "CDLL", lambda name: fake)


def test_a_gpu(driver: Callable[[FakeDriver], None]) -> None:
    driver(FakeDriver())
    gpu = find_gpu()
    assert gpu == Gpu("NVIDIA Test", (9, 0), 132, 228 << 10, 80 << 30, (13, 0)) and isinstance(gpu, Gpu) and gpu.arch == "sm_90a"
    assert cuda_unusable() is None


@pytest.mark.parametrize(
    ("fake", "reason"),
    [
        (FakeDriver(status=100), r"CUDA_ERROR_NO_DEVICE \(100\)"),
        (FakeDriver(count=0), "shows no GPU"),
        (FakeDriver(version=12040), r"CUDA 12\.4, but 13\.0 is needed"),
        (FakeDriver(capability=(7, 5)), r"compute capability 7\.5, but 8\.0 is needed"),
    ],
)
def test_reasons(driver: Callable[[FakeDriver], None], fake: FakeDriver, reason: str) -> None:
    driver(fake)
    with pytest.raises(BackendError, match=f"no GPU can be used: .*{reason}.*the CPU backend runs the same"):
        CudaBackend()


def test_a_rank_chooses_before_anything_asks(driver: Callable[[FakeDriver], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver reads CUDA_VISIBLE_DEVICES when it starts: a list made later would leave all ranks on one GPU, and slow."""
    driver(FakeDriver())
    for visible, chosen in (("", "1"), ("4,7", "7"), ("5", "5")):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        use_gpu(1)
        assert os.environ["CUDA_VISIBLE_DEVICES"] == chosen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    assert cuda_unusable() is None
    with pytest.raises(BackendError, match="before this rank had chosen its GPU"):
        use_gpu(1)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4,7"


def test_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.delenv("NUMBA_DISABLE_CUDA", raising=False)
    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert "no NVIDIA driver" in (cuda_unusable() or "")
    monkeypatch.setenv("NUMBA_DISABLE_CUDA", "1")
    assert cuda_unusable() == "NUMBA_DISABLE_CUDA is set"


def test_looking_imports_nothing_heavy() -> None:
    script = (
        "import sys; from kdgen.backends.gpu import find_gpu; find_gpu()\n"
        "assert not [name for name in sys.modules if name.startswith(('numba', 'cuda.'))]"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_default_is_the_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("kdgen.backends.gpu", "kdgen.backends.cuda"):
        monkeypatch.setattr(f"{module}.find_gpu", lambda: "none today")
    assert open_backend().name == "cpu"
    with pytest.raises(BackendError, match="none today"):
        open_backend("cuda")


def test_names() -> None:
    assert backend_names() == ("cuda", "cpu", "cpu-shuffled", "cpu-checker")
    for name, mode in (("cpu", "plain"), ("cpu-shuffled", "shuffled"), ("cpu-checker", "checker")):
        backend = open_backend(name, seed=3)
        assert backend.name == "cpu" and mode in backend.description
    with pytest.raises(KdgenError, match="unknown backend 'gpu'; there are cuda, cpu, cpu-shuffled, cpu-checker"):
        open_backend("gpu")


def test_a_model_larger_than_memory_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def report(done: int, total: int) -> None:
        raise AssertionError("loading began")

    limit = CpuBackend("plain").memory_limit()
    assert limit is None or limit > 1 << 20
    monkeypatch.setattr(CpuBackend, "memory_limit", lambda self: 24 << 30)
    with pytest.raises(BackendError, match=r"^k26 on .* needs 55\d\.\d GiB of memory, and there are 24\.0; "):
        open_engine(random_model("k26"), 64, backend="cpu", progress=report)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("// Spec: a\n// more\n\nint x;  // kept\n// kept\n", "\n\n\nint x;  // kept\n// kept\n"),
        ("int x;\n", "int x;\n"),
        ("// goes on \\\nint x;\n", "// goes on \\\nint x;\n"),
        ("// no end", "// no end"),
        ("", ""),
    ],
)
def test_the_comment_at_the_top_is_not_compiled_and_lines_keep_their_numbers(text: str, code: str) -> None:
    assert Source("k", text, 32, 0).code == code
