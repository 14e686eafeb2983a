"""The checker names the kernel and the line of every kind of bug it promises to find, and stays silent about clean kernels."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from kdgen.backends.base import Argument, DeviceArray, Pointer
from kdgen.backends.cpu import CpuBackend
from kdgen.codegen.source import Source
from kdgen.errors import BackendError

THREADS = 64
PARAMETERS = "int* __restrict__ out, const int* __restrict__ in, int n"


@dataclass(frozen=True)
class Case:
    """A kernel body; lines marked ``// BUG`` are those that the checker may name. ``out`` and ``in`` hold THREADS ints each."""

    body: str
    says: str = ""
    blocks: int = 1
    smem: int = 0
    blank_input: bool = False  # nobody has written `in`


BUGS = {
    "race_missing_barrier": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  s[t] = t;  // BUG
  out[t] = s[t ^ 1];  // BUG
""",
        "race|uninitialised",
    ),
    "race_barrier_too_few": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  int sum = 0;
  for (int i = 0; i < 3; ++i) {
    s[t] = t + i;  // BUG
    __syncthreads();
    sum += s[THREADS - 1 - t];  // BUG
  }
  out[t] = sum;
""",
        "race",
    ),
    "race_shuffle_is_no_fence": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  s[t] = t;  // BUG
  if (__shfl_sync(0xffffffffu, 1, 0) == 2) return;
  out[t] = s[t ^ 1];  // BUG
""",
        "race",
    ),
    "race_syncwarp_across_warps": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  s[t] = t;  // BUG
  __syncwarp();
  out[t] = s[t ^ 32];  // BUG
""",
        "race|uninitialised",
    ),
    "race_partial_syncwarp": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  s[t] = t;  // BUG
  if (t % 32 < 16) __syncwarp(0xffffu);
  out[t] = s[t ^ 16];  // BUG
""",
        "race|uninitialised",
    ),
    "race_same_global_element": Case(
        """
  out[t / 2] = t;  // BUG
""",
        r"race: 4-byte write of i32\[64\], argument 0 after a write by thread \d+ of this block",
    ),
    "race_between_blocks": Case(
        """
  out[t] = in[t] + (int)blockIdx.x;  // BUG
""",
        r"race: 4-byte write of .* of another block",
        blocks=2,
    ),
    "race_reads_before_another_block_writes": Case(
        """
  const int before = out[0];  // BUG
  if (blockIdx.x == 1 && t == 0) out[0] = before + 1;  // BUG
""",
        "race",
        blocks=3,
    ),
    "race_with_an_earlier_block_behind_a_barrier": Case(
        """
  const int before = out[0];  // BUG
  __syncthreads();
  if (blockIdx.x == 1 && t == 0) out[0] = before + 1;  // BUG
""",
        "race",
        blocks=2,
    ),
    "race_with_the_last_reader_but_one": Case(
        """
  if (t >= 32) return;
  int before = out[0];  // BUG
  before = __shfl_sync(0xffffffffu, before, 0);
  if (t == 5) out[0] = before + out[0];  // BUG
