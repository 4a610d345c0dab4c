// What a call asks of a kernel.
#include "heuristics.h"
#include "kernel_table.h"

namespace anyflash {

namespace {

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

}  // namespace

Problem problem_of(Op op, const TensorView& q, const ForwardParams& params, CpuIsa cpu_isa) {
  const unsigned features = features_of(params);
  Problem problem{op, q.device, q.dtype, params.head_dim, params.head_dim_v, features, cpu_isa};
  if (op == Op::kBackward) {
    problem.rows = params.seqlen_k;
    problem.pairs = params.batch * params.heads_k * gqa_splits(params.heads, params.heads_k);
  } else {
    problem.rows = params.seqlen_q;
    problem.pairs = params.batch * params.heads;
  }
  problem.bounded = params.window.left >= 0 || params.window.right >= 0;
  problem.positive_scale = params.softmax_scale >= kLeastScale;
  return problem;
}

Problem problem_of(const TensorView& q, const KvCacheParams& params, CpuIsa cpu_isa) {
  Problem problem = problem_of(Op::kDecode, q, params, cpu_isa);
  if (params.cache_dtype != q.dtype) problem.features |= kQuantizedCache;
  problem.rows = query_rows(params);
  return problem;
}

const KernelDescriptor& select_kernel(const Problem& problem) {
  return problem.device.type == DeviceType::kCpu ? select_cpu_kernel(problem)
                                                 : select_gpu_kernel(problem);
}

}  // namespace anyflash
