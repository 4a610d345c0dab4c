// The outputs of side_outputs.h in units of work, which may run in any order: an element of
// max_logits each, then eight neighbouring elements of the dropout mask each.
#pragma once

#include <cmath>
#include <cstdint>

#include "common/macros.h"
#include "side_outputs.h"
#include "variant/dropout.h"

namespace ANYFLASH_SHARED_NAMESPACE {

class SideOutputFiller {
 public:
  ANYFLASH_HOST_DEVICE explicit SideOutputFiller(const SideOutputs& outputs)
      : outputs_(outputs),
        p_(outputs.params),
        a_(p_.attention),
        groups_((outputs.dropout_mask_columns + 7) / 8) {}

  ANYFLASH_HOST_DEVICE int64_t maxima() const {
    return p_.max_logits == nullptr ? 0 : a_.batch * a_.heads;
  }
  ANYFLASH_HOST_DEVICE int64_t units() const {
    const bool mask = outputs_.dropout_mask != nullptr;
    return maxima() + (mask ? a_.batch * a_.heads * outputs_.dropout_mask_rows * groups_ : 0);
  }

  ANYFLASH_HOST_DEVICE void fill(int64_t unit) const {
    if (unit < maxima()) {
      const Strides& stride = p_.max_logits_stride;
      p_.max_logits[unit / a_.heads * stride.batch + unit % a_.heads * stride.head] = -INFINITY;
    } else {
      fill_mask(unit - maxima());
    }
  }

 private:
  ANYFLASH_HOST_DEVICE void fill_mask(int64_t index) const {
    const int group = static_cast<int>(index % groups_);
    const int row = static_cast<int>(index / groups_ % outputs_.dropout_mask_rows);
    const int64_t pair = index / groups_ / outputs_.dropout_mask_rows;
    const int head = static_cast<int>(pair % a_.heads);
    const int64_t batch = pair / a_.heads;
    const Dropout dropout(a_, batch, head);
    const Draws draws = dropout.draws(row, group);
    const Strides& stride = outputs_.dropout_mask_stride;
    unsigned char* const target =
        outputs_.dropout_mask + batch * stride.batch + head * stride.head + row * stride.row;
    for (int i = 0; i < 8; ++i) {
      const int64_t col = int64_t{8} * group + i;
      if (col < outputs_.dropout_mask_columns) target[col * stride.col] = dropout.keep(draws[i]);
    }
  }

  const SideOutputs& outputs_;
  const ForwardParams& p_;
  const Attention& a_;
  int64_t groups_;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