""",
        "race: 4-byte write .* after a read",
    ),
    "race_atomic_then_plain_read": Case(
        """
  SHARED_ARRAY(int, count, [1]);
  if (t == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(&count[0], 1);  // BUG
  out[t] = count[0];  // BUG
""",
        "race",
    ),
    "race_last_block_without_fence": Case(
        """
  SHARED_ARRAY(int, last, [1]);
  if (t == 0) out[1 + blockIdx.x] = 3;  // BUG
  if (t == 0) last[0] = atomicAdd(&out[0], 1) == in[1] + 2;
  __syncthreads();
  if (last[0] && t == 0) out[10] = out[1] + out[2] + out[3];  // BUG
""",
        "race",
        blocks=3,
    ),
    "race_ldmatrix": Case(
        """
  SHARED_ARRAY(uint4, s, [32]);
  if (t >= 32) return;
  s[t] = make_uint4(t, t, t, t);  // BUG
  u32 r[4];
  ldmatrix_x4(r, &s[t ^ 1]);  // BUG
  out[t] = (int)r[0];
""",
        "race",
    ),
    "uninitialised_shared": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  if (t != 5) s[t] = t;
  __syncthreads();
  out[t] = s[THREADS - 1 - t];  // BUG
""",
        r"uninitialised: 4-byte read of static shared memory",
    ),
    "uninitialised_shared_of_an_earlier_block": Case(
        """
  SHARED_DYNAMIC(int, s);
  if (blockIdx.x == 0) s[t] = t;
  __syncthreads();
  if (t == 0) out[blockIdx.x] = s[0];  // BUG
""",
        r"uninitialised: 4-byte read of dynamic shared memory",
        blocks=2,
        smem=4 * THREADS,
    ),
    "uninitialised_global": Case(
        """
  out[t] = in[t];  // BUG
""",
        r"uninitialised: 4-byte read of byte \d+ of i32\[64\], argument 1",
        blank_input=True,
    ),
    "uninitialised_streaming_load": Case(
        """
  const uint4 v = ld_global_nc_16(in + t / 4 * 4);  // BUG
  out[t] = (int)v.x;
""",
        "uninitialised: 16-byte read",
        blank_input=True,
    ),
    "bounds_global_read": Case(
        """
  out[t] = in[t + 1];  // BUG
""",
        r"out of bounds: 4-byte read at byte 256 of i32\[64\], argument 1, which has 256",
    ),
    "bounds_global_write": Case(
        """
  if (t == 3) out[THREADS + n] = 1;  // BUG
""",
        r"out of bounds: 4-byte write at byte 284 of i32\[64\], argument 0",
    ),
    "bounds_far_away": Case(
        """
  if (t == 3) *(int*)(size_t)(4096 + 4 * n) = 1;  // BUG
""",
        "no memory of this device",
    ),
    "bounds_shared": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  s[t + 1] = t;  // BUG
  __syncthreads();
  out[t] = s[t];
""",
        "out of bounds: 4-byte write outside every shared array",
    ),
    "bounds_dynamic_shared": Case(
        """
  SHARED_DYNAMIC(int, s);
  s[t] = t;  // BUG
  __syncthreads();
  out[t] = s[t];
""",
        "out of bounds: 4-byte write at byte 252 of 252 bytes of dynamic shared memory",
        smem=4 * THREADS - 4,
    ),
    "misaligned_vector": Case(
        """
  if (t < 8) {
    const uint2 v = *reinterpret_cast<const uint2*>(in + 2 * t + 1);  // BUG
    out[t] = (int)(v.x + v.y);
  }
""",
        "misaligned: access at an address that is 4 more than a multiple of 8",
    ),
    "misaligned_vector_written": Case(
        """
  if (t < 4) reinterpret_cast<uint4*>(out + 2)[t] = make_uint4(t, t, t, t);  // BUG
""",
        "misaligned: access at an address that is 8 more than a multiple of 16",
    ),
    "misaligned_vector_in_shared_memory": Case(
        """
  SHARED_ARRAY(int, s, [THREADS + 4]);
  s[t] = in[t];
  __syncthreads();
  if (t < 8) {
    const uint4 v = *reinterpret_cast<const uint4*>(s + 4 * t + 3);  // BUG
    out[t] = (int)(v.x + v.y + v.z + v.w);
  }
""",
        "misaligned: access at an address that is 12 more than a multiple of 16",
    ),
    "misaligned_copy": Case(
        """
  SHARED_ARRAY(uint4, s, [4]);
  if (t < 4) cp_async_16(&s[t], in + 1, true);  // BUG
