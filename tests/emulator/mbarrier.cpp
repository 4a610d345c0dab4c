// mbarrier objects: who has come goes on, and waits later, or not at all.
#include <cstdint>
#include <string>
#include <utility>

#include "block.hpp"

namespace emu {

void Block::mbarrier_init(Mbarrier& barrier, int arrivals) {
  if (arrivals <= 0 || arrivals > kMaxWarps * kWarpSize) {
    fail("an mbarrier of " + std::to_string(arrivals) + " threads");
  }
  if (mbarrier_count_ == kMaxMbarriers) fail("more than 64 mbarriers are not emulated");
  mbarriers_[mbarrier_count_++] = &barrier;
  barrier = Mbarrier{static_cast<uint16_t>(arrivals), 0, 0, 0};
}

void Block::mbarrier_arrive(Mbarrier& barrier) {
  if (barrier.expected == 0 || barrier.arrived > barrier.expected) {
    fail("an mbarrier that was not initialised");
  }
  if (barrier.arrived == barrier.expected) fail("an mbarrier has more arrivals than it expects");
  tsan_release(barrier.place(barrier.phase));
  ++barrier.arrived;
  end_phase(barrier);
}

void Block::mbarrier_expect(Mbarrier& barrier, int bytes) {
  if (bytes <= 0 || bytes >= 1 << 20) fail("an mbarrier is told of 1 to 2^20 - 1 bytes");
  barrier.bytes += bytes;
  counts_bytes_ = true;
}

void Block::mbarrier_receive(Mbarrier& barrier, int bytes) {
  if (barrier.bytes < bytes) {
    throw Failure("emulated kernel, " + name_of_block() + ": an mbarrier that waits for " +
                  std::to_string(barrier.bytes) + " bytes gets " + std::to_string(bytes));
  }
  barrier.bytes -= bytes;
  end_phase(barrier);
}

// They may come before they are announced.
void Block::mbarrier_receive_sent(Mbarrier& barrier, int bytes) {
  barrier.bytes -= bytes;
  end_phase(barrier);
}

void Block::end_phase(Mbarrier& barrier) {
  if (barrier.arrived < barrier.expected || barrier.bytes != 0) return;
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

// Of a kernel whose mbarriers count the bytes of copies: all have come, and were waited for.
void Block::check_mbarriers_are_idle() const {
  if (!counts_bytes_) return;
  for (int i = 0; i < mbarrier_count_; ++i) {
    const Mbarrier& barrier = *mbarriers_[i];
    if (barrier.arrived == 0 && barrier.bytes == 0) continue;
    throw Failure("emulated kernel, " + name_of_block() + " ended while mbarrier " +
                  std::to_string(i) + " had seen " + std::to_string(barrier.arrived) + " of " +
                  std::to_string(barrier.expected) + " arrivals and waited for " +
                  std::to_string(barrier.bytes) + " bytes" + seed_text());
  }
}

void mbarrier_init(uint64_t* barrier, int threads) {
  Block::current().mbarrier_init(*reinterpret_cast<Mbarrier*>(barrier), threads);
}
void mbarrier_arrive_expect(uint64_t* barrier, int bytes) {
  Block::current().mbarrier_expect(*reinterpret_cast<Mbarrier*>(barrier), bytes);
  mbarrier_arrive(barrier);
}
void mbarrier_arrive(uint64_t* barrier) {
  Block::current().mbarrier_arrive(*reinterpret_cast<Mbarrier*>(barrier));
}
void mbarrier_wait(uint64_t* barrier, int parity, const char* file, int line) {
  Block::current().mbarrier_wait(*reinterpret_cast<Mbarrier*>(barrier), parity, {file, line});
}

}  // namespace emu
