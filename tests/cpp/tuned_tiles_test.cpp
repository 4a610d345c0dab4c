// select_gpu.cpp: what a table of measurements and prefer_kernel() change about the choice of a
// kernel. The kernels, the measurements and the GPU are this test's.
#include "tuned_tiles.h"

#include <string>
#include <thread>

#include "anyflash/error.h"
#include "check.h"
#include "device.h"
#include "kernel_table.h"
#include "prefer_kernel.h"

namespace anyflash {

namespace {

constexpr KernelFamily kFamily = [] {
  KernelFamily family;
  family.name = "sm80";
  family.gpus.first = 80;
  return family;
}();

constexpr KernelDescriptor kernel_of(const char* name, Op op, int head_dim, int block_m,
                                     TileConfig tile_config = TileConfig::kDefault,
                                     std::size_t smem_bytes = 90000,
                                     unsigned features = kNoFeatures,
                                     DType dtype = DType::kFloat16) {
  KernelDescriptor d;
  d.name = name;
  d.family = &kFamily;
  d.op = op;
  d.dtype = dtype;
  d.head_dim = d.head_dim_v = head_dim;
  d.features = features;
  d.tile_config = tile_config;
  d.tile.block_m = block_m;
  d.smem_bytes = smem_bytes;
  return d;
}

constexpr KernelDescriptor kRows[] = {
    kernel_of("forward_d128_compact", Op::kForward, 128, 64, TileConfig::kCompact, 50000),
    kernel_of("forward_d64_generic", Op::kForward, 64, 64, TileConfig::kDefault, 90000,
              kAllFeatures),
    kernel_of("forward_d64_compact", Op::kForward, 64, 64, TileConfig::kCompact, 50000),
    kernel_of("forward_d64", Op::kForward, 64, 128),
    kernel_of("forward_d64_wide", Op::kForward, 64, 128, TileConfig::kWide, 200000),
    kernel_of("forward_d128", Op::kForward, 128, 128),
    kernel_of("forward_bf16", Op::kForward, 64, 128, TileConfig::kDefault, 90000, kNoFeatures,
              DType::kBFloat16),
    kernel_of("backward_d64_generic", Op::kBackward, 64, 64, TileConfig::kCompact, 90000,
              kAllFeatures),
    kernel_of("backward_d64", Op::kBackward, 64, 64),
    kernel_of("backward_d64_wide", Op::kBackward, 64, 64, TileConfig::kWide, 80000),
};
constexpr KernelUnit kUnit{kRows, sizeof(kRows) / sizeof(kRows[0])};

DeviceProperties gpu;

}  // namespace

const KernelUnit* const kKernelUnits[] = {&kUnit};
const std::size_t kKernelUnitCount = 1;
const char* const kCudaArchs[] = {"compute_80", nullptr};
const char* const kSpecificArchs[] = {nullptr};

const DeviceProperties& device_properties(int) { return gpu; }

const TunedTile kTunedTiles[] = {
    {{90, "sm80"}, {Op::kForward, 64, 64}, {true, ProblemSize::kLong}, TileConfig::kCompact},
    {{90, "sm80"}, {Op::kForward, 64, 64}, {false, ProblemSize::kLong}, TileConfig::kWide},
    {{90, "sm80"}, {Op::kForward, 64, 64}, {false, ProblemSize::kSmallGrid}, TileConfig::kDefault},
    // Is not built:
    {{90, "sm80"}, {Op::kForward, 128, 128}, {true, ProblemSize::kLong}, TileConfig::kWide},
    {{90, "sm80"}, {Op::kBackward, 64, 64}, {true, ProblemSize::kLong}, TileConfig::kWide},
    // Has features:
    {{90, "sm80"}, {Op::kBackward, 64, 64}, {false, ProblemSize::kLong}, TileConfig::kCompact},
    {{90, "sm80"}, {Op::kBackward, 64, 64}, {true, ProblemSize::kShort}, TileConfig::kDefault},
    {{100, "sm80"}, {Op::kForward, 64, 64}, {true, ProblemSize::kLong}, TileConfig::kDefault},
    {},
};

}  // namespace anyflash

using namespace anyflash;

