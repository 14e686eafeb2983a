// What the runtime knows while kernels run. A Worker is one OS thread and the block it is running; its lanes are the block's
// CUDA threads, each on a fiber. Workers share nothing but the launch and the allocations.
#pragma once
#include <stdint.h>
#include <time.h>
#include <map>
#include <vector>
#include "../emulator.h"
#include "switch.h"

static const size_t MAX_THREADS = 1024;
static const size_t STATIC_LIMIT = 48 << 10;   // what CUDA allows without opting in
static const size_t SHARED_LIMIT = 227 << 10;  // static and dynamic together: the largest of any GPU kdgen knows
static const size_t RED_ZONE = 64;             // between shared arrays, so that an index one too far is nobody's
static const size_t STATIC_ARENA = 64 << 10;
static const size_t DYNAMIC_START = STATIC_ARENA + 1024;  // aligned as the GPU side aligns it
static const size_t ARENA = DYNAMIC_START + SHARED_LIMIT + 4096;
static const size_t STACK = 64 << 10;
static const size_t PAGE = 4096;
static const unsigned char POISON = 0xff;  // NaN as f32, f64 and bf16; -1 as an integer

// A place in a kernel: 0 unknown, LINE_FLAG | source line, or the program counter's offset in the kernel's library.
typedef uint32_t Where;
static const Where LINE_FLAG = 0x80000000u;
static inline Where at_line(int line) { return LINE_FLAG | static_cast<Where>(line); }

// OVERLAPS: on a GPU it may begin before the launch ahead of it has ended.
enum LaunchFlags : uint32_t { SHUFFLED = 1, LATE_COPIES = 2, CHECK = 4, OVERLAPS = 8 };

// Mirrored field for field in kdgen/backends/cpu.py.
struct EmuError {
  char text[1024];  // may hold {buffer}, {other} and {earlier}, for `buffer`, `other` and `earlier`
  uint32_t block[3];
  uint32_t thread;
  Where where, other;
  uint64_t buffer;   // the address of the allocation in question, or 0
  uint64_t earlier;  // the EmuKernel of the earlier launch that `other` is a place in, or 0: this launch's
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
  uint32_t slice_ms;    // return after about so long, so that the caller can be interrupted
  uint32_t patience_ms;  // how long a block may wait for other processes
  uint32_t next_block;  // in: where to go on; out: how far it came
  uint64_t early;  // a bit a parameter: what may be read or written through it before the thread has waited for the previous kernel
  uint64_t used_early;  // out, a bit a parameter: where that was done
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

struct BulkCopy {  // by one thread for all; an mbarrier counts its bytes
  char* dst;
  const char* src;
  unsigned bytes;
  uint64_t* barrier;
  struct Lane* lane;
  int line;
};

struct Wgmma {  // one of a warp, from its call to its wait
  EmuWgmma lanes[32];
  int line;
};
struct WgmmaQueue {
  std::vector<Wgmma> pending;  // performed at the wait, or, without LATE_COPIES, at the call
  std::vector<float> results;  // what their d held before, while poison stands in it: [d][lane][float]
  unsigned issued = 0, committed = 0;
  unsigned last_group = 0;  // of those committed, how many were before the last group
  bool fenced = false;  // since registers could last be touched
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
  void* sp;        // where to resume; null before its first instruction
  unsigned stack;  // index of the stack it runs on
  unsigned linear;
  // what it waits for
  unsigned mask;
  int line;
  const char* what;
  EmuWarpStep step;
  const void* event;  // an mbarrier or a NamedBarrier
  // checker
  uint32_t sync_tick;           // the last barrier or __syncwarp that it took part in
  bool fenced;                  // __threadfence since its last write to global memory
  CopyQueue* copies = nullptr;  // of this block, once it has any
  uint32_t wgmma_fence_tick;    // fence_proxy_async
  uint32_t fence_tick;          // its last __threadfence
  bool waited;                  // for the previous kernel, itself or by being ordered after a thread that did
  // What other threads did before these ticks is ordered before what this one does now, by mbarriers and barriers of warps; empty
  // until it has waited for one.
  std::vector<uint32_t> known;
};

struct SharedArray {
  const void* site;
  char* p;
  size_t bytes;
};

static const int WGMMA_K = 16, WGMMA_COLUMNS = 256;
struct alignas(32) WgmmaOperands {  // widened, of one warp
  float a[16][WGMMA_K], b[WGMMA_K][WGMMA_COLUMNS], d[WGMMA_COLUMNS];
};

struct NamedBarrier {
  unsigned threads = 0, arrived = 0, generation = 0;
};
// What arrivals at an mbarrier or a barrier of warps hand on: to those that wait for the next completion, and for the last one.
struct Handover {
  std::vector<uint32_t> arriving, completed;
  bool arriving_waited = false, completed_waited = false;  // for the previous kernel
  // of an mbarrier: by whom it was initialised, and when
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
  void* launcher_sp;  // the OS thread's own stack
  bool running = false, failed = false;
  EmuError error;
  unsigned block_index;
  uint64_t waiting_since;  // for other processes, in nanoseconds; 0: not yet
  uint64_t random;
  char* stacks = nullptr;
  size_t stack_count = 0, stacks_used = 0;
  std::vector<unsigned> free_stacks;
  char* arena = nullptr;
  size_t arena_used;
  std::vector<SharedArray> arrays;
  CopyQueue queues[MAX_THREADS];
  NamedBarrier named_barriers[16];
  std::vector<BulkCopy> bulk_copies;  // that are still to be performed
  WgmmaOperands wgmma_operands;
  std::map<const void*, Handover> handovers;  // checker
  // checker: ticks count synchronisations
  uint32_t block_tick, barrier_tick;
  bool waited, allowed;  // some thread has waited for the previous kernel, and has let the next one begin
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

// Ends the block with an error: back to the launcher for good. The other fibers are abandoned where they stand.
struct Blame {
  const Lane* lane;
  Where where = 0, other = 0;
  uint64_t buffer = 0;
  const EmuKernel* earlier = nullptr;
};
__attribute__((noreturn, format(printf, 3, 4))) static void fail(Worker* w, const Blame& blame, const char* format, ...);

// checker.h
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
