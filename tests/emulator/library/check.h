// How far results are from the reference: 1 is the limit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "gradient_reference.h"
#include "gradients.h"
#include "problem.h"
#include "reference.h"

namespace driver {

// Of what is allowed, 1 being the limit; 0 for what must be the same and is.
inline double deviation(double actual, double expected, double allowed) {
  if (std::isnan(expected)) return std::isnan(actual) ? 0 : INFINITY;
  if (actual == expected) return 0;
  const double error = std::abs(actual - expected) / allowed;
  return std::isnan(error) ? INFINITY : error;
}

inline double fp32_error(double expected) { return 1e-5 * (1 + std::abs(expected)); }

inline double check_row(const Problem& p, const Reference::Row& row, int64_t b, int64_t h,
                        int64_t i) {
  const Sequence s = p.sequence(b);
  double worst = deviation(p.lse.at(0, s.batch, h, s.first_q + i), row.lse, fp32_error(row.lse));
  const double epsilon = p.c.dtype == "fp16" ? 0x1p-11 : 0x1p-8;
  for (std::size_t x = 0; x < row.out.size(); ++x) {
    // P and the result are rounded once each; fp32 sums and exp2 add little. Nothing is exactly 0.
    const double limit = 1.5 * epsilon * (row.size[x] + std::abs(row.out[x])) + 1e-6;
    const double actual = p.out.at(s.batch, s.first_q + i, h, static_cast<int64_t>(x));
    worst = std::max(worst, deviation(actual, row.out[x], row.empty ? 0 : limit));
  }
  return worst;
}

inline double check_dropout_mask(const Problem& p, const Reference& reference, int64_t b, int64_t h,
                                 int64_t i) {
  for (int64_t j = 0; j < p.sequence(b).all_keys; ++j) {
    if ((p.dropout_mask->at(b, h, i, j) == 0) != reference.dropped(b, h, i, j)) return INFINITY;
  }
  return 0;
}

inline double check_forward(const Problem& p, const Reference& reference) {
  double worst = 0;
  for (int64_t b = 0; b < p.c.batch; ++b) {
    for (int64_t h = 0; h < p.c.heads; ++h) {
      double largest = -INFINITY;
      for (int64_t i = 0; i < p.sequence(b).queries; ++i) {
        const Reference::Row row = reference.row(b, h, i);
        largest = std::max(largest, row.max_score);
        worst = std::max(worst, check_row(p, row, b, h, i));
        if (p.dropout_mask) worst = std::max(worst, check_dropout_mask(p, reference, b, h, i));
      }
      if (p.c.split || p.c.merge) continue;  // of the last keys alone
      const double actual = p.max_logits.at(0, 0, b, h);
      worst = std::max(worst, deviation(actual, largest, fp32_error(largest)));
    }
  }
  return worst;
}

// The worst of each gradient goes to report(name, deviation).
template <class Report>
double check_backward(const Gradients& gradients, const GradientReference& reference,
                      const Report& report) {
  double worst = 0;
  for (const auto& [name, tensor] : gradients.outputs()) {
    const GradientReference::Sum& sum = reference.of(name);
    double largest = 0;
    for (std::size_t i = 0; i < sum.value.size(); ++i) {
      const double actual = tensor->get(static_cast<int64_t>(i));
      // Of NaN and infinity, the order of sums decides; but dV has no differences of infinities.
      const bool is_free = std::isfinite(sum.value[i]) && std::isinf(sum.error[i]);
      const double here = is_free ? 0
                          : std::isfinite(sum.value[i]) || name == "dv"
                              ? deviation(actual, sum.value[i], sum.allowed(i, tensor->dtype()))
                          : std::isfinite(actual) ? INFINITY
                                                  : 0;
      largest = std::max(largest, here);
    }
    report(name, *tensor, largest);
    worst = std::max(worst, largest);
  }
  return worst;
}

}  // namespace driver
