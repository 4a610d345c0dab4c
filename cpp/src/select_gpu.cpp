// Which GPU kernel runs a problem.
#include <algorithm>
#include <atomic>
#include <bitset>
#include <cstring>
#include <string>
#include <tuple>
#include <vector>

#include "anyflash/error.h"
#include "describe.h"
#include "heuristics.h"
#include "kernel_table.h"
#include "prefer_kernel.h"
#include "tuned_tiles.h"

namespace anyflash {

namespace {

// Decoding: a tile that holds all rows reads the keys once, and a smaller one wastes less.
bool has_better_tile(int64_t rows, const KernelDescriptor& a, const KernelDescriptor& b) {
  const bool fits_a = a.tile.block_m >= rows;
  const bool fits_b = b.tile.block_m >= rows;
  if (fits_a != fits_b) return fits_a;
  return fits_a ? a.tile.block_m < b.tile.block_m : a.tile.block_m > b.tile.block_m;
}

// Whether a grid of CTAs of `tile_rows` rows would leave multiprocessors idle.
bool leaves_idle(const Problem& problem, int tile_rows, const DeviceProperties& device) {
  return (problem.rows + tile_rows - 1) / tile_rows * problem.pairs < device.full_grid;
}

// Whether a comes before b; the first rule that tells them apart decides:
// 1. the family with the higher priority;
// 2. decoding: the better tile of rows;
// 3. the fewer columns of K and V in its tiles;
// 4. the fewer features;
// 5. the one as many of whose CTAs fit a multiprocessor as it was tuned for;
// 6. the forward: smaller tiles where larger ones would leave multiprocessors idle;
// 7. more CTAs a multiprocessor, then more shared memory: larger tiles, or more of them.
bool is_closer(const Problem& problem, const DeviceProperties& device, const KernelDescriptor& a,
               const KernelDescriptor& b) {
  if (a.family != b.family) return a.family->priority > b.family->priority;
  if (problem.op == Op::kDecode && a.tile.block_m != b.tile.block_m) {
    return has_better_tile(problem.rows, a, b);
  }
  const int columns_a = tile_columns(a);
  const int columns_b = tile_columns(b);
  if (columns_a != columns_b) return columns_a < columns_b;
  const std::size_t features_a = std::bitset<32>(a.features).count();
  const std::size_t features_b = std::bitset<32>(b.features).count();
  if (features_a != features_b) return features_a < features_b;
  const bool suits_a = resident_ctas(a, device) == a.tile.ctas;
  const bool suits_b = resident_ctas(b, device) == b.tile.ctas;
  if (suits_a != suits_b) return suits_a;
  const bool same_bits = a.bits_group == b.bits_group;
  if (problem.op == Op::kForward && same_bits && a.tile.block_m != b.tile.block_m) {
    const bool a_is_smaller = a.tile.block_m < b.tile.block_m;
    const int larger = a_is_smaller ? b.tile.block_m : a.tile.block_m;
    if (leaves_idle(problem, larger, device)) return a_is_smaller;
  }
  if (a.tile.ctas != b.tile.ctas) return a.tile.ctas > b.tile.ctas;
  return a.smem_bytes > b.smem_bytes;
}

// " with softcap, bias"; empty for no features.
std::string with_features(unsigned features) {
  std::string text;
  for (const std::string& feature : feature_names(features)) {
    text += (text.empty() ? " with " : ", ") + feature;
  }
  return text;
}

// A kernel of one feature reads what belongs to it, whether it is there or not.
bool has_features(const KernelDescriptor& kernel, unsigned wanted) {
  const bool is_of_one = std::bitset<32>(kernel.features).count() == 1;
  return (wanted & ~kernel.features) == 0 && (!is_of_one || wanted == kernel.features);
}

// Has all features, takes the scale, and fits the GPU.
bool suffices(const KernelDescriptor& kernel, const Problem& problem,
              const DeviceProperties& device) {
  return has_features(kernel, problem.features) && (problem.latent || !kernel.latent) &&
         (problem.prefill || !kernel.prefill) && (problem.cache_in_boxes || !kernel.loads_boxes) &&
         kernel.smem_bytes <= device.smem_per_block &&
         (problem.positive_scale || !kernel.family->needs_positive_scale) &&
         built_for(*kernel.family, device.compute_capability);
}

// Of the kernels for its operation and type.
bool can_run(const KernelDescriptor& kernel, const Problem& problem,
             const DeviceProperties& device) {
  return kernel.head_dim >= problem.head_dim && kernel.head_dim_v >= problem.head_dim_v &&
         kernel.least_head_dim <= std::max(problem.head_dim, problem.head_dim_v) &&
         suffices(kernel, problem, device);
}

// There is no kernel for the operation and the type.
[[noreturn]] void refuse_dtype(const Problem& problem) {
  std::vector<std::string> built;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    if (!gpu_kernels(problem.op, dtype).empty()) built.push_back(name(dtype));
  }
  const std::string kernels = std::string("CUDA ") + name(problem.op) + " kernels";
  const bool could_be_built = problem.dtype == DType::kFloat16 || problem.dtype == DType::kBFloat16;
  throw Error(could_be_built ? ErrorCode::kUnsupported : ErrorCode::kInvalidType,
              std::string("q is ") + name(problem.dtype) + "; " +
                  (built.empty() ? "this build has no " + kernels
                                 : "the " + kernels + " of this build take " + listed(built)));
}

[[noreturn]] void refuse(const Problem& problem, const DeviceProperties& device) {
  const auto& kernels = gpu_kernels(problem.op, problem.dtype);
  if (kernels.empty()) refuse_dtype(problem);
  int largest = 0;
  for (const KernelDescriptor* kernel : kernels) {
    if (suffices(*kernel, problem, device)) {
      largest = std::max(largest, std::min(kernel->head_dim, kernel->head_dim_v));
    }
  }
  const char* const v = problem.op == Op::kDecode ? "v_cache" : "v";
  const bool is_q = problem.head_dim >= problem.head_dim_v;
  const std::string which = std::string(name(problem.op)) + " kernels";
  const std::string that_fit =
      std::string(" for ") + name(problem.dtype) + with_features(problem.features) + " that fit " +
      device.name + "'s " + std::to_string(device.smem_per_block) + " bytes of shared memory";
  throw Error(ErrorCode::kUnsupported,
              std::string(is_q ? "q" : v) + " has head dim " +
                  std::to_string(is_q ? problem.head_dim : problem.head_dim_v) + "; " +
                  (largest == 0 ? "this build has no " + which + that_fit
                                : "the " + which + " of this build" + that_fit +
                                      " take head dims up to " + std::to_string(largest)));
}

// Instead of the kernel that the rules chose, a plain one of its family that was measured to be
// faster.
const KernelDescriptor& tuned(const Problem& problem, const DeviceProperties& device,
                              const KernelDescriptor& chosen) {
  const auto has_dims = [&chosen](const auto& x) {
    return x.head_dim == chosen.head_dim && x.head_dim_v == chosen.head_dim_v;
  };
  const ProblemSize size = leaves_idle(problem, kGridTile, device) ? ProblemSize::kSmallGrid
                           : problem.rows <= kShortRows            ? ProblemSize::kShort
                                                                   : ProblemSize::kLong;
  for (const TunedTile* tile = kTunedTiles; tile->target.compute_capability != 0; ++tile) {
    if (tile->target.compute_capability != device.compute_capability ||
        tile->kernels.op != problem.op || !has_dims(tile->kernels) ||
        tile->problems.bounded != problem.bounded || tile->problems.size != size ||
        std::strcmp(tile->target.family, chosen.family->name) != 0) {
      continue;
    }
    for (const KernelDescriptor* kernel : gpu_kernels(problem.op, problem.dtype)) {
      if (kernel->family == chosen.family && kernel->tile_config == tile->tile_config &&
          kernel->features == kNoFeatures && has_dims(*kernel) &&
          can_run(*kernel, problem, device)) {
        return *kernel;
      }
    }
  }
  return chosen;
}

// What prefer_kernel() was told. kRulesAlone, which is no kernel: the rules choose, without
// tuned_tiles.cpp.
constexpr KernelDescriptor kRulesAlone{};
std::atomic<const KernelDescriptor*> preferred{nullptr};

const KernelDescriptor& choose(const Problem& problem, const DeviceProperties& device,
                               const KernelDescriptor* wanted) {
  check_built_for(problem.device.index);
  const bool may_run = wanted != nullptr && wanted != &kRulesAlone && wanted->op == problem.op &&
                       wanted->dtype == problem.dtype;
  if (may_run && can_run(*wanted, problem, device)) return *wanted;
  const KernelDescriptor* best = nullptr;
  for (const KernelDescriptor* kernel : gpu_kernels(problem.op, problem.dtype)) {
    // First whether it would be better: that is said in less time, and often no.
    const bool better = best == nullptr || is_closer(problem, device, *kernel, *best);
    if (better && can_run(*kernel, problem, device)) best = kernel;
  }
  if (best == nullptr) refuse(problem, device);
  return wanted == &kRulesAlone ? *best : tuned(problem, device, *best);
}

// All that a choice depends on.
auto key_of(const Problem& p, const DeviceProperties& d, const KernelDescriptor* wanted) {
  return std::make_tuple(p.op, p.device.index, p.dtype, p.head_dim, p.head_dim_v, p.features,
                         p.rows, p.pairs, p.bounded, p.positive_scale, p.latent, p.prefill,
                         p.cache_in_boxes, d.compute_capability, d.full_grid, d.smem_per_block,
                         d.smem_per_multiprocessor, wanted);
}

struct Choice {
  decltype(key_of({}, {}, nullptr)) key;
  const KernelDescriptor* kernel = nullptr;
};

// The last choices of an operation. A call with packed queries and a cache makes up to four.
struct LastChoices {
  static constexpr int kCount = 4;
  Choice choices[kCount];
  int next = 0;
};

}  // namespace

