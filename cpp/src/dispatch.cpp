// What a call asks of a kernel.
#include <algorithm>

#include "heuristics.h"
#include "kernel_table.h"

namespace anyflash {

namespace {

unsigned features_of(const Attention& p) {
  unsigned features = kNoFeatures;
  if (p.softcap != 0.0) features |= kSoftcap;
  if (p.softcap > kAccurateSoftcap) features |= kLargeSoftcap;
  if (p.alibi_slopes.data != nullptr) features |= kAlibi;
  if (p.bias.data != nullptr) features |= kBias;
  if (p.block_mask.data != nullptr) {
    features |= kBlockMask;
    if (std::min(p.block_size_q, p.block_size_k) < kLargeBlock) features |= kSmallBlocks;
  }
  if (p.key_ranges.data != nullptr) features |= kKeyRanges;
  if (p.dropout_threshold != 0) features |= kDropout;
  return features;
}

}  // namespace

Problem problem_of(Op op, const TensorView& q, const Attention& attention, CpuIsa cpu_isa) {
  Problem problem;
  problem.op = op;
  problem.device = q.device;
  problem.dtype = q.dtype;
  problem.head_dim = attention.head_dim;
  problem.head_dim_v = attention.head_dim_v;
  problem.features = features_of(attention);
  problem.cpu_isa = cpu_isa;
  if (op == Op::kBackward) {
    problem.rows = attention.seqlen_k;
    problem.pairs =
        attention.batch * attention.heads_k * gqa_splits(attention.heads, attention.heads_k);
  } else {
    problem.rows = attention.seqlen_q;
    problem.pairs = attention.batch * attention.heads;
  }
  problem.bounded = attention.window.is_bounded();
  problem.positive_scale = attention.softmax_scale >= kLeastScale;
  return problem;
}

Problem problem_of(const TensorView& q, const KvCacheParams& params, CpuIsa cpu_isa) {
  Problem problem = problem_of(Op::kDecode, q, params.attention, cpu_isa);
  if (params.cache_dtype != q.dtype) problem.features |= kQuantizedCache;
  problem.rows = query_rows(params.attention);
  problem.latent = params.latent;
  return problem;
}

const KernelDescriptor& select_kernel(const Problem& problem) {
  return problem.device.type == DeviceType::kCpu ? select_cpu_kernel(problem)
                                                 : select_gpu_kernel(problem);
}

}  // namespace anyflash
