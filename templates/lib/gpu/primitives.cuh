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
// 2^x in one instruction, to 2 units in the last place; where that is less than float32's smallest normal number, 0
__device__ __forceinline__ float ex2_approx_ftz(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
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
__device__ __forceinline__ u32 lop3_and_or(u32 a, u32 mask, u32 bits) {
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

// ---- asynchronous tensor cores (sm_90a) -----------------------------------
// A tile in shared memory is rows of 128 bytes, 64 bf16, and begins at a multiple of 1024 bytes. The 16-byte pieces of a row
// are exchanged (128-byte swizzle): this is where piece `piece` of row `row` lies, in bytes.
__device__ __forceinline__ u32 swizzled(int row, int piece) { return row * 128 + ((piece ^ (row & 7)) << 4); }
// What wgmma reads an operand by: a tile, and how many bytes further the tile with the next 64 columns lies, which counts only for
// an operand that is read by columns and has more. To begin `bytes` later, add wgmma_offset(bytes).
__device__ __forceinline__ u64 wgmma_descriptor(const void* tile, u32 next_tile) {
  return (u64)((shared_address(tile) & 0x3ffffu) >> 4) | (u64)(next_tile >> 4) << 16 | (u64)(1024 >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ constexpr u64 wgmma_offset(int bytes) { return (u64)(bytes >> 4); }
// d[64xN] += a[64x16] * b[16xN] by a warpgroup, = where !accumulate; bf16 in, float32 out; a thread has N / 2 floats of d. Warp w has
// rows 16w .. 16w + 15, in fragments as those of mma_m16n8k16 side by side. a comes from tiles whose rows are its rows, or from
// registers as that MMA's. b comes from tiles whose rows are its columns, or, ByColumns, its rows. Nothing of a, b and d may be
// touched from the call to the wgmma_wait_group<0> that waits for it, which names a in registers.
#define WGMMA_TEN(tens)                                                                                                   \
  "%" #tens "0,%" #tens "1,%" #tens "2,%" #tens "3,%" #tens "4,%" #tens "5,%" #tens "6,%" #tens "7,%" #tens "8,%" #tens "9"
#define WGMMA_OUT_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_OUT_8(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_OUT_32(i) WGMMA_OUT_8(i), WGMMA_OUT_8(i + 8), WGMMA_OUT_8(i + 16), WGMMA_OUT_8(i + 24)
#define WGMMA_BEGIN(accumulate, shape, d) \
  "{\n.reg .pred p;\nsetp.ne.b32 p, %" accumulate ", 0;\nwgmma.mma_async.sync.aligned." shape ".f32.bf16.bf16 {" d "}, "
// i0 .. i6: the numbers of the operands behind d's, which are the last arguments
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
// Keeps the compiler from moving what touches d across it: to the hardware's orders it is blind.
template <int FLOATS>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[FLOATS]) {
#pragma unroll
  for (int i = 0; i < FLOATS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// before the first wgmma after registers of its d or a were touched
template <int FLOATS>
__device__ __forceinline__ void wgmma_fence(float (&d)[FLOATS]) {
  warpgroup_fence_operand(d);
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Keeps registers of a from being used for anything else before this: to the compiler they are free from the call on that reads them.
__device__ __forceinline__ void keep_until_here(const u32 (&a)[4]) {
  asm volatile("" ::"r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]) : "memory");
}
template <int STEPS>
__device__ __forceinline__ void keep_until_here(const u32 (&a)[STEPS][4]) {
#pragma unroll
  for (int i = 0; i < STEPS; ++i) keep_until_here(a[i]);
}
__device__ __forceinline__ void keep_until_here(u64) {}  // a tile in shared memory
// Waits until at most PENDING of this warp's committed groups are unfinished. d holds results of the finished groups. Every operand a
// that a finished group reads from registers follows d: the compiler knows only from this list that these registers are in use until here.
template <int PENDING, int FLOATS, class... Operands>
__device__ __forceinline__ void wgmma_wait_group(float (&d)[FLOATS], const Operands&... a) {
  static_assert(PENDING == 0 || (PENDING == 1 && sizeof...(Operands) == 0), "operands in registers are waited for with all groups");
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
  warpgroup_fence_operand(d);
  (keep_until_here(a), ...);
}
// what this thread has written to shared memory so far may be read by wgmma, by whoever a barrier tells of it
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- warps with roles -----------------------------------------------------
// A barrier in shared memory that `count` arrivals complete, again and again. wait(parity) goes on once the latest completion was an
// odd one (parity 0: first, third, ...) or an even one (parity 1); completions that may be missed must not happen.
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
// an arrival that also makes the next completion wait for so many bytes of bulk copies
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u64* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
// a barrier of `threads` of the block, whole warps; ids 1 .. 15
__device__ __forceinline__ void barrier_sync(int id, int threads) {
  asm volatile("barrier.sync.aligned %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// registers a thread from here on, in warpgroups that all call it (sm_90a)
template <int N>
__device__ __forceinline__ void setmaxnreg_dec() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N>
__device__ __forceinline__ void setmaxnreg_inc() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }

// ---- copies ---------------------------------------------------------------
// 16 bytes global to shared, asynchronously; zeros when !valid (src is then not read)
__device__ __forceinline__ void cp_async_16(void* dst, const void* src, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "r"(valid ? 16 : 0) : "memory");
}
// How L2 keeps what a step reads once: it leaves before all that is read again, of which the kernels' code is a part. What createpolicy
// makes for evict_first of all accesses, as CUTLASS has it, too; volatile, for it is made where it is used instead of holding registers.
__device__ __forceinline__ u64 evict_first_policy() {
  u64 policy;
  asm volatile("mov.b64 %0, 0x12f0000000000000;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_16(void* dst, const void* src, u64 policy) {
#ifdef NO_CACHE_POLICY  // kdgen.compile defines it for texts that ptxas would encode wrongly
  return cp_async_16(dst, src, true);
#endif
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(dst)), "l"(src), "l"(policy) : "memory");
}
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// waits until at most N of this thread's committed groups are unfinished
template <int N>
__device__ __forceinline__ void cp_async_wait_group() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
// `bytes`, a multiple of 16, global to shared, asynchronously, for all of the block: an mbarrier that expects them completes when they are
// there, for wgmma too. Its initialisation has been made known by fence_proxy_async before.
__device__ __forceinline__ void cp_async_bulk(void* dst, const void* src, int bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_address(dst)),
               "l"(src), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}
// A load where `there`; else `to` stays what it was, and costs no instruction.
__device__ __forceinline__ void ld_global_if(bool there, uint4& to, const void* p) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %5, 0; @p ld.global.v4.u32 {%0,%1,%2,%3}, [%4];}"
               : "+r"(to.x), "+r"(to.y), "+r"(to.z), "+r"(to.w)
               : "l"(p), "r"((u32)there));
}
__device__ __forceinline__ void ld_global_if(bool there, uint2& to, const void* p) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p ld.global.v2.u32 {%0,%1}, [%2];}" : "+r"(to.x), "+r"(to.y) : "l"(p), "r"((u32)there));
}
// Weights are read once a step: keep them out of L1. Not volatile: the compiler may move these ahead of arithmetic.
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
// The same for weights that are to be on their way before griddepcontrol_wait. Volatile, and not through the non-coherent path: any
// other load the compiler moves behind that wait.
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
// Another kernel's data, old by now, before griddepcontrol_wait: past L1, which that wait may be what makes fresh.
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
// Programmatic dependent launch: a kernel may start while the one before it still runs, so each waits before it reads or
// writes anything that another kernel writes. What only the host writes (weights, tables) may be read before. Data of other
// kernels is never read through the non-coherent path, so pointers to it are not __restrict__.
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
// A cluster's blocks run at the same time and may write to each other's shared memory. Its threads are numbered through; where a GPU has
// no clusters they are one block. The grid's x counts clusters.
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
// Values that blocks send into each other's shared memory, once: `bytes` of them come to each block. All threads call cluster_begin,
// which returns when all of the cluster's blocks have started, and all wait_for_cluster, which waits for what comes to their block. One
// block alone meets at a barrier.
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
// `value`, which a warp's lanes have alike, to `shared` in every block
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
// the same of each lane, to its own place
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
// the same with one or two floats' words side by side, each of which arrives as one
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
