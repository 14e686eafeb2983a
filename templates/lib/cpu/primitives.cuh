// Device primitives, CPU side: the functions of ../gpu/primitives.cuh, with the same names and meanings.
// The last lane to arrive performs what a whole warp does together (mma, ldmatrix, reductions), for all 32 lanes: no lane sees it half
// done, and it takes one pass instead of 32.
#pragma once
#include "cuda_language.h"

typedef unsigned int u32;
typedef unsigned long long u64;

// ---- bfloat16: storage only; arithmetic is float32 ------------------------
struct alignas(2) bf16 {
  unsigned short bits;
};

static inline unsigned short emu_round_bf16(float x) {  // to nearest even; any NaN becomes the NaN that the GPU returns
  const u32 u = __float_as_uint(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (unsigned short)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) { return bf16{emu_round_bf16(x)}; }
__device__ __forceinline__ float ex2_approx_ftz(float x) { return x < -126.0f ? 0.0f : exp2f(x); }
__device__ __forceinline__ u32 pack_bf16x2(float lo, float hi) { return (u32)emu_round_bf16(hi) << 16 | emu_round_bf16(lo); }
__device__ __forceinline__ float bf16x2_lo(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float bf16x2_hi(u32 w) { return __uint_as_float(w & 0xffff0000u); }
__device__ __forceinline__ u32 lop3_and_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }

// ---- shared memory --------------------------------------------------------
#define SHARED_ARRAY(T, name, ...)                                                     \
  static char name##_site;                                                             \
  T(&name) __VA_ARGS__ = *reinterpret_cast<T(*) __VA_ARGS__>(                          \
      emu_shared_array(&name##_site, sizeof(T __VA_ARGS__), alignof(T) < 16 ? 16 : alignof(T), __LINE__))
#define SHARED_DYNAMIC(T, name) T* name = reinterpret_cast<T*>(emu_context->dynamic_shared)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32) reinterpret_cast<uintptr_t>(p); }

// ---- tensor cores ---------------------------------------------------------
struct EmuMma {
  float* d;
  const u32 *a, *b;
};
// Lane l holds rows l/4 and l/4 + 8 of a and d, column l/4 of b, and the pairs of k that begin at 2*(l%4) and 2*(l%4) + 8.
EMU_UNCHECKED static void emu_mma_step(EmuWarp* warp, unsigned, int) {
  typedef float Row __attribute__((vector_size(32), aligned(32)));
  typedef u32 Pairs __attribute__((vector_size(32), aligned(32)));
  EmuMma* const* lanes = reinterpret_cast<EmuMma**>(warp->operand);
  alignas(32) u32 a[16][8], b[8][8];  // pairs of k
  alignas(32) float d[16][8], even[16][8], odd[16][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l >> 2, t = l & 3;
    const EmuMma& m = *lanes[l];
    a[g][t] = m.a[0];
    a[g + 8][t] = m.a[1];
    a[g][t + 4] = m.a[2];
    a[g + 8][t + 4] = m.a[3];
    b[t][g] = m.b[0];
    b[t + 4][g] = m.b[1];
    __builtin_memcpy(&d[g][2 * t], m.d, 8);
    __builtin_memcpy(&d[g + 8][2 * t], m.d + 2, 8);
  }
  for (int row = 0; row < 16; ++row) {
    const Pairs pairs = *reinterpret_cast<const Pairs*>(a[row]);
    *reinterpret_cast<Pairs*>(even[row]) = pairs << 16;
    *reinterpret_cast<Pairs*>(odd[row]) = pairs & 0xffff0000u;
  }
  for (int first = 0; first < 16; first += 8) {  // eight rows at a time, whose sums do not wait for one another
    Row* const rows = reinterpret_cast<Row*>(d[first]);
    Row r0 = rows[0], r1 = rows[1], r2 = rows[2], r3 = rows[3], r4 = rows[4], r5 = rows[5], r6 = rows[6], r7 = rows[7];
    for (int k = 0; k < 16; ++k) {
      const Pairs pairs = *reinterpret_cast<const Pairs*>(b[k / 2]), bits = k & 1 ? pairs & 0xffff0000u : pairs << 16;
      const Row column = (Row)bits;
      const float(*const of)[8] = (k & 1 ? odd : even) + first;
      r0 += of[0][k / 2] * column, r1 += of[1][k / 2] * column, r2 += of[2][k / 2] * column, r3 += of[3][k / 2] * column;
      r4 += of[4][k / 2] * column, r5 += of[5][k / 2] * column, r6 += of[6][k / 2] * column, r7 += of[7][k / 2] * column;
    }
    rows[0] = r0, rows[1] = r1, rows[2] = r2, rows[3] = r3, rows[4] = r4, rows[5] = r5, rows[6] = r6, rows[7] = r7;
  }
  for (int l = 0; l < 32; ++l) {
    const int g = l >> 2, t = l & 3;
    __builtin_memcpy(lanes[l]->d, &d[g][2 * t], 8);
    __builtin_memcpy(lanes[l]->d + 2, &d[g + 8][2 * t], 8);
  }
}
static inline void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], EMU_HERE) {
  EmuMma operand{d, a, b};
  emu_collective(0xffffffffu, emu_mma_step, &operand, line, "mma_m16n8k16_bf16");
}
static inline void mma_m16n8k16_bf16_from_zero(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], EMU_HERE) {
  d[0] = d[1] = d[2] = d[3] = 0.0f;
  EmuMma operand{d, a, b};
  emu_collective(0xffffffffu, emu_mma_step, &operand, line, "mma_m16n8k16_bf16_from_zero");
}
static inline void uniform_fragment(u32 (&a)[4], u32 pair) { a[0] = a[1] = a[2] = a[3] = pair; }

