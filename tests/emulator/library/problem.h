// The tensors that a case gives to the forward, and the call.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "anyflash/attention.h"
#include "case.h"
#include "tensor.h"

namespace driver {

// Where a sequence's rows lie, and how many there are; of `all_keys` so many `keys` are in use.
struct Sequence {
  int64_t batch, first_q, first_k, queries, keys, all_keys;
};

class Problem {
 public:
  explicit Problem(const Case& problem)
      : c(problem),
        max_q(longest(c.cu_q, c.seqlen_q)),
        max_k(longest(c.cu_k, c.seqlen_k)),
        q(dtype_of(c.dtype), {tensors(), c.seqlen_q, c.heads, c.head_dim}),
        k(dtype_of(c.dtype), {tensors(), c.seqlen_k, c.heads_k, c.head_dim}),
        v(dtype_of(c.dtype), {tensors(), c.seqlen_k, c.heads_k, c.head_dim_v}),
        out(dtype_of(c.out), {tensors(), c.seqlen_q, c.heads, c.head_dim_v}),
        lse(DType::kFloat32, {1, tensors(), c.heads, c.seqlen_q}),
        max_logits(DType::kFloat32, {1, 1, c.batch, c.heads}) {
    std::mt19937 random(c.seed);
    std::normal_distribution<double> normal;
    for (Tensor* tensor : {&q, &k, &v}) {
      for (int64_t i = 0; i < tensor->size(); ++i) tensor->set(i, normal(random));
    }
    make_vectors();
    if (!c.bias.empty()) make_bias(random);
    if (!c.block.empty()) make_block_mask(random);
    if (!c.ranges.empty()) make_key_ranges();
    if (c.dropout > 0) dropout_mask.emplace(DType::kBool, extent(c.batch, c.heads, max_q, max_k));
  }

  // Extent of the batch axis, which packed tensors do not have.
  int64_t tensors() const { return c.packed() ? 1 : c.batch; }
  int rank() const { return c.packed() ? 3 : 4; }

  Sequence sequence(int64_t b) const {
    const auto at = static_cast<std::size_t>(b);
    Sequence s;
    s.batch = c.packed() ? 0 : b;
    s.first_q = c.packed() ? c.cu_q[at] : 0;
    s.first_k = c.packed() ? c.cu_k[at] : 0;
    s.queries = c.packed() ? c.cu_q[at + 1] - s.first_q : c.seqlen_q;
    s.all_keys = c.packed() ? c.cu_k[at + 1] - s.first_k : c.seqlen_k;
    s.keys = c.used.empty() ? s.all_keys : c.used[at];
    return s;
  }

  Case c;
  int64_t max_q, max_k;
  Tensor q, k, v, out, lse, max_logits;
  std::optional<Tensor> slopes, bias, block_mask, key_ranges, sinks, cu_q, cu_k, seqused_k,
      dropout_mask;

 private:
  static std::array<int64_t, 4> extent(int64_t a, int64_t b, int64_t x, int64_t y) {
    return {a, b, x, y};
  }

  static int64_t longest(const std::vector<int64_t>& cu, int64_t otherwise) {
    int64_t length = cu.empty() ? otherwise : 0;
    for (std::size_t b = 1; b < cu.size(); ++b) length = std::max(length, cu[b] - cu[b - 1]);
    return length;
  }

  static void make_vector(std::optional<Tensor>& tensor, const std::vector<int64_t>& values) {
    if (values.empty()) return;
    tensor.emplace(DType::kInt32, extent(1, 1, 1, static_cast<int64_t>(values.size())));
    for (std::size_t i = 0; i < values.size(); ++i) {
      tensor->set(static_cast<int64_t>(i), static_cast<double>(values[i]));
    }
  }

  void make_vectors() {
    make_vector(cu_q, c.cu_q);
    make_vector(cu_k, c.cu_k);
    make_vector(seqused_k, c.used);
    if (c.alibi != 0) {
      slopes.emplace(DType::kFloat32, extent(1, 1, c.shared_slopes ? 1 : c.batch, c.heads));
      for (int64_t i = 0; i < slopes->size(); ++i) slopes->set(i, c.alibi / (1.0 + double(i)));
    }
    if (c.sink) {
      sinks.emplace(DType::kFloat32, extent(1, 1, 1, c.heads));
      for (int64_t i = 0; i < c.heads; ++i) sinks->set(i, i % 2 == 0 ? 3.0 : -1.0);
    }
  }