""",
        "cp_async_16: an address is not a multiple of 16",
    ),
    "copy_not_waited_for": Case(
        """
  SHARED_ARRAY(uint4, s, [THREADS / 4]);
  if (t < THREADS / 4) cp_async_16(&s[t], in + 4 * t, true);
  cp_async_commit_group();
  __syncthreads();
  out[t] = (int)s[t / 4].x;  // BUG
""",
        "unwaited copy",
    ),
    "copy_waited_one_group_short": Case(
        """
  SHARED_ARRAY(uint4, s, [THREADS / 2]);
  if (t < THREADS / 4) cp_async_16(&s[t], in + 4 * t, true);
  cp_async_commit_group();
  if (t < THREADS / 4) cp_async_16(&s[t + THREADS / 4], in + 4 * t, true);
  cp_async_commit_group();
  cp_async_wait_group<1>();
  __syncthreads();
  out[t] = (int)(s[t / 4].x + s[THREADS / 4 + t / 4].x);  // BUG
""",
        "unwaited copy",
    ),
    "copy_left_behind": Case(
        """
  SHARED_ARRAY(uint4, s, [THREADS / 4]);
  out[t] = t;
  if (t >= THREADS / 4) return;
  cp_async_16(&s[t], in + 4 * t, true);  // BUG
  cp_async_commit_group();
""",
        "unwaited copy: this thread has ended with 1 asynchronous copies",
    ),
    "copy_without_barrier": Case(
        """
  SHARED_ARRAY(uint4, s, [THREADS / 4]);
  if (t < THREADS / 4) cp_async_16(&s[t], in + 4 * t, true);  // BUG
  cp_async_commit_group();
  cp_async_wait_group<0>();
  out[t] = (int)s[t / 4].x;  // BUG
""",
        "race|uninitialised|unwaited",
    ),
    "copy_overwrites_what_is_read": Case(
        """
  SHARED_ARRAY(uint4, s, [THREADS / 4]);
  if (t < THREADS / 4) s[t] = make_uint4(t, t, t, t);
  __syncthreads();
  out[t] = (int)s[t / 4].x;  // BUG
  if (t < THREADS / 4) cp_async_16(&s[t], in + 4 * t, true);  // BUG
  cp_async_commit_group();
  cp_async_wait_group<0>();
""",
        "race|unwaited",
    ),
    "divergence_barrier_in_one_warp": Case(
        """
  if (t < 32) __syncthreads();  // BUG
  out[t] = t;
""",
        "divergence",
    ),
    "divergence_two_barriers": Case(
        """
  if (t < 32)
    __syncthreads();  // BUG
  else
    __syncthreads();  // BUG
  out[t] = t;
""",
        "divergence: this thread is at one __syncthreads while others",
    ),
    "divergence_early_return": Case(
        """
  if (t >= 48) return;
  __syncthreads();  // BUG
  out[t] = t;
""",
        "divergence",
    ),
    "divergence_shuffle_in_half_a_warp": Case(
        """
  int v = t;
  if (t % 32 < 16) v = __shfl_xor_sync(0xffffffffu, v, 1);  // BUG
  out[t] = v;
""",
        "divergence",
    ),
    "divergence_two_collectives": Case(
        """
  int v = t;
  if (t & 1)
    v = __shfl_sync(0xffffffffu, v, 0);  // BUG
  else
    v = __shfl_xor_sync(0xffffffffu, v, 1);  // BUG
  out[t] = v;
""",
        "divergence",
    ),
    "divergence_mask_without_caller": Case(
        """
  out[t] = __shfl_sync(0xffffu, t, 0);  // BUG
""",
        "leaves out the calling lane",
    ),
    "shuffle_from_outside_the_mask": Case(
        """
  if (t % 32 < 16) out[t] = __shfl_sync(0xffffu, t, 20);  // BUG
""",
        "reads lane 20, which is not in the mask",
    ),
    "trap": Case(
        """
  if (t == 7) __trap();  // BUG
