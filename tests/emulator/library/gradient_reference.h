// Gradients in double precision by the equations in anyflash/attention.h, from a given out and lse,
// and how far from them a result may be.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gradients.h"
#include "problem.h"
#include "reference.h"

namespace driver {

// Of one number to a data type.
struct Rounding {
  double relative, absolute;

  explicit Rounding(DType dtype)
      : relative(dtype == DType::kFloat16    ? 0x1p-11
                 : dtype == DType::kBFloat16 ? 0x1p-8
                                             : 0x1p-24),
        absolute(dtype == DType::kFloat16 ? 0x1p-25 : 0x1p-126) {}

  double of(double x) const { return relative * std::abs(x) + absolute; }
};

class GradientReference {
 public:
  // The error is 0 where nothing is added up.
  struct Sum {
    std::vector<double> value, error;

    explicit Sum(const Tensor& like)
        : value(static_cast<std::size_t>(like.size())), error(value.size()) {}

    void add(int64_t at, double x, double wrong) {
      value[static_cast<std::size_t>(at)] += x;
      error[static_cast<std::size_t>(at)] += wrong;
    }
    double allowed(std::size_t at, DType dtype) const {
      return error[at] == 0 ? 0 : error[at] + Rounding(dtype).of(value[at]);
    }
  };

  GradientReference(const Problem& problem, const Gradients& gradients, const Reference& forward)
      : p_(problem),
        g_(gradients),
        forward_(forward),
        element_(p_.q.dtype()),
        q_(p_.q.values()),
        k_(p_.k.values()),
        v_(p_.v.values()),
        out_(p_.out.values()),
        dout_(rounded_dout()) {
    for (const auto& [name, tensor] : g_.outputs()) sums_.emplace_back(name, Sum(*tensor));
    dq_ = find("dq");
    dk_ = find("dk");
    dv_ = find("dv");
    dbias_ = find("dbias");
    dsinks_ = find("dsinks");
    dslopes_ = find("dalibi_slopes");
    for (int64_t b = 0; b < p_.c.batch; ++b) {
      for (int64_t h = 0; h < p_.c.heads; ++h) {
        for (int64_t i = 0; i < p_.sequence(b).queries; ++i) add_row(b, h, i);
      }
    }
  }

  const Sum& of(const std::string& name) const {
    for (const auto& [key, sum] : sums_) {
      if (key == name) return sum;
    }
    throw std::invalid_argument(name);
  }

 private:
  // Of an exponential, a product or a sum in float32; they are relative to the sum of all absolute
  // values that are added up.
  static constexpr double kFloat = 0x1p-23;

  struct Row {
    Sequence s;
    int64_t b, h, i;
    double lse;
    double delta = 0, delta_size = 0;
    const double* dout;
  };

  Sum* find(const std::string& name) {
    for (auto& [key, sum] : sums_) {
      if (key == name) return &sum;
    }
    return nullptr;
  }

  // In the inputs' type, which is what the kernels work with.
  std::vector<double> rounded_dout() const {
    Tensor rounded(p_.q.dtype(), g_.dout.extent());
    for (int64_t i = 0; i < rounded.size(); ++i) rounded.set(i, g_.dout.get(i));
    return rounded.values();
  }

  void add_row(int64_t b, int64_t h, int64_t i) {
    const Sequence s = p_.sequence(b);
    const double lse = p_.lse.at(0, s.batch, h, s.first_q + i);
    if (std::isinf(lse)) return;
    const int64_t at = p_.out.index(s.batch, s.first_q + i, h, 0);
    Row row;
    row.s = s;
    row.b = b;
    row.h = h;
    row.i = i;
    row.lse = lse;
    row.dout = dout_.data() + at;
    for (int64_t x = 0; x < p_.c.head_dim_v; ++x) {
      const double out = out_[static_cast<std::size_t>(at + x)];
      const double term = out == 0 ? 0 : row.dout[x] * out;  // a row without keys has any dout
      row.delta += term;
      row.delta_size += std::abs(term);
    }
    if (g_.dlse) {
      const double dlse = g_.dlse->at(0, s.batch, h, s.first_q + i);
      row.delta -= dlse;
      row.delta_size += std::abs(dlse);
    }
    if (dsinks_ != nullptr) {
      const double sink = p_.sinks->get(h), probability = std::exp(sink - lse);
      dsinks_->add(h, -probability * row.delta,
                   kFloat * (1 + std::abs(sink) + std::abs(lse)) * probability * row.delta_size);
    }
    for (int64_t j = 0; j < s.keys; ++j) {
      if (forward_.visible(s, b, h, i, j)) add_pair(row, j);
    }
  }

