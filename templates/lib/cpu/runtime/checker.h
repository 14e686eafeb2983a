// The checker: called before every access that a kernel makes (see hooks.h), it knows what every byte of device and shared memory
// last saw, and finds accesses that hardware may order either way. Exact for the accesses that happened, whatever their order.
//
// Time is a counter of synchronisations. A byte's history holds the tick of each access; two accesses are ordered when a tick
// lies between that both threads passed: the block's barrier, a __syncwarp of both, the end of a launch, or, between blocks, an
// atomic after a fence on one side and an atomic on the same address on the other.
#pragma once
#include <algorithm>
#include "copies.h"

struct Checker {
  uint32_t tick = 1;
  uint32_t launch_tick = 1;
  uint32_t blocks_started = 0;
  std::vector<uint32_t> block_ticks;  // of this launch, in the order in which its blocks ran: one after another
  // blocks whose earlier writes the running block may read, and, by address of an atomic, what its users have released
  std::vector<bool> seen;
  std::map<uintptr_t, std::vector<bool>> released;
  Cell* shared = nullptr;  // one a byte of the arena
  // the kernel's library, its static data included
  uintptr_t module_start = 0, module_end = 0;
  Allocation* recent = nullptr;
};
static Checker& checker = *new Checker;
static uint32_t next_tick() { return ++checker.tick; }

static void checker_begin_launch(bool first_slice) {
  Checker& c = checker;
  c.recent = nullptr;
  if (!first_slice) return;
  if (c.tick > 0xf0000000u) {  // ticks are about to wrap: forget the past, which is all ordered before this launch
    for (auto& entry : allocations.by_end)
      if (Cell* cells = entry.second.cells) madvise(cells, entry.second.bytes * sizeof(Cell), MADV_DONTNEED);
    if (c.shared) madvise(c.shared, ARENA * sizeof(Cell), MADV_DONTNEED);
    c.tick = 0;
  }
  c.launch_tick = next_tick();
  c.block_ticks.clear();
  c.released.clear();
  if (!c.shared) c.shared = reinterpret_cast<Cell*>(map_pages(ARENA * sizeof(Cell), PROT_READ | PROT_WRITE));
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
  }
}

// ---- order ----------------------------------------------------------------
enum class Order { ordered, same_block, other_block };
// how an earlier access, by thread `thread` of some block at `tick`, stands to one by `lane` now
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

__attribute__((noinline, noreturn)) static void fail_race(Worker* w, const Access& a, const char* memory, uint64_t buffer, Order how,
                                                          const char* earlier, unsigned thread, Where other) {
  fail(w, {a.lane, a.where, other, buffer}, "race: %u-byte %s of %s after a %s by thread %u of %s ({other}), with nothing between to order them",
       a.bytes, a.kind(), memory, earlier, thread, how == Order::other_block ? "another block" : "this block");
}

