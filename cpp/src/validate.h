#pragma once

#include "anyflash/options.h"
#include "anyflash/tensor_view.h"
#include "params.h"

namespace anyflash {

// Checks every argument of forward() and turns them into kernel parameters; throws Error. Reads no
// tensor's elements.
ForwardParams validate_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                               const TensorView& out, const TensorView* lse,
                               const ForwardOptions& options);

// The same checks for what forward() and backward() share, whether it is read or written: all but
// that `out` and `lse` can be written.
Attention validate_inputs(const TensorView& q, const TensorView& k, const TensorView& v,
                          const TensorView& out, const TensorView* lse,
                          const ForwardOptions& options);

struct BackwardTensors {
  const TensorView& dout;
  const TensorView& q;
  const TensorView& k;
  const TensorView& v;
  const TensorView& out;
  const TensorView& lse;
  const TensorView& dq;
  const TensorView& dk;
  const TensorView& dv;
};

// Checks every argument of backward(), as validate_forward().
BackwardParams validate_backward(const BackwardTensors& tensors, const ForwardOptions& options,
                                 const BackwardOptions& backward_options);

struct KvCacheTensors {
  const TensorView& q;
  const TensorView& k_cache;
  const TensorView& v_cache;
  const TensorView& out;
  const TensorView* lse;
};

// Checks every argument of forward_with_kvcache(), as validate_forward(). What remains open:
// num_splits is 0 where it is to be chosen, and rotated_q with its strides.
AppendParams validate_kvcache(const KvCacheTensors& tensors, const ForwardOptions& options,
                              const KvCacheOptions& cache_options);

// The part of them that concerns numbers and optional tensors, for parameters that have shapes.
// `seqlen_q` and `seqlen_k` are the extents of axes that count rows and keys.
void validate_features(const TensorView& q, const ForwardOptions& options, int64_t seqlen_q,
                       int64_t seqlen_k, Attention& attention);

// Where packed sequences begin: the tensors' types and shapes. Sets attention.batch.
void validate_packed(const TensorView& q, const ForwardOptions& options, Attention& attention);

// The elements of options.cu_seqlens_q, .cu_seqlens_k and .seqused_k. Copies them from a GPU, which
// waits for the stream.
void check_lengths(const Attention& attention, const ForwardOptions& options, const Device& device);

// The elements of the cache's integers: lengths, places, the entries of the block table that are
// used; and that the rotary tables have the rows that these ask for. Waits for a GPU's stream.
void check_kvcache_lengths(const AppendParams& params, const ForwardOptions& options,
                           const Device& device);

}  // namespace anyflash
