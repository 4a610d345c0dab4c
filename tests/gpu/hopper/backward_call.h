// The C interface of a library built from backward.cu.
#pragma once

#include <cstdint>

// Strides are those of (batch, row, head), in elements; out, dout and dq have those of q, dk and dv
// those of k and v.
struct BackwardCall {
  const void* q;
  const void* k;
  const void* v;
  const void* out;
  const float* lse;
  const void* dout;
  void* dq;
  void* dk;
  void* dv;
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_k;
  void* stream;
  void* scratch;  // hopper_backward_scratch() bytes
  int64_t q_stride[3];
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t lse_stride[3];
  int64_t total_q;
  int64_t total_k;
  int64_t window_left;
  int64_t window_right;
  double softmax_scale;
  int32_t batch;
  int32_t heads;
  int32_t heads_k;
  int32_t seqlen_q;
  int32_t seqlen_k;
  int32_t head_dim;
  int32_t float_grad;
  int32_t deterministic;
  int32_t multiprocessors;
};

extern "C" __attribute__((visibility("default"))) int64_t
hopper_backward_scratch(const BackwardCall* call);
// 0, or 1 after an error that is printed.
extern "C" __attribute__((visibility("default"))) int hopper_backward(const BackwardCall* call);
