// The library's functions take no memory of their own on the CPU: all of it comes from the caller.
#include <atomic>
#include <cstdlib>
#include <new>

#include "anyflash/anyflash.h"
#include "backward_problem.h"
#include "kvcache_problem.h"
#include "many_threads.h"

namespace {

std::atomic<int> allocations{0};
std::atomic<bool> no_memory{false};

void* counted(std::size_t bytes, std::size_t alignment = alignof(std::max_align_t)) {
  ++allocations;
  if (no_memory) throw std::bad_alloc();
  const std::size_t size = (bytes + alignment) / alignment * alignment;
  void* const memory = std::aligned_alloc(alignment, size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

namespace {

// A second time: the first one makes the list of kernels.
template <class Call>
void check_call(const char* name, const Call& call) {
  call();
  const int before = allocations;
  call();
  const int made = allocations - before;
  CHECK_MSG(made == 0, std::string(name) + ": " + std::to_string(made) + " allocations");
}

void check_forward_and_backward(unsigned set) {
  test::BackwardProblem p({2, 70, 90, 4, 2, 33, 20}, set, test::DType::kFloat32, {}, 1);
  p.forward();
  p.backward();
  const test::ExactBytes forward_memory(p.forward_plan().workspace_bytes());
  const test::ExactBytes backward_memory(p.backward_plan().workspace_bytes());
  check_call("ForwardPlan", [&] { p.forward_plan().run(forward_memory.workspace()); });
  check_call("BackwardPlan", [&] { p.backward_plan().run(backward_memory.workspace()); });
}

void check_decoding() {
  const test::Appending call;
  const test::ExactBytes memory(call.workspace_size());
  check_call("KvCachePlan", [&] { call.run(memory.workspace()); });
}

void check_kernels() {
  check_call("anyflash_kernel_count", [] { anyflash_kernel_count(); });
  check_call("anyflash_kernel_name", [] { anyflash_kernel_name(0); });
  check_call("anyflash_kernel_launches", [] { anyflash_kernel_launches(0); });
  const std::size_t count = anyflash_kernel_count();
  CHECK(count > 0 && anyflash_kernel_name(0) != nullptr);
  CHECK(anyflash_kernel_name(count) == nullptr && anyflash_kernel_launches(count) == 0);
}

// Before the list of kernels has been made. No exception leaves the C ABI.
void check_no_memory() {
  no_memory = true;
  const std::size_t count = anyflash_kernel_count();
  const char* const name = anyflash_kernel_name(0);
  const uint64_t launches = anyflash_kernel_launches(0);
  no_memory = false;
  CHECK(count == 0 && name == nullptr && launches == 0);
}

}  // namespace

int main() {
  check_no_memory();
  check_kernels();
  const test::ManyThreads many_threads;
  check_forward_and_backward(0);
  check_forward_and_backward(test::kAll & ~test::kPacked);
  check_forward_and_backward(test::kAll);
  check_decoding();
  return check::report();
}
