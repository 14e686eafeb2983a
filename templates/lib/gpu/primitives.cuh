// Device primitives, GPU side: the only way generated kernels reach the hardware.
// Its twin in ../cpu/ gives every one of these the same meaning on a host; a primitive without a twin may not be used.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// ---- bfloat16: storage only; arithmetic is float32 ------------------------
struct alignas(2) bf16 {
  unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
template <class T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {  // round to nearest even
  bf16 r;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
  return r;
}
// two bf16 in a word, `lo` in the low half
__device__ __forceinline__ u32 pack_bf16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ float bf16x2_lo(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float bf16x2_hi(u32 w) { return __uint_as_float(w & 0xffff0000u); }
// (a & mask) | bits, as the one instruction that it is: the compiler takes two when both are constants
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}
// ---- shared memory --------------------------------------------------------
// Storage is a whole number of 16 bytes: the compiler widens reads to that, and may then read past a shorter array's end.
#define SHARED_ARRAY(T, name, ...)            \
  struct __align__(16) name##_storage {       \
    T values __VA_ARGS__;                     \
  };                                          \
  __shared__ name##_storage name##_shared;    \
  T(&name) __VA_ARGS__ = name##_shared.values
#define SHARED_DYNAMIC(T, name)                                  \
  extern __shared__ __align__(1024) unsigned char dynamic_smem[]; \
  T* name = reinterpret_cast<T*>(dynamic_smem)

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// ---- tensor cores ---------------------------------------------------------
// d[16x8] += a[16x16] * b[16x8], bf16 in, float32 out; fragments as in the PTX ISA, "Matrix Fragments for mma.m16n8k16"
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// the same from zero: d = a * b
__device__ __forceinline__ void mma_m16n8k16_bf16_from_zero(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
// an A fragment of one pair throughout. The zeros added, which differ in what the compiler knows of them, keep it in four registers
// of its own: as constants they would be copied anew before each use.
__device__ __forceinline__ void uniform_fragment(u32 (&a)[4], u32 pair) {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pair + (lane >> (5 + i));
}
// four 8x8 b16 matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x2(u32 (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
// the same, each matrix transposed on the way
__device__ __forceinline__ void ldmatrix_x2_trans(u32 (&r)[2], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
               : "=r"(r[0]), "=r"(r[1])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// ---- copies ---------------------------------------------------------------
// 16 bytes global to shared, asynchronously; zeros when !valid (src is then not read)
__device__ __forceinline__ void cp_async_16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// waits until at most N of this thread's committed groups are unfinished
template <int N>
__device__ __forceinline__ void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Weights are read once a step: keep them out of L1. Not volatile: the compiler may move these ahead of arithmetic.
__device__ __forceinline__ uint4 load_stream_16(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 load_stream_8(const void* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}

// ---- one kernel after another ---------------------------------------------
// Programmatic dependent launch: a kernel may start while the one before it still runs, so each waits before it reads or
// writes anything that another kernel writes. What only the host writes (weights, tables) may be read before. Data of other
// kernels is never read through the non-coherent path, so pointers to it are not __restrict__.
__device__ __forceinline__ void allow_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void begin_after_previous_kernel() {
  allow_next_kernel();
  wait_for_previous_kernel();
}

// ---- ranks ----------------------------------------------------------------
// Memory of other GPUs. A word goes with the round that it belongs to, in 8 bytes that arrive as one.
__device__ __forceinline__ void send_word(u64* to, u32 word, u32 round) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"((u64)round << 32 | word) : "memory");
}
// whether the word of this round has come; `word` is another round's if not
__device__ __forceinline__ bool word_is_there(const u64* from, u32 round, u32& word) {
  u64 both;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
  word = (u32)both;
  return (u32)(both >> 32) == round;
}

// ---- warps ----------------------------------------------------------------
// butterflies in the fixed order xor 16, 8, 4, 2, 1: every lane gets the same bits
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v += __shfl_xor_sync(0xffffffffu, v, offset);
  return v;
}
__device__ __forceinline__ float warp_max(float v) {
#pragma unroll
  for (int offset = 16; offset > 0; offset >>= 1) v = fmaxf(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}
__device__ __forceinline__ u32 warp_max(u32 v) { return __reduce_max_sync(0xffffffffu, v); }
__device__ __forceinline__ u32 warp_min(u32 v) { return __reduce_min_sync(0xffffffffu, v); }
__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }
