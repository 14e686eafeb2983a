// The checker is called before every access of a kernel (hooks.h). It keeps the last accesses of every piece of device and shared memory,
// and reports accesses that hardware may perform in either order. Its reports do not depend on the order in which threads happened to run.
//
// Launches may overlap (overlap.h): for a thread that has not waited, what earlier launches did may not have happened yet.
//
// Time is a counter of synchronisations, in ticks. A piece's history holds the tick of each access. Two accesses are ordered if between
// them both threads passed a __syncthreads, a __syncwarp of both, or the end of a launch. Threads of two blocks are ordered by an atomic
// after a fence in one block and an atomic on the same address in the other. An mbarrier or a barrier of warps orders threads that wait
// behind threads that have arrived: it holds, for every thread, the tick up to which that thread's accesses are ordered.
#pragma once
#include <algorithm>
#include "copies.h"

struct PastLaunch {
  uint32_t tick;
  const EmuKernel* kernel;
};
// What later launches may read of a block, because it happened before the block let them begin: each thread's writes before a tick.
struct HandedOver {
  uint32_t first, end;  // the block's ticks
  std::vector<uint32_t> before;
};

struct Checker {
  uint32_t tick = 1;
  uint32_t launch_tick = 1;
  // Everything before this tick had ended when hardware could begin this launch at the earliest.
  uint32_t settled = 0;
  bool late = true;  // no thread of this launch has let the next one begin before the end of the previous one
  std::vector<PastLaunch> past;   // launches since `settled`, this one last
  std::vector<HandedOver> handed_over;  // since `settled`, in order
  std::vector<uint32_t> block_ticks;  // first ticks of this launch's blocks, which run one after another
  // blocks whose earlier writes the running block may read; for each atomic's address, blocks whose writes its users may read
  std::vector<bool> seen;
  std::map<uintptr_t, std::vector<bool>> released;
  Shadow shared;                                     // of the arena; the checker runs with one worker
  std::map<const EmuKernel*, size_t> shared_pieces;  // size of `shared`'s pieces at the end of a kernel's last launch
  // addresses of the kernel's library, its static data included
  uintptr_t module_start = 0, module_end = 0;
  Allocation* recent = nullptr;
};
static Checker& checker = *new Checker;
static uint32_t next_tick() { return ++checker.tick; }

static bool checker_begin_launch(const EmuLaunch* launch) {  // false: out of memory
  const EmuKernel* kernel = launch->kernel;
  Checker& c = checker;
  c.recent = nullptr;
  if (launch->next_block != 0) return true;
  if (c.tick > 0xf0000000u) {  // Ticks are about to wrap. All accesses so far are ordered before this launch, so their history is not needed.
    for (auto& entry : allocations) entry.second.shadow.forget();
    c.shared.forget();
    c.tick = c.settled = 0;
  }
  if (!(launch->flags & OVERLAPS)) c.settled = next_tick();
  c.launch_tick = next_tick();
  c.late = true;
  while (!c.past.empty() && c.past.front().tick < c.settled) c.past.erase(c.past.begin());
  while (!c.handed_over.empty() && c.handed_over.front().end <= c.settled) c.handed_over.erase(c.handed_over.begin());
  c.past.push_back({c.launch_tick, kernel});
  c.block_ticks.clear();
  c.released.clear();
  const auto known = c.shared_pieces.find(kernel);
  const size_t piece = known == c.shared_pieces.end() ? 16 : known->second;
  if (c.shared.cells && c.shared.piece == piece) return true;
  c.shared.drop();
  c.shared.piece = piece;
  return c.shared.make(ARENA);
}
static void checker_begin_block(Worker* w) {
  Checker& c = checker;
  const uint32_t tick = next_tick();
  w->block_tick = w->barrier_tick = tick;
  c.block_ticks.push_back(tick);
  c.seen.assign(c.block_ticks.size(), false);
  for (unsigned t = 0; t < w->threads; ++t) {
    w->lanes[t].sync_tick = tick;
    w->lanes[t].fenced = false;
    w->lanes[t].wgmma_fence_tick = 0;
    w->lanes[t].fence_tick = 0;
    w->lanes[t].waited = !(w->launch->flags & OVERLAPS);
    w->lanes[t].known.clear();
  }
  w->handovers.clear();
  w->waited = !(w->launch->flags & OVERLAPS);
  w->allowed = false;
}

