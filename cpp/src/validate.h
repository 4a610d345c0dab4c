#pragma once

#include <cstdint>
#include <string>

#include "anyflash/attention.h"
#include "params.h"

namespace anyflash {

// Check every argument of a plan and turn them into kernel parameters; throw Error. Read no
// tensor's elements.
ForwardParams validate_forward(const ForwardTensors& tensors, const ForwardOptions& options);
BackwardParams validate_backward(const BackwardTensors& tensors, const ForwardOptions& options,
                                 const BackwardOptions& backward_options);
// What remains open: num_splits is 0 where it is to be chosen, and rotated_q with its strides.
AppendParams validate_kvcache(const KvCacheTensors& tensors, const ForwardOptions& options,
                              const KvCacheOptions& cache_options);

// What forward and backward share: all but whether `out` and `lse` can be written.
Attention validate_inputs(const ForwardTensors& tensors, const ForwardOptions& options);

// The part of them that concerns numbers and optional tensors, for parameters that have shapes.
// `seqlen_q` and `seqlen_k` are the extents of axes that count rows and keys.
void validate_features(const TensorView& q, const ForwardOptions& options, int64_t seqlen_q,
                       int64_t seqlen_k, Attention& attention);

// Where packed sequences begin: the tensors' types and shapes. Sets attention.batch.
void validate_packed(const TensorView& q, const ForwardOptions& options, Attention& attention);

// ForwardOptions::max_seqlen_q and max_seqlen_k as they were given, for errors: 0 stands for as
// many as there are rows.
struct LongestSequences {
  int64_t q = 0;
  int64_t k = 0;
};

// The elements of cu_seqlens_q, cu_seqlens_k, seqused_k, the starts and the diagonals. Copies them
// from a GPU, which waits for the stream.
void check_lengths(const Attention& attention, const LongestSequences& longest,
                   const Device& device, void* stream);

// The elements of the cache's integers: lengths, places, the entries of the block table that are
// used; and that the rotary tables have the rows that these ask for. Waits for a GPU's stream.
void check_kvcache_lengths(const AppendParams& params, int64_t max_seqlen_q, const Device& device,
                           void* stream);

// "k_cache has room for 16 rows of a sequence", for errors.
inline std::string room_of(bool paged, int64_t rows) {
  return (paged ? "block_table has room for " : "k_cache has room for ") + std::to_string(rows) +
         " rows of a sequence" + (paged ? ", in pages of k_cache" : "");
}

}  // namespace anyflash