static inline void check_cell(Worker* w, const Access& a, Cell& cell, const char* memory, uint64_t buffer) {
  const bool both_atomic = a.is_atomic && cell.state == ATOMIC;
  if (cell.write_tick && !both_atomic) {
    const Order how = order(w, a.lane, cell.write_tick, cell.writer);
    if (how != Order::ordered) fail_race(w, a, memory, buffer, how, cell.state == ATOMIC ? "atomic" : "write", cell.writer, cell.write_where);
  }
  if (!a.write) {
    if (cell.read_tick && cell.reader != a.lane->linear) {
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
    if (!r.tick) continue;
    const Order how = order(w, a.lane, r.tick, r.thread);
    if (how != Order::ordered) fail_race(w, a, memory, buffer, how, "read", r.thread, cell.read_where);
  }
  cell.write_tick = checker.tick;
  cell.writer = static_cast<uint16_t>(a.lane->linear);
  cell.write_where = a.where;
  cell.state = a.is_atomic ? ATOMIC : PLAIN;
}

// ---- the two memories -----------------------------------------------------
static void check_shared(Worker* w, const Access& a) {
  const size_t offset = a.p - reinterpret_cast<uintptr_t>(w->arena);
  const Blame blame{a.lane, a.where};
  const bool dynamic = offset >= DYNAMIC_START;
  bool inside = dynamic && offset + a.bytes <= DYNAMIC_START + w->launch->shared_bytes;
  if (!dynamic)
    for (const SharedArray& s : w->arrays) {
      const uintptr_t start = reinterpret_cast<uintptr_t>(s.p);
      inside = inside || (a.p >= start && a.p + a.bytes <= start + s.bytes);
    }
  if (!inside && dynamic)
    fail(w, blame, "out of bounds: %u-byte %s at byte %zu of %u bytes of dynamic shared memory", a.bytes, a.kind(),
         offset - DYNAMIC_START, w->launch->shared_bytes);
  if (!inside) fail(w, blame, "out of bounds: %u-byte %s outside every shared array", a.bytes, a.kind());
  for (unsigned i = 0; i < a.bytes; ++i) {
    Cell& cell = checker.shared[offset + i];
    const bool written = cell.write_tick >= w->block_tick;
    if (!written) cell = Cell{0, cell.read_tick, cell.read2_tick, 0, 0, cell.read_where, 0, cell.reader, cell.reader2, PLAIN, 0};
    if (cell.read_tick < w->block_tick) cell.read_tick = cell.read2_tick = 0;
    if (written && cell.state == IN_FLIGHT)
      fail(w, {a.lane, a.where, cell.write_where}, "unwaited copy: %u-byte %s of shared memory that a cp_async_16 of thread %u ({other}) is still to fill",
           a.bytes, a.kind(), cell.writer);
    if (!written && (!a.write || a.is_atomic))
      fail(w, blame, "uninitialised: %u-byte %s of %s shared memory that nobody has written (byte %zu)", a.bytes, a.kind(),
           dynamic ? "dynamic" : "static", dynamic ? offset - DYNAMIC_START + i : i);
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
      if (!near) fail(w, {a.lane, a.where}, "out of bounds: %u-byte %s at %p, which is no memory of this device", a.bytes, a.kind(), reinterpret_cast<void*>(a.p));
      fail(w, {a.lane, a.where, 0, reinterpret_cast<uint64_t>(near->p)}, "out of bounds: %u-byte %s at byte %td of {buffer}, which has %zu",
           a.bytes, a.kind(), static_cast<ptrdiff_t>(a.p - reinterpret_cast<uintptr_t>(near->p)), near->bytes);
    }
    c.recent = buffer;
  }
  const size_t offset = a.p - reinterpret_cast<uintptr_t>(buffer->p);
  const uint64_t name = reinterpret_cast<uint64_t>(buffer->p);
  const Blame blame{a.lane, a.where, 0, name};
  if (offset + a.bytes > buffer->bytes)
    fail(w, blame, "out of bounds: %u-byte %s at byte %zu of {buffer}, which has %zu", a.bytes, a.kind(), offset, buffer->bytes);
  if (!has_shadow(buffer)) return;
  for (unsigned i = 0; i < a.bytes; ++i) {
    if ((!a.write || a.is_atomic) && !buffer->written[offset + i])
      fail(w, blame, "uninitialised: %u-byte %s of byte %zu of {buffer}, which neither the host nor a kernel has written", a.bytes, a.kind(), offset + i);
    check_cell(w, a, buffer->cells[offset + i], "{buffer}", name);
  }
  if (!a.write) return;
  memset(buffer->written + offset, 1, a.bytes);
  a.lane->fenced = a.lane->fenced && a.is_atomic;
}

static void check(Worker* w, const Access& a) {
  const uintptr_t stacks = reinterpret_cast<uintptr_t>(w->stacks);
  if (a.p - stacks < w->stack_count * STACK) return;                            // a thread's own variables
  if (a.p - reinterpret_cast<uintptr_t>(w) < sizeof(Worker)) return;            // threadIdx and friends
  if (a.p == reinterpret_cast<uintptr_t>(&emu_context)) return;
  if (a.p - reinterpret_cast<uintptr_t>(w->launch->slots) < 8 * w->launch->slot_count) return;
  if (a.bytes <= 16 && (a.bytes & (a.bytes - 1)) == 0 && (a.p & (a.bytes - 1)))
    fail(w, {a.lane, a.where}, "misaligned: %u-byte %s at an address that is %u more than a multiple of %u", a.bytes, a.kind(),
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
static inline Cell* shared_cells(Worker* w, const void* p) { return checker.shared + (static_cast<const char*>(p) - w->arena); }
static void check_copy_started(Worker* w, Lane* lane, const Copy& copy) {
  if (static_cast<size_t>(static_cast<char*>(copy.dst) - w->arena) >= ARENA)
    fail(w, {lane, at_line(copy.line)}, "cp_async_16: the destination is not in shared memory");
  for (unsigned i = 0; i < 16; ++i) shared_cells(w, copy.dst)[i].state = IN_FLIGHT;
}
// What was copied becomes a write by the waiting thread, now: others need a barrier after it.
static void check_copy_finished(Worker* w, Lane* lane, const Copy& copy) {
  for (unsigned i = 0; i < 16; ++i) {
    Cell& cell = shared_cells(w, copy.dst)[i];
    cell.state = PLAIN;
    cell.write_tick = checker.tick;
    cell.writer = static_cast<uint16_t>(lane->linear);
    cell.write_where = at_line(copy.line);
  }
}

static void merge(std::vector<bool>& into, const std::vector<bool>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i)
    if (from[i]) into[i] = true;
}
// An atomic on device memory passes on what is known: after a fence, that this block's writes so far may be read.
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
