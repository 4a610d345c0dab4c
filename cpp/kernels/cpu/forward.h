// FlashAttention-2 on a CPU (arXiv 2307.08691): one pass over the keys, an online softmax.
//
// For a block of keys, with scores S (in units of log2 e, so that the exponential is 2^x):
//     m'    = max(m, rowmax(S))
//     P     = 2^(S - m')                       hidden keys: S = -inf, P = 0
//     alpha = 2^(m - m')
//     l     = alpha l + rowsum(P)
//     O     = alpha O + P V
//     m     = m'
// and at the end  out = O / l,  lse = (m + log2 l) ln 2.
//
// A task is up to kTaskPanels panels of query rows of one (batch, kv head); a panel is what fits
// the registers (gemm.h). The keys of a task pass through packed blocks of kBlockN, which all its
// panels share. Where a head has very few rows they go one by one instead (thin.h).
//
// What a row gets depends on its own scores, on the block borders (multiples of kBlockN) and on
// whether the shape is a thin one (seqlen_q, heads / heads_k), hence neither on the other rows, nor
// on the batch, nor on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/convert.h"
#include "cpu/exp.h"
#include "cpu/gemm.h"
#include "cpu/simd.h"
#include "cpu/tasks.h"
#include "cpu/thin.h"
#include "kernel.h"
#include "params.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// A block of rows of k or v: row j begins at data + j * ld.
template <typename T>
struct Rows {
  const T* data;
  std::int64_t ld;
};

// One thread's work on one task after the other.
template <typename E>
class TaskRunner {
 public:
  using T = typename Compute<E>::Type;
  using S = Simd<T>;
  using Vec = typename S::Vec;
  using Int = typename S::Int;

  TaskRunner(const ForwardParams& p, const Split& split, const Scratch<T>& scratch)
      : p_(p), split_(split), scratch_(scratch) {
    // s = softmax_scale log2(e) q.k
    constexpr double kLog2E = 1.4426950408889634074;
    scale_ = static_cast<T>(p.softmax_scale * kLog2E);
  }

  void run(std::int64_t index) {
    task_ = split_.task(index);
    const int end = begin_rows();
    if (split_.thin) {
      run_thin(end);
    } else {
      run_panels(end);
    }
  }

 private:
  static constexpr int kPanel = kPanelRows<T>;

  int padded_dim() const { return round_up(p_.head_dim, S::kLanes); }
  int padded_dim_v() const { return round_up(p_.head_dim_v, kColumnPad<T>); }

  const E* query_row(const RowIndex& row) const {
    return static_cast<const E*>(p_.q) + task_.batch * p_.q_stride.batch +
           row.head * p_.q_stride.head + row.query * p_.q_stride.row;
  }
  const E* key_row(const void* base, const Strides& stride, int key) const {
    return static_cast<const E*>(base) + task_.batch * stride.batch + task_.head_k * stride.head +
           key * stride.row;
  }

  // Row `query` sees the keys below this limit.
  int key_limit(std::int64_t query) const {
    if (!p_.causal) return p_.seqlen_k;
    const std::int64_t limit = query + 1 + p_.seqlen_k - p_.seqlen_q;
    if (limit < 0) return 0;
    return limit < p_.seqlen_k ? static_cast<int>(limit) : p_.seqlen_k;
  }

  // m = -inf, l = 0 and the limit of each row; lanes behind the last row repeat its limit, so that
  // they never ask for a mask. Returns the largest limit.
  int begin_rows() {
    int end = 0;
    for (int r = 0; r < round_up(task_.rows, S::kLanes); ++r) {
      const RowIndex row = split_.row(task_, r < task_.rows ? r : task_.rows - 1);
      const int limit = key_limit(row.query);
      if (limit > end) end = limit;
      scratch_.limit[r] = limit;
      scratch_.m[r] = T(-kInfinity);
      scratch_.l[r] = T(0);
    }
    return end;
  }

  // --- panels of rows, rows in lanes ---

  int panel_rows(int panel) const {
    const int rest = task_.rows - panel * kPanel;
    return rest < kPanel ? rest : kPanel;
  }
  int vectors(int panel) const { return (panel_rows(panel) + S::kLanes - 1) / S::kLanes; }
  T* q_panel(int panel) const { return scratch_.q + std::int64_t{panel} * kPanel * p_.head_dim; }
  T* o_panel(int panel) const { return scratch_.o + std::int64_t{panel} * kPanel * padded_dim_v(); }

