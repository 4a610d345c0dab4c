// What is done to the scores between q.k and the softmax: softcap, ALiBi, bias. Key ranges are a
// bias of 0 and -inf.
//
// These scores stay in natural units up to the exponential. In units of log2 e, a bias of the
// lowest float would become -inf. Such a bias is a mask to many programs, though not to the naive
// formula.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/gemm.h"
#include "cpu/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/vector.h"
#include "params.h"
#include "variant/key_ranges.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

template <typename T>
class ScoreModifier {
 public:
  using S = Simd<T>;
  using Vec = typename S::Vec;

  // tail: how many keys have a bias, the first of which is query 0's. Other keys have none.
  explicit ScoreModifier(const Attention& p, int tail = 0)
      : p_(p), cap_(static_cast<T>(p.softcap)), tail_(tail) {}

  bool has_softcap() const { return p_.softcap > 0; }
  T softcap() const { return cap_; }
  bool has_alibi() const { return p_.alibi_slopes.data != nullptr; }
  bool has_bias() const { return reads_bias() || p_.key_ranges.data != nullptr; }
  bool reads_bias() const { return p_.bias.data != nullptr; }
  bool active() const { return has_softcap() || has_alibi() || has_bias(); }

  // The factor on q.k that operator() takes scores with.
  double scale() const { return p_.softcap > 0 ? p_.softmax_scale / p_.softcap : p_.softmax_scale; }

  // The bias of query 0 is in row first_bias_row.
  void begin_row(std::int64_t sequence, std::int64_t first_bias_row, QueryRow<T>* row) const {
    if (has_alibi()) {
      const Strides& st = p_.alibi_slopes.stride;
      row->slope =
          static_cast<T>(read_number(p_.alibi_slopes, sequence * st.batch + row->head * st.head));
    }
    const Strides& st = p_.bias.stride;
    row->bias = sequence * st.batch + row->head * st.head + (first_bias_row + row->query) * st.row;
  }

  void row_bias(const QueryRow<T>& row, int first_key, int n, T* bias) const {
    const std::int64_t stride = p_.bias.stride.col;
    std::int64_t column = first_key;
    if (tail_ > 0) {
      column -= row.diagonal - row.query;
      for (; n > 0 && column < 0; --n, ++column) *bias++ = T(0);
      for (; n > 0 && column + n > tail_; --n) bias[n - 1] = T(0);
    }
    read_bias(p_.bias, row.bias + column * stride, stride, n, bias);
  }

  ANYFLASH_CPU_INLINE Vec operator()(Vec s, Vec distance, Vec slope, Vec bias) const {
    if (has_softcap()) s = tanh_vector<T>(s) * cap_;
    return shifted(s, distance, slope, bias);
  }

  // What follows the softcap.
  ANYFLASH_CPU_INLINE Vec shifted(Vec s, Vec distance, Vec slope, Vec bias) const {
    if (has_alibi()) s = s - slope * S::max(distance, -distance);
    if (has_bias()) {
      const Vec hidden = S::broadcast(T(-kInfinity));
      s = bias == hidden ? hidden : s + bias;  // NaN + -inf would be NaN
    }
    return s;
  }

 private:
  const Attention& p_;
  T cap_;
  int tail_;
};

// The bias tensor's part of load_bias().
template <typename T>
inline bool load_bias_tensor(const ScoreModifier<T>& modifier, const QueryRow<T>* rows, int width,
                             int first_key, int begin, int end, T* tile, int ld) {
  using S = Simd<T>;
  T part[S::kLanes][kPanelKeys] = {};
  bool visible = false;
  for (int first = 0; first < width; first += S::kLanes) {
    for (int r = 0; r < S::kLanes; ++r) {
      const QueryRow<T>& row = rows[first + r];
      T* const to = part[r];
      if (r > 0 && row.bias == rows[first + r - 1].bias) {
        std::memcpy(to, part[r - 1], sizeof(part[r]));
        continue;
      }
      modifier.row_bias(row, first_key + begin, end - begin, to + begin);
      for (int j = begin; j < end; ++j) visible |= to[j] != T(-kInfinity);
    }
    for (int j = begin / S::kLanes * S::kLanes; j < end; j += S::kLanes) {
      typename S::Vec x[S::kLanes];
      ANYFLASH_CPU_UNROLL
      for (int r = 0; r < S::kLanes; ++r) x[r] = S::load(part[r] + j);
      S::transpose(x);
      ANYFLASH_CPU_UNROLL
      for (int i = 0; i < S::kLanes; ++i) S::store(tile + (j + i) * ld + first, x[i]);
    }
  }
  return visible;
}