""",
        "__trap",
    ),
    "division_by_zero": Case(
        """
  out[t] = 5 / (n - 7);  // BUG
""",
        "division by zero",
    ),
}

CLEAN = {
    "shared_exchange": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  for (int i = 0; i < 3; ++i) {
    s[t] = t + i;
    __syncthreads();
    out[t] = s[THREADS - 1 - t];
    __syncthreads();
  }
"""
    ),
    "syncwarp_orders_a_warp": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  s[t] = t;
  __syncwarp();
  out[t] = s[t ^ 1];
"""
    ),
    "half_warps_sync_apart": Case(
        """
  SHARED_ARRAY(int, s, [THREADS]);
  s[t] = t;
  if (t % 32 < 16)
    __syncwarp(0xffffu);
  else
    __syncwarp(0xffff0000u);
  out[t] = s[t ^ 1];
"""
    ),
    "global_exchange_in_a_block": Case(
        """
  out[t] = t;
  __syncthreads();
  const int other = out[t ^ 33];
  __syncthreads();
  out[t] = other + (threadIdx.x == 0 ? (int)blockDim.x : 0);
"""
    ),
    "atomics_then_barrier": Case(
        """
  SHARED_ARRAY(int, count, [1]);
  if (t == 0) count[0] = 0;
  __syncthreads();
  atomicAdd(&count[0], 2);
  __syncthreads();
  out[t] = count[0];
"""
    ),
    "last_block_sums": Case(
        """
  SHARED_ARRAY(int, last, [1]);
  if (t == 0) {
    out[1 + blockIdx.x] = 3;
    __threadfence();
    last[0] = atomicAdd(&out[0], 1) == in[1] + 2;
  }
  __syncthreads();
  if (last[0] && t == 1) {
    int sum = 0;
    for (int i = 0; i < (int)gridDim.x; ++i) sum += out[1 + i];
    out[10] = sum;
  }
""",
        blocks=3,
    ),
    "pipelined_copies": Case(
        """
  SHARED_DYNAMIC(uint4, s);
  const bool mine = t < THREADS / 4;
  if (mine) cp_async_16(&s[t], in + 4 * t, true);
  cp_async_commit_group();
  if (mine) cp_async_16(&s[t + THREADS / 4], in + 4 * t, t % 2 == 0);
  cp_async_commit_group();
  cp_async_wait_group<1>();
  __syncthreads();
  int sum = (int)s[t / 4].x;
  cp_async_wait_group<0>();
  __syncthreads();
  out[t] = sum + (int)s[THREADS / 4 + t / 4].x;
""",
        smem=16 * THREADS // 2,
    ),
    "blocks_apart": Case(
        """
  if (t < 16) out[16 * blockIdx.x + t] = in[t] + n;
""",
        blocks=4,
    ),
    "constants_and_locals": Case(
        """
  static const int table[4] = {3, 1, 4, 1};
  int local[4];
  for (int i = 0; i < 4; ++i) local[(i + n) % 4] = table[i];
  out[t] = local[t % 4];
"""
    ),
    "matrix_loads": Case(
        """
  SHARED_ARRAY(uint4, s, [32]);
  if (t < 32) s[t] = make_uint4(t, t, t, t);
  __syncthreads();
  u32 r[4];
  ldmatrix_x4(r, &s[t % 32]);
  float d[4] = {0, 0, 0, 0};
  const u32 b[2] = {r[0], r[1]};
  mma_m16n8k16_bf16(d, r, b);
  out[t] = (int)warp_sum(d[0]);
"""
    ),
}


# 16 KiB of tiles, filled by all; warp 0 multiplies. `%s` stand for what comes before its fence, at its wgmma, and after.
TILES = """
  SHARED_DYNAMIC(u32, tile);
  for (int i = t; i < 4096; i += THREADS) tile[i] = i;{written}
  {fence}__syncthreads();
  float d[32] = {{}};
  if (t < 32) {{
    {before}
    wgmma<0>(d, wgmma_descriptor(tile, 0), wgmma_descriptor(tile + 2048, 0), true);{called}
    {after}
  }}{meanwhile}
  out[t] = (int)d[0];