  void run_panels(int end) {
    const int panels = (task_.rows + kPanel - 1) / kPanel;
    for (int panel = 0; panel < panels; ++panel) load_panel(panel);
    for (int first_key = 0; first_key < end; first_key += kBlockN) {
      const int keys = end - first_key < kBlockN ? end - first_key : kBlockN;
      pack_keys(first_key, keys);
      pack_values(first_key, keys);
      for (int panel = 0; panel < panels; ++panel) {
        switch (vectors(panel)) {
          case 1:
            visit<1>(panel, first_key, keys);
            break;
          case 2:
            visit<2>(panel, first_key, keys);
            break;
          default:
            visit<kMaxVectors>(panel, first_key, keys);
            break;
        }
      }
    }
    for (int panel = 0; panel < panels; ++panel) store_panel(panel);
  }

  // Q^T of a panel, zeros behind its last row; O = 0.
  void load_panel(int panel) {
    const int rows = panel_rows(panel);
    const int width = vectors(panel) * S::kLanes;
    T* const q = q_panel(panel);
    for (int r = 0; r < width; ++r) {
      if (r < rows) {
        load_row(query_row(split_.row(task_, panel * kPanel + r)), p_.q_stride.col, p_.head_dim,
                 scratch_.row);
      }
      for (int c = 0; c < p_.head_dim; ++c) {
        q[static_cast<std::int64_t>(c) * width + r] = r < rows ? scratch_.row[c] : T(0);
      }
    }
    fill_zero(o_panel(panel), std::int64_t{width} * padded_dim_v());
  }

  void store_panel(int panel) {
    const int width = vectors(panel) * S::kLanes;
    const T* const o = o_panel(panel);
    for (int r = 0; r < panel_rows(panel); ++r) {
      for (int c = 0; c < p_.head_dim_v; ++c) {
        scratch_.row[c] = o[static_cast<std::int64_t>(c) * width + r];
      }
      finish_row(panel * kPanel + r, scratch_.row);
    }
  }

  // Rows of k in the compute type; zeros up to a whole group.
  void pack_keys(int first_key, int keys) {
    const std::int64_t d = p_.head_dim;
    for (int j = 0; j < keys; ++j) {
      load_row(key_row(p_.k, p_.k_stride, first_key + j), p_.k_stride.col, p_.head_dim,
               scratch_.k + j * d);
    }
    fill_zero(scratch_.k + keys * d, (round_up(keys, kGroupPad) - keys) * d);
  }

  // Columns of v in groups of kGroupPad, each group (keys, kGroupPad): PV then reads on and on.
  void pack_values(int first_key, int keys) {
    const int padded = padded_dim_v();
    fill_zero(scratch_.row + p_.head_dim_v, padded - p_.head_dim_v);
    for (int j = 0; j < keys; ++j) {
      load_row(key_row(p_.v, p_.v_stride, first_key + j), p_.v_stride.col, p_.head_dim_v,
               scratch_.row);
      for (int c = 0; c < padded; c += kGroupPad) {
        std::memcpy(scratch_.v + (std::int64_t{c} * kBlockN + j * kGroupPad), scratch_.row + c,
                    kGroupPad * sizeof(T));
      }
    }
  }

