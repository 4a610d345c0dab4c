// The query rows of a task: which keys they see, and their end, the division by the softmax's sum.
#pragma once

#include <math.h>

#include <cstdint>
#include <cstring>

#include "common/merge.h"
#include "cpu/gemm.h"
#include "cpu/gemv.h"
#include "cpu/scores.h"
#include "cpu/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/simd/exp.h"
#include "cpu/simd/vector.h"
#include "cpu/tasks.h"
#include "params.h"
#include "variant/block_mask.h"
#include "variant/key_ranges.h"
#include "variant/mask.h"

#if defined(_MSC_VER) && !defined(__GNUC__)
#include <intrin.h>
#endif

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// Some row of a set sees the keys of [first, end), all of them see those of [full_first, full_end).
struct SeenKeys {
  int first = 0;
  int end = 0;
  int full_first = 0;
  int full_end = 0;

  void add(int row_first, int row_end, bool is_first) {
    if (is_first) {
      *this = {row_first, row_end, row_first, row_end};
      return;
    }
    full_first = row_first > full_first ? row_first : full_first;
    full_end = row_end < full_end ? row_end : full_end;
    if (row_first >= row_end) return;
    if (first >= end) {
      first = row_first;
      end = row_end;
    }
    first = row_first < first ? row_first : first;
    end = row_end > end ? row_end : end;
  }

  Zones zones(int first_key, int keys) const {
    const auto within = [](int x, int low, int high) {
      return x < low ? low : x < high ? x : high;
    };
    Zones z;
    z.begin = within(first - first_key, 0, keys);
    z.end = within(end - first_key, z.begin, keys);
    z.full_begin =
        within(round_up(within(full_first - first_key, 0, keys), kGroupPad), z.begin, z.end);
    z.full_end = within(full_end - first_key, 0, z.end) / kGroupPad * kGroupPad;
    if (z.full_end <= z.full_begin) z.full_begin = z.full_end = z.begin;
    return z;
  }
};

// *at = max(*at, x) by several threads: the same result in every order.
inline void atomic_max(float* at, float x) {
  x = x + 0.0f;  // one zero, not two of which either could win
#if defined(__GNUC__)
  std::uint32_t* const word = reinterpret_cast<std::uint32_t*>(at);
  std::uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  while (x > bits_float(old) &&
         !__atomic_compare_exchange_n(word, &old, float_bits(x), /*weak=*/true, __ATOMIC_RELAXED,
                                      __ATOMIC_RELAXED)) {
  }
#else
  volatile long* const word = reinterpret_cast<volatile long*>(at);
  long old = *word;
  while (x > bits_float(static_cast<std::uint32_t>(old))) {
    const long seen = _InterlockedCompareExchange(word, static_cast<long>(float_bits(x)), old);
    if (seen == old) break;
    old = seen;
  }
#endif
}

// What the sums of a row become:  out = O / divisor.
struct RowEnd {
  double divisor;
  double lse;
};

// m and sink in natural units. l = 0 says that the row sees no key.
inline RowEnd end_row(double m, double l, double sink) {
  const double infinity = static_cast<double>(kInfinity);
  if (sink == -infinity) {
    if (l == 0) return {1.0, -infinity};
    return {l, m + ::log(l)};
  }
  // O and l are in units of e^m, or of 1 while there is no m.
  const double divisor = l + ::exp(sink - (m == -infinity ? 0.0 : m));
  const double top = sink > m ? sink : m;
  const double keys = l == 0 ? 0.0 : l * ::exp(m - top);
  const double sinks = sink == top ? 1.0 : ::exp(sink - top);
  return {divisor == 0 ? 1.0 : divisor, top + ::log(keys + sinks)};
}

// k or v.
struct KeyTensor {
  const void* data;
  const Strides& stride;
  int columns;
  const BroadcastTensor* scale;  // of an 8-bit cache (cpu/decode/keys.h)
};

// Row `query` of head `head` of the results.
struct ResultRow {
  std::int64_t batch;  // these two as in Sequence
  std::int64_t first_q;
  int head;
  int query;

  std::int64_t offset(const Strides& st) const {
    return batch * st.batch + (first_q + query) * st.row + head * st.head;
  }
};

template <typename E, typename T>
inline void store_result(const ForwardParams& p, const ResultRow& row, const T* o, double lse) {
  const std::int64_t at = row.offset(p.out_stride);
  if (p.out_dtype == DType::kFloat32) {
    store_row(o, p.attention.head_dim_v, static_cast<float*>(p.out) + at, p.out_stride.col);
  } else {
    store_row(o, p.attention.head_dim_v, static_cast<E*>(p.out) + at, p.out_stride.col);
  }
  if (p.lse == nullptr) return;
  const std::int64_t lse_at = row.offset(p.lse_stride);
  if (p.lse_dtype == DType::kFloat64) {
    static_cast<double*>(p.lse)[lse_at] = lse;
  } else {
    static_cast<float*>(p.lse)[lse_at] = static_cast<float>(lse);
  }
}

