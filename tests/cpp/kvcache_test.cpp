// KvCachePlan against ForwardPlan of each sequence's keys, laid out one after the other by
// this test: places in the cache, new keys, rotation, 8-bit numbers, splits.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "anyflash/attention.h"
#include "check.h"
#include "kvcache_problem.h"
#include "many_threads.h"
#include "tensor.h"

namespace {

using anyflash::ForwardOptions;
using anyflash::TensorView;
using test::Appending;
using test::DType;
using test::Index;
using test::Paged;
using test::SmallTensor;
using test::Tensor;

// Element `column` of a row, rotated by row `angle` of the call's tables.
double rotated(const Appending& c, int64_t angle, int64_t column, const Tensor& t, Index at) {
  const int64_t half = c.cos.view.shape[1];
  const auto element = [&](int64_t i) {
    at[3] = i;
    return t.get(at);
  };
  if (c.cache.rotary_cos == nullptr || column >= 2 * half) return element(column);
  const bool neighbours = c.cache.rotary_interleaved;
  const int64_t pair = neighbours ? column / 2 : column % half;
  const double cos = static_cast<const float*>(c.cos.view.data)[angle * half + pair];
  const double sin = static_cast<const float*>(c.sin.view.data)[angle * half + pair];
  const double x1 = element(neighbours ? 2 * pair : pair);
  const double x2 = element(neighbours ? 2 * pair + 1 : pair + half);
  const bool first = column == (neighbours ? 2 * pair : pair);
  return first ? x1 * cos - x2 * sin : x1 * sin + x2 * cos;
}

const int32_t* integers(const SmallTensor& t) { return static_cast<const int32_t*>(t.view.data); }

// The lengths of sequence b.
struct Sequence {
  Sequence(const Appending& c, int64_t b)
      : filled(integers(c.seqlens)[b]),
        pad(integers(c.pads)[b]),
        seqlen_new(c.cache.k_new == nullptr ? 0 : c.k_new.view.shape[1]),
        before(filled - pad),
        turn(c.cache.rotary_seqlens == nullptr ? before : integers(c.rotations)[b]),
        keys(before + seqlen_new) {}

  int64_t filled, pad, seqlen_new, before, turn, keys;
};

// Where row `row` of sequence b lies: indices along the cache's first two axes.
Index place(const Appending& c, int64_t b, int64_t row) {
  if (c.cache.block_table == nullptr) {
    return {integers(c.places)[b], row, 0, 0};
  }
  const TensorView& table = *c.cache.block_table;
  const int64_t page_size = c.k_cache.shape[1];
  const auto* const entries = static_cast<const int32_t*>(table.data);
  const int64_t page = entries[b * table.stride[0] + row / page_size * table.stride[1]];
  return {page, row % page_size, 0, 0};
}

float scale_of(const TensorView* scale, int64_t slot, int64_t head) {
  if (scale == nullptr) return 1.0f;
  const auto* const data = static_cast<const float*>(scale->data);
  return scale->rank == 1 ? data[head] : data[slot * scale->stride[0] + head * scale->stride[1]];
}

// What the cache holds after the call: checked element by element, and returned as float32.
void gather(const Appending& c, int64_t b, const Tensor& cache, const Tensor& fresh,
            const TensorView* scale, bool rotate, Tensor& result) {
  const Sequence s(c, b);
  const bool eight_bits = cache.view.dtype == DType::kInt8;
  result.for_each([&](const Index& at) {
    Index from = place(c, b, s.pad + at[1]);
    from[2] = at[2];
    from[3] = at[3];
    const float by = scale_of(scale, from[0], at[2]);
    result.set(at, cache.get(from) * static_cast<double>(by));
    if (at[1] < s.before) return;
    const Index row{b, at[1] - s.before, at[2], 0};
    const double x = rotate ? rotated(c, s.turn + at[1] - s.before, at[3], fresh, row)
                            : fresh.get({b, at[1] - s.before, at[2], at[3]});
    // Of 8 bits: within half a step, but for the rounding of float32.
    const double error = std::fabs(result.get(at) - x);
    CHECK(error <= (eight_bits ? 0.5001 * static_cast<double>(by) : 1e-6));
  });
}

// ForwardPlan of sequence b, the tree mask as a bias.
void reference(const Appending& c, int64_t b, const Tensor& k_cache, const Tensor& v_cache,
               Tensor& out, Tensor& lse) {
  const Sequence s(c, b);
  const int64_t queries = c.q.shape[1];
  Tensor q(DType::kFloat32, {1, queries, c.q.shape[2], c.q.shape[3]});
  Tensor k(DType::kFloat32, {1, s.keys, c.k_cache.shape[2], c.k_cache.shape[3]});
  Tensor v(DType::kFloat32, {1, s.keys, c.k_cache.shape[2], c.out.shape[3]});
  Tensor bias(DType::kBool, {1, 1, queries, s.keys});
  const bool steps = c.options.causal || c.options.window_left >= 0 || c.options.window_right >= 0;
  q.for_each([&](const Index& at) {
    q.set(at, rotated(c, s.turn + (steps ? at[1] : 0), at[3], c.q_memory, {b, at[1], at[2], 0}));
  });
  gather(c, b, k_cache, c.k_new, c.cache.k_scale, true, k);
  if (c.cache.head_dim_v != 0) {
    gather(c, b, k_cache, c.k_new, c.cache.k_scale, true, v);
  } else {
    gather(c, b, v_cache, c.v_new, c.cache.v_scale, false, v);
  }
  const auto* const tree = static_cast<const unsigned char*>(c.tree.view.data);
  bias.for_each([&](const Index& at) {
    const int64_t column = at[3] - (s.keys - queries);
    bias.set(at, column < 0 || tree[at[2] * queries + column] != 0 ? 1 : 0);
  });
  ForwardOptions options = c.options;
  if (c.cache.tree_mask != nullptr) options.bias = &bias.view;
  TensorView lse_view = lse.view;
  lse_view.rank = 3;
  const auto tensors = test::forward_tensors(q.view, k.view, v.view, out.view, &lse_view);
  CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, options)));
}

void check_near(double a, double b) { CHECK(a == b || std::fabs(a - b) < 2e-5); }

template <class Call, class Change>
void check_call(const Change& change) {
  Call c;
  change(c);
  const test::ExactBytes memory(c.workspace_size());
  c.run(memory.workspace());
  CHECK(memory.guard_untouched());
  const Index& n = c.q_memory.view.shape;
  for (int64_t b = 0; b < n[0]; ++b) {
    Tensor out(DType::kFloat32, {1, n[1], n[2], c.out.shape[3]});
    Tensor lse(DType::kFloat32, {1, n[2], n[1], 1});
    reference(c, b, c.keys(), c.values(), out, lse);
    out.for_each([&](const Index& at) {
      check_near(c.out_memory.get({b, at[1], at[2], at[3]}), out.get(at));
    });
    lse.for_each(
        [&](const Index& at) { check_near(c.lse_memory.get({b, at[1], at[2], 0}), lse.get(at)); });
  }
}

struct Floats : Appending {
  const Tensor& keys() const { return k_memory; }
  const Tensor& values() const { return v_memory; }
};
struct Bytes : Paged {
  const Tensor& keys() const { return k_pages; }
  const Tensor& values() const { return v_pages; }
};

