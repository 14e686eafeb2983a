"""wgmma, mbarriers, bulk copies and warps with roles, against NumPy: on an sm_90a GPU for real, on the CPU as their twins claim."""

from __future__ import annotations

import itertools

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from kdgen.backends import open_backend
from kdgen.backends.base import Backend, Pointer
from kdgen.backends.cuda import CudaBackend
from kdgen.codegen.source import Source
from kdgen.plan.cache_layout import to_tiles

F32 = npt.NDArray[np.float32]

K = 64
BULK_SMEM = 2 * 64 * 64 * 2 + 4 * 8
#: columns, a in registers, b by columns
SHAPES = tuple(itertools.product((16, 24, 32, 40, 48, 56, 64, 128, 256), (False, True), (False, True)))

WGMMA = """
struct Shared {
  bf16 a[64][64];
  bf16 b[(N + 63) / 64][64][64];
};
extern "C" __global__ void __launch_bounds__(128) %(name)s(const uint4* a, const uint4* b, const float* c, float* out, int accumulate) {
  SHARED_DYNAMIC(Shared, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x %% 32;
  for (int i = threadIdx.x; i < 64 * 8; i += 128)
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(shared->a) + swizzled(i / 8, i %% 8)) = a[i];
  for (int i = threadIdx.x; i < N * 8; i += 128) {
    const int row = BY_COLUMNS ? i / (N / 8) : i / 8, piece = BY_COLUMNS ? i %% (N / 8) : i %% 8;
    char* tile = reinterpret_cast<char*>(shared->b[piece / 8]);
    *reinterpret_cast<uint4*>(tile + swizzled(row, piece %% 8)) = b[i];
  }
  fence_proxy_async();
  __syncthreads();
  float d[N / 2];
  for (int i = 0; i < N / 2; ++i)
    d[i] = c[(warp * 16 + lane / 4 + i / 2 %% 2 * 8) * N + i / 4 * 8 + lane %% 4 * 2 + i %% 2];
  u32 fragments[4][4];
  for (int step = 0; step < 4; ++step)
    for (int i = 0; i < 4; ++i)
      fragments[step][i] = reinterpret_cast<const u32*>(a)[(warp * 16 + lane / 4 + i %% 2 * 8) * 32 + step * 8 + lane %% 4 + i / 2 * 4];
  const u64 rows = wgmma_descriptor(shared->a, 0), others = wgmma_descriptor(shared->b, sizeof shared->b[0]);
  wgmma_fence(d);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const u64 other = others + wgmma_offset(step * (BY_COLUMNS ? 16 * 128 : 32));
    if (IN_REGISTERS)
      wgmma<BY_COLUMNS>(d, fragments[step], other, accumulate || step > 0);
    else
      wgmma<BY_COLUMNS>(d, rows + wgmma_offset(step * 32), other, accumulate || step > 0);
  }
  wgmma_commit_group();
  wgmma_wait_group<0>(d);
  for (int i = 0; i < N / 2; ++i)
    out[(warp * 16 + lane / 4 + i / 2 %% 2 * 8) * N + i / 4 * 8 + lane %% 4 * 2 + i %% 2] = d[i];
}
"""

#: A warp copies 64 times 32 words into two slots in turn, and two others add up what comes, each a half.
PIPELINE = """
struct Shared {
  u32 slot[2][128];
  u64 filled[2], read[2];
};
extern "C" __global__ void __launch_bounds__(96) pipeline(const u32* in, u32* out, int count) {
  SHARED_DYNAMIC(Shared, shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x < 2) {
    mbarrier_init(&shared->filled[threadIdx.x], 1);
    mbarrier_init(&shared->read[threadIdx.x], 2);
  }
  __syncthreads();
  u32 sum = 0;
  for (int i = 0; i < count; ++i) {
    if (warp == 2) {
      if (i >= 2) mbarrier_wait_parity(&shared->read[i % 2], (i / 2 - 1) & 1);
      cp_async_16(&shared->slot[i % 2][lane * 4], in + i * 128 + lane * 4, true);
      cp_async_commit_group();
      cp_async_wait_group<0>();
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared->filled[i % 2]);
    } else {
      mbarrier_wait_parity(&shared->filled[i % 2], (i / 2) & 1);
      sum += shared->slot[i % 2][warp * 64 + lane] + shared->slot[i % 2][warp * 64 + 32 + lane];
      __syncwarp();
      if (lane == 0) mbarrier_arrive(&shared->read[i % 2]);
    }
  }
  if (warp == 2) return;
  barrier_sync(3, 64);
  shared->slot[0][threadIdx.x] = sum;
  barrier_sync(3, 64);
  out[threadIdx.x] = shared->slot[0][threadIdx.x ^ 32];
}
"""


