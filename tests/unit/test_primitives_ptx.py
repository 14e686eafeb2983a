"""What only GPUs run, read in PTX; and that the reading itself is right, and sees mistakes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kdgen.codegen.compile import nvrtc_version
from kdgen.errors import BackendError, CompileError, KdgenError
from kdgen.files.resources import templates_dir
from kdgen.verify.ptx import checks
from kdgen.verify.ptx.alu import Bits, evaluate
from kdgen.verify.ptx.checks import check_primitives, computed, descriptors, functions, instructions
from kdgen.verify.ptx.compiled import compile_ptx
from kdgen.verify.ptx.machine import Machine
from kdgen.verify.ptx.memory import Memory
from kdgen.verify.ptx.parse import parse
from kdgen.verify.ptx.signatures import differences, signatures


def has_nvrtc() -> bool:
    try:
        nvrtc_version()
    except BackendError:
        return False
    return True


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC cannot be loaded")
LIB = templates_dir() / "lib"
MORE = "__device__ __forceinline__ u32 more(u32 v) { return v; }"


@needs_nvrtc
def test_all_that_the_primitives_say() -> None:
    found = list(check_primitives())
    assert [each.status for each in found] == ["ok"] * 4, [each.why for each in found]
    assert found[1].bits > 1_000_000, "words were compared"


def test_without_nvrtc_checks_are_skipped_and_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise BackendError("cannot load NVRTC; pip install it")

    monkeypatch.setattr("kdgen.verify.ptx.compiled.nvrtc_version", missing)
    found = list(check_primitives())
    assert [each.status for each in found] == ["ok", "skipped", "skipped", "skipped"]
    assert all("cannot load NVRTC" in each.why for each in found[1:])


def edited(folder: Path, right: str, wrong: str) -> Path:
    """A copy of the library whose GPU side has ``wrong`` for ``right``."""
    text = (LIB / "gpu" / "primitives.cuh").read_text()
    assert right in text
    for side in ("gpu", "cpu"):
        (folder / side).mkdir()
        (folder / side / "primitives.cuh").write_text((LIB / side / "primitives.cuh").read_text())
    (folder / "gpu" / "primitives.cuh").write_text(text.replace(right, wrong))
    return folder


def problems_of(run: Callable[[Path], checks.Found], lib: Path) -> str:
    try:
        return "; ".join(run(lib)[1])
    except KdgenError as error:
        return str(error)


@needs_nvrtc
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('"f"(hi), "f"(lo)', '"f"(lo), "f"(hi)', "bf16x2_hi(u32): o[1] of thread 0 is 0xe55ddd63 by its PTX and 0xdd63e55d on the CPU"),
        ("offset = 16; offset > 0; offset >>= 1) v += ", "offset = 1; offset < 32; offset <<= 1) v += ", "warp_sum(float): o[0]"),
        ("__reduce_min_sync(0xffffffffu", "__reduce_min_sync(0xffffu", "the mask leaves lanes out"),
        ("__float_as_uint(values[1]);\n    asm", "__float_as_uint(values[0]);\n    asm", "send_words"),
    ],
)
def test_wrong_arithmetic_is_seen(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    assert said in problems_of(computed, edited(tmp_path, right, wrong))


@needs_nvrtc
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("x2.trans.shared.b16", "x2.shared.b16", "ldmatrix_x2_trans"),
        ("} while (!done);", "} while (done);", "mbarrier_wait_parity(u64*, int): operation 1 is\n    nothing"),
        ("valid ? 16 : 0", "valid ? 0 : 16", "operation 0 is\n    cp.async.cg.shared.global [s+16], [src+16], 16, 0\n  and should"),
        ("0x12f0000000000000", "0x14f0000000000000", "evict_first_policy"),
        ("(u64)round << 32 | word", "(u64)word << 32 | round", "[to+8], word:round"),
        ("WGMMA_OUT_8(8), WGMMA_OUT_4(16)", "WGMMA_OUT_8(8), WGMMA_OUT_4(12)", "wgmma(float(&)[20]"),
        ('"r"(b[0]), "r"(b[1]));', '"r"(b[1]), "r"(b[0]));', "{b1,b0}, {d0,d1,d2,d3}"),
        ("lane < blocks)", "lane <= blocks)", "sm_120a: send_to_cluster"),
    ],
)
def test_wrong_instructions_are_seen(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    assert said in problems_of(instructions, edited(tmp_path, right, wrong))


@needs_nvrtc
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("1ull << 62", "2ull << 62", "a tile at 0x400, the next 0 bytes further"),
        ("__align__(1024)", "__align__(128)", "multiples of 128"),
        ("((threads) / (blocks))", "(threads)", "not by 128 threads"),
        ("struct __align__(16) name", "struct __align__(8) name", "SHARED_ARRAY of 5 bytes has 8 at a multiple of 8"),
    ],
)
def test_wrong_descriptors_are_seen(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    assert said in problems_of(descriptors, edited(tmp_path, right, wrong))


@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ("// ---- warps --", f"{MORE}\n// ---- warps --", "the CPU side has no more(u32)"),
        (
            "// ---- warps --",
            f"{MORE}\n// ---- warps --",
            "more(u32) has no interpretation",
        ),
        ("float warp_sum(float v)", "double warp_sum(float v)", "the CPU side's warp_sum(float) returns float instead of double"),
        ("u32 warp_min(u32 v)", "u32 warp_least(u32 v)", "the GPU side has no warp_min(u32)"),
        ('"griddepcontrol.wait;" ::: "memory"', '"griddepcontrol.wait;" ::', "griddepcontrol_wait(): its assembly is volatile alone"),
        ('asm volatile("barrier.sync', 'asm("barrier.sync', 'barrier_sync(int, int): its assembly is a "memory" clobber alone'),
    ],
)
def test_functions_that_differ_are_seen(tmp_path: Path, right: str, wrong: str, said: str) -> None:
    assert said in problems_of(functions, edited(tmp_path, right, wrong))


def test_a_failure_is_a_failed_check(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(lib: Path) -> checks.Found:
        raise KdgenError("the interpreter of PTX does not know foo")

    monkeypatch.setattr(checks, "computed", unknown)
    (check,) = [each for each in check_primitives() if each.name.startswith("arithmetic")]
    assert check.status == "failed" and "does not know foo" in check.why


def test_templates_stand_for_their_instances() -> None:
    gpu = signatures("__device__ __forceinline__ void wait(float (&d)[8], u64 a, u32 b) {}\n")
    assert [str(each) for each in gpu] == ["wait(float(&)[8], u64, u32)"]
    cpu = signatures("template <int N, class T>\nstatic inline void wait(float (&d)[N], const T& a, u32 b, EMU_HERE) {}\n")
    assert not differences(gpu, cpu)
    assert differences(gpu, signatures("static inline void wait(float (&d)[8], u64 a, int b) {}\n")) == [
        "the CPU side has no wait(float(&)[8], u64, u32)",
        "the GPU side has no wait(float(&)[8], u64, int)",
    ]


# ---- the interpreter, against answers that do not pass through it ---------------------------------------------------------


def computed_by(opcode: str, *operands: Sequence[int]) -> list[int]:
    values: list[Bits] = [np.array(operand, np.uint64) for operand in operands]
    return [int(value) for value in evaluate(opcode.split("."), values)]


@pytest.mark.parametrize(
    ("opcode", "operands", "result"),
    [
        ("shr.s32", ([0x80000000], [4]), 0xFFFFFFFFF8000000),  # cut to the register's width when it is written
        ("shr.u32", ([0x80000000], [40]), 0),
        ("shl.b64", ([1], [64]), 0),
        ("mul.wide.s32", ([0xFFFFFFFF], [4]), 2**64 - 4),
        ("mul.wide.u32", ([0xFFFFFFFF], [4]), 4 * 0xFFFFFFFF),
        ("cvt.s64.s32", ([0xFFFFFFFE],), 2**64 - 2),
        ("cvt.u16.u32", ([0x12345],), 0x2345),
        ("setp.lt.s32", ([0xFFFFFFFF], [0]), 1),
        ("setp.lt.u32", ([0xFFFFFFFF], [0]), 0),
        ("selp.b32", ([7], [8], [0]), 8),
        ("lop3.b32", ([0b1100], [0b1010], [0b0001], [0xEA]), 0b1001),
        ("prmt.b32", ([0x03020180], [0x07060504], [0x5480]), 0x0504FF80),
        ("bfe.u32", ([0xABCD1234], [8], [8]), 0x12),
        ("bfi.b64", ([0x1234], [0xFFFF], [32], [32]), 0x12340000FFFF),
        ("max.f32", ([0x80000000], [0]), 0),
        ("max.f32", ([0x7FC00001], [0x3F800000]), 0x3F800000),
        ("cvt.rn.bf16x2.f32", ([0x3F800000], [0x40000000]), 0x3F804000),
        ("ex2.approx.ftz.f32", ([0xC2FC0000],), 0x00800000),  # 2^-126
        ("ex2.approx.ftz.f32", ([0xC2FC0001],), 0),
    ],
)
def test_single_instructions(opcode: str, operands: tuple[list[int], ...], result: int) -> None:
    assert computed_by(opcode, *operands) == [result]


def test_rounding_to_bf16_is_that_of_ml_dtypes() -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 20000, dtype=np.uint64)
    words[:4] = [0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x00000001]
    floats = words.astype(np.uint32).view(np.float32)
    found = np.array(computed_by("cvt.rn.bf16.f32", words.tolist()))
    with np.errstate(invalid="ignore"):
        expected = floats.astype(ml_dtypes.bfloat16).view(np.uint16)
    assert np.array_equal(found, np.where(np.isnan(floats), 0x7FFF, expected))


@pytest.mark.parametrize("opcode", ["sin.approx.f32", "fma.rn.f64", "cvt.rn.f16.f32", "setp.ltu.f32", "vadd.s32", "mul.hi.u32"])
def test_unknown_instructions_are_no_guesses(opcode: str) -> None:
    with pytest.raises(KdgenError, match="does not know"):
        computed_by(opcode, *([[1], [2]] if opcode[:3] in ("mul", "set", "vad") else [[1]]))


@needs_nvrtc
def test_threads_that_part_meet_again(tmp_path: Path) -> None:
    text = """extern "C" __global__ void part(unsigned* out, const unsigned* x) {
      unsigned v = x[threadIdx.x], n = 0;
      while (v != 1) { v = v & 1 ? 3 * v + 1 : v / 2; ++n; }
      out[threadIdx.x] = n + __shfl_xor_sync(0xffffffffu, n, 1);
    }"""
    (kernel,) = parse(compile_ptx(text, "sm_90a", tmp_path))

    def steps(v: int) -> int:
        count = 0
        while v != 1:
            v, count = (3 * v + 1 if v & 1 else v // 2), count + 1
        return count

    memory = Memory()
    x, out = memory.add("x", np.arange(1, 33, dtype=np.uint32)), memory.add("out", np.zeros(32, np.uint32))
    Machine(kernel, [out.address, x.address], memory, threads=32).run()
    assert out.words.tolist() == [steps(i + 1) + steps((i ^ 1) + 1) for i in range(32)]


@needs_nvrtc
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("out[threadIdx.x + 9] = 1;", "leaves array out"),
        ("*(unsigned long long*)(out + 1) = 1;", "not aligned"),
        ("for (;;) *(volatile unsigned*)out = 1;", "no end after"),
        ("if (threadIdx.x) out[0] = __shfl_xor_sync(~0u, threadIdx.x, 1);", "not all lanes"),
        ("out[0] = __shfl_up_sync(~0u, threadIdx.x, 1);", "only butterflies"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, body: str, said: str) -> None:
    (kernel,) = parse(compile_ptx(f'extern "C" __global__ void bad(unsigned* out) {{ {body} }}', "sm_90a", tmp_path))
    memory = Memory()
    out = memory.add("out", np.zeros(32, np.uint32))
    with pytest.raises(KdgenError, match=said):
        Machine(kernel, [out.address], memory, threads=32).run()


@needs_nvrtc
def test_text_that_does_not_compile(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"do not compile for sm_90a:\n.*error"):
        compile_ptx("__global__ void k() { nothing(); }", "sm_90a", tmp_path)
