// The order of lanes, __syncthreads, and collectives of warps. A lane runs until it must wait. Then the next lane of the warp runs, or,
// with SHUFFLED, a random one. The last lane to arrive at a collective performs it for all lanes.
#pragma once
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include "state.h"

static void fail(Worker* w, const Blame& blame, const char* format, ...) {
  EmuError& e = w->error;
  va_list args;
  va_start(args, format);
  vsnprintf(e.text, sizeof e.text, format, args);
  va_end(args);
  e.block[0] = w->block.x;
  e.block[1] = w->block.y;
  e.block[2] = w->block.z;
  e.thread = blame.lane->linear;
  e.where = blame.where;
  e.other = blame.other;
  e.buffer = blame.buffer;
  e.earlier = reinterpret_cast<uint64_t>(blame.earlier);
  w->failed = true;
  void* dead;
  emu_switch(&dead, w->launcher_sp);
  abort();  // nobody resumes a failed block
}
EMU_API void emu_fail(const char* what, int line) {
  Worker* w = current();
  fail(w, {current_lane(w), at_line(line)}, "%s", what);
}

// No lane can run: the error lists which lanes wait, and where.
__attribute__((noinline, noreturn)) static void fail_stuck(Worker* w) {
  char text[600];
  int n = 0;
  Lane* culprit = current_lane(w);
  Where where = 0;
  int shown = 0;
  for (unsigned i = 0; i < w->warp_count; ++i) {
    Warp& warp = w->warps[i];
    for (unsigned waiting : {warp.at_collective, warp.at_barrier, warp.at_event}) {
      if (!waiting) continue;
      Lane* first = warp.lanes[__builtin_ctz(waiting)];
      if (!where) {
        culprit = first;
        where = at_line(first->line);
      }
      if (shown++ < 6)
        n += snprintf(text + n, sizeof text - n, "; lanes %08x of warp %u wait at %s (line %d)", waiting, i, first->what,
                      first->line);
    }
    const unsigned width = w->threads - 32 * i;
    const unsigned exited = (width >= 32 ? ~0u : (1u << width) - 1) & ~warp.alive;
    if (exited && shown++ < 6) n += snprintf(text + n, sizeof text - n, "; lanes %08x of warp %u have ended", exited, i);
  }
  fail(w, {culprit, where}, "divergence: no thread can go on%s", text);
}

// ---- choosing -------------------------------------------------------------
static inline unsigned pick(Worker* w, unsigned set, unsigned after) {
  if (w->launch->flags & SHUFFLED) {
    for (unsigned skip = draw(w) % __builtin_popcount(set); skip; --skip) set &= set - 1;
    return __builtin_ctz(set);
  }
  const unsigned above = after < 31 ? set & ~((2u << after) - 1) : 0;
  return __builtin_ctz(above ? above : set);
}
static inline Lane* next_lane(Worker* w, const Lane* me) {  // null: no lane can run
  Warp* warp = warp_of(me);
  const bool leave = (w->launch->flags & SHUFFLED) && (draw(w) & 7) == 0;
  if (warp->runnable && !leave) return warp->lanes[pick(w, warp->runnable, me->index)];
  if (!warp->runnable) w->ready_warps &= ~(1u << warp->index);
  if (!w->ready_warps) return nullptr;
  Warp& other = w->warps[pick(w, w->ready_warps, warp->index)];
  return other.lanes[pick(w, other.runnable, 31)];
}

// ---- fibers ---------------------------------------------------------------
static void fiber_main();
static inline char* stack_top(Worker* w, unsigned stack) {
  // The tops differ in their low bits. Otherwise, the used lines of all stacks would fall into the same cache sets.
  return w->stacks + (stack + 1) * STACK - stack * 7 % 61 * 64;
}
static inline void give_stack(Worker* w, Lane* lane) {
  if (w->free_stacks.empty()) {
    lane->stack = static_cast<unsigned>(w->stacks_used++);
  } else {
    lane->stack = w->free_stacks.back();
    w->free_stacks.pop_back();
  }
  lane->sp = prepare_stack(stack_top(w, lane->stack), fiber_main);
}
static inline void resume(Worker* w, Lane* from, Lane* to) {
  if (from == to) return;
  if (!to->sp) give_stack(w, to);
  w->lane = to;
  emu_switch(&from->sp, to->sp);
}
static inline void wait_for_others(Worker* w, Lane* me) {
  Lane* next = next_lane(w, me);
  if (!next) fail_stuck(w);
  resume(w, me, next);
}

