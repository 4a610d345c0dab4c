// Checks of arguments that several functions share. All throw Error, which says what was given and
// what is allowed.
#pragma once

#include <climits>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>

#include "anyflash/error.h"
#include "anyflash/tensor_view.h"
#include "params.h"

namespace anyflash {

[[noreturn]] void invalid_value(const std::string& message);
[[noreturn]] void invalid_type(const std::string& message);

// The rank, sizes that can be counted, and an address if there are elements. `layout` names the
// axes: "(batch, heads)".
void check_rank(const TensorView& t, const char* argument, int rank, const char* layout);

struct Axis {
  int64_t extent;
  bool broadcast = false;  // 1 is allowed too
};

// Whether the shape is that; the rank must be.
bool has_shape(const TensorView& t, std::initializer_list<Axis> axes);

// Rank and shape. `why` follows the shape in the message: ", with q's head_dim"; empty: the layout.
void check_shape(const TensorView& t, const char* argument, std::initializer_list<Axis> axes,
                 const char* layout, std::string_view why = {});

void check_device(const TensorView& t, const char* argument, const TensorView& other,
                  const char* other_argument);

// Shape and device of `other`.
void check_like(const TensorView& t, const char* argument, const TensorView& other,
                const char* other_argument);

// A float type; `allow_double` where float64 is one. `also` names types that the caller has looked
// for: "bool, ".
void check_float(const TensorView& t, const char* argument, bool allow_double = true,
                 const char* also = "");
void check_dtype(const TensorView& t, const char* argument, DType dtype);
// float64 is the state of a result that is joined with others.
void check_lse_dtype(const TensorView& t, const char* argument);
// The type of `other`, or float32.
void check_dtype_or_float32(const TensorView& t, const char* argument, const TensorView& other,
                            const char* other_argument);

// q's heads and columns are at least 1, and the number of k's heads divides that of q's.
void check_heads(const TensorView& q, const TensorView& k, const char* k_argument);

// Rank, shape, address and device of an LSE of the rows of `other`: q, or a result.
void check_lse(const TensorView& t, const char* argument, const TensorView& other,
               const char* other_argument);

// A tensor that is written must not hold one address twice.
void check_writable(const TensorView& t, const char* argument);

// The address is a multiple of the element's size.
void check_aligned(const TensorView& t, const char* argument);

// Of two options, not one without the other.
void check_both(const TensorView* a, const char* name_a, const TensorView* b, const char* name_b);

// `count` contiguous integers on q's device.
void check_integers(const TensorView& t, const char* argument, DType dtype, const TensorView& q,
                    int64_t count, const char* layout, const char* why);

// Where packed sequences begin: (batch + 1,) contiguous int32.
void check_cu_seqlens(const TensorView& t, const char* argument, const TensorView& q);

// max_seqlen_q or max_seqlen_k, of a tensor of `total` rows: 0 stands for as many.
inline int64_t longest_of(int64_t given, int64_t total) { return given == 0 ? total : given; }

// What a sequence has at most, as far as both say.
int packed_bound(int64_t given, const char* option, int64_t total);

void check_threads(int num_threads);

// Kernels count rows in 32 bits and round up to whole tiles, which must not overflow.
inline constexpr int64_t kMaxExtent = INT_MAX - 4095;

// The largest number that a position may be; variant/sequence.h clamps their sum to it.
inline constexpr int64_t kMaxPosition = int64_t{1} << 30;

int checked_extent(int64_t extent, const char* argument, const char* what);

// A packed tensor (rows, heads, columns) as (1, rows, heads, columns) with batch stride 0; a
// batched one as it is.
TensorView with_batch(const TensorView& t, bool packed);

// A matrix as (1, rows, columns), that axis being broadcast.
TensorView with_leading_axis(const TensorView& t);

// Of a tensor with_batch().
inline Strides strides_of(const TensorView& t) {
  return {t.stride[0], t.stride[1], t.stride[2], t.stride[3]};
}
// Of a small tensor, whose axes are members of Strides: 0 where it is broadcast.
Strides broadcast_strides_of(const TensorView& t, std::initializer_list<int64_t Strides::*> axes);
inline BroadcastTensor auxiliary_of(const TensorView& t,
                                    std::initializer_list<int64_t Strides::*> axes) {
  return {t.data, t.dtype, broadcast_strides_of(t, axes)};
}

// Whether causal masks and windows hide every key from every row, as far as the host knows where
// the call's rows and keys lie.
bool hides_all_keys(const Attention& a);

// Of an LSE: (batch, heads, rows), packed (heads, rows).
inline Strides lse_strides_of(const TensorView& t, bool packed) {
  if (packed) return {0, t.stride[1], t.stride[0], 0};
  return {t.stride[0], t.stride[2], t.stride[1], 0};
}

}  // namespace anyflash