struct EmuLoadMatrix {
  u32* r;
  const void* row;
};
template <int N, bool Transposed>
EMU_UNCHECKED static void emu_ldmatrix_step(EmuWarp* warp, unsigned, int line) {
  EmuLoadMatrix* const* lanes = reinterpret_cast<EmuLoadMatrix**>(warp->operand);
  for (int matrix = 0; matrix < N; ++matrix)
    for (int row = 0; row < 8; ++row) {
      const void* p = lanes[matrix * 8 + row]->row;
      if (reinterpret_cast<uintptr_t>(p) & 15) emu_fail("ldmatrix: a row address is not a multiple of 16", line);
      EMU_TOUCH(p, 16, false, matrix * 8 + row, line);
      unsigned short values[8];
      __builtin_memcpy(values, p, 16);
      for (int i = 0; i < 8; ++i) {
        const int r = Transposed ? i : row, c = Transposed ? row : i;  // element (r, c): lane 4r + c/2, half c%2
        u32& out = lanes[r * 4 + c / 2]->r[matrix];
        out = c & 1 ? (out & 0xffffu) | (u32)values[i] << 16 : (out & 0xffff0000u) | values[i];
      }
    }
}
template <int N, bool Transposed>
static inline void emu_ldmatrix(u32 (&r)[N], const void* row, int line) {
  u32 out[N] = {};
  EmuLoadMatrix operand{out, row};
  emu_collective(0xffffffffu, emu_ldmatrix_step<N, Transposed>, &operand, line, "ldmatrix");
  for (int i = 0; i < N; ++i) r[i] = out[i];
}
static inline void ldmatrix_x4(u32 (&r)[4], const void* row, EMU_HERE) { emu_ldmatrix<4, false>(r, row, line); }
static inline void ldmatrix_x2(u32 (&r)[2], const void* row, EMU_HERE) { emu_ldmatrix<2, false>(r, row, line); }
static inline void ldmatrix_x4_trans(u32 (&r)[4], const void* row, EMU_HERE) { emu_ldmatrix<4, true>(r, row, line); }
static inline void ldmatrix_x2_trans(u32 (&r)[2], const void* row, EMU_HERE) { emu_ldmatrix<2, true>(r, row, line); }

// ---- asynchronous tensor cores (sm_90a) -----------------------------------
__device__ __forceinline__ u32 swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
static inline u64 wgmma_descriptor(const void* tile, u32 next_tile, EMU_HERE) { return emu_wgmma_descriptor(tile, next_tile, line); }
static inline constexpr u64 wgmma_offset(int bytes) { return (u64)(bytes >> 4); }
static constexpr bool emu_has_wgmma(int floats) { return floats % 4 == 0 && ((floats >= 8 && floats <= 32) || floats == 64 || floats == 128); }
template <int ByColumns, int FLOATS>
static inline void wgmma(float (&d)[FLOATS], u64 a, u64 b, bool accumulate, EMU_HERE) {
  static_assert(emu_has_wgmma(FLOATS), "the GPU side has these");
  EmuWgmma operands{d, FLOATS, nullptr, a, b, ByColumns != 0, accumulate};
  emu_wgmma(&operands, line);
}
template <int ByColumns, int FLOATS>
static inline void wgmma(float (&d)[FLOATS], const u32 (&a)[4], u64 b, bool accumulate, EMU_HERE) {
  static_assert(emu_has_wgmma(FLOATS), "the GPU side has these");
  EmuWgmma operands{d, FLOATS, a, 0, b, ByColumns != 0, accumulate};
  emu_wgmma(&operands, line);
}
template <int FLOATS>
static inline void warpgroup_fence_operand(float (&)[FLOATS]) {}
template <class Operand>
static inline void keep_until_here(const Operand&) {}
template <int FLOATS>
static inline void wgmma_fence(float (&)[FLOATS], EMU_HERE) { emu_wgmma_fence(line); }
static inline void wgmma_commit_group(EMU_HERE) { emu_wgmma_commit_group(line); }
template <int PENDING, class... Operands>
static inline void emu_wait_group(int line) {
  static_assert(PENDING == 0 || (PENDING == 1 && sizeof...(Operands) == 0), "the GPU side has these");
  emu_wgmma_wait_group(PENDING, line);
}
template <int PENDING, int FLOATS>
static inline void wgmma_wait_group(float (&)[FLOATS], EMU_HERE) { emu_wait_group<PENDING>(line); }
template <int PENDING, int FLOATS, class A>
static inline void wgmma_wait_group(float (&)[FLOATS], const A&, EMU_HERE) { emu_wait_group<PENDING, A>(line); }
template <int PENDING, int FLOATS, class A, class B, class C>
static inline void wgmma_wait_group(float (&)[FLOATS], const A&, const B&, const C&, EMU_HERE) {
  emu_wait_group<PENDING, A, B, C>(line);
}
static inline void fence_proxy_async() { emu_fence_proxy_async(); }

