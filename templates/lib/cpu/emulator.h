// What a kernel built for the CPU and the emulator's runtime (runtime/) share: the state of a thread that threadIdx and blockIdx read, and
// the functions behind barriers, warp collectives, copies, atomics and the checker.
// It includes <stddef.h> and <stdint.h> only: with libstdc++ headers, kernels would take ten times as long to compile.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct uint3 {
  unsigned x, y, z;
};

struct EmuWarp {
  void* operand[32];      // each lane's operand of the collective that lanes are arriving at
  uint64_t received[32];  // results of shuffles
};

struct EmuLane {  // a CUDA thread
  uint3 thread;
  unsigned index;  // lane in its warp
  EmuWarp* warp;
};

struct EmuContext {  // the block that this OS thread runs
  EmuLane* lane;     // the CUDA thread that runs now
  uint3 block, block_dim, grid_dim;
  char* dynamic_shared;
};

// What a collective does, called once for all lanes of `mask`.
typedef void (*EmuWarpStep)(EmuWarp* warp, unsigned mask, int line);

struct EmuKernel {
  void (*call)(const uint64_t* slots);  // an 8-byte slot for each argument
  const char* parameters;               // 'p' pointer, 'i' 32-bit integer
};

enum EmuShuffle { EMU_FROM_LANE, EMU_FROM_XOR, EMU_FROM_BELOW, EMU_FROM_ABOVE };
enum EmuAtomicOp { EMU_ADD, EMU_MIN, EMU_MAX, EMU_EXCHANGE, EMU_CAS, EMU_AND, EMU_OR, EMU_XOR };
enum EmuAtomicType { EMU_I32, EMU_U32, EMU_U64 };

#define EMU_API extern "C" __attribute__((visibility("default")))

// With initial-exec, a read of threadIdx takes two loads and no call.
extern "C" __attribute__((visibility("default"), tls_model("initial-exec"))) thread_local EmuContext* emu_context;

// `line` is always the source line of the call in the kernel's text.
EMU_API void emu_sync_block(int line);
EMU_API void emu_sync_warp(unsigned mask, int line);
EMU_API void emu_collective(unsigned mask, EmuWarpStep step, void* operand, int line, const char* what);
// Leaves its result in warp->received instead of returning it. So the function can end in a jump. It would otherwise end in a `ret` on
// another fiber's stack, which the processor mispredicts; that would double the cost of a shuffle.
EMU_API void emu_shuffle(EmuShuffle kind, unsigned mask, uint64_t bits, int operand, int width, int line);
EMU_API void* emu_shared_array(const void* site, size_t bytes, size_t align, int line);
EMU_API void emu_cp_async(void* dst, const void* src, bool valid, int line);
EMU_API void emu_cp_async_commit_group();
EMU_API void emu_cp_async_wait_group(int groups);
struct EmuWgmma {  // the operands that a lane gives wgmma; b has 2 * floats columns
  float* d;
  int floats;
  const unsigned* a_registers;  // null: a is in shared memory
  uint64_t a, b;                // descriptors
  bool by_columns, accumulate;
};
EMU_API uint64_t emu_wgmma_descriptor(const void* tile, unsigned next_tile, int line);
EMU_API void emu_wgmma(EmuWgmma* operands, int line);
EMU_API void emu_wgmma_fence(int line);
EMU_API void emu_wgmma_commit_group(int line);
EMU_API void emu_wgmma_wait_group(int pending, int line);
EMU_API void emu_fence_proxy_async();
EMU_API void emu_mbarrier_init(uint64_t* barrier, int count, int line);
EMU_API void emu_mbarrier_arrive(uint64_t* barrier, int line);
EMU_API void emu_mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes, int line);
EMU_API void emu_cp_async_bulk(void* dst, const void* src, int bytes, uint64_t* barrier, int line);
EMU_API void emu_mbarrier_wait_parity(uint64_t* barrier, int parity, int line);
EMU_API void emu_barrier_sync(int id, int threads, int line);
EMU_API void emu_fence();
EMU_API void emu_griddepcontrol_launch_dependents();
EMU_API void emu_griddepcontrol_wait();
EMU_API void emu_yield();
EMU_API void emu_pause();
EMU_API unsigned emu_active_mask();
EMU_API uint64_t emu_atomic(EmuAtomicOp op, EmuAtomicType type, void* p, uint64_t value, uint64_t compare, int line);
EMU_API __attribute__((noreturn)) void emu_fail(const char* what, int line);
// For the checker: lane `index` of the running warp reads or writes `bytes` bytes at `p`.
EMU_API void emu_touch(const void* p, unsigned bytes, bool write, unsigned index, int line);

#ifdef EMU_CHECKER
#define EMU_TOUCH(p, bytes, write, index, line) emu_touch((p), (bytes), (write), (index), (line))
#else
#define EMU_TOUCH(p, bytes, write, index, line) (void)(line)
#endif

// For functions that run for a whole warp: the checker ignores their own accesses, which are the emulator's and not the kernel's.
#define EMU_UNCHECKED __attribute__((no_sanitize("thread")))

// ---- kernel export: converts slots to the kernel's parameter types --------
template <size_t... I>
struct EmuIndices {};
template <size_t N, size_t... I>
struct EmuMakeIndices : EmuMakeIndices<N - 1, N - 1, I...> {};
template <size_t... I>
struct EmuMakeIndices<0, I...> {
  typedef EmuIndices<I...> type;
};
template <class T>
struct EmuKind {
  static_assert(sizeof(T) == 0, "kernel parameters are pointers and 32-bit integers");
};
template <class T>
struct EmuKind<T*> {
  static constexpr char value = 'p';
};
template <>
struct EmuKind<int> {
  static constexpr char value = 'i';
};
template <>
struct EmuKind<unsigned> {
  static constexpr char value = 'i';
};
template <class T>
struct EmuPlain {
  typedef T type;
};
template <class T>
struct EmuPlain<const T> {
  typedef T type;
};
template <auto Kernel>
struct EmuThunk;
template <class... A, void (*Kernel)(A...)>
struct EmuThunk<Kernel> {
  template <size_t... I>
  static void unpack(const uint64_t* slots, EmuIndices<I...>) {
    (void)slots;
    Kernel(*reinterpret_cast<const typename EmuPlain<A>::type*>(slots + I)...);
  }
  static void call(const uint64_t* slots) { unpack(slots, typename EmuMakeIndices<sizeof...(A)>::type{}); }
  static constexpr char parameters[] = {EmuKind<typename EmuPlain<A>::type>::value..., 0};
};
#define EMU_EXPORT(name)                     \
  EMU_API const EmuKernel emu_kernel_##name; \
  const EmuKernel emu_kernel_##name = {&EmuThunk<&name::name>::call, EmuThunk<&name::name>::parameters};
