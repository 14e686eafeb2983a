// Switches between fibers: saves the callee-saved registers on the old stack and loads those of the new one. In assembly, for x86-64 and
// aarch64, this takes a few nanoseconds. Other processors, and -DEMU_UCONTEXT, use ucontext, which makes system calls.
#pragma once
#include <stdint.h>

#if defined(__x86_64__) && !defined(EMU_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void emu_switch(void** save, void* to);
__asm__(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,@function
.p2align 4
emu_switch:
  endbr64
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  popq %rcx
  jmp *%rcx
.size emu_switch,.-emu_switch
)");  // pop and jmp instead of ret, which the return-address predictor would always mispredict
static inline void* prepare_stack(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15));
  *--sp = nullptr;  // in the place of a return address: the ABI asks for rsp % 16 == 8 at entry
  *--sp = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
  return sp;
}

#elif defined(__aarch64__) && !defined(EMU_UCONTEXT)
extern "C" __attribute__((visibility("hidden"))) void emu_switch(void** save, void* to);
__asm__(R"(
.text
.globl emu_switch
.hidden emu_switch
.type emu_switch,%function
.p2align 4
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size emu_switch,.-emu_switch
)");
static inline void* prepare_stack(char* top, void (*entry)()) {
  void** sp = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t(15)) - 160);
  for (int i = 0; i < 20; ++i) sp[i] = nullptr;
  sp[11] = reinterpret_cast<void*>(entry);  // x30
  return sp;
}

#else
#include <ucontext.h>
static inline void emu_switch(void** save, void* to) {
  ucontext_t self;
  *save = &self;
  swapcontext(&self, static_cast<ucontext_t*>(to));
}
static inline void* prepare_stack(char* top, void (*entry)()) {
  auto* context = reinterpret_cast<ucontext_t*>((reinterpret_cast<uintptr_t>(top) - sizeof(ucontext_t) - 64) & ~uintptr_t(63));
  getcontext(context);
  context->uc_stack.ss_sp = reinterpret_cast<char*>(context) - 32768;
  context->uc_stack.ss_size = 32768;
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif
