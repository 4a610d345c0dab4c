// Exact attention for engines: no Python, no framework, no hidden allocation, no synchronisation.
//
//   std::vector<float> x = {1, 2, 0, -1, 3, 1}, y(6);
//   anyflash::ForwardTensors tensors;
//   tensors.q.data = x.data();
//   tensors.q.rank = 4;
//   tensors.q.shape = {1, 3, 1, 2};  // batch, seqlen, heads, head_dim
//   tensors.q.stride = {6, 2, 2, 1};
//   tensors.k = tensors.v = tensors.out = tensors.q;
//   tensors.out.data = y.data();
//   anyflash::ForwardOptions options;
//   options.causal = true;
//   const anyflash::ForwardPlan plan(tensors, options);
//   std::vector<std::byte> workspace(plan.workspace_bytes());
//   plan.run({workspace.data(), workspace.size()});
//
// A plan is one call of an operation: its arguments are checked, its kernel is chosen, and its
// workspace is counted (linear in the sequence lengths). The constructor throws anyflash::Error and
// reads no tensor's elements; run() throws anyflash::Error before anything is written.
//
// A plan keeps addresses, shapes and strides, of the options' tensors too: the memory must stay,
// but no TensorView and no options need to. It is a plain value, without memory of its own, and may
// be copied. It may be run any number of times, by one thread after the other, since each run
// writes the same outputs. Different plans, and all functions here, may be used by several threads
// at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "anyflash/error.h"
#include "anyflash/export.h"
#include "anyflash/options.h"
#include "anyflash/tensor_view.h"

namespace anyflash {

// Memory on the tensors' device, of any alignment. It may be reused as soon as the work enqueued on
// the stream is done (on the CPU: when run() returns).
struct Workspace {
  void* data = nullptr;
  std::size_t bytes = 0;
};

// out = softmax(softmax_scale * q k^T) v, with what options.h adds to it, computed in tiles with an
// online softmax (FlashAttention-2, arXiv 2307.08691).
//
//   q    (batch, seqlen_q, heads, head_dim)
//   k    (batch, seqlen_k, heads_k, head_dim)     heads_k divides heads (MHA, GQA, MQA)
//   v    (batch, seqlen_k, heads_k, head_dim_v)
//   out  (batch, seqlen_q, heads, head_dim_v)
//   lse  (batch, heads, seqlen_q) float32, the natural logarithm of the softmax's denominator with
//        the scale (and a sink) included; null where it is not wanted. On the CPU the forward also
//        writes float64, to be merged with others.
//
// Packed sequences (options.cu_seqlens_q): q and out (total_q, heads, ...), k and v (total_k,
// heads_k, ...), lse (heads, total_q).
//
// q, k and v have one data type, out has it too or is float32, and all have one device. CPU:
// float64, float32, float16, bfloat16, any head dim, any strides. CUDA: float16 and bfloat16, head
// dim up to 512. A tensor is copied to the workspace first if its last axis is not contiguous, or
// its rows do not begin at multiples of 16 bytes. So is one whose rows lie more than 2^23 elements
// apart, and, where Hopper's kernels run, one with a negative stride or one of 0.
// A row that sees no key gets out = 0 and lse = -inf (with a sink: 0 and the sink).
struct ForwardTensors {
  TensorView q, k, v, out;
  const TensorView* lse = nullptr;
};

class ANYFLASH_API ForwardPlan {
 public:
  ForwardPlan(const ForwardTensors& tensors, const ForwardOptions& options);
  std::size_t workspace_bytes() const;
  // stream: the cudaStream_t to launch on; null is the legacy default stream. Not of the CPU.
  void run(Workspace workspace, void* stream = nullptr) const;

 private:
  struct State;
  alignas(8) std::byte state_[1664];
};

// Gradients of a scalar L, given dout = dL/dout (and BackwardOptions::dlse = dL/dlse), by
// recomputation of the probabilities from the LSE (FlashAttention-2, arXiv 2307.08691, section
// 3.1.2):
//
//   P  = exp(S - lse)         dV = (P * kept)^T dO      dP = kept * (dO V^T)
//   dS = P * (dP - delta)     delta = rowsum(dO * out) - dlse
//   dQ = softmax_scale * dS K     dK = softmax_scale * dS^T Q    (with softcap, dS times its slope)
//
//   dout  (batch, seqlen_q, heads, head_dim_v), q's type or float32
//   q, k, v, out, lse  the forward's; an LSE of -inf or +inf says that the row saw no key
//   dq, dk, dv  outputs of q's, k's and v's shape, all of q's type or all float32; dk and dv are
//               summed in float32 over the query heads of a group
//
// Types, strides and devices as for ForwardTensors. Rows that see no key, and keys that no row
// sees, get 0. Packed sequences: the forward's shapes, and rows beyond the last sequence are not
// written.
struct BackwardTensors {
  TensorView dout, q, k, v, out, lse, dq, dk, dv;
};

class ANYFLASH_API BackwardPlan {
 public:
  // options: the forward's; their outputs (dropout_mask, max_logits) are not written.
  BackwardPlan(const BackwardTensors& tensors, const ForwardOptions& options,
               const BackwardOptions& backward_options);
  std::size_t workspace_bytes() const;

