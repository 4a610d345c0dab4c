// FlashAttention-2 on a CPU (arXiv 2307.08691): one pass over the keys, an online softmax.
//
// For a block of keys, with scores S (softcap, ALiBi and bias included: scores.h):
//     m'    = max(m, rowmax(S))
//     P     = e^(S - m')                       hidden keys: S = -inf, P = 0
//     alpha = e^(m - m')
//     l     = alpha l + rowsum(P)
//     P     = 0 where dropout drops            dropped.h
//     O     = alpha O + P V                    hidden keys add nothing
//     m     = m'
// and at the end, with a sink z (-inf: none) and dropout's p (query_rows.h)
//     l     = l + e^(z - m)
//     out   = O / (l (1 - p)),  lse = m + ln l.
// Where nothing is done to q.k but the scale, S and m are in units of log2 e, so that the
// exponential is 2^x. By tiles (cpu/amx/products.h) m is replaced only where m' exceeds it by
// kLazyRescaleLimit.
//
// A task is up to kTaskPanels panels of query rows of one (sequence, kv head); a panel is what fits
// the registers (cpu/forward/panels.h). Where a sequence has very few rows they go one by one
// (cpu/forward/single_row.h).
//
// What a row gets depends on its own scores, on the block borders (multiples of kPanelKeys) and on
// whether its sequence goes row by row (seqlen_q, heads / heads_k). It depends neither on the other
// rows, nor on the batch, nor on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/forward/panels.h"
#include "cpu/forward/single_row.h"
#include "cpu/query_rows.h"
#include "cpu/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/tasks.h"
#include "kernel_descriptor.h"
#include "params.h"
#include "threads.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// One thread's work on one task after the other.
template <typename E>
class TaskRunner {
 public:
  using T = typename Compute<E>::Type;

  TaskRunner(const ForwardParams& p, const Split& split, const Scratch<T>& scratch)
      : split_(split), rows_(p, scratch) {}

  void run(std::int64_t number) {
    const Task task = split_.task(number);
    const int most = split_.rows_per_task();
    for (std::int64_t row = task.first_row; row < task.end_row; row += most) {
      const std::int64_t rest = task.end_row - row;
      rows_.begin(task, row, rest < most ? static_cast<int>(rest) : most);
      if (task.single_row) {
        FewRowsTask<TaskRows<E>>(rows_).run();
      } else {
        PanelTask<TaskRows<E>>(rows_).run();
      }
    }
  }

 private:
  const Split& split_;
  TaskRows<E> rows_;
};

template <typename E>
std::size_t forward_scratch_bytes(const ForwardParams& p, const LaunchContext& context) {
  using T = typename Compute<E>::Type;
  const int threads = threads_worth(context.num_threads, forward_work(p.attention));
  return Scratch<T>::bytes(p.attention) * static_cast<std::size_t>(threads);
}

template <typename E>
void forward(const ForwardParams& p, const LaunchContext& context) {
  using T = typename Compute<E>::Type;
  const int threads = threads_worth(context.num_threads, forward_work(p.attention));
  const Split split = Split::make<T>(p.attention, threads);
  char* const scratch = static_cast<char*>(context.scratch);
  run_tasks(split.tasks(), threads, [&](int thread) {
    return TaskRunner<E>(
        p, split,
        Scratch<T>::carve(p.attention, scratch + Scratch<T>::bytes(p.attention) * thread));
  });
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
