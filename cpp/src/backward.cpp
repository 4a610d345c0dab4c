// BackwardPlan: validate, plan, and launch, as forward.cpp.
#include <cstdint>
#include <string>

#include "anyflash/attention.h"
#include "arguments.h"
#include "describe.h"
#include "device.h"
#include "kernel_table.h"
#include "plan.h"
#include "repack.h"
#include "validate.h"

namespace anyflash {

namespace {

bool has_elements(const TensorView* t) {
  if (t == nullptr) return false;
  for (int i = 0; i < t->rank; ++i) {
    if (t->shape[i] == 0) return false;
  }
  return true;
}

// The kernel keeps sums of such a call, and their memory is large enough.
void check_dq_sums(const KernelDescriptor& kernel, const BackwardParams& p, DType dtype) {
  const bool has_other_types = p.dout_dtype != dtype || p.out_dtype != dtype;
  const bool asks_more = p.deterministic || has_other_types ||
                         p.attention.alibi_slopes.data != nullptr ||
                         p.attention.dropout_threshold != 0;
  if (kernel.dq_sums_bytes == nullptr || (kernel.family->is_gpu() && asks_more)) {
    throw Error(ErrorCode::kUnsupported,
                std::string("dq_sums is given, but ") + kernel.name +
                    " keeps no sums of such a call (BackwardOptions::dq_sums says of which)");
  }
  const int64_t needed = static_cast<int64_t>(kernel.dq_sums_bytes(p));
  if (p.dq_sums.bytes < needed) {
    invalid_value("dq_sums has " + std::to_string(p.dq_sums.bytes) + " bytes; " +
                  std::to_string(needed) + " are needed");
  }
}

}  // namespace

struct BackwardPlan::State : KernelPlan {
  State(const BackwardTensors& t, const ForwardOptions& options, const BackwardOptions& wanted)
      : params(validate_backward(t, options, wanted)),
        longest{options.max_seqlen_q, options.max_seqlen_k} {
    const Attention& a = params.attention;
    select(problem_of(Op::kBackward, t.q, a, options.cpu_isa), options);
    if (params.dq_sums.data != nullptr) check_dq_sums(*kernel, params, t.q.dtype);
    // Small gradients are zero where there are no rows, keys or sequences: something to write.
    const bool rows = a.batch > 0 && (a.seqlen_q > 0 || a.seqlen_k > 0);
    const bool small = has_elements(wanted.dbias) || has_elements(wanted.dsinks) ||
                       has_elements(wanted.dalibi_slopes);
    const bool leaves_dq = params.dq_sums.data == nullptr
                               ? params.accumulates_dq
                               : !params.begins_dq() && !params.ends_dq();
    const bool adds_nothing =
        leaves_dq && params.accumulates_dkv && hides_all_keys(params.attention);
    empty = (!rows || adds_nothing) && !small;
    if (on_gpu) plan_copies(t);
    reserve_scratch(kernel->backward, params);
  }

  void plan_copies(const BackwardTensors& t) {
    const bool packed = params.attention.cu_seqlens_q != nullptr;
    // float32 tensors beside 16-bit ones are read and written element by element, wherever they
    // lie.
    const auto plan = [&](const TensorView& tensor) {
      if (tensor.dtype != t.q.dtype) return Repacked{};
      return plan_repack(with_batch(tensor, packed), kernel->family->input_rules, bytes);
    };
    q = plan(t.q);
    k = plan(t.k);
    v = plan(t.v);
    out = plan(t.out);
    dout = plan(t.dout);
    if (params.ends_dq()) dq = plan(t.dq);
    dk = plan(t.dk);
    dv = plan(t.dv);
  }

  // head_dim and head_dim_v remain the tensors'. Kernels treat a piece of 16 bytes as one that
  // exists if its first column does. Copies have room for whole pieces, with zeros.
  void launch_on_gpu(const LaunchContext& context, char* workspace) const {
    BackwardParams p = params;
    Attention& a = p.attention;
    const bool packed = a.cu_seqlens_q != nullptr;
    const auto input = [&](const Repacked& repacked, const void*& data, Strides& stride) {
      repack_input(repacked, workspace, context.stream, data, stride);
    };
    const auto output = [&](const Repacked& repacked, void*& data, Strides& stride) {
      redirect_output(repacked, packed, workspace, context.stream, data, stride);
    };
    input(q, a.q, a.q_stride);
    input(k, a.k, a.k_stride);
    input(v, a.v, a.v_stride);
    input(out, p.out, p.out_stride);
    input(dout, p.dout, p.dout_stride);
    output(dq, p.dq, p.dq_stride);
    output(dk, p.dk, p.dk_stride);
    output(dv, p.dv, p.dv_stride);
    kernel->backward.launch(p, context);
    for (const Repacked* gradient : {&dq, &dk, &dv}) {
      write_back(*gradient, workspace, context.stream);
    }
  }

  BackwardParams params;
  LongestSequences longest;
  Repacked q, k, v, out, dout, dq, dk, dv;
};

BackwardPlan::BackwardPlan(const BackwardTensors& tensors, const ForwardOptions& options,
                           const BackwardOptions& backward_options) {
  emplace_state<State>(state_, tensors, options, backward_options);
}

std::size_t BackwardPlan::workspace_bytes() const {
  return size_with_slack(state_in<State>(state_).bytes);
}

std::size_t BackwardPlan::dq_sums_bytes(const TensorView& q, int64_t head_dim_v,
                                        const ForwardOptions& options) {
  check_rank(q, "q", 4, "(batch, rows, heads, head_dim)");
  check_heads(q, q, "q");
  for (const int64_t extent : {q.shape[1], q.shape[2], q.shape[3], head_dim_v}) {
    if (extent < 0 || extent > kMaxExtent) {
      invalid_value("q has shape " + shape_of(q) + ", and head_dim_v is " +
                    std::to_string(head_dim_v) + "; at most " + std::to_string(kMaxExtent) +
                    " is allowed");
    }
  }
  BackwardParams params;
  Attention& a = params.attention;
  a.batch = q.shape[0];
  a.heads = a.heads_k = static_cast<int>(q.shape[2]);
  a.head_dim = static_cast<int>(q.shape[3]);
  a.head_dim_v = static_cast<int>(head_dim_v);
  a.softcap = options.softcap;
  if (options.softmax_scale.has_value()) a.softmax_scale = *options.softmax_scale;
  params.dq_sums.rows = q.shape[1];
  const KernelDescriptor& kernel = select_kernel(problem_of(Op::kBackward, q, a, options.cpu_isa));
  return kernel.dq_sums_bytes == nullptr ? 0 : kernel.dq_sums_bytes(params);
}

void BackwardPlan::run(Workspace workspace, void* stream) const {
  const State& state = state_in<State>(state_);
  char* const base = first_piece(workspace, state.bytes);
  if (state.checks_lengths) {
    check_lengths(state.params.attention, state.longest, state.device, stream);
  }
  if (state.empty) return;

  const LaunchContext context = state.context(base, stream);
  if (state.on_gpu) {
    const DeviceGuard guard(state.device.index);
    state.launch_on_gpu(context, base);
  } else {
    state.kernel->backward.launch(state.params, context);
  }
  count_launch(*state.kernel);
}

}  // namespace anyflash
