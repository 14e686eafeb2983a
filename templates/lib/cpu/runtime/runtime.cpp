// The emulator's runtime, one translation unit: runs blocks and launches, and handles kernels that crash.
#include <errno.h>
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <ucontext.h>
#include <unistd.h>
#include <atomic>
#include <mutex>
#include "hooks.h"

// ---- crashes --------------------------------------------------------------
// A fault inside a kernel ends its block with an error. Any other fault has the effect that it has without this handler.
static uintptr_t faulting_pc(const void* context) {
  const auto* u = static_cast<const ucontext_t*>(context);
#if defined(__x86_64__)
  return static_cast<uintptr_t>(u->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  return static_cast<uintptr_t>(u->uc_mcontext.pc);
#else
  (void)u;
  return 0;
#endif
}
static const int CRASHES[] = {SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
static void on_crash(int signal_number, siginfo_t* info, void* context) {
  Worker* w = current();
  if (!w || !w->running) {
    signal(signal_number, SIG_DFL);
    raise(signal_number);
    return;
  }
  w->running = false;  // a fault in this function is a bug of the runtime, not of the kernel
  const Checker& c = checker;
  Blame blame{current_lane(w)};
  const uintptr_t pc = faulting_pc(context);
  if (pc >= c.module_start && pc < c.module_end) blame.where = static_cast<Where>(pc - c.module_start);
  if (signal_number == SIGFPE) fail(w, blame, "integer division by zero (or of the least integer by -1)");
  if (signal_number == SIGABRT) fail(w, blame, "abort()");
  const uintptr_t p = reinterpret_cast<uintptr_t>(info->si_addr);
  const uintptr_t stacks = reinterpret_cast<uintptr_t>(w->stacks);
  if (p - stacks < w->stack_count * STACK)
    fail(w, blame, "stack overflow: the thread's variables take more than %zu KiB", STACK >> 10);
  const Allocation* near = nearest_allocation(p);
  if (!near || info->si_code == SI_KERNEL)  // x86 reports a misaligned vector access without an address
    fail(w, blame, "bad or misaligned access at %p, which is no memory of this device", info->si_addr);
  blame.buffer = reinterpret_cast<uint64_t>(near->p);
  fail(w, blame, "out of bounds: access at byte %td of {buffer}, which has %zu", static_cast<ptrdiff_t>(p - blame.buffer),
       near->bytes);
}

class CrashHandlers {  // installed while a launch runs; then the process has its own handlers again
 public:
  CrashHandlers() {
    static char* stack = map_pages(64 << 10, PROT_READ | PROT_WRITE);  // one launch runs at a time
    stack_t ours{};
    ours.ss_sp = stack;
    ours.ss_size = 64 << 10;
    sigaltstack(&ours, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_crash;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 4; ++i) sigaction(CRASHES[i], &action, &old_[i]);
  }
  ~CrashHandlers() {
    for (int i = 0; i < 4; ++i) sigaction(CRASHES[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  struct sigaction old_[4];
  stack_t old_stack_;
};

// ---- a block --------------------------------------------------------------
static Worker* this_worker() {
  if (!emu_context) {
    Worker* w = new Worker;
    w->arena = map_pages(ARENA, PROT_READ | PROT_WRITE);
    emu_context = w;
  }
  return current();
}
static bool reserve_stacks(Worker* w, size_t count) {
  if (w->stack_count >= count) return true;
  char* stacks = map_pages(count * STACK, PROT_READ | PROT_WRITE);
  if (!stacks) return false;
  for (size_t i = 0; i < count; ++i) mprotect(stacks + i * STACK, PAGE, PROT_NONE);
  if (w->stacks) munmap(w->stacks, w->stack_count * STACK);
  w->stacks = stacks;
  w->stack_count = count;
  w->free_stacks.reserve(count);
  return true;
}
static void begin_launch(Worker* w, EmuLaunch* launch) {
  w->launch = launch;
  w->threads = launch->threads;
  w->warp_count = (launch->threads + 31) / 32;
  w->block_dim = {launch->threads, 1, 1};
  w->grid_dim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  w->dynamic_shared = w->arena + DYNAMIC_START;
  for (unsigned i = 0; i < w->warp_count; ++i) w->warps[i].index = i;
  for (unsigned t = 0; t < w->threads; ++t) {
    Lane& lane = w->lanes[t];
    Warp& warp = w->warps[t / 32];
    lane.thread = {t, 0, 0};
    lane.index = t % 32;
    lane.linear = t;
    lane.warp = &warp;
    warp.lanes[t % 32] = &lane;
  }
}
// The order of blocks with SHUFFLED: in steps that share no factor with the number of blocks.
static unsigned shuffled_block(const EmuLaunch* launch, unsigned i, unsigned count) {
  uint64_t stride = launch->seed * 0x9e3779b97f4a7c15ull >> 33 | 1;
  auto gcd = [](uint64_t a, uint64_t b) {
    while (b) {
      const uint64_t rest = a % b;
      a = b;
      b = rest;
    }
    return a;
  };
  while (gcd(stride, count) != 1) stride += 2;
  return static_cast<unsigned>((i * stride + launch->seed) % count);
}
static bool run_block(Worker* w, unsigned index) {
  EmuLaunch* launch = w->launch;
  const uint32_t* grid = launch->grid;
  w->block = {index % grid[0], index / grid[0] % grid[1], index / grid[0] / grid[1]};
  w->block_index = index;
  w->waiting_since = 0;
  w->random = (launch->seed + 1) * 0x9e3779b97f4a7c15ull ^ (index + 1) * 0xd1b54a32d192ed03ull;
  if (!w->random) w->random = 1;
  w->alive = w->threads;
  w->barrier_count = 0;
  w->failed = false;
  w->stacks_used = 0;
  w->free_stacks.clear();
  w->arrays.clear();
  for (NamedBarrier& barrier : w->named_barriers) barrier = NamedBarrier{};
  w->bulk_copies.clear();
  w->arena_used = RED_ZONE;
  memset(w->dynamic_shared, POISON, launch->shared_bytes);
  w->ready_warps = w->warp_count == 32 ? ~0u : (1u << w->warp_count) - 1;
  for (unsigned i = 0; i < w->warp_count; ++i) {
    const unsigned width = w->threads - 32 * i;
    Warp& warp = w->warps[i];
    warp.alive = warp.runnable = width >= 32 ? ~0u : (1u << width) - 1;
    warp.at_collective = warp.at_barrier = warp.at_event = 0;
    warp.wgmma = WgmmaQueue{};
  }
  for (unsigned t = 0; t < w->threads; ++t) {
    Lane& lane = w->lanes[t];
    lane.sp = nullptr;
    if (lane.copies) {
      *lane.copies = CopyQueue{};
      lane.copies = nullptr;
    }
  }
  if (launch->flags & CHECK) checker_begin_block(w);
  Lane* first = &w->lanes[launch->flags & SHUFFLED ? draw(w) % w->threads : 0];
  give_stack(w, first);
  w->lane = first;
  w->running = true;
  emu_switch(&w->launcher_sp, first->sp);
  w->running = false;
  return !w->failed;
}

// ---- a launch -------------------------------------------------------------
struct Job {
  EmuLaunch* launch;
  unsigned count;
  std::atomic<unsigned> next;
  std::atomic<bool> failed{false};
  uint64_t deadline;  // in nanoseconds
};
static std::mutex& error_mutex = *new std::mutex;
// Runs blocks until none is left, one fails, or it is `until` or the deadline. Returns whether blocks are left.
static bool run_blocks(Job* job, uint64_t until) {
  EmuLaunch* launch = job->launch;
  Worker* w = this_worker();
  if (!reserve_stacks(w, launch->threads)) {
    std::lock_guard<std::mutex> hold(error_mutex);
    snprintf(launch->error.text, sizeof launch->error.text, "out of memory for the stacks of %u threads", launch->threads);
    job->failed = true;
    return false;
  }
  begin_launch(w, launch);
  const uint64_t stop = until < job->deadline ? until : job->deadline;
  while (!job->failed) {
    const unsigned i = job->next.fetch_add(1);
    if (i >= job->count) return false;
    if (!run_block(w, launch->flags & SHUFFLED ? shuffled_block(launch, i, job->count) : i)) {
      std::lock_guard<std::mutex> hold(error_mutex);
      if (!job->failed) launch->error = w->error;
      job->failed = true;
      return false;
    }
    if (now() >= stop) return true;
  }
  return false;
}

// Helper threads sleep between launches. A launch wakes them once it has taken longer than waking them takes.
class Pool {
 public:
  // pthreads instead of std::thread: helpers may not handle the process's signals, and are not joined when it ends
  void run(Job* job, unsigned helpers) {
    pthread_mutex_lock(&mutex_);
    while (started_ < helpers && start_helper()) ++started_;
    job_ = job;
    wanted_ = busy_ = helpers < started_ ? helpers : started_;
    ++generation_;
    pthread_cond_broadcast(&wake_);
    pthread_mutex_unlock(&mutex_);
    run_blocks(job, ~0ull);
    pthread_mutex_lock(&mutex_);
    while (busy_) pthread_cond_wait(&idle_, &mutex_);
    pthread_mutex_unlock(&mutex_);
  }

 private:
  struct Helper {
    Pool* pool;
    unsigned index;
  };
  bool start_helper() {
    sigset_t crashes, all, old;
    sigemptyset(&crashes);
    sigfillset(&all);
    for (int s : CRASHES) sigdelset(&all, s);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    pthread_t thread;
    const bool ok = !pthread_create(&thread, nullptr, helper_main, new Helper{this, started_});
    pthread_sigmask(SIG_SETMASK, &old, nullptr);
    if (ok) pthread_detach(thread);
    return ok;
  }
  static void* helper_main(void* arg) {
    const Helper self = *static_cast<Helper*>(arg);
    delete static_cast<Helper*>(arg);
    stack_t crash_stack{};
    crash_stack.ss_sp = map_pages(64 << 10, PROT_READ | PROT_WRITE);
    crash_stack.ss_size = 64 << 10;
    sigaltstack(&crash_stack, nullptr);
    Pool* p = self.pool;
    uint64_t seen = 0;
    for (;;) {
      pthread_mutex_lock(&p->mutex_);
      while (p->generation_ == seen || self.index >= p->wanted_) {
        seen = p->generation_;
        pthread_cond_wait(&p->wake_, &p->mutex_);
      }
      seen = p->generation_;
      Job* job = p->job_;
      pthread_mutex_unlock(&p->mutex_);
      run_blocks(job, ~0ull);
      pthread_mutex_lock(&p->mutex_);
      if (--p->busy_ == 0) pthread_cond_signal(&p->idle_);
      pthread_mutex_unlock(&p->mutex_);
    }
  }
  pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t wake_ = PTHREAD_COND_INITIALIZER, idle_ = PTHREAD_COND_INITIALIZER;
  uint64_t generation_ = 0;
  unsigned started_ = 0, wanted_ = 0, busy_ = 0;
  Job* job_ = nullptr;
};
static Pool* the_pool() {  // a new one in a forked child, which has no threads of its parent
  static Pool* pool = nullptr;
  static pid_t owner = 0;
  if (!pool || owner != getpid()) {
    pool = new Pool;
    owner = getpid();
  }
  return pool;
}

// Finds the addresses of the library that holds a kernel.
static int find_module(dl_phdr_info* info, size_t, void* data) {
  auto& c = checker;
  const uintptr_t kernel = *static_cast<uintptr_t*>(data);
  uintptr_t end = 0;
  bool inside = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD) continue;
    const uintptr_t start = info->dlpi_addr + segment.p_vaddr;
    inside = inside || (kernel >= start && kernel < start + segment.p_memsz);
    end = std::max<uintptr_t>(end, start + segment.p_memsz);
  }
  if (!inside) return 0;
  c.module_start = info->dlpi_addr;
  c.module_end = end;
  return 1;
}

enum LaunchResult { FINISHED = 0, FAILED = 1, UNFINISHED = 2 };
// Runs the launch from launch->next_block on. UNFINISHED: the time slice has ended. The caller calls it again, with no other call between.
EMU_API int emu_launch(EmuLaunch* launch) {
  const uint64_t WORTH_HELPERS = 50000;  // ns; waking a thread takes about as long
  uintptr_t kernel = reinterpret_cast<uintptr_t>(launch->kernel);
  const Checker& c = checker;
  if (kernel < c.module_start || kernel >= c.module_end) dl_iterate_phdr(find_module, &kernel);
  const uint64_t started = now();
  Job job{};
  job.launch = launch;
  job.count = launch->grid[0] * launch->grid[1] * launch->grid[2];
  job.next = launch->next_block;
  job.deadline = started + launch->slice_ms * 1000000ull;
  if (launch->flags & CHECK && !checker_begin_launch(launch)) {
    launch->error = EmuError{};
    snprintf(launch->error.text, sizeof launch->error.text, "out of memory for the checker");
      return FAILED;
  }
  {
    CrashHandlers handlers;
    const unsigned helpers = launch->os_threads > 1 ? launch->os_threads - 1 : 0;
    bool more = run_blocks(&job, helpers ? started + WORTH_HELPERS : ~0ull);
    const unsigned done = job.next;
    if (more && helpers && now() < job.deadline && done < job.count) the_pool()->run(&job, std::min(helpers, job.count - done));
  }
  launch->next_block = std::min<unsigned>(job.next, job.count);
  int result = job.failed ? FAILED : launch->next_block < job.count ? UNFINISHED : FINISHED;
  if (result == FINISHED) {
    // In every mode: a write into the padding behind a buffer faults nowhere, but changes the canary.
    for (unsigned i = 0; i < launch->slot_count && result == FINISHED; ++i) {
      if (launch->kernel->parameters[i] != 'p') continue;
      const Allocation* a = find_allocation(launch->slots[i]);
      if (!a || canary_intact(*a)) continue;
      launch->error = EmuError{};
      launch->error.buffer = reinterpret_cast<uint64_t>(a->p);
      snprintf(launch->error.text, sizeof launch->error.text,
               "out of bounds: something was written just outside {buffer}, which has %zu bytes", a->bytes);
      launch->error.thread = ~0u;
      result = FAILED;
    }
  }
  if (launch->flags & CHECK && result != UNFINISHED) checker_end_launch(result == FINISHED);
  return result;
}

// ---- ranks ----------------------------------------------------------------
// For processes that share memory. Each has a flag, and sets it to the number of its collectives; others then see what it wrote before.
EMU_API void emu_signal(uint32_t* flag, uint32_t count) { __atomic_store_n(flag, count, __ATOMIC_RELEASE); }
// Waits until every flag has reached `count`. Flags lie `stride` words apart. Returns 0 after `ms` milliseconds. Counts may wrap around.
EMU_API int emu_wait(const uint32_t* flags, unsigned flag_count, unsigned stride, uint32_t count, unsigned ms) {
  const uint64_t SPIN = 50000, started = now(), stop = started + ms * 1000000ull;  // ns
  for (unsigned i = 0; i < flag_count;) {
    if (static_cast<int32_t>(__atomic_load_n(flags + i * stride, __ATOMIC_ACQUIRE) - count) >= 0) {
      ++i;
      continue;
    }
    const uint64_t time = now();
    if (time >= stop) return 0;
    if (time - started < SPIN)
      sched_yield();
    else
      usleep(50);  // other processes need the processors
  }
  return 1;
}
