// variant/dropout.h: the generator against published vectors, its statistics, and the mask that
// ForwardPlan writes.
#include "variant/dropout.h"

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "many_threads.h"
#include "tensor.h"

using anyflash::Attention;
using anyflash::Draws;
using anyflash::Dropout;
using anyflash::ForwardOptions;
using anyflash::philox;
using test::DType;
using test::Layout;
using test::Tensor;

namespace {

// philox4x32 with 10 rounds, from the test vectors of Random123 (kat_vectors).
void check_known_answers() {
  struct Vector {
    uint32_t counter[4], key[2], result[4];
  };
  constexpr uint32_t kOnes = 0xffffffffu;
  const Vector vectors[] = {
      {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
      {{kOnes, kOnes, kOnes, kOnes},
       {kOnes, kOnes},
       {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
      {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
       {0xa4093822, 0x299f31d0},
       {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
  };
  for (const Vector& v : vectors) {
    const uint32_t* const c = v.counter;
    const Draws draws = philox(c[0], c[1], c[2], c[3], v.key[0], v.key[1]);
    for (int i = 0; i < 4; ++i) {
      CHECK_EQ(draws.word[i], v.result[i]);
      CHECK_EQ(draws[2 * i], v.result[i] & 0xffff);
      CHECK_EQ(draws[2 * i + 1], v.result[i] >> 16);
    }
  }
}

// Seed, offset, batch, head, row and group are where the comment of dropout.h puts them.
void check_counter() {
  Attention p;
  p.heads = 7;
  p.dropout_threshold = 1000;
  p.seed = 0x0123456789abcdef;
  p.offset = 0xfedcba9876543210;
  const Dropout dropout(p, 5, 3);
  const Draws draws = dropout.draws(11, 13);
  const Draws expected = philox(13, 11, 5 * 7 + 3, 0x76543210, 0x89abcdef, 0x01234567 ^ 0xfedcba98);
  for (int i = 0; i < 4; ++i) CHECK_EQ(draws.word[i], expected.word[i]);

  const uint64_t state[2] = {p.seed, p.offset};
  Attention read = p;
  read.seed = read.offset = 0;
  read.rng_state = state;
  const Draws same = Dropout(read, 5, 3).draws(11, 13);
  for (int i = 0; i < 4; ++i) CHECK_EQ(same.word[i], expected.word[i]);

  CHECK(!dropout.keep(999));
  CHECK(dropout.keep(1000));
  // Two at once.
  for (const uint32_t low : {0u, 999u, 1000u, 0xffffu}) {
    for (const uint32_t high : {0u, 999u, 1000u, 0xffffu}) {
      const uint32_t kept =
          (dropout.keep(low) ? 0x1234u : 0u) | (dropout.keep(high) ? 0xabcd0000u : 0u);
      CHECK_EQ(dropout.drop(0xabcd1234u, high << 16 | low), kept);
      const Draws both{{0, high << 16 | low, 0, 0}};
      CHECK_EQ(dropout.keep(both, 2), dropout.keep(low));
      CHECK_EQ(dropout.keep(both, 3), dropout.keep(high));
    }
  }
  CHECK(dropout.active());
  CHECK_EQ(dropout.scale(), 65536.0f / 64536.0f);
  CHECK(!Dropout(Attention{}, 0, 0).active());
}

struct Shape {
  int64_t batch, heads, seqlen_q, seqlen_k;
};

// A call on the CPU that asks for its mask, and what the mask must be.
struct Call {
  Call(const Shape& s, double dropout_p, Layout layout = Layout::kContiguous)
      : shape(s),
        q(DType::kFloat32, {s.batch, s.seqlen_q, s.heads, 4}),
        k(DType::kFloat32, {s.batch, s.seqlen_k, s.heads, 4}),
        v(DType::kFloat32, {s.batch, s.seqlen_k, s.heads, 4}),
        out(DType::kFloat32, {s.batch, s.seqlen_q, s.heads, 4}),
        mask(DType::kBool, {s.batch, s.heads, s.seqlen_q, s.seqlen_k}, layout) {
    q.fill(1);
    k.fill(2);
    v.fill(3);
    options.dropout_p = dropout_p;
    options.seed = 42;
    options.offset = (uint64_t{3} << 32) + 9;
    options.dropout_mask = &mask.view;
  }

  void run() {
    const auto tensors = test::forward_tensors(q.view, k.view, v.view, out.view);
    CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, options)));
  }

  bool expected(const test::Index& i) const {
    Attention p;
    p.heads = static_cast<int>(shape.heads);
    p.seed = options.seed;
    p.offset = options.offset;
    p.dropout_threshold = static_cast<uint32_t>(std::lround(options.dropout_p * 65536));
    const Dropout dropout(p, i[0], static_cast<int>(i[1]));
    const Draws draws = dropout.draws(static_cast<int>(i[2]), static_cast<int>(i[3] / 8));
    return dropout.keep(draws[static_cast<int>(i[3] % 8)]);
  }

  Shape shape;
  Tensor q, k, v, out, mask;
  ForwardOptions options;
};

void check_mask(Call& call, const std::string& what) {
  call.run();
  int wrong = 0;
  call.mask.for_each(
      [&](const test::Index& i) { wrong += call.mask.get(i) != (call.expected(i) ? 1.0 : 0.0); });
  CHECK_MSG(wrong == 0, what);
}

void check_masks() {
  for (int layout = 0; layout <= static_cast<int>(Layout::kLast); ++layout) {
    Call call({2, 3, 9, 21}, 0.3, static_cast<Layout>(layout));
    call.options.num_threads = 1 + layout;
    check_mask(call, "layout " + std::to_string(layout));
  }
  Call large({2, 4, 150, 130}, 0.3);  // enough for several threads
  large.options.num_threads = 3;
  check_mask(large, "threads");
  // No mask of positions or lengths shows in it.
  Call hidden({2, 2, 9, 21}, 0.3);
  int32_t used[2] = {0, 7};
  anyflash::TensorView lengths;
  lengths.data = used;
  lengths.dtype = DType::kInt32;
  lengths.rank = 1;
  lengths.shape = {2};
  lengths.stride = {1};
  hidden.options.seqused_k = &lengths;
  hidden.options.causal = true;
  check_mask(hidden, "hidden keys");
  // What is kept without dropout: everything.
  Call none({1, 2, 5, 6}, 0.0);
  none.run();
  none.mask.for_each([&](const test::Index& i) { CHECK(none.mask.get(i) == 1.0); });
}

// Packed: the same formula, also beyond the sequences' lengths.
void check_packed_mask() {
  const Shape shape{3, 2, 6, 10};
  int32_t starts_q[4] = {0, 2, 2, 8};
  int32_t starts_k[4] = {0, 10, 13, 13};
  Call call(shape, 0.4);
  Tensor q(DType::kFloat32, {1, 8, 2, 4});
  Tensor k(DType::kFloat32, {1, 13, 2, 4});
  Tensor out(DType::kFloat32, {1, 8, 2, 4});
  q.fill(1);
  k.fill(2);
  anyflash::TensorView views[3] = {q.view, k.view, out.view};
  for (anyflash::TensorView& t : views) {
    t.rank = 3;
    t.shape = {t.shape[1], 2, 4};
    t.stride = {8, 4, 1};
  }
  anyflash::TensorView lengths[2];
  for (int i = 0; i < 2; ++i) {
    lengths[i].data = i == 0 ? starts_q : starts_k;
    lengths[i].dtype = DType::kInt32;
    lengths[i].rank = 1;
    lengths[i].shape = {4};
    lengths[i].stride = {1};
  }
  call.options.cu_seqlens_q = &lengths[0];
  call.options.cu_seqlens_k = &lengths[1];
  call.options.max_seqlen_q = 6;
  call.options.max_seqlen_k = 10;
  const auto tensors = test::forward_tensors(views[0], views[1], views[1], views[2]);
  CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, call.options)));
  call.mask.for_each(
      [&](const test::Index& i) { CHECK_EQ(call.mask.get(i), call.expected(i) ? 1.0 : 0.0); });
}

