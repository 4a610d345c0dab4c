#include "block.hpp"

#include <algorithm>
#include <utility>

#ifdef EMU_TSAN
extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void __tsan_read_range(void* address, unsigned long bytes);
void __tsan_write_range(void* address, unsigned long bytes);
}
#endif

// The writable objects of launch.cpp.
extern uint3 g_thread_idx asm("threadIdx");
extern uint3 g_block_idx asm("blockIdx");
extern dim3 g_grid_dim asm("gridDim");

namespace emu {
namespace {

Block* g_block = nullptr;
Thread* g_thread = nullptr;

// Threads, with their stacks, are made once and used by the blocks of this rank of every launch.
Thread& pooled_thread(int rank, size_t index) {
  static std::array<std::vector<std::unique_ptr<Thread>>, kMaxCluster> pools;
  std::vector<std::unique_ptr<Thread>>& pool = pools[rank];
  while (pool.size() <= index) pool.push_back(std::make_unique<Thread>());
  return *pool[index];
}

int lane_of(const Thread& thread) { return thread.index % kWarpSize; }
int warp_of(const Thread& thread) { return thread.index / kWarpSize; }
uint32_t bit(int lane) { return uint32_t{1} << lane; }
int lowest(uint32_t lanes) { return __builtin_ctz(lanes); }

// The n-th set bit, counted from 0.
int nth_bit(uint32_t bits, uint64_t n) {
  for (; n > 0; --n) bits &= bits - 1;
  return lowest(bits);
}

}  // namespace

const char* const kBarrierNames[kBarriers] = {
    "__syncthreads",    "named barrier 1",  "named barrier 2",  "named barrier 3",
    "named barrier 4",  "named barrier 5",  "named barrier 6",  "named barrier 7",
    "named barrier 8",  "named barrier 9",  "named barrier 10", "named barrier 11",
    "named barrier 12", "named barrier 13", "named barrier 14", "named barrier 15"};

Policy policy_of(const Options& options) {
  constexpr int kBursts[] = {0, 2, 16, 200};
  constexpr Policy::Lanes kLanes[] = {Policy::Lanes::kAscending, Policy::Lanes::kDescending,
                                      Policy::Lanes::kShuffled};
  // Eight consecutive seeds meet every burst twice and every order of lanes.
  const int burst = options.burst >= 0 ? options.burst : kBursts[options.seed % 4];
  const bool loads_late = options.seed / 2 % 2 == 1;
  return {burst, kLanes[options.seed % 3], loads_late, options.seed % 4 == 3};
}

Block::Block(dim3 block_dim, uint64_t index, int rank, const Policy& policy, uint64_t seed,
             Body body, void* arg)
    : block_dim_(block_dim),
      block_idx_{static_cast<unsigned>(index % g_grid_dim.x),
                 static_cast<unsigned>(index / g_grid_dim.x % g_grid_dim.y),
                 static_cast<unsigned>(index / g_grid_dim.x / g_grid_dim.y)},
      rank_(rank),
      policy_(policy),
      random_(seed),
      body_(body),
      arg_(arg) {
  const int count = static_cast<int>(block_dim.x * block_dim.y * block_dim.z);
  warps_.resize(count / kWarpSize);
  for (int i = 0; i < count; ++i) {
    Thread& thread = pooled_thread(rank, i);
    const unsigned x = i % block_dim.x, y = i / block_dim.x % block_dim.y;
    thread.index = i;
    thread.thread_idx = {x, y, i / (block_dim.x * block_dim.y)};
    thread.state = Thread::State::kRunnable;
    thread.cp_async.first = thread.cp_async.last = thread.cp_async.open_group = 0;
    threads_.push_back(&thread);
  }
  for (size_t warp = 0; warp < warps_.size(); ++warp) wake(warp, kFullMask);
  prepare_shared_memory(rank, policy);  // before any thread of the cluster starts
}

// The globals are this block's.
void Block::enter() {
  g_block = this;
  g_block_idx = block_idx_;
  use_shared_memory(rank_);
  if (has_started_) return;
  for (Thread* thread : threads_) thread->fiber.start(&Block::thread_main, thread);
  reset_async();
  has_started_ = true;
}

bool Block::run(int turns) {
  if (has_ended_) return false;
  enter();
  bool any = false;
  for (; turns > 0 && !error_; --turns) {
    const bool in_flight = tma_loads_in_flight() || sent_in_flight(rank_);
    if (!policy_.loads_late && in_flight && random_() % 64 == 0) any |= land();
    Thread* thread = next_thread();
    if (thread == nullptr && land()) {
      any = true;
      continue;
    }
    if (thread == nullptr) break;
    any = true;
    g_thread = thread;
    g_thread_idx = thread->thread_idx;
    thread->fiber.resume();
    g_thread = nullptr;
  }
  has_ended_ = std::all_of(threads_.begin(), threads_.end(), [](const Thread* thread) {
    return thread->state == Thread::State::kExited;
  });
  if (error_) std::rethrow_exception(std::exchange(error_, nullptr));
  if (has_ended_) check_idle();
  g_block = nullptr;
  return any;
}

void Block::thread_main(void* self) {
  Thread& thread = *static_cast<Thread*>(self);
  Block& block = *g_block;
  try {
    block.body_(block.arg_);
  } catch (...) {
    block.error_ = std::current_exception();
  }
  tsan_release(&g_launch_end);
  thread.state = Thread::State::kExited;
  Warp& warp = block.warps_[warp_of(thread)];
  warp.runnable &= ~bit(lane_of(thread));
  if (warp.runnable == 0) block.runnable_warps_ &= ~bit(warp_of(thread));
}

Thread* Block::next_thread() {
  if (runnable_warps_ == 0) return nullptr;
  const bool runnable = (runnable_warps_ & bit(warp_)) != 0;
  const bool stay = runnable && (policy_.burst == 0 || turns_left_ > 0);
  if (!stay) {
    warp_ = nth_bit(runnable_warps_, random_() % __builtin_popcount(runnable_warps_));
    turns_left_ = policy_.burst;
  }
  if (policy_.burst > 0) --turns_left_;
  return threads_[warp_ * kWarpSize + next_lane(warps_[warp_].runnable)];
}

int Block::next_lane(uint32_t runnable) {
  switch (policy_.lanes) {
    case Policy::Lanes::kAscending:
      return lowest(runnable);
    case Policy::Lanes::kDescending:
      return kWarpSize - 1 - __builtin_clz(runnable);
    case Policy::Lanes::kShuffled:
      break;
  }
  return nth_bit(runnable, random_() % __builtin_popcount(runnable));
}

void Block::wait(const char* what, Site site) {
  Thread& self = *g_thread;
  self.state = Thread::State::kWaiting;
  self.waits_for = what;
  self.site = site;
  Warp& warp = warps_[warp_of(self)];
  warp.runnable &= ~bit(lane_of(self));
  if (warp.runnable == 0) runnable_warps_ &= ~bit(warp_of(self));
  Fiber::suspend();
}

void Block::wake(int warp, uint32_t lanes) {
  if (lanes == 0) return;
  warps_[warp].runnable |= lanes;
  runnable_warps_ |= bit(warp);
  for (; lanes != 0; lanes &= lanes - 1) {
    threads_[warp * kWarpSize + lowest(lanes)]->state = Thread::State::kRunnable;
  }
}

// -- Collectives of a warp ------------------------------------------------------------------------

void Block::collective(const CollectiveOp& op, uint32_t mask, void* args) {
  Thread& self = *g_thread;
  const uint32_t me = bit(lane_of(self));
  if ((mask & me) == 0) fail(std::string(op.name) + ": this lane is not in the mask");
  self.op = &op;
  self.mask = mask;
  self.args = args;
  Warp& warp = warps_[warp_of(self)];
  warp.arrived |= me;
  void* publication = nullptr;
  if (op.orders_memory) {
    publication = publication_of(warp, mask).place();
    tsan_release(publication);
  }
  if ((warp.arrived & mask) == mask && all_arrived_with(self)) {
    perform(self);
    wake(warp_of(self), mask & ~me);
  } else {
    wait(op.name, {});
  }
  if (op.orders_memory) tsan_acquire(publication);
}

// All lanes of the mask wait somewhere: at the same operation? A lane that waits for this one
// elsewhere would wait forever; one that waits for others only comes later.
bool Block::all_arrived_with(const Thread& self) const {
  Thread* const* warp = &threads_[warp_of(self) * kWarpSize];
  bool all = true;
  for (uint32_t rest = self.mask; rest != 0; rest &= rest - 1) {
    const Thread& other = *warp[lowest(rest)];
    if (other.op == self.op && other.mask == self.mask) continue;
    all = false;
    if ((other.mask & bit(lane_of(self))) == 0) continue;
    fail(std::string("a divergent warp: this lane is at ") + self.op->name + ", but thread " +
         std::to_string(other.index) + " is at " + other.op->name +
         (other.op == self.op ? " with another mask" : ""));
  }
  return all;
}

void Block::perform(const Thread& self) {
  Warp& warp = warps_[warp_of(self)];
  const CollectiveOp& op = *self.op;
  const uint32_t mask = self.mask;
  void* lanes[kWarpSize] = {};
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    lanes[lowest(rest)] = threads_[warp_of(self) * kWarpSize + lowest(rest)]->args;
  }
  warp.arrived &= ~mask;
  if (op.execute != nullptr) op.execute(lanes, mask);
  if (op.orders_memory) ++publication_of(warp, mask).phase;
}