#: A thread brings 64 times 64 rows of 64 numbers, in two pieces, into two slots in turn; a warpgroup adds up their products.
BULK = """
struct Shared {
  bf16 slot[2][64][64];
  u64 filled[2], read[2];
};
extern "C" __global__ void __launch_bounds__(160) bulk(const bf16* in, float* out, int count) {
  SHARED_DYNAMIC(Shared, shared);
  if (threadIdx.x < 2) {
    mbarrier_init(&shared->filled[threadIdx.x], 2);
    mbarrier_init(&shared->read[threadIdx.x], 4);
    fence_proxy_async();
  }
  __syncthreads();
  float d[32];
  for (int i = 0; i < 32; ++i) d[i] = 0.0f;
  for (int i = 0; i < count; ++i) {
    u64* filled = &shared->filled[i % 2];
    if (threadIdx.x >= 128) {
      if (i >= 2) mbarrier_wait_parity(&shared->read[i % 2], (i / 2 - 1) & 1);
      if (threadIdx.x == 131) mbarrier_arrive(filled);
      if (threadIdx.x == 130) {
        mbarrier_arrive_expect_tx(filled, sizeof shared->slot[0]);
        cp_async_bulk(shared->slot[i % 2], in + i * 64 * 64, 1024, filled);
        cp_async_bulk(shared->slot[i % 2][8], in + i * 64 * 64 + 512, sizeof shared->slot[0] - 1024, filled);
      }
    } else {
      mbarrier_wait_parity(filled, (i / 2) & 1);
      const u64 tile = wgmma_descriptor(shared->slot[i % 2], 0);
      wgmma_fence(d);
#pragma unroll
      for (int step = 0; step < 4; ++step) wgmma<0>(d, tile + wgmma_offset(step * 32), tile + wgmma_offset(step * 32), true);
      wgmma_commit_group();
      wgmma_wait_group<0>(d);
      __syncwarp();
      if (threadIdx.x % 32 == 0) mbarrier_arrive(&shared->read[i % 2]);
    }
  }
  if (threadIdx.x >= 128) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int i = 0; i < 32; ++i)
    out[(warp * 16 + lane / 4 + i / 2 % 2 * 8) * 64 + i / 4 * 8 + lane % 4 * 2 + i % 2] = d[i];
}
"""

#: Products of two tiles of 64 rows, each its own group: the first one's are stored while the second one's may still be on their way.
TWO_GROUPS = """
struct Shared {
  bf16 tile[2][64][64];
};
extern "C" __global__ void __launch_bounds__(128) two_groups(const uint4* in, float* out) {
  SHARED_DYNAMIC(Shared, shared);
  for (int i = threadIdx.x; i < 128 * 8; i += 128)
    *reinterpret_cast<uint4*>(reinterpret_cast<char*>(shared->tile[i / 512]) + swizzled(i / 8 % 64, i % 8)) = in[i];
  fence_proxy_async();
  __syncthreads();
  float first[32], second[32];
  for (int i = 0; i < 32; ++i) first[i] = second[i] = 0.0f;
  const u64 tiles[2] = {wgmma_descriptor(shared->tile[0], 0), wgmma_descriptor(shared->tile[1], 0)};
  wgmma_fence(first);
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma<0>(first, tiles[0] + wgmma_offset(step * 32), tiles[0] + wgmma_offset(step * 32), true);
  wgmma_commit_group();
  wgmma_fence(second);
#pragma unroll
  for (int step = 0; step < 4; ++step) wgmma<0>(second, tiles[0] + wgmma_offset(step * 32), tiles[1] + wgmma_offset(step * 32), true);
  wgmma_commit_group();
  wgmma_wait_group<1>(first);
  float* to = out + (threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4) * 64 + threadIdx.x % 4 * 2;
  for (int i = 0; i < 32; ++i) to[i / 2 % 2 * 8 * 64 + i / 4 * 8 + i % 2] = first[i];
  wgmma_wait_group<0>(second);
  for (int i = 0; i < 32; ++i) to[64 * 64 + i / 2 % 2 * 8 * 64 + i / 4 * 8 + i % 2] = second[i];
}
"""
TWO_GROUPS_SMEM = 2 * 64 * 64 * 2


