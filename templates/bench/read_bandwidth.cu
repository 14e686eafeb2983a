// Measures how fast this GPU reads. A block reads 32 KiB at a time, with all of its loads in flight. On H200s this reads 4.42 to
// 4.44 TB/s. Threads whose loads lie megabytes apart read 4.0 to 4.4 TB/s, which depends on the GPU (2026-11-30).
#include "primitives.cuh"

namespace read_bandwidth {
constexpr int BLOCK = 512;
constexpr int IN_FLIGHT = 4;  // loads of 16 bytes of a thread
constexpr int TILE = BLOCK * IN_FLIGHT;

// megabytes: size of `data`. `sink` is written only if the sum has a value that random data does not give, so the compiler keeps the loads.
extern "C" __global__ void __launch_bounds__(BLOCK) read_bandwidth(const uint4* __restrict__ data, int megabytes, int* sink) {
  const size_t tiles = (size_t)megabytes * (1 << 20) / 16 / TILE;
  u32 sum = 0;
  for (size_t tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    uint4 value[IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) value[j] = ld_global_nc_16(data + tile * TILE + j * BLOCK + threadIdx.x);
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) sum += value[j].x ^ value[j].y ^ value[j].z ^ value[j].w;
  }
  if (sum == 0x12345678u) *sink = 1;
}
}  // namespace read_bandwidth
