// The family of kernels for Hopper (compute capability 9.0): TMA, wgmma, warp specialisation.
#pragma once

#include "kernel_descriptor.h"

namespace anyflash::sm90 {

inline constexpr KernelFamily kFamily = [] {
  KernelFamily family;
  family.name = "sm90";
  family.gpus = {90, 90};
  family.arch_specific = true;
  family.priority = 1;
  family.needs_positive_scale = true;  // the softmax looks for the largest product
  // TMA moves 16 bytes, and its strides are unsigned.
  family.input_rules.alignment = 16;
  family.input_rules.positive_strides = true;
  return family;
}();

// Of kernels with these features. With dropout, sm80's kernels are faster up to head dim 64: random
// numbers take most of the time there (forward/EXPERIMENTS.md).
constexpr int least_head_dim(unsigned features) { return (features & kDropout) != 0 ? 65 : 0; }

}  // namespace anyflash::sm90
