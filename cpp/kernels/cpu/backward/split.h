// How the work of the backward is cut into tasks.
#pragma once

#include <cstdint>

#include "cpu/backward/scratch.h"
#include "params.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// Sequences, of one length or packed, as tasks of some blocks of one head.
class BlockSplit {
 public:
  struct Task {
    std::int64_t index;  // of the sequence
    int head;
    std::int64_t first;  // may lie behind the sequence's end: then there is nothing to do
  };

  // `cu_seqlens` is null where all sequences have the same length.
  BlockSplit(const std::int32_t* cu_seqlens, std::int64_t batch, int length, int heads, int block,
             int threads)
      : cu_seqlens_(cu_seqlens), batch_(batch), heads_(heads) {
    for (int blocks = kTaskBlocks; blocks >= 1; --blocks) {
      per_task_ = blocks * block;
      tiles_ = cu_seqlens != nullptr ? first_tile(batch)
                                     : batch * ((std::int64_t{length} + per_task_ - 1) / per_task_);
      if (threads == 1 || tasks() >= std::int64_t{4} * threads) break;
    }
  }

  // Every sequence of a head is one task.
  static BlockSplit whole(std::int64_t batch, int heads) {
    BlockSplit split(nullptr, batch, 0, heads, 1, 1);
    split.per_task_ = 1;
    split.tiles_ = batch;
    return split;
  }

  std::int64_t tasks() const { return tiles_ * heads_; }
  int per_task() const { return per_task_; }

  // Tiles that begin equally far from their sequence's beginning follow each other: under a causal
  // mask that sorts tasks by their length.
  Task task(std::int64_t number) const {
    const std::int64_t tile = number / heads_;
    const int head = static_cast<int>(number % heads_);
    if (cu_seqlens_ == nullptr) return {tile % batch_, head, tile / batch_ * per_task_};
    const std::int64_t index = sequence_at(tile);
    return {index, head, (tile - first_tile(index)) * per_task_};
  }

 private:
  // As in Split: sequence b may take the tiles from here to first_tile(b + 1).
  std::int64_t first_tile(std::int64_t b) const { return cu_seqlens_[b] / per_task_ + b; }

  std::int64_t sequence_at(std::int64_t tile) const {
    std::int64_t low = 0;
    std::int64_t high = batch_;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      if (first_tile(middle) <= tile) {
        low = middle;
      } else {
        high = middle;
      }
    }
    return low;
  }

  const std::int32_t* cu_seqlens_;
  std::int64_t batch_;
  int heads_;
  int per_task_ = 1;
  std::int64_t tiles_ = 0;
};

// A task takes a whole sequence of a kv head where there are enough of these to keep all threads
// busy. Each tile is then made once, for dK, dV and dQ. That needs memory for sums of dQ, whose
// rows are the result (0: tasks are blocks). Both ways make the same sums.
template <typename T>
std::int64_t whole_rows(const BackwardParams& p, int threads) {
  const Attention& a = p.attention;
  constexpr std::int64_t kMostBytes = std::int64_t{4} << 20;
  const bool packed = a.cu_seqlens_q != nullptr;
  const std::int64_t tasks = a.batch * a.heads_k;
  const std::int64_t rounds = (tasks + threads - 1) / threads;
  // A tile made once is five products instead of seven. Packed sequences may differ in length.
  const bool busy = packed ? tasks >= 4 * threads : 7 * tasks >= 5 * rounds * threads;
  if (!busy || p.dalibi_slopes.data != nullptr) return 0;
  const std::int64_t sequence = packed ? a.total_q : a.seqlen_q;
  const std::int64_t padded = (sequence + kBlockM - 1) / kBlockM * kBlockM;
  const std::int64_t rows = a.heads / a.heads_k * padded;
  const std::int64_t row_bytes = round_up(a.head_dim, kColumnPad<T>) * std::int64_t{sizeof(T)};
  return rows <= kMostBytes / row_bytes ? rows : 0;
}

// Indices [begin, end) of an axis: all of those that broadcast onto index `at` of a tensor with
// `extent` of them.
struct Indices {
  std::int64_t begin;
  std::int64_t end;

  static Indices onto(std::int64_t at, std::int64_t extent, std::int64_t all) {
    if (extent == 1) return {0, all};
    return {at, at < all ? at + 1 : at};
  }
};

// The tiles of dbias; of an axis that is broadcast they are one element long.
class BiasSplit {
 public:
  struct Task {
    std::int64_t batch;
    int head;
    std::int64_t row_block;
    std::int64_t key_block;
  };

  explicit BiasSplit(const BackwardParams& p)
      : batch_(p.dbias_batch),
        heads_(p.dbias_heads),
        row_blocks_((p.dbias_rows + kBlockM - 1) / kBlockM),
        key_blocks_((p.dbias_columns + kBlockN - 1) / kBlockN) {
    if (p.dbias.data == nullptr) batch_ = 0;
  }

  std::int64_t tasks() const { return batch_ * heads_ * row_blocks_ * key_blocks_; }

  Task task(std::int64_t number) const {
    Task t;
    t.key_block = number % key_blocks_;
    number /= key_blocks_;
    t.row_block = number % row_blocks_;
    number /= row_blocks_;
    t.head = static_cast<int>(number % heads_);
    t.batch = number / heads_;
    return t;
  }

 private:
  std::int64_t batch_;
  std::int64_t heads_;
  std::int64_t row_blocks_;
  std::int64_t key_blocks_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
