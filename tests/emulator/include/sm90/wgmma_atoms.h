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
    emu::wgmma({kType, kN, kMajorA == Major::kMN, kMajorB == Major::kMN, accumulate != 0, d,
                nullptr, a, b});
  }
  template <Major kMajorB>
  static void with_registers(float* d, const uint32_t* a, uint64_t b, int accumulate) {
    emu::wgmma({kType, kN, false, kMajorB == Major::kMN, accumulate != 0, d, a, 0, b});
  }
};

inline void fence_products() { emu::wgmma_fence(); }
inline void commit_products() { emu::wgmma_commit_group(); }
template <int kSize>
inline void pin_registers(float*) {}
template <int kGroups>
inline void wait_products() {
  emu::wgmma_wait_group(kGroups);
}

}  // namespace anyflash::sm90