Publication& Block::publication_of(Warp& warp, uint32_t mask) {
  for (Warp::Sync& sync : warp.syncs) {
    if (sync.mask == 0) sync.mask = mask;
    if (sync.mask == mask) return sync.publication;
  }
  fail("__syncwarp with more than 16 different masks is not emulated");
}

// -- Barriers of the block ------------------------------------------------------------------------

int Block::barrier_sync(int id, int count, Site site, bool predicate) {
  Barrier& barrier = arrive(id, count);
  check_convergence(barrier, site);
  barrier.votes += predicate ? 1 : 0;
  const int& result = barrier.result[barrier.publication.phase % 2];
  void* publication = barrier.publication.place();
  tsan_release(publication);
  if (!complete(barrier)) {
    barrier.waiting[warp_of(*g_thread)] |= bit(lane_of(*g_thread));
    wait(kBarrierNames[id], site);
  }
  tsan_acquire(publication);
  return result;
}

void Block::barrier_arrive(int id, int count) {
  Barrier& barrier = arrive(id, count);
  tsan_release(barrier.publication.place());
  complete(barrier);
}

Barrier& Block::arrive(int id, int count) {
  if (id < 0 || id >= kBarriers) fail("barrier " + std::to_string(id) + ": ids are 0 to 15");
  Barrier& barrier = barriers_[id];
  if (count <= 0 || count % kWarpSize != 0 || count > static_cast<int>(threads_.size())) {
    fail(std::string(kBarrierNames[id]) + ": a count of " + std::to_string(count) +
         " threads in a block of " + std::to_string(threads_.size()));
  }
  if (barrier.arrived == 0) barrier.expected = count;
  if (barrier.expected != count) {
    fail(std::string(kBarrierNames[id]) + ": a count of " + std::to_string(count) +
         " threads, but others came with " + std::to_string(barrier.expected));
  }
  ++barrier.arrived;
  return barrier;
}

