from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kdgen.codegen import compile as compiler
from kdgen.codegen.cache import Cache
from kdgen.codegen.compile import compile_all, compile_cubin, everywhere, nvrtc_version, supported_archs
from kdgen.codegen.render import render
from kdgen.codegen.source import Source
from kdgen.errors import BackendError, CompileError, KdgenError
from kdgen.files.resources import templates_dir
from kdgen.plan.arch import Target, arch_of_device, target_for, targets
from kdgen.plan.build import build_plan
from kdgen.spec.model import load_spec

INCLUDE = templates_dir() / "lib" / "gpu"


def kernel(name: str, body: str, smem: int = 0) -> Source:
    text = f"""// templates/kernels/{name}.cu.j2
#include "primitives.cuh"
namespace {name} {{
extern "C" __global__ void __launch_bounds__(128) {name}(float* y, const float* x, int n) {{ {body} }}
}}
"""
    return Source(name, text, block=128, smem=smem)


ADD = kernel("add", "int i = blockIdx.x * 128 + threadIdx.x; if (i < n) y[i] += warp_sum(x[i]);")
SHARED = kernel(
    "stage",
    "SHARED_DYNAMIC(float, s); SHARED_ARRAY(float, t, [64]); t[threadIdx.x % 64] = x[n]; s[threadIdx.x] = x[threadIdx.x];"
    "__syncthreads(); y[threadIdx.x] = s[127 - threadIdx.x] + t[5];",
    smem=64 * 1024,
)


def test_what_ptxas_says_is_kept() -> None:
    add = compile_cubin(ADD, "sm_90a", INCLUDE)
    assert add.code.startswith(b"\x7fELF")
    assert 0 < add.registers < 64
    assert (add.static_smem, add.dynamic_smem, add.stack, add.spill_stores, add.spill_loads) == (0, 0, 0, 0, 0)
    assert not add.spills and not add.cached
    assert "Compiling entry function 'add' for 'sm_90a'" in add.log and "\0" not in add.log
    stage = compile_cubin(SHARED, "sm_120a", INCLUDE)
    assert stage.static_smem >= 256 and stage.dynamic_smem == 65536 and stage.smem == stage.static_smem + 65536


@pytest.mark.parametrize("name", ["k26", "moonlight-16b-a3b"])
def test_no_wgmma_is_serialised(name: str) -> None:
    """What ptxas does, with a line in its log, where it does not see that accumulators are left alone: each waits for the one before."""
    plan = build_plan(load_spec(name)).on("sm_90a")
    own = tuple(kernel for kernel in plan.kernels if kernel.template.endswith("_wgmma.cu.j2"))
    found = {rendered.source.name: compile_cubin(rendered.source, "sm_90a", INCLUDE) for rendered in render(replace(plan, kernels=own))}
    assert "mla_attention" in found
    assert not [name for name, compiled in found.items() if "wgmma" in compiled.log]


def test_spills_are_counted() -> None:
    body = "float v[96]; for (int i = 0; i < 96; ++i) v[i] = x[i * 7];\n#pragma unroll\nfor (int r = 0; r < n; ++r)"
    body += "\n#pragma unroll\nfor (int i = 0; i < 96; ++i) v[i] = v[i] * v[(i * 5 + 1) % 96] + y[r + i];\n"
    body += "#pragma unroll\nfor (int i = 0; i < 96; ++i) y[threadIdx.x * 96 + i] = v[i];"
    crowded = kernel("crowded", body)
    text = crowded.text.replace("__launch_bounds__(128)", "__launch_bounds__(1024, 2)")
    cubin = compile_cubin(Source("crowded", text, 1024, 0), "sm_90a", INCLUDE)
    assert cubin.registers <= 32 and cubin.spills and cubin.spill_stores > 0 and cubin.stack > 0