namespace {

constexpr int kMultiprocessors = 132;

void use_gpu(int compute_capability, std::size_t smem = 227 * 1024) {
  gpu.compute_capability = compute_capability;
  gpu.multiprocessors = gpu.full_grid = kMultiprocessors;
  gpu.smem_per_block = smem;
  gpu.smem_per_multiprocessor = smem + 1024;
}

struct Wanted {
  bool bounded;
  int64_t pairs = kMultiprocessors;  // what fills the GPU
  int head_dim = 64;
  unsigned features = kNoFeatures;
  int64_t rows = kShortRows + 1;
};

std::string selected(Op op, const Wanted& wanted) {
  Problem problem;
  problem.op = op;
  problem.device = {DeviceType::kCuda, 0};
  problem.dtype = DType::kFloat16;
  problem.head_dim = problem.head_dim_v = wanted.head_dim;
  problem.features = wanted.features;
  problem.cpu_isa = CpuIsa::kAuto;
  problem.rows = wanted.pairs < kMultiprocessors ? kGridTile : wanted.rows;
  problem.pairs = wanted.pairs;
  problem.bounded = wanted.bounded;
  return select_kernel(problem).name;
}

constexpr int64_t kFew = kMultiprocessors - 1;

void check_measurements_beat_rules() {
  use_gpu(90);
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64_compact");
  CHECK_EQ(selected(Op::kForward, {false}), "forward_d64_wide");
  CHECK_EQ(selected(Op::kForward, {false, kFew}), "forward_d64");
  CHECK_EQ(selected(Op::kForward, {true, kMultiprocessors, 50}), "forward_d64_compact");
  CHECK_EQ(selected(Op::kBackward, {true}), "backward_d64_wide");
  Wanted wanted{true};
  wanted.rows = kShortRows;
  CHECK_EQ(selected(Op::kBackward, wanted), "backward_d64");
}

// Of what the table does not know, of what is not there, and of other kernels than plain ones.
void check_rules_without_measurement() {
  use_gpu(90);
  CHECK_EQ(selected(Op::kForward, {true, kFew}), "forward_d64_compact");
  CHECK_EQ(selected(Op::kForward, {true, kMultiprocessors, 128}), "forward_d128");
  CHECK_EQ(selected(Op::kBackward, {false}), "backward_d64");
  CHECK_EQ(selected(Op::kBackward, {true, kFew}), "backward_d64");
  CHECK_EQ(selected(Op::kForward, {true, kMultiprocessors, 64, kBias}), "forward_d64_generic");
  // What does not fit is passed over.
  use_gpu(90, 99 * 1024);
  CHECK_EQ(selected(Op::kForward, {false}), "forward_d64");
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64_compact");
  // Other GPUs have measurements of their own, or none.
  use_gpu(100);
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64");
  CHECK_EQ(selected(Op::kBackward, {true}), "backward_d64");
  for (const int other : {80, 89, 103}) {
    use_gpu(other);
    CHECK_EQ(selected(Op::kForward, {true}), "forward_d64_wide");
    CHECK_EQ(selected(Op::kForward, {false, kFew}), "forward_d64_compact");
    CHECK_EQ(selected(Op::kBackward, {true}), "backward_d64");
  }
}

void check_preference() {
  use_gpu(90);
  prefer_kernel("forward_d64");
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64");
  CHECK_EQ(selected(Op::kForward, {true, kFew, 8}), "forward_d64");
  std::string elsewhere;
  std::thread([&] { elsewhere = selected(Op::kForward, {true}); }).join();
  CHECK_EQ(elsewhere, "forward_d64");
  // What it cannot run.
  CHECK_EQ(selected(Op::kBackward, {true}), "backward_d64_wide");
  CHECK_EQ(selected(Op::kForward, {true, kFew, 65}), "forward_d128_compact");
  CHECK_EQ(selected(Op::kForward, {true, kFew, 64, kBias}), "forward_d64_generic");
  prefer_kernel("forward_bf16");
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64_compact");
  prefer_kernel("forward_d64_wide");
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64_wide");
  use_gpu(90, 99 * 1024);
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64_compact");
  // Larger than it need be, and with features that nobody asks for.
  prefer_kernel("forward_d128");
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d128");
  prefer_kernel("backward_d64_generic");
  CHECK_EQ(selected(Op::kBackward, {true}), "backward_d64_generic");

  use_gpu(90);
  prefer_kernel("");  // the rules alone
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64_wide");
  CHECK_EQ(selected(Op::kBackward, {true}), "backward_d64");
  prefer_kernel(nullptr);
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64_compact");
}

// An unknown name changes nothing.
void check_unknown_name() {
  use_gpu(90);
  prefer_kernel("forward_d64");
  try {
    prefer_kernel("forward_d65");
    CHECK(false);
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kInvalidValue);
    CHECK_MSG(check::contains(error.what(),
                              "there is no CUDA kernel \"forward_d65\"; this build has "
                              "forward_d128_compact, forward_d64_generic, "),
              error.what());
  }
  CHECK_EQ(selected(Op::kForward, {true}), "forward_d64");
  prefer_kernel(nullptr);
}

void check_names() {
  CHECK_EQ(name(TileConfig::kDefault), std::string());
  CHECK_EQ(name(TileConfig::kCompact), std::string("compact"));
  CHECK_EQ(name(TileConfig::kWide), std::string("wide"));
}

}  // namespace

int main() {
  check_measurements_beat_rules();
  check_rules_without_measurement();
  check_preference();
  check_unknown_name();
  check_names();
  return check::report();
}