  // Random numbers; a tenth of them, and every seventh key from the third on, hide.
  void make_bias(std::mt19937& random) {
    const std::array<int64_t, 4> full{c.batch, c.heads, max_q, max_k};
    std::array<int64_t, 4> axes{};
    for (std::size_t i = 0; i < 4; ++i) axes[i] = c.bias_axes.at(i) == '1' ? 1 : full[i];
    bias.emplace(dtype_of(c.bias), axes);
    std::normal_distribution<double> normal;
    std::bernoulli_distribution hidden(0.1);
    for (int64_t i = 0; i < bias->size(); ++i) {
      const double x = normal(random);
      const bool hides = hidden(random) || (axes[3] > 1 && i % axes[3] % 7 == 3);
      if (c.bias == "bool") bias->set(i, hides ? 0 : 1);
      else bias->set(i, hides ? -INFINITY : x);
    }
  }

  void make_block_mask(std::mt19937& random) {
    const auto blocks = [](int64_t n, int64_t size) { return (n + size - 1) / size; };
    block_mask.emplace(DType::kBool, extent(c.batch, c.heads, blocks(max_q, c.block.at(0)),
                                            blocks(max_k, c.block.at(1))));
    std::bernoulli_distribution kept(0.6);
    for (int64_t i = 0; i < block_mask->size(); ++i) block_mask->set(i, kept(random) ? 1 : 0);
  }

  // The third document is seen by no row.
  void make_key_ranges() {
    const int64_t numbers = 2 * c.ranges.at(1);
    key_ranges.emplace(DType::kInt32, extent(tensors(), c.heads_k, c.seqlen_k, numbers));
    for (int64_t b = 0; b < c.batch; ++b) {
      const Sequence s = sequence(b);
      for (int64_t j = 0; j < s.all_keys; ++j) {
        for (int64_t h = 0; h < c.heads_k; ++h) {
          const int64_t size = c.ranges[0] + h;
          const int64_t begin = j / size * size;
          const int64_t end = j / size == 2 ? begin : begin + size;
          const int64_t values[] = {begin, end, begin + 2 * size, end + 2 * size};
          for (int64_t x = 0; x < numbers; ++x) {
            key_ranges->set(key_ranges->index(s.batch, h, s.first_k + j, x),
                            static_cast<double>(values[x]));
          }
        }
      }
    }
  }
};

// What a problem's calls are given beside q, k, v, out and lse.
class Options {
 public:
  Options(const Problem& p, const std::array<uint64_t, 2>& rng) {
    const Case& c = p.c;
    options_.softmax_scale = c.scale;
    options_.causal = c.causal != 0;
    options_.window_left = c.left;
    options_.window_right = c.right;
    options_.diagonal = c.diagonal;
    options_.softcap = c.softcap;
    options_.dropout_p = c.dropout;
    options_.seed = rng[0];
    options_.offset = rng[1];
    if (!c.block.empty()) options_.block_size = {c.block[0], c.block[1]};
    options_.max_seqlen_q = c.packed() ? p.max_q : 0;
    options_.max_seqlen_k = c.packed() ? p.max_k : 0;
    give(options_.alibi_slopes, p.slopes, 2);
    give(options_.bias, p.bias, 4);
    give(options_.block_mask, p.block_mask, 4);
    give(options_.key_ranges, p.key_ranges, p.rank());
    give(options_.sinks, p.sinks, 1);
    give(options_.cu_seqlens_q, p.cu_q, 1);
    give(options_.cu_seqlens_k, p.cu_k, 1);
    give(options_.seqused_k, p.seqused_k, 1);
    give(options_.dropout_mask, p.dropout_mask, 4);
    views_[used_] = p.max_logits.view(2);
    options_.max_logits = &views_[used_++];
  }
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

