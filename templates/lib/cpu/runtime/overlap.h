// The checker's rules for launches that overlap. A launch may begin once every block of the previous one has called
// griddepcontrol_launch_dependents or has ended. A thread may use all that earlier launches wrote once it has called griddepcontrol_wait,
// or is ordered after a thread of its block that has: PTX makes the memory of prerequisite grids visible "to the current grid".
//
// Before that, a thread may use two things.
// - What had ended when the launch could begin at the earliest. Each launch waits for the previous one. So once a block of launch n has
//   waited, all launches before n have ended. If n calls griddepcontrol_launch_dependents only after its wait, n + 1 begins after that.
// - What a thread of launch n wrote before a __threadfence, if the thread that lets n + 1 begin is ordered after that fence. No manual
//   promises this. Hardware does it, because n + 1 begins as a consequence of what follows the fence.
#pragma once

static const EmuKernel* kernel_at(uint32_t tick) {
  const EmuKernel* found = nullptr;
  for (const PastLaunch& launch : checker.past)
    if (launch.tick <= tick) found = launch.kernel;
  return found;
}
static bool was_handed_over(const Cell& cell) {
  for (const HandedOver& block : checker.handed_over)
    if (block.first <= cell.write_tick && cell.write_tick < block.end) return cell.write_tick < block.before[cell.writer];
  return false;
}
static bool may_still_run(uint32_t tick) { return tick >= checker.settled && tick < checker.launch_tick; }

static void check_early_cell(Worker* w, const Access& a, const Cell& cell, uint64_t buffer) {
  if (may_still_run(cell.write_tick) && (a.write || !was_handed_over(cell)))
    fail(w, {a.lane, a.where, cell.write_where, buffer, kernel_at(cell.write_tick)},
         "too early: %u-byte %s of {buffer}, which {earlier} before it writes ({other}); this thread has not waited for that", a.bytes,
         a.kind());
  if (a.write && may_still_run(cell.read_tick))
    fail(w, {a.lane, a.where, cell.read_where, buffer, kernel_at(cell.read_tick)},
         "too early: %u-byte %s of {buffer}, which {earlier} before it reads ({other}); this thread has not waited for that", a.bytes,
         a.kind());
}
// Fails unless the plan says that the kernel uses this buffer before griddepcontrol_wait, through one of its parameters.
static void check_early_use(Worker* w, const Access& a, const Allocation* buffer) {
  EmuLaunch* launch = w->launch;
  uint64_t by = 0;  // a bit for each parameter that points into the buffer
  for (unsigned i = 0; i < launch->slot_count && i < 64; ++i)
    if (launch->kernel->parameters[i] == 'p' && launch->slots[i] - reinterpret_cast<uintptr_t>(buffer->p) < buffer->bytes) by |= 1ull << i;
  if (!(by & launch->early))
    fail(w, {a.lane, a.where, 0, reinterpret_cast<uint64_t>(buffer->p)},
         "too early: %u-byte %s of {buffer} before this thread has waited for the previous kernel; the plan does not say so", a.bytes,
         a.kind());
  launch->used_early |= by & launch->early;
}

static void checker_end_launch(bool finished) {
  Checker& c = checker;
  if (!finished) c.settled = next_tick();
  if (finished && c.late) c.settled = c.launch_tick;
}
static void check_block_ended(Worker* w, const Lane* last) {
  Checker& c = checker;
  if (!w->waited) fail(w, {last}, "unordered: the block has ended, and none of its threads has waited for the previous kernel");
  if (!c.handed_over.empty() && c.handed_over.back().first == w->block_tick) c.handed_over.back().end = next_tick();
}

// The host has waited for the device, or has copied something: all launches so far have ended.
EMU_API void emu_settle() { checker.settled = next_tick(); }
EMU_API void emu_griddepcontrol_wait() {
  Worker* w = current();
  w->waited = current_lane(w)->waited = true;
}
EMU_API void emu_griddepcontrol_launch_dependents() {
  Worker* w = current();
  Lane* me = current_lane(w);
  Checker& c = checker;
  c.late = c.late && me->waited;
  if (w->allowed) return;
  w->allowed = true;
  HandedOver block{w->block_tick, ~0u, {}};
  for (unsigned t = 0; t < w->threads; ++t) {
    const uint32_t fence = w->lanes[t].fence_tick;
    if (!fence || order(w, me, fence, t) != Order::ordered) continue;
    block.before.resize(w->threads);
    block.before[t] = fence;
  }
  if (!block.before.empty()) c.handed_over.push_back(block);
}