// Joins a row with its result over other keys, in the arithmetic of merge_states_on_cpu().
// Returns its LSE.
template <typename M, typename Lse, typename T>
double join_prior(const Prior& prior, const ResultRow& row, T* o, double lse) {
  const Lse before = static_cast<const Lse*>(prior.lse)[row.offset(prior.lse_stride)];
  const Merge<M> merge(static_cast<M>(before), static_cast<M>(static_cast<Lse>(lse)));
  const T* const out = static_cast<const T*>(prior.out) + row.offset(prior.out_stride);
  for (int c = 0; c < prior.columns; ++c) {
    const M joined = merge.out(static_cast<M>(out[c * prior.out_stride.col]), static_cast<M>(o[c]));
    o[c] = static_cast<T>(joined);
  }
  return static_cast<double>(merge.lse());
}

template <typename T>
double join_prior(const Prior& prior, const ResultRow& row, T* o, double lse) {
  if (prior.out == nullptr) return lse;
  if (prior.lse_dtype == DType::kFloat64) return join_prior<double, double>(prior, row, o, lse);
  return join_prior<T, float>(prior, row, o, lse);
}

inline double read_sink(const ForwardParams& p, int head) {
  if (p.attention.sinks.data == nullptr) return -static_cast<double>(kInfinity);
  return read_number(p.attention.sinks, head * p.attention.sinks.stride.head);
}

// What FewRowsTask and PanelTask know of a task's rows and keys. Attention to a cache has another
// source of keys and another end (cpu/decode/keys.h).
template <typename Element>
class TaskRows {
 public:
  using E = Element;
  using T = typename Compute<E>::Type;
  using Keys = KeyRows<T>;
  using S = Simd<T>;
  using Vec = typename S::Vec;
  using Int = typename S::Int;

  static constexpr int kPanel = kPanelRows<T>;

  TaskRows(const ForwardParams& p, const Scratch<T>& scratch_memory)
      : TaskRows(p, scratch_memory, ScoreModifier<T>(p.attention), nullptr, nullptr) {}

  // m = -inf, l = 0 and the keys of each row; in panels lanes behind the last row repeat it, so
  // that they never ask for a mask.
  void begin(const Task& next, std::int64_t first_row, int count) {
    task = next;
    rows = count;
    const Sequence& seq = task.sequence;
    const Mask mask(seq, params.attention.window);
    ranges = KeyRanges(params.attention, seq, task.index, task.head_k);
    int head = task.first_head + static_cast<int>(first_row / seq.seqlen_q);
    int query = static_cast<int>(first_row % seq.seqlen_q);
    const bool wraps = query + rows > seq.seqlen_q;  // to the next head's
    first_query = wraps ? 0 : query;
    last_query = wraps ? seq.seqlen_q - 1 : query + rows - 1;
    const int lanes = task.single_row ? rows : round_up(rows, S::kLanes);
    for (int r = 0; r < lanes; ++r) {
      QueryRow<T>& row = scratch.rows[r];
      row.head = head;
      row.query = query;
      row.diagonal = std::int64_t{query} + seq.shift;
      if (modifier.active()) modifier.begin_row(task.index, task.first_bias_row, &row);
      const int first_key = mask.first_key(query);
      const int end_key = mask.end_key(query);
      scratch.first[r] = first_key > task.first_key ? first_key : task.first_key;
      scratch.end[r] = end_key < task.end_key ? end_key : task.end_key;
      scratch.m[r] = T(-kInfinity);
      scratch.l[r] = T(0);
      if (r + 1 < rows && ++query == seq.seqlen_q) {
        query = 0;
        ++head;
      }
    }
    find_seen(scratch.first, scratch.end);
    seen = {};
    for (int panel = 0; panel * kPanel < rows; ++panel) {
      seen.add(panel_seen[panel].first, panel_seen[panel].end, panel == 0);
    }
    if (seen.first >= seen.end) seen = {};
  }

  // Of a block of keys, what the block mask leaves. False: nothing, or key ranges leave nothing.
  bool begin_block(int first_key, int keys) {
    if (ranges.active() && !ranges.any(first_query, last_query, first_key, first_key + keys)) {
      return false;
    }
    if (params.attention.block_mask.data == nullptr) return true;
    bool any = false;
    for (int r = 0, run; r < rows; r += run) {
      const QueryRow<T>& row = scratch.rows[r];
      const bool keep =
          BlockMask(params.attention, task.index, row.head).keep(row.query, first_key);
      any |= keep;
      // Rows up to the next block of the map share its answer.
      const int rest = params.attention.block_size_q - row.query % params.attention.block_size_q;
      for (run = 0; r + run < rows && run < rest && scratch.rows[r + run].head == row.head; ++run) {
        show(r + run, keep);
      }
    }
    if (!any) return false;
    for (int r = rows; r < round_up(rows, S::kLanes); ++r) {
      scratch.seen_first[r] = scratch.seen_first[rows - 1];
      scratch.seen_end[r] = scratch.seen_end[rows - 1];
    }
    find_seen(scratch.seen_first, scratch.seen_end);
    return true;
  }

