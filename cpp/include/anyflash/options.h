// Options of the C++ API. Every field has the default that an empty `ForwardOptions{}` means.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "anyflash/tensor_view.h"

namespace anyflash {

// Instruction sets of the CPU kernels. kAuto takes the best that is built and that the CPU has.
enum class CpuIsa : int { kAuto, kBaseline, kAvx2, kAvx512, kNeon };

// In this order a score of query i and key j is made:
//
//   s = softmax_scale * q_i.k_j
//   s = softcap * tanh(s / softcap)                              if softcap > 0
//   s = s + bias_ij - alibi_slope * |i + seqlen_k - seqlen_q - j|
//   s = -inf where a mask hides j from i: window, causal, a boolean bias, block_mask, lengths
//   p = exp(s) / (exp(sink) + sum_j exp(s))
//   p = 0 with probability dropout_p, else p / (1 - dropout_p)
//
// Rows, columns and blocks count from the beginning of their own sequence. A bias of -inf is a mask
// too: NaN and infinity in masked keys and values reach nothing.
//
// Tensors are optional (null: not used), lie on the device of q, and may have any strides, but for
// one-dimensional integers, which are contiguous, and, on a GPU, bias, whose stride along the keys
// fits 32 bits. An axis of extent 1 where n is written as "n or 1" is broadcast.
struct ForwardOptions {
  // Factor on q.k; any finite number. Not set: 1 / sqrt(head_dim).
  std::optional<double> softmax_scale;
  // Query i sees keys j <= i + seqlen_k - seqlen_q (aligned at the bottom right).
  bool causal = false;
  // Query i sees keys i + seqlen_k - seqlen_q - window_left <= j <= i + seqlen_k - seqlen_q +
  // window_right; -1: no bound on that side. causal bounds window_right by 0.
  int64_t window_left = -1;
  int64_t window_right = -1;
  // 0: none.
  double softcap = 0.0;
  // (heads,) or (batch or 1, heads): float32, float16, bfloat16; CPU also float64.
  const TensorView* alibi_slopes = nullptr;
  // (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1). float32, float16, bfloat16 (CPU also
  // float64): added to the score. bool: keys to keep. Packed sequences: max_seqlen_q, max_seqlen_k.
  const TensorView* bias = nullptr;
  // (batch or 1, heads or 1, query blocks, key blocks) bool: blocks to keep. Block (a, b) holds the
  // rows and columns [a, a + 1) * block_size[0], [b, b + 1) * block_size[1]; sizes are multiples
  // of 64.
  const TensorView* block_mask = nullptr;
  std::array<int64_t, 2> block_size{128, 128};
  // (heads,): a logit that takes part in the denominator only; types as for alibi_slopes.
  const TensorView* sinks = nullptr;

  // Rounded to a multiple of 2^-16; 0 <= dropout_p < 1. What is dropped follows from seed, offset,
  // batch, head, row and column alone (kernels/variant/dropout.h).
  double dropout_p = 0.0;
  std::uint64_t seed = 0;
  std::uint64_t offset = 0;
  // (2,) int64: seed and offset, read on the device instead of the two above.
  const TensorView* rng_state = nullptr;
  // Output (batch, heads, seqlen_q, seqlen_k) bool: true where a probability is kept, false where
  // it is dropped, whether or not a mask hides it or a sequence is that long. Packed sequences:
  // max_seqlen_q, max_seqlen_k.
  const TensorView* dropout_mask = nullptr;
  // Output (batch, heads) float32: the largest score that no mask removed, -inf if there is none.
  const TensorView* max_logits = nullptr;

  // Packed sequences: q, out (total_q, heads, head_dim), k, v (total_k, heads_k, head_dim), lse
  // (heads, total_q), and sequence b is rows [cu_seqlens[b], cu_seqlens[b + 1]). (batch + 1,) int32
  // each; both or none.
  const TensorView* cu_seqlens_q = nullptr;
  const TensorView* cu_seqlens_k = nullptr;
  // Upper bounds of the sequences' lengths.
  int64_t max_seqlen_q = 0;
  int64_t max_seqlen_k = 0;
  // (batch,) int32: of a sequence's keys only so many, the first ones, are used. Its queries are
  // aligned (causal, windows, ALiBi) with the last of them.
  const TensorView* seqused_k = nullptr;
  // Lengths on a GPU are clamped to what the tensors hold. This checks them, which waits for the
  // device. On the CPU they are always checked.
  bool validate = false;

  // CPU: number of threads; 0 is OpenMP's default (OMP_NUM_THREADS, else all cores).
  int num_threads = 0;
  CpuIsa cpu_isa = CpuIsa::kAuto;
  // CUDA: the cudaStream_t to launch on; null is the legacy default stream.
  void* stream = nullptr;
};

// What backward() needs beside the options that the forward was given.
struct BackwardOptions {
  // Bitwise the same gradients in every run. On a GPU dq is then made by a second pass over blocks
  // of rows (7 products instead of 5) instead of by atomic additions. The CPU's always are.
  bool deterministic = false;
  // Gradient of the LSE, float32, its shape; null: zero. Where the row sees no key it is not read.
  const TensorView* dlse = nullptr;
  // Outputs; null: not wanted. Each has the shape of its tensor among the forward's options, whose
  // type it has too, or float32; axes that are broadcast are summed over in float32.
  const TensorView* dbias = nullptr;  // not of a boolean bias
  const TensorView* dsinks = nullptr;
  const TensorView* dalibi_slopes = nullptr;
};

struct MergeOptions {
  int num_threads = 0;     // CPU; 0: OpenMP's default
  void* stream = nullptr;  // CUDA: a cudaStream_t; null is the legacy default stream
};

}  // namespace anyflash
