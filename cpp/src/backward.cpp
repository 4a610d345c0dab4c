// BackwardPlan: validate, plan, and launch, as forward.cpp.
#include "anyflash/attention.h"
#include "arguments.h"
#include "device.h"
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

}  // namespace

struct BackwardPlan::State : KernelPlan {
  State(const BackwardTensors& t, const ForwardOptions& options, const BackwardOptions& wanted)
      : params(validate_backward(t, options, wanted)),
        longest{options.max_seqlen_q, options.max_seqlen_k} {
    const Attention& a = params.attention;
    select(problem_of(Op::kBackward, t.q, a, options.cpu_isa), options);
    // Small gradients are zero where there are no rows, keys or sequences: something to write.
    const bool rows = a.batch > 0 && (a.seqlen_q > 0 || a.seqlen_k > 0);
    const bool small = has_elements(wanted.dbias) || has_elements(wanted.dsinks) ||
                       has_elements(wanted.dalibi_slopes);
    const bool adds_nothing =
        params.accumulates_dq && params.accumulates_dkv && hides_all_keys(params.attention);
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
    dq = plan(t.dq);
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
