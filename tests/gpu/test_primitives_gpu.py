"""What the hardware behind ``primitives.cuh`` does, against NumPy: on a GPU for real, on the CPU as its twin claims.

The tests named ``report`` measure rather than demand: what they print (``pytest -m gpu -rP``) is where silicon and twin may differ.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kdgen.backends import open_backend
from kdgen.backends.base import Argument, Backend, DeviceArray, Pointer
from kdgen.codegen.source import Source

F32 = npt.NDArray[np.float32]
U16 = npt.NDArray[np.uint16]
U32 = npt.NDArray[np.uint32]

MMA = """
  // one warp a case: fragments come laid out by lane
  int at = blockIdx.x * 32 + threadIdx.x;
  u32 fa[4], fb[2];
  float acc[4];
  for (int i = 0; i < 4; ++i) fa[i] = a[at * 4 + i];
  for (int i = 0; i < 2; ++i) fb[i] = b[at * 2 + i];
  for (int i = 0; i < 4; ++i) acc[i] = c[at * 4 + i];
  mma_m16n8k16_bf16(acc, fa, fb);
  for (int i = 0; i < 4; ++i) d[at * 4 + i] = acc[i];
"""

# lane l gives row l % 8 of matrix l / 8; x2 reads 16 lanes' addresses, the others repeat them
LDMATRIX = """
  SHARED_ARRAY(unsigned short, s, [256]);
  for (int i = threadIdx.x; i < 256; i += 32) s[i] = ((const unsigned short*)tile)[i];
  __syncthreads();
  int lane = threadIdx.x;
  u32 r[4], q[2];
  ldmatrix_x4(r, s + lane * 8);
  for (int i = 0; i < 4; ++i) out[lane * 12 + i] = r[i];
  ldmatrix_x4_trans(r, s + lane * 8);
  for (int i = 0; i < 4; ++i) out[lane * 12 + 4 + i] = r[i];
  ldmatrix_x2(q, s + lane % 16 * 8);
  for (int i = 0; i < 2; ++i) out[lane * 12 + 8 + i] = q[i];
  ldmatrix_x2_trans(q, s + lane % 16 * 8);
  for (int i = 0; i < 2; ++i) out[lane * 12 + 10 + i] = q[i];
"""

CP_ASYNC = """
  SHARED_ARRAY(u32, s, [256]);
  for (int i = threadIdx.x; i < 256; i += 32) s[i] = 77;
  __syncthreads();
  for (int g = 0; g < 2; ++g) {
    cp_async_16(s + g * 128 + threadIdx.x * 4, src + g * 128 + threadIdx.x * 4, g * 32 + (int)threadIdx.x < valid);
    cp_async_commit_group();
  }
  cp_async_wait_group<1>();
  __syncthreads();
  for (int i = 0; i < 4; ++i) out[i * 32 + threadIdx.x] = s[i * 32 + threadIdx.x];
  cp_async_wait_group<0>();
  __syncthreads();
  for (int i = 4; i < 8; ++i) out[i * 32 + threadIdx.x] = s[i * 32 + threadIdx.x];
"""

CONVERT = """
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) {
    bf16 r = from_float<bf16>(__uint_as_float(x[i]));
    u32 packed = pack_bf16x2(__uint_as_float(x[i]), __uint_as_float(x[n - 1 - i]));
    out[i] = r.bits;
    out[n + i] = __float_as_uint(to_float(r));
    out[2 * n + i] = packed;
    out[3 * n + i] = __float_as_uint(bf16x2_lo(packed));
    out[4 * n + i] = __float_as_uint(bf16x2_hi(packed));
  }
"""

WIDEN = "int i = blockIdx.x * 128 + threadIdx.x; if (i < n) out[i] = lop3_and_or(x[i], 0x000f000fu, 0x43004300u);"
UNIFORM = """
  u32 a[4], pair[2] = {b[threadIdx.x * 2], b[threadIdx.x * 2 + 1]};
  float d[4];
  uniform_fragment(a, 0xc308c308u);
  mma_m16n8k16_bf16_from_zero(d, a, pair);
  for (int i = 0; i < 4; ++i) out[threadIdx.x * 4 + i] = d[i];
