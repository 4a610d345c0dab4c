// The C interface of a library built from forward.cu.
#pragma once

#include <cstdint>

// Strides are those of (batch, row, head), in elements.
struct Call {
  const void* q;
  const void* k;
  const void* v;
  void* out;
  float* lse;
  float* max_logits;
  const void* sinks;  // float32
  const int32_t* cu_seqlens_q;
  const int32_t* cu_seqlens_k;
  const int32_t* seqused_k;
  void* stream;
  void* scratch;  // a counter
  int64_t q_stride[3];
  int64_t k_stride[3];
  int64_t v_stride[3];
  int64_t out_stride[3];
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
  int32_t head_dim_v;
  int32_t float_out;
  int32_t multiprocessors;  // at most so many CTAs
};

// 0, or 1 after an error that is printed.
extern "C" __attribute__((visibility("default"))) int hopper_forward(const Call* call);