  const E* query_row(int r) const {
    const QueryRow<T>& row = scratch.rows[r];
    const Strides& st = params.attention.q_stride;
    return static_cast<const E*>(params.attention.q) + task.sequence.batch * st.batch +
           (task.sequence.first_q + row.query) * st.row + row.head * st.head;
  }

  // Row `key` of k or v.
  void load_key(const KeyTensor& x, int key, T* to) const {
    load_row(key_row(x, key), x.stride.col, x.columns, to);
  }

  // The same as it is.
  void copy_key(const KeyTensor& x, int key, E* to) const {
    copy_row(key_row(x, key), x.stride.col, x.columns, to);
  }

  // Rows [first, keys) of a block of k or v, of `padded` columns: as they lie in memory where that
  // will do, else a copy in `packed`.
  Keys key_rows(const KeyTensor& x, int block, int first, int keys, int padded, T* packed) const {
    if constexpr (sizeof(E) == sizeof(T)) {
      if (x.stride.col == 1 && x.columns == padded) return {key_row(x, block), x.stride.row};
    }
    for (int j = first; j < keys; ++j) {
      T* const row = packed + std::int64_t{j} * padded;
      load_key(x, block + j, row);
      fill_zero(row + x.columns, padded - x.columns);
    }
    return {packed, padded};
  }

  // `o` is overwritten. m counts in units of `unit`.
  void finish(int r, T* o, double unit) {
    const QueryRow<T>& row = scratch.rows[r];
    const double m = static_cast<double>(scratch.m[r]) * unit;
    if (params.max_logits != nullptr && m > -static_cast<double>(kInfinity)) {
      const Strides& st = params.max_logits_stride;
      atomic_max(params.max_logits + task.index * st.batch + row.head * st.head,
                 static_cast<float>(m));
    }
    const double sink = read_sink(params, row.head);
    const RowEnd end = end_row(m, static_cast<double>(scratch.l[r]), sink);
    const double kept = (65536.0 - params.attention.dropout_threshold) / 65536.0;
    // + 0: a block without a visible key turns -0 into 0, and whether a row meets one depends on
    // its neighbours.
    if constexpr (sizeof(E) < sizeof(T)) {
      const T factor = static_cast<T>(1.0 / (end.divisor * kept));
      for (int c = 0; c < params.attention.head_dim_v; ++c) o[c] = o[c] * factor + T(0);
    } else {
      const T divisor = static_cast<T>(end.divisor * kept);
      for (int c = 0; c < params.attention.head_dim_v; ++c) o[c] = o[c] / divisor + T(0);
    }
    const ResultRow result = result_row(r);
    store_result<E>(params, result, o, join_prior(params.prior, result, o, end.lse));
  }

  ResultRow result_row(int r) const {
    const QueryRow<T>& row = scratch.rows[r];
    return {task.sequence.batch, task.sequence.first_q, row.head, row.query};
  }

  // What to subtract from the scores: their maximum, or 0 while all of them are -inf, since
  // -inf - -inf is NaN where 2^-inf = 0 is meant.
  static ANYFLASH_CPU_INLINE Vec finite_base(Vec m) {
    return m == S::broadcast(T(-kInfinity)) ? Vec{} : m;
  }

  static void fill_zero(T* p, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) p[i] = T(0);
  }

  const ForwardParams& params;
  const KeyTensor k;
  const KeyTensor v;
  const Scratch<T> scratch;
  const ScoreModifier<T> modifier;
  Task task{};
  KeyRanges ranges;
  int rows = 0;
  int first_query = 0;  // the rows' numbers are within [first_query, last_query]
  int last_query = 0;
  SeenKeys seen;                        // by the task's rows; its full range is not used
  SeenKeys panel_seen[kTaskPanels<T>];  // by those of each panel, in this block

 protected:
  TaskRows(const ForwardParams& p, const Scratch<T>& scratch_memory,
           const ScoreModifier<T>& score_modifier, const BroadcastTensor* k_scale,
           const BroadcastTensor* v_scale)
      : params(p),
        k{p.attention.k, p.attention.k_stride, p.attention.head_dim, k_scale},
        v{p.attention.v, p.attention.v_stride, p.attention.head_dim_v, v_scale},
        scratch(scratch_memory),
        modifier(score_modifier) {}

 private:
  void show(int r, bool keep) {
    scratch.seen_first[r] = keep ? scratch.first[r] : Int(0);
    scratch.seen_end[r] = keep ? scratch.end[r] : Int(0);
  }

  void find_seen(const Int* first, const Int* end) {
    for (int r = 0; r < rows; ++r) {
      panel_seen[r / kPanel].add(static_cast<int>(first[r]), static_cast<int>(end[r]),
                                 r % kPanel == 0);
    }
  }

  const E* key_row(const KeyTensor& x, int key) const {
    return static_cast<const E*>(x.data) + task.sequence.batch * x.stride.batch +
           (task.sequence.first_k + key) * x.stride.row + task.head_k * x.stride.head;
  }
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