  // Of BackwardOptions::dq_sums, for all rows of q (batch, rows, heads, head_dim). 0: the kernel of
  // this dtype, of these head dims on this device keeps none. Of the options, softmax_scale and
  // softcap count. Reads no tensor.
  static std::size_t dq_sums_bytes(const TensorView& q, int64_t head_dim_v,
                                   const ForwardOptions& options);

  void run(Workspace workspace, void* stream = nullptr) const;  // as ForwardPlan::run()

 private:
  struct State;
  alignas(8) std::byte state_[2432];
};

// Attention of new queries to a cache of keys and values. New keys and values are appended to the
// cache first (options.h: KvCacheOptions). This serves decoding, one token or a few at a time, and
// prefill in chunks. Flash-decoding (https://crfm.stanford.edu/2023/10/12/flashdecoding.html); the
// query heads of a group and the rows of a sequence share one pass over its keys.
//
//   q        (batch, seqlen_q, heads, head_dim)
//   k_cache  (cache_batch, capacity, heads_k, head_dim), or with block_table
//            (pages, page_size, heads_k, head_dim), page_size a power of two
//   v_cache  the same with head_dim_v; empty where KvCacheOptions::head_dim_v is given
//   out      (batch, seqlen_q, heads, head_dim_v), q's dtype or float32
//   lse      (batch, heads, seqlen_q) float32 or null
//
// Sequence b has n = cache_seqlens[b] + seqlen_new - cache_leftpad[b] keys; query i is aligned with
// key n - seqlen_q + i (causal, windows, ALiBi).
//
// With ForwardOptions::cu_seqlens_q, sequences may have different numbers of queries and new keys.
// Then q and out are (total_q, heads, ...), and lse is (heads, total_q). So one call does prompts
// and single tokens.
//
// The cache has q's dtype, or int8, float8_e4m3fn or float8_e5m2. CPU: q as for ForwardTensors.
// CUDA: float16 and bfloat16, head dims up to 512 (latent: 576 and 512), any strides. Copies of 16
// bytes need a contiguous last axis and rows at multiples of 16 bytes; else elements are read one
// by one.
struct KvCacheTensors {
  TensorView q, k_cache, v_cache, out;
  const TensorView* lse = nullptr;
};

class ANYFLASH_API KvCachePlan {
 public:
  // Of ForwardOptions, softmax_scale, causal, windows, softcap, alibi_slopes, sinks, cu_seqlens_q,
  // max_seqlen_q and those that say how to run are allowed.
  KvCachePlan(const KvCacheTensors& tensors, const ForwardOptions& options,
              const KvCacheOptions& cache_options);
  std::size_t workspace_bytes() const;
  void run(Workspace workspace, void* stream = nullptr) const;  // as ForwardPlan::run()

 private:
  struct State;
  alignas(8) std::byte state_[3072];
};

// Joins attention over two disjoint sets of keys, given each one's result and LSE:
//   lse = log(exp(lse_a) + exp(lse_b)),  out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b
// (Milakov and Gimelshein, arXiv 1805.02867). out_a, out_b and out are (batch, seqlen_q, heads,
// head_dim_v) or (total_q, heads, head_dim_v). They are float32, float16 or bfloat16, on the CPU
// also float64, and out_a and out_b have one type. LSEs are (batch, heads, seqlen_q) or (heads,
// total_q). They are float32, on the CPU also float64, and lse_a and lse_b have one type. An LSE of
// -inf or +inf (flash-attn's convention) means that the part saw no key. out may be out_a or out_b,
// lse may be lse_a or lse_b. A sink is one more part: out_b = 0 and lse_b = the sink.
ANYFLASH_API void merge_states(const TensorView& out_a, const TensorView& lse_a,
                               const TensorView& out_b, const TensorView& lse_b,
                               const TensorView& out, const TensorView* lse,
                               const MergeOptions& options);

// One compiled kernel. `launches` counts the calls of this process.
struct KernelInfo {
  std::string name;
  std::string arch;  // "cpu-avx2", "sm80", ...
  std::string op;    // "forward", "backward", "decode", "prefill" (of long packed queries)
  DType dtype = DType::kFloat32;
  int head_dim = 0;  // of q and k: the largest it takes; 0: any
  int head_dim_v = 0;
  std::vector<std::string> features;  // beyond masks by position: "softcap", "bias", ...
  std::string tile_config;            // of several that do the same: "", "compact" or "wide" tiles
  // Kernels of one arch, op, dtype, head dims and features that have the same number here give a
  // row the same bits.
  int bits_group = 0;
  int block_m = 0;
  int block_n = 0;
  int warps = 0;
  std::size_t smem_bytes = 0;
  std::uint64_t launches = 0;
};

struct DeviceInfo {
  int index = 0;
  std::string name;
  int compute_capability = 0;  // 80 for 8.0
  bool supported = false;      // this build holds code that it can run
};

struct BuildInfo {
  std::string version;
  bool cuda = false;
  std::string cuda_version;             // of the toolkit, "13.0"; empty without CUDA
  std::vector<std::string> cuda_archs;  // "sm_80", "compute_80"
  std::vector<std::string> cpu_isas;    // built: "baseline", "avx2", ...
  std::string cpu_isa;                  // the one that this machine uses
  int cpu_threads = 0;                  // default of ForwardOptions::num_threads
  std::vector<DeviceInfo> devices;      // CUDA devices of this machine
  std::string device_error;             // why there are none, one sentence
};

ANYFLASH_API BuildInfo build_info();
ANYFLASH_API std::vector<KernelInfo> kernels();

}  // namespace anyflash
