// See append.h. One thread an element: of q, then of the new keys, then of the new values.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>

#include "append.h"
#include "common/dependent_launch.h"
#include "common/launch.h"
#include "variant/broadcast_tensor.h"
#include "variant/cache.h"

namespace anyflash {

namespace {

constexpr int kThreads = 256;

// An element of q, k_new or v_new.
struct Place {
  int64_t batch;
  int row;        // query, or number of the new key
  int64_t first;  // packed: the sequence's first row
  int head;
  int col;
  bool exists;
};

template <class Element>
class Appender {
 public:
  __device__ explicit Appender(const AppendParams& params)
      : p_(params), c_(params.cache), a_(c_.attention) {}

  __device__ int64_t queries() const {
    if (p_.rotated_q == nullptr) return 0;
    return rows_of_q(c_) * a_.heads * a_.head_dim;
  }
  __device__ int64_t keys() const { return rows_of_k_new(c_) * a_.heads_k * a_.head_dim; }
  __device__ int64_t values() const {
    if (c_.v_new == nullptr) return 0;
    return rows_of_k_new(c_) * a_.heads_k * a_.head_dim_v;
  }

  __device__ void query(int64_t index) const {
    Place at = place_in(index, a_.cu_seqlens_q, a_.seqlen_q, a_.heads, a_.head_dim);
    if (!at.exists) return;
    const CachedSequence sequence = cached_sequence(c_, at.batch);
    at.first = sequence.first_q;
    const int64_t angle = rotary_row(p_, sequence, at.batch, p_.rotary_steps ? at.row : 0);
    const Strides& stride = p_.rotated_q_stride;
    auto* const target = static_cast<Element*>(p_.rotated_q);
    target[offset(stride, at)] = rotated(a_.q, a_.q_stride, at, angle);
  }

  __device__ void key(int64_t index) const {
    Place at = place_in(index, c_.cu_seqlens_k_new, c_.seqlen_new, a_.heads_k, a_.head_dim);
    if (!at.exists) return;
    const CachedSequence sequence = cached_sequence(c_, at.batch);
    at.first = sequence.first_new;
    const Element x =
        p_.rotary_cos.data == nullptr
            ? static_cast<const Element*>(c_.k_new)[offset(c_.k_new_stride, at)]
            : rotated(c_.k_new, c_.k_new_stride, at, rotary_row(p_, sequence, at.batch, at.row));
    write(p_.k_cache, a_.k_stride, c_.k_scale, sequence, at, x);
  }

  __device__ void value(int64_t index) const {
    Place at = place_in(index, c_.cu_seqlens_k_new, c_.seqlen_new, a_.heads_k, a_.head_dim_v);
    if (!at.exists) return;
    const CachedSequence sequence = cached_sequence(c_, at.batch);
    at.first = sequence.first_new;
    const Element x = static_cast<const Element*>(c_.v_new)[offset(c_.v_new_stride, at)];
    write(p_.v_cache, a_.v_stride, c_.v_scale, sequence, at, x);
  }

 private:
  // Element `index` of the contiguous rows of all sequences, which have `rows` each or are packed.
  __device__ Place place_in(int64_t index, const int32_t* cu_seqlens, int rows, int heads,
                            int columns) const {
    Place place;
    place.col = static_cast<int>(index % columns);
    index /= columns;
    place.head = static_cast<int>(index % heads);
    const SequenceRow at = sequence_row(cu_seqlens, a_.batch, rows, index / heads);
    place.batch = at.batch;
    place.row = static_cast<int>(at.row);
    place.first = 0;
    place.exists = at.exists;
    return place;
  }

  static __device__ int64_t offset(const Strides& stride, const Place& at) {
    return at.batch * stride.batch + (at.first + at.row) * stride.row + at.head * stride.head +
           at.col * stride.col;
  }

  // (x1, x2) -> (x1 cos - x2 sin, x1 sin + x2 cos), this thread's element of the pair.
  __device__ Element rotated(const void* data, const Strides& stride, const Place& at,
                             int64_t angle) const {
    const auto* const row =
        static_cast<const Element*>(data) + offset(stride, at) - at.col * stride.col;
    if (at.col >= p_.rotary_dim) return row[at.col * stride.col];
    const int half = p_.rotary_dim / 2;
    const bool second = p_.rotary_interleaved ? at.col % 2 != 0 : at.col >= half;
    const int pair = p_.rotary_interleaved ? at.col / 2 : at.col % half;
    const int step = p_.rotary_interleaved ? 1 : half;
    const int other = second ? at.col - step : at.col + step;
    const auto load = [&](const BroadcastTensor& table) {
      return load_float(table, angle * table.stride.row + pair * table.stride.col);
    };
    const float cos = load(p_.rotary_cos);
    const float sin = load(p_.rotary_sin);
    const auto x = static_cast<float>(row[at.col * stride.col]);
    const auto y = static_cast<float>(row[other * stride.col]);
    return Element(second ? y * sin + x * cos : x * cos - y * sin);
  }

  // Writes one element of new row `at.row` to the cache, unless its place does not exist.
  __device__ void write(void* cache, const Strides& stride, const BroadcastTensor& scale,
                        const CachedSequence& sequence, const Place& at, Element x) const {
    const CacheSlot place = place_of(c_, sequence, sequence.keys_before + at.row);
    if (place.slot < 0) return;
    const int64_t index = place.slot * stride.batch + int64_t{place.row} * stride.row +
                          at.head * stride.head + at.col * stride.col;
    if (!is_quantized(c_.cache_dtype)) {
      static_cast<Element*>(cache)[index] = x;
      return;
    }
    float quantised = static_cast<float>(x);
    if (scale.data != nullptr) quantised /= load_float(scale, scale_index(scale, place, at.head));
    if (c_.cache_dtype == DType::kInt8) {
      const float number = isnan(quantised) ? 0.0f : fminf(fmaxf(quantised, -128.0f), 127.0f);
      static_cast<signed char*>(cache)[index] = static_cast<signed char>(rintf(number));
    } else {
      const bool is_e4m3 = c_.cache_dtype == DType::kFloat8E4M3;
      static_cast<unsigned char*>(cache)[index] =
          __nv_cvt_float_to_fp8(quantised, __NV_SATFINITE, is_e4m3 ? __NV_E4M3 : __NV_E5M2);
    }
  }

  const AppendParams& p_;
  const KvCacheParams& c_;
  const Attention& a_;
};

template <class Element>
__global__ void append_kernel(const __grid_constant__ AppendParams params) {
  allow_next_kernel();
  wait_previous_kernel();
  const Appender<Element> appender(params);
  const int64_t queries = appender.queries();
  const int64_t keys = queries + appender.keys();
  const int64_t values = keys + appender.values();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < values; i += step) {
    if (i < queries) appender.query(i);
    else if (i < keys) appender.key(i - queries);
    else appender.value(i - keys);
  }
}

}  // namespace

void append_to_cache(const AppendParams& params, void* stream) {
  const KvCacheParams& c = params.cache;
  const Attention& a = c.attention;
  const int64_t per_row = int64_t{a.heads_k} * (a.head_dim + a.head_dim_v);
  int64_t count = rows_of_k_new(c) * per_row;
  if (params.rotated_q != nullptr) count += rows_of_q(c) * a.heads * a.head_dim;
  const auto run = [&](auto element) {
    launch_grid_stride<append_kernel<decltype(element)>>(count, kThreads, kThreads, 0, stream,
                                                         params, LaunchOrder::kWhenAllowed);
  };
  if (params.dtype == DType::kFloat16) run(__half{});
  else run(__nv_bfloat16{});
}

}  // namespace anyflash
