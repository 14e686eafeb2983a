// Measures how fast this GPU multiplies bf16 matrices with mma.sync. Every warp adds to 8 independent sums; all operands are in registers.
#include "primitives.cuh"

namespace matrix_rate {
constexpr int BLOCK = 256;
constexpr int SUMS = 8;

// rounds: MMAs of each sum. `sink` is written only if the total has a value that it never has, so the compiler keeps the MMAs.
extern "C" __global__ void __launch_bounds__(BLOCK) matrix_rate(int rounds, float* sink) {
  float sum[SUMS][4];
  u32 a[4], b[2];
  for (int i = 0; i < 4; ++i) a[i] = pack_bf16x2(1e-3f * (threadIdx.x + i), -1e-3f * (threadIdx.x + i));
  for (int i = 0; i < 2; ++i) b[i] = pack_bf16x2(1e-3f * (threadIdx.x + 7 * i), 1e-3f);
  for (int s = 0; s < SUMS; ++s)
    for (int i = 0; i < 4; ++i) sum[s][i] = 0.0f;
  for (int r = 0; r < rounds; ++r) {
#pragma unroll
    for (int s = 0; s < SUMS; ++s) mma_m16n8k16_bf16(sum[s], a, b);
  }
  float total = 0.0f;
  for (int s = 0; s < SUMS; ++s) total += sum[s][0] + sum[s][1] + sum[s][2] + sum[s][3];
  if (total == 12345.678f) *sink = total;
}
}  // namespace matrix_rate