  // One block of keys for one panel: the equations at the top of this file.
  template <int NV>
  void visit(int panel, int first_key, int keys) {
    constexpr int kRows = NV * S::kLanes;
    const Int* const limit = scratch_.limit + panel * kPanel;
    // Keys in [0, full) of the block are seen by every row, those from `some` on by none.
    int full = keys;
    int some = 0;
    for (int r = 0; r < kRows; ++r) {
      const int sees = static_cast<int>(limit[r]) - first_key;
      if (sees < full) full = sees < 0 ? 0 : sees;
      if (sees > some) some = sees < keys ? sees : keys;
    }
    if (some == 0) return;

    T* const m = scratch_.m + panel * kPanel;
    T* const l = scratch_.l + panel * kPanel;
    Vec new_m[NV];
    for (int n = 0; n < NV; ++n) new_m[n] = S::load(m + n * S::kLanes);
    scores<NV>(q_panel(panel), first_key, full, some, limit, new_m);

    Vec alpha[NV];
    Vec base[NV];
    for (int n = 0; n < NV; ++n) {
      base[n] = finite_base(new_m[n]);
      alpha[n] = exp2_nonpositive<T>(S::load(m + n * S::kLanes) - base[n]);
      S::store(m + n * S::kLanes, new_m[n]);
    }
    Vec sum[NV] = {};
    for (int j = 0; j < some; ++j) {
      ANYFLASH_CPU_UNROLL
      for (int n = 0; n < NV; ++n) {
        T* const s = scratch_.s + j * kRows + n * S::kLanes;
        const Vec x = exp2_nonpositive<T>(S::load(s) - base[n]);
        S::store(s, x);
        sum[n] += x;
      }
    }
    for (int n = 0; n < NV; ++n) {
      S::store(l + n * S::kLanes, S::load(l + n * S::kLanes) * alpha[n] + sum[n]);
    }
    const KeysBelow<Int> below{limit};
    for (int c = 0; c < p_.head_dim_v; c += scalar_group(NV)) {
      const T* const v = scratch_.v + std::int64_t{c / kGroupPad} * kGroupPad * kBlockN;
      output_group<T, NV>(v + c % kGroupPad, scratch_.s, full, some, first_key, below, alpha,
                          o_panel(panel) + std::int64_t{c} * kRows);
    }
  }

  // S^T of a panel and a block of keys, and the row maxima.
  template <int NV>
  void scores(const T* q, int first_key, int full, int some, const Int* limit, Vec (&row_max)[NV]) {
    constexpr int kGroup = scalar_group(NV);
    constexpr int kRows = NV * S::kLanes;
    const KeysBelow<Int> below{limit};
    Vec best[NV];
    for (int n = 0; n < NV; ++n) best[n] = row_max[n];
    int j = 0;
    for (; j + kGroup <= full; j += kGroup) {
      score_group<T, NV>(scratch_.k + std::int64_t{j} * p_.head_dim, q, p_.head_dim, scale_,
                         first_key + j, EveryKey{}, scratch_.s + j * kRows, best);
    }
    for (; j < some; j += kGroup) {
      score_group<T, NV>(scratch_.k + std::int64_t{j} * p_.head_dim, q, p_.head_dim, scale_,
                         first_key + j, below, scratch_.s + j * kRows, best);
    }
    for (int n = 0; n < NV; ++n) row_max[n] = best[n];
  }

  // --- a few rows, one by one ---

  void run_thin(int end) {
    const std::int64_t d = padded_dim();
    const std::int64_t dv = padded_dim_v();
    for (int r = 0; r < task_.rows; ++r) {
      T* const q = scratch_.q + r * d;
      load_row(query_row(split_.row(task_, r)), p_.q_stride.col, p_.head_dim, q);
      fill_zero(q + p_.head_dim, d - p_.head_dim);
      fill_zero(scratch_.o + r * dv, dv);
    }
    for (int first_key = 0; first_key < end; first_key += kBlockN) {
      const int keys = end - first_key < kBlockN ? end - first_key : kBlockN;
      const Rows<T> k = thin_rows(p_.k, p_.k_stride, first_key, keys, p_.head_dim, d, scratch_.k);
      const Rows<T> v =
          thin_rows(p_.v, p_.v_stride, first_key, keys, p_.head_dim_v, dv, scratch_.v);
      for (int r = 0; r < task_.rows; ++r) {
        const int sees = static_cast<int>(scratch_.limit[r]) - first_key;
        if (sees > 0) visit_thin(r, k, v, sees < keys ? sees : keys);
      }
    }
    for (int r = 0; r < task_.rows; ++r) finish_row(r, scratch_.o + r * dv);
  }

  // A block of k or v as it lies in memory where that will do, else a copy in `packed`.
  Rows<T> thin_rows(const void* base, const Strides& stride, int first_key, int keys, int columns,
                    std::int64_t padded, T* packed) {
    if constexpr (sizeof(E) == sizeof(T)) {
      if (stride.col == 1 && columns == padded) {
        return {key_row(base, stride, first_key), stride.row};
      }
    }
    for (int j = 0; j < keys; ++j) {
      load_row(key_row(base, stride, first_key + j), stride.col, columns, packed + j * padded);
      fill_zero(packed + j * padded + columns, padded - columns);
    }
    return {packed, padded};
  }