"""
TILE_PARTS = {
    "written": "", "fence": "fence_proxy_async();\n  ", "before": "wgmma_fence(d);", "called": "",
    "after": "wgmma_commit_group();\n    wgmma_wait_group<0>(d);", "meanwhile": "",
}  # fmt: skip


def tiles(says: str = "", **parts: str) -> Case:
    return Case(TILES.format(**(TILE_PARTS | parts)), says, smem=16384)


BUGS |= {
    "wgmma_of_unfenced_memory": tiles("unfenced", fence="", called="  // BUG"),
    "wgmma_with_touched_registers": tiles("no wgmma_fence", before="", called="  // BUG"),
    "wgmma_not_committed": tiles("were not committed", after="wgmma_wait_group<0>(d);  // BUG"),
    "wgmma_operand_overwritten": tiles("race", called="  // BUG", meanwhile="\n  if (t == 40) tile[5] = 1;  // BUG"),
    "wgmma_operand_not_arrived": tiles(
        "unwaited copy",
        written="\n  __syncthreads();\n  cp_async_16(tile + 4 * t, in + t % 16 * 4, true);",
        called="  // BUG",
        meanwhile="\n  cp_async_commit_group();\n  cp_async_wait_group<0>();",
    ),
    "wgmma_tile_misplaced": Case(
        "\n  SHARED_DYNAMIC(u32, s);\n  out[t] = (int)wgmma_descriptor(s + 64, 0);  // BUG\n", "multiples of 1024"
    ),
    "mbarrier_not_initialised": Case(
        "\n  SHARED_ARRAY(u64, b, [2]);\n  if (t == 0) mbarrier_arrive(b);  // BUG\n", "uninitialised|no mbarrier_init"
    ),
    "mbarrier_initialised_unseen": Case(
        """
  SHARED_ARRAY(u64, b, [2]);
  if (t == 0) mbarrier_init(b, 1);  // BUG
  if (t == 32) mbarrier_arrive(b);  // BUG
""",
        "race|uninitialised|no mbarrier_init",
    ),
    "mbarrier_one_arrival_too_few": Case(
        """
  SHARED_ARRAY(u64, b, [2]);
  if (t == 0) mbarrier_init(b, 2);
  __syncthreads();
  if (t == 0) mbarrier_arrive(b);
  mbarrier_wait_parity(b, 0);  // BUG
""",
        "no thread can go on",
    ),
    "mbarrier_arrival_before_the_write": Case(
        """
  SHARED_ARRAY(u64, b, [2]);
  SHARED_ARRAY(int, s, [1]);
  if (t == 0) mbarrier_init(b, 1);
  __syncthreads();
  if (t == 0) {
    mbarrier_arrive(b);
    s[0] = 1;  // BUG
  }
  if (t == 32) {
    mbarrier_wait_parity(b, 0);
    out[0] = s[0];  // BUG
  }
""",
        "race|uninitialised",
    ),
    "mbarrier_that_nobody_waits_for": Case(
        """
  SHARED_ARRAY(u64, b, [2]);
  SHARED_ARRAY(int, s, [1]);
  if (t == 0) mbarrier_init(b, 1);
  __syncthreads();
  if (t == 0) {
    s[0] = 1;  // BUG
    mbarrier_arrive(b);
  }
  if (t == 32) out[0] = s[0];  // BUG
""",
        "race|uninitialised",
    ),
    "barrier_of_warps_of_too_many": Case("\n  if (t < 32) barrier_sync(1, 64);  // BUG\n", "no thread can go on"),
    "barrier_of_warps_orders_no_others": Case(
        """
  SHARED_ARRAY(int, s, [1]);
  if (t < 32) {
    if (t == 0) s[0] = 1;  // BUG
    barrier_sync(1, 32);
  } else {
    if (t == 40) out[0] = s[0];  // BUG
  }