def wgmma_source(columns: int, in_registers: bool, by_columns: bool) -> Source:
    name = f"wgmma_{columns}_{int(in_registers)}_{int(by_columns)}"
    constants = f"constexpr int N = {columns}, BY_COLUMNS = {int(by_columns)}, IN_REGISTERS = {int(in_registers)};"
    body = constants + WGMMA % {"name": name}
    return Source(name, f'#include "primitives.cuh"\nnamespace {name} {{\n{body}}}\n', 128, (64 + max(64, columns)) * K * 2)


@pytest.fixture(scope="module", params=["cpu", "cpu-shuffled", "cpu-checker", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Backend:
    backend = open_backend(request.param)
    if isinstance(backend, CudaBackend) and backend.arch != "sm_90a":
        pytest.skip(f"{backend.arch} has no wgmma")
    pipeline = Source("pipeline", f'#include "primitives.cuh"\nnamespace pipeline {{{PIPELINE}}}\n', 96, 1056)
    bulk = Source("bulk", f'#include "primitives.cuh"\nnamespace bulk {{{BULK}}}\n', 160, BULK_SMEM)
    two_groups = Source("two_groups", f'#include "primitives.cuh"\nnamespace two_groups {{{TWO_GROUPS}}}\n', 128, TWO_GROUPS_SMEM)
    backend.load([*(wgmma_source(*shape) for shape in SHAPES), pipeline, bulk, two_groups])
    return backend


@pytest.mark.parametrize("accumulate", [0, 1])
@pytest.mark.parametrize(("columns", "in_registers", "by_columns"), SHAPES)
def test_wgmma(device: Backend, columns: int, in_registers: bool, by_columns: bool, accumulate: int) -> None:
    """Integers small enough for every order and every rounding to give the same sum."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-8, 9, shape).astype(ml_dtypes.bfloat16) for shape in ((64, K), (K, columns)))
    c = rng.integers(-99, 100, (64, columns)).astype(np.float32)
    source = wgmma_source(columns, in_registers, by_columns)
    given = [device.to_device(np.ascontiguousarray(x), "bf16") for x in (a, b if by_columns else b.T)]
    out = device.empty((64, columns), "f32")
    pointers = [Pointer(array) for array in (*given, device.to_device(c, "f32"), out)]
    device.launch(source.name, (1, 1, 1), 128, source.smem, [*pointers, accumulate])
    assert (device.to_host(out) == a.astype(np.float32) @ b.astype(np.float32) + accumulate * c).all()


def test_a_group_is_waited_for_while_another_is_on_its_way(device: Backend) -> None:
    tiles = np.random.default_rng(0).integers(-8, 9, (2, 64, K)).astype(ml_dtypes.bfloat16)
    out = device.empty((2, 64, 64), "f32")
    device.launch("two_groups", (1, 1, 1), 128, TWO_GROUPS_SMEM, [Pointer(device.to_device(tiles, "bf16")), Pointer(out)])
    first, second = tiles.astype(np.float32)
    assert (device.to_host(out) == np.stack([first @ first.T, first @ second.T])).all()


def test_warps_with_roles(device: Backend) -> None:
    values = np.random.default_rng(0).integers(0, 1 << 20, (64, 128)).astype(np.int32)
    out = device.empty((64,), "i32")
    for count in (1, 2, 3, 64):
        device.launch("pipeline", (1, 1, 1), 96, 1056, [Pointer(device.to_device(values, "i32")), Pointer(out), count])
        expected = values[:count].reshape(count, 2, 2, 32).sum(axis=(0, 2))[::-1].reshape(-1)
        assert (device.to_host(out) == expected).all()


def test_bulk_copies(device: Backend) -> None:
    """Tiles as they lie in memory: each adds its product with its own transpose, in whole numbers."""
    tiles = np.random.default_rng(0).integers(-8, 9, (64, 64, K)).astype(ml_dtypes.bfloat16)
    out = device.empty((64, 64), "f32")
    for count in (1, 2, 3, 64):
        given = device.to_device(to_tiles(tiles[:count].reshape(-1, K)), "bf16")
        device.launch("bulk", (1, 1, 1), 160, BULK_SMEM, [Pointer(given), Pointer(out), count])
        each = tiles[:count].astype(np.float32)
        assert (device.to_host(out) == (each @ each.transpose(0, 2, 1)).sum(axis=0)).all()