  // One block of keys for one row: the equations at the top of this file.
  void visit_thin(int r, const Rows<T>& k, const Rows<T>& v, int keys) {
    T* const s = scratch_.s;
    thin_scores(scratch_.q + r * std::int64_t{padded_dim()}, k.data, k.ld, padded_dim(), scale_,
                keys, s);
    Vec best = S::broadcast(scratch_.m[r]);
    for (int j = 0; j < keys; j += S::kLanes) best = S::max(S::load(s + j), best);
    T lane[S::kLanes];
    S::store(lane, best);
    T new_m = scratch_.m[r];
    for (int i = 0; i < S::kLanes; ++i) new_m = lane[i] > new_m ? lane[i] : new_m;

    const Vec base = finite_base(S::broadcast(new_m));
    S::store(lane, exp2_nonpositive<T>(S::broadcast(scratch_.m[r]) - base));
    const T alpha = lane[0];
    Vec sums = {};
    for (int j = 0; j < keys; j += S::kLanes) {
      const Vec x = exp2_nonpositive<T>(S::load(s + j) - base);
      S::store(s + j, x);
      sums += x;
    }
    S::store(lane, sums);
    T sum = lane[0];
    for (int i = 1; i < S::kLanes; ++i) sum += lane[i];
    scratch_.m[r] = new_m;
    scratch_.l[r] = scratch_.l[r] * alpha + sum;
    thin_output(v.data, v.ld, s, keys, alpha, scratch_.o + r * std::int64_t{padded_dim_v()},
                padded_dim_v());
  }

  // --- both ---

  static void fill_zero(T* p, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) p[i] = T(0);
  }

  // What to subtract from the scores: their maximum, or 0 while all of them are -inf, since
  // -inf - -inf is NaN where 2^-inf = 0 is meant.
  static Vec finite_base(Vec m) { return m == S::broadcast(T(-kInfinity)) ? Vec{} : m; }

  // out = O / l and lse = (m + log2 l) ln 2. l = 0 says that the row saw no key, or that all its
  // scores are -inf, which is a mask too: 0 and -inf.
  void finish_row(int r, T* o) {
    const RowIndex row = split_.row(task_, r);
    const bool sees_keys = scratch_.l[r] != T(0);
    const T l = sees_keys ? scratch_.l[r] : T(1);
    for (int c = 0; c < p_.head_dim_v; ++c) o[c] = o[c] / l;
    const Strides& st = p_.out_stride;
    store_row(
        o, p_.head_dim_v,
        static_cast<E*>(p_.out) + task_.batch * st.batch + row.head * st.head + row.query * st.row,
        st.col);
    if (p_.lse == nullptr) return;
    constexpr double kLn2 = 0.69314718055994530942;
    double lse = (static_cast<double>(scratch_.m[r]) + ::log2(static_cast<double>(l))) * kLn2;
    if (!sees_keys) lse = -static_cast<double>(kInfinity);
    const Strides& ls = p_.lse_stride;
    p_.lse[task_.batch * ls.batch + row.head * ls.head + row.query * ls.row] =
        static_cast<float>(lse);
  }

  const ForwardParams& p_;
  const Split& split_;
  const Scratch<T> scratch_;
  T scale_;
  Task task_{};
};

template <typename E>
std::size_t forward_scratch_bytes(const ForwardParams& p, int num_threads) {
  using T = typename Compute<E>::Type;
  return Scratch<T>::bytes(p) * static_cast<std::size_t>(num_threads < 1 ? 1 : num_threads);
}

template <typename E>
void forward(const ForwardParams& p, const LaunchContext& context) {
  using T = typename Compute<E>::Type;
  const int threads = context.num_threads < 1 ? 1 : context.num_threads;
  const Split split = Split::make<T>(p, threads);
  char* const scratch = static_cast<char*>(context.scratch);
  run_tasks(split.tasks, threads, [&](int thread) {
    return TaskRunner<E>(p, split, Scratch<T>::carve(p, scratch + Scratch<T>::bytes(p) * thread));
  });
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
