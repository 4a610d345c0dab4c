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

inline void run_decode(const DecodeProblem& p) {
  const Case& c = p.c;
  std::array<TensorView, 14> views;
  std::size_t used = 0;
  const auto give = [&](const TensorView*& option, const std::optional<Tensor>& tensor, int rank) {
    if (!tensor) return;
    views.at(used) = tensor->view(rank);
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
  give(cache.tree_mask, p.tree, 3);
  give(cache.k_new, p.k_new, 4);
  if (!c.latent) give(cache.v_new, p.v_new, 4);
  give(cache.rotary_cos, p.cos, 2);
  give(cache.rotary_sin, p.sin, 2);
  give(cache.rotary_seqlens, p.rotary_seqlens, 1);
  cache.rotary_interleaved = !c.halves;
  give(cache.k_scale, p.k_scale, c.scales == "slot" ? 2 : 1);
  if (!c.latent) give(cache.v_scale, p.v_scale, c.scales == "slot" ? 2 : 1);
  if (c.latent) cache.head_dim_v = c.head_dim_v;
  cache.num_splits = c.splits;
  cache.split_size = c.split_size;

  const TensorView lse = p.lse.view(3);
  anyflash::KvCacheTensors tensors;
  tensors.q = p.q.view(4);
  tensors.k_cache = p.k.view(4);
  if (!c.latent) tensors.v_cache = p.v.view(4);
  tensors.out = p.out.view(4);
  tensors.lse = &lse;
  run_exactly(anyflash::KvCachePlan(tensors, options, cache));
}

}  // namespace driver
