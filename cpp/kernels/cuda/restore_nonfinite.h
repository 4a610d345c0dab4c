// NaN and infinity that were taken out of tiles (common/finite.h) go to the finished results.
#pragma once

#include <cmath>
#include <type_traits>

#include "common/macros.h"

namespace anyflash {

struct IndexRange {
  int begin;
  int end;
};

// How a term counts in a result. A dropped one has weight 0, and 0 * infinity is NaN.
enum class TermWeight { kHidden, kDropped, kVisible };

// result(i, x) is a sum of weights times value(term, x). Adds those values that are not finite to
// the results that see them: weight(i, term). A sum with NaN or infinity in it does not depend on
// its finite terms and weights. Rare: plain loops over global memory, columns shared among threads.
template <int kThreads, class Value, class Weight, class Result>
ANYFLASH_DEVICE void restore_nonfinite(IndexRange terms, IndexRange results, int columns,
                                       const Value& value, const Weight& weight,
                                       const Result& result) {
  for (int x = threadIdx.x; x < columns; x += kThreads) {
    for (int term = terms.begin; term < terms.end; ++term) {
      const float lost = value(term, x);
      if (std::isfinite(lost)) continue;
      for (int i = results.begin; i < results.end; ++i) {
        const TermWeight of = weight(i, term);
        if (of == TermWeight::kHidden) continue;
        auto& sum = result(i, x);
        sum = std::decay_t<decltype(sum)>(static_cast<float>(sum) +
                                          (of == TermWeight::kDropped ? NAN : lost));
      }
    }
  }
}

}  // namespace anyflash
