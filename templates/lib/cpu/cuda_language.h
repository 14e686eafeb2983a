// The part of CUDA C++ that generated kernels use, as C++17 for a host compiler. Two things are missing on purpose. `__shared__`: kernels
// use SHARED_ARRAY and SHARED_DYNAMIC, which fill shared memory with poison and check its bounds. Float atomics: their order varies, and
// so would results.
#pragma once
#include "emulator.h"

// ---- qualifiers -----------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))

#define threadIdx (emu_context->lane->thread)
#define blockIdx (emu_context->block)
#define blockDim (emu_context->block_dim)
#define gridDim (emu_context->grid_dim)
#define warpSize 32

// the source line of the caller
#define EMU_HERE int line = __builtin_LINE()

// ---- barriers and fences --------------------------------------------------
static inline void __syncthreads(EMU_HERE) { emu_sync_block(line); }
static inline void __syncwarp(unsigned mask = 0xffffffffu, EMU_HERE) { emu_sync_warp(mask, line); }
static inline void __threadfence() { emu_fence(); }
static inline void __threadfence_block() { emu_fence(); }
static inline void __nanosleep(unsigned) { emu_yield(); }
static inline void __trap(EMU_HERE) { emu_fail("__trap()", line); }

// ---- shuffles and votes ---------------------------------------------------
template <class T>
static inline T emu_shuffle_value(EmuShuffle kind, unsigned mask, T value, int operand, int width, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  emu_shuffle(kind, mask, bits, operand, width, line);
  const EmuLane* me = emu_context->lane;
  __builtin_memcpy(&value, &me->warp->received[me->index], sizeof(T));
  return value;
}
template <class T>
static inline T __shfl_sync(unsigned mask, T v, int lane, int width = 32, EMU_HERE) {
  return emu_shuffle_value(EMU_FROM_LANE, mask, v, lane, width, line);
}
template <class T>
static inline T __shfl_xor_sync(unsigned mask, T v, int bits, int width = 32, EMU_HERE) {
  return emu_shuffle_value(EMU_FROM_XOR, mask, v, bits, width, line);
}
template <class T>
static inline T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_HERE) {
  return emu_shuffle_value(EMU_FROM_BELOW, mask, v, (int)delta, width, line);
}
template <class T>
static inline T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, EMU_HERE) {
  return emu_shuffle_value(EMU_FROM_ABOVE, mask, v, (int)delta, width, line);
}

struct EmuVote {
  bool predicate;
  unsigned ballot;
};
EMU_UNCHECKED static void emu_vote_step(EmuWarp* warp, unsigned mask, int) {
  unsigned ballot = 0;
  for (unsigned m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m);
    ballot |= (unsigned)static_cast<EmuVote*>(warp->operand[l])->predicate << l;
  }
  for (unsigned m = mask; m; m &= m - 1) static_cast<EmuVote*>(warp->operand[__builtin_ctz(m)])->ballot = ballot;
}
static inline unsigned emu_vote(unsigned mask, bool predicate, int line, const char* what) {
  EmuVote vote{predicate, 0};
  emu_collective(mask, emu_vote_step, &vote, line, what);
  return vote.ballot;
}
static inline unsigned __ballot_sync(unsigned mask, int p, EMU_HERE) { return emu_vote(mask, p != 0, line, "__ballot_sync"); }
static inline int __any_sync(unsigned mask, int p, EMU_HERE) { return emu_vote(mask, p != 0, line, "__any_sync") != 0; }
static inline int __all_sync(unsigned mask, int p, EMU_HERE) { return emu_vote(mask, p != 0, line, "__all_sync") == mask; }
static inline unsigned __activemask() { return emu_active_mask(); }

