// cp.async and atomics. Without LATE_COPIES, a copy is performed at once. With it, a copy is performed when its thread waits for it, and
// its destination holds poison until then. So a missing wait makes results wrong, and the checker reports it.
#pragma once
#include "memory.h"

static inline void perform(const Copy& copy) {
  if (copy.src)
    memcpy(copy.dst, copy.src, 16);
  else
    memset(copy.dst, 0, 16);
}
EMU_API void emu_cp_async(void* dst, const void* src, bool valid, int line) {
  Worker* w = current();
  Lane* me = current_lane(w);
  if ((reinterpret_cast<uintptr_t>(dst) | (valid ? reinterpret_cast<uintptr_t>(src) : 0)) & 15)
    fail(w, {me, at_line(line)}, "cp_async_16: an address is not a multiple of 16");
  const Copy copy{dst, valid ? src : nullptr, line};
  if (w->launch->flags & CHECK) {
    if (copy.src) check_access(w, me, reinterpret_cast<uintptr_t>(src), 16, false, at_line(line));
    check_access(w, me, reinterpret_cast<uintptr_t>(dst), 16, true, at_line(line));
    check_copy_started(w, me, copy);
  }
  if (!(w->launch->flags & LATE_COPIES)) return perform(copy);
  memset(dst, POISON, 16);
  if (!me->copies) me->copies = &w->queues[me->linear];
  me->copies->copies.push_back(copy);
  ++me->copies->open;
}
EMU_API void emu_cp_async_commit_group() {
  Worker* w = current();
  Lane* me = current_lane(w);
  if (!(w->launch->flags & LATE_COPIES)) return;
  if (!me->copies) me->copies = &w->queues[me->linear];
  me->copies->groups.push_back(me->copies->open);
  me->copies->open = 0;
}
EMU_API void emu_cp_async_wait_group(int groups) {
  Worker* w = current();
  Lane* me = current_lane(w);
  if (!me->copies || me->copies->groups.size() <= static_cast<size_t>(groups)) return;
  CopyQueue& queue = *me->copies;
  const size_t finished = queue.groups.size() - groups;
  size_t count = 0;
  for (size_t i = 0; i < finished; ++i) count += queue.groups[i];
  for (size_t i = 0; i < count; ++i) {
    perform(queue.copies[i]);
    if (w->launch->flags & CHECK) check_copy_finished(w, me, queue.copies[i]);
  }
  queue.copies.erase(queue.copies.begin(), queue.copies.begin() + count);
  queue.groups.erase(queue.groups.begin(), queue.groups.begin() + finished);
}

// ---- atomics --------------------------------------------------------------
template <class T>
static uint64_t atomic(EmuAtomicOp op, T* p, T value, T compare) {
  T old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
  for (;;) {
    T next = value;
    switch (op) {
      case EMU_ADD:
        next = static_cast<T>(static_cast<uint64_t>(old) + static_cast<uint64_t>(value));
        break;
      case EMU_MIN:
        next = old < value ? old : value;
        break;
      case EMU_MAX:
        next = old > value ? old : value;
        break;
      case EMU_EXCHANGE:
        break;
      case EMU_CAS:
        next = old == compare ? value : old;
        break;
      case EMU_AND:
        next = old & value;
        break;
      case EMU_OR:
        next = old | value;
        break;
      case EMU_XOR:
        next = old ^ value;
        break;
    }
    if (__atomic_compare_exchange_n(p, &old, next, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return static_cast<uint64_t>(old);
  }
}
EMU_API uint64_t emu_atomic(EmuAtomicOp op, EmuAtomicType type, void* p, uint64_t value, uint64_t compare, int line) {
  Worker* w = current();
  if (w->launch->flags & CHECK)
    check_atomic(w, current_lane(w), reinterpret_cast<uintptr_t>(p), type == EMU_U64 ? 8 : 4, at_line(line));
  switch (type) {
    case EMU_I32:
      return atomic(op, static_cast<int32_t*>(p), static_cast<int32_t>(value), static_cast<int32_t>(compare));
    case EMU_U32:
      return atomic(op, static_cast<uint32_t*>(p), static_cast<uint32_t>(value), static_cast<uint32_t>(compare));
    default:
      return atomic(op, static_cast<uint64_t*>(p), value, compare);
  }
}
EMU_API void emu_fence() {
  __sync_synchronize();
  Worker* w = current();
  current_lane(w)->fenced = true;
  if (w->launch->flags & CHECK) current_lane(w)->fence_tick = next_tick();
}
