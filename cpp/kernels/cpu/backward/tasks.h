// The tasks of the backward: blocks of keys make dK and dV, blocks of rows make dQ, tiles of dbias
// make that. Each sum is made by one task in an order of its own. So results depend neither on the
// number of threads, nor on the number of blocks in a task, nor on other sequences (unless they are
// summed over).
#pragma once

#include <cstdint>

#include "cpu/backward/blocks.h"
#include "cpu/backward/scratch.h"
#include "cpu/backward/split.h"
#include "cpu/backward/sums.h"
#include "cpu/backward/tile.h"
#include "params.h"
#include "variant/mask.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// One thread's work on one task after the other.
template <typename E>
class BackwardTasks {
 public:
  using T = typename Compute<E>::Type;

  BackwardTasks(const BackwardParams& p, const RowSums<T>& sums, const BackwardScratch<T>& scratch)
      : p_(p),
        a_(p.attention),
        scratch_(scratch),
        blocks_(p, sums, scratch_),
        tile_(p, blocks_, scratch_) {}
  // tile_ refers to this object.
  BackwardTasks(const BackwardTasks&) = delete;

  // dK, dV of keys [task.first, ...) of a kv head: over the query heads of its group, over blocks
  // of rows.
  void keys(const BlockSplit::Task& task, int per_task) {
    blocks_.begin(task.index);
    visit_keys_of(task, per_task, /*dq=*/nullptr);
  }

  // dK, dV and dQ of a kv head: the same for all its keys, and dQ over blocks of keys.
  void whole(BlockSplit::Task task) {
    blocks_.begin(task.index);
    const Sequence& sequence = blocks_.sequence();
    const int group = a_.heads / a_.heads_k;
    zero(scratch_.dq, group * dq_size());
    constexpr int kPerTask = kTaskBlocks * kBlockN;
    for (task.first = 0; task.first < sequence.all_keys; task.first += kPerTask) {
      visit_keys_of(task, kPerTask, scratch_.dq);
    }
    RowBlock<T>& rows = scratch_.row_blocks[0];
    for (int i = 0; i < group; ++i) {
      rows.head = task.head * group + i;
      for (rows.first_row = 0; rows.first_row < sequence.seqlen_q; rows.first_row += kBlockM) {
        const int rest = sequence.seqlen_q - rows.first_row;
        rows.count = rest < kBlockM ? rest : kBlockM;
        rows.dq = scratch_.dq + i * dq_size() + rows.first_row * scratch_.ld;
        blocks_.store_rows(rows);
      }
    }
  }

  // dQ of rows [task.first, ...) of a head: over blocks of keys.
  void rows(const BlockSplit::Task& task, int per_task) {
    blocks_.begin(task.index);
    const int count = blocks_in(task.first, per_task, blocks_.sequence().seqlen_q, kBlockM);
    for (int i = 0; i < count; ++i) begin_rows(task, i);
    visit_keys(task.head, count);
    for (int i = 0; i < count; ++i) blocks_.store_rows(scratch_.row_blocks[i]);
  }

  // A tile of dbias: over the sequences and heads, and blocks of rows and keys, that broadcast onto
  // it.
  void bias(const BiasSplit::Task& task) {
    for (int i = 0; i < kBlockM * kBlockN; ++i) scratch_.sum[i] = T(0);
    const Indices batch = Indices::onto(task.batch, p_.dbias_batch, a_.batch);
    const Indices heads = Indices::onto(task.head, p_.dbias_heads, a_.heads);
    for (std::int64_t index = batch.begin; index < batch.end; ++index) {
      blocks_.begin(index);
      for (std::int64_t head = heads.begin; head < heads.end; ++head) {
        add_bias(task, static_cast<int>(head));
      }
    }
    store_bias(task);
  }

 private:
  struct Range {
    int begin;
    int end;

    bool holds(int block) const { return begin <= block && block < end; }
  };

