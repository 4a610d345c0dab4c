#include "cluster.hpp"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>
#include <string>

namespace emu {
namespace {

Cluster* g_cluster = nullptr;

constexpr const char* kClusterBarrier = "the cluster's barrier";

// What a block was sent, and has not come: numbers of st.async, or without any an arrival at an
// mbarrier. Of fixed size: fibers do not allocate.
struct Sent {
  std::array<float, 4> values;
  int count;  // 0: an arrival
  volatile float* to;
  Mbarrier* barrier;
};
struct Inbox {
  std::array<Sent, 1 << 15> items;
  int count = 0;
};
std::array<Inbox, kMaxCluster> g_inboxes;

Sent& new_sent(int rank) {
  Inbox& inbox = g_inboxes[rank];
  if (inbox.count == static_cast<int>(inbox.items.size()))
    fail("too much is sent for the emulator");
  return inbox.items[inbox.count++];
}

}  // namespace

bool sent_in_flight(int rank) { return g_inboxes[rank].count != 0; }

// Some of what was sent to the running block, in any order.
bool land_sent(int rank) {
  Inbox& inbox = g_inboxes[rank];
  if (inbox.count == 0) return false;
  Block& block = Block::current_block();
  for (uint64_t landing = 1 + block.random() % inbox.count; landing > 0; --landing) {
    Sent& chosen = inbox.items[block.random() % inbox.count];
    const Sent sent = chosen;
    chosen = inbox.items[--inbox.count];
    for (int i = 0; i < sent.count; ++i) sent.to[i] = sent.values[i];
    if (sent.count == 0) block.mbarrier_arrive(*sent.barrier);
    else block.mbarrier_receive_sent(*sent.barrier, sent.count * static_cast<int>(sizeof(float)));
  }
  return true;
}

// -- As one of its blocks sees it -----------------------------------------------------------------

bool Block::all_wait_for_cluster() const {
  return std::all_of(threads_.begin(), threads_.end(), [](const Thread* thread) {
    return thread->state == Thread::State::kWaiting && thread->waits_for == kClusterBarrier;
  });
}

void Block::resume_from_cluster() {
  for (size_t warp = 0; warp < warps_.size(); ++warp) wake(warp, kFullMask);
}

void Block::cluster_sync(Site site, bool publishes) {
  void* const place = Cluster::current().barrier_place();
  if (publishes) tsan_release(place);
  wait(kClusterBarrier, site);
  tsan_acquire(place);
}

// -- The cluster ----------------------------------------------------------------------------------

Cluster::Cluster(uint64_t first, int size, dim3 block_dim, const Policy& policy, uint64_t seed,
                 Block::Body body, void* arg)
    : random_(seed ^ first) {
  for (int rank = 0; rank < size; ++rank) {
    const uint64_t index = first + rank;
    blocks_.push_back(
        std::make_unique<Block>(block_dim, index, rank, policy, seed ^ (index << 32), body, arg));
  }
  for (Inbox& inbox : g_inboxes) inbox.count = 0;
  g_cluster = this;
}

Cluster::~Cluster() {
  g_cluster = nullptr;
  Block::leave();
}

Cluster& Cluster::current() {
  Block::current();
  return *g_cluster;
}

void Cluster::run() {
  while (!has_ended()) {
    if (!take_turns() && !pass_barrier()) fail_deadlock();
  }
  mutable_counters().blocks += blocks_.size();
}

bool Cluster::has_ended() const {
  return std::all_of(blocks_.begin(), blocks_.end(), [](const auto& b) { return b->has_ended(); });
}

// False if no block could do anything.
bool Cluster::take_turns() {
  std::vector<int> order(blocks_.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random_);
  bool any = false;
  for (const int rank : order) {
    // Blocks alone need not stop for others.
    const int turns = blocks_.size() == 1 ? std::numeric_limits<int>::max() : 1 + random_() % 4096;
    any |= blocks_[rank]->run(turns);
  }
  return any;
}

bool Cluster::pass_barrier() {
  const bool all_wait = std::all_of(blocks_.begin(), blocks_.end(),
                                    [](const auto& b) { return b->all_wait_for_cluster(); });
  if (!all_wait) return false;
  ++barrier_.phase;
  has_met_ = true;
  for (const std::unique_ptr<Block>& block : blocks_) block->resume_from_cluster();
  return true;
}

void Cluster::fail_deadlock() const {
  std::string text;
  for (const std::unique_ptr<Block>& block : blocks_) {
    text += (text.empty() ? "" : "; ") + block->name() + ": " + block->describe_threads();
  }
  throw Failure("emulated kernel, deadlock in " + text + seed_text());
}

unsigned char* Cluster::in_cta(const void* pointer, int rank) const {
  const auto* const own = static_cast<const unsigned char*>(pointer);
  if (own < shared_memory() || own >= shared_memory() + shared_memory_bytes()) {
    fail("an address of another block's shared memory, from one that is not in shared memory");
  }
  if (rank < 0 || rank >= static_cast<int>(blocks_.size())) {
    fail("block " + std::to_string(rank) + " of a cluster of " + std::to_string(blocks_.size()));
  }
  if (!has_met_) fail("shared memory of a block that has not been at a barrier");
  if (blocks_[rank]->has_ended()) fail("shared memory of a block that has ended");
  return shared_memory_of(rank) + (own - shared_memory());
}

void Cluster::arrive(const uint64_t* barrier, int rank) {
  auto* const mbarrier = reinterpret_cast<Mbarrier*>(in_cta(barrier, rank));
  tsan_release(mbarrier->place(mbarrier->phase));
  new_sent(rank) = Sent{{}, 0, nullptr, mbarrier};
}

void Cluster::send(float* to, const float* values, int count, int rank, const uint64_t* barrier) {
  const int bytes = count * static_cast<int>(sizeof(*values));
  check_shared("st.async", to, bytes, bytes);
  auto* const target = reinterpret_cast<float*>(in_cta(to, rank));
  auto* const mbarrier = reinterpret_cast<Mbarrier*>(in_cta(barrier, rank));
  tsan_write(target, bytes);
  tsan_release(mbarrier->place(mbarrier->phase));
  Sent& sent = new_sent(rank);
  sent = Sent{{}, count, target, mbarrier};
  const bool looks_right = Block::current().policy().looks_right;
  for (int i = 0; i < count; ++i) {
    sent.values[i] = values[i];
    // From now on nobody may rely on what was there.
    if (!looks_right) sent.to[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

void cluster_sync(const char* file, int line) { Block::current().cluster_sync({file, line}, true); }
void cluster_meet(const char* file, int line) {
  Block::current().cluster_sync({file, line}, false);
}
const void* in_cta(const void* pointer, int rank) {
  return Cluster::current().in_cta(pointer, rank);
}
void send_to_cta(float* to, const float* values, int count, int rank, const uint64_t* barrier) {
  Cluster::current().send(to, values, count, rank, barrier);
}
void mbarrier_arrive_at_cta(const uint64_t* barrier, int rank) {
  Cluster::current().arrive(barrier, rank);
}

}  // namespace emu
