// The runtime's state while kernels run. A Worker is an OS thread and the block that it runs. Its lanes are the CUDA threads of the block,
// each on a fiber. Workers share only the launch and the allocations.
#pragma once
#include <stdint.h>
#include <time.h>
#include <map>
#include <vector>
#include "../emulator.h"
#include "switch.h"

static const size_t MAX_THREADS = 1024;
static const size_t STATIC_LIMIT = 48 << 10;   // static shared memory that CUDA allows a block
static const size_t SHARED_LIMIT = 227 << 10;  // static and dynamic shared memory of a block, on the GPU that allows most
static const size_t RED_ZONE = 64;             // bytes between shared arrays: an index just behind an array is in no other array
static const size_t STATIC_ARENA = 64 << 10;
static const size_t DYNAMIC_START = STATIC_ARENA + 1024;  // a multiple of 1024, as on the GPU side
static const size_t ARENA = DYNAMIC_START + SHARED_LIMIT + 4096;
static const size_t STACK = 64 << 10;
static const size_t PAGE = 4096;
static const unsigned char POISON = 0xff;  // NaN as f32, f64 and bf16; -1 as an integer

// A place in a kernel: 0 if unknown, LINE_FLAG | source line, or an offset in the kernel's library.
typedef uint32_t Where;
static const Where LINE_FLAG = 0x80000000u;
static inline Where at_line(int line) { return LINE_FLAG | static_cast<Where>(line); }

// OVERLAPS: on a GPU, the launch may begin before the previous one has ended.
enum LaunchFlags : uint32_t { SHUFFLED = 1, LATE_COPIES = 2, CHECK = 4, OVERLAPS = 8 };

// kdgen/backends/cpu_runtime.py has the same fields in the same order.
struct EmuError {
  char text[1024];  // {buffer}, {other} and {earlier} in it stand for the fields of these names
  uint32_t block[3];
  uint32_t thread;
  Where where, other;
  uint64_t buffer;   // the address of the allocation that the error is about, or 0
  uint64_t earlier;  // if `other` is a place in an earlier launch, its EmuKernel; else 0
};
struct EmuLaunch {
  const EmuKernel* kernel;
  const uint64_t* slots;
  uint32_t slot_count;
  uint32_t grid[3];
  uint32_t threads;
  uint32_t shared_bytes;
  uint32_t os_threads;
  uint32_t flags;
  uint64_t seed;
  uint32_t slice_ms;     // emu_launch returns after about so long, so that the caller can be interrupted
  uint32_t patience_ms;  // how long a block may wait for other processes
  uint32_t next_block;   // in: the first block to run; out: the first block that was not run
  uint64_t early;        // a bit for each parameter: the kernel may use its buffer before griddepcontrol_wait
  uint64_t used_early;   // out, a bit for each parameter: the kernel has done so
  EmuError error;
};

struct Copy {
  void* dst;
  const void* src;  // null: zeros
  int line;
};
struct CopyQueue {
  std::vector<Copy> copies;      // oldest first
  std::vector<unsigned> groups;  // how many copies each committed group has
  unsigned open = 0;             // copies since the last commit
};

struct BulkCopy {  // one thread starts it for the block; an mbarrier counts its bytes
  char* dst;
  const char* src;
  unsigned bytes;
  uint64_t* barrier;
  struct Lane* lane;
  int line;
};

struct Wgmma {  // a warp's part of a wgmma, from its call to its wait
  EmuWgmma lanes[32];
  int line;
};
struct WgmmaQueue {
  std::vector<Wgmma> pending;  // called and not yet performed; with LATE_COPIES, the wait performs them
  std::vector<float> results;  // what is in their d, [d][lane][float], while d itself holds poison
  unsigned issued = 0, committed = 0;
  unsigned last_group = 0;  // how many of the committed ones are not in the last group
  bool fenced = false;      // wgmma_fence was called since the kernel could last use the registers
};

struct Warp : EmuWarp {
  unsigned alive, runnable, at_collective, at_barrier, at_event;  // sets of lanes
  WgmmaQueue wgmma;
  unsigned index;
  struct Lane* lanes[32];
  // shuffles
  uint64_t sent[32];
  int from[32];
};

struct Lane : EmuLane {
  void* sp;        // stack pointer to resume with; null: the lane has not begun
  unsigned stack;  // index of the stack that it runs on
  unsigned linear;
  // what it waits for
  unsigned mask;
  int line;
  const char* what;
  EmuWarpStep step;
  const void* event;  // an mbarrier or a NamedBarrier
  // checker
  uint32_t sync_tick;           // of its last barrier or __syncwarp
  bool fenced;                  // it has called __threadfence since its last write to global memory
  CopyQueue* copies = nullptr;  // its cp.async copies in this block; null: none so far
  uint32_t wgmma_fence_tick;    // of its last fence_proxy_async
  uint32_t fence_tick;          // of its last __threadfence
  bool waited;                  // it, or a thread that it is ordered after, has called griddepcontrol_wait
  // For each thread, a tick: what that thread did before it is ordered before this thread's next access, because of mbarriers and
  // barriers of warps. Empty until this thread has waited for one.
  std::vector<uint32_t> known;
};

