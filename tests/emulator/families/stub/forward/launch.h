// A second family of GPU kernels, to prove that one is added by files of its own and its lines in
// the table of kernels. Its forward has a thread for each row, which follows the definition.
#pragma once

#include <cutlass/numeric_types.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/launch.h"
#include "kernel_descriptor.h"
#include "variant/forward_variants.h"
#include "variant/mask.h"
#include "variant/sequence.h"

namespace anyflash::stub {

inline constexpr KernelFamily kFamily = [] {
  KernelFamily family;
  family.name = "stub";
  family.gpus = {80, 86};
  family.priority = 1;
  return family;
}();

inline constexpr int kRows = 32;  // of a CTA, one a thread

// The result of one query row.
template <class Element>
ANYFLASH_DEVICE void attend(const ForwardParams& p, const Sequence& s, int head, int row) {
  const Attention& a = p.attention;
  const int64_t head_k = head / (a.heads / a.heads_k);
  const auto at = [&](const void* data, const Strides& st, int64_t first, int64_t h) {
    return static_cast<const Element*>(data) + s.batch * st.batch + first * st.row + h * st.head;
  };
  const Element* const q = at(a.q, a.q_stride, s.first_q + row, head);
  const Element* const k = at(a.k, a.k_stride, s.first_k, head_k);
  const Element* const v = at(a.v, a.v_stride, s.first_k, head_k);
  const Mask mask(s, a.window);
  const auto score = [&](int key) {
    float sum = 0.0f;
    for (int x = 0; x < a.head_dim; ++x) {
      sum += float(q[x * a.q_stride.col]) * float(k[key * a.k_stride.row + x * a.k_stride.col]);
    }
    return sum * static_cast<float>(a.softmax_scale);
  };
  float largest = -INFINITY;
  for (int j = mask.first_key(row); j < mask.end_key(row); ++j) largest = fmaxf(largest, score(j));
  float sum = 0.0f;
  float out[kRows] = {};
  for (int j = mask.first_key(row); j < mask.end_key(row); ++j) {
    const float weight = expf(score(j) - largest);
    sum += weight;
    for (int x = 0; x < a.head_dim_v; ++x) {
      out[x] += weight * float(v[j * a.v_stride.row + x * a.v_stride.col]);
    }
  }
  const Strides& to = p.out_stride;
  auto* const target = static_cast<Element*>(p.out) + s.batch * to.batch +
                       (s.first_q + row) * to.row + head * to.head;
  for (int x = 0; x < a.head_dim_v; ++x) {
    target[x * p.out_stride.col] = Element(sum == 0.0f ? 0.0f : out[x] / sum);
  }
}

template <class Element>
__global__ void forward_kernel(const __grid_constant__ ForwardParams params) {
  const int head = static_cast<int>(blockIdx.y);
  const Sequence sequence = sequence_of(params.attention, blockIdx.z);
  const int row = static_cast<int>(blockIdx.x) * kRows + static_cast<int>(threadIdx.x);
  if (row < sequence.seqlen_q) attend<Element>(params, sequence, head, row);
}

template <class Element>
void launch_forward(const ForwardParams& p, const LaunchContext& context) {
  const dim3 grid((p.attention.seqlen_q + kRows - 1) / kRows, p.attention.heads,
                  static_cast<unsigned>(p.attention.batch));
  launch<forward_kernel<Element>>(grid, dim3(kRows), 0, context.stream, p);
}

inline std::size_t no_scratch(const ForwardParams&, const LaunchContext&) { return 0; }

template <class Element, int kHeadDim, int kHeadDimV, class Variant>
constexpr KernelDescriptor forward_descriptor(const char* name) {
  static_assert(kHeadDimV <= kRows, "a thread holds a row of the result");
  KernelDescriptor d;
  d.name = name;
  d.family = &kFamily;
  d.dtype = std::is_same_v<Element, cutlass::half_t> ? DType::kFloat16 : DType::kBFloat16;
  d.head_dim = kHeadDim;
  d.head_dim_v = kHeadDimV;
  d.features = Variant::kFeatures;
  d.tile.block_m = kRows;
  d.tile.block_n = 1;
  d.tile.warps = 1;
  d.forward = {no_scratch, launch_forward<Element>};
  return d;
}

}  // namespace anyflash::stub
