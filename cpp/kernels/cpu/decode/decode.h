// Attention to a cache: the forward (cpu/forward/forward.h) with keys from a cache
// (cpu/decode/keys.h). Where there are too few sequences and heads to keep all threads busy, the
// keys of each are split (known as flash-decoding), and the parts are joined at the end.
//
// What a row gets depends on the number of splits, or the size of one, but neither on the other
// sequences nor on the number of threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/decode/join.h"
#include "cpu/decode/keys.h"
#include "cpu/forward/panels.h"
#include "cpu/forward/single_row.h"
#include "cpu/scratch.h"
#include "cpu/simd/convert.h"
#include "cpu/tasks.h"
#include "kernel_descriptor.h"
#include "params.h"
#include "threads.h"
#include "variant/cache.h"
#include "variant/mask.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

// Splits that may have keys: an even division has no more of them than blocks of keys.
inline int used_splits(const KvCacheParams& p) {
  const int keys = p.split_size > 0 ? p.split_size : kBlockN;
  const int most = p.attention.seqlen_k / keys + (p.attention.seqlen_k % keys != 0);
  const int splits = p.split_size > 0 || most < p.num_splits ? most : p.num_splits;
  return splits < 1 ? 1 : splits;
}

// A tree mask is a bias of the newest keys, the same for all heads. Of packed sequences the cache
// has the keys, but tasks ask for their places among packed ones, too.
inline ForwardParams forward_params(const KvCacheParams& p) {
  ForwardParams forward;
  forward.attention = p.attention;
  forward.attention.cu_seqlens_k = p.attention.cu_seqlens_q;
  forward.attention.bias = p.tree_mask;
  forward.attention.bias.stride.head = 0;
  forward.out = p.out;
  forward.out_dtype = p.out_dtype;
  forward.out_stride = p.out_stride;
  forward.lse = p.lse;
  forward.lse_stride = p.lse_stride;
  return forward;
}

// One thread's work on one task after the other: a task of the forward and one split.
template <typename E>
class DecodeRunner {
 public:
  using T = typename Compute<E>::Type;

  DecodeRunner(const KvCacheParams& p, const ForwardParams& forward, const Split& split,
               const Scratch<T>& scratch, const PartialResults<T>& partial)
      : p_(p), split_(split), splits_(partial.splits), rows_(p, forward, scratch, partial) {}

  void run(std::int64_t number) {
    Task task = split_.task(number / splits_);
    const int split = static_cast<int>(number % splits_);
    const CachedSequence cached = cached_sequence(p_, task.index);
    task.sequence.seqlen_k = task.sequence.all_keys = cached.seqlen_k;
    task.sequence.shift = cached.seqlen_k - cached.seqlen_q;
    task.first_bias_row = cached.first_q;
    const Mask mask(task.sequence, p_.attention.window);
    const SplitKeys keys =
        split_keys(p_, split, mask.first_key(0), mask.end_key(cached.seqlen_q - 1), kBlockN);
    task.first_key = keys.begin;
    task.end_key = keys.end;
    const int most = split_.rows_per_task();
    for (std::int64_t row = task.first_row; row < task.end_row; row += most) {
      const std::int64_t rest = task.end_row - row;
      rows_.begin(task, cached, split, row, rest < most ? static_cast<int>(rest) : most);
      if (keys.begin == keys.end && splits_ > 1) {
        rows_.finish_empty();
      } else if (task.single_row) {
        FewRowsTask<CacheRows<E>>(rows_).run();
      } else {
        PanelTask<CacheRows<E>>(rows_).run();
      }
    }
  }

 private:
  const KvCacheParams& p_;
  const Split& split_;
  const int splits_;
  CacheRows<E> rows_;
};

// As threads_worth() counts it. Few rows share a key: to read one of its elements takes as long as
// 16 operations of the forward.
inline double decode_work(const KvCacheParams& p) {
  constexpr double kReading = 16;
  const Attention& a = p.attention;
  const double rows = a.cu_seqlens_q == nullptr || a.batch == 0
                          ? a.seqlen_q
                          : static_cast<double>(a.total_q) / static_cast<double>(a.batch);
  double keys = 0;
  for (std::int64_t b = 0; b < a.batch; ++b) keys += cached_sequence(p, b).seqlen_k;
  const double per_key = 2.0 * a.heads * rows + kReading * a.heads_k;
  return keys * per_key * (a.head_dim + a.head_dim_v);
}

template <typename E>
std::size_t decode_scratch_bytes(const KvCacheParams& p, const LaunchContext& context) {
  using T = typename Compute<E>::Type;
  const std::size_t threads =
      static_cast<std::size_t>(context.num_threads < 1 ? 1 : context.num_threads);
  return Scratch<T>::bytes(forward_params(p).attention) * threads +
         PartialResults<T>::carve(p.attention, used_splits(p), nullptr).size;
}

template <typename E>
void decode(const KvCacheParams& p, const LaunchContext& context) {
  using T = typename Compute<E>::Type;
  const ForwardParams forward = forward_params(p);
  const Attention& a = forward.attention;
  const int threads = threads_worth(context.num_threads, decode_work(p));
  const int splits = used_splits(p);
  const Split split = Split::make<T>(a, threads, splits);
  const std::size_t bytes = Scratch<T>::bytes(a);
  char* const base = static_cast<char*>(context.scratch);
  const auto partial = PartialResults<T>::carve(a, splits, base + bytes * threads);
  run_tasks(split.tasks() * splits, threads, [&](int thread) {
    const auto scratch = Scratch<T>::carve(a, base + bytes * thread);
    return DecodeRunner<E>(p, forward, split, scratch, partial);
  });
  if (!partial.used()) return;
  run_tasks(partial.batch * a.heads, threads, [&](int thread) {
    return Joiner<E>(forward, partial, Scratch<T>::carve(a, base + bytes * thread).row);
  });
}

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
