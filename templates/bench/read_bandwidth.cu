// How fast this GPU reads: every block streams its share of a buffer, 8 loads of 16 bytes a thread in flight.
#include "primitives.cuh"

namespace read_bandwidth {
constexpr int BLOCK = 512;
constexpr int IN_FLIGHT = 8;

// megabytes: size of data; sink is written only by a sum that random data does not have
extern "C" __global__ void __launch_bounds__(BLOCK) read_bandwidth(const uint4* __restrict__ data, int megabytes, int* sink) {
  const size_t count = (size_t)megabytes * (1 << 20) / 16, stride = (size_t)gridDim.x * BLOCK;
  u32 sum = 0;
  for (size_t i = (size_t)blockIdx.x * BLOCK + threadIdx.x; i < count; i += stride * IN_FLIGHT) {
    uint4 value[IN_FLIGHT];
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) value[j] = i + j * stride < count ? load_stream_16(data + i + j * stride) : make_uint4(0, 0, 0, 0);
#pragma unroll
    for (int j = 0; j < IN_FLIGHT; ++j) sum += value[j].x ^ value[j].y ^ value[j].z ^ value[j].w;
  }
  if (sum == 0x12345678u) *sink = 1;
}
}  // namespace read_bandwidth
