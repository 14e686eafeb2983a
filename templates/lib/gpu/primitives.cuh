// Device primitives, GPU side: generated kernels reach the hardware through these functions alone. A primitive that is one PTX
// instruction has its name. ../cpu/primitives.cuh has a CPU version of each, with the same meaning; a kernel may not use a primitive
// without one.
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
// 2^x with an error of at most 2 units in the last place. A result below float32's smallest normal number becomes 0.
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
// Rounds two floats to bfloat16 and packs them into a word, `lo` in the low half.
__device__ __forceinline__ u32 pack_bf16x2(float lo, float hi) {
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}
__device__ __forceinline__ float bf16x2_lo(u32 w) { return __uint_as_float(w << 16); }
__device__ __forceinline__ float bf16x2_hi(u32 w) { return __uint_as_float(w & 0xffff0000u); }
// (a & mask) | bits in one instruction. The compiler would use two where `mask` and `bits` are constants.
__device__ __forceinline__ u32 lop3_and_or(u32 a, u32 mask, u32 bits) {
  u32 r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "r"(mask), "r"(bits));
  return r;
}
// ---- shared memory --------------------------------------------------------
// Storage is rounded up to a multiple of 16 bytes: the compiler may widen a read to 16 bytes, which must not pass the array's end.
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
// d[16x8] += a[16x16] * b[16x8], bf16 in, float32 out. The PTX ISA, "Matrix Fragments for mma.m16n8k16", says which lane holds what.
__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// d = a * b
__device__ __forceinline__ void mma_m16n8k16_bf16_from_zero(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(0.0f));
}
// Fills an A fragment with one pair. Each register adds a zero that the compiler cannot prove to be zero. So the fragment stays in four
// registers; the compiler would copy constants to registers again before each use.
__device__ __forceinline__ void uniform_fragment(u32 (&a)[4], u32 pair) {
  u32 lane;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pair + (lane >> (5 + i));
}
// Loads four 8x8 matrices of 16-bit numbers from shared memory. Lane l gives the address of row l % 8 of matrix l / 8.
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
// The same; each matrix is transposed on its way.
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