// ---- the block barrier ----------------------------------------------------
static void release_barrier(Worker* w) {
  w->barrier_count = 0;
  if (w->launch->flags & CHECK) check_block_synced(w);
  for (unsigned i = 0; i < w->warp_count; ++i) {
    Warp& warp = w->warps[i];
    warp.runnable |= warp.at_barrier;
    warp.at_barrier = 0;
    if (warp.runnable) w->ready_warps |= 1u << i;
  }
}
EMU_API void emu_sync_block(int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  Warp* warp = warp_of(me);
  if (w->barrier_count && w->barrier_line != line)
    fail(w, {me, at_line(line), at_line(w->barrier_line)},
         "divergence: this thread is at one __syncthreads while others of its block wait at another ({other})");
  if (w->alive != w->threads)
    fail(w, {me, at_line(line)}, "divergence: __syncthreads when %u threads of the block have ended", w->threads - w->alive);
  w->barrier_line = line;
  me->line = line;
  me->what = "__syncthreads";
  const unsigned bit = 1u << me->index;
  warp->runnable &= ~bit;
  warp->at_barrier |= bit;
  if (++w->barrier_count < w->alive) return wait_for_others(w, me);
  release_barrier(w);
  if (w->launch->flags & SHUFFLED) resume(w, me, next_lane(w, me));
}

// ---- warp collectives -----------------------------------------------------
static inline void collective(Worker* w, unsigned mask, EmuWarpStep step, void* operand, int line, const char* what) {
  Lane* me = current_lane(w);
  Warp* warp = warp_of(me);
  const unsigned bit = 1u << me->index;
  if (!(mask & bit)) fail(w, {me, at_line(line)}, "%s: the mask %08x leaves out the calling lane %u", what, mask, me->index);
  me->mask = mask;
  me->line = line;
  me->step = step;
  me->what = what;
  warp->operand[me->index] = operand;
  warp->at_collective |= bit;
  warp->runnable &= ~bit;
  if (mask & ~warp->at_collective) return wait_for_others(w, me);
  for (unsigned m = mask; m; m &= m - 1) {
    const Lane* other = warp->lanes[__builtin_ctz(m)];
    if (other->mask != mask || other->step != step || other->line != line || other->what != what)
      fail(w, {me, at_line(line), at_line(other->line)},
           "divergence: this thread is at %s with mask %08x while thread %u is at %s with mask %08x ({other})", what, mask,
           other->linear, other->what, other->mask);
  }
  if (step) step(warp, mask, line);
  warp->at_collective &= ~mask;
  warp->runnable |= mask;
  if (w->launch->flags & SHUFFLED) resume(w, me, next_lane(w, me));
}
EMU_API void emu_collective(unsigned mask, EmuWarpStep step, void* operand, int line, const char* what) {
  collective(current(), mask, step, operand, line, what);
}

static void sync_step(EmuWarp* base, unsigned mask, int) {  // no other collective orders memory
  Worker* w = current();
  if (!(w->launch->flags & CHECK)) return;
  const uint32_t tick = next_tick();
  for (unsigned m = mask; m; m &= m - 1) static_cast<Warp*>(base)->lanes[__builtin_ctz(m)]->sync_tick = tick;
  check_warp_synced(static_cast<Warp*>(base), mask);
}
EMU_API void emu_sync_warp(unsigned mask, int line) { collective(current(), mask, sync_step, nullptr, line, "__syncwarp"); }

