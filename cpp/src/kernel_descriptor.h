// A compiled kernel as data: what it can do, its tile, and how to launch it.
//
// Each generated unit (cmake/kernels.cmake) defines a KernelUnit; the generated kernel_table.cpp
// lists them all. Nothing registers itself.
#pragma once

#include <climits>
#include <cstddef>
#include <cstdint>

#include "anyflash/options.h"
#include "anyflash/tensor_view.h"
#include "params.h"

namespace anyflash {

enum class Op : int { kForward, kBackward, kDecode };

// What a problem may ask of a kernel: bits. Causal masks, windows, packed sequences, sinks and
// max_logits are in every kernel.
enum Feature : unsigned {
  kSoftcap = 1,
  kAlibi = 2,
  kBias = 4,
  kBlockMask = 8,
  kDropout = 16,
  kQuantizedCache = 32,  // keys and values of 8 bits
  kLargeSoftcap = 64,    // one above kAccurateSoftcap; kSoftcap is there, too
  kKeyRanges = 128,
  kSmallBlocks = 256,  // a block_mask's, below kLargeBlock; kBlockMask is there, too
};
inline constexpr unsigned kNoFeatures = 0;
// Of attention without a cache.
inline constexpr unsigned kAllFeatures =
    kSoftcap | kLargeSoftcap | kAlibi | kBias | kBlockMask | kSmallBlocks | kKeyRanges | kDropout;

// GPUs, by compute capability: 80 for 8.0.
struct ComputeCapabilities {
  int first = INT_MAX;
  int last = INT_MAX;
  constexpr bool contain(int capability) const { return first <= capability && capability <= last; }
};

// Tensors that a family's kernels read and write where they lie; of others they get copies.
struct InputRules {
  int alignment =
      1;  // bytes: of the data, of rows, and of all strides but the columns', which is 1
  int64_t max_row_stride = INT64_MAX;  // elements, either sign
  bool positive_strides = false;       // of axes with more than one element
};

// Kernels that are written for the same instructions. Its folder of cpp/kernels defines it.
struct KernelFamily {
  const char* name = "";       // "sm80"; also that of its folder and of its namespace
  ComputeCapabilities gpus;    // none: it runs on the CPU
  bool arch_specific = false;  // machine code of one architecture alone: sm_90a
  // Where two families can run a problem, the higher one does. So what a call asks and how its
  // tensors lie say which problems a family takes: never sizes, on which bits must not depend.
  int priority = 0;
  bool needs_positive_scale = false;  // softmax_scale of at least kLeastScale
  InputRules input_rules;

  constexpr bool is_gpu() const { return gpus.first != INT_MAX; }
};

// How much shared memory a kernel's tiles are made for. Small problems take kCompact, too.
// What a value means is each family's affair (sm80/*/config.h).
enum class TileConfig : int { kDefault, kCompact, kWide };

struct Tile {
  int block_m = 0;  // query rows of a CTA (CPU: of a task)
  int block_n = 0;  // keys of one step
  int warps = 0;    // 0 on the CPU
  int ctas = 1;     // for which an SM has registers, where that has been fixed
};

// Where and with what a kernel runs.
struct LaunchContext {
  int num_threads = 1;         // CPU
  int multiprocessors = 1;     // GPU
  int compute_capability = 0;  // GPU: 80 for 8.0
  int device = 0;              // GPU: its number
  void* stream = nullptr;      // CUDA
  void* scratch = nullptr;     // `scratch_bytes` of the kernel, aligned to 256 bytes
  std::size_t scratch_bytes = 0;
};

// How a kernel of one operation is called.
template <class Params>
struct KernelEntryPoints {
  // Of a context that has no scratch yet.
  std::size_t (*scratch_bytes)(const Params& params, const LaunchContext& context) = nullptr;
  void (*launch)(const Params& params, const LaunchContext& context) = nullptr;
};

struct KernelDescriptor {
  const char* name = "";  // "sm80_forward_bf16_d128", "sm80_forward_bf16_d128_generic"
  const KernelFamily* family = nullptr;
  CpuIsa isa = CpuIsa::kAuto;  // of a CPU kernel
  Op op = Op::kForward;
  DType dtype = DType::kFloat32;
  int head_dim = 0;  // the largest of q and k; 0: any
  int head_dim_v = 0;
  int least_head_dim = 0;  // smaller ones, of V too, are another family's, which is faster there
  unsigned features = kNoFeatures;
  bool latent = false;   // decoding: for values that are the keys' first columns, and no others
  bool prefill = false;  // decoding: for long sequences of packed queries, and no others
  // Decoding and prefill: of caches as Problem::cache_in_boxes says, and no others.
  bool loads_boxes = false;
  bool joins_in_cluster = false;  // decoding: splits, where they suit a cluster
  TileConfig tile_config = TileConfig::kDefault;
  Tile tile;
  std::size_t smem_bytes = 0;  // dynamic shared memory of a CTA
  // Kernels of one family, operation, dtype, head dims and features that have the same number here
  // give a row the same bits. Only among these may the size of a problem choose.
  int bits_group = 0;
  // Of its operation only.
  KernelEntryPoints<ForwardParams> forward;
  KernelEntryPoints<BackwardParams> backward;
  // Of DqSums, from the shape of q, k and v and the number of rows; null: the kernel keeps none.
  std::size_t (*dq_sums_bytes)(const BackwardParams& params) = nullptr;
  KernelEntryPoints<KvCacheParams> decode;
};

struct KernelUnit {
  const KernelDescriptor* descriptors;
  std::size_t count;
};

}  // namespace anyflash
