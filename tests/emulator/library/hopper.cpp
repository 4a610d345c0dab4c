// Makes the emulated GPU an H100 from the start: of few multiprocessors, so that persistent CTAs
// take several blocks of small problems.
#include <cstddef>
#include <cstdint>

#include "emu.hpp"

extern "C" void emulated_set_compute_capability(int value);
extern "C" void emulated_set_multiprocessors(int value);

namespace {

const bool is_hopper = [] {
  constexpr std::size_t kSharedMemory = 232448;
  emulated_set_compute_capability(90);
  emulated_set_multiprocessors(5);
  emu::options().shared_memory_limit = kSharedMemory;
  return true;
}();

}  // namespace
