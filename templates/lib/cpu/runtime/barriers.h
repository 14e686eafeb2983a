// Barriers of some threads of a block: mbarriers, which keep their state in 8 bytes of shared memory, and numbered barriers of warps. Also
// the bulk copies whose bytes mbarriers count.
#pragma once
#include "copies.h"

// Waits until another lane calls wake(event). The caller then tests again whether it may go on.
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
  uint64_t mark : 16;  // MBARRIER after mbarrier_init; poison differs from it
  uint64_t phase : 1, count : 11, arrived : 11;
  int64_t pending : 25;  // bytes of bulk copies that the phase still waits for
};
static_assert(sizeof(Mbarrier) == sizeof(uint64_t), "it is in the kernel's u64");
static const uint16_t MBARRIER = 0xba44;
static const int MOST_PENDING = (1 << 20) - 1;  // hardware's limit

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
  *find_mbarrier(w, me, barrier, true, line, "mbarrier_init") = {MBARRIER, 0, static_cast<uint64_t>(count), 0, 0};
  if (w->launch->flags & CHECK) check_mbarrier_made(w, me, barrier);
}
// Completes the phase if all arrivals and bytes are there. If only bytes are missing, wakes waiting lanes, which perform the copies
// (emu_mbarrier_wait_parity).
static void try_complete(Worker* w, Mbarrier* b, const uint64_t* barrier) {
  if (b->arrived < b->count) return;
  if (b->pending) return wake(w, barrier);
  b->arrived = 0;
  ++b->phase;
  complete(w, barrier);
}
static void arrive(Worker* w, Lane* me, uint64_t* barrier, int bytes, int line, const char* what) {
  Mbarrier* b = find_mbarrier(w, me, barrier, false, line, what);
  if (w->launch->flags & CHECK) check_arrived(w, me, barrier);
  if (bytes < 0 || b->pending + bytes > MOST_PENDING) fail(w, {me, at_line(line)}, "%s: %d bytes; an mbarrier counts to %d", what, bytes, MOST_PENDING);
  if (b->arrived == b->count) fail(w, {me, at_line(line)}, "%s: the arrivals are all there, and copies that they expect are not", what);
  b->pending += bytes;
  ++b->arrived;
  try_complete(w, b, barrier);
}
EMU_API void emu_mbarrier_arrive(uint64_t* barrier, int line) {
  Worker* w = current();
  arrive(w, current_lane(w), barrier, 0, line, "mbarrier_arrive");
}
EMU_API void emu_mbarrier_arrive_expect_tx(uint64_t* barrier, int bytes, int line) {
  Worker* w = current();
  arrive(w, current_lane(w), barrier, bytes, line, "mbarrier_arrive_expect_tx");
}

// ---- bulk copies ----------------------------------------------------------
static void perform(Worker* w, const BulkCopy& copy) {
  memcpy(copy.dst, copy.src, copy.bytes);
  if (w->launch->flags & CHECK) check_bulk_copy_finished(w, copy);
  Mbarrier* b = reinterpret_cast<Mbarrier*>(copy.barrier);
  b->pending -= copy.bytes;
  try_complete(w, b, copy.barrier);
}
EMU_API void emu_cp_async_bulk(void* dst, const void* src, int bytes, uint64_t* barrier, int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  find_mbarrier(w, me, barrier, false, line, "cp_async_bulk");
  if (bytes < 16 || bytes > MOST_PENDING || ((reinterpret_cast<uintptr_t>(dst) | reinterpret_cast<uintptr_t>(src) | static_cast<unsigned>(bytes)) & 15))
    fail(w, {me, at_line(line)}, "cp_async_bulk: addresses and bytes are multiples of 16, and these are %d bytes", bytes);
  if (reinterpret_cast<uintptr_t>(dst) - reinterpret_cast<uintptr_t>(w->arena) >= ARENA)
    fail(w, {me, at_line(line)}, "cp_async_bulk: the destination is not in shared memory");
  const BulkCopy copy{static_cast<char*>(dst), static_cast<const char*>(src), static_cast<unsigned>(bytes), barrier, me, line};
  if (w->launch->flags & CHECK) check_bulk_copy_started(w, copy);
  if (!(w->launch->flags & LATE_COPIES)) return perform(w, copy);
  memset(dst, POISON, copy.bytes);
  w->bulk_copies.push_back(copy);
  wake(w, barrier);
}
// Performs a copy of the barrier, if only copies are missing for its phase. Called when a lane waits, so copies are as late as possible.
// Returns whether it performed one.
static bool perform_copies_of(Worker* w, const uint64_t* barrier) {
  const Mbarrier* b = reinterpret_cast<const Mbarrier*>(barrier);
  if (b->arrived < b->count) return false;
  for (size_t i = 0; i < w->bulk_copies.size(); ++i) {
    const BulkCopy copy = w->bulk_copies[i];
    if (copy.barrier != barrier) continue;
    w->bulk_copies.erase(w->bulk_copies.begin() + static_cast<ptrdiff_t>(i));
    perform(w, copy);
    return true;
  }
  return false;
}
EMU_API void emu_mbarrier_wait_parity(uint64_t* barrier, int parity, int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  while ((find_mbarrier(w, me, barrier, false, line, "mbarrier_wait_parity")->phase & 1) == (parity & 1))
    if (!perform_copies_of(w, barrier)) wait_for_event(w, me, barrier, line, "mbarrier_wait_parity");
  if (w->launch->flags & CHECK) check_waited(w, me, barrier);
}

EMU_API void emu_barrier_sync(int id, int threads, int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  if (id < 1 || id > 15 || threads < 32 || threads % 32)
    fail(w, {me, at_line(line)}, "barrier_sync: barrier %d of %d threads; there are 1 to 15, of whole warps", id, threads);
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
  while (barrier.generation == generation) wait_for_event(w, me, &barrier, line, "barrier_sync");
  if (w->launch->flags & CHECK) check_waited(w, me, &barrier);
}
