// forward(): validate, plan, and launch. The plan says which kernel runs, what is repacked before
// and after, and how the workspace is divided; it depends on shapes, strides and alignment only.
#include "anyflash/attention.h"
#include "arguments.h"
#include "describe.h"
#include "device.h"
#include "plan.h"
#include "repack.h"
#include "side_outputs.h"
#include "validate.h"

namespace anyflash {

namespace {

struct ForwardPlan : KernelPlan {
  ForwardPlan(const TensorView& q_, const TensorView& k_, const TensorView& v_,
              const TensorView& out_, const TensorView* lse, const ForwardOptions& options)
      : params(validate_forward(q_, k_, v_, out_, lse, options)) {
    select(problem_of(Op::kForward, q_, params.attention, options.cpu_isa), options);
    // Packed sequences: seqlen_q is not larger than total_q.
    empty = params.attention.batch == 0 || params.attention.seqlen_q == 0;
    if (gpu != nullptr) {
      const auto plan = [&](const TensorView& tensor) {
        const bool packed = params.attention.cu_seqlens_q != nullptr;
        return plan_repack(with_batch(tensor, packed), kernel->family->input_rules, bytes);
      };
      q = plan(q_);
      k = plan(k_);
      v = plan(v_);
      // float32 results of 16-bit inputs are written element by element, wherever they lie.
      if (out_.dtype == q_.dtype) out = plan(out_);
    }
    reserve_scratch(kernel->forward, params);
  }

  ForwardParams params;
  Repacked q, k, v, out;
};

SideOutputs side_outputs_of(const ForwardParams& params, const ForwardOptions& options) {
  SideOutputs outputs;
  outputs.params = params;
  if (options.dropout_mask != nullptr) {
    const TensorView& t = *options.dropout_mask;
    outputs.dropout_mask = static_cast<unsigned char*>(t.data);
    outputs.dropout_mask_stride = {t.stride[0], t.stride[2], t.stride[1], t.stride[3]};
    outputs.dropout_mask_rows = t.shape[2];
    outputs.dropout_mask_columns = t.shape[3];
  }
  return outputs;
}

void launch_cuda(const ForwardPlan& plan, const LaunchContext& context, char* workspace) {
  ForwardParams params = plan.params;
  void* const stream = context.stream;
  repack_input(plan.q, workspace, stream, params.attention.q, params.attention.q_stride);
  repack_input(plan.k, workspace, stream, params.attention.k, params.attention.k_stride);
  repack_input(plan.v, workspace, stream, params.attention.v, params.attention.v_stride);
  redirect_output(plan.out, params.attention.cu_seqlens_q != nullptr, workspace, stream, params.out,
                  params.out_stride);
  // Results that are not repacked have no room for columns that only round up.
  if (plan.q.needed) params.attention.head_dim = plan.q.columns;
  if (plan.out.needed) params.attention.head_dim_v = plan.out.columns;
  plan.kernel->forward.launch(params, context);
  write_back(plan.out, workspace, stream);
}

void run(const ForwardPlan& plan, const Device& device, const ForwardOptions& options,
         Workspace workspace) {
  char* const base = first_piece(workspace, plan.bytes, "forward_workspace_size");
  const bool cuda = device.type == DeviceType::kCuda;
  if (!cuda || options.validate) check_lengths(plan.params.attention, options, device);

  const LaunchContext context = plan.context(options, base);
  const bool has_side_outputs = options.dropout_mask != nullptr || options.max_logits != nullptr;
  if (cuda) {
    const DeviceGuard guard(device.index);
    if (has_side_outputs) {
      fill_side_outputs(side_outputs_of(plan.params, options), options.stream);
    }
    if (!plan.empty) launch_cuda(plan, context, base);
  } else {
    if (has_side_outputs) {
      fill_side_outputs_on_cpu(side_outputs_of(plan.params, options), plan.num_threads);
    }
    if (!plan.empty) plan.kernel->forward.launch(plan.params, context);
  }
  if (!plan.empty) count_launch(*plan.kernel);
}

}  // namespace

std::size_t forward_workspace_size(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const TensorView& out, const TensorView* lse,
                                   const ForwardOptions& options) {
  return size_with_slack(ForwardPlan(q, k, v, out, lse, options).bytes);
}

void forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
             const TensorView* lse, const ForwardOptions& options, Workspace workspace) {
  run(ForwardPlan(q, k, v, out, lse, options), q.device, options, workspace);
}

void forward_with_allocator(const TensorView& q, const TensorView& k, const TensorView& v,
                            const TensorView& out, const TensorView* lse,
                            const ForwardOptions& options,
                            const std::function<Workspace(std::size_t)>& allocate) {
  const ForwardPlan plan(q, k, v, out, lse, options);
  const std::size_t bytes = size_with_slack(plan.bytes);
  run(plan, q.device, options, bytes == 0 ? Workspace{} : allocate(bytes));
}

}  // namespace anyflash
