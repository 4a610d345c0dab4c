// A BackwardPlan with any set of features: its inputs, what the forward makes of them, and
// the gradients.
#pragma once

#include <algorithm>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "tensor.h"

namespace test {

using anyflash::BackwardOptions;
using anyflash::ForwardOptions;

enum : unsigned {
  kCausal = 1,
  kWindow = 2,
  kSoftcap = 4,
  kAlibi = 8,
  kBias = 16,
  kBlocks = 32,
  kSinks = 64,
  kDropout = 128,
  kUsed = 256,
  kPacked = 512,
  kGivenLse = 1024,  // a gradient of the LSE
  kAll = 1023,
};

struct Sequence {
  int64_t batch, first_q, first_k, seqlen_q, seqlen_k;
};

struct Shape {
  int64_t batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v;
};

inline std::string text(const Shape& s, unsigned set, DType dtype) {
  std::string result = "set " + std::to_string(set) + ", dtype " +
                       std::to_string(static_cast<int>(dtype)) + ", shape";
  for (const int64_t n :
       {s.batch, s.seqlen_q, s.seqlen_k, s.heads, s.heads_k, s.head_dim, s.head_dim_v}) {
    result += " " + std::to_string(n);
  }
  return result;
}

// Packed tensors have a batch of 1.
struct BackwardProblem {
  BackwardProblem(const Shape& s, unsigned set_, DType dtype, Layout layout, unsigned seed)
      : shape(s), set(set_), random(seed), what(text(s, set_, dtype)) {
    make_sequences();
    const int64_t batch = has(kPacked) ? 1 : s.batch;
    const int64_t rows = has(kPacked) ? total_q : s.seqlen_q;
    const int64_t keys = has(kPacked) ? total_k : s.seqlen_k;
    for (auto* t : {&q, &dq}) t->emplace(dtype, Index{batch, rows, s.heads, s.head_dim}, layout);
    for (auto* t : {&k, &dk}) t->emplace(dtype, Index{batch, keys, s.heads_k, s.head_dim}, layout);
    for (auto* t : {&v, &dv}) {
      t->emplace(dtype, Index{batch, keys, s.heads_k, s.head_dim_v}, layout);
    }
    for (auto* t : {&out, &dout}) {
      t->emplace(dtype, Index{batch, rows, s.heads, s.head_dim_v}, layout);
    }
    for (auto* t : {&lse, &dlse}) t->emplace(DType::kFloat32, Index{batch, s.heads, rows, 1});
    for (auto* t : {&q, &k, &v, &dout, &dlse}) (*t)->fill(random());
    make_options();
  }

  bool has(unsigned feature) const { return (set & feature) != 0; }

  void make_sequences() {
    for (int64_t b = 0; b < shape.batch; ++b) {
      const bool packed = has(kPacked);
      // One of the packed sequences is as long as the bounds say, one has no queries.
      const int64_t seqlen_q = packed ? shape.seqlen_q * (b % 3) / 2 : shape.seqlen_q;
      const int64_t seqlen_k = packed ? shape.seqlen_k / (1 + b % 3) : shape.seqlen_k;
      Sequence s;
      s.batch = packed ? 0 : b;
      s.first_q = packed ? total_q : 0;
      s.first_k = packed ? total_k : 0;
      s.seqlen_q = seqlen_q;
      s.seqlen_k = seqlen_k;
      sequences.push_back(s);
      total_q += seqlen_q;
      total_k += seqlen_k;
    }
  }

  // One more small tensor and its gradient, which options point to.
  const TensorView* small(std::optional<Tensor>& input, std::optional<Tensor>& gradient,
                          const TensorView** wanted, const Index& n, int first, DType dtype) {
    input.emplace(dtype, n);
    gradient.emplace(dtype, n);
    input->fill(random());
    views.push_back(without(*gradient, first));
    *wanted = &views.back();
    views.push_back(without(*input, first));
    return &views.back();
  }