// ---- order ----------------------------------------------------------------
enum class Order { ordered, same_block, other_block };
// Whether an earlier access, by thread `thread` of some block at `tick`, is ordered before an access by `lane` now.
static inline Order order(Worker* w, const Lane* lane, uint32_t tick, unsigned thread) {
  const Checker& c = checker;
  if (tick < c.launch_tick) return Order::ordered;
  if (tick < w->block_tick) {
    const size_t block = std::upper_bound(c.block_ticks.begin(), c.block_ticks.end(), tick) - c.block_ticks.begin() - 1;
    return c.seen[block] ? Order::ordered : Order::other_block;
  }
  if (thread == lane->linear || tick < w->barrier_tick) return Order::ordered;
  const bool same_warp = thread / 32 == lane->linear / 32;
  if (same_warp && tick < lane->sync_tick && tick < w->lanes[thread].sync_tick) return Order::ordered;
  if (!lane->known.empty() && tick < lane->known[thread]) return Order::ordered;
  return Order::same_block;
}

struct Access {
  Lane* lane;
  uintptr_t p;
  unsigned bytes;
  bool write, is_atomic;
  Where where;
  const char* kind() const { return is_atomic ? "atomic" : write ? "write" : "read"; }
};

__attribute__((noinline, noreturn)) static void fail_race(Worker* w, const Access& a, const char* memory, uint64_t buffer,
                                                          Order how, const char* earlier, unsigned thread, Where other) {
  fail(w, {a.lane, a.where, other, buffer},
       "race: %u-byte %s of %s after a %s by thread %u of %s ({other}), with nothing between to order them", a.bytes, a.kind(),
       memory, earlier, thread, how == Order::other_block ? "another block" : "this block");
}

static inline void check_cell(Worker* w, const Access& a, Cell& cell, const char* memory, uint64_t buffer) {
  const bool both_atomic = a.is_atomic && cell.state == ATOMIC;
  if (cell.write_tick >= checker.launch_tick && !both_atomic) {
    const Order how = order(w, a.lane, cell.write_tick, cell.writer);
    if (how != Order::ordered)
      fail_race(w, a, memory, buffer, how, cell.state == ATOMIC ? "atomic" : "write", cell.writer, cell.write_where);
  }
  if (!a.write) {
    if (cell.read_tick >= checker.launch_tick && cell.reader != a.lane->linear) {
      cell.read2_tick = cell.read_tick;
      cell.reader2 = cell.reader;
    }
    if (cell.read_tick && cell.read_tick < w->block_tick) cell.other_block_tick = cell.read_tick;
    cell.read_tick = checker.tick;
    cell.reader = static_cast<uint16_t>(a.lane->linear);
    cell.read_where = a.where;
    return;
  }
  const struct {
    uint32_t tick;
    uint16_t thread;
  } readers[] = {{cell.read_tick, cell.reader}, {cell.read2_tick, cell.reader2}, {cell.other_block_tick, cell.reader}};
  for (const auto& r : readers) {
    if (r.tick < checker.launch_tick) continue;
    const Order how = order(w, a.lane, r.tick, r.thread);
    if (how != Order::ordered) fail_race(w, a, memory, buffer, how, "read", r.thread, cell.read_where);
  }
  cell.write_tick = checker.tick;
  cell.writer = static_cast<uint16_t>(a.lane->linear);
  cell.write_where = a.where;
  cell.state = a.is_atomic ? ATOMIC : PLAIN;
}

#include "overlap.h"