static void shuffle_step(EmuWarp* base, unsigned mask, int line) {
  Warp* warp = static_cast<Warp*>(base);
  if (mask == ~0u) {
    for (int l = 0; l < 32; ++l) warp->received[l] = warp->sent[warp->from[l]];
    return;
  }
  for (unsigned m = mask; m; m &= m - 1) {
    const int l = __builtin_ctz(m), from = warp->from[l];
    if (!(mask >> from & 1u))
      fail(current(), {warp->lanes[l], at_line(line)}, "%s reads lane %d, which is not in the mask %08x", warp->lanes[l]->what,
           from, mask);
    warp->received[l] = warp->sent[from];
  }
}
EMU_API void emu_shuffle(EmuShuffle kind, unsigned mask, uint64_t bits, int operand, int width, int line) {
  static const char* const names[] = {"__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync"};
  Worker* w = current();
  const int lane = static_cast<int>(w->lane->index);
  const int first = lane & ~(width - 1),
            last = lane | (width - 1);  // a lane that reads outside its segment gets its own value
  int from = lane;
  switch (kind) {
    case EMU_FROM_LANE:
      from = first | (operand & (width - 1));
      break;
    case EMU_FROM_XOR:
      from = (lane ^ operand) > last ? lane : lane ^ operand;
      break;
    case EMU_FROM_BELOW:
      from = lane - operand < first ? lane : lane - operand;
      break;
    case EMU_FROM_ABOVE:
      from = lane + operand > last ? lane : lane + operand;
      break;
  }
  Warp* warp = warp_of(current_lane(w));
  warp->sent[lane] = bits;
  warp->from[lane] = from & 31;
  collective(w, mask, shuffle_step, nullptr, line, names[kind]);
}
EMU_API unsigned emu_active_mask() {
  Worker* w = current();
  return warp_of(current_lane(w))->alive;
}
EMU_API void emu_yield() {  // for loops that wait: lets other lanes run
  Worker* w = current();
  Lane* me = current_lane(w);
  const unsigned others = w->ready_warps & ~(1u << warp_of(me)->index);
  Warp* warp = warp_of(me);
  if (others) warp = &w->warps[pick(w, others, warp->index)];
  if (warp->runnable) resume(w, me, warp->lanes[pick(w, warp->runnable, me->index)]);
}
// For loops that wait for another process, which may itself wait for any lane of this block: lets all lanes run in turn, and now and then
// lets other processes run.
EMU_API void emu_pause() {
  static thread_local unsigned calls = 0;
  Worker* w = current();
  Lane* me = current_lane(w);
  if (++calls % 64 == 0) {
    sched_yield();
    if (!w->waiting_since) w->waiting_since = now();
    const uint64_t waited = (now() - w->waiting_since) / 1000000u;
    if (waited > w->launch->patience_ms)
      fail(w, {me}, "this thread has waited for another rank's word for %llu s", static_cast<unsigned long long>(waited / 1000));
  }
  Warp* warp = warp_of(me);
  const unsigned above = me->index < 31 ? warp->runnable & ~((2u << me->index) - 1) : 0;
  if (above) return resume(w, me, warp->lanes[__builtin_ctz(above)]);
  const unsigned next = warp->index < 31 ? w->ready_warps & ~((2u << warp->index) - 1) : 0;
  warp = &w->warps[__builtin_ctz(next ? next : w->ready_warps)];
  Lane* lane = warp->lanes[__builtin_ctz(warp->runnable)];
  if (lane != me) resume(w, me, lane);
}

// ---- a lane's life --------------------------------------------------------
static Lane* end_lane(Worker* w) {  // the lane to run next, or null when the block is done
  Lane* me = current_lane(w);
  Warp* warp = warp_of(me);
  const unsigned bit = 1u << me->index;
  warp->alive &= ~bit;
  warp->runnable &= ~bit;
  --w->alive;
  if ((w->launch->flags & CHECK) && me->copies && !me->copies->copies.empty())
    fail(w, {me, at_line(me->copies->copies.front().line)},
         "unwaited copy: this thread has ended with %zu asynchronous copies that it started and did not wait for",
         me->copies->copies.size());
  if (warp->wgmma.issued)
    fail(w, {me}, "unwaited wgmma: this thread has ended with %u of its warp's that nobody waited for", warp->wgmma.issued);
  if (w->barrier_count)
    fail(w, {me, at_line(w->barrier_line)},
         "divergence: this thread has ended while others of its block wait at this __syncthreads");
  Lane* next = next_lane(w, me);
  if (!next && w->alive) fail_stuck(w);
  if (!next && !w->bulk_copies.empty())
    fail(w, {w->bulk_copies.front().lane, at_line(w->bulk_copies.front().line)},
         "unwaited copy: the block has ended with %zu bulk copies that nobody waited for", w->bulk_copies.size());
  if (!next && (w->launch->flags & CHECK)) check_block_ended(w, me);
  return next;
}
static void fiber_main() {
  Worker* w = current();
  for (;;) {
    w->launch->kernel->call(w->launch->slots);
    Lane* me = current_lane(w);
    Lane* next = end_lane(w);
    if (!next) break;
    if (next->sp) {
      w->free_stacks.push_back(me->stack);  // in use until emu_switch below has left it; no other lane takes it before
      w->lane = next;
      emu_switch(&me->sp, next->sp);
      abort();
    }
    // A lane that has not begun takes over this stack. So a kernel without barriers never switches stacks.
    next->stack = me->stack;
    next->sp = me->sp;  // not null, so the lane counts as begun
    w->lane = next;
  }
  void* dead;
  emu_switch(&dead, w->launcher_sp);
  abort();
}