// ---- barriers and registers of warps --------------------------------------
static inline void mbarrier_init(u64* barrier, int count, EMU_HERE) { emu_mbarrier_init(reinterpret_cast<uint64_t*>(barrier), count, line); }
static inline void mbarrier_arrive(u64* barrier, EMU_HERE) { emu_mbarrier_arrive(reinterpret_cast<uint64_t*>(barrier), line); }
static inline void mbarrier_arrive_expect_tx(u64* barrier, int bytes, EMU_HERE) {
  emu_mbarrier_arrive_expect_tx(reinterpret_cast<uint64_t*>(barrier), bytes, line);
}
static inline void mbarrier_wait_parity(u64* barrier, int parity, EMU_HERE) {
  emu_mbarrier_wait_parity(reinterpret_cast<uint64_t*>(barrier), parity, line);
}
static inline void barrier_sync(int id, int threads, EMU_HERE) { emu_barrier_sync(id, threads, line); }
template <int N>
static inline void setmaxnreg_dec() {}
template <int N>
static inline void setmaxnreg_inc() {}

// ---- copies ---------------------------------------------------------------
static inline void cp_async_16(void* dst, const void* src, bool valid, EMU_HERE) { emu_cp_async(dst, src, valid, line); }
static inline void cp_async_commit_group() { emu_cp_async_commit_group(); }
template <int N>
static inline void cp_async_wait_group() { emu_cp_async_wait_group(N); }
static inline void cp_async_bulk(void* dst, const void* src, int bytes, u64* barrier, EMU_HERE) {
  emu_cp_async_bulk(dst, src, bytes, reinterpret_cast<uint64_t*>(barrier), line);
}
static inline u64 evict_first_policy() { return 0; }
static inline void cp_async_16(void* dst, const void* src, u64, EMU_HERE) { cp_async_16(dst, src, true, line); }
static inline void ld_global_if(bool there, uint4& to, const void* p, EMU_HERE) {
  if (there) to = __ldg(static_cast<const uint4*>(p), line);
}
static inline void ld_global_if(bool there, uint2& to, const void* p, EMU_HERE) {
  if (there) to = __ldg(static_cast<const uint2*>(p), line);
}
static inline uint4 ld_global_nc_16(const void* p, EMU_HERE) { return __ldg(static_cast<const uint4*>(p), line); }
static inline uint2 ld_global_nc_8(const void* p, EMU_HERE) { return __ldg(static_cast<const uint2*>(p), line); }
static inline uint4 ld_global_16(const void* p, EMU_HERE) { return __ldg(static_cast<const uint4*>(p), line); }
static inline uint2 ld_global_8(const void* p, EMU_HERE) { return __ldg(static_cast<const uint2*>(p), line); }
static inline u32 ld_global_4(const void* p, EMU_HERE) { return __ldg(static_cast<const u32*>(p), line); }
static inline uint4 ld_relaxed_16(const void* p, EMU_HERE) { return __ldg(static_cast<const uint4*>(p), line); }
static inline u32 ld_relaxed_4(const void* p, EMU_HERE) { return __ldg(static_cast<const u32*>(p), line); }

// ---- one kernel after another ---------------------------------------------
// On the CPU, every launch ends before the next one begins. The checker computes what could overlap on a GPU.
#ifdef EMU_CHECKER
static inline void griddepcontrol_launch_dependents() { emu_griddepcontrol_launch_dependents(); }
static inline void griddepcontrol_wait() { emu_griddepcontrol_wait(); }
#else
static inline void griddepcontrol_launch_dependents() {}
static inline void griddepcontrol_wait() {}
#endif
static inline void begin_after_previous_kernel() {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
}

