#pragma once

#define SM80_16x8x8_F32F16F16F32_TN SM80_16x8x8_F32F16F16F32_TN_device
#define SM80_16x8x16_F32F16F16F32_TN SM80_16x8x16_F32F16F16F32_TN_device
#define SM80_16x8x8_F32BF16BF16F32_TN SM80_16x8x8_F32BF16BF16F32_TN_device
#define SM80_16x8x16_F32BF16BF16F32_TN SM80_16x8x16_F32BF16BF16F32_TN_device
#include_next <cute/arch/mma_sm80.hpp>
#undef SM80_16x8x8_F32F16F16F32_TN
#undef SM80_16x8x16_F32F16F16F32_TN
#undef SM80_16x8x8_F32BF16BF16F32_TN
#undef SM80_16x8x16_F32BF16BF16F32_TN

namespace cute {

// CuTe takes the address of fma, so its parameters are written out.
template <emu::MmaType kType>
struct EmulatedMma16x8x16 {
  using DRegisters = float[4];
  using ARegisters = uint32_t[4];
  using BRegisters = uint32_t[2];
  using CRegisters = float[4];

  static void fma(float& d0, float& d1, float& d2, float& d3,  //
                  const uint32_t& a0, const uint32_t& a1, const uint32_t& a2, const uint32_t& a3,
                  const uint32_t& b0, const uint32_t& b1,  //
                  const float& c0, const float& c1, const float& c2, const float& c3) {
    emu::MmaRegisters r = {{a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3}, {}};
    emu::mma_m16n8k16(kType, r);
    d0 = r.d[0], d1 = r.d[1], d2 = r.d[2], d3 = r.d[3];
  }
};

template <emu::MmaType kType>
struct EmulatedMma16x8x8 {
  using DRegisters = float[4];
  using ARegisters = uint32_t[2];
  using BRegisters = uint32_t[1];
  using CRegisters = float[4];

  static void fma(float& d0, float& d1, float& d2, float& d3,                  //
                  const uint32_t& a0, const uint32_t& a1, const uint32_t& b0,  //
                  const float& c0, const float& c1, const float& c2, const float& c3) {
    emu::MmaRegisters r = {{a0, a1}, {b0}, {c0, c1, c2, c3}, {}};
    emu::mma_m16n8k8(kType, r);
    d0 = r.d[0], d1 = r.d[1], d2 = r.d[2], d3 = r.d[3];
  }
};

struct SM80_16x8x8_F32F16F16F32_TN : EmulatedMma16x8x8<emu::MmaType::kHalf> {};
struct SM80_16x8x16_F32F16F16F32_TN : EmulatedMma16x8x16<emu::MmaType::kHalf> {};
struct SM80_16x8x8_F32BF16BF16F32_TN : EmulatedMma16x8x8<emu::MmaType::kBfloat16> {};
struct SM80_16x8x16_F32BF16BF16F32_TN : EmulatedMma16x8x16<emu::MmaType::kBfloat16> {};

}  // namespace cute