""",
        "race|uninitialised",
    ),
}
CLEAN |= {
    "wgmma_of_two_tiles": tiles(),
    "wgmma_and_its_operand_afterwards": tiles(meanwhile="\n  __syncthreads();\n  if (t == 40) tile[5] = 1;"),
    "mbarrier_hands_on_what_others_handed_over": Case(
        """
  SHARED_ARRAY(u64, b, [2]);
  SHARED_ARRAY(int, s, [3]);
  if (t < 2) mbarrier_init(b + t, 1);
  __syncthreads();
  if (t == 33) s[0] = 1;
  if (t >= 32) {
    __syncwarp();
    if (t == 32) mbarrier_arrive(b);
  }
  if (t == 1) {
    mbarrier_wait_parity(b, 0);
    mbarrier_arrive(b + 1);
  }
  if (t == 40) {
    mbarrier_wait_parity(b + 1, 0);
    s[0] = 2;
  }
  barrier_sync(2, 64);
  out[t] = s[0];
"""
    ),
}


# A thread has 64 numbers brought for an mbarrier that all wait for.
BULK_COPY = """
  SHARED_ARRAY(u64, b, [2]);
  SHARED_ARRAY(u32, s, [64]);
  if (t == 0) {{
    mbarrier_init(b, 1);
    {fence}
  }}
  __syncthreads();{before}
  if (t == 40) {{
    mbarrier_arrive_expect_tx(b, {expected});
    cp_async_bulk(s, in, {bytes}, b);{called}
  }}
  {wait}out[t] = (int)s[t];{read}
"""
BULK_PARTS = {
    "fence": "fence_proxy_async();", "before": "", "expected": "256", "bytes": "256", "called": "",
    "wait": "mbarrier_wait_parity(b, 0);\n  ",
    "read": "",
}  # fmt: skip


def bulk_copy(says: str = "", **parts: str) -> Case:
    return Case(BULK_COPY.format(**(BULK_PARTS | parts)), says)


BUGS |= {
    "bulk_copy_not_waited_for": bulk_copy("unwaited copy|race|uninitialised", called="  // BUG", wait="", read="  // BUG"),
    "bulk_copy_that_nobody_waits_for": bulk_copy("unwaited copy: the block has ended", called="  // BUG", wait="// "),
    "bulk_copy_after_a_read": bulk_copy("race", before="\n  s[t] = t;  // BUG", called="  // BUG"),
    "bulk_copy_and_a_read_without_the_wait": bulk_copy(
        "unwaited copy|race|uninitialised", called="  // BUG", wait="if (t < 32) mbarrier_wait_parity(b, 0);\n  ", read="  // BUG"
    ),
    "bulk_copy_of_fewer_bytes": bulk_copy("no thread can go on", bytes="240", wait="mbarrier_wait_parity(b, 0);  // BUG\n  "),
    "bulk_copy_of_odd_bytes": bulk_copy("multiples of 16", bytes="248", called="  // BUG"),
    "bulk_copy_beyond_its_source": bulk_copy("out of bounds", bytes="272", expected="272", called="  // BUG"),
    "bulk_copy_with_an_unfenced_mbarrier": bulk_copy("unfenced", fence="", called="  // BUG"),
    "mbarrier_arrivals_before_the_last_copies": bulk_copy("are all there", called="\n    mbarrier_arrive(b);  // BUG"),
}
CLEAN |= {
    "bulk_copy_waited_for": bulk_copy(),
    "bulk_copy_of_two_pieces": bulk_copy(bytes="64", called="\n    cp_async_bulk(s + 16, in + 16, 192, b);"),
}


def source(name: str, case: Case) -> Source:
    text = f"""#include "primitives.cuh"