// ---- the two memories -----------------------------------------------------
static void check_shared(Worker* w, const Access& a) {
  const size_t offset = a.p - reinterpret_cast<uintptr_t>(w->arena);
  const Blame blame{a.lane, a.where};
  const bool dynamic = offset >= DYNAMIC_START;
  size_t start = DYNAMIC_START;  // where the array that is accessed begins
  bool inside = dynamic && offset + a.bytes <= DYNAMIC_START + w->launch->shared_bytes;
  if (!dynamic)
    for (const SharedArray& s : w->arrays) {
      const size_t array = static_cast<size_t>(s.p - w->arena);
      if (offset < array || offset + a.bytes > array + s.bytes) continue;
      inside = true;
      start = array;
    }
  if (!inside && dynamic)
    fail(w, blame, "out of bounds: %u-byte %s at byte %zu of %u bytes of dynamic shared memory", a.bytes, a.kind(),
         offset - DYNAMIC_START, w->launch->shared_bytes);
  if (!inside) fail(w, blame, "out of bounds: %u-byte %s outside every shared array", a.bytes, a.kind());
  Shadow& shadow = checker.shared;
  if (const size_t piece = Shadow::pieces_for(offset, a.bytes); piece < shadow.piece) {
    if (!shadow.cut(piece, w->block_tick)) fail(w, blame, "out of memory for the checker");
    checker.shared_pieces[w->launch->kernel] = piece;
  }
  for (size_t at = offset; at < offset + a.bytes; at += shadow.piece) {
    Cell& cell = shadow.cells[at / shadow.piece];
    const bool written = cell.write_tick >= w->block_tick;
    if (!written) {  // other blocks' accesses to these addresses do not matter
      cell.write_tick = 0;
      cell.state = PLAIN;
      if (cell.read_tick < w->block_tick) cell.read_tick = cell.read2_tick = cell.other_block_tick = 0;
    }
    if (written && cell.state == IN_FLIGHT)
      fail(w, {a.lane, a.where, cell.write_where},
           "unwaited copy: %u-byte %s of shared memory that a copy of thread %u ({other}) is still to fill", a.bytes,
           a.kind(), cell.writer);
    if (!written && (!a.write || a.is_atomic))
      fail(w, blame, "uninitialised: %u-byte %s of %s shared memory that nobody has written (byte %zu)", a.bytes, a.kind(),
           dynamic ? "dynamic" : "static", at - start);
    check_cell(w, a, cell, "shared memory", 0);
  }
}

static void check_device(Worker* w, const Access& a) {
  Checker& c = checker;
  Allocation* buffer = c.recent;
  if (!buffer || a.p < reinterpret_cast<uintptr_t>(buffer->p) || a.p >= reinterpret_cast<uintptr_t>(buffer->p) + buffer->bytes) {
    buffer = find_allocation(a.p);
    if (!buffer) {
      if (a.p >= c.module_start && a.p < c.module_end) return;  // the kernel's constants
      Allocation* near = nearest_allocation(a.p);
      if (!near)
        fail(w, {a.lane, a.where}, "out of bounds: %u-byte %s at %p, which is no memory of this device", a.bytes, a.kind(),
             reinterpret_cast<void*>(a.p));
      fail(w, {a.lane, a.where, 0, reinterpret_cast<uint64_t>(near->p)},
           "out of bounds: %u-byte %s at byte %td of {buffer}, which has %zu", a.bytes, a.kind(),
           static_cast<ptrdiff_t>(a.p - reinterpret_cast<uintptr_t>(near->p)), near->bytes);
    }
    c.recent = buffer;
  }
  const size_t offset = a.p - reinterpret_cast<uintptr_t>(buffer->p);
  const uint64_t name = reinterpret_cast<uint64_t>(buffer->p);
  const Blame blame{a.lane, a.where, 0, name};
  if (offset + a.bytes > buffer->bytes)
    fail(w, blame, "out of bounds: %u-byte %s at byte %zu of {buffer}, which has %zu", a.bytes, a.kind(), offset, buffer->bytes);
  if (!watched(buffer)) return;
  if (!a.write || a.is_atomic)
    if (const void* blank = memchr(buffer->written + offset, 0, a.bytes))
      fail(w, blame, "uninitialised: %u-byte %s of byte %td of {buffer}, which neither the host nor a kernel has written",
           a.bytes, a.kind(), static_cast<const unsigned char*>(blank) - buffer->written);
  Shadow& shadow = buffer->shadow;
  if (const size_t piece = Shadow::pieces_for(offset, a.bytes); piece < shadow.piece && !shadow.cut(piece, c.settled))
    fail(w, blame, "out of memory for the checker");
  if (!a.lane->waited) {
    for (size_t at = offset; at < offset + a.bytes; at += shadow.piece) check_early_cell(w, a, shadow.cells[at / shadow.piece], name);
    check_early_use(w, a, buffer);
  }
  for (size_t at = offset; at < offset + a.bytes; at += shadow.piece)
    check_cell(w, a, shadow.cells[at / shadow.piece], "{buffer}", name);
  if (!a.write) return;
  memset(buffer->written + offset, 1, a.bytes);
  a.lane->fenced = a.lane->fenced && a.is_atomic;
}