struct SharedArray {
  const void* site;
  char* p;
  size_t bytes;
};

static const int WGMMA_K = 16, WGMMA_COLUMNS = 256;
struct alignas(32) WgmmaOperands {  // of a warp, as floats
  float a[16][WGMMA_K], b[WGMMA_K][WGMMA_COLUMNS], d[WGMMA_COLUMNS];
};

struct NamedBarrier {
  unsigned threads = 0, arrived = 0, generation = 0;
};
// What threads that arrive at an mbarrier or at a barrier of warps pass to threads that wait for it: in the current phase (arriving), and
// in the last completed one (completed).
struct Handover {
  std::vector<uint32_t> arriving, completed;
  bool arriving_waited = false, completed_waited = false;  // one of them has called griddepcontrol_wait
  // of an mbarrier: the thread that initialised it, and when
  unsigned maker = 0;
  uint32_t made_tick = 0;
};

struct Worker : EmuContext {
  EmuLaunch* launch = nullptr;
  Lane lanes[MAX_THREADS];
  Warp warps[MAX_THREADS / 32];
  unsigned threads, warp_count, alive, ready_warps;
  unsigned barrier_count;
  int barrier_line;
  void* launcher_sp;  // stack pointer of the OS thread itself
  bool running = false, failed = false;
  EmuError error;
  unsigned block_index;
  uint64_t waiting_since;  // when it began to wait for other processes, in nanoseconds; 0: it has not
  uint64_t random;
  char* stacks = nullptr;
  size_t stack_count = 0, stacks_used = 0;
  std::vector<unsigned> free_stacks;
  char* arena = nullptr;
  size_t arena_used;
  std::vector<SharedArray> arrays;
  CopyQueue queues[MAX_THREADS];
  NamedBarrier named_barriers[16];
  std::vector<BulkCopy> bulk_copies;  // started and not yet performed
  WgmmaOperands wgmma_operands;
  std::map<const void*, Handover> handovers;  // checker
  // checker; ticks count synchronisations
  uint32_t block_tick, barrier_tick;  // of the block's start and of its last __syncthreads
  bool waited, allowed;  // a thread has called griddepcontrol_wait; a thread has called griddepcontrol_launch_dependents
};

extern "C" {
__attribute__((visibility("default"), tls_model("initial-exec"))) thread_local EmuContext* emu_context = nullptr;
}
static inline Worker* current() { return static_cast<Worker*>(emu_context); }
static inline Lane* current_lane(Worker* w) { return static_cast<Lane*>(w->lane); }
static inline Warp* warp_of(const Lane* lane) { return static_cast<Warp*>(lane->warp); }

static inline uint64_t now() {  // in nanoseconds
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<uint64_t>(t.tv_sec) * 1000000000u + static_cast<uint64_t>(t.tv_nsec);
}
static inline uint64_t draw(Worker* w) {  // xorshift64
  uint64_t x = w->random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  return w->random = x;
}

// Ends the block with an error: switches to the OS thread's own stack. No fiber of the block is resumed.
struct Blame {
  const Lane* lane;
  Where where = 0, other = 0;
  uint64_t buffer = 0;
  const EmuKernel* earlier = nullptr;
};
__attribute__((noreturn, format(printf, 3, 4))) static void fail(Worker* w, const Blame& blame, const char* format, ...);

// defined in checker.h and overlap.h
static void check_access(Worker* w, Lane* lane, uintptr_t p, unsigned bytes, bool write, Where where);
static void check_copy_started(Worker* w, Lane* lane, const Copy& copy);
static void check_copy_finished(Worker* w, Lane* lane, const Copy& copy);
static void check_bulk_copy_started(Worker* w, const BulkCopy& copy);
static void check_bulk_copy_finished(Worker* w, const BulkCopy& copy);
static void check_atomic(Worker* w, Lane* lane, uintptr_t p, unsigned bytes, Where where);
static void check_mbarrier(Worker* w, Lane* lane, const uint64_t* barrier, bool init, Where where);
static void check_mbarrier_made(Worker* w, const Lane* lane, const uint64_t* barrier);
static void check_warp_synced(Warp* warp, unsigned mask);
static void check_block_synced(Worker* w);
static void check_block_ended(Worker* w, const Lane* last);
static void check_arrived(Worker* w, Lane* lane, const void* event);
static void check_completed(Worker* w, const void* event);
static void check_waited(Worker* w, Lane* lane, const void* event);
static void check_wgmma_read(Worker* w, Lane* lane, const char* p, Where where);
static uint32_t next_tick();