// ---- bits and integers ----------------------------------------------------
template <class To, class From>
static inline To emu_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To r;
  __builtin_memcpy(&r, &x, sizeof r);
  return r;
}
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline float __uint_as_float(unsigned x) { return emu_bits<float>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline unsigned __float_as_uint(float x) { return emu_bits<unsigned>(x); }
static inline double __longlong_as_double(long long x) { return emu_bits<double>(x); }
static inline long long __double_as_longlong(double x) { return emu_bits<long long>(x); }
static inline int __popc(unsigned x) { return __builtin_popcount(x); }
static inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
static inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline int __ffs(int x) { return __builtin_ffs(x); }
static inline int __ffsll(long long x) { return __builtin_ffsll(x); }
static inline unsigned __brev(unsigned x) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (x >> i & 1u) << (31 - i);
  return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
static inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
static inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)y << 32 | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned s = selector >> (4 * i);
    unsigned byte = (unsigned)(bytes >> (8 * (s & 7u))) & 0xffu;
    if (s & 8u) byte = byte & 0x80u ? 0xffu : 0u;
    r |= byte << (8 * i);
  }
  return r;
}
static inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned n) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) << (n & 31u) >> 32);
}
static inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned n) {
  return (unsigned)(((unsigned long long)hi << 32 | lo) >> (n & 31u));
}

// ---- floating point -------------------------------------------------------
#define EMU_MATH1(name)                    \
  extern "C" float name##f(float) noexcept; \
  extern "C" double name(double) noexcept;
#define EMU_MATH2(name)                           \
  extern "C" float name##f(float, float) noexcept; \
  extern "C" double name(double, double) noexcept;
EMU_MATH1(exp) EMU_MATH1(exp2) EMU_MATH1(expm1) EMU_MATH1(log) EMU_MATH1(log2) EMU_MATH1(log1p) EMU_MATH1(sin) EMU_MATH1(cos)
EMU_MATH1(tanh) EMU_MATH1(sqrt) EMU_MATH1(fabs) EMU_MATH1(floor) EMU_MATH1(ceil) EMU_MATH1(rint) EMU_MATH1(round) EMU_MATH1(trunc)
EMU_MATH1(erf) EMU_MATH2(pow) EMU_MATH2(fmod) EMU_MATH2(copysign)
extern "C" float fmaf(float, float, float) noexcept;
extern "C" double fma(double, double, double) noexcept;
extern "C" int printf(const char*, ...);

// As in PTX: of a NaN and a number, the result is the number; +0 is greater than -0.
static inline float fmaxf(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return __uint_as_float(__float_as_uint(a) & __float_as_uint(b));
  return a > b ? a : b;
}
static inline float fminf(float a, float b) {
  if (a != a) return b;
  if (b != b) return a;
  if (a == b) return __uint_as_float(__float_as_uint(a) | __float_as_uint(b));
  return a < b ? a : b;
}
static inline double fmax(double a, double b) { return a != a ? b : b != b ? a : a > b ? a : b; }
static inline double fmin(double a, double b) { return a != a ? b : b != b ? a : a < b ? a : b; }
static inline bool isnan(float x) { return __builtin_isnan(x); }
static inline bool isnan(double x) { return __builtin_isnan(x); }
static inline bool isinf(float x) { return __builtin_isinf(x); }
static inline bool isfinite(float x) { return __builtin_isfinite(x); }
static inline bool signbit(float x) { return __builtin_signbit(x); }
static inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return sqrtf(a); }
static inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline int __float2int_rn(float x) { return (int)rintf(x); }
static inline int __float2int_rz(float x) { return (int)x; }
static inline int __float2int_rd(float x) { return (int)floorf(x); }
static inline float __int2float_rn(int x) { return (float)x; }
static inline float __uint2float_rn(unsigned x) { return (float)x; }
// macros, because glibc declares functions with these names
#define __expf(x) (expf(x))
#define __exp2f(x) (exp2f(x))
#define __logf(x) (logf(x))
#define __log2f(x) (log2f(x))
#define __sinf(x) (sinf(x))
#define __cosf(x) (cosf(x))
#define __powf(x, y) (powf((x), (y)))

static inline int abs(int x) { return x < 0 ? -x : x; }
#define EMU_MIN_MAX(R, A, B)                                              \
  static inline R min(A a, B b) { return (R)a < (R)b ? (R)a : (R)b; }     \
  static inline R max(A a, B b) { return (R)a > (R)b ? (R)a : (R)b; }
