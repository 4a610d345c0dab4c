// forward_with_kvcache(): validate, plan, append and launch, as forward.cpp. Nothing is repacked:
// the kernels take any strides.
#include "anyflash/attention.h"
#include "append.h"
#include "arguments.h"
#include "describe.h"
#include "device.h"
#include "heuristics.h"
#include "plan.h"
#include "validate.h"

namespace anyflash {

namespace {

struct KvCachePlan : KernelPlan {
  KvCachePlan(const KvCacheTensors& t, const ForwardOptions& options,
              const KvCacheOptions& cache_options)
      : append(validate_kvcache(t, options, cache_options)) {
    KvCacheParams& params = append.cache;
    select(problem_of(t.q, params, options.cpu_isa), options);
    empty = params.attention.batch == 0 || params.attention.seqlen_q == 0;
    rotates_q = append.rotary_cos.data != nullptr && !empty;
    appends = params.attention.batch > 0 && params.seqlen_new > 0;
    if (params.num_splits == 0) {
      params.num_splits =
          gpu != nullptr ? splits_for(*gpu) : decode_num_splits_on_cpu(params.attention);
    }
    decode = params;
    if (rotates_q) reserve_rotated_q(bytes_of(t.q.dtype));
    reserve_scratch(kernel->decode, decode);
  }

  int splits_for(const DeviceProperties& device) const {
    return decode_num_splits(append.cache.attention, kernel->tile, resident_ctas(*kernel, device),
                             std::max(device.multiprocessors, 1));
  }

  // Rows that begin at multiples of 32 bytes, for the kernels that read them.
  void reserve_rotated_q(int bytes_per_element) {
    const KvCacheParams& params = append.cache;
    const int64_t columns = (int64_t{params.attention.head_dim} + 15) / 16 * 16;
    const int64_t row_elements = columns * params.attention.heads;
    const int64_t elements = params.attention.batch * params.attention.seqlen_q * row_elements;
    append.rotated_q_stride = {params.attention.seqlen_q * row_elements, row_elements, columns, 1};
    decode.attention.q_stride = append.rotated_q_stride;
    rotated_q_offset = reserve(
        bytes, static_cast<std::size_t>(elements) * static_cast<unsigned>(bytes_per_element));
  }

  AppendParams append;
  KvCacheParams decode;  // with q's strides after the rotation
  bool rotates_q = false;
  bool appends = false;
  std::size_t rotated_q_offset = 0;
};

void launch(const KvCachePlan& plan, const LaunchContext& context, char* workspace, bool cuda) {
  AppendParams append = plan.append;
  KvCacheParams decode = plan.decode;
  if (plan.rotates_q) decode.attention.q = append.rotated_q = workspace + plan.rotated_q_offset;
  if (plan.appends || plan.rotates_q) {
    if (cuda) {
      append_to_cache(append, context.stream);
    } else {
      append_to_cache_on_cpu(append, context.num_threads);
    }
  }
  if (plan.empty) return;
  plan.kernel->decode.launch(decode, context);
  count_launch(*plan.kernel);
}

}  // namespace

std::size_t forward_with_kvcache_workspace_size(const TensorView& q, const TensorView& k_cache,
                                                const TensorView& v_cache, const TensorView& out,
                                                const TensorView* lse,
                                                const ForwardOptions& options,
                                                const KvCacheOptions& cache_options) {
  return size_with_slack(
      KvCachePlan({q, k_cache, v_cache, out, lse}, options, cache_options).bytes);
}

void forward_with_kvcache(const TensorView& q, const TensorView& k_cache, const TensorView& v_cache,
                          const TensorView& out, const TensorView* lse,
                          const ForwardOptions& options, const KvCacheOptions& cache_options,
                          Workspace workspace) {
  const KvCachePlan plan({q, k_cache, v_cache, out, lse}, options, cache_options);
  char* const base = first_piece(workspace, plan.bytes, "forward_with_kvcache_workspace_size");
  const bool cuda = q.device.type == DeviceType::kCuda;
  if (!cuda || options.validate) check_kvcache_lengths(plan.append, options, q.device);

  const LaunchContext context = plan.context(options, base);
  if (cuda) {
    const DeviceGuard guard(q.device.index);
    launch(plan, context, base, cuda);
  } else {
    launch(plan, context, base, cuda);
  }
}

}  // namespace anyflash