// ---- asynchronous tensor cores (sm_90a) -----------------------------------
// A tile in shared memory has rows of 128 bytes, 64 bf16, and begins at a multiple of 1024 bytes. The 128-byte swizzle permutes the
// 16-byte pieces of each row. Returns the byte offset of piece `piece` of row `row`.
__device__ __forceinline__ u32 swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
// The matrix descriptor of a tile, through which wgmma reads an operand. The tile with the next 64 columns lies `next_tile` bytes
// further; this matters only for an operand with more than 64 columns that is read by columns. Add wgmma_offset(bytes) to a
// descriptor to begin `bytes` later.
__device__ __forceinline__ u64 wgmma_descriptor(const void* tile, u32 next_tile) {
  return (u64)((shared_address(tile) & 0x3ffffu) >> 4) | (u64)(next_tile >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ constexpr u64 wgmma_offset(int bytes) { return (u64)(bytes >> 4); }
// wgmma.mma_async by a warpgroup: d[64xN] += a[64x16] * b[16xN], or d = a * b where !accumulate; bf16 in, float32 out.
// - A thread holds N / 2 floats of d. Warp w holds rows 16w .. 16w + 15, as fragments of mma_m16n8k16 side by side.
// - Operand a is in tiles, whose rows are a's rows, or in registers, as an A fragment of mma_m16n8k16.
// - Operand b is in tiles, whose rows are b's columns, or, ByColumns, b's rows.
// The kernel may not read or write a, b or d between this call and the wgmma_wait_group that waits for it. That call names every a in
// registers.
#define WGMMA_TEN(tens)                                                                                                   \
  "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4,%" #tens "5,%" #tens "6,%" #tens "7,%" #tens "8,%" #tens "9"
#define WGMMA_OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_OUT_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OUT_32(i) WGMMA_OUT_8(i), WGMMA_OUT_8(i + 8), WGMMA_OUT_8(i + 16), WGMMA_OUT_8(i + 24)
#define WGMMA_BEGIN(accumulate, shape, d) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" accumulate ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" d "}, "
// i0 .. i6: the numbers of the asm operands that follow those of d. The last arguments are the asm operands of d.
#define WGMMA(FLOATS, shape, d_list, i0, i1, i2, i3, i4, i5, i6, ...)                                                        \
  template <int ByColumns>                                                                                                   \
  __device__ __forceinline__ void wgmma(float(&d)[FLOATS], u64 a, u64 b, bool accumulate) {                                  \
    asm volatile(WGMMA_BEGIN(i2, shape, d_list) "%" i0 ", %" i1 ", p, 1, 1, 0, %" i3 ";\n}"                                 \
                 : __VA_ARGS__                                                                                               \
                 : "l"(a), "l"(b), "r"((int)accumulate), "n"(ByColumns));                                                    \
  }                                                                                                                          \
  template <int ByColumns>                                                                                                   \
  __device__ __forceinline__ void wgmma(float(&d)[FLOATS], const u32(&a)[4], u64 b, bool accumulate) {                       \
    asm volatile(WGMMA_BEGIN(i5, shape, d_list) "{%" i0 ",%" i1 ",%" i2 ",%" i3 "}, %" i4 ", p, 1, 1, %" i6 ";\n}"          \
                 : __VA_ARGS__                                                                                               \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"((int)accumulate), "n"(ByColumns));                \
  }
WGMMA(8, "m64n16k16", "%0,%1,%2,%3,%4,%5,%6,%7", "8", "9", "10", "11", "12", "13", "14",
      WGMMA_OUT_8(0))
WGMMA(12, "m64n24k16", WGMMA_TEN() ",%10,%11", "12", "13", "14", "15", "16", "17", "18",
      WGMMA_OUT_8(0), WGMMA_OUT_4(8))
WGMMA(16, "m64n32k16", WGMMA_TEN() ",%10,%11,%12,%13,%14,%15", "16", "17", "18", "19", "20", "21", "22",
      WGMMA_OUT_8(0), WGMMA_OUT_8(8))
WGMMA(20, "m64n40k16", WGMMA_TEN() "," WGMMA_TEN(1), "20", "21", "22", "23", "24", "25", "26",
      WGMMA_OUT_8(0), WGMMA_OUT_8(8), WGMMA_OUT_4(16))
WGMMA(24, "m64n48k16", WGMMA_TEN() "," WGMMA_TEN(1) ",%20,%21,%22,%23", "24", "25", "26", "27", "28", "29", "30",
      WGMMA_OUT_8(0), WGMMA_OUT_8(8), WGMMA_OUT_8(16))
WGMMA(28, "m64n56k16", WGMMA_TEN() "," WGMMA_TEN(1) ",%20,%21,%22,%23,%24,%25,%26,%27", "28", "29", "30", "31", "32", "33", "34",
      WGMMA_OUT_8(0), WGMMA_OUT_8(8), WGMMA_OUT_8(16), WGMMA_OUT_4(24))
WGMMA(32, "m64n64k16", WGMMA_TEN() "," WGMMA_TEN(1) "," WGMMA_TEN(2) ",%30,%31", "32", "33", "34", "35", "36", "37", "38",
      WGMMA_OUT_32(0))
WGMMA(64, "m64n128k16",
      WGMMA_TEN() "," WGMMA_TEN(1) "," WGMMA_TEN(2) "," WGMMA_TEN(3) "," WGMMA_TEN(4) "," WGMMA_TEN(5) ",%60,%61,%62,%63",
      "64", "65", "66", "67", "68", "69", "70", WGMMA_OUT_32(0), WGMMA_OUT_32(32))
WGMMA(128, "m64n256k16",
      WGMMA_TEN() "," WGMMA_TEN(1) "," WGMMA_TEN(2) "," WGMMA_TEN(3) "," WGMMA_TEN(4) "," WGMMA_TEN(5) "," WGMMA_TEN(6)
      "," WGMMA_TEN(7) "," WGMMA_TEN(8) "," WGMMA_TEN(9) "," WGMMA_TEN(10) "," WGMMA_TEN(11)
      ",%120,%121,%122,%123,%124,%125,%126,%127",
      "128", "129", "130", "131", "132", "133", "134",
      WGMMA_OUT_32(0), WGMMA_OUT_32(32), WGMMA_OUT_32(64), WGMMA_OUT_32(96))
#undef WGMMA_TEN
#undef WGMMA_OUT_4
#undef WGMMA_OUT_8
#undef WGMMA_OUT_32
#undef WGMMA_BEGIN
#undef WGMMA
// Keeps the compiler from moving reads and writes of d across this call: it does not know that wgmma writes d later. CUTLASS has the
// same function under this name.
template <int FLOATS>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[FLOATS]) {
#pragma unroll
  for (int i = 0; i < FLOATS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// Needed before the first wgmma after the kernel has read or written registers of its d or a.
template <int FLOATS>
__device__ __forceinline__ void wgmma_fence(float (&d)[FLOATS]) {
  warpgroup_fence_operand(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Keeps the registers of a in use until this call. The compiler believes that they are free once the call of wgmma has read them.
__device__ __forceinline__ void keep_until_here(const u32 (&a)[4]) {
  asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
template <int STEPS>
__device__ __forceinline__ void keep_until_here(const u32 (&a)[STEPS][4]) {
#pragma unroll
  for (int i = 0; i < STEPS; ++i) keep_until_here(a[i]);
}
__device__ __forceinline__ void keep_until_here(u64) {}  // a descriptor: its tile is in shared memory
// Waits until at most PENDING of this warp's committed groups are unfinished. d holds results of the finished groups. Every operand a
// that a finished group reads from registers follows d: the compiler knows only from this list that these registers are in use until here.
template <int PENDING, int FLOATS, class... Operands>
__device__ __forceinline__ void wgmma_wait_group(float (&d)[FLOATS], const Operands&... a) {
  static_assert(PENDING == 0 || (PENDING == 1 && sizeof...(Operands) == 0), "operands in registers are waited for with all groups");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  warpgroup_fence_operand(d);
  (keep_until_here(a), ...);
}
// Makes this thread's earlier writes to shared memory visible to wgmma and to bulk copies, once a barrier orders these after this call.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- barriers and registers of warps --------------------------------------
// An mbarrier is a barrier in shared memory. `count` arrivals complete its phase, and the next phase begins. Phases have the parities
// 0, 1, 0, 1, ... mbarrier_wait_parity(parity) returns once the latest completed phase has this parity. So a thread that waits for
// each phase in turn never misses one: no phase may complete twice before every thread that waits for it has seen it.
__device__ __forceinline__ void mbarrier_init(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
__device__ __forceinline__ void mbarrier_arrive(u64* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void mbarrier_wait_parity(u64* barrier, int parity) {
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}
// Arrives, and makes the phase wait for `bytes` more bytes of bulk copies.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// A barrier of `threads` threads of the block, in whole warps. Ids are 1 .. 15; __syncthreads uses 0.
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// From here on a thread has N registers. All warps of the warpgroup call it (sm_90a).
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- copies ---------------------------------------------------------------
// Copies 16 bytes from global to shared memory, asynchronously. If !valid, it writes zeros and does not read src.
__device__ __forceinline__ void cp_async_16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
// The cache policy that createpolicy.fractional.L2::evict_first makes for all accesses; CUTLASS has the same constant. A step reads
// weights once. With this policy, L2 evicts them before data that is read again, such as the kernels' code. The asm is volatile so that
// the constant is made where it is used, and occupies no registers before.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm volatile("mov.b64 %0, 0x12f0000000000000;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_16(void* dst, const void* src, u64 policy) {
#ifdef NO_CACHE_POLICY  // kdgen.codegen.compile defines it for texts that ptxas would encode wrongly
  return cp_async_16(dst, src, true);
#endif
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "l"(policy) : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's committed groups are unfinished.
template <int N>
__device__ __forceinline__ void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// Copies `bytes` bytes, a multiple of 16, from global to shared memory, asynchronously. One thread calls it for the block. An mbarrier
// that expects the bytes completes its phase when they are there; they are then visible to wgmma, too. Before the call, the thread that
// initialised the mbarrier has called fence_proxy_async.
__device__ __forceinline__ void cp_async_bulk(void* dst, const void* src, int bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst)),
               "l"(src), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// Loads `to` if `there`. Otherwise `to` keeps its value, without a select instruction.
__device__ __forceinline__ void ld_global_if(bool there, uint4& to, const void* p) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "l"(p), "r"((u32)there));
}
__device__ __forceinline__ void ld_global_if(bool there, uint2& to, const void* p) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.u32 {%0,%1}, [%2];}" : "+r"(to.x), "+r"(to.y) : "l"(p), "r"((u32)there));
}
// Loads of weights, which a step reads once: they do not stay in L1. The asm is not volatile, so the compiler may move the loads up.
__device__ __forceinline__ uint4 ld_global_nc_16(const void* p) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
__device__ __forceinline__ uint2 ld_global_nc_8(const void* p) {
  uint2 v;
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
// Loads of weights before griddepcontrol_wait. The asm is volatile and the load is not ld.global.nc, because the compiler would move
// any other load behind that wait.
__device__ __forceinline__ uint4 ld_global_16(const void* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(evict_first_policy()));
  return v;
}
__device__ __forceinline__ uint2 ld_global_8(const void* p) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.u32 {%0,%1}, [%2], %3;" : "=r"(v.x), "=r"(v.y) : "l"(p), "l"(evict_first_policy()));
  return v;
}
__device__ __forceinline__ u32 ld_global_4(const void* p) {
  u32 v;
  asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}
// Loads, before griddepcontrol_wait, data that another kernel has completely written. They go past L1, which may hold stale lines until
// that wait.
__device__ __forceinline__ uint4 ld_relaxed_16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 ld_relaxed_4(const void* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// ---- one kernel after another ---------------------------------------------
// Programmatic dependent launch: a kernel may start while the previous one still runs. So it calls griddepcontrol_wait before it reads
// or writes memory that other kernels write. Before that, it may read memory that only the host writes (weights, tables). Kernels never
// read other kernels' data with ld.global.nc, so pointers to such data are not __restrict__.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void begin_after_previous_kernel() {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
}

// ---- clusters -------------------------------------------------------------
// The blocks of a cluster run at the same time and may write to each other's shared memory. cluster_thread_rank numbers all threads of
// the cluster. On a GPU without clusters, a cluster is one block of all its threads. The x index of the grid counts clusters.
#if __CUDA_ARCH__ >= 900
#define CLUSTER_BLOCK(threads, blocks) ((threads) / (blocks))  // threads of a block, for __launch_bounds__
#else
#define CLUSTER_BLOCK(threads, blocks) (threads)
#endif
__device__ __forceinline__ int cluster_id() {
#if __CUDA_ARCH__ >= 900
  u32 index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return (int)index;
#else
  return blockIdx.x;
#endif
}
__device__ __forceinline__ int cluster_thread_rank() {
#if __CUDA_ARCH__ >= 900
  u32 block;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(block));
  return (int)(block * blockDim.x + threadIdx.x);
#else
  return threadIdx.x;
#endif
}
__device__ __forceinline__ u32 cluster_num_blocks() {
#if __CUDA_ARCH__ >= 900
  u32 blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
#else
  return 1;
#endif
}
// An exchange between the blocks of a cluster, once a kernel: blocks send values into each other's shared memory, and each block receives
// `bytes` bytes. First, all threads call cluster_begin; it returns when all blocks of the cluster have started. After sending, all threads
// call wait_for_cluster; it returns when their block has received its bytes. In a cluster of one block, it is __syncthreads.
__device__ __forceinline__ void cluster_begin(u64* arrived, int bytes) {
#if __CUDA_ARCH__ >= 900
  if (cluster_num_blocks() == 1) return;
  if (threadIdx.x == 0) {
    mbarrier_init(arrived, 1);
    mbarrier_arrive_expect_tx(arrived, bytes);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncwarp();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
// Sends `value`, the same in all lanes of the warp, to `shared` in every block.
__device__ __forceinline__ void send_to_cluster(u32* shared, u32 value, u64* arrived) {
  const u32 lane = threadIdx.x % 32, blocks = cluster_num_blocks();
  if (blocks == 1 && lane == 0) *shared = value;
#if __CUDA_ARCH__ >= 900
  if (blocks > 1 && lane < blocks)
    asm volatile(
        "{\n.reg .u32 to, barrier;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 barrier, %1, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %2, [barrier];\n}" ::"r"(shared_address(shared)),
        "r"(shared_address(arrived)), "r"(value), "r"(lane)
        : "memory");
#endif
}
__device__ __forceinline__ void send_to_cluster(float* shared, float value, u64* arrived) {
  send_to_cluster(reinterpret_cast<u32*>(shared), __float_as_uint(value), arrived);
}
__device__ __forceinline__ void send_to_cluster(int* shared, int value, u64* arrived) {
  send_to_cluster(reinterpret_cast<u32*>(shared), (u32)value, arrived);
}
// Sends each lane's value to its own `shared` in every block.
__device__ __forceinline__ void send_each_to_cluster(u32* shared, u32 value, u64* arrived) {
  const u32 blocks = cluster_num_blocks();
  if (blocks == 1) *shared = value;
#if __CUDA_ARCH__ >= 900
  if (blocks == 1) return;
#pragma unroll 1
  for (u32 block = 0; block < blocks; ++block)
    asm volatile(
        "{\n.reg .u32 to, barrier;\nmapa.shared::cluster.u32 to, %0, %3;\nmapa.shared::cluster.u32 barrier, %1, %3;\n"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [to], %2, [barrier];\n}" ::"r"(shared_address(shared)),
        "r"(shared_address(arrived)), "r"(value), "r"(block)
        : "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster(u64* arrived) {
  if (cluster_num_blocks() == 1) {
    __syncthreads();
    return;
  }
#if __CUDA_ARCH__ >= 900
  u32 done;
  do {
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], 0;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(done)
        : "r"(shared_address(arrived))
        : "memory");
  } while (!done);
#endif
}

// ---- ranks ----------------------------------------------------------------
// Memory of other GPUs. Each 8 bytes hold a word and the number of the round that it belongs to. They are stored and loaded as one, so a
// reader that finds the round's number has the word, too.
__device__ __forceinline__ void send_word(u64* to, u32 word, u32 round) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(to), "l"((u64)round << 32 | word) : "memory");
}
// Returns whether the word of this round has arrived. If not, `word` belongs to another round.
__device__ __forceinline__ bool word_is_there(const u64* from, u32 round, u32& word) {
  u64 both;
  asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(both) : "l"(from) : "memory");
  word = (u32)both;
  return (u32)(both >> 32) == round;
}
// The same for N floats side by side, each in 8 bytes of its own.
template <int N>
__device__ __forceinline__ void send_words(u64* to, const float* values, u32 round) {
  static_assert(N == 1 || N == 2, "8 or 16 bytes");
  if constexpr (N == 1) {
    send_word(to, __float_as_uint(values[0]), round);
  } else {
    const u64 low = (u64)round << 32 | __float_as_uint(values[0]), high = (u64)round << 32 | __float_as_uint(values[1]);
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1,%2};" ::"l"(to), "l"(low), "l"(high) : "memory");
  }
}
template <int N>
__device__ __forceinline__ bool words_are_there(const u64* from, u32 round, float* values) {
  static_assert(N == 1 || N == 2, "8 or 16 bytes");
  if constexpr (N == 1) {
    u32 word;
    const bool there = word_is_there(from, round, word);
    values[0] = __uint_as_float(word);
    return there;
  } else {
    u64 low, high;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0,%1}, [%2];" : "=l"(low), "=l"(high) : "l"(from) : "memory");
    values[0] = __uint_as_float((u32)low), values[1] = __uint_as_float((u32)high);
    return (u32)(low >> 32) == round && (u32)(high >> 32) == round;
  }
}

// ---- warps ----------------------------------------------------------------
// Butterflies in the fixed order xor 16, 8, 4, 2, 1: all lanes get the same bits.
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