// How many of n independent draws with probability p are expected, give or take five deviations.
void check_count(double count, double n, double p, const std::string& what) {
  const double deviation = std::sqrt(n * p * (1 - p));
  CHECK_MSG(std::fabs(count - n * p) <= 5 * deviation,
            what + ": " + std::to_string(count) + " of " + std::to_string(n));
}

void check_statistics() {
  const Shape shape{2, 3, 200, 160};
  const double n = 2.0 * 3 * 200 * 160;
  for (const double p : {1.0 / 1024, 0.1, 0.5, 0.9, 65535.0 / 65536}) {
    Call call(shape, p);
    call.run();
    double kept = 0;
    // Neighbours along each axis are dropped together with probability p * p.
    std::array<double, 4> together{};
    std::array<double, 4> pairs{};
    call.mask.for_each([&](const test::Index& i) {
      const bool keep = call.mask.get(i) != 0.0;
      kept += keep;
      for (std::size_t axis = 0; axis < 4; ++axis) {
        test::Index next = i;
        if (++next[axis] == call.mask.view.shape[axis]) continue;
        ++pairs[axis];
        together[axis] += !keep && call.mask.get(next) == 0.0;
      }
    });
    const std::string what = "p = " + std::to_string(p);
    check_count(n - kept, n, p, what);
    // Pairs overlap, so their number counts for half.
    for (std::size_t axis = 0; axis < 4; ++axis) {
      check_count(together[axis] / 2, pairs[axis] / 2, p * p, what + ", neighbours");
    }
  }
}

}  // namespace

int main() {
  const test::ManyThreads many_threads;
  check_known_answers();
  check_counter();
  check_masks();
  check_packed_mask();
  check_statistics();
  return check::report();
}
