// See append.h: rows of all sequences and kv heads, divided among threads.
#define ANYFLASH_CPU_ISA portable
#define ANYFLASH_SHARED_NAMESPACE anyflash::cpu::portable
#include "append.h"

#include <cstdint>

#include "cpu/simd/convert.h"
#include "cpu/simd/quantized.h"
#include "threads.h"
#include "variant/cache.h"

namespace anyflash {

namespace cpu::portable {

namespace {

// Where a row of k, v or q is copied to. A cache of q's dtype takes the elements as they are.
template <class E, class C>
struct Target {
  using T = typename Compute<E>::Type;

  C* row;
  int64_t stride;
  T scale;

  void put(int64_t column, E x) const {
    if constexpr (sizeof(C) == 1) {
      quantize(static_cast<T>(to_compute(x)) / scale, row + column * stride);
    } else {
      row[column * stride] = x;
    }
  }
};

// What is done to a row on its way: the pairs of its first columns are rotated. Pair c turns by the
// angle whose cosine and sine are in column c of the tables.
template <class E>
class Rotation {
 public:
  using T = typename Compute<E>::Type;

  Rotation(const AppendParams& p, int64_t row)
      : p_(p),
        columns_(p.rotary_dim),
        cos_(row * p.rotary_cos.stride.row),
        sin_(row * p.rotary_sin.stride.row) {}

  // None.
  explicit Rotation(const AppendParams& p) : p_(p) {}

  template <class C>
  void copy_row(const E* from, int64_t stride, int columns, const Target<E, C>& to) const {
    const int pairs = columns_ / 2;
    for (int c = 0; c < pairs; ++c) {
      const int first = p_.rotary_interleaved ? 2 * c : c;
      const int second = p_.rotary_interleaved ? 2 * c + 1 : c + pairs;
      const T cos = static_cast<T>(read_number(p_.rotary_cos, cos_ + c * p_.rotary_cos.stride.col));
      const T sin = static_cast<T>(read_number(p_.rotary_sin, sin_ + c * p_.rotary_sin.stride.col));
      const T x = to_compute(from[first * stride]);
      const T y = to_compute(from[second * stride]);
      E rotated;
      from_compute(x * cos - y * sin, &rotated);
      to.put(first, rotated);
      from_compute(x * sin + y * cos, &rotated);
      to.put(second, rotated);
    }
    for (int c = columns_; c < columns; ++c) to.put(c, from[c * stride]);
  }

 private:
  const AppendParams& p_;
  int columns_ = 0;
  int64_t cos_ = 0;
  int64_t sin_ = 0;
};

template <class E>
struct Source {
  const void* data;
  const Strides& stride;
  int columns;

