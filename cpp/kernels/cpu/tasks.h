// How the work is cut into tasks, and the memory that a thread needs for one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/gemm.h"
#include "cpu/simd.h"
#include "cpu/thin.h"
#include "params.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

inline constexpr int kBlockN = 64;     // keys of a step
inline constexpr int kTaskRows = 192;  // query rows of a task, where there are enough of them

// Rows of a panel, and panels of a task.
template <typename T>
inline constexpr int kPanelRows = kMaxVectors * Simd<T>::kLanes;
template <typename T>
inline constexpr int kTaskPanels = (kTaskRows + kPanelRows<T> - 1) / kPanelRows<T>;

// Columns of v and o are padded to whole groups (gemm.h) and whole vectors (thin.h).
template <typename T>
inline constexpr int kColumnPad = Simd<T>::kLanes > kGroupPad ? Simd<T>::kLanes : kGroupPad;

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

struct RowIndex {
  std::int64_t head;
  std::int64_t query;
};

// Rows [first_row, first_row + rows) of heads [first_head, ...), one head after the other.
struct Task {
  std::int64_t batch;
  std::int64_t head_k;
  std::int64_t first_head;
  std::int64_t first_row;
  int rows;
};

// Tasks are tiles of query rows of a `unit`: one head, or, where a head has too few rows for a
// panel (decoding), all heads that share a kv head, so that they share the lanes and the packed
// keys.
struct Split {
  bool thin;  // a unit has no more than kThinRows rows: they go one by one
  int seqlen_q;
  int heads_per_unit;
  int units_per_batch;
  int heads_per_k;
  std::int64_t rows_per_unit;
  int rows_per_task;
  std::int64_t units;
  std::int64_t tiles;
  std::int64_t tasks;

  template <typename T>
  static Split make(const ForwardParams& p, int threads) {
    Split s{};
    if (p.batch <= 0 || p.heads <= 0 || p.seqlen_q <= 0) return s;
    s.seqlen_q = p.seqlen_q;
    s.heads_per_k = p.heads / p.heads_k;
    s.heads_per_unit = p.seqlen_q < kPanelRows<T> ? s.heads_per_k : 1;
    s.units_per_batch = p.heads / s.heads_per_unit;
    s.rows_per_unit = static_cast<std::int64_t>(s.heads_per_unit) * p.seqlen_q;
    s.thin = s.rows_per_unit <= kThinRows<T>;
    s.units = p.batch * s.units_per_batch;
    // Fewer rows to a task where that is needed to give every thread some tasks.
    for (int panels = kTaskPanels<T>; panels >= 1; panels /= 2) {
      s.rows_per_task = panels * kPanelRows<T>;
      s.tiles = (s.rows_per_unit + s.rows_per_task - 1) / s.rows_per_task;
      s.tasks = s.tiles * s.units;
      if (threads == 1 || s.tasks >= std::int64_t{4} * threads) break;
    }
    return s;
  }

  // Last tiles first: under a causal mask they see the most keys, and a long task at the end would
  // leave the other threads idle.
  Task task(std::int64_t index) const {
    const std::int64_t unit = index % units;
    const std::int64_t tile = tiles - 1 - index / units;
    Task t;
    t.batch = unit / units_per_batch;
    t.first_head = unit % units_per_batch * heads_per_unit;
    t.head_k = t.first_head / heads_per_k;
    t.first_row = tile * rows_per_task;
    const std::int64_t rest = rows_per_unit - t.first_row;
    t.rows = rest < rows_per_task ? static_cast<int>(rest) : rows_per_task;
    return t;
  }

  RowIndex row(const Task& t, int r) const {
    const std::int64_t at = t.first_row + r;
    return {t.first_head + at / seqlen_q, at % seqlen_q};
  }
};

// A thread's slice of LaunchContext::scratch. Its size grows with the head dims, not with the
// lengths.
template <typename T>
struct Scratch {
  using Int = typename Simd<T>::Int;

  // In a panel                                  With few rows
  T* q;        // (panel, head_dim, rows)        (rows, head_dim padded)
  T* o;        // (panel, head_dim_v, rows)      (rows, head_dim_v padded)
  T* s;        // (kBlockN, rows)                (kBlockN): scores, then probabilities
  T* k;        // (kBlockN, head_dim)            (kBlockN, head_dim padded)
  T* v;        // (head_dim_v / 8, kBlockN, 8)   (kBlockN, head_dim_v padded)
  T* m;        // row maxima
  T* l;        // row sums
  T* row;      // one row of any tensor
  Int* limit;  // keys that a row sees: those below
  std::size_t size;

  static std::size_t bytes(const ForwardParams& p) { return carve(p, nullptr).size; }

  static Scratch carve(const ForwardParams& p, char* base) {
    constexpr int kRows = kTaskPanels<T> * kPanelRows<T>;
    const std::int64_t d = round_up(p.head_dim, Simd<T>::kLanes);
    const std::int64_t dv = round_up(p.head_dim_v, kColumnPad<T>);
    Scratch x;
    x.size = 0;
    const auto take = [&](std::int64_t count) {
      T* const at = base == nullptr ? nullptr : reinterpret_cast<T*>(base + x.size);
      x.size += (static_cast<std::size_t>(count) * sizeof(T) + 63) / 64 * 64;
      return at;
    };
    x.q = take(kRows * d);
    x.o = take(kRows * dv);
    x.s = take(std::int64_t{kBlockN} * kPanelRows<T>);
    x.k = take(kBlockN * d);
    x.v = take(kBlockN * dv);
    x.m = take(kRows);
    x.l = take(kRows);
    x.row = take(d > dv ? d : dv);
    x.limit = reinterpret_cast<Int*>(take(kRows));
    return x;
  }
};

// Calls make_runner(thread).run(task) for every task.
template <typename MakeRunner>
void run_tasks(std::int64_t tasks, int threads, const MakeRunner& make_runner) {
  if (tasks <= 0) return;
  if (threads > tasks) threads = static_cast<int>(tasks);
#if defined(_OPENMP)
  if (threads > 1) {
#pragma omp parallel num_threads(threads)
    {
      auto runner = make_runner(omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
      for (std::int64_t i = 0; i < tasks; ++i) runner.run(i);
    }
    return;
  }
#endif
  auto runner = make_runner(0);
  for (std::int64_t i = 0; i < tasks; ++i) runner.run(i);
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