static void check(Worker* w, const Access& a) {
  const uintptr_t stacks = reinterpret_cast<uintptr_t>(w->stacks);
  if (a.p - stacks < w->stack_count * STACK) return;                  // a thread's own variables
  if (a.p - reinterpret_cast<uintptr_t>(w) < sizeof(Worker)) return;  // threadIdx, blockIdx and others
  if (a.p == reinterpret_cast<uintptr_t>(&emu_context)) return;
  if (a.p - reinterpret_cast<uintptr_t>(w->launch->slots) < 8 * w->launch->slot_count) return;
  if (a.bytes <= 16 && (a.bytes & (a.bytes - 1)) == 0 && (a.p & (a.bytes - 1)))
    fail(w, {a.lane, a.where}, "misaligned: access at an address that is %u more than a multiple of %u",
         static_cast<unsigned>(a.p & (a.bytes - 1)), a.bytes);
  if (a.p - reinterpret_cast<uintptr_t>(w->arena) < ARENA)
    check_shared(w, a);
  else
    check_device(w, a);
}

static void check_access(Worker* w, Lane* lane, uintptr_t p, unsigned bytes, bool write, Where where) {
  check(w, {lane, p, bytes, write, false, where});
}
EMU_API void emu_touch(const void* p, unsigned bytes, bool write, unsigned index, int line) {
  Worker* w = current();
  check_access(w, warp_of(current_lane(w))->lanes[index], reinterpret_cast<uintptr_t>(p), bytes, write, at_line(line));
}

// ---- copies and atomics ---------------------------------------------------
template <class Update>
static void for_cells(Worker* w, const Copy& copy, Update update) {
  Shadow& shadow = checker.shared;
  const size_t offset = static_cast<size_t>(static_cast<char*>(copy.dst) - w->arena);
  for (size_t at = offset; at < offset + 16; at += shadow.piece) update(shadow.cells[at / shadow.piece]);
}
static void check_copy_started(Worker* w, Lane* lane, const Copy& copy) {
  if (static_cast<size_t>(static_cast<char*>(copy.dst) - w->arena) >= ARENA)
    fail(w, {lane, at_line(copy.line)}, "cp_async_16: the destination is not in shared memory");
  for_cells(w, copy, [](Cell& cell) { cell.state = IN_FLIGHT; });
}
// A finished copy counts as a write by the thread that waited, at this time: other threads need a barrier after it.
static void check_copy_finished(Worker* w, Lane* lane, const Copy& copy) {
  for_cells(w, copy, [&](Cell& cell) {
    cell.state = PLAIN;
    cell.write_tick = checker.tick;
    cell.writer = static_cast<uint16_t>(lane->linear);
    cell.write_where = at_line(copy.line);
  });
}

// While a bulk copy runs, it is an access of the thread that started it. Then it is a write that is ordered only before threads that wait
// for its barrier.
static void check_bulk_copy_started(Worker* w, const BulkCopy& copy) {
  const Where where = at_line(copy.line);
  const Handover& handover = w->handovers[copy.barrier];
  if (w->lanes[handover.maker].wgmma_fence_tick <= handover.made_tick)
    fail(w, {copy.lane, where}, "unfenced: cp_async_bulk with an mbarrier after whose initialisation there was no fence_proxy_async");
  for (unsigned at = 0; at < copy.bytes; at += 16) {
    check_access(w, copy.lane, reinterpret_cast<uintptr_t>(copy.src) + at, 16, false, where);
    check_access(w, copy.lane, reinterpret_cast<uintptr_t>(copy.dst) + at, 16, true, where);
    check_copy_started(w, copy.lane, {copy.dst + at, copy.src + at, copy.line});
  }
}
static void check_bulk_copy_finished(Worker* w, const BulkCopy& copy) {
  for (unsigned at = 0; at < copy.bytes; at += 16) {
    const Copy part{copy.dst + at, copy.src + at, copy.line};
    check_copy_finished(w, copy.lane, part);
    for_cells(w, part, [](Cell& cell) { cell.state = BULK; });
  }
  std::vector<uint32_t>& arriving = w->handovers[copy.barrier].arriving;
  arriving.resize(w->threads);
  arriving[copy.lane->linear] = next_tick();
}

