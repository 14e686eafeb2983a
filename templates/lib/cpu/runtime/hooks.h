// How the checker sees accesses. Kernels are compiled with -fsanitize=thread, so they call a __tsan function before each access. The
// functions here take the place of libtsan, which is not linked. Atomics need none: they are calls of the runtime (copies.h).
#pragma once
#include "checker.h"
#include "wgmma.h"

static inline void hook(const volatile void* p, size_t bytes, bool write, void* pc) {
  Worker* w = current();
  if (!w || !w->running || !(w->launch->flags & CHECK)) return;
  const Where where = static_cast<Where>(reinterpret_cast<uintptr_t>(pc) - 1 - checker.module_start);
  check_access(w, current_lane(w), reinterpret_cast<uintptr_t>(p), static_cast<unsigned>(bytes), write, where);
}
#define HERE __builtin_return_address(0)
#define EMU_HOOKS(bytes)                                                                       \
  EMU_API void __tsan_read##bytes(void* p) { hook(p, bytes, false, HERE); }                    \
  EMU_API void __tsan_write##bytes(void* p) { hook(p, bytes, true, HERE); }                    \
  EMU_API void __tsan_unaligned_read##bytes(void* p) { hook(p, bytes, false, HERE); }          \
  EMU_API void __tsan_unaligned_write##bytes(void* p) { hook(p, bytes, true, HERE); }          \
  EMU_API void __tsan_volatile_read##bytes(void* p) { hook(p, bytes, false, HERE); }           \
  EMU_API void __tsan_volatile_write##bytes(void* p) { hook(p, bytes, true, HERE); }           \
  EMU_API void __tsan_unaligned_volatile_read##bytes(void* p) { hook(p, bytes, false, HERE); } \
  EMU_API void __tsan_unaligned_volatile_write##bytes(void* p) { hook(p, bytes, true, HERE); }
EMU_HOOKS(1)
EMU_HOOKS(2)
EMU_HOOKS(4)
EMU_HOOKS(8)
EMU_HOOKS(16)
EMU_API void __tsan_read_range(void* p, unsigned long bytes) { hook(p, bytes, false, HERE); }
EMU_API void __tsan_write_range(void* p, unsigned long bytes) { hook(p, bytes, true, HERE); }
EMU_API void __tsan_read_write1(void* p) { hook(p, 1, true, HERE); }
EMU_API void __tsan_read_write2(void* p) { hook(p, 2, true, HERE); }
EMU_API void __tsan_read_write4(void* p) { hook(p, 4, true, HERE); }
EMU_API void __tsan_read_write8(void* p) { hook(p, 8, true, HERE); }
EMU_API void __tsan_read_write16(void* p) { hook(p, 16, true, HERE); }
EMU_API void* __tsan_memcpy(void* to, const void* from, size_t bytes) {
  hook(from, bytes, false, HERE);
  hook(to, bytes, true, HERE);
  return memcpy(to, from, bytes);
}
EMU_API void* __tsan_memset(void* p, int value, size_t bytes) {
  hook(p, bytes, true, HERE);
  return memset(p, value, bytes);
}

// Clang compiles kernels with -fsanitize=alignment, too. They call this before an access through a misaligned pointer. The checker's own
// test (check in checker.h) would miss it, because Clang may split such an access into smaller ones before it calls the checker.
struct UbsanTypeMismatch {
  const char* file;
  uint32_t line, column;
  const void* type;
  unsigned char log_alignment;
  unsigned char kind;
};
EMU_API void __ubsan_handle_type_mismatch_v1(const UbsanTypeMismatch* what, uintptr_t p) {
  Worker* w = current();
  if (!w || !w->running) return;
  const unsigned alignment = 1u << what->log_alignment;
  fail(w, {current_lane(w), at_line(static_cast<int>(what->line))},
       "misaligned: access at an address that is %u more than a multiple of %u", static_cast<unsigned>(p & (alignment - 1)),
       alignment);
}

EMU_API void __tsan_func_entry(void*) {}
EMU_API void __tsan_func_exit() {}
EMU_API void __tsan_init() {}
