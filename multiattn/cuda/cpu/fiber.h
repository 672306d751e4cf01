// Cooperative fibers: a stack each, and a switch that saves what the System V x86-64 ABI says a callee keeps.
#pragma once
#include <cstddef>
#include <cstdint>

#if !defined(__x86_64__) || !defined(__linux__)
#error "the emulation switches fibers in x86-64 assembly for Linux"
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace multiattn::emulation {

extern "C" void multiattn_switch(void** save_stack_pointer, void* load_stack_pointer);
asm(R"(
.text
.weak multiattn_switch
.type multiattn_switch, @function
multiattn_switch:
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
.size multiattn_switch, .-multiattn_switch
)");

struct Fiber {
  void* stack_pointer = nullptr;
  void* stack = nullptr;  // lowest address
  std::size_t stack_bytes = 0;

  // Ready to enter `entry`, which never returns, at the first switch.
  void prepare(char* memory, std::size_t bytes, void (*entry)()) {
    stack = memory;
    stack_bytes = bytes;
#if defined(__SANITIZE_ADDRESS__)
    ASAN_UNPOISON_MEMORY_REGION(memory, bytes);  // what an earlier fiber left there
#endif
    auto** top = reinterpret_cast<void**>(memory + bytes);
    *--top = nullptr;  // keeps the stack 16-byte aligned at entry, and ends a backtrace
    *--top = reinterpret_cast<void*>(entry);
    for (int saved = 0; saved < 6; ++saved) *--top = nullptr;
    stack_pointer = top;
  }
};

#if defined(__SANITIZE_ADDRESS__)
inline Fiber* left_fiber;  // of the latest switch: where its stack is AddressSanitizer tells, the host's too

inline void finish_switch(void* fake_stack) {
  __sanitizer_finish_switch_fiber(fake_stack, const_cast<const void**>(&left_fiber->stack), &left_fiber->stack_bytes);
}
#endif

// Leaves `from`, which may be resumed unless it is `finished`, and goes on in `to`.
inline void switch_fiber(Fiber& from, Fiber& to, bool finished = false) {
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
  left_fiber = &from;
  __sanitizer_start_switch_fiber(finished ? nullptr : &fake_stack, to.stack, to.stack_bytes);
#endif
  multiattn_switch(&from.stack_pointer, to.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  finish_switch(fake_stack);
#endif
  (void)finished;
}

// First thing a new fiber does.
inline void enter_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  finish_switch(nullptr);
#endif
}

}  // namespace multiattn::emulation
