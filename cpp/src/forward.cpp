// forward(): validate, plan, and launch. The plan says which kernel runs, what is repacked before
// and after, and how the workspace is divided; it depends on shapes, strides and alignment only.
#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "anyflash/attention.h"
#include "arguments.h"
#include "copy_rows.h"
#include "describe.h"
#include "device.h"
#include "heuristics.h"
#include "kernel_table.h"
#include "side_outputs.h"
#include "validate.h"

namespace anyflash {

namespace {

constexpr std::size_t kAlignment = 256;  // of the workspace and of every piece of it
constexpr int kVectorBytes = 16;         // what the CUDA kernels load and store at once
constexpr int64_t kMaxTileRows = 256;    // no kernel's tile has more

// A tensor that the kernel reads or writes in the workspace instead.
struct Repacked {
  bool needed = false;
  std::size_t offset = 0;
  CopyRowsParams copy;  // the end that lies in the workspace is filled in once its address is known
};

struct ForwardPlan {
  ForwardParams params;
  SideOutputs side_outputs;
  const KernelRow* row = nullptr;
  int num_threads = 1;
  Repacked q, k, v, out;
  std::size_t scratch_offset = 0;
  std::size_t scratch_bytes = 0;
  std::size_t bytes = 0;

  // Packed sequences: seqlen_q is not larger than total_q.
  bool empty() const { return params.batch == 0 || params.seqlen_q == 0; }
};

unsigned features_of(const ForwardParams& p) {
  unsigned features = kNoFeatures;
  if (p.softcap != 0.0) features |= kSoftcap;
  if (p.alibi_slopes.data != nullptr) features |= kAlibi;
  if (p.bias.data != nullptr) features |= kBias;
  if (p.block_mask.data != nullptr) features |= kBlockMask;
  if (p.dropout_threshold != 0) features |= kDropout;
  return features;
}

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

std::size_t reserve(std::size_t& total, std::size_t bytes) {
  const std::size_t offset = total;
  total += (bytes + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

// Whether the CUDA kernels can read or write the tensor as it is: pieces of 16 bytes, and offsets
// within a tile that fit in 32 bits.
bool fits_kernel(const TensorView& t) {
  const int64_t elements = kVectorBytes / bytes_of(t.dtype);
  if (std::abs(t.stride[1]) > INT32_MAX / kMaxTileRows) return false;
  if (reinterpret_cast<std::uintptr_t>(t.data) % kVectorBytes != 0) return false;
  if (t.shape[3] % elements != 0 || t.stride[3] != 1) return false;
  for (int i = 0; i < 3; ++i) {
    if (t.shape[i] > 1 && t.stride[i] % elements != 0) return false;
  }
  return true;
}

// Plans a contiguous copy with whole 16-byte rows, if the tensor needs one.
Repacked plan_repack(const TensorView& t, std::size_t& total) {
  Repacked repacked;
  if (fits_kernel(t)) return repacked;
  const int64_t elements = kVectorBytes / bytes_of(t.dtype);
  const int64_t columns = (t.shape[3] + elements - 1) / elements * elements;
  repacked.needed = true;
  repacked.offset = reserve(total, static_cast<std::size_t>(t.shape[0] * t.shape[1] * t.shape[2] *
                                                            columns * bytes_of(t.dtype)));
  CopyRowsParams& copy = repacked.copy;
  copy.source = t.data;
  copy.source_stride = {t.stride[0], t.stride[1], t.stride[2], t.stride[3]};
  copy.target_stride = {t.shape[1] * t.shape[2] * columns, t.shape[2] * columns, columns, 1};
  copy.batch = t.shape[0];
  copy.rows = t.shape[1];
  copy.heads = t.shape[2];
  copy.source_columns = static_cast<int>(t.shape[3]);
  copy.target_columns = static_cast<int>(columns);
  return repacked;
}

ForwardPlan plan_forward(const TensorView& q, const TensorView& k, const TensorView& v,
                         const TensorView& out, const TensorView* lse,
                         const ForwardOptions& options) {
  ForwardPlan plan;
  plan.params = validate_forward(q, k, v, out, lse, options);
  const ForwardParams& p = plan.params;
  plan.side_outputs = side_outputs_of(p, options);
  plan.row = &select_forward(
      {q.device, q.dtype, p.head_dim, p.head_dim_v, features_of(p), options.cpu_isa});
  if (q.device.type == DeviceType::kCuda) {
    const bool packed = p.cu_seqlens_q != nullptr;
    plan.q = plan_repack(with_batch(q, packed), plan.bytes);
    plan.k = plan_repack(with_batch(k, packed), plan.bytes);
    plan.v = plan_repack(with_batch(v, packed), plan.bytes);
    // float32 results of 16-bit inputs are written element by element, wherever they lie.
    if (out.dtype == q.dtype) plan.out = plan_repack(with_batch(out, packed), plan.bytes);
    plan.params.heads_per_section = heads_per_section(plan.params, bytes_of(q.dtype),
                                                      device_properties(q.device.index).l2_bytes);
  } else {
    plan.num_threads = options.num_threads > 0 ? options.num_threads : omp_get_max_threads();
  }
  plan.scratch_bytes = plan.empty() ? 0 : plan.row->scratch_bytes(plan.params, plan.num_threads);
  plan.scratch_offset = reserve(plan.bytes, plan.scratch_bytes);
  return plan;
}

// Copies an input to its place in the workspace and points the kernel there.
void repack_input(Repacked& repacked, char* workspace, void* stream, const void*& data,
                  Strides& stride, int& columns) {
  if (!repacked.needed) return;
  repacked.copy.target = workspace + repacked.offset;
  copy_rows(repacked.copy, stream);
  data = repacked.copy.target;
  stride = repacked.copy.target_stride;
  columns = repacked.copy.target_columns;
}

void launch_cuda(ForwardPlan& plan, const LaunchContext& context, char* workspace) {
  ForwardParams& params = plan.params;
  int columns_k = params.head_dim;
  // Results that are not repacked have no room for columns that only round up.
  int columns_v = params.head_dim_v;
  repack_input(plan.q, workspace, context.stream, params.q, params.q_stride, params.head_dim);
  repack_input(plan.k, workspace, context.stream, params.k, params.k_stride, columns_k);
  repack_input(plan.v, workspace, context.stream, params.v, params.v_stride, columns_v);
  if (!plan.out.needed) {
    plan.row->launch(params, context);
    return;
  }
  // The copy was planned from `out` to the workspace; it runs the other way.
  CopyRowsParams copy = plan.out.copy;
  std::swap(copy.source_stride, copy.target_stride);
  copy.target = params.out;
  copy.source = params.out = workspace + plan.out.offset;
  copy.target_columns = copy.source_columns;
  params.out_stride = copy.source_stride;
  params.head_dim_v = columns_v;
  plan.row->launch(params, context);
  copy_rows(copy, context.stream);
}

}  // namespace

std::size_t forward_workspace_size(const TensorView& q, const TensorView& k, const TensorView& v,
                                   const TensorView& out, const TensorView* lse,
                                   const ForwardOptions& options) {
  return plan_forward(q, k, v, out, lse, options).bytes;
}

void forward(const TensorView& q, const TensorView& k, const TensorView& v, const TensorView& out,
             const TensorView* lse, const ForwardOptions& options, Workspace workspace) {
  ForwardPlan plan = plan_forward(q, k, v, out, lse, options);
  if (workspace.bytes < plan.bytes) {
    throw Error(ErrorCode::kInvalidValue, "workspace has " + std::to_string(workspace.bytes) +
                                              " bytes; " + std::to_string(plan.bytes) +
                                              " are needed (forward_workspace_size)");
  }
  if (plan.bytes > 0 && workspace.data == nullptr) {
    throw Error(ErrorCode::kInvalidValue, "workspace has a null data pointer");
  }
  if (plan.bytes > 0 && reinterpret_cast<std::uintptr_t>(workspace.data) % kAlignment != 0) {
    throw Error(ErrorCode::kInvalidValue, "workspace is not aligned to 256 bytes");
  }
  const bool cuda = q.device.type == DeviceType::kCuda;
  if (!cuda || options.validate) check_lengths(plan.params, options, q.device);

  auto* const base = static_cast<char*>(workspace.data);
  LaunchContext context;
  context.num_threads = plan.num_threads;
  context.stream = options.stream;
  context.scratch = base + plan.scratch_offset;
  context.scratch_bytes = plan.scratch_bytes;
  if (cuda) {
    const DeviceGuard guard(q.device.index);
    fill_side_outputs(plan.side_outputs, options.stream);
    if (!plan.empty()) launch_cuda(plan, context, base);
  } else {
    fill_side_outputs_on_cpu(plan.side_outputs, plan.num_threads);
    if (!plan.empty()) plan.row->launch(plan.params, context);
  }
  if (!plan.empty()) count_launch(*plan.row);
}

}  // namespace anyflash