  void make_options() {
    views.reserve(24);  // addresses stay
    const int64_t b = shape.batch;
    const DType wide = q->view.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
    options.causal = has(kCausal);
    if (has(kWindow)) {
      options.window_left = shape.seqlen_k / 2;
      options.window_right = shape.seqlen_k / 3;
    }
    if (has(kSoftcap)) options.softcap = 1.5;
    if (has(kAlibi)) {
      options.alibi_slopes =
          small(slopes, dslopes, &wanted.dalibi_slopes, {1, 1, b, shape.heads}, 2, wide);
      slopes->for_each([&](const Index& i) { slopes->set(i, slopes->get(i) / 16); });
    }
    if (has(kBias)) {
      const Index n = {random() % 2 == 0 ? b : 1, random() % 2 == 0 ? shape.heads : 1,
                       random() % 2 == 0 ? shape.seqlen_q : 1, shape.seqlen_k};
      options.bias = small(bias, dbias, &wanted.dbias, n, 0, wide);
    }
    if (has(kSinks)) {
      options.sinks = small(sinks, dsinks, &wanted.dsinks, {1, 1, 1, shape.heads}, 3, wide);
    }
    if (has(kBlocks)) {
      options.block_size = {64, 64};
      blocks.emplace(DType::kBool,
                     Index{1, shape.heads, (shape.seqlen_q + 63) / 64, (shape.seqlen_k + 63) / 64});
      blocks->for_each([&](const Index& i) { blocks->set(i, (i[1] + i[2] + i[3]) % 3 != 0); });
      options.block_mask = &blocks->view;
    }
    if (has(kDropout)) {
      options.dropout_p = 0.25;
      options.seed = 42;
      options.offset = 7;
    }
    if (has(kUsed)) {
      used.emplace(DType::kInt32, Index{1, 1, 1, b});
      for (int64_t i = 0; i < b; ++i) {
        used->set({0, 0, 0, i}, static_cast<double>(sequences[i].seqlen_k * 2 / 3));
      }
      views.push_back(without(*used, 3));
      options.seqused_k = &views.back();
    }
    if (has(kPacked)) make_starts();
    if (has(kGivenLse)) {
      views.push_back(lse_view(*dlse));
      wanted.dlse = &views.back();
    }
  }

  void make_starts() {
    for (auto* t : {&starts_q, &starts_k})
      t->emplace(DType::kInt32, Index{1, 1, 1, shape.batch + 1});
    for (int64_t i = 0; i <= shape.batch; ++i) {
      const bool last = i == shape.batch;
      starts_q->set({0, 0, 0, i}, static_cast<double>(last ? total_q : sequences[i].first_q));
      starts_k->set({0, 0, 0, i}, static_cast<double>(last ? total_k : sequences[i].first_k));
    }
    views.push_back(without(*starts_q, 3));
    options.cu_seqlens_q = &views.back();
    views.push_back(without(*starts_k, 3));
    options.cu_seqlens_k = &views.back();
    options.max_seqlen_q = shape.seqlen_q;
    options.max_seqlen_k = shape.seqlen_k;
  }

  TensorView main_view(const Tensor& t) const { return without(t, has(kPacked) ? 1 : 0); }
  // Without the last axis too.
  TensorView lse_view(const Tensor& t) const {
    TensorView view = main_view(t);
    --view.rank;
    return view;
  }

  anyflash::ForwardPlan forward_plan() const {
    const TensorView l = lse_view(*lse);
    const auto tensors =
        test::forward_tensors(main_view(*q), main_view(*k), main_view(*v), main_view(*out), &l);
    return anyflash::ForwardPlan(tensors, options);
  }
  anyflash::BackwardPlan backward_plan() const {
    anyflash::BackwardTensors tensors;
    tensors.dout = main_view(*dout);
    tensors.q = main_view(*q);
    tensors.k = main_view(*k);
    tensors.v = main_view(*v);
    tensors.out = main_view(*out);
    tensors.lse = lse_view(*lse);
    tensors.dq = main_view(*dq);
    tensors.dk = main_view(*dk);
    tensors.dv = main_view(*dv);
    return anyflash::BackwardPlan(tensors, options, wanted);
  }
  void forward() { CHECK_MSG(test::run_exactly(forward_plan()), what); }
  void backward() { CHECK_MSG(test::run_exactly(backward_plan()), what); }

  // What the gradients are of; the LSE, which is float32 only, is left out.
  double loss() {
    forward();
    double sum = 0.0;
    out->for_each([&](const Index& i) { sum += out->get(i) * dout->get(i); });
    return sum;
  }

  Shape shape;
  unsigned set;
  std::mt19937 random;
  std::string what;
  std::vector<Sequence> sequences;
  int64_t total_q = 0;
  int64_t total_k = 0;
  std::optional<Tensor> q, k, v, out, lse, dout, dlse, dq, dk, dv;
  std::optional<Tensor> slopes, bias, blocks, sinks, used, starts_q, starts_k;
  std::optional<Tensor> dslopes, dbias, dsinks;
  std::vector<TensorView> views;
  ForwardOptions options;
  BackwardOptions wanted;
};

}  // namespace test
