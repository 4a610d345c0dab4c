// The rows of a task whose keys lie in a cache: paged or not, of q's dtype or quantised.
#pragma once

#include <cstdint>

#include "cpu/decode/join.h"
#include "cpu/query_rows.h"
#include "cpu/scores.h"
#include "cpu/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/quantized.h"
#include "cpu/tasks.h"
#include "params.h"
#include "variant/cache.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// Keys of a block that may lie in several pages.
template <typename T>
struct ScatteredRows {
  const T* const* rows;

  ANYFLASH_CPU_INLINE const T* row(int j) const { return rows[j]; }
};

// Hides what is different from TaskRows: where keys come from and where results go.
template <typename Element>
class CacheRows : public TaskRows<Element> {
 public:
  using Base = TaskRows<Element>;
  using E = Element;
  using T = typename Base::T;
  using Keys = ScatteredRows<T>;

  // forward: forward_params(p), which this refers to.
  CacheRows(const KvCacheParams& p, const ForwardParams& forward, const Scratch<T>& scratch,
            const PartialResults<T>& partial)
      : Base(forward, scratch, ScoreModifier<T>(forward.attention, p.tree_columns), &p.k_scale,
             &p.v_scale),
        p_(p),
        partial_(partial) {}

  void begin(const Task& task, const CachedSequence& cached, int split, std::int64_t first_row,
             int count) {
    cached_ = cached;
    split_ = split;
    Base::begin(task, first_row, count);
  }

  // A row that the block table puts nowhere is zero.
  void load_key(const KeyTensor& x, int key, T* to) const {
    const CacheSlot place = place_of(p_, cached_, key);
    if (place.slot < 0) return Base::fill_zero(to, x.columns);
    const std::int64_t at = offset(x, place);
    switch (p_.cache_dtype) {
      case DType::kInt8:
        return load_scaled_row(static_cast<const Int8*>(x.data) + at, x.stride.col, x.columns,
                               scale(x, place), to);
      case DType::kFloat8E4M3:
        return load_scaled_row(static_cast<const Float8E4M3*>(x.data) + at, x.stride.col, x.columns,
                               scale(x, place), to);
      case DType::kFloat8E5M2:
        return load_scaled_row(static_cast<const Float8E5M2*>(x.data) + at, x.stride.col, x.columns,
                               scale(x, place), to);
      default:
        return load_row(static_cast<const E*>(x.data) + at, x.stride.col, x.columns, to);
    }
  }

  Keys key_rows(const KeyTensor& x, int block, int first, int keys, int padded, T* packed) {
    const T** const rows = &x == &this->k ? k_rows_ : v_rows_;
    for (int j = first; j < keys; ++j) {
      rows[j] = row_in_place(x, block + j, padded);
      if (rows[j] != nullptr) continue;
      T* const row = packed + std::int64_t{j} * padded;
      load_key(x, block + j, row);
      Base::fill_zero(row + x.columns, padded - x.columns);
      rows[j] = row;
    }
    return {rows};
  }

  void finish(int r, T* o, double unit) {
    if (!partial_.used()) return Base::finish(r, o, unit);
    const double m = static_cast<double>(this->scratch.m[r]) * unit;
    const RowEnd end = end_row(m, static_cast<double>(this->scratch.l[r]), kNoSink);
    const std::int64_t at = partial_at(r);
    T* const to = partial_.out_row(at);
    const T divisor = static_cast<T>(end.divisor);
    for (int c = 0; c < this->params.attention.head_dim_v; ++c) to[c] = o[c] / divisor;
    partial_.lse[at] = end.lse;
  }

  // For a task without keys.
  void finish_empty() {
    for (int r = 0; r < this->rows; ++r) partial_.lse[partial_at(r)] = kNoSink;
  }

 private:
  static constexpr double kNoSink = -static_cast<double>(kInfinity);

  // Null where a copy is needed.
  const T* row_in_place(const KeyTensor& x, int key, int padded) const {
    if constexpr (sizeof(E) == sizeof(T)) {
      if (x.stride.col != 1 || x.columns != padded || is_quantized(p_.cache_dtype)) return nullptr;
      const CacheSlot place = place_of(p_, cached_, key);
      if (place.slot >= 0) return static_cast<const E*>(x.data) + offset(x, place);
    }
    return nullptr;
  }

  std::int64_t offset(const KeyTensor& x, const CacheSlot& place) const {
    return place.slot * x.stride.batch + std::int64_t{place.row} * x.stride.row +
           this->task.head_k * x.stride.head;
  }

  T scale(const KeyTensor& x, const CacheSlot& place) const {
    if (x.scale->data == nullptr) return T(1);
    return static_cast<T>(read_number(*x.scale, scale_index(*x.scale, place, this->task.head_k)));
  }

  std::int64_t partial_at(int r) const { return partial_.row(split_, this->result_row(r)); }

  const KvCacheParams& p_;
  const PartialResults<T> partial_;
  CachedSequence cached_{};
  int split_ = 0;
  const T* k_rows_[kBlockN];  // of the block at hand
  const T* v_rows_[kBlockN];
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
