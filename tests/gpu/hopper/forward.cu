// A Hopper forward kernel as a shared library with one C function, for check.py and times.py, which
// call it with PyTorch's pointers. The build says which:
//   ELEMENT   cutlass::bfloat16_t or cutlass::half_t
//   HEAD_DIM  64, 128, 256, 512
//   PING_PONG, BLOCK_M  true or false, rows of a CTA; without them, those of TableConfig
//   VARIANT             without it, PlainForward
//   DROPOUT_THRESHOLD, SOFTCAP  for a variant that has them; the first in 65536ths
// Link it with cpp/kernels/cuda/key_range_bounds.cu.
#include <cstdio>
#include <exception>

#include "call.h"
#include "sm90/forward/launch.h"
#include "strides.h"
#include "variant/forward_variants.h"

#if !defined(VARIANT)
#define VARIANT PlainForward
#endif
#if !defined(DROPOUT_THRESHOLD)
#define DROPOUT_THRESHOLD 0
#endif
#if !defined(SOFTCAP)
#define SOFTCAP 0
#endif

namespace {

using namespace anyflash;

constexpr sm90::ForwardConfig make_config() {
  sm90::ForwardConfig config = sm90::TableConfig<HEAD_DIM, HEAD_DIM, VARIANT>::value;
#if defined(PING_PONG)
  config.ping_pong = PING_PONG;
#endif
#if defined(BLOCK_M)
  config.block_m = BLOCK_M;
#endif
  return config;
}
struct Config {
  static constexpr sm90::ForwardConfig value = make_config();
};
using Traits = sm90::ForwardTraits<ELEMENT, HEAD_DIM, HEAD_DIM, Config>;

ForwardParams params_of(const Call& call) {
  ForwardParams params;
  Attention& a = params.attention;
  a.q = call.q;
  a.k = call.k;
  a.v = call.v;
  params.out = call.out;
  constexpr bool kHalf = std::is_same_v<ELEMENT, cutlass::half_t>;
  params.out_dtype = call.float_out ? DType::kFloat32 : kHalf ? DType::kFloat16 : DType::kBFloat16;
  params.lse = call.lse;
  params.max_logits = call.max_logits;
  params.max_logits_stride.batch = call.heads;
  params.max_logits_stride.head = 1;
  a.sinks.data = call.sinks;
  a.sinks.stride.head = 1;
  a.cu_seqlens_q = call.cu_seqlens_q;
  a.cu_seqlens_k = call.cu_seqlens_k;
  a.seqused_k = call.seqused_k;
  a.q_stride = strides(call.q_stride);
  a.k_stride = strides(call.k_stride);
  a.v_stride = strides(call.v_stride);
  params.out_stride = strides(call.out_stride);
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
  a.head_dim_v = call.head_dim_v;
  a.dropout_threshold = DROPOUT_THRESHOLD;
  a.softcap = SOFTCAP;
  return params;
}

}  // namespace

extern "C" int hopper_forward(const Call* call) {
  if (call->seqlen_q == 0) return 0;  // the library's plans are empty then
  try {
    LaunchContext context;
    context.stream = call->stream;
    context.scratch = call->scratch;
    context.multiprocessors = call->multiprocessors;
    sm90::launch_forward<Traits, VARIANT>(params_of(*call), context);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