EMU_MIN_MAX(int, int, int)
EMU_MIN_MAX(unsigned, unsigned, unsigned)
EMU_MIN_MAX(unsigned, unsigned, int)
EMU_MIN_MAX(unsigned, int, unsigned)
EMU_MIN_MAX(long, long, long)
EMU_MIN_MAX(unsigned long, unsigned long, unsigned long)
EMU_MIN_MAX(long long, long long, long long)
EMU_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
static inline float min(float a, float b) { return fminf(a, b); }
static inline float max(float a, float b) { return fmaxf(a, b); }
static inline double min(double a, double b) { return fmin(a, b); }
static inline double max(double a, double b) { return fmax(a, b); }

// ---- vector types ---------------------------------------------------------
#define EMU_VECTOR(T, name)                                                                \
  struct alignas(2 * sizeof(T)) name##2 {                                                  \
    T x, y;                                                                                \
  };                                                                                       \
  struct alignas(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16) name##4 {                        \
    T x, y, z, w;                                                                          \
  };                                                                                       \
  static inline name##2 make_##name##2(T x, T y) { return {x, y}; }                        \
  static inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
EMU_VECTOR(int, int)
EMU_VECTOR(unsigned, uint)
EMU_VECTOR(short, short)
EMU_VECTOR(unsigned short, ushort)
EMU_VECTOR(signed char, char)
EMU_VECTOR(unsigned char, uchar)
struct float3 {
  float x, y, z;
};
struct int3 {
  int x, y, z;
};
static inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }
static inline int3 make_int3(int x, int y, int z) { return {x, y, z}; }
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

// ---- cached loads and integer atomics -------------------------------------
#ifdef EMU_CHECKER
template <class T>
EMU_UNCHECKED __attribute__((noinline)) static T emu_load(const T* p) { return *p; }  // the caller has checked the access
#else
template <class T>
static inline T emu_load(const T* p) { return *p; }
#endif
template <class T>
static inline T __ldg(const T* p, EMU_HERE) {
  EMU_TOUCH(p, sizeof(T), false, emu_context->lane->index, line);
  return emu_load(p);
}
template <class T>
static inline T __ldcg(const T* p, EMU_HERE) { return __ldg(p, line); }
template <class T>
static inline T __ldcs(const T* p, EMU_HERE) { return __ldg(p, line); }

#define EMU_ATOMICS(T, type)                                                                                                       \
  static inline T atomicAdd(T* p, T v, EMU_HERE) { return (T)emu_atomic(EMU_ADD, type, p, (uint64_t)v, 0, line); }                 \
  static inline T atomicMin(T* p, T v, EMU_HERE) { return (T)emu_atomic(EMU_MIN, type, p, (uint64_t)v, 0, line); }                 \
  static inline T atomicMax(T* p, T v, EMU_HERE) { return (T)emu_atomic(EMU_MAX, type, p, (uint64_t)v, 0, line); }                 \
  static inline T atomicExch(T* p, T v, EMU_HERE) { return (T)emu_atomic(EMU_EXCHANGE, type, p, (uint64_t)v, 0, line); }           \
  static inline T atomicAnd(T* p, T v, EMU_HERE) { return (T)emu_atomic(EMU_AND, type, p, (uint64_t)v, 0, line); }                 \
  static inline T atomicOr(T* p, T v, EMU_HERE) { return (T)emu_atomic(EMU_OR, type, p, (uint64_t)v, 0, line); }                   \
  static inline T atomicXor(T* p, T v, EMU_HERE) { return (T)emu_atomic(EMU_XOR, type, p, (uint64_t)v, 0, line); }                 \
  static inline T atomicCAS(T* p, T expected, T v, EMU_HERE) {                                                                     \
    return (T)emu_atomic(EMU_CAS, type, p, (uint64_t)v, (uint64_t)expected, line);                                                 \
  }
EMU_ATOMICS(int, EMU_I32)
EMU_ATOMICS(unsigned, EMU_U32)
EMU_ATOMICS(unsigned long long, EMU_U64)
static inline int atomicSub(int* p, int v, EMU_HERE) { return atomicAdd(p, -v, line); }
