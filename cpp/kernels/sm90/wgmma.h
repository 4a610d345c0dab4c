// Products of a warpgroup (wgmma) and their operands' descriptors.
//
// wgmma is asynchronous: what a thread issues between wgmma_fence() and wgmma_commit() is a group.
// Until wgmma_wait() has let a group pass, nobody may touch its accumulators, its A operand in
// registers, or write to its operands in shared memory.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "sm90/panel.h"
#include "sm90/ptx.h"
#include "sm90/wgmma_atoms.h"

namespace anyflash::sm90 {

inline constexpr int kWarpgroupThreads = 128;

// A matrix operand in shared memory, in panels of 64 columns with the 128-byte swizzle, which TMA
// writes. Eight rows of 128 bytes are one swizzle atom. Panels begin at multiples of 1024 bytes.
class OperandDescriptor {
 public:
  // `panel_bytes`: from one panel to the next. Along the sum (K-major) the hardware does not look
  // at it, as a k16 step lies in one panel; with rows along the sum (MN-major), it finds later
  // columns.
  ANYFLASH_DEVICE OperandDescriptor(const void* first, int panel_bytes)
      : low_((smem_address(first) & 0x3ffff) >> 4 | static_cast<uint32_t>(panel_bytes >> 4) << 16) {
  }

  // From here on `descriptor + bytes` is computed anew. Else the compiler keeps every such sum in a
  // register over a loop.
  ANYFLASH_DEVICE void pin() { pin_registers<1>(&low_); }

  ANYFLASH_DEVICE uint64_t operator+(int bytes) const {
    return uint64_t{kHigh} << 32 | (low_ + static_cast<uint32_t>(bytes >> 4));
  }

 private:
  static constexpr uint32_t kAtomBytes = 8 * kPanelBytes;
  static constexpr uint32_t kSwizzle128 = 1u << 30;
  static constexpr uint32_t kHigh = kAtomBytes >> 4 | kSwizzle128;
  uint32_t low_;  // start, and distance of panels, in 16 bytes
};

}  // namespace anyflash::sm90
