"""The CPU side of the primitives and of the CUDA language, against independent answers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kdgen.backends.base import DeviceArray, Pointer
from kdgen.backends.cpu import CpuBackend
from kdgen.codegen.source import Source
from kdgen.files.resources import templates_dir

Array = npt.NDArray[Any]

KERNELS = {
    "mma": (
        "const uint4* a, const uint2* b, float4* d",
        """
  const uint4 va = a[lane];
  const uint2 vb = b[lane];
  const float4 vd = d[lane];
  const u32 x[4] = {va.x, va.y, va.z, va.w}, y[2] = {vb.x, vb.y};
  float z[4] = {vd.x, vd.y, vd.z, vd.w};
  mma_m16n8k16_bf16(z, x, y);
  d[lane] = make_float4(z[0], z[1], z[2], z[3]);
""",
    ),
    "load_matrices": (
        "const uint4* src, uint4* x4, uint4* x4_trans, uint2* x2, uint2* x2_trans",
        """
  SHARED_ARRAY(uint4, s, [32]);
  s[lane] = src[lane];
  __syncthreads();
  u32 r[4], q[2];
  ldmatrix_x4(r, &s[lane]);
  x4[lane] = make_uint4(r[0], r[1], r[2], r[3]);
  ldmatrix_x4_trans(r, &s[lane]);
  x4_trans[lane] = make_uint4(r[0], r[1], r[2], r[3]);
  ldmatrix_x2(q, &s[lane % 16]);
  x2[lane] = make_uint2(q[0], q[1]);
  ldmatrix_x2_trans(q, &s[lane % 16]);
  x2_trans[lane] = make_uint2(q[0], q[1]);
""",
    ),
    "bf16_to_float": ("const bf16* in, float* out", "  for (int i = lane; i < 65536; i += 32) out[i] = to_float(in[i]);\n"),
    "float_to_bf16": (
        "const float* in, bf16* one, u32* two, int n",
        """
  for (int i = lane; i < n; i += 32) {
    one[i] = from_float<bf16>(in[i]);
    two[i] = pack_bf16x2(in[i], in[n - 1 - i]);
  }
""",
    ),
    "widen": (
        "const u32* a, u32* out, int n",
        "  for (int i = lane; i < n; i += 32) out[i] = lop3_and_or(a[i], 0x000f000fu, 0x43004300u);\n",
    ),
    "uniform": (
        "const u32* b, float* out",
        """
  u32 a[4], pair[2] = {b[lane * 2], b[lane * 2 + 1]};
  float d[4];
  uniform_fragment(a, 0xc308c308u);
  mma_m16n8k16_bf16_from_zero(d, a, pair);
  for (int i = 0; i < 4; ++i) out[lane * 4 + i] = d[i];
""",
    ),
    "reduce": (
        "const float* in, float* sum, float* largest, float* shuffled",
        """
  const float v = in[lane];
  sum[lane] = warp_sum(v);
  largest[lane] = warp_max(v);
  float s = v;
  for (int offset = 16; offset > 0; offset >>= 1) s += __shfl_xor_sync(0xffffffffu, s, offset);
  shuffled[lane] = s;
""",
    ),
    "shuffles": (
        "int* out, int width",
        """
  out[lane] = __shfl_sync(0xffffffffu, lane, 5 + lane, width);
  out[32 + lane] = __shfl_xor_sync(0xffffffffu, lane, 12, width);
  out[64 + lane] = __shfl_up_sync(0xffffffffu, lane, 3, width);
  out[96 + lane] = __shfl_down_sync(0xffffffffu, lane, 3, width);
""",
    ),
    "wide_shuffle": (
        "double* out, int n",
        "  out[lane] = __shfl_sync(0xffffffffu, lane + 0.25, (lane + n) % 32);\n",
    ),
    "votes": (
        "u32* out, int n",
        """
  out[lane] = __ballot_sync(0xffffffffu, lane % 3 == 0);
  out[32 + lane] = __any_sync(0xffffffffu, lane == n);
  out[64 + lane] = __all_sync(0xffffffffu, lane < n);
  if (lane < 8) out[96 + lane] = __ballot_sync(0xffu, lane & 1);
