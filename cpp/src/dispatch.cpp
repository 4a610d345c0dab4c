#include <algorithm>
#include <atomic>
#include <bitset>
#include <cstdlib>
#include <map>
#include <unordered_map>
#include <utility>

#include "anyflash/error.h"
#include "cpu_features.h"
#include "describe.h"
#include "device.h"
#include "heuristics.h"
#include "kernel_table.h"
#include "prefer_kernel.h"

namespace anyflash {

namespace {

std::vector<const KernelDescriptor*> all_rows() {
  std::vector<const KernelDescriptor*> rows;
  for (std::size_t unit = 0; unit < kKernelUnitCount; ++unit) {
    for (std::size_t i = 0; i < kKernelUnits[unit]->count; ++i) {
      rows.push_back(&kKernelUnits[unit]->rows[i]);
    }
  }
  return rows;
}

unsigned features_of(const ForwardParams& p) {
  unsigned features = kNoFeatures;
  if (p.softcap != 0.0) features |= kSoftcap;
  if (p.softcap > kAccurateSoftcap) features |= kLargeSoftcap;
  if (p.alibi_slopes.data != nullptr) features |= kAlibi;
  if (p.bias.data != nullptr) features |= kBias;
  if (p.block_mask.data != nullptr) features |= kBlockMask;
  if (p.dropout_threshold != 0) features |= kDropout;
  return features;
}

struct Registry {
  Registry() {
    for (const KernelDescriptor* row : rows) {
      launches[row] = 0;
      if (row->arch == Arch::kSm80) cuda[{row->op, row->dtype}].push_back(row);
    }
  }

