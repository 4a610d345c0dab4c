// The tensors that the backward has beside the forward's.
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "arguments.h"
#include "describe.h"
#include "validate.h"

namespace anyflash {

namespace {

void check_gradient(const TensorView& t, const char* argument, const TensorView& input,
                    const char* input_argument) {
  check_like(t, argument, input, input_argument);
  check_writable(t, argument);
  check_aligned(t, argument);
}

// `axes` as of broadcast_strides_of().
GradientOutput gradient_of(const TensorView& t, const char* argument, const TensorView* input,
                           const char* input_argument,
                           std::initializer_list<int64_t Strides::*> axes) {
  if (input == nullptr) {
    invalid_value(std::string(argument) + " is given without " + input_argument);
  }
  check_gradient(t, argument, *input, input_argument);
  check_dtype_or_float32(t, argument, *input, input_argument);
  for (int i = 0; i < t.rank; ++i) {
    if (t.shape[i] == 0) return {};  // nothing to write, whatever the strides
  }
  return {t.data, t.dtype, broadcast_strides_of(t, axes)};
}

void small_gradients(const ForwardOptions& options, const BackwardOptions& wanted,
                     BackwardParams& params) {
  if (wanted.dbias != nullptr) {
    const TensorView& t = *wanted.dbias;
    if (options.bias != nullptr && options.bias->dtype == DType::kBool) {
      invalid_type("dbias is given, but bias is bool; only a bias of numbers has a gradient");
    }
    params.dbias = gradient_of(t, "dbias", options.bias, "bias",
                               {&Strides::batch, &Strides::head, &Strides::row, &Strides::col});
    params.dbias_batch = t.shape[0];
    params.dbias_heads = static_cast<int>(t.shape[1]);
    params.dbias_rows = t.shape[2];
    params.dbias_columns = t.shape[3];
  }
  if (wanted.dsinks != nullptr) {
    params.dsinks = gradient_of(*wanted.dsinks, "dsinks", options.sinks, "sinks", {&Strides::head});
  }
  if (wanted.dalibi_slopes != nullptr) {
    const TensorView& t = *wanted.dalibi_slopes;
    const char* const argument = "dalibi_slopes";
    const TensorView* const input = options.alibi_slopes;
    params.dalibi_slopes =
        t.rank == 1
            ? gradient_of(t, argument, input, "alibi_slopes", {&Strides::head})
            : gradient_of(t, argument, input, "alibi_slopes", {&Strides::batch, &Strides::head});
  }
}

void check_accumulates(bool accumulates, const char* option, const BackwardTensors& t) {
  const DType dtype = t.dq.dtype;
  if (!accumulates || dtype == DType::kFloat32 || dtype == DType::kFloat64) return;
  invalid_type(std::string(option) + " is set, but dq, dk and dv are " + name(dtype) +
               "; float32 gradients can be added to");
}

DqSums dq_sums_of(const BackwardTensors& t, const BackwardOptions& options, bool packed) {
  const TensorView& memory = *options.dq_sums;
  check_rank(memory, "dq_sums", 1, "(elements,)");
  check_dtype(memory, "dq_sums", DType::kFloat32);
  check_device(memory, "dq_sums", t.q, "q");
  check_writable(memory, "dq_sums");
  if (memory.shape[0] == 0) invalid_value("dq_sums has no elements");
  if (memory.stride[0] != 1 || reinterpret_cast<std::uintptr_t>(memory.data) % 16 != 0) {
    invalid_value("dq_sums must be contiguous, and begin at a multiple of 16 bytes");
  }
  if (packed) invalid_value("dq_sums is given with packed sequences, which have no such sums");
  // A GPU's kernels mask the rows of a tile that do not exist only where all rows end.
  constexpr int64_t kTile = 128;
  const bool on_gpu = t.q.device.type != DeviceType::kCpu;
  const int64_t first = options.dq_sums_first;
  const int64_t rows = options.dq_sums_rows;
  const int64_t own = t.q.shape[1];
  const bool in_tiles = first % kTile == 0 && (own % kTile == 0 || first + own == rows);
  if (rows < own || rows > kMaxExtent || first < 0 || first > rows - own || (on_gpu && !in_tiles)) {
    invalid_value("dq_sums has " + std::to_string(rows) + " rows, and the call's " +
                  std::to_string(own) + " begin at " + std::to_string(first) +
                  "; they must lie within" +
                  (on_gpu ? ", and begin and end at multiples of 128, or at the end" : ""));
  }
  DqSums sums;
  sums.data = memory.data;
  sums.bytes = memory.shape[0] * int64_t{sizeof(float)};
  sums.first = first;
  sums.rows = rows;
  sums.begin = options.dq_sums_begin;
  sums.end = options.dq_sums_end;
  return sums;
}

}  // namespace

BackwardParams validate_backward(const BackwardTensors& t, const ForwardOptions& options,
                                 const BackwardOptions& backward_options) {
  ForwardOptions inputs = options;
  inputs.dropout_mask = inputs.max_logits = nullptr;
  BackwardParams params;
  ForwardTensors forward;
  forward.q = t.q;
  forward.k = t.k;
  forward.v = t.v;
  forward.out = t.out;
  forward.lse = &t.lse;
  params.attention = validate_inputs(forward, inputs);
  const bool packed = params.attention.cu_seqlens_q != nullptr;
  params.out = t.out.data;
  params.out_dtype = t.out.dtype;
  params.out_stride = strides_of(with_batch(t.out, packed));
  check_dtype(t.lse, "lse", DType::kFloat32);
  params.lse = static_cast<const float*>(t.lse.data);
  params.lse_stride = lse_strides_of(t.lse, packed);
  check_dtype_or_float32(t.dout, "dout", t.q, "q");
  check_like(t.dout, "dout", t.out, "out");
  check_aligned(t.dout, "dout");
  params.dout = t.dout.data;
  params.dout_dtype = t.dout.dtype;
  params.dout_stride = strides_of(with_batch(t.dout, packed));
  if (backward_options.dlse != nullptr) {
    const TensorView& dlse = *backward_options.dlse;
    check_dtype(dlse, "dlse", DType::kFloat32);
    check_like(dlse, "dlse", t.lse, "lse");
    check_aligned(dlse, "dlse");
    params.dlse = static_cast<const float*>(dlse.data);
    params.dlse_stride = lse_strides_of(dlse, packed);
  }

  check_dtype_or_float32(t.dq, "dq", t.q, "q");
  check_gradient(t.dq, "dq", t.q, "q");
  check_gradient(t.dk, "dk", t.k, "k");
  check_gradient(t.dv, "dv", t.v, "v");
  for (const auto& [tensor, argument] : {std::pair(&t.dk, "dk"), std::pair(&t.dv, "dv")}) {
    if (tensor->dtype == t.dq.dtype) continue;
    invalid_type(std::string(argument) + " is " + name(tensor->dtype) + ", but dq is " +
                 name(t.dq.dtype) + "; dq, dk and dv must have one dtype");
  }
  params.dq = t.dq.data;
  params.dk = t.dk.data;
  params.dv = t.dv.data;
  params.grad_dtype = t.dq.dtype;
  params.dq_stride = strides_of(with_batch(t.dq, packed));
  params.dk_stride = strides_of(with_batch(t.dk, packed));
  params.dv_stride = strides_of(with_batch(t.dv, packed));
  small_gradients(options, backward_options, params);
  params.deterministic = backward_options.deterministic;
  params.accumulates_dq = backward_options.accumulate_dq;
  params.accumulates_dkv = backward_options.accumulate_dkv;
  check_accumulates(params.accumulates_dq, "accumulate_dq", t);
  check_accumulates(params.accumulates_dkv, "accumulate_dkv", t);
  if (backward_options.dq_sums != nullptr) {
    params.dq_sums = dq_sums_of(t, backward_options, packed);
  }
  return params;
}

}  // namespace anyflash