"""

WARP = """
  int i = blockIdx.x * 32 + threadIdx.x;
  total[i] = warp_sum(x[i]);
  most[i] = warp_max(x[i]);
"""

ROUND_TWICE = """
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i < n) out[i] = x[i] * y[i] + z[i];
  if (i == 0) out[n] = negative_infinity();
"""

STREAM = """
  int i = threadIdx.x;
  uint4 v = ld_global_nc_16(src + i * 4);
  uint2 w = ld_global_nc_8(src + i * 2);
  out[i * 6] = v.x; out[i * 6 + 1] = v.y; out[i * 6 + 2] = v.z; out[i * 6 + 3] = v.w; out[i * 6 + 4] = w.x; out[i * 6 + 5] = w.y;
"""


def source(name: str, parameters: str, body: str, block: int) -> Source:
    head = f'#include "primitives.cuh"\nnamespace {name} {{\nextern "C" __global__ void __launch_bounds__({block}) {name}'
    return Source(name, f"{head}({parameters}) {{{body}}}\n}}\n", block, 0)


def sources() -> list[Source]:
    return [
        source("mma", "const u32* a, const u32* b, const float* c, float* d", MMA, 32),
        source("ldmatrix", "const u32* tile, u32* out", LDMATRIX, 32),
        source("cp_async", "const u32* src, u32* out, int valid", CP_ASYNC, 32),
        source("convert", "const u32* x, u32* out, int n", CONVERT, 128),
        source("widen", "const u32* x, u32* out, int n", WIDEN, 128),
        source("uniform", "const u32* b, float* out", UNIFORM, 32),
        source("warp", "const float* x, float* total, float* most", WARP, 32),
        source("round_twice", "const float* x, const float* y, const float* z, float* out, int n", ROUND_TWICE, 128),
        source("stream", "const u32* src, u32* out", STREAM, 32),
    ]


@pytest.fixture(scope="module", params=["cpu", "cpu-shuffled", "cpu-checker", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Backend:
    backend = open_backend(request.param)
    backend.load(sources())
    return backend


def run(device: Backend, kernel: str, grid: int, block: int, *args: npt.NDArray[np.generic] | DeviceArray | int) -> None:
    """Launch; arrays are copied to the device first."""
    given: list[Argument] = []
    for arg in args:
        if isinstance(arg, np.ndarray):
            flat = arg.view(np.int32) if arg.dtype == np.uint32 else arg
            given.append(Pointer(device.to_device(flat, "i32" if flat.dtype == np.int32 else "f32")))
        else:
            given.append(Pointer(arg) if isinstance(arg, DeviceArray) else arg)
    device.launch(kernel, (grid, 1, 1), block, 0, given)


def words(device: Backend, array: DeviceArray) -> U32:
    return device.to_host(array).view(np.uint32)


def bf16_bits(x: npt.NDArray[np.floating]) -> U32:
    return x.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)


def bits(x: F32) -> U32:
    return np.ascontiguousarray(x).view(np.uint32)


# ---- tensor cores: fragments as the PTX ISA draws them ---------------------
def a_fragments(a: F32) -> U32:
    """[cases, 16, 16] row by row, to [cases, 32 lanes, 4 words]."""
    words_ = bf16_bits(a)
    lane = np.arange(32)
    row, column = lane // 4, lane % 4 * 2
    parts = []
    for i in range(4):
        r, k = row + i % 2 * 8, column + i // 2 * 8
        parts.append(words_[:, r, k] | words_[:, r, k + 1] << 16)
    return np.stack(parts, axis=-1)


def b_fragments(b: F32) -> U32:
    """[cases, 16 (k), 8 (n)] to [cases, 32 lanes, 2 words]."""
    words_ = bf16_bits(b)
    lane = np.arange(32)
    n, k = lane // 4, lane % 4 * 2
    return np.stack([words_[:, k + i * 8, n] | words_[:, k + i * 8 + 1, n] << 16 for i in range(2)], axis=-1)


def c_index() -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Row and column of each lane's four accumulators."""
    lane, i = np.arange(32)[:, None], np.arange(4)[None, :]
    return lane // 4 + i // 2 * 8, lane % 4 * 2 + i % 2


