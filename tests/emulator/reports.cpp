// What a block says of its threads, and what it must not leave behind.
#include <string>

#include "block.hpp"

namespace emu {

std::string text(Site site) {
  if (site.file == nullptr) return "";
  const std::string file = site.file;
  return " (" + file.substr(file.find_last_of('/') + 1) + ":" + std::to_string(site.line) + ")";
}

std::string seed_text() { return " [EMU_SEED=" + std::to_string(options().seed) + "]"; }

std::string Block::name() const {
  return "block (" + std::to_string(block_idx_.x) + "," + std::to_string(block_idx_.y) + "," +
         std::to_string(block_idx_.z) + ")";
}

std::string name_of_block() { return Block::current_block().name(); }

// "threads 0-63 at __syncthreads (gemm.h:12); threads 64-127 ended"
std::string Block::describe_threads() const {
  const auto describe = [](const Thread& thread) {
    if (thread.state == Thread::State::kExited) return std::string(" ended");
    return std::string(" at ") + thread.waits_for + text(thread.site);
  };
  std::string result;
  for (size_t begin = 0, end; begin < threads_.size(); begin = end) {
    const std::string what = describe(*threads_[begin]);
    for (end = begin + 1; end < threads_.size() && describe(*threads_[end]) == what;) ++end;
    if (!result.empty()) result += "; ";
    result += end - begin == 1 ? "thread " : "threads ";
    result += std::to_string(begin);
    if (end - begin > 1) result += "-" + std::to_string(end - 1);
    result += what;
  }
  return result;
}

void Block::check_barriers_are_idle() const {
  for (int id = 0; id < kBarriers; ++id) {
    if (barriers_[id].arrived == 0) continue;
    throw Failure("emulated kernel, " + name_of_block() + " ended while " + kBarrierNames[id] +
                  " had seen " + std::to_string(barriers_[id].arrived) + " of " +
                  std::to_string(barriers_[id].expected) + " threads" + seed_text());
  }
}

void Block::check_idle() const {
  check_barriers_are_idle();
  check_mbarriers_are_idle();
  check_copies_in_flight();
  check_async_has_ended();
  if (sent_in_flight(rank_)) {
    throw Failure("emulated kernel, " + name_of_block() + " ended before all that others sent it" +
                  seed_text());
  }
}

// A copy that nobody waited for may land at any time: its destination must be left alone.
void Block::check_copies_in_flight() const {
  for (const Thread* thread : threads_) {
    const CpAsyncQueue& queue = thread->cp_async;
    for (uint32_t i = queue.first; i != queue.last; ++i) {
      const CpAsyncQueue::Entry& entry = queue.entries[i % CpAsyncQueue::kCapacity];
      for (int byte = 0; byte < entry.bytes; ++byte) {
        if (entry.destination[byte] == kPoison) continue;
        throw Failure(
            "emulated kernel, " + name_of_block() + ", thread " + std::to_string(thread->index) +
            ": a cp.async that was not waited for lands on what was written later" + seed_text());
      }
    }
  }
}

}  // namespace emu