  // `row` of the sequence whose first row is `first`, where sequences are packed.
  const E* row(int64_t batch, int64_t first, int64_t row, int64_t head) const {
    return static_cast<const E*>(data) + batch * stride.batch + (first + row) * stride.row +
           head * stride.head;
  }
};

// A row of k or v of the cache.
template <class E, class C>
Target<E, C> cache_row(void* cache, const Strides& st, const BroadcastTensor& scale,
                       const CacheSlot& place, int64_t head) {
  C* const base = static_cast<C*>(cache);
  Target<E, C> to{base + place.slot * st.batch + place.row * st.row + head * st.head, st.col, 1};
  if (scale.data != nullptr) {
    to.scale =
        static_cast<typename Target<E, C>::T>(read_number(scale, scale_index(scale, place, head)));
  }
  return to;
}

// Of an element of k and one of v, as threads_worth() counts it, from times beside the forward's:
// 0.2 ns, with a rotation up to 2.
constexpr double kCopyWork = 25;
constexpr double kRotationWork = 150;

template <class E, class C>
void append_keys(const AppendParams& p, int num_threads) {
  const KvCacheParams& cache = p.cache;
  const Attention& a = cache.attention;
  const Source<E> k{cache.k_new, cache.k_new_stride, a.head_dim};
  const Source<E> v{cache.v_new, cache.v_new_stride, a.head_dim_v};
  const int64_t count = rows_of_k_new(cache) * a.heads_k;
  const bool rotate = p.rotary_cos.data != nullptr;
  const double work = static_cast<double>(count * k.columns) * (rotate ? kRotationWork : kCopyWork);
  for_each_on_threads(count, threads_worth(num_threads, work), [&](int64_t i) {
    const int64_t head = i % a.heads_k;
    const SequenceRow at =
        sequence_row(cache.cu_seqlens_k_new, a.batch, cache.seqlen_new, i / a.heads_k);
    if (!at.exists) return;
    const int t = static_cast<int>(at.row);
    const CachedSequence sequence = cached_sequence(cache, at.batch);
    const CacheSlot place = place_of(cache, sequence, sequence.keys_before + t);
    if (place.slot < 0) return;
    const Rotation<E> rotation =
        rotate ? Rotation<E>(p, rotary_row(p, sequence, at.batch, t)) : Rotation<E>(p);
    const int64_t first = sequence.first_new;
    rotation.copy_row(k.row(at.batch, first, t, head), k.stride.col, k.columns,
                      cache_row<E, C>(p.k_cache, a.k_stride, cache.k_scale, place, head));
    if (v.data == nullptr) return;
    Rotation<E>(p).copy_row(v.row(at.batch, first, t, head), v.stride.col, v.columns,
                            cache_row<E, C>(p.v_cache, a.v_stride, cache.v_scale, place, head));
  });
}

template <class E>
void rotate_queries(const AppendParams& p, int num_threads) {
  const KvCacheParams& cache = p.cache;
  const Attention& a = cache.attention;
  const Source<E> q{a.q, a.q_stride, a.head_dim};
  const Strides& st = p.rotated_q_stride;
  const int64_t count = rows_of_q(cache) * a.heads;
  const double work = static_cast<double>(count * q.columns) * kRotationWork;
  for_each_on_threads(count, threads_worth(num_threads, work), [&](int64_t i) {
    const int64_t head = i % a.heads;
    const SequenceRow at = sequence_row(a.cu_seqlens_q, a.batch, a.seqlen_q, i / a.heads);
    if (!at.exists) return;
    const CachedSequence sequence = cached_sequence(cache, at.batch);
    const int step = p.rotary_steps ? static_cast<int>(at.row) : 0;
    const int64_t row = rotary_row(p, sequence, at.batch, step);
    E* const to = static_cast<E*>(p.rotated_q) + at.batch * st.batch +
                  (sequence.first_q + at.row) * st.row + head * st.head;
    Rotation<E>(p, row).copy_row(q.row(at.batch, sequence.first_q, at.row, head), q.stride.col,
                                 q.columns, Target<E, E>{to, st.col, 1});
  });
}

template <class E>
void append_all(const AppendParams& p, int num_threads) {
  if (p.rotated_q != nullptr) rotate_queries<E>(p, num_threads);
  if (p.cache.k_new == nullptr) return;
  switch (p.cache.cache_dtype) {
    case DType::kInt8:
      return append_keys<E, Int8>(p, num_threads);
    case DType::kFloat8E4M3:
      return append_keys<E, Float8E4M3>(p, num_threads);
    case DType::kFloat8E5M2:
      return append_keys<E, Float8E5M2>(p, num_threads);
    default:
      return append_keys<E, E>(p, num_threads);
  }
}

}  // namespace

}  // namespace cpu::portable

void append_to_cache_on_cpu(const AppendParams& params, int num_threads) {
  using namespace cpu::portable;
  switch (params.dtype) {
    case DType::kFloat64:
      return append_all<double>(params, num_threads);
    case DType::kFloat16:
      return append_all<Half>(params, num_threads);
    case DType::kBFloat16:
      return append_all<BFloat16>(params, num_threads);
    default:
      return append_all<float>(params, num_threads);
  }
}

}  // namespace anyflash
