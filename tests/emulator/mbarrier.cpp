// mbarrier objects: who has come goes on, and waits later, or not at all.
#include <cstdint>
#include <string>
#include <utility>

#include "block.hpp"

namespace emu {

void Block::mbarrier_arrive(Mbarrier& barrier) {
  if (barrier.expected == 0 || barrier.arrived >= barrier.expected) {
    fail("an mbarrier that was not initialised");
  }
  tsan_release(barrier.place(barrier.phase));
  if (++barrier.arrived < barrier.expected) return;
  barrier.arrived = 0;
  ++barrier.phase;
  ++mutable_counters().barriers;
  // Those that wait for another look again.
  for (size_t warp = 0; warp < warps_.size(); ++warp) {
    wake(warp, std::exchange(at_mbarriers_[warp], 0));
  }
}

void Block::mbarrier_wait(Mbarrier& barrier, uint32_t parity, Site site) {
  while (barrier.phase % 2 == parity % 2) {
    at_mbarriers_[warp_index()] |= 1u << lane_index();
    wait("an mbarrier", site);
  }
  tsan_acquire(barrier.place(parity));
}

void mbarrier_init(uint64_t* barrier, int threads) {
  if (threads <= 0 || threads > kMaxWarps * kWarpSize) {
    fail("an mbarrier of " + std::to_string(threads) + " threads");
  }
  *reinterpret_cast<Mbarrier*>(barrier) = Mbarrier{static_cast<uint16_t>(threads), 0, 0};
}
void mbarrier_arrive(uint64_t* barrier) {
  Block::current().mbarrier_arrive(*reinterpret_cast<Mbarrier*>(barrier));
}
void mbarrier_wait(uint64_t* barrier, int parity, const char* file, int line) {
  Block::current().mbarrier_wait(*reinterpret_cast<Mbarrier*>(barrier), parity, {file, line});
}

}  // namespace emu
