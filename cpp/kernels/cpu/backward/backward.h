// The backward of attention on a CPU, by recomputation (FlashAttention-2, arXiv 2307.08691, section
// 3.1.2). With S, P, dS of a tile as in cpu/backward/tile.h:
//
//     delta = rowsum(dO out) - dlse                  cpu/backward/sums.h, DeltaTasks
//     dV    = (P kept)^T dO,  dK = scale dS0^T Q     cpu/backward/tasks.h, keys()
//     dQ    = scale dS0 K                            cpu/backward/tasks.h, rows()
//     dbias = dS                                     cpu/backward/tasks.h, bias()
//     dsink = -sum e^(sink - lse) delta,  dslope = -sum dist dS   cpu/backward/sums.h, HeadSums
//
// dQ has tasks of its own, which make S and dO V^T again. That takes 7 products instead of 5. But
// every sum is made by one thread in a fixed order, without a copy of dQ for each block of keys.
// dbias, which may be broadcast along any axis, makes them a third time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/backward/scratch.h"
#include "cpu/backward/split.h"
#include "cpu/backward/sums.h"
#include "cpu/backward/tasks.h"
#include "cpu/simd/convert.h"
#include "cpu/tasks.h"
#include "kernel_descriptor.h"
#include "params.h"
#include "threads.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// All tasks on tiles, the longest of a causal mask first.
template <typename E>
class BackwardRunner {
 public:
  using T = typename Compute<E>::Type;

  struct Splits {
    BlockSplit keys;
    BlockSplit rows;
    BiasSplit bias;
    bool whole;  // the tasks of `keys` take whole sequences, there are none of `rows`

    std::int64_t tasks() const { return keys.tasks() + (whole ? 0 : rows.tasks()) + bias.tasks(); }
  };

  BackwardRunner(const BackwardParams& p, const Splits& splits, const RowSums<T>& sums,
                 const BackwardScratch<T>& scratch)
      : splits_(splits), tasks_(p, sums, scratch) {}

  void run(std::int64_t number) {
    if (number < splits_.bias.tasks()) return tasks_.bias(splits_.bias.task(number));
    number -= splits_.bias.tasks();
    const BlockSplit& keys = splits_.keys;
    if (splits_.whole) return tasks_.whole(keys.task(number));
    if (number < keys.tasks()) return tasks_.keys(keys.task(number), keys.per_task());
    number -= keys.tasks();
    const BlockSplit& rows = splits_.rows;
    tasks_.rows(rows.task(rows.tasks() - 1 - number), rows.per_task());
  }

 private:
  const Splits& splits_;
  BackwardTasks<E> tasks_;
};

// As threads_worth() counts it. Small problems take twice the forward's time.
inline double backward_work(const BackwardParams& p) { return 2 * forward_work(p.attention); }

template <typename E>
std::size_t backward_scratch_bytes(const BackwardParams& p, const LaunchContext& context) {
  using T = typename Compute<E>::Type;
  Carver carver(nullptr);
  RowSums<T>::carve(p, carver);
  const int threads = threads_worth(context.num_threads, backward_work(p));
  return carver.size() + BackwardScratch<T>::bytes(p, whole_rows<T>(p, threads)) *
                             static_cast<std::size_t>(threads);
}

template <typename E>
std::size_t dq_sums_bytes(const BackwardParams& p) {
  const Attention& a = p.attention;
  return static_cast<std::size_t>(a.batch * a.heads * p.dq_sums.rows * a.head_dim) *
         sizeof(typename Compute<E>::Type);
}

template <typename E>
void backward(const BackwardParams& p, const LaunchContext& context) {
  using T = typename Compute<E>::Type;
  const Attention& a = p.attention;
  const int threads = threads_worth(context.num_threads, backward_work(p));
  Carver carver(static_cast<char*>(context.scratch));
  const RowSums<T> sums = RowSums<T>::carve(p, carver);
  char* const base = static_cast<char*>(context.scratch) + carver.size();
  const std::int64_t whole = whole_rows<T>(p, threads);
  const std::size_t size = BackwardScratch<T>::bytes(p, whole);
  const auto scratch = [&](int thread) {
    return BackwardScratch<T>::carve(p, whole, base + size * thread);
  };
  run_tasks(DeltaTasks<E>::tasks(p, sums), threads,
            [&](int thread) { return DeltaTasks<E>(p, sums, scratch(thread)); });
  const typename BackwardRunner<E>::Splits splits{
      whole > 0 ? BlockSplit::whole(a.batch, a.heads_k)
                : BlockSplit(a.cu_seqlens_k, a.batch, a.seqlen_k, a.heads_k, kBlockN, threads),
      BlockSplit(a.cu_seqlens_q, a.batch, a.seqlen_q, a.heads, kBlockM, threads), BiasSplit(p),
      whole > 0};
  run_tasks(splits.tasks(), threads,
            [&](int thread) { return BackwardRunner<E>(p, splits, sums, scratch(thread)); });
  if (p.dsinks.data == nullptr && p.dalibi_slopes.data == nullptr) return;
  run_tasks(a.heads, threads, [&](int /*thread*/) { return HeadSums<T>(p, sums); });
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