// ---- mbarriers, barriers of warps and wgmma -------------------------------
static void know(Worker* w, std::vector<uint32_t>& into, const std::vector<uint32_t>& from) {
  into.resize(w->threads);
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}
static void check_mbarrier(Worker* w, Lane* lane, const uint64_t* barrier, bool init, Where where) {
  check(w, {lane, reinterpret_cast<uintptr_t>(barrier), 8, true, !init, where});
}
static void check_mbarrier_made(Worker* w, const Lane* lane, const uint64_t* barrier) {
  Handover& handover = w->handovers[barrier];
  handover.maker = lane->linear;
  handover.made_tick = next_tick();
}
// After a __syncwarp, each lane is ordered after all that any of its lanes is ordered after.
static void check_warp_synced(Warp* warp, unsigned mask) {
  Worker* w = current();
  bool waited = false;
  for (unsigned m = mask; m; m &= m - 1) waited = waited || warp->lanes[__builtin_ctz(m)]->waited;
  for (unsigned m = mask; m; m &= m - 1) warp->lanes[__builtin_ctz(m)]->waited = waited;
  std::vector<uint32_t> all;
  for (unsigned m = mask; m; m &= m - 1) {
    const Lane* lane = warp->lanes[__builtin_ctz(m)];
    if (!lane->known.empty()) know(w, all, lane->known);
  }
  if (all.empty()) return;
  for (unsigned m = mask; m; m &= m - 1) all[warp->lanes[__builtin_ctz(m)]->linear] = checker.tick;
  for (unsigned m = mask; m; m &= m - 1) warp->lanes[__builtin_ctz(m)]->known = all;
}
static void check_arrived(Worker* w, Lane* lane, const void* event) {
  Handover& handover = w->handovers[event];
  handover.arriving_waited = handover.arriving_waited || lane->waited;
  std::vector<uint32_t>& arriving = handover.arriving;
  know(w, arriving, lane->known);
  for (unsigned t = lane->linear & ~31u; t < w->threads && t <= (lane->linear | 31u); ++t)
    arriving[t] = std::max(arriving[t], std::min(lane->sync_tick, w->lanes[t].sync_tick));
  arriving[lane->linear] = next_tick();
}
static void check_completed(Worker* w, const void* event) {
  Handover& handover = w->handovers[event];
  handover.completed = handover.arriving;
  handover.completed_waited = handover.arriving_waited;
}
static void check_waited(Worker* w, Lane* lane, const void* event) {
  const Handover& handover = w->handovers[event];
  know(w, lane->known, handover.completed);
  lane->waited = lane->waited || handover.completed_waited;
}
static void check_block_synced(Worker* w) {
  w->barrier_tick = next_tick();
  bool waited = false;
  for (unsigned t = 0; t < w->threads; ++t) waited = waited || w->lanes[t].waited;
  for (unsigned t = 0; t < w->threads; ++t) w->lanes[t].waited = waited;
}

static void check_wgmma_read(Worker* w, Lane* lane, const char* p, Where where) {
  check_access(w, lane, reinterpret_cast<uintptr_t>(p), 16, false, where);
  const Shadow& shadow = checker.shared;
  const size_t offset = static_cast<size_t>(p - w->arena);
  for (size_t at = offset; at < offset + 16; at += shadow.piece) {
    const Cell& cell = shadow.cells[at / shadow.piece];
    if (cell.state != BULK && cell.write_tick >= w->lanes[cell.writer].wgmma_fence_tick)
      fail(w, {lane, where, cell.write_where},
           "unfenced: wgmma reads shared memory that thread %u wrote ({other}) with no fence_proxy_async after it", cell.writer);
  }
}

static void merge(std::vector<bool>& into, const std::vector<bool>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i]) into[i] = true;
}
// An atomic on device memory orders blocks: if the thread has called __threadfence, later users of the atomic's address may read what its
// block has written, and what its block may read.
static void check_atomic(Worker* w, Lane* lane, uintptr_t p, unsigned bytes, Where where) {
  check(w, {lane, p, bytes, true, true, where});
  if (p - reinterpret_cast<uintptr_t>(w->arena) < ARENA) return;
  Checker& c = checker;
  std::vector<bool>& known = c.released[p];
  merge(c.seen, known);
  if (!lane->fenced) return;
  merge(known, c.seen);
  if (known.size() < c.block_ticks.size()) known.resize(c.block_ticks.size());
  known[c.block_ticks.size() - 1] = true;
}
