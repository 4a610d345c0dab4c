// The blocks of a cluster: they take turns, and each has shared memory of its own.
#pragma once

#include <vector_types.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "block.hpp"

namespace emu {

class Cluster {
 public:
  // Of `size` blocks, of which `first` is the first one's number in the grid.
  Cluster(uint64_t first, int size, dim3 block_dim, const Policy& policy, uint64_t seed,
          Block::Body body, void* arg);
  ~Cluster();

  // Runs every block to its end. Throws what a thread threw, or Failure for a deadlock.
  void run();

  // For the thread that is running. The place of `pointer`, which is in this block's shared memory,
  // in that of block `rank`, which has not ended.
  unsigned char* in_cta(const void* pointer, int rank) const;
  // The numbers come there at some time, and count at the same block's mbarrier. An arrival comes
  // at some time, too.
  void send(float* to, const float* values, int count, int rank, const uint64_t* barrier);
  void arrive(const uint64_t* barrier, int rank);
  void* barrier_place() { return barrier_.place(); }

  static Cluster& current();

 private:
  bool has_ended() const;
  bool take_turns();
  bool pass_barrier();
  [[noreturn]] void fail_deadlock() const;

  std::mt19937_64 random_;
  std::vector<std::unique_ptr<Block>> blocks_;
  Publication barrier_;   // what threads have written before the cluster's barrier
  bool has_met_ = false;  // all blocks have come to a barrier
};

}  // namespace emu