namespace {name} {{
constexpr int THREADS = {THREADS};
extern "C" __global__ void __launch_bounds__(THREADS) {name}({PARAMETERS}) {{
  const int t = threadIdx.x;
  (void)t;{case.body}}}
}}
"""
    return Source(name, text, THREADS, max(case.smem, 1024))


Run = Callable[[str, Case, int], None]


@pytest.fixture(scope="module")
def run() -> Run:
    sources = [source(name, case) for name, case in {**BUGS, **CLEAN}.items()]

    def launch(name: str, case: Case, seed: int) -> None:
        backend = CpuBackend("checker", seed=seed)
        backend.load(sources)
        out = backend.to_device(np.zeros(THREADS, np.int32), "i32")
        values = backend.empty((THREADS,), "i32") if case.blank_input else backend.to_device(np.zeros(THREADS, np.int32), "i32")
        args: list[Argument] = [Pointer(out), Pointer(values), 7]
        backend.launch(name, (case.blocks, 1, 1), THREADS, case.smem, args)

    return launch


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", BUGS)
def test_every_bug_is_caught_by_kernel_and_line(name: str, seed: int, run: Run) -> None:
    case = BUGS[name]
    lines = [i for i, line in enumerate(source(name, case).text.splitlines(), 1) if "// BUG" in line]
    with pytest.raises(BackendError, match=case.says) as caught:
        run(name, case, seed)
    found = re.match(rf"kernel {name} block \([012], 0, 0\) thread \d+ at {name}\.cu:(\d+): ", str(caught.value))
    assert found, caught.value
    assert re.search(rf"at {name}\.cu:({'|'.join(map(str, lines))}): ", str(caught.value)), caught.value
    line = re.search(rf"\n  {name}\.cu:(\d+): (.+)", str(caught.value))  # the text is in no file that a reader could open
    assert line and line[2] == source(name, case).text.split("\n")[int(line[1]) - 1].strip(), caught.value
    if "(unknown line)" in str(caught.value) or "{" in str(caught.value):
        pytest.fail(f"a place is missing: {caught.value}")


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", CLEAN)
def test_clean_kernels_pass(name: str, seed: int, run: Run) -> None:
    run(name, CLEAN[name], seed)


def test_what_the_host_or_a_kernel_has_written_may_be_read() -> None:
    backend = CpuBackend("checker")
    copy = source("copy", Case("\n  if (t < n) out[t] = in[t];\n"))
    backend.load([copy])
    first, second, third = (backend.empty((THREADS,), "i32") for _ in range(3))

    def launch(to: DeviceArray, from_: DeviceArray, n: int) -> None:
        backend.launch("copy", (1, 1, 1), THREADS, 0, [Pointer(to), Pointer(from_), n])

    backend.write(first, np.arange(40, dtype=np.int32), offset=0)
    launch(second, first, 40)
    launch(third, second, 40)
    assert backend.to_host(third)[:40].tolist() == list(range(40))
    for unfinished in (first, second):
        with pytest.raises(BackendError, match=r"copy\.cu:7: uninitialised: 4-byte read of byte (16[0-9]|1[789]\d|2\d\d) of"):
            launch(third, unfinished, 64)
    backend.write(first, np.arange(24, dtype=np.int32), offset=40)
    launch(third, first, 64)


def test_buffers_are_told_apart_by_label() -> None:
    backend = CpuBackend("checker")
    backend.load([source("bounds_global_write", BUGS["bounds_global_write"])])
    out = backend.empty((THREADS,), "i32")
    backend.label(out, "kv_cache")
    with pytest.raises(BackendError, match=r"byte 284 of kv_cache \(i32\[64\]\), argument 0"):
        backend.launch("bounds_global_write", (1, 1, 1), THREADS, 0, [Pointer(out), Pointer(out), 7])
