#pragma once

#define elect_one_sync elect_one_sync_device
#define elect_one_leader_sync elect_one_leader_sync_device
#include_next <cute/arch/cluster_sm90.hpp>
#undef elect_one_sync
#undef elect_one_leader_sync

namespace cute {

// Hardware elects any one lane, and in practice the first that is active. The vote brings the lanes
// together as the instruction does.
inline uint32_t elect_one_sync() {
  emu::ballot(0xffffffffu, true);
  return emu::lane_index() == 0 ? 1 : 0;
}
inline ElectOneLaneIdReturnType elect_one_leader_sync() { return {elect_one_sync(), 0}; }

}  // namespace cute
