// Calls of KvCachePlan that are allowed and use everything.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"
#include "tensor.h"
#include "validation/validation.h"

namespace test {

using anyflash::KvCacheOptions;

// The arguments, and what tells whether something has been written.
struct KvCall {
  anyflash::KvCachePlan plan() const {
    const auto tensors = kvcache_tensors(q, k_cache, v_cache, out, has_lse ? &lse : nullptr);
    return anyflash::KvCachePlan(tensors, options, cache);
  }
  std::size_t workspace_size() const { return plan().workspace_bytes(); }
  void run(anyflash::Workspace workspace) const { plan().run(workspace); }

  TensorView q, k_cache, v_cache, out, lse;
  bool has_lse = true;
  ForwardOptions options;
  KvCacheOptions cache;
};

// Batch 2, seqlen_q 3, heads 4 and 2, head_dim 8 and head_dim_v 3. The cache holds 3 sequences with
// room for 16 rows, of which 9 and 4 are filled; 2 are appended.
struct Appending : KvCall {
  Appending() {
    q = q_memory.view;
    k_cache = k_memory.view;
    v_cache = v_memory.view;
    out = out_memory.view;
    lse = without(lse_memory, 0);
    lse.rank = 3;
    unsigned seed = 1;
    for (Tensor* t : {&q_memory, &k_memory, &v_memory, &k_new, &v_new}) t->fill(seed++);
    k_before = k_memory.bytes;
    v_before = v_memory.bytes;
    seqlens.assign<int32_t>({9, 4});
    places.assign<int32_t>({2, 0});
    pads.assign<int32_t>({1, 0});
    tree.assign<unsigned char>({1, 0, 0, 1, 1, 0, 1, 0, 1});
    for (int i = 0; i < 48; ++i) {
      cos.data<float>()[i] = static_cast<float>(std::cos(0.1 * i));
      sin.data<float>()[i] = static_cast<float>(std::sin(0.1 * i));
    }
    rotations.assign<int32_t>({3, 12});
    slopes.assign<float>({0.5f, 0.25f, 0.125f, 0.0625f});
    options.causal = true;
    options.window_left = 7;
    options.softcap = 30.0;
    options.alibi_slopes = &slopes.view;
    options.sinks = &sinks.view;
    cache.cache_seqlens = &seqlens.view;
    cache.cache_batch_idx = &places.view;
    cache.cache_leftpad = &pads.view;
    cache.k_new = &k_new.view;
    cache.v_new = &v_new.view;
    cache.rotary_cos = &cos.view;
    cache.rotary_sin = &sin.view;
    cache.tree_mask = &tree.view;
    cache.num_splits = 2;
  }
  bool untouched() const {
    return out_memory.untouched() && lse_memory.untouched() && k_memory.bytes == k_before &&
           v_memory.bytes == v_before;
  }

  Tensor q_memory{DType::kFloat32, {2, 3, 4, 8}};
  Tensor k_memory{DType::kFloat32, {3, 16, 2, 8}};
  Tensor v_memory{DType::kFloat32, {3, 16, 2, 3}};
  Tensor out_memory{DType::kFloat32, {2, 3, 4, 3}};
  Tensor lse_memory{DType::kFloat32, {2, 4, 3, 1}};
  Tensor k_new{DType::kFloat32, {2, 2, 2, 8}};
  Tensor v_new{DType::kFloat32, {2, 2, 2, 3}};
  std::vector<unsigned char> k_before, v_before;
  SmallTensor seqlens{DType::kInt32, {2}};
  SmallTensor places{DType::kInt32, {2}};
  SmallTensor pads{DType::kInt32, {2}};
  SmallTensor tree{DType::kBool, {1, 3, 3}};
  SmallTensor rotations{DType::kInt32, {2}};  // given where a test says so
  SmallTensor cos{DType::kFloat32, {16, 3}};
  SmallTensor sin{DType::kFloat32, {16, 3}};
  SmallTensor slopes{DType::kFloat32, {4}};
  SmallTensor sinks{DType::kFloat32, {4}};
};

// The same lengths, in 6 pages of 4 rows of int8. What the table holds behind the pages in use is
// never read.
struct Paged : Appending {
  Paged() {
    k_cache = k_pages.view;
    v_cache = v_pages.view;
    std::fill(k_pages.bytes.begin(), k_pages.bytes.end(), static_cast<unsigned char>(3));
    std::fill(v_pages.bytes.begin(), v_pages.bytes.end(), static_cast<unsigned char>(253));
    k_pages_before = k_pages.bytes;
    v_pages_before = v_pages.bytes;
    table.assign<int32_t>({5, 0, 3, -7, 1, 2, -1, 99});
    for (int i = 0; i < 12; ++i) k_scale.data<float>()[i] = 0.0625f * static_cast<float>(i + 1);
    v_scale.assign<float>({0.25f, 0.5f});
    cache.cache_batch_idx = nullptr;
    cache.block_table = &table.view;
    cache.k_scale = &k_scale.view;
    cache.v_scale = &v_scale.view;
  }
  bool untouched() const {
    return Appending::untouched() && k_pages.bytes == k_pages_before &&
           v_pages.bytes == v_pages_before;
  }

  Tensor k_pages{DType::kInt8, {6, 4, 2, 8}};
  Tensor v_pages{DType::kInt8, {6, 4, 2, 3}};
  std::vector<unsigned char> k_pages_before, v_pages_before;
  SmallTensor table{DType::kInt32, {2, 4}};
  SmallTensor k_scale{DType::kFloat32, {6, 2}};
  SmallTensor v_scale{DType::kFloat32, {2}};
};

// Latent attention: the values are the first columns of the keys.
template <class Call>
struct LatentOf : Call {
  LatentOf() {
    this->v_cache = {};
    this->cache.v_new = nullptr;
    this->cache.v_scale = nullptr;
    this->cache.head_dim_v = 3;
  }
};
using Latent = LatentOf<Appending>;

}  // namespace test