// The key ranges' part of load_bias(): -inf where a row does not see a key, else the tile stays.
template <typename T>
inline void hide_by_ranges(const KeyRanges& ranges, const QueryRow<T>* rows, int width,
                           int first_key, int begin, int end, T* tile, int ld) {
  using S = Simd<T>;
  using Int = typename S::Int;
  const typename S::Vec hidden = S::broadcast(T(-kInfinity));
  for (int lane = 0; lane < width; lane += S::kLanes) {
    Int query[S::kLanes];
    for (int i = 0; i < S::kLanes; ++i) query[i] = ranges.place_of(rows[lane + i].query);
    const auto at = S::load(query);
    for (int j = begin; j < end; ++j) {
      const KeyRanges::Rows seen = ranges.rows_of(first_key + j);
      T* const to = tile + j * ld + lane;
      const typename S::Vec x = S::load(to);
      auto y = S::broadcast_int(seen.second_end) > at ? x : hidden;
      y = S::broadcast_int(seen.second_begin) > at ? hidden : y;
      const auto z = S::broadcast_int(seen.begin) > at ? y : x;
      S::store(to, S::broadcast_int(seen.end) > at ? z : y);
    }
  }
}

// The bias of rows [0, width) and keys first_key + [begin, end), rows in lanes; a key's rows begin
// at a multiple of `ld`. False if it hides all of them, as far as that is easy to see.
template <typename T>
inline bool load_bias(const ScoreModifier<T>& modifier, const KeyRanges& ranges,
                      const QueryRow<T>* rows, int width, int first_key, int begin, int end,
                      T* tile, int ld) {
  if (ranges.active()) {
    int first = rows[0].query;
    int last = first;
    for (int r = 1; r < width; ++r) {
      first = rows[r].query < first ? rows[r].query : first;
      last = rows[r].query > last ? rows[r].query : last;
    }
    if (!ranges.any(first, last, first_key + begin, first_key + end)) return false;
  }
  if (!modifier.reads_bias()) {
    for (int j = begin; j < end; ++j) {
      for (int r = 0; r < width; ++r) tile[j * ld + r] = T(0);
    }
  } else if (!load_bias_tensor(modifier, rows, width, first_key, begin, end, tile, ld)) {
    return false;
  }
  if (ranges.active()) hide_by_ranges(ranges, rows, width, first_key, begin, end, tile, ld);
  return true;
}

// The scores of a panel and a block of keys, from q.k to what the softmax takes.
template <typename T, int NV>
inline void modify_panel(const ScoreModifier<T>& modifier, const QueryRow<T>* rows, int first_key,
                         const Zones& zones, const KeysWithin<typename Simd<T>::Int>& within,
                         const T* bias, T* s, ScoreRange<T, NV>& range) {
  using S = Simd<T>;
  using Vec = typename S::Vec;
  constexpr int kRows = NV * S::kLanes;
  const Vec hidden = S::broadcast(T(-kInfinity));
  T slope[kRows] = {};
  T diagonal[kRows] = {};
  if (modifier.has_alibi()) {
    for (int r = 0; r < kRows; ++r) {
      slope[r] = rows[r].slope;
      diagonal[r] = static_cast<T>(rows[r].diagonal - first_key);
    }
  }
  for (int j = zones.begin; j < zones.end; ++j) {
    const bool full = zones.full_begin <= j && j < zones.full_end;
    ANYFLASH_CPU_UNROLL
    for (int n = 0; n < NV; ++n) {
      const int lane = n * S::kLanes;
      T* const at = s + j * kRows + lane;
      const Vec added = modifier.has_bias() ? S::load(bias + j * kRows + lane) : Vec{};
      const Vec distance = S::load(diagonal + lane) - S::broadcast(static_cast<T>(j));
      Vec x = modifier(S::load(at), distance, S::load(slope + lane), added);
      if (full) {
        range.min[n] = S::min(x, range.min[n]);
      } else {
        x = within.template select<T>(n, first_key + j, x, hidden);
      }
      range.max[n] = S::max(x, range.max[n]);
      S::store(at, x);
    }
  }
}

// The same for one row, keys in lanes: [begin, end), rounded outwards to whole vectors.
template <typename T>
inline void modify_row(const ScoreModifier<T>& modifier, const KeyRanges& ranges,
                       const QueryRow<T>& row, int first_key, int begin, int end, T* s) {
  using S = Simd<T>;
  T bias[kBlockN] = {};
  T step[S::kLanes];
  for (int i = 0; i < S::kLanes; ++i) step[i] = static_cast<T>(i);
  if (modifier.reads_bias()) modifier.row_bias(row, first_key + begin, end - begin, bias + begin);
  for (int j = begin; ranges.active() && j < end; ++j) {
    if (!ranges.keep(row.query, first_key + j)) bias[j] = T(-kInfinity);
  }
  const typename S::Vec slope = S::broadcast(modifier.has_alibi() ? row.slope : T(0));
  for (int j = begin / S::kLanes * S::kLanes; j < end; j += S::kLanes) {
    const T diagonal = static_cast<T>(row.diagonal - first_key - j);
    const typename S::Vec distance = S::broadcast(diagonal) - S::load(step);
    S::store(s + j, modifier(S::load(s + j), distance, slope, S::load(bias + j)));
  }
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
