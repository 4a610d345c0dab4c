// Where one sequence of the batch lies and how long it is.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"

namespace ANYFLASH_SHARED_NAMESPACE {

struct Sequence {
  int64_t batch;    // index for batch strides: 0 in packed tensors
  int64_t first_q;  // row of its first query in q, out and lse
  int64_t first_k;
  int seqlen_q;
  int seqlen_k;  // keys that are used
  int all_keys;  // keys that the tensors hold
  int shift;     // row i is on the diagonal of masks and ALiBi with key i + shift
};

ANYFLASH_HOST_DEVICE int clamp_length(int64_t length, int64_t limit) {
  return static_cast<int>(length < 0 ? 0 : length < limit ? length : limit);
}

ANYFLASH_HOST_DEVICE int64_t number_of(const OfEachSequence& number, int64_t index) {
  return number.array == nullptr ? number.value : number.array[index];
}

// The farthest that a diagonal may lie; options.h says so. A row or a key can be added to it.
inline constexpr int64_t kMaxShift = int64_t{1} << 30;

// Of a sequence with these lengths.
ANYFLASH_HOST_DEVICE int shift_of(const Attention& p, int64_t index, int seqlen_q, int seqlen_k) {
  if (!p.part.is_given) return seqlen_k - seqlen_q;
  const int64_t shift = number_of(p.part.query_start, index) + number_of(p.part.diagonal, index) -
                        number_of(p.part.key_start, index);
  return static_cast<int>(shift < -kMaxShift ? -kMaxShift : shift < kMaxShift ? shift : kMaxShift);
}

// Sequence `index` of the batch. Lengths that do not fit the tensors are clamped to what does, so
// that wrong ones give wrong results, but no access outside.
ANYFLASH_HOST_DEVICE Sequence sequence_of(const Attention& p, int64_t index) {
  Sequence s;
  s.batch = index;
  s.first_q = 0;
  s.first_k = 0;
  s.seqlen_q = p.seqlen_q;
  s.seqlen_k = p.seqlen_k;
  if (p.cu_seqlens_q != nullptr) {
    s.batch = 0;
    s.first_q = clamp_length(p.cu_seqlens_q[index], p.total_q);
    s.first_k = clamp_length(p.cu_seqlens_k[index], p.total_k);
    const int64_t rest_q = p.total_q - s.first_q;
    const int64_t rest_k = p.total_k - s.first_k;
    s.seqlen_q = clamp_length(p.cu_seqlens_q[index + 1] - s.first_q,
                              rest_q < p.seqlen_q ? rest_q : p.seqlen_q);
    s.seqlen_k = clamp_length(p.cu_seqlens_k[index + 1] - s.first_k,
                              rest_k < p.seqlen_k ? rest_k : p.seqlen_k);
  }
  s.all_keys = s.seqlen_k;
  if (p.seqused_k != nullptr) s.seqlen_k = clamp_length(p.seqused_k[index], s.seqlen_k);
  s.shift = shift_of(p, index, s.seqlen_q, s.seqlen_k);
  return s;
}

}  // namespace ANYFLASH_SHARED_NAMESPACE
