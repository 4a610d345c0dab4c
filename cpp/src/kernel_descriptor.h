// A compiled kernel as data: what it can do, its tile, and how to launch it.
//
// One generated unit per row group (cmake/kernels.cmake) defines a KernelUnit object; the generated
// kernel_table.cpp lists them all. Nothing registers itself.
#pragma once

#include <cstddef>

#include "anyflash/options.h"
#include "anyflash/tensor_view.h"
#include "params.h"

namespace anyflash {

enum class Arch : int { kCpu, kSm80 };
enum class Op : int { kForward, kBackward, kDecode };

// What a problem may ask of a kernel: bits. Causal masks, windows, packed sequences, sinks and
// max_logits are in every kernel.
enum Feature : unsigned {
  kSoftcap = 1,
  kAlibi = 2,
  kBias = 4,
  kBlockMask = 8,
  kDropout = 16,
  kQuantizedCache = 32,  // int8 or float8_e4m3fn keys and values
  kLargeSoftcap = 64,    // one above kAccurateSoftcap; kSoftcap is there, too
};
inline constexpr unsigned kNoFeatures = 0;
// Of attention without a cache.
inline constexpr unsigned kAllFeatures =
    kSoftcap | kLargeSoftcap | kAlibi | kBias | kBlockMask | kDropout;

// Of kernels that do the same, for which GPUs or problems one is made (sm80/*/config.h).
enum class TileConfig : int { kDefault, kCompact, kWide };

struct Tile {
  int block_m = 0;  // query rows of a CTA (CPU: of a task)
  int block_n = 0;  // keys of one step
  int warps = 0;    // 0 on the CPU
  int ctas = 1;     // for which an SM has registers, where that has been fixed
};

// Where and with what a kernel runs.
struct LaunchContext {
  int num_threads = 1;      // CPU
  void* stream = nullptr;   // CUDA
  void* scratch = nullptr;  // `scratch_bytes` of the row, aligned to 256 bytes
  std::size_t scratch_bytes = 0;
};

// How a kernel of one operation is called.
template <class Params>
struct KernelEntryPoints {
  std::size_t (*scratch_bytes)(const Params& params, int num_threads) = nullptr;
  void (*launch)(const Params& params, const LaunchContext& context) = nullptr;
};

struct KernelDescriptor {
  const char* name;  // "sm80_forward_bf16_d128", "sm80_forward_bf16_d128_generic"
  Arch arch;
  CpuIsa isa;  // of a CPU kernel
  Op op;
  DType dtype;
  int head_dim;  // the largest of q and k; 0: any
  int head_dim_v;
  unsigned features;
  Tile tile;
  std::size_t smem_bytes;                      // dynamic shared memory of a CTA
  KernelEntryPoints<ForwardParams> forward{};  // of the row's operation only
  KernelEntryPoints<BackwardParams> backward{};
  KernelEntryPoints<KvCacheParams> decode{};
  TileConfig tile_config = TileConfig::kDefault;
};

struct KernelUnit {
  const KernelDescriptor* rows;
  std::size_t count;
};

}  // namespace anyflash