""",
    ),
    "bits": (
        "const u32* a, const u32* b, u32* out, int n",
        """
  for (int i = lane; i < n; i += 32) {
    const u32 x = a[i], y = b[i];
    u32* o = out + i * 10;
    o[0] = __popc(x);
    o[1] = __clz((int)x);
    o[2] = __ffs((int)x);
    o[3] = __brev(x);
    o[4] = __umulhi(x, y);
    o[5] = __byte_perm(x, y, 0x5410);
    o[6] = __funnelshift_l(x, y, y);
    o[7] = __funnelshift_r(x, y, y);
    o[8] = min(x, y);
    o[9] = max((int)x, (int)y);
  }
""",
    ),
    "extremes": (
        "const float* a, const float* b, float* out, int n",
        """
  for (int i = lane; i < n; i += 32) {
    out[2 * i] = fmaxf(a[i], b[i]);
    out[2 * i + 1] = fminf(a[i], b[i]);
  }
""",
    ),
    "atomics": (
        "int* i, u32* u, u64* w, int* old",
        """
  atomicAdd(&i[0], lane);
  atomicMin(&i[1], -lane);
  atomicMax(&i[2], lane);
  atomicOr((unsigned*)&i[3], 1u << lane);
  atomicAdd(&u[0], (u32)lane);
  atomicMax(&u[1], 0x80000000u + lane);
  atomicMin(&u[2], 0x80000000u + lane);
  atomicXor(&u[3], 1u << lane);
  atomicAnd(&u[4], ~(1u << lane));
  atomicAdd(&w[0], 0x100000000ull);
  atomicMax(&w[1], ((u64)(lane ^ 5) << 32) | (u32)lane);
  old[lane] = atomicAdd(&i[4], 1);
  if (lane == 31) {
    old[32] = atomicExch(&i[5], 9);
    old[33] = atomicCAS(&i[5], 9, 11);
    old[34] = atomicCAS(&i[5], 9, 12);
  }
""",
    ),
    "copies": (
        "const int* in, int* out",
        """
  SHARED_ARRAY(int, s, [128]);
  cp_async_16(&s[lane * 4], in + lane * 4, lane % 4 != 3);
  cp_async_commit_group();
  cp_async_wait_group<0>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[i * 32 + lane] = s[i * 32 + lane];
""",
    ),
    "copies_early_look": (
        "const int* in, int* out",
        """
  SHARED_ARRAY(int, s, [256]);
  cp_async_16(&s[lane * 4], in + lane * 4, true);
  cp_async_commit_group();
  cp_async_16(&s[128 + lane * 4], in + lane * 4, true);
  cp_async_commit_group();
  cp_async_wait_group<1>();
  __syncthreads();
  out[lane] = s[lane] + s[128 + lane];
""",
    ),
    "stream": (
        "const uint4* a, const uint2* b, u32* out",
        """
  const uint4 v = ld_global_nc_16(a + lane);
  const uint2 w = ld_global_nc_8(b + lane);
  out[lane] = v.x ^ v.y ^ v.z ^ v.w ^ w.x ^ w.y;
""",
    ),
}
MODES = (("plain", 0), ("shuffled", 1), ("checker", 2))


def source(name: str) -> Source:
    parameters, body = KERNELS[name]
    return Source(
        name,
        f"""#include "primitives.cuh"
