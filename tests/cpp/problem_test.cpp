// dispatch.cpp: what a problem asks of a kernel; registry.cpp: names. No kernel is needed.
#include <string>
#include <vector>

#include "check.h"
#include "device.h"
#include "kernel_table.h"
#include "tuned_tiles.h"

namespace anyflash {

const KernelUnit* const kKernelUnits[] = {nullptr};
const std::size_t kKernelUnitCount = 0;
const char* const kCudaArchs[] = {nullptr};
const char* const kSpecificArchs[] = {nullptr};
const TunedTile kTunedTiles[] = {{}};

const DeviceProperties& device_properties(int) {
  static const DeviceProperties none;
  return none;
}

}  // namespace anyflash

using namespace anyflash;

namespace {

// Which features a problem asks for.
void check_problem() {
  TensorView q;
  q.dtype = DType::kBFloat16;
  q.device = {DeviceType::kCuda, 3};
  Attention attention;
  attention.head_dim = 24;
  attention.head_dim_v = 40;
  const Problem plain = problem_of(Op::kBackward, q, attention, CpuIsa::kAvx2);
  CHECK(plain.op == Op::kBackward && plain.device == q.device && plain.dtype == q.dtype);
  CHECK(plain.head_dim == 24 && plain.head_dim_v == 40 && plain.cpu_isa == CpuIsa::kAvx2);
  CHECK_EQ(plain.features, unsigned{kNoFeatures});
  CHECK(!plain.bounded);
  attention.softmax_scale = -0.5;
  CHECK(!problem_of(Op::kForward, q, attention, CpuIsa::kAuto).positive_scale);
  attention.softmax_scale = 0.5;
  CHECK(problem_of(Op::kForward, q, attention, CpuIsa::kAuto).positive_scale);

  // How large the grid is: the backward's over keys, with parts of a group that is large.
  attention.batch = 3;
  attention.heads = 16;
  attention.heads_k = 2;
  attention.seqlen_q = 100;
  attention.seqlen_k = 700;
  const Problem forward = problem_of(Op::kForward, q, attention, CpuIsa::kAuto);
  CHECK(forward.rows == 100 && forward.pairs == 48);
  const Problem backward = problem_of(Op::kBackward, q, attention, CpuIsa::kAuto);
  CHECK(backward.rows == 700 && backward.pairs == 12);

  const auto features = [&] {
    return problem_of(Op::kForward, q, attention, CpuIsa::kAuto).features;
  };
  for (const Window window : {Window{3, -1}, Window{-1, 0}, Window{3, 0}}) {
    attention.window = window;  // in every kernel
    CHECK(problem_of(Op::kForward, q, attention, CpuIsa::kAuto).bounded);
  }
  attention.sinks.data = &attention;
  CHECK_EQ(features(), unsigned{kNoFeatures});
  attention.softcap = 1.0;
  CHECK_EQ(features(), unsigned{kSoftcap});
  attention.alibi_slopes.data = attention.bias.data = &attention;
  CHECK_EQ(features(), unsigned{kSoftcap | kAlibi | kBias});
  attention.block_mask.data = attention.key_ranges.data = &attention;
  attention.dropout_threshold = 1;
  CHECK_EQ(features(), kAllFeatures & ~kLargeSoftcap);
  attention.softcap = 257.0;
  CHECK_EQ(features(), kAllFeatures);
}

void check_decode_problem() {
  TensorView q;
  q.dtype = DType::kBFloat16;
  q.device = {DeviceType::kCuda, 1};
  KvCacheParams params;
  params.attention.head_dim = 24;
  params.attention.head_dim_v = 40;
  params.attention.heads = 32;
  params.attention.heads_k = 8;
  params.attention.seqlen_q = 5;
  params.cache_dtype = q.dtype;
  const Problem plain = problem_of(q, params, CpuIsa::kAuto);
  CHECK(plain.op == Op::kDecode && plain.device == q.device && plain.dtype == q.dtype);
  CHECK(plain.head_dim == 24 && plain.head_dim_v == 40 && plain.features == kNoFeatures);
  CHECK_EQ(plain.rows, 20);
  params.attention.softcap = 1.0;
  params.tree_mask.data = &params;  // in every kernel
  for (const DType dtype : {DType::kInt8, DType::kFloat8E4M3, DType::kFloat8E5M2}) {
    params.cache_dtype = dtype;
    CHECK_EQ(problem_of(q, params, CpuIsa::kAuto).features, unsigned{kSoftcap | kQuantizedCache});
  }
  params.attention.seqlen_q = 1 << 30;
  CHECK_EQ(problem_of(q, params, CpuIsa::kAuto).rows, int64_t{1} << 32);
}

void check_names() {
  CHECK_EQ(name(Op::kForward), std::string("forward"));
  CHECK_EQ(name(Op::kBackward), std::string("backward"));
  CHECK_EQ(name(Op::kDecode), std::string("decode"));
  CHECK(feature_names(kQuantizedCache) == (std::vector<std::string>{"quantized_cache"}));
  const std::vector<std::string> all = {"softcap",    "alibi",      "bias",
                                        "block_mask", "key_ranges", "dropout"};
  CHECK(feature_names(kAllFeatures) == all);
  CHECK(feature_names(kNoFeatures).empty());
  CHECK(feature_names(kBias | kSoftcap) == (std::vector<std::string>{"softcap", "bias"}));
}

}  // namespace

int main() {
  check_problem();
  check_decode_problem();
  check_names();
  return check::report();
}