// ---- clusters -------------------------------------------------------------
// On the CPU, a cluster is one block of all its threads.
#define CLUSTER_BLOCK(threads, blocks) (threads)
static inline int cluster_id() { return (int)blockIdx.x; }
static inline u32 cluster_num_blocks() { return 1; }
static inline int cluster_thread_rank() { return (int)threadIdx.x; }
static inline void cluster_begin(u64*, int) {}
template <class T>
EMU_UNCHECKED static inline void send_to_cluster(T* shared, T value, u64*, EMU_HERE) {
  if (threadIdx.x % 32) return;
  EMU_TOUCH(shared, 4, true, emu_context->lane->index, line);
  *shared = value;
}
EMU_UNCHECKED static inline void send_each_to_cluster(u32* shared, u32 value, u64*, EMU_HERE) {
  EMU_TOUCH(shared, 4, true, emu_context->lane->index, line);
  *shared = value;
}
static inline void wait_for_cluster(u64*, EMU_HERE) { emu_sync_block(line); }

// ---- ranks ----------------------------------------------------------------
// Memory that other processes share. A thread that waits lets the block's other threads run, and now and then other processes.
EMU_UNCHECKED static inline void send_word(u64* to, u32 word, u32 round, EMU_HERE) {
  EMU_TOUCH(to, 8, true, emu_context->lane->index, line);
  __atomic_store_n(to, (u64)round << 32 | word, __ATOMIC_RELAXED);
}
EMU_UNCHECKED static inline bool word_is_there(const u64* from, u32 round, u32& word, EMU_HERE) {
  EMU_TOUCH(from, 8, false, emu_context->lane->index, line);
  const u64 both = __atomic_load_n(from, __ATOMIC_RELAXED);
  word = (u32)both;
  if ((u32)(both >> 32) == round) return true;
  emu_pause();
  return false;
}
template <int N>
EMU_UNCHECKED static inline void send_words(u64* to, const float* values, u32 round, EMU_HERE) {
  for (int i = 0; i < N; ++i) send_word(to + i, __float_as_uint(values[i]), round, line);
}
template <int N>
EMU_UNCHECKED static inline bool words_are_there(const u64* from, u32 round, float* values, EMU_HERE) {
  bool all = true;
  for (int i = 0; i < N; ++i) {
    u32 word;
    all = word_is_there(from + i, round, word, line) && all;
    values[i] = __uint_as_float(word);
  }
  return all;
}

// ---- warps ----------------------------------------------------------------
// The butterflies xor 16, 8, 4, 2, 1 of the GPU side, all lanes at once: the same additions, hence the same bits.
template <bool Max>
EMU_UNCHECKED static void emu_reduce_step(EmuWarp* warp, unsigned, int) {
  float v[32], next[32];
  for (int l = 0; l < 32; ++l) v[l] = *static_cast<float*>(warp->operand[l]);
  for (int offset = 16; offset > 0; offset >>= 1) {
    for (int l = 0; l < 32; ++l) next[l] = Max ? fmaxf(v[l], v[l ^ offset]) : v[l] + v[l ^ offset];
    for (int l = 0; l < 32; ++l) v[l] = next[l];
  }
  for (int l = 0; l < 32; ++l) *static_cast<float*>(warp->operand[l]) = v[l];
}
static inline float warp_sum(float v, EMU_HERE) {
  emu_collective(0xffffffffu, emu_reduce_step<false>, &v, line, "warp_sum");
  return v;
}
static inline float warp_max(float v, EMU_HERE) {
  emu_collective(0xffffffffu, emu_reduce_step<true>, &v, line, "warp_max");
  return v;
}
template <bool Max>
EMU_UNCHECKED static void emu_extreme_step(EmuWarp* warp, unsigned, int) {
  u32 extreme = *static_cast<u32*>(warp->operand[0]);
  for (int l = 1; l < 32; ++l) {
    const u32 v = *static_cast<u32*>(warp->operand[l]);
    if (Max ? v > extreme : v < extreme) extreme = v;
  }
  for (int l = 0; l < 32; ++l) *static_cast<u32*>(warp->operand[l]) = extreme;
}
static inline u32 warp_max(u32 v, EMU_HERE) {
  emu_collective(0xffffffffu, emu_extreme_step<true>, &v, line, "warp_max");
  return v;
}
static inline u32 warp_min(u32 v, EMU_HERE) {
  emu_collective(0xffffffffu, emu_extreme_step<false>, &v, line, "warp_min");
  return v;
}
__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
