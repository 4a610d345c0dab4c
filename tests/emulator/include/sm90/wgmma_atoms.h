// The emulator's side of cpp/kernels/sm90/wgmma_atoms.h.
#pragma once

#include <cutlass/numeric_types.h>

#include <cstdint>
#include <type_traits>

#include "common/macros.h"
#include "emu.hpp"

namespace anyflash::sm90 {

enum class Major : int { kK = 0, kMN = 1 };

template <class Element, int kN>
struct Wgmma {
  static constexpr emu::MmaType kType =
      std::is_same_v<Element, cutlass::half_t> ? emu::MmaType::kHalf : emu::MmaType::kBfloat16;

  template <Major kMajorA, Major kMajorB>
  static void with_smem(float* d, uint64_t a, uint64_t b, int accumulate) {
    emu::WgmmaArguments arguments = arguments_of<kMajorB>(d, b, accumulate);
    arguments.a = a;
    arguments.a_rows_along_sum = kMajorA == Major::kMN;
    emu::wgmma(arguments);
  }
  template <Major kMajorB>
  static void with_registers(float* d, const uint32_t* a, uint64_t b, int accumulate) {
    emu::WgmmaArguments arguments = arguments_of<kMajorB>(d, b, accumulate);
    arguments.a_registers = a;
    emu::wgmma(arguments);
  }

 private:
  // All but A.
  template <Major kMajorB>
  static emu::WgmmaArguments arguments_of(float* d, uint64_t b, int accumulate) {
    emu::WgmmaArguments arguments{};
    arguments.type = kType;
    arguments.n = kN;
    arguments.rows_along_sum = kMajorB == Major::kMN;
    arguments.accumulate = accumulate != 0;
    arguments.d = d;
    arguments.b = b;
    return arguments;
  }
};

inline void wgmma_fence() { emu::wgmma_fence(); }
inline void wgmma_commit() { emu::wgmma_commit_group(); }
template <int kSize>
inline void pin_registers(float*) {}
template <int kSize>
inline void pin_registers(uint32_t*) {}
template <int kGroups>
inline void wgmma_wait() {
  emu::wgmma_wait_group(kGroups);
}

}  // namespace anyflash::sm90