  const anyflash::ForwardOptions& get() const { return options_; }

 private:
  void give(const TensorView*& option, const std::optional<Tensor>& tensor, int rank) {
    if (!tensor) return;
    views_[used_] = tensor->view(rank);
    option = &views_[used_++];
  }

  anyflash::ForwardOptions options_;
  std::array<TensorView, 10> views_;
  std::size_t used_ = 0;
};

// Memory of exactly this size, of NaN. It begins one byte behind a multiple of 256, where a
// workspace has most to skip.
class ExactWorkspace {
 public:
  explicit ExactWorkspace(std::size_t bytes)
      : data_(static_cast<char*>(::operator new(1 + bytes, kAlignment))), bytes_(bytes) {
    std::memset(data_.get(), 0xff, 1 + bytes);
  }
  anyflash::Workspace get() const { return {data_.get() + 1, bytes_}; }

 private:
  static constexpr std::align_val_t kAlignment{256};
  struct Free {
    void operator()(char* p) const { ::operator delete(p, kAlignment); }
  };
  std::unique_ptr<char, Free> data_;
  std::size_t bytes_;
};

template <class Plan>
void run_exactly(const Plan& plan) {
  const ExactWorkspace workspace(plan.workspace_bytes());
  plan.run(workspace.get());
}

// Keys [first, end) of a tensor that is not packed.
inline TensorView keys_of(const Tensor& tensor, int64_t first, int64_t end) {
  TensorView view = tensor.view(4);
  view.data = static_cast<char*>(view.data) + first * view.stride[1] * bytes_of(view.dtype);
  view.shape[1] = end - first;
  return view;
}

// Of the keys [first, end) alone.
inline void run_forward_part(const Problem& p, anyflash::ForwardTensors tensors,
                             anyflash::ForwardOptions options, int64_t first, int64_t end) {
  options.diagonal = p.c.diagonal ? *p.c.diagonal : p.c.seqlen_k - p.c.seqlen_q;
  options.key_start = first;
  options.max_logits = nullptr;
  tensors.k = keys_of(p.k, first, end);
  tensors.v = keys_of(p.v, first, end);
  run_exactly(anyflash::ForwardPlan(tensors, options));
}

// The first keys, and in the same place the others.
inline void run_forward_split(const Problem& p, const anyflash::ForwardTensors& whole,
                              anyflash::ForwardOptions options) {
  run_forward_part(p, whole, options, 0, *p.c.split);
  options.prior_out = &whole.out;
  options.prior_lse = whole.lse;
  run_forward_part(p, whole, options, *p.c.split, p.c.seqlen_k);
}

// The first keys, the others elsewhere, and both in the first one's place.
inline void run_forward_merged(const Problem& p, const anyflash::ForwardTensors& whole,
                               const anyflash::ForwardOptions& options) {
  run_forward_part(p, whole, options, 0, *p.c.merge);
  const Tensor out(p.out.dtype(), p.out.extent());
  const Tensor lse(p.lse.dtype(), p.lse.extent());
  const TensorView lse_view = lse.view(p.rank() - 1);
  anyflash::ForwardTensors others = whole;
  others.out = out.view(p.rank());
  others.lse = &lse_view;
  run_forward_part(p, others, options, *p.c.merge, p.c.seqlen_k);
  merge_states(whole.out, *whole.lse, others.out, lse_view, whole.out, whole.lse, {});
}

inline void run_forward(const Problem& p, const std::array<uint64_t, 2>& rng) {
  const Options options(p, rng);
  const int rank = p.rank();
  const TensorView lse = p.lse.view(rank - 1);
  anyflash::ForwardTensors tensors;
  tensors.q = p.q.view(rank);
  tensors.k = p.k.view(rank);
  tensors.v = p.v.view(rank);
  tensors.out = p.out.view(rank);
  tensors.lse = &lse;
  if (p.c.split) run_forward_split(p, tensors, options.get());
  else if (p.c.merge) run_forward_merged(p, tensors, options.get());
  else run_exactly(anyflash::ForwardPlan(tensors, options.get()));
}

}  // namespace driver
