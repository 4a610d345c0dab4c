// The run of a KvCachePlan with a case's tensors.
#pragma once

#include <array>
#include <cstddef>
#include <optional>

#include "anyflash/attention.h"
#include "decode_problem.h"
#include "problem.h"
#include "tensor.h"

namespace driver {

// (batch, heads, rows) of (heads, batch * rows).
inline void unpack_lse(const Tensor& packed, Tensor& lse) {
  const auto [one, batch, heads, rows] = lse.extent();
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t i = 0; i < rows; ++i) {
        lse.set(lse.index(0, b, head, i), packed.at(0, 0, head, b * rows + i));
      }
    }
  }
}

// Where sequences of `rows` rows each begin.
inline Tensor ends_of(int64_t batch, int64_t rows) {
  Tensor ends(DType::kInt32, {1, 1, 1, batch + 1});
  for (int64_t b = 0; b <= batch; ++b) ends.set(b, static_cast<double>(b * rows));
  return ends;
}

inline void run_decode(DecodeProblem& p) {
  const Case& c = p.c;
  std::array<TensorView, 16> views;
  std::size_t used = 0;
  const auto give = [&](const TensorView*& option, const std::optional<Tensor>& tensor, int rank) {
    if (!tensor) return;
    views.at(used) =
        c.ragged && rank < 0 ? tensor->packed_view(-rank - 1) : tensor->view(abs(rank));
    option = &views.at(used++);
  };
  anyflash::ForwardOptions options;
  options.softmax_scale = c.scale;
  options.causal = c.causal != 0;
  options.window_left = c.left;
  options.window_right = c.right;
  options.softcap = c.softcap;
  give(options.alibi_slopes, p.slopes, 1);
  give(options.sinks, p.sinks, 1);
  anyflash::KvCacheOptions cache;
  give(cache.cache_seqlens, p.seqlens, 1);
  give(cache.cache_leftpad, p.leftpad, 1);
  give(cache.cache_batch_idx, p.batch_idx, 1);
  give(cache.block_table, p.table, 2);
  if (p.table) views[used - 1].shape[1] = c.seqlen_k / c.page;
  give(cache.tree_mask, p.tree, -3);  // negative: packed with queries
  give(cache.k_new, p.k_new, -4);
  if (!c.latent) give(cache.v_new, p.v_new, -4);
  give(cache.rotary_cos, p.cos, 2);
  give(cache.rotary_sin, p.sin, 2);
  give(cache.rotary_seqlens, p.rotary_seqlens, 1);
  cache.rotary_interleaved = !c.halves;
  const int rank = c.scales == "row" ? 3 : c.scales == "slot" ? 2 : 1;
  give(cache.k_scale, p.k_scale, rank);
  if (!c.latent) give(cache.v_scale, p.v_scale, rank);
  if (c.latent) cache.head_dim_v = c.head_dim_v;
  cache.num_splits = c.splits;
  cache.split_size = c.split_size;

  std::optional<Tensor> packed_lse, ends, new_ends;
  if (c.ragged) {
    packed_lse.emplace(DType::kFloat32,
                       std::array<int64_t, 4>{1, 1, c.heads, c.batch * c.seqlen_q});
    ends.emplace(ends_of(c.batch, c.seqlen_q));
    give(options.cu_seqlens_q, ends, 1);
    if (c.new_keys > 0) new_ends.emplace(ends_of(c.batch, c.new_keys));
    give(cache.cu_seqlens_k_new, new_ends, 1);
  }
  const TensorView lse = c.ragged ? packed_lse->view(2) : p.lse.view(3);
  anyflash::KvCacheTensors tensors;
  tensors.q = c.ragged ? p.q.packed_view(3) : p.q.view(4);
  tensors.k_cache = p.k.view(4);
  if (!c.latent) tensors.v_cache = p.v.view(4);
  tensors.out = c.ragged ? p.out.packed_view(3) : p.out.view(4);
  tensors.lse = &lse;
  run_exactly(anyflash::KvCachePlan(tensors, options, cache));
  if (c.ragged) unpack_lse(*packed_lse, p.lse);
}

}  // namespace driver
