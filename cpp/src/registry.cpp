// The kernels of all units, and how often each was launched.
#include <atomic>
#include <map>
#include <unordered_map>
#include <utility>

#include "cpu_features.h"
#include "kernel_table.h"

namespace anyflash {

namespace {

std::vector<const KernelDescriptor*> kernels_of_all_units() {
  std::vector<const KernelDescriptor*> kernels;
  for (std::size_t unit = 0; unit < kKernelUnitCount; ++unit) {
    for (std::size_t i = 0; i < kKernelUnits[unit]->count; ++i) {
      kernels.push_back(&kKernelUnits[unit]->descriptors[i]);
    }
  }
  return kernels;
}

using KernelsByProblem = std::map<std::pair<Op, DType>, std::vector<const KernelDescriptor*>>;

struct Registry {
  Registry() {
    for (const KernelDescriptor* kernel : kernels) {
      launches[kernel] = 0;
      auto& of_device = kernel->family->is_gpu() ? gpu : cpu;
      of_device[{kernel->op, kernel->dtype}].push_back(kernel);
    }
  }

  std::vector<const KernelDescriptor*> kernels = kernels_of_all_units();
  std::unordered_map<const KernelDescriptor*, std::atomic<std::uint64_t>> launches;
  KernelsByProblem gpu;
  KernelsByProblem cpu;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

const std::vector<const KernelDescriptor*>& find_kernels(const KernelsByProblem& kernels, Op op,
                                                         DType dtype) {
  static const std::vector<const KernelDescriptor*> none;
  const auto found = kernels.find({op, dtype});
  return found == kernels.end() ? none : found->second;
}

}  // namespace

void count_launch(const KernelDescriptor& kernel) {
  registry().launches.at(&kernel).fetch_add(1, std::memory_order_relaxed);
}

std::uint64_t launches_of(const KernelDescriptor& kernel) {
  return registry().launches.at(&kernel).load(std::memory_order_relaxed);
}

const std::vector<const KernelDescriptor*>& all_kernels() { return registry().kernels; }

const std::vector<const KernelDescriptor*>& gpu_kernels(Op op, DType dtype) {
  return find_kernels(registry().gpu, op, dtype);
}

const std::vector<const KernelDescriptor*>& cpu_kernels(Op op, DType dtype) {
  return find_kernels(registry().cpu, op, dtype);
}

CpuIsa best_isa() {
  static const CpuIsa best = [] {
    CpuIsa isa = CpuIsa::kBaseline;
    for (const KernelDescriptor* kernel : all_kernels()) {
      if (!kernel->family->is_gpu() && cpu_has(kernel->isa) && kernel->isa > isa) isa = kernel->isa;
    }
    return isa;
  }();
  return best;
}

const char* name(Op op) {
  switch (op) {
    case Op::kForward:
      return "forward";
    case Op::kBackward:
      return "backward";
    case Op::kDecode:
      return "decode";
  }
  return "unknown";
}

const char* name(TileConfig tile_config) {
  switch (tile_config) {
    case TileConfig::kDefault:
      return "";
    case TileConfig::kCompact:
      return "compact";
    case TileConfig::kWide:
      return "wide";
  }
  return "unknown";
}

// kLargeSoftcap and kSmallBlocks are none that users ask for.
std::vector<std::string> feature_names(unsigned features) {
  static constexpr struct {
    Feature feature;
    const char* name;
  } kNames[] = {{kSoftcap, "softcap"},
                {kAlibi, "alibi"},
                {kBias, "bias"},
                {kBlockMask, "block_mask"},
                {kKeyRanges, "key_ranges"},
                {kDropout, "dropout"},
                {kQuantizedCache, "quantized_cache"}};
  std::vector<std::string> names;
  for (const auto& known : kNames) {
    if ((features & known.feature) != 0) names.push_back(known.name);
  }
  return names;
}

}  // namespace anyflash
