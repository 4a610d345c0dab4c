// Joining two partial results of attention, row by row (Milakov and Gimelshein, arXiv 1805.02867):
//   lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
#pragma once

#include <cmath>

#include "common/macros.h"

namespace ANYFLASH_SHARED_NAMESPACE {

// How two rows are joined. T is the type of the arithmetic: float, double.
template <class T>
class Merge {
 public:
  ANYFLASH_HOST_DEVICE Merge(T lse_a, T lse_b)
      : sees_a_(!std::isinf(lse_a)), sees_b_(!std::isinf(lse_b)) {
    if (!sees_a_ && !sees_b_) return;
    const T larger = !sees_b_ || (sees_a_ && lse_a > lse_b) ? lse_a : lse_b;
    weight_a_ = sees_a_ ? std::exp(lse_a - larger) : T(0);
    weight_b_ = sees_b_ ? std::exp(lse_b - larger) : T(0);
    const T sum = weight_a_ + weight_b_;
    weight_a_ /= sum;
    weight_b_ /= sum;
    lse_ = larger + std::log(sum);
  }

  // What a part that saw no key holds does not count: it may be NaN. Without branches, so that a
  // GPU's loads of many `a` do not wait for one another.
  ANYFLASH_HOST_DEVICE T out(T a, T b) const {
    return weight_a_ * (sees_a_ ? a : T(0)) + weight_b_ * (sees_b_ ? b : T(0));
  }
  ANYFLASH_HOST_DEVICE T lse() const { return lse_; }

 private:
  bool sees_a_;
  bool sees_b_;
  T weight_a_ = T(0);
  T weight_b_ = T(0);
  T lse_ = -INFINITY;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
