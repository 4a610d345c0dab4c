#pragma once

#include "emu.hpp"

#define canonical_lane_idx canonical_lane_idx_device
#define canonical_warp_idx_sync canonical_warp_idx_sync_device
#define canonical_warp_idx canonical_warp_idx_device
#define canonical_warp_group_idx canonical_warp_group_idx_device
#include_next <cutlass/cutlass.h>
#undef canonical_lane_idx
#undef canonical_warp_idx_sync
#undef canonical_warp_idx
#undef canonical_warp_group_idx

namespace cutlass {

inline int canonical_lane_idx() { return threadIdx.x % NumThreadsPerWarp; }
inline int canonical_warp_idx() { return threadIdx.x / NumThreadsPerWarp; }
inline int canonical_warp_idx_sync() { return __shfl_sync(0xffffffffu, canonical_warp_idx(), 0); }
inline int canonical_warp_group_idx() {
  return __shfl_sync(0xffffffffu, static_cast<int>(threadIdx.x / NumThreadsPerWarpGroup), 0);
}

}  // namespace cutlass