  void add_pair(const Row& row, int64_t j) {
    const auto [s, b, h, i, lse, delta, delta_size, dout] = row;
    const int64_t head_k = forward_.head_k(h);
    const Reference::Score score = forward_.score(s, b, h, i, j);
    if (score.value == -INFINITY) return free_dq(row, j);
    const double probability = std::exp(score.value - lse);
    const double float_error = kFloat * (1 + score.size + std::abs(lse));
    const double kept = forward_.dropped(b, h, i, j) ? 0 : forward_.dropout_factor();

    const int64_t first_v = p_.v.index(s.batch, s.first_k + j, head_k, 0);
    double dp = 0, dp_size = 0;
    for (int64_t x = 0; x < p_.c.head_dim_v; ++x) {
      const double term = dout[x] * v_[static_cast<std::size_t>(first_v + x)];
      dp += term;
      dp_size += std::abs(term);
      // Dropout's factor follows after P is rounded.
      const double wrong = kept * (element_.of(probability) + float_error * probability);
      dv_->add(first_v + x, kept * probability * dout[x], wrong * std::abs(dout[x]));
    }
    const double ds = probability * (kept * dp - delta);
    const double ds_error = float_error * probability * (kept * dp_size + delta_size);
    if (dbias_ != nullptr) dbias_->add(p_.bias->index(b, h, i, j), ds, ds_error);
    if (dslopes_ != nullptr) {
      const double distance = forward_.distance(s, i, j);
      dslopes_->add(p_.slopes->index(0, 0, b, h), -distance * ds, distance * ds_error);
    }

    const double scale = p_.c.scale, ds0 = ds * score.slope;
    const double wrong = std::abs(scale) * (element_.of(ds0) + ds_error);
    const int64_t first_q = p_.q.index(s.batch, s.first_q + i, h, 0);
    const int64_t first_k = p_.k.index(s.batch, s.first_k + j, head_k, 0);
    for (int64_t x = 0; x < p_.c.head_dim; ++x) {
      const double q = q_[static_cast<std::size_t>(first_q + x)];
      const double k = k_[static_cast<std::size_t>(first_k + x)];
      dq_->add(first_q + x, scale * ds0 * k, wrong * std::abs(k));
      dk_->add(first_k + x, scale * ds0 * q, wrong * std::abs(q));
    }
  }

  // A key that is hidden because it is infinite: dQ may be NaN there, as 0 times infinity is.
  void free_dq(const Row& row, int64_t j) {
    const int64_t first_q = p_.q.index(row.s.batch, row.s.first_q + row.i, row.h, 0);
    const int64_t first_k = p_.k.index(row.s.batch, row.s.first_k + j, forward_.head_k(row.h), 0);
    for (int64_t x = 0; x < p_.c.head_dim; ++x) {
      if (std::isinf(k_[static_cast<std::size_t>(first_k + x)])) dq_->add(first_q + x, 0, INFINITY);
    }
  }

  const Problem& p_;
  const Gradients& g_;
  const Reference& forward_;
  Rounding element_;
  std::vector<double> q_, k_, v_, out_, dout_;
  std::vector<std::pair<std::string, Sum>> sums_;
  Sum *dq_, *dk_, *dv_, *dbias_, *dsinks_, *dslopes_;  // null: not wanted
};

}  // namespace driver
