#pragma once

#define SM75_U32x1_LDSM_N SM75_U32x1_LDSM_N_device
#define SM75_U32x2_LDSM_N SM75_U32x2_LDSM_N_device
#define SM75_U32x4_LDSM_N SM75_U32x4_LDSM_N_device
#define SM75_U16x2_LDSM_T SM75_U16x2_LDSM_T_device
#define SM75_U16x4_LDSM_T SM75_U16x4_LDSM_T_device
#define SM75_U16x8_LDSM_T SM75_U16x8_LDSM_T_device
#include_next <cute/arch/copy_sm75.hpp>
#undef SM75_U32x1_LDSM_N
#undef SM75_U32x2_LDSM_N
#undef SM75_U32x4_LDSM_N
#undef SM75_U16x2_LDSM_T
#undef SM75_U16x4_LDSM_T
#undef SM75_U16x8_LDSM_T

namespace cute {

template <int kCount, bool kTransposed>
struct EmulatedLdmatrix {
  using SRegisters = uint128_t[1];
  using DRegisters = uint32_t[kCount];

  template <class... Registers>
  static void copy(const uint128_t& row, Registers&... destination) {
    static_assert(sizeof...(Registers) == kCount);
    uint32_t registers[kCount];
    emu::ldmatrix(kCount, kTransposed, &row, registers);
    int i = 0;
    ((destination = registers[i++]), ...);
  }
};

struct SM75_U32x1_LDSM_N : EmulatedLdmatrix<1, false> {};
struct SM75_U32x2_LDSM_N : EmulatedLdmatrix<2, false> {};
struct SM75_U32x4_LDSM_N : EmulatedLdmatrix<4, false> {};
struct SM75_U16x2_LDSM_T : EmulatedLdmatrix<1, true> {};
struct SM75_U16x4_LDSM_T : EmulatedLdmatrix<2, true> {};
struct SM75_U16x8_LDSM_T : EmulatedLdmatrix<4, true> {};

}  // namespace cute
