// merge_states(): validation and launch.
#include "merge_states.h"

#include <string>

#include "anyflash/attention.h"
#include "arguments.h"
#include "describe.h"
#include "device.h"
#include "kernel_table.h"
#include "threads.h"

namespace anyflash {

namespace {

constexpr char kLayout[] =
    "(batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v) for packed sequences";
void check_out(const TensorView& t, const char* argument, const TensorView& out_a) {
  check_float(t, argument, out_a.device.type == DeviceType::kCpu);
  check_like(t, argument, out_a, "out_a");
  check_aligned(t, argument);
}

void check_part_lse(const TensorView& t, const char* argument, const TensorView& out_a) {
  check_lse_dtype(t, argument);
  check_lse(t, argument, out_a, "out_a");
}

MergeParams validate_merge(const TensorView& out_a, const TensorView& lse_a,
                           const TensorView& out_b, const TensorView& lse_b, const TensorView& out,
                           const TensorView* lse, const MergeOptions& options) {
  const bool packed = out_a.rank == 3;
  if (!packed) check_rank(out_a, "out_a", 4, kLayout);
  check_out(out_a, "out_a", out_a);
  check_out(out_b, "out_b", out_a);
  check_out(out, "out", out_a);
  if (out_b.dtype != out_a.dtype) {
    invalid_type(std::string("out_b is ") + name(out_b.dtype) + ", but out_a is " +
                 name(out_a.dtype) + "; both must have one dtype");
  }
  check_part_lse(lse_a, "lse_a", out_a);
  check_part_lse(lse_b, "lse_b", out_a);
  if (lse_b.dtype != lse_a.dtype) {
    invalid_type(std::string("lse_b is ") + name(lse_b.dtype) + ", but lse_a is " +
                 name(lse_a.dtype) + "; both must have one dtype");
  }
  check_writable(out, "out");
  check_threads(options.num_threads);

  MergeParams params;
  if (lse != nullptr) {
    check_part_lse(*lse, "lse", out_a);
    check_writable(*lse, "lse");
    params.lse = lse->data;
    params.lse_out_dtype = lse->dtype;
    params.lse_stride = lse_strides_of(*lse, packed);
  }
  const TensorView shape = with_batch(out_a, packed);
  params.batch = shape.shape[0];
  params.rows = shape.shape[1];
  params.heads = shape.shape[2];
  params.columns = shape.shape[3];
  params.out_a = out_a.data;
  params.out_b = out_b.data;
  params.out = out.data;
  params.part_dtype = out_a.dtype;
  params.out_dtype = out.dtype;
  params.out_a_stride = strides_of(shape);
  params.out_b_stride = strides_of(with_batch(out_b, packed));
  params.out_stride = strides_of(with_batch(out, packed));
  params.lse_a = lse_a.data;
  params.lse_b = lse_b.data;
  params.lse_dtype = lse_a.dtype;
  params.lse_a_stride = lse_strides_of(lse_a, packed);
  params.lse_b_stride = lse_strides_of(lse_b, packed);
  return params;
}

}  // namespace

void merge_states(const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                  const TensorView& lse_b, const TensorView& out, const TensorView* lse,
                  const MergeOptions& options) {
  const MergeParams params = validate_merge(out_a, lse_a, out_b, lse_b, out, lse, options);
  const bool empty = params.batch == 0 || params.rows == 0 || params.heads == 0;
  if (out_a.device.type == DeviceType::kCuda) {
    check_built_for(out_a.device.index);
    if (empty) return;
    const DeviceGuard guard(out_a.device.index);
    merge_states_on_cuda(params, options.stream);
  } else if (!empty) {
    merge_states_on_cpu(params, options.num_threads > 0 ? options.num_threads : default_threads());
  }
}

}  // namespace anyflash
