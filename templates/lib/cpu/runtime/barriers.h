// Barriers of some of a block's threads: mbarriers, whose state is their 8 bytes of shared memory, and barriers of warps by number.
#pragma once
#include "copies.h"

// Until somebody calls wake(event). The caller looks again whether what it waits for has come.
static void wait_for_event(Worker* w, Lane* me, const void* event, int line, const char* what) {
  Warp* warp = warp_of(me);
  me->line = line;
  me->what = what;
  me->event = event;
  warp->runnable &= ~(1u << me->index);
  warp->at_event |= 1u << me->index;
  wait_for_others(w, me);
}
static void wake(Worker* w, const void* event) {
  for (unsigned i = 0; i < w->warp_count; ++i) {
    Warp& warp = w->warps[i];
    for (unsigned m = warp.at_event; m; m &= m - 1) {
      const unsigned lane = __builtin_ctz(m);
      if (warp.lanes[lane]->event != event) continue;
      warp.at_event &= ~(1u << lane);
      warp.runnable |= 1u << lane;
    }
    if (warp.runnable) w->ready_warps |= 1u << i;
  }
}
static void complete(Worker* w, const void* event) {
  if (w->launch->flags & CHECK) check_completed(w, event);
  wake(w, event);
}

struct Mbarrier {
  uint16_t mark;  // MBARRIER once it is one; poison is none
  uint16_t phase;
  uint16_t count, arrived;
};
static_assert(sizeof(Mbarrier) == sizeof(uint64_t), "it lives in the kernel's u64");
static const uint16_t MBARRIER = 0xba44;

static Mbarrier* find_mbarrier(Worker* w, Lane* me, uint64_t* barrier, bool init, int line, const char* what) {
  const uintptr_t p = reinterpret_cast<uintptr_t>(barrier);
  if (p - reinterpret_cast<uintptr_t>(w->arena) >= ARENA || p % 8)
    fail(w, {me, at_line(line)}, "%s: the barrier is not in shared memory, at a multiple of 8", what);
  if (w->launch->flags & CHECK) check_mbarrier(w, me, barrier, init, at_line(line));
  Mbarrier* found = reinterpret_cast<Mbarrier*>(barrier);
  if (!init && found->mark != MBARRIER) fail(w, {me, at_line(line)}, "%s: there has been no mbarrier_init", what);
  return found;
}
EMU_API void emu_mbarrier_init(uint64_t* barrier, int count, int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  if (count < 1 || count > static_cast<int>(MAX_THREADS)) fail(w, {me, at_line(line)}, "mbarrier_init: a count of %d", count);
  *find_mbarrier(w, me, barrier, true, line, "mbarrier_init") = {MBARRIER, 0, static_cast<uint16_t>(count), 0};
}
EMU_API void emu_mbarrier_arrive(uint64_t* barrier, int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  Mbarrier* b = find_mbarrier(w, me, barrier, false, line, "mbarrier_arrive");
  if (w->launch->flags & CHECK) check_arrived(w, me, barrier);
  if (++b->arrived < b->count) return;
  b->arrived = 0;
  ++b->phase;
  complete(w, barrier);
}
EMU_API void emu_mbarrier_wait(uint64_t* barrier, int parity, int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  while ((find_mbarrier(w, me, barrier, false, line, "mbarrier_wait")->phase & 1) == (parity & 1))
    wait_for_event(w, me, barrier, line, "mbarrier_wait");
  if (w->launch->flags & CHECK) check_waited(w, me, barrier);
}

EMU_API void emu_barrier_of_warps(int id, int threads, int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  if (id < 1 || id > 15 || threads < 32 || threads % 32)
    fail(w, {me, at_line(line)}, "barrier_of_warps: barrier %d of %d threads; there are 1 to 15, of whole warps", id, threads);
  NamedBarrier& barrier = w->named_barriers[id];
  if (barrier.arrived && barrier.threads != static_cast<unsigned>(threads))
    fail(w, {me, at_line(line)}, "divergence: barrier %d of %d threads, where others wait at one of %u", id, threads, barrier.threads);
  barrier.threads = static_cast<unsigned>(threads);
  if (w->launch->flags & CHECK) check_arrived(w, me, &barrier);
  const unsigned generation = barrier.generation;
  if (++barrier.arrived == barrier.threads) {
    barrier.arrived = 0;
    ++barrier.generation;
    complete(w, &barrier);
  }
  while (barrier.generation == generation) wait_for_event(w, me, &barrier, line, "barrier_of_warps");
  if (w->launch->flags & CHECK) check_waited(w, me, &barrier);
}
