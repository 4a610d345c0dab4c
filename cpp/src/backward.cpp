// backward(): validate, plan, and launch, as forward.cpp.
#include "anyflash/attention.h"
#include "arguments.h"
#include "describe.h"
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

struct BackwardPlan : KernelPlan {
  BackwardPlan(const BackwardTensors& t, const ForwardOptions& options,
               const BackwardOptions& wanted)
      : params(validate_backward(t, options, wanted)) {
    select(problem_of(Op::kBackward, t.q, params.attention, options.cpu_isa), options);
    // Small gradients are zero where there are no rows, keys or sequences: something to write.
    const bool rows = params.attention.batch > 0 &&
                      (params.attention.seqlen_q > 0 || params.attention.seqlen_k > 0);
    empty = !rows && !has_elements(wanted.dbias) && !has_elements(wanted.dsinks) &&
            !has_elements(wanted.dalibi_slopes);
    if (gpu != nullptr) plan_copies(t);
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

  BackwardParams params;
  Repacked q, k, v, out, dout, dq, dk, dv;
};

// head_dim and head_dim_v remain the tensors': kernels treat a piece of 16 bytes as one that exists
// if its first column does, and copies have room for whole pieces, with zeros.
void launch_cuda(const BackwardPlan& plan, const LaunchContext& context, char* workspace) {
  BackwardParams params = plan.params;
  const bool packed = params.attention.cu_seqlens_q != nullptr;
  const auto input = [&](const Repacked& repacked, const void*& data, Strides& stride) {
    repack_input(repacked, workspace, context.stream, data, stride);
  };
  const auto output = [&](const Repacked& repacked, void*& data, Strides& stride) {
    redirect_output(repacked, packed, workspace, context.stream, data, stride);
  };
  input(plan.q, params.attention.q, params.attention.q_stride);
  input(plan.k, params.attention.k, params.attention.k_stride);
  input(plan.v, params.attention.v, params.attention.v_stride);
  input(plan.out, params.out, params.out_stride);
  input(plan.dout, params.dout, params.dout_stride);
  output(plan.dq, params.dq, params.dq_stride);
  output(plan.dk, params.dk, params.dk_stride);
  output(plan.dv, params.dv, params.dv_stride);
  plan.kernel->backward.launch(params, context);
  for (const Repacked* gradient : {&plan.dq, &plan.dk, &plan.dv}) {
    write_back(*gradient, workspace, context.stream);
  }
}

}  // namespace

std::size_t backward_workspace_size(const TensorView& dout, const TensorView& q,
                                    const TensorView& k, const TensorView& v, const TensorView& out,
                                    const TensorView& lse, const TensorView& dq,
                                    const TensorView& dk, const TensorView& dv,
                                    const ForwardOptions& options,
                                    const BackwardOptions& backward_options) {
  return size_with_slack(
      BackwardPlan({dout, q, k, v, out, lse, dq, dk, dv}, options, backward_options).bytes);
}

void backward(const TensorView& dout, const TensorView& q, const TensorView& k, const TensorView& v,
              const TensorView& out, const TensorView& lse, const TensorView& dq,
              const TensorView& dk, const TensorView& dv, const ForwardOptions& options,
              const BackwardOptions& backward_options, Workspace workspace) {
  const BackwardPlan plan({dout, q, k, v, out, lse, dq, dk, dv}, options, backward_options);
  char* const base = first_piece(workspace, plan.bytes, "backward_workspace_size");
  const bool cuda = q.device.type == DeviceType::kCuda;
  if (!cuda || options.validate) check_lengths(plan.params.attention, options, q.device);
  if (plan.empty) return;

  const LaunchContext context = plan.context(options, base);
  if (cuda) {
    const DeviceGuard guard(q.device.index);
    launch_cuda(plan, context, base);
  } else {
    plan.kernel->backward.launch(plan.params, context);
  }
  count_launch(*plan.kernel);
}

}  // namespace anyflash