def test_contraction_is_off() -> None:
    # x*x + y must round twice: sass of the contracted form would be a single FFMA and differ
    body = "y[threadIdx.x] = x[threadIdx.x] * x[threadIdx.x + 1] + x[threadIdx.x + 2];"
    explicit = body.replace("x[threadIdx.x] * x[threadIdx.x + 1] + x[threadIdx.x + 2]", "__fadd_rn(__fmul_rn(A, B), C)")
    for name, i in (("A", ""), ("B", " + 1"), ("C", " + 2")):
        explicit = explicit.replace(name, f"x[threadIdx.x{i}]")
    assert compile_cubin(kernel("k", body), "sm_90a", INCLUDE).code == compile_cubin(kernel("k", explicit), "sm_90a", INCLUDE).code


def test_the_cache_serves_the_same_cubin(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cold = compile_cubin(SHARED, "sm_90a", INCLUDE, cache)
    warm = compile_cubin(SHARED, "sm_90a", INCLUDE, cache)
    assert warm.cached and not cold.cached
    assert (warm.code, warm.log, warm.registers, warm.static_smem) == (cold.code, cold.log, cold.registers, cold.static_smem)


def test_the_key_sees_text_headers_and_arch_but_not_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path / "cache")
    header = (INCLUDE / "primitives.cuh").read_text()
    here, there = tmp_path / "here", tmp_path / "there"
    for directory in (here, there):
        directory.mkdir()
        (directory / "primitives.cuh").write_text(header)
    assert not compile_cubin(ADD, "sm_90a", here, cache).cached
    assert compile_cubin(ADD, "sm_90a", there, cache).cached
    assert not compile_cubin(ADD, "sm_90", there, cache).cached
    assert not compile_cubin(Source(ADD.name, ADD.text + "\n", 128, 0), "sm_90a", there, cache).cached
    (there / "primitives.cuh").write_text(header + "\n// changed\n")
    assert not compile_cubin(ADD, "sm_90a", there, cache).cached
    monkeypatch.setattr(compiler, "nvrtc_version", lambda: "13.9 (wheel 13.9.1)")
    assert not compile_cubin(ADD, "sm_90a", here, cache).cached


def test_two_compilations_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (compile_all(everywhere([ADD, SHARED], ["sm_90a"]), INCLUDE, jobs=jobs) for jobs in (1, 2))
    assert [(c.code, c.log) for c in first] == [(c.code, c.log) for c in second]


def test_many_at_once_keep_their_order(tmp_path: Path) -> None:
    seen: list[str] = []
    work = everywhere([ADD, SHARED], ["sm_120a", "sm_90a"])
    cubins = compile_all(work, INCLUDE, cache=Cache(tmp_path), on_done=lambda c: seen.append(c.name))
    assert [(c.name, c.arch) for c in cubins] == [(n, a) for a in ("sm_120a", "sm_90a") for n in ("add", "stage")]
    assert sorted(seen) == ["add", "add", "stage", "stage"]


def test_it_is_said_how_many_compile_and_for_how_long(tmp_path: Path) -> None:
    log: list[object] = []

    @contextlib.contextmanager
    def compiling(kernels: int) -> Iterator[None]:
        log.append(kernels)
        yield
        log.append("end")

    def compile_(*sources: Source) -> None:
        compile_all(
            everywhere(sources, ["sm_90a"]), INCLUDE, cache=Cache(tmp_path), on_done=lambda c: log.append(c.name), compiling=compiling
        )

    compile_(SHARED)
    compile_(SHARED)
    assert log == [1, "stage", "end", "stage"]
    with pytest.raises(CompileError):
        compile_(SHARED, ADD, kernel("bad", "y[0] = missing;"))
    assert log[4] == 2 and log[-1] == "end"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("y[0] = missing;", 'identifier "missing" is undefined'),
        ('asm("bogus;");', "bogus"),
        ("SHARED_ARRAY(float, s, [20000]); s[threadIdx.x] = n; __syncthreads(); y[0] = s[7];", "80000 bytes of static"),
    ],
)
def test_errors_name_kernel_template_and_arch(body: str, reason: str) -> None:
    with pytest.raises(CompileError) as caught:
        compile_cubin(kernel("broken", body), "sm_90a", INCLUDE)
    message = str(caught.value)
    assert "kernel broken (templates/kernels/broken.cu.j2, sm_90a)" in message and reason in message


