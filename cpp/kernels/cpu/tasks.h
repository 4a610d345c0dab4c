// How the work is cut into tasks.
#pragma once

#include <cstdint>

#include "cpu/amx/tiles.h"
#include "cpu/gemm.h"
#include "cpu/gemv.h"
#include "cpu/simd/vector.h"
#include "params.h"
#include "variant/sequence.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

inline constexpr int kBlockN = 64;  // keys of a step; blocks of a block mask are multiples of it
#if ANYFLASH_CPU_TILES
inline constexpr int kPanelKeys = 128;  // keys of a panel's step where there is no block mask
inline constexpr int kTaskRows = 512;   // query rows of a task, where there are enough of them
#else
inline constexpr int kPanelKeys = kBlockN;
inline constexpr int kTaskRows = 192;
#endif

// Rows of a panel, and panels of a task.
template <typename T>
inline constexpr int kPanelRows = kMaxVectors * Simd<T>::kLanes;
template <typename T>
inline constexpr int kTaskPanels = (kTaskRows + kPanelRows<T> - 1) / kPanelRows<T>;

// Rows [first_row, end_row) of the heads [first_head, ...) of one sequence, one head after the
// other; none where the range is empty.
struct Task {
  std::int64_t index;  // of the sequence
  Sequence sequence;
  int first_head;
  int head_k;
  std::int64_t first_row;
  std::int64_t end_row;
  bool single_row;  // its rows are few, and go one by one
  int first_key;    // no other keys than [first_key, end_key) of the sequence
  int end_key;
  std::int64_t first_bias_row = 0;
};

// Tasks are tiles of query rows of a `unit` of a sequence, which is one head. Where a head has too
// few rows for a panel (decoding), it is all heads that share a kv head: they then share the lanes
// and the packed keys.
class Split {
 public:
  // Every task is to be done `times` times (for one part of the keys after the other).
  template <typename T>
  static Split make(const Attention& p, int threads, int times = 1) {
    Split s(p);
    if (p.batch <= 0 || p.heads <= 0 || p.seqlen_q <= 0) return s;
    s.heads_per_k_ = p.heads / p.heads_k;
    s.few_rows_ = kPanelRows<T>;
    s.max_single_rows_ = kMaxSingleRows<T>;
    s.heads_per_unit_ = p.seqlen_q < kPanelRows<T> ? s.heads_per_k_ : 1;
    s.units_ = p.heads / s.heads_per_unit_;
    // Fewer rows to a task where that is needed to give every thread some tasks.
    for (int panels = kTaskPanels<T>; panels >= 1; panels /= 2) {
      s.rows_per_task_ = panels * kPanelRows<T>;
      if (p.cu_seqlens_q == nullptr) {
        const std::int64_t rows = std::int64_t{s.heads_per_unit_} * p.seqlen_q;
        s.tiles_ = (rows + s.rows_per_task_ - 1) / s.rows_per_task_;
        s.tasks_ = s.tiles_ * p.batch * s.units_;
      } else {
        s.tiles_ = s.first_tile(p.batch);
        s.tasks_ = s.tiles_ * s.units_;
      }
      if (threads == 1 || s.tasks_ * times >= std::int64_t{4} * threads) break;
    }
    return s;
  }

  std::int64_t tasks() const { return tasks_; }
  int rows_per_task() const { return rows_per_task_; }

  // The tiles of a head follow each other, since they read the same keys. The last ones come first:
  // under a causal mask they see the most keys, and a long task at the end would leave the other
  // threads idle.
  Task task(std::int64_t number) const {
    const bool packed = p_->cu_seqlens_q != nullptr;
    const std::int64_t column = number / tiles_;
    std::int64_t tile = tiles_ - 1 - number % tiles_;
    Task t;
    t.index = packed ? sequence_at(tile) : column / units_;
    if (packed) tile -= first_tile(t.index);
    t.sequence = sequence_of(*p_, t.index);
    t.first_head = static_cast<int>(column % units_) * heads_per_unit_;
    t.head_k = t.first_head / heads_per_k_;
    const std::int64_t group_rows = std::int64_t{heads_per_k_} * t.sequence.seqlen_q;
    t.single_row = group_rows <= max_single_rows_;
    t.first_key = 0;
    t.end_key = t.sequence.seqlen_k;
    t.first_row = tile * rows_per_task_;
    if (heads_per_unit_ != heads_per_k_ && t.sequence.seqlen_q < few_rows_) {
      // A short sequence beside longer ones: the first task of its first head does the whole group.
      const bool first = tile == 0 && t.first_head % heads_per_k_ == 0;
      t.end_row = first ? group_rows : t.first_row;
      return t;
    }
    const std::int64_t rows = std::int64_t{heads_per_unit_} * t.sequence.seqlen_q;
    const std::int64_t end = t.first_row + rows_per_task_;
    t.end_row = end < rows ? end : rows;
    return t;
  }

 private:
  explicit Split(const Attention& p) : p_(&p) {}

  // Packed sequences are numbered by tiles without a list of them. Sequence b may take the tiles
  // from here to first_tile(b + 1); what it does not need stays empty. They are enough for n rows
  // after c others, r to a tile: ceil(n / r) <= floor((c + n) / r) - floor(c / r) + 1.
  std::int64_t first_tile(std::int64_t b) const {
    return std::int64_t{heads_per_unit_} * p_->cu_seqlens_q[b] / rows_per_task_ + b;
  }

  // The last sequence that begins at this tile or before.
  std::int64_t sequence_at(std::int64_t tile) const {
    std::int64_t low = 0;
    std::int64_t high = p_->batch;
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

  const Attention* p_;
  int heads_per_k_ = 1;
  int heads_per_unit_ = 1;
  int few_rows_ = 0;         // up to here a head shares a task with the others of its group
  int max_single_rows_ = 0;  // up to here the rows of a group go one by one
  int rows_per_task_ = 1;
  std::int64_t units_ = 0;  // of a sequence
  std::int64_t tiles_ = 0;  // packed: of all sequences; else of each one
  std::int64_t tasks_ = 0;
};

// The forward's work as threads_worth() counts it; a bound, since of masks only windows are seen.
inline double forward_work(const Attention& p) {
  const double rows = p.cu_seqlens_q == nullptr ? static_cast<double>(p.batch) * p.seqlen_q
                                                : static_cast<double>(p.total_q);
  double keys = p.seqlen_k;
  const double band = static_cast<double>(p.window.left) + static_cast<double>(p.window.right) + 1;
  if (p.window.left >= 0 && p.window.right >= 0 && band < keys) keys = band;
  return 2.0 * rows * p.heads * keys * (p.head_dim + p.head_dim_v);
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
