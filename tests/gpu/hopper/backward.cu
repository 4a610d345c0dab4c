// A Hopper backward as a shared library with two C functions, for check_backward.py and
// times_backward.py, which call it with PyTorch's pointers. The build says which:
//   ELEMENT   cutlass::bfloat16_t or cutlass::half_t
//   HEAD_DIM  64, 96, 128, 192, 256, 512
// backward_preprocess.cu is built with it.
#include <cstdio>
#include <exception>

#include "backward_call.h"
#include "sm90/backward/launch.h"
#include "strides.h"

namespace {

using namespace anyflash;
using Traits = sm90::MainTraits<ELEMENT, HEAD_DIM, HEAD_DIM, PlainBackward>;
using RowTraits = sm90::DqTraits<ELEMENT, HEAD_DIM, HEAD_DIM, PlainBackward>;

BackwardParams params_of(const BackwardCall& call) {
  BackwardParams params;
  Attention& a = params.attention;
  constexpr bool kHalf = std::is_same_v<ELEMENT, cutlass::half_t>;
  constexpr DType kType = kHalf ? DType::kFloat16 : DType::kBFloat16;
  a.q = call.q;
  a.k = call.k;
  a.v = call.v;
  params.out = call.out;
  params.out_dtype = kType;
  params.lse = call.lse;
  params.dout = call.dout;
  params.dout_dtype = kType;
  params.dq = call.dq;
  params.dk = call.dk;
  params.dv = call.dv;
  params.grad_dtype = call.float_grad ? DType::kFloat32 : kType;
  a.cu_seqlens_q = call.cu_seqlens_q;
  a.cu_seqlens_k = call.cu_seqlens_k;
  a.seqused_k = call.seqused_k;
  a.q_stride = params.out_stride = params.dout_stride = params.dq_stride = strides(call.q_stride);
  a.k_stride = params.dk_stride = strides(call.k_stride);
  a.v_stride = params.dv_stride = strides(call.v_stride);
  params.lse_stride = strides(call.lse_stride);
  a.total_q = call.total_q;
  a.total_k = call.total_k;
  a.window.left = call.window_left;
  a.window.right = call.window_right;
  a.softmax_scale = call.softmax_scale;
  a.batch = call.batch;
  a.heads = call.heads;
  a.heads_k = call.heads_k;
  a.seqlen_q = call.seqlen_q;
  a.seqlen_k = call.seqlen_k;
  a.head_dim = call.head_dim;
  a.head_dim_v = call.head_dim;
  params.deterministic = call.deterministic != 0;
  return params;
}

}  // namespace

extern "C" int64_t hopper_backward_scratch(const BackwardCall* call) {
  return static_cast<int64_t>(backward_scratch_bytes<Traits>(params_of(*call), LaunchContext{}));
}

extern "C" int hopper_backward(const BackwardCall* call) {
  try {
    LaunchContext context;
    context.stream = call->stream;
    context.scratch = call->scratch;
    context.multiprocessors = call->multiprocessors;
    sm90::launch_backward<Traits, RowTraits, PlainBackward>(params_of(*call), context);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
