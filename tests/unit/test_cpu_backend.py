"""The CPU backend: memory, loading, launching, and everything that can go wrong with them."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kdgen.backends import cpu, cpu_runtime, host_compiler, line_table
from kdgen.backends.base import Argument, DeviceArray, Pointer
from kdgen.backends.cpu import NUMPY_DTYPES, SHARED_LIMIT, CpuBackend, Mode
from kdgen.backends.host_compiler import HostCompiler
from kdgen.codegen.source import Source
from kdgen.errors import BackendError, CompileError
from kdgen.files.resources import templates_dir
from kdgen.plan.ir import DType

REPOSITORY = Path(__file__).resolve().parents[2]


def source(name: str, body: str, parameters: str = "int* out, int n", block: int = 64, smem: int = 0) -> Source:
    return Source(
        name,
        f'#include "primitives.cuh"\nnamespace {name} {{\n'
        f'extern "C" __global__ void __launch_bounds__({block}) {name}({parameters}) {{\n{body}\n}}\n}}\n',
        block,
        smem,
    )


#: Sums neighbours through shared memory, so that order, barriers and block indices all show in the result.
MIX = source(
    "mix",
    """  SHARED_ARRAY(float, s, [64]);
  const int t = threadIdx.x, i = ((blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x) * 64 + t;
  s[t] = x[i];
  __syncthreads();
  const float total = warp_sum(s[63 - t]);
  y[i] = from_float<bf16>(total * 0.37f + s[t ^ 1]);""",
    "const float* x, bf16* y",
)
FILL = source("fill", "  out[blockIdx.x * 64 + threadIdx.x] = n + threadIdx.x;")


@pytest.fixture(scope="module")
def backend() -> CpuBackend:
    made = CpuBackend()
    made.load(
        [
            MIX,
            FILL,
            source("accept", "  out[threadIdx.x] = (int)exp((float)n);"),  # the C library has an `accept` too
            source("past_the_end", "  if (threadIdx.x == 0) out[n] = 1;"),
            source("far_past_the_end", "  out[n + threadIdx.x] = *(volatile int*)(out + n);"),
            source("null", "  *(volatile int*)(size_t)threadIdx.x = n;"),
            source("divide", "  out[threadIdx.x] = n / (int)(threadIdx.x - 9);"),
            source("overflow", "  volatile int big[40000];\n  for (int i = 0; i < 40000; ++i) big[i] = i;\n  out[threadIdx.x] = big[n];"),
            source("trap", "  if (threadIdx.x == 7)\n    __trap();"),
            source("stuck", "  if (threadIdx.x < 40) out[threadIdx.x] = __shfl_sync(0xffffffffu, n, 0);"),
            source("too_much_shared", "  SHARED_ARRAY(int, s, [20000]);\n  s[threadIdx.x] = n;\n  out[threadIdx.x] = s[0];"),
            source("dynamic", "  SHARED_DYNAMIC(int, s);\n  s[n] = n;\n  if (threadIdx.x == 0) out[0] = s[n];", smem=SHARED_LIMIT),
            source(
                "slow", "  float v = 1.0f;\n  for (int i = 0; i < n; ++i) v = v * 1.0001f + 0.5f;\n  out[threadIdx.x] = (int)v;", block=1
            ),
            source("no_arguments", "", parameters=""),
        ]
    )
    return made


def launch(backend: CpuBackend, kernel: str, n: int, grid: int = 1, block: int = 64, smem: int = 0) -> list[int]:
    out = backend.to_device(np.zeros(64 * grid, np.int32), "i32")
    backend.launch(kernel, (grid, 1, 1), block, smem, [Pointer(out), n])
    return [int(v) for v in backend.to_host(out)]


# ---- memory ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_round_trip(backend: CpuBackend, dtype: DType) -> None:
    values = np.random.default_rng(0).integers(0, 100, (3, 5)).astype(NUMPY_DTYPES[dtype])
    array = backend.to_device(values, dtype)
    back = backend.to_host(array)
    assert (back.dtype, back.shape, back.tobytes()) == (values.dtype, values.shape, values.tobytes())
    backend.write(array, values.reshape(-1)[:2], offset=7)
    flat = values.reshape(-1).copy()
    flat[7:9] = flat[:2]
    assert backend.to_host(array).tobytes() == flat.tobytes()
    back[...] = 0
    assert backend.to_host(array).tobytes() == flat.tobytes(), "to_host must copy"


def test_bf16_is_ml_dtypes(backend: CpuBackend) -> None:
    assert backend.to_host(backend.empty((2,), "bf16")).dtype == ml_dtypes.bfloat16


@pytest.mark.parametrize("nbytes", [0, 1, 255, 256, 257, 4096, 70000])
def test_empty_is_poison_and_aligned(backend: CpuBackend, nbytes: int) -> None:
    array = backend.empty((nbytes,), "u8")
    assert array.address % 256 == 0
    assert array.nbytes == nbytes
    assert (backend.to_host(array) == 0xFF).all()


def test_empty_floats_are_nan(backend: CpuBackend) -> None:
    for dtype in ("f32", "bf16", "f64"):
        assert np.isnan(backend.to_host(backend.empty((9,), dtype)).astype(np.float64)).all()


def test_vast_memory_costs_what_is_touched(backend: CpuBackend) -> None:
    array = backend.vast((2**34,), "u8")
    before = int(Path("/proc/self/statm").read_text().split()[1])
    backend.write(array, np.arange(4, dtype=np.uint8), 2**34 - 4)
    last = DeviceArray((8,), "u8", array.address + 2**34 - 8, 8, array.handle)
    assert backend.to_host(last).tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert int(Path("/proc/self/statm").read_text().split()[1]) - before < 1000  # pages
    backend.free(array)
    with pytest.raises(BackendError, match="was freed"):
        backend.to_host(last)
    with pytest.raises(BackendError, match="bytes of address space"):
        backend.vast((2**50,), "u8")


def test_refused_writes(backend: CpuBackend) -> None:
    array = backend.empty((4, 4), "f32")
    with pytest.raises(BackendError, match=r"float64 values into f32\[4, 4\]; it holds float32"):
        backend.write(array, np.zeros(4))
    with pytest.raises(BackendError, match=r"write of 5 elements at 12 into .*, which has 16"):
        backend.write(array, np.zeros(5, np.float32), offset=12)
    with pytest.raises(BackendError, match="not C-contiguous"):
        backend.write(array, np.zeros((4, 8), np.float32)[:, ::2])
    with pytest.raises(BackendError, match="at -1"):
        backend.write(array, np.zeros(1, np.float32), offset=-1)


def test_freed_memory_is_refused(backend: CpuBackend) -> None:
    array = backend.to_device(np.zeros(64, np.int32), "i32")
    backend.free(array)
    for use in (
        lambda: backend.free(array),
        lambda: backend.to_host(array),
        lambda: backend.write(array, np.zeros(1, np.int32)),
        lambda: backend.launch("fill", (1, 1, 1), 64, 0, [Pointer(array), 1]),
    ):
        with pytest.raises(BackendError, match=r"i32\[64\] is used after it was freed"):
            use()


# ---- launches --------------------------------------------------------------


def test_grid_has_three_dimensions(backend: CpuBackend) -> None:
    grid = (3, 2, 4)
    x = np.arange(24 * 64, dtype=np.float32)
    y = backend.empty((24 * 64,), "bf16")
    backend.launch("mix", grid, 64, 0, [Pointer(backend.to_device(x, "f32")), Pointer(y)])
    rows = x.reshape(24, 2, 32)
    total = rows[:, ::-1].sum(2, keepdims=True)  # exact: small integers
    expected = (np.float32(0.37) * total + x.reshape(24, 2, 32)[:, :, np.arange(32) ^ 1]).astype(ml_dtypes.bfloat16)
    assert backend.to_host(y).tobytes() == expected.tobytes()


def test_results_do_not_depend_on_mode_threads_or_seed() -> None:
    x = np.random.default_rng(1).standard_normal(300 * 64).astype(np.float32)
    results = set()
    runs: list[tuple[Mode, int, int]] = [("plain", 0, 1), ("plain", 0, 2), ("plain", 0, 5), ("shuffled", 0, 1), ("shuffled", 9, 1)]
    for mode, seed, threads in [*runs, ("checker", 0, 1)]:
        made = CpuBackend(mode, seed=seed, threads=threads)
        made.load([MIX])
        y = made.empty((x.size,), "bf16")
        made.launch("mix", (300, 1, 1), 64, 0, [Pointer(made.to_device(x, "f32")), Pointer(y)])
        results.add(made.to_host(y).tobytes())
    assert len(results) == 1


def test_many_os_threads_run_every_block_once(backend: CpuBackend) -> None:
    made = CpuBackend(threads=4)
    made.load(
        [source("count", "  for (int i = 0; i < 200; ++i) __syncthreads();\n  if (threadIdx.x == 0) atomicAdd(&out[blockIdx.x], n);")]
    )
    for _ in range(3):
        assert launch(made, "count", 3, grid=500)[:500] == [3] * 500


def test_offset_pointers(backend: CpuBackend) -> None:
    out = backend.to_device(np.zeros(128, np.int32), "i32")
    backend.launch("fill", (1, 1, 1), 32, 0, [Pointer(out, 4 * 96), 5])
    assert backend.to_host(out).tolist() == [0] * 96 + list(range(5, 37))


def test_negative_and_missing_arguments_and_libc_names(backend: CpuBackend) -> None:
    assert launch(backend, "fill", -70)[:3] == [-70, -69, -68]
    assert launch(backend, "accept", 0)[0] == 1
    backend.launch("no_arguments", (1, 1, 1), 64, 0, [])


def test_loading_again_replaces() -> None:
    made = CpuBackend()
    made.load([source("same", "  out[threadIdx.x] = n;")])
    assert launch(made, "same", 4)[0] == 4
    made.load([source("same", "  out[threadIdx.x] = n + 1;")])
    assert launch(made, "same", 4)[0] == 5


def test_refused_launches(backend: CpuBackend) -> None:
    out = backend.empty((64,), "i32")
    good: list[Argument] = [Pointer(out), 1]
    cases: list[tuple[str, tuple[int, int, int], int, int, list[Argument], str]] = [
        ("nothing", (1, 1, 1), 64, 0, good, "kernel nothing is not loaded"),
        ("fill", (1, 1, 1), 65, 0, good, "fill: launched with 65 threads in a block; its launch bound is 64"),
        ("fill", (1, 1, 1), 0, 0, good, "0 threads"),
        ("fill", (0, 1, 1), 64, 0, good, "grid"),
        ("fill", (1, 65536, 1), 64, 0, good, "grid"),
        ("fill", (1, 1, 1), 64, 16, good, "launched with 16 bytes of dynamic shared memory; it was built for 0"),
        (
            "dynamic",
            (1, 1, 1),
            64,
            SHARED_LIMIT + 1,
            good,
            f"{SHARED_LIMIT + 1} bytes of dynamic shared memory; a block may have {SHARED_LIMIT}",
        ),
        ("fill", (1, 1, 1), 64, 0, good[:1], "1 arguments given, 2 parameters declared"),
        ("fill", (1, 1, 1), 64, 0, [*good, 3], "3 arguments given, 2 parameters declared"),
        ("fill", (1, 1, 1), 64, 0, [1, 1], "argument 0 is an integer; the parameter is a pointer"),
        ("fill", (1, 1, 1), 64, 0, [Pointer(out), Pointer(out)], "argument 1 is a pointer; the parameter is an integer"),
        ("fill", (1, 1, 1), 64, 0, [Pointer(out), 2**31], "does not fit an int32"),
        ("fill", (1, 1, 1), 64, 0, [Pointer(out, 257), 1], "starts 257 bytes into"),
    ]
    for kernel, grid, block, smem, args, message in cases:
        with pytest.raises(BackendError, match=message):
            backend.launch(kernel, grid, block, smem, args)


def test_bad_modes_and_threads() -> None:
    with pytest.raises(BackendError, match="mode 'fast' of the CPU backend; there are plain, shuffled, checker"):
        CpuBackend("fast")  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="threads is 0"):
        CpuBackend(threads=0)


# ---- kernels that misbehave, in plain mode ----------------------------------


@pytest.mark.parametrize(
    ("kernel", "n", "message"),
    [
        (
            "past_the_end",
            64,
            r"past_the_end block .* at past_the_end.cu:4: out of bounds: access at byte 256 of i32\[64\], argument 0, which has 256",
        ),
        ("past_the_end", -1, r"past_the_end: out of bounds: something was written just outside i32\[64\], argument 0"),
        (
            "far_past_the_end",
            1000,
            r"far_past_the_end block \(0, 0, 0\) thread 0 at far_past_the_end.cu:4: out of bounds: access at byte 4000 of i32",
        ),
        ("null", 1, "null block .* at null.cu:4: .*no memory of this device"),
        ("divide", 1, r"divide block .* thread 9 at divide.cu:4: integer division by zero"),
        ("overflow", 1, r"overflow block .*: stack overflow"),
        ("trap", 1, r"trap block .* thread 7 at trap.cu:5: __trap\(\)"),
        ("stuck", 1, "stuck block .* at stuck.cu:4: divergence: .*lanes 000000ff of warp 1 wait at __shfl_sync"),
        ("too_much_shared", 1, "too_much_shared .*80000 bytes of static shared memory; a block may have 49152"),
    ],
)
def test_misbehaviour_is_named_and_survived(backend: CpuBackend, kernel: str, n: int, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        launch(backend, kernel, n)
    assert launch(backend, "fill", 1, grid=3)[:64] == list(range(1, 65))


def test_largest_shared_memory(backend: CpuBackend) -> None:
    last = SHARED_LIMIT // 4 - 1
    assert launch(backend, "dynamic", last, smem=SHARED_LIMIT)[0] == last


def test_labels_name_buffers_in_errors(backend: CpuBackend) -> None:
    out = backend.empty((60,), "i32")  # alignment leaves room for 4 more
    backend.label(out, "kv_cache")
    with pytest.raises(BackendError, match=r"outside kv_cache \(i32\[60\]\), argument 0, which has 240 bytes"):
        backend.launch("past_the_end", (1, 1, 1), 64, 0, [Pointer(out), 63])


def test_interrupt_ends_a_long_launch(backend: CpuBackend) -> None:
    out = backend.to_device(np.zeros(64, np.int32), "i32")
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        backend.launch("slow", (2_000_000, 1, 1), 1, 0, [Pointer(out), 2000])
    assert time.monotonic() - start < 5
    assert launch(backend, "fill", 1)[0] == 1


# ---- building --------------------------------------------------------------


def test_compile_errors_name_kernel_and_line() -> None:
    good, bad = source("good", "  out[0] = n;"), source("bad", "  out[0] = m;\n  out[1] = missing(n);")
    with pytest.raises(CompileError, match=r"(?s)^kernel bad: .*bad\.cu:4:.*'m'.*bad\.cu:5:.*missing"):
        CpuBackend().load([good, bad])


@pytest.mark.parametrize(
    ("body", "parameters", "says"),
    [
        ("  __shared__ int s[4];", "int* out", "__shared__"),
        ("  atomicAdd(out, 1.0f);", "float* out", "atomicAdd"),
        ("  *out = x;", "float* out, float x", "kernel parameters are pointers and 32-bit integers"),
    ],
)
def test_what_generated_kernels_may_not_use(body: str, parameters: str, says: str) -> None:
    with pytest.raises(CompileError, match=says):
        CpuBackend().load([source("forbidden", body, parameters)])


@pytest.mark.parametrize(("block", "smem"), [(0, 0), (1025, 0), (64, SHARED_LIMIT + 1), (64, -1)])
def test_impossible_sources(block: int, smem: int) -> None:
    with pytest.raises(CompileError, match="kernel k: "):
        CpuBackend().load([source("k", "", block=block, smem=smem)])


def test_one_name_twice_in_one_load() -> None:
    with pytest.raises(CompileError, match="same kernel name"):
        CpuBackend().load([FILL, FILL])


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    CpuBackend().load([FILL])  # the runtime, from the shared cache
    monkeypatch.setenv("KDGEN_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"


class Builds:
    """Counts what the compiler is asked to build."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        real = HostCompiler.build

        def build(compiler: HostCompiler, *args: object, **kwargs: object) -> None:
            self.count += 1
            real(compiler, *args, **kwargs)  # type: ignore[arg-type]

        monkeypatch.setattr(HostCompiler, "build", build)


def test_kernels_are_cached_by_content(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = Builds(monkeypatch)
    for text, expected in (("  out[0] = 1;", 1), ("  out[0] = 1;", 1), ("  out[0] = 2;", 2), ("  out[0] = 1;", 2)):
        CpuBackend().load([source("cached", text)])
        assert builds.count == expected
    CpuBackend("shuffled").load([source("cached", "  out[0] = 1;")])
    assert builds.count == 2, "plain and shuffled run the same library"
    CpuBackend("checker").load([source("cached", "  out[0] = 1;")])
    assert builds.count == 3


def test_a_kernel_is_compiled_once_whatever_it_is_loaded_with(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other kernels beside it, another order, another process's load: the first library that has it serves."""
    builds = Builds(monkeypatch)
    first, second, third = (source(name, f"  out[threadIdx.x] = n + {place};") for place, name in enumerate(("one", "two", "three")))
    made = CpuBackend()
    made.load([first, second])
    made.load([third, second, first])
    assert builds.count == 2
    other, said = CpuBackend(), list[str]()
    other.compiling = lambda what: contextlib.nullcontext(said.append(what))
    other.load([second, third])
    assert builds.count == 2 and not said
    assert [launch(made, "two", 5)[0], launch(other, "two", 5)[0], launch(other, "three", 5)[0]] == [6, 6, 7]
    other.load([source("two", "  out[threadIdx.x] = n - 1;"), first])  # another text of the same name
    assert said == ["1 kernel for CPU emulator (plain)"]
    assert builds.count == 3 and launch(other, "two", 5)[0] == 4 and launch(made, "two", 5)[0] == 6


@pytest.mark.parametrize("damage", ["truncate", "garbage", "empty"])
def test_a_damaged_library_is_built_again(own_cache: Path, monkeypatch: pytest.MonkeyPatch, damage: str) -> None:
    builds = Builds(monkeypatch)
    CpuBackend().load([source("damaged", f"  out[0] = {len(damage)};")])
    (library,) = own_cache.rglob("*.so")
    data = library.read_bytes()
    library.unlink()  # the loaded one stays as it is
    library.write_bytes({"truncate": data[: len(data) // 2], "garbage": os.urandom(len(data)), "empty": b""}[damage])
    made = CpuBackend()
    made.load([source("damaged", f"  out[0] = {len(damage)};")])
    assert builds.count == 2
    assert launch(made, "damaged", 0)[0] == len(damage)


def test_without_a_writable_cache(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("KDGEN_CACHE_DIR", str(tmp_path / "file" / "cache"))
    made = CpuBackend()
    made.load([source("uncached", "  out[threadIdx.x] = n;")])
    assert launch(made, "uncached", 3) == [3] * 64
    with pytest.raises(BackendError, match=r"at div\.cu:4"):  # lines are found there too
        made.load([source("div", "  out[0] = 5 / n;")])
        launch(made, "div", 0)


SCRIPT = """
import sys
import numpy as np
sys.path.insert(0, {repository!r})
from kdgen.backends.base import Pointer
from kdgen.codegen.source import Source
from kdgen.backends.cpu import CpuBackend
from tests.unit.test_cpu_backend import FILL, MIX, launch, source
backend = CpuBackend({mode!r})
backend.load([FILL, MIX, source("tagged", "  // {tag}")])
assert launch(backend, "fill", 5, grid=100)[64:66] == [5, 6]
x, y = backend.to_device(np.ones(64, np.float32), "f32"), backend.empty((64,), "bf16")
backend.launch("mix", (1, 1, 1), 64, 0, [Pointer(x), Pointer(y)])
assert np.isclose(float(backend.to_host(y)[0]), 32 * 0.37 + 1, rtol=1e-2)
print("ran")
"""


def start(mode: Mode, tag: str, **extra: str) -> subprocess.Popen[str]:
    script = SCRIPT.format(repository=str(REPOSITORY), mode=mode, tag=tag)
    return subprocess.Popen(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_build_at_once(tmp_path: Path) -> None:
    """Both get the kernel, and one of them compiles it."""
    tag = f"built by {os.getpid()} at {time.time()}"
    slow, command = tmp_path / "slow-c++", shlex.join(host_compiler.find().command)
    slow.write_text(f'#!/bin/sh\ncase "$*" in *" -c "*) echo >> "$0.runs"; sleep 1;; esac\nexec {command} "$@"\n')
    slow.chmod(0o755)
    for process in [start("plain", tag, CXX=str(slow)), start("plain", tag, CXX=str(slow))]:
        out, err = process.communicate(timeout=60)
        assert (out, process.returncode) == ("ran\n", 0), err
    assert Path(f"{slow}.runs").read_text() == "\n"


def test_the_cache_may_be_cleared_at_any_time_and_kdgen_lie_anywhere(tmp_path: Path) -> None:
    """Kernels compile for seconds, and are linked with a runtime that came from the cache before."""
    (tmp_path / 'a "b\\').symlink_to(templates_dir())
    script = f"""
import shutil, sys
sys.path.insert(0, {str(REPOSITORY)!r})
from kdgen.backends.cpu import CpuBackend
from tests.unit.test_cpu_backend import FILL, MIX, launch
backend = CpuBackend()
backend.load([FILL])
shutil.rmtree({str(tmp_path / "cache")!r})
backend.load([MIX])
shutil.rmtree({str(tmp_path / "cache")!r})
assert launch(backend, "fill", 5, grid=100)[64:66] == [5, 6]
"""
    places = {"KDGEN_CACHE_DIR": str(tmp_path / "cache"), "KDGEN_TEMPLATES_DIR": str(tmp_path / 'a "b\\')}
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, **places})


def test_portable_fiber_switch() -> None:
    compiler = host_compiler.find()
    process = start("checker", "portable", CXX=" ".join([*compiler.command, "-DEMU_UCONTEXT"]))
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("ran\n", 0), err


def fork_and_wait(child_works: Callable[[], bool]) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if child_works() else 1)
    deadline = time.monotonic() + 20
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the forked child hangs")
        time.sleep(0.01)
    assert ended[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_children_can_launch() -> None:
    made = CpuBackend(threads=3)
    made.load([source("work", "  for (int i = 0; i < 300; ++i) __syncthreads();\n  out[blockIdx.x * 64 + threadIdx.x] = n;")])
    assert launch(made, "work", 2, grid=200) == [2] * 12800  # the helper threads exist now, and will not in the child
    fork_and_wait(lambda: launch(made, "work", 3, grid=200) == [3] * 12800)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_fork_while_another_thread_launches(backend: CpuBackend) -> None:
    out = backend.to_device(np.zeros(64, np.int32), "i32")
    busy = threading.Thread(target=lambda: [backend.launch("slow", (20_000, 1, 1), 1, 0, [Pointer(out), 1000]) for _ in range(6)])
    busy.start()
    for n in range(3):
        fork_and_wait(lambda n=n: launch(backend, "fill", n)[0] == n)  # type: ignore[misc]
    busy.join()


def test_backends_in_several_python_threads(backend: CpuBackend) -> None:
    results: list[list[int]] = []

    def work(n: int) -> None:
        for _ in range(20):
            results.append([n, *launch(backend, "fill", n, grid=20)[:2]])

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 80
    assert all(row == [row[0], row[0], row[0] + 1] for row in results)


# ---- the compiler -----------------------------------------------------------


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BackendError, match=r"apt install g\+\+.*pip install 'kdgen\[compiler\]'"):
        host_compiler.find({"PATH": "/nowhere"})


def test_cxx_that_does_not_work() -> None:
    with pytest.raises(BackendError, match="CXX is '/nowhere/c"):
        host_compiler.find({"CXX": "/nowhere/c++", "PATH": os.environ["PATH"]})


def test_cxx_without_a_closing_quotation() -> None:
    with pytest.raises(BackendError, match="not a working C\\+\\+ compiler"):
        host_compiler.find({"CXX": '"c++', "PATH": os.environ["PATH"]})


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("g++: internal compiler error: File size limit exceeded signal terminated program cc1plus, submit a bug report", "ulimit -f"),
        ("as: unit.o: No space left on device", "its disk is full; TMPDIR names another folder"),
    ],
)
def test_a_compiler_without_room_is_no_bug(tmp_path: Path, log: str, said: str) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(f"#!/bin/sh\necho '{log}' >&2\nexit 4\n")
    compiler.chmod(0o755)
    with pytest.raises(CompileError) as error:
        HostCompiler((str(compiler),), "gcc", "").build(tmp_path / "x.cpp", tmp_path / "x.so", flags=(), libraries=(), what="a kernel")
    assert str(error.value).startswith(f"a kernel: {compiler} could not write its files in ") and said in str(error.value)
    assert "bug" not in str(error.value)


def test_a_limit_is_no_missing_compiler() -> None:
    script = """
import resource
from kdgen.backends import host_compiler
from kdgen.errors import BackendError
resource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))
try:
    host_compiler.find({"PATH": "/usr/bin"})
except BackendError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout
    assert said.startswith("the C++ compiler g++ cannot be started: Too many open files")


@pytest.mark.parametrize("writes", ["", "echo garbage > $out"])
def test_a_compiler_that_writes_no_library(tmp_path: Path, own_cache: Path, writes: str) -> None:
    script = tmp_path / "c++"
    version = r"""case "$1" in --version) printf 'not \377 UTF-8\n'; exit;; esac"""
    script.write_text(f"#!/bin/sh\n{version}\nfor out; do :; done\n{writes}\n")
    script.chmod(0o755)
    compiler = host_compiler.find({"CXX": str(script), "PATH": os.environ["PATH"]})
    with pytest.raises(CompileError, match=r"thing: .*wrote no shared library"):
        compiler.build(tmp_path / "a.cpp", tmp_path / "a.so", flags=(), libraries=(), what="thing")


def test_an_interrupt_ends_the_compiler_and_what_it_has_started(tmp_path: Path) -> None:
    compiler, child = tmp_path / "c++", tmp_path / "child"
    compiler.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo 1; exit;; esac\nsleep 60 &\necho $! > {child}.new; mv {child}.new {child}; wait\n"
    )
    compiler.chmod(0o755)
    script = (
        "from pathlib import Path; from kdgen.backends import host_compiler\n"
        "host_compiler.find().build(Path('a.cpp'), Path('a.so'), flags=(), libraries=(), what='thing')"
    )
    building = subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env={**os.environ, "CXX": str(compiler), "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 30
    while not child.exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    state = Path(f"/proc/{int(child.read_text())}/stat")
    assert state.exists()
    building.send_signal(signal.SIGINT)
    building.wait(30)
    deadline = time.monotonic() + 10
    while (running := state.exists() and ") Z " not in state.read_text()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not running


def test_a_library_that_cannot_be_loaded(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostCompiler, "build", lambda compiler, source, output, **_: output.write_bytes(b"\x7fELF"))
    with pytest.raises(BackendError, match=r"cannot be loaded: .*KDGEN_CACHE_DIR"):
        CpuBackend().load([source("unloadable", "  out[0] = 1;")])


def test_cxx_may_carry_options() -> None:
    plain = host_compiler.find()
    chosen = host_compiler.find({"CXX": " ".join([*plain.command, "-DX=1"]), "PATH": os.environ["PATH"]})
    assert chosen.command == (*plain.command, "-DX=1")
    assert chosen.identity != plain.identity


def test_line_table_of_something_else(tmp_path: Path) -> None:
    for data in (b"", b"not an ELF file", b"\x7fELF\x02\x01" + b"\0" * 100):
        path = tmp_path / f"{len(data)}.so"
        path.write_bytes(data)
        assert line_table.lookup(path, 0x1000) is None
    assert line_table.lookup(tmp_path / "missing.so", 0x1000) is None


def test_a_word_that_never_comes_ends_the_launch(backend: CpuBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon, where there is no other rank that could send it."""
    assert cpu.ALONE_MS < cpu.PATIENCE_MS / 100
    monkeypatch.setattr(cpu, "ALONE_MS", 50)
    backend.load([source("waits", "  u32 word;\n  while (!word_is_there(from, 1, word)) {\n  }", "const u64* from")])
    words = backend.to_device(np.zeros(2, np.int32), "i32")
    with pytest.raises(BackendError, match="has waited for another rank's word for 0 s"):
        backend.launch("waits", (1, 1, 1), 64, 0, [Pointer(words)])


def test_python_and_runtime_agree_on_structures(tmp_path: Path) -> None:
    header = templates_dir() / "lib" / "cpu" / "runtime" / "state.h"
    sizes = [("EmuError", cpu_runtime.Error), ("EmuLaunch", cpu_runtime.Launch), ("EmuKernel", cpu_runtime.Kernel)]
    asserts = "".join(f'static_assert(sizeof({name}) == {ctypes.sizeof(mirror)}, "{name}");\n' for name, mirror in sizes)
    unit = tmp_path / "unit.cpp"
    unit.write_text(f'#include "{header}"\n{asserts}')
    host_compiler.find().build(unit, tmp_path / "unit.so", flags=("-O0",), libraries=(), what="structures")
