// The tensors that a case gives to the backward beside the forward's, and the call.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "anyflash/attention.h"
#include "case.h"
#include "problem.h"
#include "tensor.h"

namespace driver {

class Gradients {
 public:
  explicit Gradients(const Problem& p)
      : dout(dtype_of(p.c.dout), extent(p.c.seqlen_q, p.c.heads, p.c.head_dim_v, p)),
        dq(dtype_of(p.c.grad), extent(p.c.seqlen_q, p.c.heads, p.c.head_dim, p)),
        dk(dtype_of(p.c.grad), extent(p.c.seqlen_k, p.c.heads_k, p.c.head_dim, p)),
        dv(dtype_of(p.c.grad), extent(p.c.seqlen_k, p.c.heads_k, p.c.head_dim_v, p)) {
    std::mt19937 random(p.c.seed + 1);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < dout.size(); ++i) dout.set(i, normal(random));
    if (p.c.dlse) {
      dlse.emplace(p.lse.dtype(), p.lse.extent());
      for (int64_t i = 0; i < dlse->size(); ++i) dlse->set(i, normal(random));
    }
    if (p.c.small == "none") return;
    if (p.c.bias != "bool") make(dbias, p.bias, p);
    make(dsinks, p.sinks, p);
    make(dslopes, p.slopes, p);
  }

  // The outputs there are.
  std::vector<std::pair<std::string, const Tensor*>> outputs() const {
    std::vector<std::pair<std::string, const Tensor*>> result{
        {"dq", &dq}, {"dk", &dk}, {"dv", &dv}};
    if (dbias) result.emplace_back("dbias", &*dbias);
    if (dsinks) result.emplace_back("dsinks", &*dsinks);
    if (dslopes) result.emplace_back("dalibi_slopes", &*dslopes);
    return result;
  }

  Tensor dout, dq, dk, dv;
  std::optional<Tensor> dlse, dbias, dsinks, dslopes;

 private:
  static std::array<int64_t, 4> extent(int64_t rows, int64_t heads, int64_t dim, const Problem& p) {
    return {p.tensors(), rows, heads, dim};
  }

  static void make(std::optional<Tensor>& gradient, const std::optional<Tensor>& input,
                   const Problem& p) {
    if (!input) return;
    gradient.emplace(p.c.small == "own" ? input->dtype() : dtype_of(p.c.small), input->extent());
  }
};

inline void run_backward(const Problem& p, const Gradients& g, const std::array<uint64_t, 2>& rng) {
  const Options options(p, rng);
  const int rank = p.rank();
  anyflash::BackwardOptions wanted;
  wanted.deterministic = p.c.deterministic;
  wanted.accumulate_dq = wanted.accumulate_dkv = p.c.accumulate;
  std::array<TensorView, 4> views;
  std::size_t used = 0;
  const auto give = [&](const TensorView*& option, const std::optional<Tensor>& tensor, int axes) {
    if (!tensor) return;
    views[used] = tensor->view(axes);
    option = &views[used++];
  };
  give(wanted.dlse, g.dlse, rank - 1);
  give(wanted.dbias, g.dbias, 4);
  give(wanted.dsinks, g.dsinks, 1);
  give(wanted.dalibi_slopes, g.dslopes, 2);
  anyflash::BackwardTensors tensors;
  tensors.dout = g.dout.view(rank);
  tensors.q = p.q.view(rank);
  tensors.k = p.k.view(rank);
  tensors.v = p.v.view(rank);
  tensors.out = p.out.view(rank);
  tensors.lse = p.lse.view(rank - 1);
  tensors.dq = g.dq.view(rank);
  tensors.dk = g.dk.view(rank);
  tensors.dv = g.dv.view(rank);
  run_exactly(anyflash::BackwardPlan(tensors, options.get(), wanted));
}

}  // namespace driver