template <class Call>
void check_calls() {
  check_call<Call>([](Call&) {});
  check_call<Call>([](Call& c) { c.cache.rotary_interleaved = false; });
  check_call<Call>([](Call& c) { c.cache.rotary_seqlens = &c.rotations.view; });
  check_call<Call>([](Call& c) { c.cache.tree_mask = nullptr; });
  check_call<Call>([](Call& c) { c.cache.rotary_cos = c.cache.rotary_sin = nullptr; });
  check_call<Call>([](Call& c) {
    c.cache.k_new = c.cache.v_new = c.cache.rotary_cos = c.cache.rotary_sin = nullptr;
  });
  check_call<Call>([](Call& c) {
    c.options = {};
    c.cache.tree_mask = nullptr;
  });
  check_call<Call>([](Call& c) { c.seqlens.template assign<int32_t>({1, 0}); });
  for (const int splits : {0, 1, 16}) {
    check_call<Call>([&](Call& c) { c.cache.num_splits = splits; });
  }
  check_call<Call>([](Call& c) {
    c.cache.num_splits = 0;
    c.cache.split_size = 64;
  });
}

// A long sequence: numbers of splits change rounding only, numbers of threads nothing.
void check_splits() {
  constexpr int64_t kKeys = 3000;
  Tensor q(DType::kFloat32, {1, 2, 2, 8});
  Tensor k(DType::kFloat32, {1, kKeys, 1, 8});
  Tensor v(DType::kFloat32, {1, kKeys, 1, 8});
  unsigned seed = 1;
  for (Tensor* t : {&q, &k, &v}) t->fill(seed++);
  const auto run = [&](int64_t num_splits, int64_t split_size, int threads, Tensor& out) {
    ForwardOptions options;
    options.num_threads = threads;
    anyflash::KvCacheOptions cache;
    cache.num_splits = num_splits;
    cache.split_size = split_size;
    const auto tensors = test::kvcache_tensors(q.view, k.view, v.view, out.view);
    const anyflash::KvCachePlan plan(tensors, options, cache);
    CHECK(test::run_exactly(plan));
    return plan.workspace_bytes();
  };
  Tensor whole(DType::kFloat32, {1, 2, 2, 8});
  const std::size_t bytes = run(1, 0, 1, whole);
  CHECK(run(7, 0, 1, whole) > bytes);  // has partial results
  run(1, 0, 1, whole);
  for (const auto& [count, size] :
       {std::pair(0, 0), {2, 0}, {7, 0}, {1000, 0}, {0, 64}, {0, 1024}, {0, 1 << 30}}) {
    Tensor one(DType::kFloat32, {1, 2, 2, 8});
    Tensor three(DType::kFloat32, {1, 2, 2, 8});
    run(count, size, 1, one);
    run(count, size, 3, three);
    CHECK(one.bytes == three.bytes);
    one.for_each([&](const Index& at) { check_near(one.get(at), whole.get(at)); });
  }
}

// Nothing to attend: what is new is appended all the same.
void check_empty() {
  Appending no_rows;
  no_rows.q.shape[1] = no_rows.out.shape[1] = no_rows.lse.shape[2] = 0;
  no_rows.tree.view.shape[1] = no_rows.tree.view.shape[2] = 0;
  CHECK_EQ(no_rows.workspace_size(), std::size_t{0});
  no_rows.run({});
  CHECK(no_rows.out_memory.untouched());
  CHECK(no_rows.k_memory.bytes != no_rows.k_before && no_rows.v_memory.bytes != no_rows.v_before);
  Tensor k(DType::kFloat32, {1, 5 + 1, 2, 8});
  gather(no_rows, 1, no_rows.k_memory, no_rows.k_new, nullptr, true, k);

  Appending no_batch;
  for (TensorView* t :
       {&no_batch.q, &no_batch.out, &no_batch.lse, &no_batch.seqlens.view, &no_batch.places.view,
        &no_batch.pads.view, &no_batch.k_new.view, &no_batch.v_new.view}) {
    t->shape[0] = 0;
  }
  CHECK_EQ(no_batch.workspace_size(), std::size_t{0});
  no_batch.run({});
  CHECK(no_batch.untouched());

  // No keys at all: 0, and -inf or the sink.
  for (const bool sink : {false, true}) {
    Appending no_keys;
    no_keys.seqlens.assign<int32_t>({0, 0});
    no_keys.pads.assign<int32_t>({0, 0});
    no_keys.sinks.assign<float>({1, 2, 3, 4});
    no_keys.cache.k_new = no_keys.cache.v_new = nullptr;
    no_keys.cache.rotary_cos = no_keys.cache.rotary_sin = nullptr;
    if (!sink) no_keys.options.sinks = nullptr;
    const test::ExactBytes memory(no_keys.workspace_size());
    no_keys.run(memory.workspace());
    no_keys.out_memory.for_each([&](const Index& at) { CHECK(no_keys.out_memory.get(at) == 0.0); });
    no_keys.lse_memory.for_each([&](const Index& at) {
      CHECK(no_keys.lse_memory.get(at) == (sink ? static_cast<double>(at[1] + 1) : -INFINITY));
    });
  }
}

