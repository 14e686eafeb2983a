"""What wgmma reads a tile by, held against the PTX ISA's table, for tiles in many places."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kdgen.verify.ptx.machine import Machine
from kdgen.verify.ptx.memory import Memory
from kdgen.verify.ptx.parse import Kernel

COVERS = "wgmma_descriptor(const void*, u32)"
SOURCE = """#include "primitives.cuh"
extern "C" __global__ void __launch_bounds__(CLUSTER_BLOCK(256, 2)) descriptor(u64* out, u32 next_tile) {
  SHARED_DYNAMIC(bf16, tile);
  SHARED_ARRAY(unsigned char, odd, [5]);
  out[0] = wgmma_descriptor(tile, next_tile);
  out[1] = wgmma_descriptor(tile, next_tile) + wgmma_offset(32);
  odd[threadIdx.x] = 1;
  __syncthreads();
  out[2] = odd[1];
}
"""
#: Rows of 128 bytes, eight to a group of the 128-byte swizzle: groups are this far apart.
GROUP_BYTES = 8 * 128
SWIZZLE_128 = 1


def matrix_descriptor(start: int, leading: int, stride: int) -> int:
    """PTX ISA, "Matrix Descriptor Format" of wgmma: start address, leading and stride dimension byte offsets, each (x & 0x3ffff) >> 4, in
    bits 13-0, 29-16 and 45-32; matrix base offset in 51-49, 0 where tiles begin at multiples of 1024; swizzle mode in 63-62."""

    def encoded(value: int) -> int:
        return (value & 0x3FFFF) >> 4

    return encoded(start) | encoded(leading) << 16 | encoded(stride) << 32 | SWIZZLE_128 << 62


def problems(kernel: Kernel) -> Iterator[str]:
    """What is wrong with the kernel of ``SOURCE``: descriptors, the alignment of arrays, the threads that it is bound to."""
    for start in (0x400, 0x10000, 0x24C00, 0x38800):
        for next_tile in (0, 1024, 8192, 65536):
            memory = Memory()
            out = memory.add("out", np.zeros(3, np.uint64))
            Machine(kernel, [out.address, next_tile], memory, threads=1, dynamic_shared=start).run()
            found = [int(value) for value in out.data.view(np.uint64)[:2]]
            expected = [matrix_descriptor(start + offset, next_tile, GROUP_BYTES) for offset in (0, 32)]
            if found != expected:
                said, wanted = (", ".join(f"{value:#018x}" for value in values) for values in (found, expected))
                yield f"{COVERS}: a tile at {start:#x}, the next {next_tile} bytes further, is {said} instead of {wanted}"
                return
    shared = {each.name: each for each in kernel.shared}
    if (dynamic := shared["dynamic_smem"]).align != 1024:
        yield f"SHARED_DYNAMIC begins at multiples of {dynamic.align}, and tiles of wgmma need 1024"
    if ((odd := shared["odd"]).align, odd.size) != (16, 16):
        yield f"SHARED_ARRAY of 5 bytes has {odd.size} at a multiple of {odd.align}; reads that the compiler widens need 16"
    if ".maxntid 128" not in kernel.directives:
        yield f"CLUSTER_BLOCK(256, 2) bounds a launch by {' '.join(kernel.directives.split())}, not by 128 threads"
