// A fiber is a stack and a saved stack pointer; fiber_switch saves the callee's registers and goes on in another.
#ifndef KVEMU_FIBER_H
#define KVEMU_FIBER_H

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" void fiber_switch(void** save, void* next);

#if defined(__x86_64__)
asm(R"(
.text
.globl fiber_switch
.hidden fiber_switch
.type fiber_switch,@function
fiber_switch:
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
  ret
.size fiber_switch,.-fiber_switch
)");

// The stack pointer with which fiber_switch enters `start` as if it had just been called.
static void* fiber_prepare(char* top, void (*start)()) {
  auto* at = reinterpret_cast<uint64_t*>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15}) - 8);
  *--at = reinterpret_cast<uint64_t>(start);
  for (int i = 0; i < 6; i++) *--at = 0;
  return at;
}
#elif defined(__aarch64__)
asm(R"(
.text
.globl fiber_switch
.hidden fiber_switch
.type fiber_switch,%function
fiber_switch:
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
  mov x9, sp
  str x9, [x0]
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
)");

static void* fiber_prepare(char* top, void (*start)()) {
  auto* at = reinterpret_cast<uint64_t*>((reinterpret_cast<uintptr_t>(top) & ~uintptr_t{15}) - 160);
  for (int i = 0; i < 20; i++) at[i] = 0;
  at[11] = reinterpret_cast<uint64_t>(start);
  return at;
}
#else
#error "kvemu: fiber_switch is written for x86-64 and aarch64"
#endif

static const size_t PAGE = 4096 * 16;  // a multiple of every page size in use

#if defined(KVEMU_ASAN)
static const size_t STACK = 512 << 10;
#elif defined(KVEMU_TSAN)
static const size_t STACK = 64 << 10;
#else
static const size_t STACK = 128 << 10;
#endif

#if defined(KVEMU_TSAN)

// Stacks for all threads of a block, mapped anew; those of the last block are gone.
static char* fiber_stacks(int count) {
  static char* last;
  static size_t bytes;
  if (last) munmap(last, bytes);
  bytes = size_t(count) * STACK;
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    perror("kvemu: no memory for stacks");
    abort();
  }
  return last = static_cast<char*>(p);
}

#else

// A stack with a guard page below it; a kernel that overflows it faults.
static char* fiber_stack() {
  void* p = mmap(nullptr, STACK + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED || mprotect(p, PAGE, PROT_NONE)) {
    perror("kvemu: no memory for a fiber's stack");
    abort();
  }
  return static_cast<char*>(p) + PAGE;
}

#endif

#endif
