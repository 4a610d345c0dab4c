// KvCachePlan: validate, plan, append and launch, as forward.cpp. Nothing is repacked:
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

struct KvCachePlan::State : KernelPlan {
  State(const KvCacheTensors& t, const ForwardOptions& options, const KvCacheOptions& cache_options)
      : append(validate_kvcache(t, options, cache_options)) {
    KvCacheParams& params = append.cache;
    select(problem_of(t.q, params, options.cpu_isa), options);
    empty = params.attention.batch == 0 || params.attention.seqlen_q == 0;
    rotates_q = append.rotary_cos.data != nullptr && !empty;
    appends = params.attention.batch > 0 && params.seqlen_new > 0;
    if (params.num_splits == 0) {
      params.num_splits = on_gpu ? splits_for(device_properties(device.index))
                                 : decode_num_splits_on_cpu(params.attention);
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

  void launch(const LaunchContext& context, char* workspace) const {
    AppendParams appended = append;
    KvCacheParams attended = decode;
    if (rotates_q) attended.attention.q = appended.rotated_q = workspace + rotated_q_offset;
    if (appends || rotates_q) {
      if (on_gpu) {
        append_to_cache(appended, context.stream);
      } else {
        append_to_cache_on_cpu(appended, context.num_threads);
      }
    }
    if (empty) return;
    kernel->decode.launch(attended, context);
    count_launch(*kernel);
  }

  AppendParams append;
  KvCacheParams decode;  // with q's strides after the rotation
  bool rotates_q = false;
  bool appends = false;
  std::size_t rotated_q_offset = 0;
};

KvCachePlan::KvCachePlan(const KvCacheTensors& tensors, const ForwardOptions& options,
                         const KvCacheOptions& cache_options) {
  emplace_state<State>(state_, tensors, options, cache_options);
}

std::size_t KvCachePlan::workspace_bytes() const {
  return size_with_slack(state_in<State>(state_).bytes);
}

void KvCachePlan::run(Workspace workspace, void* stream) const {
  const State& state = state_in<State>(state_);
  char* const base = first_piece(workspace, state.bytes);
  if (state.checks_lengths) check_kvcache_lengths(state.append, state.device, stream);

  const LaunchContext context = state.context(base, stream);
  if (state.on_gpu) {
    const DeviceGuard guard(state.device.index);
    state.launch(context, base);
  } else {
    state.launch(context, base);
  }
}

}  // namespace anyflash