namespace {name} {{
extern "C" __global__ void __launch_bounds__(32) {name}({parameters}) {{
  const int lane = threadIdx.x;{body if body.startswith(chr(10)) else chr(10) + body}}}
}}
""",
        32,
        0,
    )


Run = Callable[..., list[Array]]
_CODES = {"float32": "f32", "int32": "i32", "float64": "f64", "uint8": "u8", "bfloat16": "bf16"}


@pytest.fixture(scope="module", params=MODES, ids=[mode for mode, _ in MODES])
def run(request: pytest.FixtureRequest) -> Run:
    mode, seed = request.param
    backend = CpuBackend(mode, seed=seed)
    backend.load([source(name) for name in KERNELS])

    def upload(values: Array) -> DeviceArray:
        plain = values if values.dtype.name in _CODES else np.ascontiguousarray(values).reshape(-1).view(np.uint8)
        return backend.to_device(plain, _CODES[plain.dtype.name])  # type: ignore[arg-type]

    def launch(name: str, *args: Array | int) -> list[Array]:
        """Runs one warp; returns what the arrays hold afterwards."""
        arrays = [upload(arg) if isinstance(arg, np.ndarray) else arg for arg in args]
        backend.launch(name, (1, 1, 1), 32, 0, [Pointer(a) if isinstance(a, DeviceArray) else a for a in arrays])
        results: list[Array] = []
        for before, after in zip(args, arrays, strict=True):
            if isinstance(before, np.ndarray) and isinstance(after, DeviceArray):
                results.append(backend.to_host(after).reshape(-1).view(before.dtype).reshape(before.shape))
        return results

    return launch


# ---- fragments: the (thread, value) -> element strides that CuTe publishes for these instructions -------------------


def layout(thread: tuple[Sequence[int], Sequence[int]], value: tuple[Sequence[int], Sequence[int]]) -> Callable[[int, int], int]:
    def offset(i: int, shape: Sequence[int], stride: Sequence[int]) -> int:
        total = 0
        for n, step in zip(shape, stride, strict=True):
            total += i % n * step
            i //= n
        return total

    return lambda t, v: offset(t, *thread) + offset(v, *value)


# SM80_16x8x16_F32BF16BF16F32_TN: A over (m, k) and D over (m, n) with m fastest, B over (n, k) with n fastest
LAYOUT_A = layout(((4, 8), (32, 1)), ((2, 2, 2), (16, 8, 128)))
LAYOUT_B = layout(((4, 8), (16, 1)), ((2, 2), (8, 64)))
LAYOUT_D = layout(((4, 8), (32, 1)), ((2, 2), (16, 8)))
# SM75_U32x4_LDSM_N and SM75_U16x8_LDSM_T, in bits: destination (thread, value) -> source
LAYOUT_LOAD = layout(((32,), (32,)), ((32, 4), (1, 1024)))
LAYOUT_LOAD_TRANS = layout(((4, 8), (256, 16)), ((16, 2, 4), (1, 128, 1024)))


@pytest.mark.parametrize("trial", range(4))
def test_mma_fragments(run: Run, trial: int) -> None:
    rng = np.random.default_rng(trial)
    a, b, d = rng.integers(-64, 64, (16, 16)), rng.integers(-64, 64, (16, 8)), rng.integers(-1000, 1000, (16, 8))
    fa, fb = np.zeros((32, 8), ml_dtypes.bfloat16), np.zeros((32, 4), ml_dtypes.bfloat16)
    fd = np.zeros((32, 4), np.float32)
    for t in range(32):
        for v in range(8):
            fa[t, v] = a[LAYOUT_A(t, v) % 16, LAYOUT_A(t, v) // 16]
        for v in range(4):
            fb[t, v] = b[LAYOUT_B(t, v) // 8, LAYOUT_B(t, v) % 8]
            fd[t, v] = d[LAYOUT_D(t, v) % 16, LAYOUT_D(t, v) // 16]
    result = run("mma", fa, fb, fd)[2]
    expected = a @ b + d
    for t in range(32):
        for v in range(4):
            assert result[t, v] == expected[LAYOUT_D(t, v) % 16, LAYOUT_D(t, v) // 16]


def test_ldmatrix_fragments(run: Run) -> None:
    rows = np.arange(256, dtype=np.uint16).reshape(32, 8)
    four, two = np.zeros((32, 8), np.uint16), np.zeros((32, 4), np.uint16)
    _, x4, x4_trans, x2, x2_trans = run("load_matrices", rows, four, four, two, two)
    flat = rows.ravel()
    for t in range(32):
        for register in range(4):
            for half in range(2):
                plain = flat[LAYOUT_LOAD(t, register * 32 + half * 16) // 16]
                trans = flat[LAYOUT_LOAD_TRANS(t, (register * 2 + half) * 16) // 16]
                assert (x4[t, register * 2 + half], x4_trans[t, register * 2 + half]) == (plain, trans)
                if register < 2:
                    assert (x2[t, register * 2 + half], x2_trans[t, register * 2 + half]) == (plain, trans)


# ---- bfloat16 --------------------------------------------------------------


def bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """ml_dtypes's rounding, with the GPU's one NaN."""
    with np.errstate(invalid="ignore"):
        bits = values.astype(ml_dtypes.bfloat16).view(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FFF), bits).astype(np.uint16)


def test_every_bf16_to_float(run: Run) -> None:
    bits = np.arange(65536, dtype=np.uint16)
    result = run("bf16_to_float", bits, np.zeros(65536, np.float32))[1]
    np.testing.assert_array_equal(result.view(np.uint32), bits.astype(np.uint32) << 16)


def test_float_to_bf16_around_every_bf16(run: Run) -> None:
    upper = np.arange(65536, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    values = (upper[:, None] | lower).ravel().view(np.float32)
    n = values.size
    _, one, two = run("float_to_bf16", values, np.zeros(n, np.uint16), np.zeros(n, np.uint32), n)
    expected = bf16_bits(values)
    np.testing.assert_array_equal(one, expected)
    np.testing.assert_array_equal(two, expected.astype(np.uint32) | expected[::-1].astype(np.uint32) << 16)


def test_nibbles_become_bf16(run: Run) -> None:
    words = np.random.default_rng(0).integers(0, 1 << 32, 50000, dtype=np.uint64).astype(np.uint32)
    result = run("widen", words, np.zeros_like(words), words.size)[1]
    for shift in (0, 16):
        value = (result >> shift & 0xFFFF).astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
        np.testing.assert_array_equal(value, 128 + (words >> shift & 15))


def test_a_uniform_fragment_times_inputs_is_a_multiple_of_their_sum(run: Run) -> None:
    b = np.random.default_rng(1).integers(-8, 9, (16, 8)).astype(np.float32)  # sums are exact
    lanes = np.arange(32)
    k = lanes[:, None, None] % 4 * 2 + np.array([0, 8])[None, :, None] + np.arange(2)
    pairs = b[k, lanes[:, None, None] // 4].astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    got = run("uniform", np.ascontiguousarray(pairs[..., 0] | pairs[..., 1] << 16).ravel(), np.full(128, np.nan, np.float32))[1].reshape(
        32, 4
    )
    column = lanes[:, None] % 4 * 2 + np.arange(4) % 2
    np.testing.assert_array_equal(got, -136 * b.sum(0)[column])


# ---- warps -----------------------------------------------------------------


def test_warp_reductions_are_the_butterfly(run: Run) -> None:
    rng = np.random.default_rng(7)
    values = (rng.standard_normal(32) * 10.0 ** rng.integers(-4, 4, 32)).astype(np.float32)
    _, total, largest, shuffled = run("reduce", values, *(np.zeros(32, np.float32) for _ in range(3)))
    expected, in_order = values.copy(), np.float32(0)
    for offset in (16, 8, 4, 2, 1):
        expected = expected + expected[np.arange(32) ^ offset]
    for value in values:
        in_order += value
    assert in_order != expected[0], "the values do not tell orders apart"
    assert total.tobytes() == shuffled.tobytes() == expected.tobytes()
    assert (largest == values.max()).all()


@pytest.mark.parametrize("width", [32, 16, 8])
def test_shuffles(run: Run, width: int) -> None:
    lane = np.arange(32)
    first = lane // width * width
    result = run("shuffles", np.zeros((4, 32), np.int32), width)[0]
    np.testing.assert_array_equal(result[0], first + (5 + lane) % width)
    np.testing.assert_array_equal(result[1], np.where((lane ^ 12) < first + width, lane ^ 12, lane))
    np.testing.assert_array_equal(result[2], np.where(lane - 3 >= first, lane - 3, lane))
    np.testing.assert_array_equal(result[3], np.where(lane + 3 < first + width, lane + 3, lane))


def test_shuffle_of_eight_bytes(run: Run) -> None:
    np.testing.assert_array_equal(run("wide_shuffle", np.zeros(32), 3)[0], (np.arange(32) + 3) % 32 + 0.25)


@pytest.mark.parametrize("n", [5, 32, 40])
def test_votes(run: Run, n: int) -> None:
    result = run("votes", np.zeros(104, np.uint32), n)[0]
    assert (result[:32] == sum(1 << lane for lane in range(0, 32, 3))).all()
    assert (result[32:64] == (n < 32)).all()
    assert (result[64:96] == (n >= 32)).all()
    assert (result[96:] == 0xAA).all()


# ---- integers, floats, atomics, copies --------------------------------------


def test_bit_operations(run: Run) -> None:
    rng = np.random.default_rng(3)
    pairs = [(0, 0), (1, 31), (0x80000000, 1), (0xFFFFFFFF, 0xFFFFFFFF)]
    pairs += [(int(x), int(y)) for x, y in rng.integers(0, 1 << 32, (200, 2), dtype=np.uint64)]
    a, b = (np.array(column, np.uint32) for column in zip(*pairs, strict=True))
    result = run("bits", a, b, np.zeros((len(pairs), 10), np.uint32), len(pairs))[2]

    def signed(x: int) -> int:
        return x - (1 << 32) if x >> 31 else x

    for row, (x, y) in zip(result.tolist(), pairs, strict=True):
        both = y << 32 | x
        assert row == [
            x.bit_count(),
            32 - x.bit_length(),
            (x & -x).bit_length(),
            int(f"{x:032b}"[::-1], 2),
            x * y >> 32,
            (y & 0xFFFF) << 16 | x & 0xFFFF,
            (both << (y & 31)) >> 32 & 0xFFFFFFFF,
            both >> (y & 31) & 0xFFFFFFFF,
            min(x, y),
            max(signed(x), signed(y)) & 0xFFFFFFFF,
        ]


def test_fmaxf_and_fminf_are_ptx_max_and_min(run: Run) -> None:
    nan, inf = np.nan, np.inf
    a = np.array([1, nan, 2, nan, 0.0, -0.0, -inf, 5], np.float32)
    b = np.array([2, 3, nan, nan, -0.0, 0.0, inf, 5], np.float32)
    result = run("extremes", a, b, np.zeros((8, 2), np.float32), 8)[2]
    np.testing.assert_array_equal(result[:, 0], np.array([2, 3, 2, nan, 0, 0, inf, 5], np.float32))
    np.testing.assert_array_equal(result[:, 1], np.array([1, 3, 2, nan, 0, 0, -inf, 5], np.float32))
    assert not np.signbit(result[4:6, 0]).any() and np.signbit(result[4:6, 1]).all()


def test_atomics(run: Run) -> None:
    i = np.array([0, 100, -100, 0, 0, 4], np.int32)
    u = np.array([0, 0, 0xFFFFFFFF, 0, 0xFFFFFFFF], np.uint32)
    w = np.zeros(2, np.uint64)
    i, u, w, old = run("atomics", i, u, w, np.zeros(35, np.int32))
    assert i.tolist() == [496, -31, 31, -1, 32, 11]
    assert u.tolist() == [496, 0x8000001F, 0x80000000, 0xFFFFFFFF, 0]
    assert w.tolist() == [32 << 32, 31 << 32 | (31 ^ 5)]
    assert sorted(old[:32].tolist()) == list(range(32))
    assert old[32:].tolist() == [4, 9, 11]


def test_copies_fill_with_zeros(run: Run) -> None:
    values = np.arange(1, 129, dtype=np.int32)
    result = run("copies", values, np.zeros(128, np.int32))[1]
    np.testing.assert_array_equal(result, np.where(np.arange(128) // 4 % 4 == 3, 0, values))


def test_streaming_loads(run: Run) -> None:
    a, b = np.arange(128, dtype=np.uint32) * 7, np.arange(64, dtype=np.uint32) * 1001
    result = run("stream", a, b, np.zeros(32, np.uint32))[2]
    np.testing.assert_array_equal(result, np.bitwise_xor.reduce(a.reshape(32, 4), 1) ^ np.bitwise_xor.reduce(b.reshape(32, 2), 1))


def test_copies_finish_as_late_as_allowed_when_shuffled() -> None:
    values = np.arange(128, dtype=np.int32)
    seen = {}
    for mode in ("plain", "shuffled"):
        backend = CpuBackend(mode)
        backend.load([source("copies_early_look")])
        out = backend.to_device(np.zeros(32, np.int32), "i32")
        backend.launch("copies_early_look", (1, 1, 1), 32, 0, [Pointer(backend.to_device(values, "i32")), Pointer(out)])
        seen[mode] = backend.to_host(out)
    np.testing.assert_array_equal(seen["plain"], 2 * values[:32])
    np.testing.assert_array_equal(seen["shuffled"], values[:32] - 1)  # the second group still shows poison, -1


# ---- the two sides ----------------------------------------------------------


def names(header: str) -> set[str]:
    text = re.sub(r"//.*", "", header)
    functions = re.findall(r"(?:__forceinline__|static inline)\s+[\w ]+?[\s*&]+(\w+)(?:<\w+>)?\s*\(", text)
    macros = set(re.findall(r"#define\s+(\w+)", text)) - set(re.findall(r"#undef\s+(\w+)", text))
    types = re.findall(r"typedef\s+[\w\s]+\s(\w+);", text) + re.findall(r"struct\s+(?:alignas\(\d+\)\s+)?(\w+)\b(?!\()", text)
    return {*functions, *macros, *types}


def test_every_gpu_primitive_has_a_cpu_twin() -> None:
    gpu, cpu = (names((templates_dir() / "lib" / side / "primitives.cuh").read_text()) for side in ("gpu", "cpu"))
    assert {"mma_m16n8k16_bf16", "cp_async_wait_group", "SHARED_ARRAY", "bf16", "u64", "from_float"} <= gpu, (
        "the pattern no longer reads the header"
    )
    assert gpu - cpu == set()