  static int blocks_in(std::int64_t first, int per_task, int length, int block) {
    const std::int64_t rest = length - first;
    if (rest <= 0) return 0;
    return static_cast<int>(((rest < per_task ? rest : per_task) + block - 1) / block);
  }

  void zero(T* at, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) at[i] = T(0);
  }

  // Elements of the sums of dQ of a head.
  std::int64_t dq_size() const {
    return round_up(blocks_.sequence().seqlen_q, kBlockM) * scratch_.ld;
  }

  // `dq`: sums of the heads of the group, to be added to; null: none.
  void visit_keys_of(const BlockSplit::Task& task, int per_task, T* dq) {
    const int count = blocks_in(task.first, per_task, blocks_.sequence().all_keys, kBlockN);
    for (int i = 0; i < count; ++i) begin_keys(task, i);
    const int group = a_.heads / a_.heads_k;
    for (int i = 0; i < group; ++i) {
      visit_rows(task.head * group + i, count, dq == nullptr ? nullptr : dq + i * dq_size());
    }
    for (int i = 0; i < count; ++i) blocks_.store_keys(task.head, scratch_.key_blocks[i]);
  }

  void begin_keys(const BlockSplit::Task& task, int i) {
    KeyBlock<T>& keys = scratch_.key_blocks[i];
    blocks_.load_keys(task.head, static_cast<int>(task.first) + i * kBlockN, &keys);
    zero(keys.dk, kBlockN * scratch_.ld);
    zero(keys.dv, kBlockN * scratch_.ld_v);
  }

  void begin_rows(const BlockSplit::Task& task, int i) {
    RowBlock<T>& rows = scratch_.row_blocks[i];
    blocks_.load_rows(task.head, static_cast<int>(task.first) + i * kBlockM, &rows);
    zero(rows.dq, kBlockM * scratch_.ld);
    for (int r = 0; r < kBlockM; ++r) rows.slope_sum[r] = 0;
  }

  // All rows of a head for the first `count` key blocks.
  void visit_rows(int head, int count, T* dq) {
    const Mask mask = blocks_.mask();
    Range ranges[kTaskBlocks];
    Range all{0, 0};
    for (int i = 0; i < count; ++i) {
      const MRange range = mask.m_range(scratch_.key_blocks[i].first_key, kBlockN, kBlockM);
      ranges[i] = {range.begin, range.end};
      all = join(all, ranges[i]);
    }
    RowBlock<T>& rows = scratch_.row_blocks[0];
    for (int block = all.begin; block < all.end; ++block) {
      bool loaded = false;
      for (int i = 0; i < count; ++i) {
        KeyBlock<T>& keys = scratch_.key_blocks[i];
        if (!ranges[i].holds(block) || !tile_.kept(head, block * kBlockM, keys.first_key)) continue;
        if (!loaded) blocks_.load_rows(head, block * kBlockM, &rows);
        loaded = true;
        if (!tile_.compute(rows, keys, GradientOf::kProduct)) continue;
        tile_.add_to_keys(rows, keys);
        if (dq == nullptr) continue;
        rows.dq = dq + rows.first_row * scratch_.ld;
        tile_.add_to_rows(rows, keys);
      }
    }
  }

  // All keys for the first `count` row blocks of a head.
  void visit_keys(int head, int count) {
    const Mask mask = blocks_.mask();
    Range ranges[kTaskBlocks];
    Range all{0, 0};
    for (int i = 0; i < count; ++i) {
      const KRange range = mask.k_range(scratch_.row_blocks[i].first_row, kBlockM, kBlockN);
      ranges[i] = {range.begin, range.end};
      all = join(all, ranges[i]);
    }
    KeyBlock<T>& keys = scratch_.key_blocks[0];
    for (int block = all.begin; block < all.end; ++block) {
      bool loaded = false;
      for (int i = 0; i < count; ++i) {
        RowBlock<T>& rows = scratch_.row_blocks[i];
        if (!ranges[i].holds(block) || !tile_.kept(head, rows.first_row, block * kBlockN)) continue;
        if (!loaded) blocks_.load_keys(blocks_.head_k(head), block * kBlockN, &keys);
        loaded = true;
        if (tile_.compute(rows, keys, GradientOf::kProduct)) tile_.add_to_rows(rows, keys);
      }
    }
  }

  static Range join(const Range& a, const Range& b) {
    if (a.begin >= a.end) return b;
    if (b.begin >= b.end) return a;
    return {a.begin < b.begin ? a.begin : b.begin, a.end > b.end ? a.end : b.end};
  }

  // What a head of a sequence adds to a tile of dbias.
  void add_bias(const BiasSplit::Task& task, int head) {
    const Sequence& sequence = blocks_.sequence();
    const auto blocks = [](int length, int block) { return (length + block - 1) / block; };
    const Indices row_blocks =
        Indices::onto(task.row_block, p_.dbias_rows, blocks(sequence.seqlen_q, kBlockM));
    const Indices key_blocks =
        Indices::onto(task.key_block, p_.dbias_columns, blocks(sequence.seqlen_k, kBlockN));
    const Mask mask = blocks_.mask();
    RowBlock<T>& rows = scratch_.row_blocks[0];
    KeyBlock<T>& keys = scratch_.key_blocks[0];
    for (std::int64_t i = row_blocks.begin; i < row_blocks.end; ++i) {
      const int first_row = static_cast<int>(i) * kBlockM;
      const KRange seen = mask.k_range(first_row, kBlockM, kBlockN);
      bool loaded = false;
      for (std::int64_t j = key_blocks.begin; j < key_blocks.end; ++j) {
        const int first_key = static_cast<int>(j) * kBlockN;
        if (j < seen.begin || j >= seen.end || !tile_.kept(head, first_row, first_key)) continue;
        if (!loaded) blocks_.load_rows(head, first_row, &rows);
        loaded = true;
        blocks_.load_keys(blocks_.head_k(head), first_key, &keys);
        if (tile_.compute(rows, keys, GradientOf::kScore)) add_to_sum(rows, keys);
      }
    }
  }

  void add_to_sum(const RowBlock<T>& rows, const KeyBlock<T>& keys) {
    for (int j = 0; j < keys.count; ++j) {
      const int at = j * kBlockM;
      for (int r = 0; r < rows.count; ++r) scratch_.sum[at + r] += scratch_.ds[at + r];
    }
  }

  void store_bias(const BiasSplit::Task& task) const {
    const Strides& stride = p_.dbias.stride;
    const std::int64_t at = task.batch * stride.batch + task.head * stride.head;
    const std::int64_t first_row = task.row_block * kBlockM;
    const std::int64_t first_key = task.key_block * kBlockN;
    for (std::int64_t r = 0; r < kBlockM && first_row + r < p_.dbias_rows; ++r) {
      for (std::int64_t j = 0; j < kBlockN && first_key + j < p_.dbias_columns; ++j) {
        write_number(p_.dbias, at + (first_row + r) * stride.row + (first_key + j) * stride.col,
                     bias_sum(static_cast<int>(r), static_cast<int>(j)));
      }
    }
  }

  // An element of the tile's sum; of an axis that is broadcast all elements.
  double bias_sum(int row, int key) const {
    const Indices rows = Indices::onto(row, p_.dbias_rows, kBlockM);
    const Indices keys = Indices::onto(key, p_.dbias_columns, kBlockN);
    double sum = 0;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      for (std::int64_t r = rows.begin; r < rows.end; ++r) {
        sum += static_cast<double>(scratch_.sum[j * kBlockM + r]);
      }
    }
    return sum;
  }

  const BackwardParams& p_;
  const Attention& a_;
  BackwardScratch<T> scratch_;
  Blocks<E> blocks_;
  BackwardConfig<E> tile_;
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
