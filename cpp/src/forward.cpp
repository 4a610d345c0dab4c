// ForwardPlan: validate, plan, and launch. The plan says which kernel runs, what is repacked before
// and after, and how the workspace is divided. It follows from the arguments, of which no element
// is read, the device, and the process's settings (prefer_kernel.h, OpenMP's threads).
#include "anyflash/attention.h"
#include "arguments.h"
#include "device.h"
#include "plan.h"
#include "repack.h"
#include "side_outputs.h"
#include "validate.h"

namespace anyflash {

struct ForwardPlan::State : KernelPlan {
  State(const ForwardTensors& t, const ForwardOptions& options)
      : params(validate_forward(t, options)), longest{options.max_seqlen_q, options.max_seqlen_k} {
    const Attention& a = params.attention;
    select(problem_of(Op::kForward, t.q, a, options.cpu_isa), options);
    // Packed sequences: seqlen_q is not larger than total_q.
    empty = a.batch == 0 || a.seqlen_q == 0 || leaves_prior();
    if (options.dropout_mask != nullptr) dropout_mask = *options.dropout_mask;
    if (on_gpu) plan_copies(t);
    reserve_scratch(kernel->forward, params);
  }

  // Whether the result is the prior one, which is there.
  bool leaves_prior() const {
    const ForwardParams& p = params;
    const bool in_place = p.prior.out != nullptr && p.prior.out == p.out &&
                          p.prior.out_dtype == p.out_dtype &&
                          (p.lse == nullptr || p.lse == p.prior.lse);
    return in_place && p.attention.sinks.data == nullptr && hides_all_keys(p.attention);
  }

  void plan_copies(const ForwardTensors& t) {
    const bool packed = params.attention.cu_seqlens_q != nullptr;
    const auto plan = [&](const TensorView& tensor) {
      return plan_repack(with_batch(tensor, packed), kernel->family->input_rules, bytes);
    };
    q = plan(t.q);
    k = plan(t.k);
    v = plan(t.v);
    // float32 results of 16-bit inputs are written element by element, wherever they lie.
    if (t.out.dtype == t.q.dtype) out = plan(t.out);
  }

  SideOutputs side_outputs() const {
    SideOutputs outputs;
    outputs.params = params;
    const TensorView& t = dropout_mask;
    outputs.dropout_mask = static_cast<unsigned char*>(t.data);
    outputs.dropout_mask_stride = {t.stride[0], t.stride[2], t.stride[1], t.stride[3]};
    outputs.dropout_mask_rows = t.shape[2];
    outputs.dropout_mask_columns = t.shape[3];
    return outputs;
  }

  void launch_on_gpu(const LaunchContext& context, char* workspace) const {
    ForwardParams p = params;
    Attention& a = p.attention;
    void* const stream = context.stream;
    repack_input(q, workspace, stream, a.q, a.q_stride);
    repack_input(k, workspace, stream, a.k, a.k_stride);
    repack_input(v, workspace, stream, a.v, a.v_stride);
    const bool packed = a.cu_seqlens_q != nullptr;
    redirect_output(out, packed, workspace, stream, p.out, p.out_stride);
    // Results that are not repacked have no room for columns that only round up.
    if (q.needed) a.head_dim = q.columns;
    if (out.needed) a.head_dim_v = out.columns;
    kernel->forward.launch(p, context);
    write_back(out, workspace, stream);
  }

  ForwardParams params;
  LongestSequences longest;
  TensorView dropout_mask;  // no data: not wanted
  Repacked q, k, v, out;
};

ForwardPlan::ForwardPlan(const ForwardTensors& tensors, const ForwardOptions& options) {
  emplace_state<State>(state_, tensors, options);
}

std::size_t ForwardPlan::workspace_bytes() const {
  return size_with_slack(state_in<State>(state_).bytes);
}

void ForwardPlan::run(Workspace workspace, void* stream) const {
  const State& state = state_in<State>(state_);
  char* const base = first_piece(workspace, state.bytes);
  const ForwardParams& params = state.params;
  if (state.checks_lengths) check_lengths(params.attention, state.longest, state.device, stream);

  const LaunchContext context = state.context(base, stream);
  const bool fills = state.dropout_mask.data != nullptr || params.max_logits != nullptr;
  if (state.on_gpu) {
    const DeviceGuard guard(state.device.index);
    if (fills) fill_side_outputs(state.side_outputs(), stream);
    if (!state.empty) state.launch_on_gpu(context, base);
  } else {
    if (fills) fill_side_outputs_on_cpu(state.side_outputs(), state.num_threads);
    if (!state.empty) state.kernel->forward.launch(params, context);
  }
  if (!state.empty) count_launch(*state.kernel);
}

}  // namespace anyflash
