// The barrier of a cluster's blocks, as one of them sees it; launch.cpp lets them take turns.
#include <algorithm>

#include "block.hpp"

namespace emu {
namespace {

constexpr const char* kClusterBarrier = "the cluster's barrier";

}  // namespace

// Of what other blocks of the cluster would not find as it was.
void Block::check_idle() const {
  check_barriers_are_idle();
  check_mbarriers_are_idle();
  check_copies_in_flight();
  check_async_has_ended();
}

bool Block::all_wait_for_cluster() const {
  return std::all_of(threads_.begin(), threads_.end(), [](const Thread* thread) {
    return thread->state == Thread::State::kWaiting && thread->waits_for == kClusterBarrier;
  });
}

void Block::resume_from_cluster() {
  for (size_t warp = 0; warp < warps_.size(); ++warp) wake(warp, kFullMask);
}

void Block::cluster_sync(Site site) {
  tsan_release(&g_cluster_barrier);
  wait(kClusterBarrier, site);
  tsan_acquire(&g_cluster_barrier);
}

void cluster_sync(const char* file, int line) { Block::current().cluster_sync({file, line}); }

}  // namespace emu