bool Block::complete(Barrier& barrier) {
  if (barrier.arrived < barrier.expected) return false;
  for (size_t warp = 0; warp < warps_.size(); ++warp) {
    wake(warp, std::exchange(barrier.waiting[warp], 0));
  }
  barrier.arrived = 0;
  barrier.result[barrier.publication.phase % 2] = std::exchange(barrier.votes, 0);
  ++barrier.publication.phase;
  ++mutable_counters().barriers;
  return true;
}

// bar.sync is executed by a whole warp at once, so its lanes come from one place in the source.
void Block::check_convergence(const Barrier& barrier, Site site) const {
  const int warp = warp_of(*g_thread);
  const uint32_t waiting = barrier.waiting[warp];
  if (waiting == 0) return;
  const Thread& other = *threads_[warp * kWarpSize + lowest(waiting)];
  if (other.site.line == site.line && other.site.file == site.file) return;
  fail("a divergent barrier: this lane is at" + text(site) + ", but thread " +
       std::to_string(other.index) + " is at" + text(other.site));
}

void fail(const std::string& what) {
  if (g_thread == nullptr) throw Failure("emulated kernel, outside of a launch: " + what);
  throw Failure("emulated kernel, " + name_of_block() + ", thread " +
                std::to_string(g_thread->index) + ": " + what + seed_text());
}

// -- The running thread ---------------------------------------------------------------------------

void Block::leave() { g_block = nullptr; }

bool Block::inside_kernel() { return g_thread != nullptr; }

Block& Block::current() {
  if (g_thread == nullptr) fail("a device function was called by the host");
  return *g_block;
}

Block& Block::current_block() { return *g_block; }

Thread& Block::current_thread() {
  current();
  return *g_thread;
}

int syncthreads_count(bool predicate, const char* file, int line) {
  Block& block = Block::current();
  return block.barrier_sync(0, block.thread_count(), {file, line}, predicate);
}

void barrier_sync(int id, int threads, const char* file, int line) {
  Block::current().barrier_sync(id, threads, {file, line});
}

void barrier_arrive(int id, int threads) { Block::current().barrier_arrive(id, threads); }

int lane_index() { return lane_of(Block::current_thread()); }
int warp_index() { return warp_of(Block::current_thread()); }

#ifdef EMU_TSAN
void tsan_read(const void* address, size_t bytes) {
  __tsan_read_range(const_cast<void*>(address), bytes);
}
void tsan_write(void* address, size_t bytes) { __tsan_write_range(address, bytes); }
void tsan_acquire(void* address) { __tsan_acquire(address); }
void tsan_release(void* address) { __tsan_release(address); }
#else
void tsan_read(const void*, size_t) {}
void tsan_write(void*, size_t) {}
void tsan_acquire(void*) {}
void tsan_release(void*) {}
#endif

}  // namespace emu