// A thread remembers its last choices of each operation: calls of one size follow one another, and
// to compare a hundred kernels takes as long as to launch one.
const KernelDescriptor& select_gpu_kernel(const Problem& problem) {
  const DeviceProperties& device = device_properties(problem.device.index);
  const KernelDescriptor* const wanted = preferred.load(std::memory_order_relaxed);
  const auto key = key_of(problem, device, wanted);
  thread_local LastChoices memory[3];  // by operation
  LastChoices& last = memory[static_cast<int>(problem.op)];
  for (const Choice& choice : last.choices) {
    if (choice.kernel != nullptr && choice.key == key) return *choice.kernel;
  }
  const KernelDescriptor& kernel = choose(problem, device, wanted);
  last.choices[last.next] = {key, &kernel};
  last.next = (last.next + 1) % LastChoices::kCount;
  return kernel;
}

void prefer_kernel(const char* name) {
  const std::string wanted = name == nullptr ? "" : name;
  const KernelDescriptor* found = name == nullptr ? nullptr : &kRulesAlone;
  std::string names;
  for (const KernelDescriptor* kernel : all_kernels()) {
    if (!kernel->family->is_gpu()) continue;
    if (kernel->name == wanted) found = kernel;
    names += (names.empty() ? "" : ", ") + std::string(kernel->name);
  }
  if (!wanted.empty() && found == &kRulesAlone) {
    throw Error(ErrorCode::kInvalidValue, "there is no CUDA kernel \"" + wanted +
                                              "\"; this build has " +
                                              (names.empty() ? std::string("none") : names));
  }
  preferred.store(found, std::memory_order_relaxed);
}

}  // namespace anyflash