  std::vector<const KernelDescriptor*> rows = all_rows();
  std::unordered_map<const KernelDescriptor*, std::atomic<std::uint64_t>> launches;
  // A call looks at those for its operation and type alone: all are many.
  std::map<std::pair<Op, DType>, std::vector<const KernelDescriptor*>> cuda;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

// Decoding: a tile that holds all rows reads the keys once, and a smaller one wastes less.
bool has_better_tile(int64_t rows, const KernelDescriptor& a, const KernelDescriptor& b) {
  const bool fits_a = a.tile.block_m >= rows;
  const bool fits_b = b.tile.block_m >= rows;
  if (fits_a != fits_b) return fits_a;
  return fits_a ? a.tile.block_m < b.tile.block_m : a.tile.block_m > b.tile.block_m;
}

// Whether a grid of CTAs of so many rows would leave multiprocessors idle.
bool leaves_idle(const Problem& problem, int tile_rows, const DeviceProperties& device) {
  return (problem.rows + tile_rows - 1) / tile_rows * problem.pairs < device.full_grid;
}

// Of two rows that can run a problem, the one that does less besides, or that suits the GPU.
bool is_closer(const Problem& problem, const DeviceProperties& device, const KernelDescriptor& a,
               const KernelDescriptor& b) {
  if (problem.op == Op::kDecode && a.tile.block_m != b.tile.block_m) {
    return has_better_tile(problem.rows, a, b);
  }
  const int columns_a = a.head_dim + a.head_dim_v;
  const int columns_b = b.head_dim + b.head_dim_v;
  if (columns_a != columns_b) return columns_a < columns_b;
  const std::size_t features_a = std::bitset<32>(a.features).count();
  const std::size_t features_b = std::bitset<32>(b.features).count();
  if (features_a != features_b) return features_a < features_b;
  // A multiprocessor holds as many of its CTAs as the row is made for.
  const bool suits_a = resident_ctas(a, device) == a.tile.ctas;
  const bool suits_b = resident_ctas(b, device) == b.tile.ctas;
  if (suits_a != suits_b) return suits_a;
  if (problem.op == Op::kForward && a.tile.block_m != b.tile.block_m) {
    // Smaller tiles where larger ones would leave multiprocessors idle.
    const bool a_is_smaller = a.tile.block_m < b.tile.block_m;
    const int larger = a_is_smaller ? b.tile.block_m : a.tile.block_m;
    if (leaves_idle(problem, larger, device)) return a_is_smaller;
  }
  if (a.tile.ctas != b.tile.ctas) return a.tile.ctas > b.tile.ctas;
  return a.smem_bytes > b.smem_bytes;  // the larger tiles, or more of them
}

// The best instruction set that has a kernel; AMX has some only, and AVX-512 the others.
const KernelDescriptor& select_cpu(const Problem& problem) {
  const CpuIsa wanted = problem.cpu_isa;
  if (!cpu_has(wanted)) {
    throw Error(ErrorCode::kUnsupported,
                std::string("cpu_isa is ") + name(wanted) + ", which this processor does not have");
  }
  const auto is_allowed = [wanted](CpuIsa isa) {
    if (wanted == CpuIsa::kAuto) return cpu_has(isa);
    return isa == wanted || (wanted == CpuIsa::kAmx && isa == CpuIsa::kAvx512);
  };
  const KernelDescriptor* best = nullptr;
  for (const KernelDescriptor* row : registry().rows) {
    if (row->arch != Arch::kCpu || row->op != problem.op || row->dtype != problem.dtype) continue;
    if (is_allowed(row->isa) && (best == nullptr || row->isa > best->isa)) best = row;
  }
  if (best != nullptr) return *best;
  throw Error(ErrorCode::kUnsupported, std::string("this build has no CPU ") + name(problem.op) +
                                           " kernels for " + name(wanted));
}

std::string built_archs() {
  std::string list;
  for (const char* const* arch = kCudaArchs; *arch != nullptr; ++arch) {
    list += (list.empty() ? "" : ", ") + std::string(*arch);
  }
  return list;
}

// " with softcap, bias"; empty for no features.
std::string with_features(unsigned features) {
  std::string text;
  for (const std::string& feature : feature_names(features)) {
    text += (text.empty() ? " with " : ", ") + feature;
  }
  return text;
}

// The rows for the problem's operation and type.
const std::vector<const KernelDescriptor*>& cuda_rows(const Problem& problem) {
  static const std::vector<const KernelDescriptor*> none;
  const auto& rows = registry().cuda;
  const auto found = rows.find({problem.op, problem.dtype});
  return found == rows.end() ? none : found->second;
}

// Has all features, and fits the GPU.
bool suffices(const KernelDescriptor& row, const Problem& problem, const DeviceProperties& device) {
  return (problem.features & ~row.features) == 0 && row.smem_bytes <= device.smem_per_block;
}

// Of the rows for its operation and type.
bool can_run(const KernelDescriptor& row, const Problem& problem, const DeviceProperties& device) {
  return suffices(row, problem, device) && row.head_dim >= problem.head_dim &&
         row.head_dim_v >= problem.head_dim_v;
}

[[noreturn]] void refuse(const Problem& problem, const DeviceProperties& device) {
  int largest = 0;
  for (const KernelDescriptor* row : cuda_rows(problem)) {
    if (suffices(*row, problem, device)) {
      largest = std::max(largest, std::min(row->head_dim, row->head_dim_v));
    }
  }
  if (cuda_rows(problem).empty()) {
    throw Error(ErrorCode::kInvalidType, std::string("q is ") + name(problem.dtype) +
                                             "; the CUDA " + name(problem.op) +
                                             " kernels of this build take float16 and bfloat16");
  }
  throw Error(ErrorCode::kUnsupported,
              "head dim is " + std::to_string(std::max(problem.head_dim, problem.head_dim_v)) +
                  "; the " + name(problem.op) + " kernels of this build for " +
                  name(problem.dtype) + with_features(problem.features) + " that fit " +
                  device.name + "'s " + std::to_string(device.smem_per_block) +
                  " bytes of shared memory take head dims up to " + std::to_string(largest));
}

// Instead of the row that the rules chose, a plain one that was measured to be faster.
const KernelDescriptor& tuned(const Problem& problem, const DeviceProperties& device,
                              const KernelDescriptor& chosen) {
  const auto has_dims = [&chosen](const auto& x) {
    return x.head_dim == chosen.head_dim && x.head_dim_v == chosen.head_dim_v;
  };
  const ProblemSize size = leaves_idle(problem, kGridTile, device) ? ProblemSize::kSmallGrid
                           : problem.rows <= kShortRows            ? ProblemSize::kShort
                                                                   : ProblemSize::kLong;
  for (const TunedTile* tile = kTunedTiles; tile->compute_capability != 0; ++tile) {
    if (tile->compute_capability != device.compute_capability || tile->op != problem.op ||
        !has_dims(*tile) || tile->bounded != problem.bounded || tile->size != size) {
      continue;
    }
    for (const KernelDescriptor* row : cuda_rows(problem)) {
      if (row->tile_config == tile->tile_config && row->features == kNoFeatures && has_dims(*row) &&
          can_run(*row, problem, device)) {
        return *row;
      }
    }
  }
  return chosen;
}

// What prefer_kernel() was told; kNoRow can run nothing.
constexpr KernelDescriptor kNoRow{};
std::atomic<const KernelDescriptor*> preferred{nullptr};

const KernelDescriptor& select_cuda(const Problem& problem) {
  check_built_for(problem.device.index);
  const DeviceProperties& device = device_properties(problem.device.index);
  const KernelDescriptor* const wanted = preferred.load(std::memory_order_relaxed);
  const bool may_run =
      wanted != nullptr && wanted->op == problem.op && wanted->dtype == problem.dtype;
  if (may_run && can_run(*wanted, problem, device)) return *wanted;
  const KernelDescriptor* best = nullptr;
  for (const KernelDescriptor* row : cuda_rows(problem)) {
    if (!can_run(*row, problem, device)) continue;
    if (best == nullptr || is_closer(problem, device, *row, *best)) best = row;
  }
  if (best == nullptr) refuse(problem, device);
  return wanted == &kNoRow ? *best : tuned(problem, device, *best);
}

}  // namespace

std::vector<CountedKernel> counted_kernels() {
  const Registry& r = registry();
  std::vector<CountedKernel> kernels;
  for (const KernelDescriptor* row : r.rows) {
    kernels.push_back({row, r.launches.at(row).load(std::memory_order_relaxed)});
  }
  return kernels;
}

void count_launch(const KernelDescriptor& row) {
  registry().launches.at(&row).fetch_add(1, std::memory_order_relaxed);
}

CpuIsa best_isa() {
  static const CpuIsa best = [] {
    CpuIsa isa = CpuIsa::kBaseline;
    for (const KernelDescriptor* row : registry().rows) {
      if (row->arch == Arch::kCpu && cpu_has(row->isa) && row->isa > isa) isa = row->isa;
    }
    return isa;
  }();
  return best;
}

Problem problem_of(Op op, const TensorView& q, const ForwardParams& params, CpuIsa cpu_isa) {
  const unsigned features = features_of(params);
  Problem problem{op, q.device, q.dtype, params.head_dim, params.head_dim_v, features, cpu_isa};
  if (op == Op::kBackward) {
    problem.rows = params.seqlen_k;
    problem.pairs = params.batch * params.heads_k * gqa_splits(params);
  } else {
    problem.rows = params.seqlen_q;
    problem.pairs = params.batch * params.heads;
  }
  problem.bounded = params.window.left >= 0 || params.window.right >= 0;
  return problem;
}

Problem problem_of(const TensorView& q, const KvCacheParams& params, CpuIsa cpu_isa) {
  Problem problem = problem_of(Op::kDecode, q, params, cpu_isa);
  if (params.cache_dtype != q.dtype) problem.features |= kQuantizedCache;
  problem.rows = query_rows(params);
  return problem;
}

const KernelDescriptor& select_kernel(const Problem& problem) {
  return problem.device.type == DeviceType::kCpu ? select_cpu(problem) : select_cuda(problem);
}

void prefer_kernel(const char* name) {
  const std::string wanted = name == nullptr ? "" : name;
  const KernelDescriptor* found = name == nullptr ? nullptr : &kNoRow;
  std::string names;
  for (const KernelDescriptor* row : registry().rows) {
    if (row->arch != Arch::kSm80) continue;
    if (row->name == wanted) found = row;
    names += (names.empty() ? "" : ", ") + std::string(row->name);
  }
  if (!wanted.empty() && found == &kNoRow) {
    throw Error(ErrorCode::kInvalidValue, "there is no CUDA kernel \"" + wanted +
                                              "\"; this build has " +
                                              (names.empty() ? std::string("none") : names));
  }
  preferred.store(found, std::memory_order_relaxed);
}

namespace {

struct BuiltArch {
  int capability;
  bool ptx;
};

std::vector<BuiltArch> read_archs() {
  std::vector<BuiltArch> archs;
  for (const char* const* arch = kCudaArchs; *arch != nullptr; ++arch) {
    const std::string text = *arch;
    archs.push_back({std::atoi(text.c_str() + text.find('_') + 1), text.rfind("compute_", 0) == 0});
  }
  return archs;
}

}  // namespace

bool built_for(int compute_capability) {
  static const std::vector<BuiltArch> archs = read_archs();
  return std::any_of(archs.begin(), archs.end(), [compute_capability](const BuiltArch& arch) {
    // Machine code runs on later minor versions of its major version; PTX on everything later.
    const bool same_major = arch.capability / 10 == compute_capability / 10;
    return arch.capability <= compute_capability && (arch.ptx || same_major);
  });
}

namespace {

std::string remedy(int compute_capability) {
  constexpr int kOldest = 80;
  if (compute_capability < kOldest) return "GPUs of compute capability 8.0 or later can be used";
  return "build it with ANYFLASH_ARCHS=" + std::to_string(compute_capability) +
         ", or install a newer release";
}

}  // namespace

void check_built_for(int index) {
  const DeviceProperties& device = device_properties(index);
  const int cc = device.compute_capability;
  if (built_for(cc)) return;
  throw Error(ErrorCode::kUnsupported, "CUDA device " + std::to_string(index) + " (" + device.name +
                                           ") has compute capability " + std::to_string(cc / 10) +
                                           "." + std::to_string(cc % 10) +
                                           "; this build holds code for " + built_archs() + "; " +
                                           remedy(cc));
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

// kLargeSoftcap is none that users ask for.
std::vector<std::string> feature_names(unsigned features) {
  static constexpr struct {
    Feature feature;
    const char* name;
  } kNames[] = {{kSoftcap, "softcap"}, {kAlibi, "alibi"},
                {kBias, "bias"},       {kBlockMask, "block_mask"},
                {kDropout, "dropout"}, {kQuantizedCache, "quantized_cache"}};
  std::vector<std::string> names;
  for (const auto& known : kNames) {
    if ((features & known.feature) != 0) names.push_back(known.name);
  }
  return names;
}

}  // namespace anyflash
