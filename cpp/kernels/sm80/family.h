// The family of kernels for every GPU from the A100 on: mma.sync and cp.async.
#pragma once

#include <cstdint>

#include "kernel_descriptor.h"

namespace anyflash::sm80 {

inline constexpr KernelFamily kFamily = [] {
  KernelFamily family;
  family.name = "sm80";
  family.gpus.first = 80;
  // cp.async and the epilogue move 16 bytes. Offsets within a tile, which has at most 256 rows, are
  // 32-bit numbers of elements.
  family.input_rules.alignment = 16;
  family.input_rules.max_row_stride = INT32_MAX / 256;
  return family;
}();

}  // namespace anyflash::sm80