def test_a_long_log_is_cut() -> None:
    with pytest.raises(CompileError) as caught:
        compile_cubin(kernel("broken", "\n".join(f"x = missing{i};" for i in range(60))), "sm_90a", INCLUDE)
    assert "more lines" in str(caught.value) and len(str(caught.value).splitlines()) < 50


def test_several_failures_are_told_at_once() -> None:
    with pytest.raises(CompileError) as caught:
        compile_all(everywhere([kernel("one", "x = missing;"), ADD, kernel("two", "x = missing;")], ["sm_90a"]), INCLUDE)
    assert "kernel one" in str(caught.value) and "kernel two" in str(caught.value)


def test_too_much_shared_memory_for_the_architecture() -> None:
    big = Source(SHARED.name, SHARED.text, 128, 150 * 1024)
    assert compile_cubin(big, "sm_90a", INCLUDE).smem > 150 * 1024
    with pytest.raises(CompileError, match=r"kernel stage .*sm_120a.* a block may have 101376"):
        compile_cubin(big, "sm_120a", INCLUDE)


def test_a_text_without_a_kernel() -> None:
    with pytest.raises(CompileError, match="the text has 0 kernels instead of 1"):
        compile_cubin(Source("nothing", "// nothing\n", 128, 0), "sm_90a", INCLUDE)


@pytest.mark.parametrize("arch", ["sm_33", "nonsense", "", "sm_90A", "compute_90"])
def test_unknown_architectures_are_refused_with_the_known_ones(arch: str) -> None:
    with pytest.raises(KdgenError, match=r"sm_90a.*sm_120a"):
        compile_cubin(ADD, arch, INCLUDE)


def test_an_architecture_this_nvrtc_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "supported_archs", lambda: ("sm_80", "sm_90"))
    with pytest.raises(KdgenError, match="cannot compile for sm_120a; it supports sm_80, sm_90"):
        compile_cubin(ADD, "sm_120a", INCLUDE)


def test_every_target_compiles() -> None:
    assert supported_archs() == tuple(target.arch for target in targets())
    assert len(compile_all(everywhere([ADD], supported_archs()), INCLUDE)) == len(targets())


def test_limits() -> None:
    assert target_for("sm_90a") == Target("sm_90a", "H100, H200, GH200", 232448, has_wgmma=True)
    assert target_for("sm_120a").smem_per_block == 101376
    assert [arch_of_device(*cc) for cc in ((8, 9), (9, 0), (10, 0), (12, 0), (12, 1))] == ["sm_89", "sm_90a", "sm_100", "sm_120a", "sm_121"]


def test_without_nvrtc_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuda.bindings import nvrtc

    def missing() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"')

    nvrtc_version.cache_clear()
    supported_archs.cache_clear()
    monkeypatch.setattr(nvrtc, "nvrtcVersion", missing)
    monkeypatch.setattr(nvrtc, "nvrtcGetSupportedArchs", missing)
    try:
        with pytest.raises(BackendError, match=r"pip install 'nvidia-cuda-nvrtc"):
            compile_cubin(ADD, "sm_90a", INCLUDE)
    finally:
        nvrtc_version.cache_clear()
        supported_archs.cache_clear()


def test_a_warm_compilation_does_not_import_cuda_core(tmp_path: Path) -> None:
    compile_cubin(ADD, "sm_90a", INCLUDE, Cache(tmp_path))
    script = f"""
import sys; from pathlib import Path
from kdgen.codegen.cache import Cache; from kdgen.codegen.compile import compile_cubin; from kdgen.codegen.source import Source
cubin = compile_cubin(Source('add', {ADD.text!r}, 128, 0), 'sm_90a', Path({str(INCLUDE)!r}), Cache(Path({str(tmp_path)!r})))
assert cubin.cached and not any(name.startswith(('cuda.core', 'numba')) for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True)
