#include "fiber.hpp"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <new>

#if !defined(__x86_64__) && !defined(EMU_USE_UCONTEXT)
#define EMU_USE_UCONTEXT 1  // only x86-64 has its switch written out below
#endif
#ifdef EMU_USE_UCONTEXT
#include <ucontext.h>
#endif

#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifdef EMU_TSAN
#include <sanitizer/tsan_interface.h>
#endif

namespace emu {
namespace {

// A kernel's frame takes a few KiB, 200 with Address Sanitizer, whose report needs room as well.
// Pages that are never touched cost nothing.
#ifdef EMU_TSAN
constexpr size_t kStackBytes = size_t{1} << 18;  // all of it is mapped anew for every block
#else
constexpr size_t kStackBytes = size_t{1} << 20;
#endif
constexpr size_t kGuardBytes = size_t{1} << 14;

// Left free above the first frame: Address Sanitizer looks past it when it walks a stack.
constexpr size_t kTopSlack = 256;

Fiber* g_running = nullptr;  // launches are serialised, so one is enough

}  // namespace

#ifndef EMU_USE_UCONTEXT

// Saves what the System V ABI lets a callee rely on, exchanges the stacks, restores. The MXCSR and
// the x87 control word are left alone: no kernel changes the rounding mode.
extern "C" void emu_switch_stack(void** save, void* load);
asm(R"(
.text
.p2align 4
.globl emu_switch_stack
.hidden emu_switch_stack
.type emu_switch_stack, @function
emu_switch_stack:
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
.size emu_switch_stack, . - emu_switch_stack
)");

namespace {

void* make_context(std::byte* stack, void (*first)()) {
  constexpr int kSavedRegisters = 6;
  auto* top = reinterpret_cast<void**>(stack + kStackBytes - kTopSlack);
  *--top = nullptr;  // where `first` would return to: ends back traces, and keeps the alignment
  *--top = reinterpret_cast<void*>(first);
  for (int i = 0; i < kSavedRegisters; ++i) *--top = nullptr;
  return top;
}

void switch_context(void** save, void* load) { emu_switch_stack(save, load); }

}  // namespace

#else

namespace {

void* make_context(std::byte* stack, void (*first)()) {
  // The context lives at the top of the stack that it describes.
  auto* context = reinterpret_cast<ucontext_t*>(stack + kStackBytes - kTopSlack) - 1;
  getcontext(context);
  context->uc_stack.ss_sp = stack;
  context->uc_stack.ss_size = reinterpret_cast<std::byte*>(context) - stack;
  context->uc_link = nullptr;
  makecontext(context, first, 0);
  return context;
}

void switch_context(void** save, void* load) {
  ucontext_t here;  // swapcontext returns on this same stack, so it stays alive as long as needed
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(load));
}

}  // namespace

#endif

Fiber::Fiber() {
  const int protection = PROT_READ | PROT_WRITE;
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* memory = mmap(nullptr, kGuardBytes + kStackBytes, protection, flags, -1, 0);
  if (memory == MAP_FAILED) throw std::bad_alloc();
  mprotect(memory, kGuardBytes, PROT_NONE);
  stack_ = static_cast<std::byte*>(memory) + kGuardBytes;
}

Fiber::~Fiber() {
  drop_sanitizer_state();
  munmap(stack_ - kGuardBytes, kGuardBytes + kStackBytes);
}

void Fiber::start(Entry entry, void* arg) {
  drop_sanitizer_state();
#ifdef EMU_TSAN
  // A mapping made anew makes Thread Sanitizer forget who used these addresses in another block.
  // Blocks are unordered to it, so it would otherwise report every reused stack slot.
  mmap(stack_, kStackBytes, PROT_READ | PROT_WRITE,
       MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  tsan_fiber_ = __tsan_create_fiber(0);
#endif
  entry_ = entry;
  arg_ = arg;
  context_ = make_context(stack_, &Fiber::main);
}

void Fiber::drop_sanitizer_state() {
#ifdef EMU_ASAN
  // A fiber that was dropped in the middle leaves its frames' red zones behind.
  __asan_unpoison_memory_region(stack_, kStackBytes);
  fake_stack_ = nullptr;
#endif
#ifdef EMU_TSAN
  if (tsan_fiber_ != nullptr) __tsan_destroy_fiber(tsan_fiber_);
  tsan_fiber_ = nullptr;
#endif
}

void Fiber::resume() {
  g_running = this;
#ifdef EMU_ASAN
  void* fake_stack = nullptr;
  __sanitizer_start_switch_fiber(&fake_stack, stack_, kStackBytes);
#endif
#ifdef EMU_TSAN
  tsan_scheduler_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(tsan_fiber_, __tsan_switch_to_fiber_no_sync);
#endif
  switch_context(&scheduler_, context_);
#ifdef EMU_ASAN
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
  g_running = nullptr;
}

void Fiber::suspend() {
  Fiber* self = g_running;
  self->leave(false);
#ifdef EMU_ASAN
  __sanitizer_finish_switch_fiber(self->fake_stack_, &self->scheduler_stack_,
                                  &self->scheduler_stack_size_);
#endif
}

void Fiber::leave(bool for_good) {
#ifdef EMU_ASAN
  // A null pointer instead of a place to save to means: this stack is never entered again.
  __sanitizer_start_switch_fiber(for_good ? nullptr : &fake_stack_, scheduler_stack_,
                                 scheduler_stack_size_);
#endif
#ifdef EMU_TSAN
  __tsan_switch_to_fiber(tsan_scheduler_, __tsan_switch_to_fiber_no_sync);
#endif
  (void)for_good;
  switch_context(&context_, scheduler_);
}

void Fiber::main() {
  Fiber* self = g_running;
#ifdef EMU_ASAN
  __sanitizer_finish_switch_fiber(nullptr, &self->scheduler_stack_, &self->scheduler_stack_size_);
#endif
  self->entry_(self->arg_);
  self->leave(true);
  std::terminate();  // an ended fiber was resumed
}

}  // namespace emu