def mma(device: Backend, a: F32, b: F32, c: F32) -> F32:
    """d = c + a b for every case, by the instruction."""
    cases = len(a)
    row, column = c_index()
    d = device.empty((cases, 32, 4), "f32")
    run(device, "mma", cases, 32, a_fragments(a), b_fragments(b), np.ascontiguousarray(c[:, row, column]), d)
    out = np.empty((cases, 16, 8), np.float32)
    out[:, row, column] = device.to_host(d)
    return out


def bf16_random(rng: np.random.Generator, *shape: int) -> F32:
    return rng.standard_normal(shape, dtype=np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def operands(cases: int, seed: int = 0) -> tuple[F32, F32, F32]:
    rng = np.random.default_rng(seed)
    return bf16_random(rng, cases, 16, 16), bf16_random(rng, cases, 16, 8), rng.standard_normal((cases, 16, 8), dtype=np.float32)


def test_mma_layout(device: Backend) -> None:
    rng = np.random.default_rng(1)
    # integers small enough for every order and every rounding to give the same sum
    a, b, c = (rng.integers(-9, 10, shape).astype(np.float32) for shape in ((8, 16, 16), (8, 16, 8), (8, 16, 8)))
    assert np.array_equal(mma(device, a, b, c), c + a @ b)
    # and one element at a time, so that no two places can be confused
    for k in range(16):
        a, b, c = (np.zeros(shape, np.float32) for shape in ((128, 16, 16), (128, 16, 8), (128, 16, 8)))
        case = np.arange(128)
        a[case, case // 8, k] = 3
        b[case, k, case % 8] = 5
        assert np.array_equal(mma(device, a, b, c), a @ b)


def test_mma_columns_do_not_see_each_other(device: Backend) -> None:
    a, b, c = operands(64)
    whole = mma(device, a, b, c)
    for n in range(8):
        alone_b, alone_c = np.zeros_like(b), np.zeros_like(c)
        alone_b[:, :, n], alone_c[:, :, n] = b[:, :, n], c[:, :, n]
        assert np.array_equal(bits(mma(device, a, alone_b, alone_c)[:, :, n]), bits(whole[:, :, n])), f"column {n} with zeros beside it"
        noisy_b, noisy_c = np.full_like(b, np.nan), np.full_like(c, np.inf)
        noisy_b[:, :, n], noisy_c[:, :, n] = b[:, :, n], c[:, :, n]
        assert np.array_equal(bits(mma(device, a, noisy_b, noisy_c)[:, :, n]), bits(whole[:, :, n])), f"column {n} with NaN beside it"


def test_mma_columns_and_rows_do_not_see_their_place(device: Backend) -> None:
    a, b, c = operands(64, seed=2)
    whole = mma(device, a, b, c)
    for shift in range(1, 8):
        rolled = mma(device, a, np.roll(b, shift, axis=2), np.roll(c, shift, axis=2))
        assert np.array_equal(bits(np.roll(rolled, -shift, axis=2)), bits(whole)), f"columns moved by {shift}"
    for shift in range(1, 16):
        rolled = mma(device, np.roll(a, shift, axis=1), b, np.roll(c, shift, axis=1))
        assert np.array_equal(bits(np.roll(rolled, -shift, axis=1)), bits(whole)), f"rows moved by {shift}"


def test_mma_with_nothing_to_add_keeps_the_accumulator(device: Backend) -> None:
    a, b, c = operands(64, seed=3)
    assert np.array_equal(bits(mma(device, a, np.zeros_like(b), c)), bits(c))
    assert np.array_equal(bits(mma(device, np.zeros_like(a), b, c)), bits(c))


def test_mma_is_close_to_the_exact_sum(device: Backend) -> None:
    a, b, c = operands(256, seed=4)
    exact = c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    magnitude = np.abs(c).astype(np.float64) + np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    # 16 additions, each off by at most one unit of a truncated 24-bit sum
    assert np.all(np.abs(mma(device, a, b, c) - exact) <= 16 * 2.0**-23 * magnitude)


def sequential(a: F32, b: F32, c: F32) -> F32:
    """float32, k by k, rounded to nearest after every addition: what the CPU twin does. (A product of two bf16 is exact.)"""
    total = c.copy()
    for k in range(16):
        total = total + a[:, :, k, None] * b[:, k, None, :]
    return total


def fused(a: F32, b: F32, c: F32, group: int, extra_bits: int) -> F32:
    """A common model of tensor cores: ``group`` products and the running sum are aligned to the largest exponent among them, cut off
    (towards zero) ``extra_bits`` below float32's last bit, added exactly, and the sum is cut to float32."""
    total = c.astype(np.float64)
    products = a[:, :, :, None].astype(np.float64) * b[:, None, :, :].astype(np.float64)  # case, m, k, n
    for k in range(0, 16, group):
        terms = np.concatenate([total[:, :, None, :], products[:, :, k : k + group, :]], axis=2)
        _, exponent = np.frexp(np.abs(terms).max(axis=2, keepdims=True))
        unit = np.ldexp(1.0, exponent - 24 - extra_bits)
        total = (np.trunc(terms / unit) * unit).sum(axis=2)
        _, exponent = np.frexp(total)
        unit = np.ldexp(1.0, exponent - 24)
        total = np.trunc(total / unit) * unit
    return total.astype(np.float32)


def ulps(x: F32, y: F32) -> npt.NDArray[np.int64]:
    def ordered(v: F32) -> npt.NDArray[np.int64]:
        i = bits(v).view(np.int32).astype(np.int64)
        return np.where(i < 0, -(2**31) - i, i)

    return np.abs(ordered(x) - ordered(y))


def test_report_mma_accumulation(device: Backend) -> None:
    a, b, c = operands(512, seed=5)
    got = mma(device, a, b, c)
    exact = (c.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
    models: dict[str, F32] = {"sequential float32 (the CPU twin)": sequential(a, b, c), "exact, rounded once": exact}
    for group in (4, 8, 16):
        for extra in (0, 1, 2, 3):
            models[f"groups of {group}, cut {extra} bits below, towards zero"] = fused(a, b, c, group, extra)
    print(f"\nmma m16n8k16 on {device.description}, {got.size} random elements against models of its accumulation:")
    for name, model in models.items():
        difference = ulps(got, model)
        print(f"  {name:45} equal bits {np.mean(difference == 0):8.4%}   largest difference {difference.max()} ulp")
    rng = np.random.default_rng(6)
    order = rng.permutation(16)
    permuted = mma(device, a[:, :, order], b[:, order, :], c)
    print(f"  k permuted: equal bits {np.mean(bits(permuted) == bits(got)):.4%}")
    if device.name.startswith("cpu"):
        assert np.array_equal(bits(got), bits(models["sequential float32 (the CPU twin)"]))


def test_report_mma_probes(device: Backend) -> None:
    """Sums whose result tells how they were added."""

    def probe(accumulator: float, products: list[float]) -> float:
        a, b, c = (np.zeros(shape, np.float32) for shape in ((1, 16, 16), (1, 16, 8), (1, 16, 8)))
        a[0, 0, : len(products)], b[0, : len(products), 0], c[0, 0, 0] = products, 1, accumulator
        return float(mma(device, a, b, c)[0, 0, 0])

    big = 2.0**24
    print(f"\nmma m16n8k16 on {device.description}, single sums:")
    print(f"  2^24 + 16 x 1 - 2^24: {probe(big, [1.0] * 16) - big} (0 when added one by one, 16 when added together)")
    for bit in range(24, 30):
        print(f"  1 + 2 x 2^-{bit}: adds {probe(1.0, [2.0**-bit] * 2) - 1.0} (exactly {2.0 ** (1 - bit)})")
    print(f"  1 + 1.5 x 2^-23 - 1: {(probe(1.0, [1.5 * 2.0**-23]) - 1.0) * 2**23} x 2^-23 (1 towards zero, 2 to nearest)")
    print(f"  -1 - 1.5 x 2^-23 + 1: {(probe(-1.0, [-1.5 * 2.0**-23]) + 1.0) * 2**23} x 2^-23")
    for k in (1, 2, 4, 8, 15):
        products = [0.0] * 16
        products[0], products[k] = big, -big
        print(f"  2^24 at k = 0 against -2^24 at k = {k}, accumulator 1: {probe(1.0, products)}")
    print(f"  subnormal accumulator 2^-140: {probe(2.0**-140, [])!r}; subnormal product: {probe(0.0, [2.0**-133])!r}")


# ---- the rest ---------------------------------------------------------------
def test_ldmatrix_layouts(device: Backend) -> None:
    tile = np.random.default_rng(7).permutation(2**16)[:256].astype(np.uint16).reshape(4, 8, 8)
    out = device.empty((32, 12), "i32")
    run(device, "ldmatrix", 1, 32, np.ascontiguousarray(tile.reshape(-1)).view(np.uint32), out)
    got = words(device, out)
    lane = np.arange(32)

    def expected(matrix: U16) -> U32:
        pairs = matrix.astype(np.uint32)[lane // 4][lane[:, None], (lane % 4 * 2)[:, None] + np.arange(2)]
        return pairs[:, 0] | pairs[:, 1] << 16

    for i in range(4):
        assert np.array_equal(got[:, i], expected(tile[i])), f"x4, matrix {i}"
        assert np.array_equal(got[:, 4 + i], expected(tile[i].T)), f"x4 transposed, matrix {i}"
    for i in range(2):
        assert np.array_equal(got[:, 8 + i], expected(tile[i])), f"x2, matrix {i}"
        assert np.array_equal(got[:, 10 + i], expected(tile[i].T)), f"x2 transposed, matrix {i}"


@pytest.mark.parametrize("valid", [0, 1, 31, 33, 64])
def test_cp_async_copies_or_fills_with_zeros(device: Backend, valid: int) -> None:
    values = np.random.default_rng(8).integers(1, 2**32, 256, dtype=np.uint32)
    out = device.empty((256,), "i32")
    run(device, "cp_async", 1, 32, values, out, valid)
    assert np.array_equal(words(device, out), np.where(np.arange(256) // 4 < valid, values, 0))


def test_streaming_loads(device: Backend) -> None:
    values = np.random.default_rng(9).integers(0, 2**32, 128, dtype=np.uint32)
    out = device.empty((32, 6), "i32")
    run(device, "stream", 1, 32, values, out)
    assert np.array_equal(words(device, out), np.concatenate([values.reshape(32, 4), values[:64].reshape(32, 2)], axis=1))


def round_to_bf16(x: npt.NDArray[np.float64]) -> U16:
    """float64 to bf16 bits, once, ties to even; NaN becomes 0x7fff."""
    with np.errstate(invalid="ignore", over="ignore"):
        _, exponent = np.frexp(x)
        unit = np.ldexp(1.0, np.maximum(exponent - 1, -126) - 7)
        rounded = np.where(np.isfinite(x), np.rint(x / unit) * unit, x)
        top = (rounded.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), top)


def convert(device: Backend, x: U32) -> U32:
    out = device.empty((5, len(x)), "i32")
    run(device, "convert", -(-len(x) // 128), 128, x, out, len(x))
    return words(device, out)


def test_every_bf16_survives_the_way_to_float_and_back(device: Backend) -> None:
    every = np.arange(2**16, dtype=np.uint32)
    nan = (every & 0x7FFF) > 0x7F80
    got = convert(device, every << 16)
    assert np.array_equal(got[0], np.where(nan, 0x7FFF, every))
    assert np.array_equal(got[1], got[0] << 16)


def test_bf16_conversion_rounds_to_nearest_even(device: Backend) -> None:
    every = np.arange(2**16, dtype=np.uint32) << 16
    tails = np.array([0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)  # below, at and above a tie
    x = (every[:, None] | tails).reshape(-1)
    with np.errstate(invalid="ignore"):
        expected = round_to_bf16(x.view(np.float32).astype(np.float64)).astype(np.uint32)
    got = convert(device, x)
    assert np.array_equal(got[0], expected)
    packed = expected | expected[::-1] << 16
    assert np.array_equal(got[2], packed)
    assert np.array_equal(got[3], packed << 16)
    assert np.array_equal(got[4], packed & 0xFFFF0000)


def test_nibbles_become_bf16(device: Backend) -> None:
    x = np.random.default_rng(10).integers(0, 2**32, 150_000, dtype=np.uint64).astype(np.uint32)
    out = device.empty((len(x),), "i32")
    run(device, "widen", -(-len(x) // 128), 128, x, out, len(x))
    assert np.array_equal(words(device, out), (x & 0x000F000F) | 0x43004300)


def test_a_uniform_fragment_times_inputs_is_a_multiple_of_their_sum(device: Backend) -> None:
    b = np.random.default_rng(11).integers(-8, 9, (16, 8)).astype(np.float32)  # sums are exact
    lanes = np.arange(32)
    k = lanes[:, None, None] % 4 * 2 + np.array([0, 8])[None, :, None] + np.arange(2)
    pairs = (b[k, lanes[:, None, None] // 4].view(np.uint32) >> 16).astype(np.uint32)
    out = device.empty((128,), "f32")
    run(device, "uniform", 1, 32, np.ascontiguousarray(pairs[..., 0] | pairs[..., 1] << 16).ravel(), out)
    column = lanes[:, None] % 4 * 2 + np.arange(4) % 2
    assert np.array_equal(words(device, out).view(np.float32).reshape(32, 4), -136 * b.sum(0)[column])


def butterfly(x: F32, combine: Callable[[F32, F32], F32]) -> F32:
    lane = np.arange(32)
    for offset in (16, 8, 4, 2, 1):
        x = combine(x, x[:, lane ^ offset])
    return x


def test_warp_sum_and_max_are_the_documented_butterfly(device: Backend) -> None:
    rng = np.random.default_rng(11)
    x = (rng.standard_normal((200, 32)) * 10.0 ** rng.integers(-6, 7, (200, 32))).astype(np.float32)
    x[0], x[1], x[2] = 0, -np.inf, -1e-40
    total, most = device.empty(x.shape, "f32"), device.empty(x.shape, "f32")
    run(device, "warp", len(x), 32, x, total, most)
    sums = device.to_host(total).view(np.uint32)
    assert np.array_equal(sums, bits(butterfly(x, lambda v, w: v + w)))
    assert np.all(sums == sums[:, :1]), "every lane holds the same bits"
    assert np.array_equal(device.to_host(most).view(np.uint32), bits(butterfly(x, np.maximum)))


def test_multiply_and_add_round_twice(device: Backend) -> None:
    x, y, z = np.random.default_rng(12).standard_normal((3, 5000), dtype=np.float32)
    out = device.empty((5001,), "f32")
    run(device, "round_twice", 40, 128, x, y, z, out, 5000)
    got = device.to_host(out)
    assert np.array_equal(got[:5000].view(np.uint32), bits(x * y + z)), "the compiler contracted a multiplication and an addition"
    assert got[5000] == -np.inf