// One row more, of two heads each: the others stay.
void check_one_row() {
  Appending c;
  c.k_new.view.shape[1] = c.v_new.view.shape[1] = 1;
  CHECK(test::run_exactly(c.plan()));
  for (int64_t b = 0; b < 2; ++b) {
    const Index first = place(c, b, integers(c.seqlens)[b]);
    Index second = first;
    ++second[1];
    Tensor before(DType::kFloat32, c.v_memory.view.shape);
    before.bytes = c.v_before;
    before.view.data = before.bytes.data();
    CHECK(c.v_memory.get(first) == c.v_new.get({b, 0, 0, 0}));
    CHECK(c.v_memory.get(second) == before.get(second));
  }
}

// Rotation by no angle changes nothing, whatever rows of rotated queries look like.
void check_no_angle() {
  Tensor q(DType::kFloat32, {1, 2, 2, 16}), k(DType::kFloat32, {1, 4, 1, 16});
  Tensor v(DType::kFloat32, {1, 4, 1, 8}), out(DType::kFloat32, {1, 2, 2, 8});
  unsigned seed = 1;
  for (Tensor* t : {&q, &k, &v}) t->fill(seed++);
  SmallTensor cos(DType::kFloat32, {8, 8}), sin(DType::kFloat32, {8, 8});
  std::fill(cos.data<float>(), cos.data<float>() + 64, 1.0f);
  const auto tensors = test::kvcache_tensors(q.view, k.view, v.view, out.view);
  Tensor k_new(DType::kFloat32, {1, 1, 1, 16}), v_new(DType::kFloat32, {1, 1, 1, 8});
  k_new.fill(seed);
  v_new.fill(seed);
  SmallTensor filled(DType::kInt32, {1});
  filled.assign<int32_t>({3});
  anyflash::KvCacheOptions cache;
  cache.cache_seqlens = &filled.view;
  cache.k_new = &k_new.view;
  cache.v_new = &v_new.view;
  CHECK(test::run_exactly(anyflash::KvCachePlan(tensors, {}, cache)));
  const auto expected = out.bytes;
  cache.rotary_cos = &cos.view;
  cache.rotary_sin = &sin.view;
  CHECK(test::run_exactly(anyflash::KvCachePlan(tensors, {}, cache)));
  CHECK(out.bytes == expected);
}

void check_workspace() {
  Appending c;
  const std::size_t bytes = c.workspace_size();
  const test::ExactBytes memory(bytes);
  test::check_throws([&] { c.run({memory.workspace().data, bytes - 1}); }, "workspace",
                     test::kValue,
                     {"workspace has " + std::to_string(bytes - 1) + " bytes; " +
                      std::to_string(bytes) + " are needed"});
  CHECK(c.untouched());
}

}  // namespace

int main() {
  const test::ManyThreads many_threads;
  check_calls<Floats>();
  check_calls<Bytes>();
  check_calls<test::LatentOf<Floats>>();
  check_calls<test::LatentOf<Bytes>>();
  check_splits();
  check_empty();
  check_one_row();
  check_no_angle();
  check_workspace();
  return check::report();
}
