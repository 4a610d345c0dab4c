// Stacks of their own for the emulated CUDA threads, and nothing else.
//
// A scheduler calls Fiber::resume(); the fiber runs on its own stack until it calls
// Fiber::suspend() or its entry returns. Address and Thread Sanitizer are told about every switch:
// to Thread Sanitizer each fiber is a thread, and a switch orders nothing (see block.cpp for what
// does).
#pragma once

#include <cstddef>

namespace emu {

class Fiber {
 public:
  using Entry = void (*)(void* arg);

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Arms the fiber. Whatever ran on it before is dropped without unwinding: kernels own nothing.
  void start(Entry entry, void* arg);

  // Runs the fiber until it suspends or ends. Never call it from inside a fiber.
  void resume();

  // Back to the scheduler; returns at the next resume().
  static void suspend();

 private:
  static void main();  // the first frame on the fiber's stack
  void leave(bool for_good);
  void drop_sanitizer_state();

  std::byte* stack_ = nullptr;  // lowest usable byte, above the guard page
  void* context_ = nullptr;     // the suspended fiber: a stack pointer, or a ucontext_t
  void* scheduler_ = nullptr;   // the scheduler that resumed it
  Entry entry_ = nullptr;
  void* arg_ = nullptr;

  // What the sanitizers keep for us; unused in plain builds.
  void* fake_stack_ = nullptr;
  const void* scheduler_stack_ = nullptr;
  size_t scheduler_stack_size_ = 0;
  void* tsan_fiber_ = nullptr;
  void* tsan_scheduler_ = nullptr;
};

}  // namespace emu
