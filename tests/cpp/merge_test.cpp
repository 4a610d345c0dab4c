// merge_states() on the CPU: against its formula, against attention over all keys, and its errors.
#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "many_threads.h"
#include "tensor.h"
#include "validation/validation.h"

namespace {

using anyflash::DeviceType;
using anyflash::MergeOptions;
using anyflash::TensorView;
using test::check_throws;
using test::DType;
using test::Index;
using test::kType;
using test::kValue;
using test::Layout;
using test::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");

struct Shape {
  int64_t batch, rows, heads, columns;
};

// (batch, row, head, 1) as (batch, head, row).
TensorView lse_view(const Tensor& t) {
  TensorView view = t.view;
  std::swap(view.shape[1], view.shape[2]);
  std::swap(view.stride[1], view.stride[2]);
  view.rank = 3;
  return view;
}

// Without the first axis.
TensorView packed(const TensorView& t) {
  TensorView view = t;
  --view.rank;
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = t.shape[i + 1];
    view.stride[i] = t.stride[i + 1];
  }
  return view;
}

struct Parts {
  Parts(const Shape& s, DType part, DType result, Layout layout)
      : out_a(part, {s.batch, s.rows, s.heads, s.columns}, layout),
        out_b(part, {s.batch, s.rows, s.heads, s.columns}),
        out(result, {s.batch, s.rows, s.heads, s.columns}, layout),
        lse_a(DType::kFloat32, {s.batch, s.rows, s.heads, 1}),
        lse_b(DType::kFloat32, {s.batch, s.rows, s.heads, 1}, layout),
        lse(DType::kFloat32, {s.batch, s.rows, s.heads, 1}, layout) {
    out_a.fill(1);
    out_b.fill(2);
    lse_a.fill(3);
    lse_b.fill(4);
  }

  void merge(const MergeOptions& options = {}, bool with_lse = true) const {
    const TensorView a = lse_view(lse_a), b = lse_view(lse_b), result = lse_view(lse);
    anyflash::merge_states(out_a.view, a, out_b.view, b, out.view, with_lse ? &result : nullptr,
                           options);
  }

  Tensor out_a, out_b, out, lse_a, lse_b, lse;
};

double half_ulp(DType dtype) {
  return dtype == DType::kFloat16 ? 0x1p-11 : dtype == DType::kBFloat16 ? 0x1p-8 : 0.0;
}

// The formula in double precision, where both parts saw keys.
void check_formula(const Parts& p, const std::string& what, bool with_lse = true) {
  int wrong = 0;
  const DType dtype = p.out.view.dtype;
  const double sums = dtype == DType::kFloat64 ? 1e-14 : 1e-6;
  p.lse.for_each([&](const Index& row) {
    const double a = p.lse_a.get(row), b = p.lse_b.get(row);
    const double lse = std::log(std::exp(a) + std::exp(b));
    if (with_lse) wrong += !(std::fabs(p.lse.get(row) - lse) <= 1e-6 * (1 + std::fabs(lse)));
    for (int64_t c = 0; c < p.out.view.shape[3]; ++c) {
      const Index i{row[0], row[1], row[2], c};
      const double expected =
          std::exp(a - lse) * p.out_a.get(i) + std::exp(b - lse) * p.out_b.get(i);
      wrong +=
          !(std::fabs(p.out.get(i) - expected) <= half_ulp(dtype) * std::fabs(expected) + sums);
    }
  });
  CHECK_MSG(wrong == 0, what);
}

void check_types_and_layouts() {
  for (const DType part : test::kDTypes) {
    for (const DType result : test::kDTypes) {
      for (int layout = 0; layout <= static_cast<int>(Layout::kLast); ++layout) {
        const Parts p({2, 5, 3, 7}, part, result, static_cast<Layout>(layout));
        p.merge();
        check_formula(p, "types " + std::to_string(static_cast<int>(part)) + " " +
                             std::to_string(static_cast<int>(result)) + ", layout " +
                             std::to_string(layout));
      }
    }
  }
  const Parts p({2, 5, 3, 7}, DType::kFloat32, DType::kFloat32, Layout::kContiguous);
  p.merge({}, /*with_lse=*/false);
  check_formula(p, "no lse", /*with_lse=*/false);
  CHECK(p.lse.untouched());

  const Parts q({1, 5, 3, 7}, DType::kFloat32, DType::kFloat16, Layout::kSpread);
  const TensorView a = packed(lse_view(q.lse_a)), b = packed(lse_view(q.lse_b));
  const TensorView lse = packed(lse_view(q.lse));
  anyflash::merge_states(packed(q.out_a.view), a, packed(q.out_b.view), b, packed(q.out.view), &lse,
                         {});
  check_formula(q, "packed");
}

// A part that saw no key does not count, whatever its result holds.
void check_nothing_seen() {
  for (const double none : {-kInfinity, kInfinity}) {
    Parts p({1, 3, 1, 4}, DType::kFloat32, DType::kFloat32, Layout::kContiguous);
    p.lse_a.set({0, 0, 0, 0}, none);
    p.lse_b.set({0, 1, 0, 0}, none);
    p.lse_a.set({0, 2, 0, 0}, none);
    p.lse_b.set({0, 2, 0, 0}, -none);
    for (int64_t c = 0; c < 4; ++c) {
      p.out_a.set({0, 0, 0, c}, kNan);
      p.out_b.set({0, 1, 0, c}, kInfinity);
      p.out_a.set({0, 2, 0, c}, kNan);
    }
    p.merge();
    CHECK_EQ(p.lse.get({0, 0, 0, 0}), p.lse_b.get({0, 0, 0, 0}));
    CHECK_EQ(p.lse.get({0, 1, 0, 0}), p.lse_a.get({0, 1, 0, 0}));
    CHECK_EQ(p.lse.get({0, 2, 0, 0}), -kInfinity);
    for (int64_t c = 0; c < 4; ++c) {
      CHECK_EQ(p.out.get({0, 0, 0, c}), p.out_b.get({0, 0, 0, c}));
      CHECK_EQ(p.out.get({0, 1, 0, c}), p.out_a.get({0, 1, 0, c}));
      CHECK_EQ(p.out.get({0, 2, 0, c}), 0.0);
    }
  }
  // NaN is no such part.
  Parts p({1, 2, 1, 1}, DType::kFloat32, DType::kFloat32, Layout::kContiguous);
  p.lse_a.set({0, 0, 0, 0}, kNan);
  p.lse_b.set({0, 1, 0, 0}, kNan);
  p.lse_a.set({0, 1, 0, 0}, -kInfinity);
  p.merge();
  CHECK(std::isnan(p.lse.get({0, 0, 0, 0})) && std::isnan(p.out.get({0, 0, 0, 0})));
  CHECK(std::isnan(p.lse.get({0, 1, 0, 0})));
}

// LSEs whose exponentials float32 cannot hold.
void check_range() {
  Parts p({1, 3, 1, 2}, DType::kFloat32, DType::kFloat32, Layout::kContiguous);
  const double lses[3][2] = {{1e30, 1e30}, {-500.0, -500.0}, {300.0, -300.0}};
  for (int64_t row = 0; row < 3; ++row) {
    p.lse_a.set({0, row, 0, 0}, lses[row][0]);
    p.lse_b.set({0, row, 0, 0}, lses[row][1]);
  }
  p.merge();
  for (int64_t c = 0; c < 2; ++c) {
    for (const int64_t row : {0, 1}) {
      const double mean = (p.out_a.get({0, row, 0, c}) + p.out_b.get({0, row, 0, c})) / 2;
      CHECK_EQ(p.out.get({0, row, 0, c}), mean);
    }
    CHECK_EQ(p.out.get({0, 2, 0, c}), p.out_a.get({0, 2, 0, c}));
  }
  CHECK(std::fabs(p.lse.get({0, 1, 0, 0}) - (-500.0 + std::log(2.0))) < 1e-4);
  CHECK_EQ(p.lse.get({0, 2, 0, 0}), 300.0);
}

// The results may take the place of a part's; the number of threads changes no bit.
void check_in_place() {
  const Shape shape{2, 70, 8, 33};
  const Parts expected(shape, DType::kFloat32, DType::kFloat32, Layout::kContiguous);
  MergeOptions options;
  options.num_threads = 1;
  expected.merge(options);
  check_formula(expected, "one thread");
  for (const bool into_a : {true, false}) {
    Parts p(shape, DType::kFloat32, DType::kFloat32, Layout::kContiguous);
    const TensorView a = lse_view(p.lse_a), b = lse_view(p.lse_b);
    options.num_threads = 5;
    anyflash::merge_states(p.out_a.view, a, p.out_b.view, b, into_a ? p.out_a.view : p.out_b.view,
                           into_a ? &a : &b, options);
    CHECK((into_a ? p.out_a : p.out_b).bytes == expected.out.bytes);
    CHECK((into_a ? p.lse_a : p.lse_b).bytes == expected.lse.bytes);
  }
}

// The first keys, the others, and a sink: as attention over all of them.
void check_attention() {
  constexpr int64_t kKeys = 50, kFirst = 13;
  Tensor q(DType::kFloat64, {1, 9, 2, 8});
  Tensor k(DType::kFloat64, {1, kKeys, 2, 8});
  Tensor v(DType::kFloat64, {1, kKeys, 2, 5});
  q.fill(1);
  k.fill(2);
  v.fill(3);
  test::SmallTensor sinks(DType::kFloat32, {2});
  sinks.assign<float>({0.5f, -3.0f});
  const Parts p({1, 9, 2, 5}, DType::kFloat64, DType::kFloat64, Layout::kContiguous);
  const auto attend = [&](int64_t first, int64_t end, bool sink, const Tensor& out,
                          const Tensor& lse) {
    TensorView keys = k.view, values = v.view;
    for (TensorView* t : {&keys, &values}) {
      t->shape[1] = end - first;
      t->data = static_cast<double*>(t->data) + first * t->stride[1];
    }
    anyflash::ForwardOptions options;
    if (sink) options.sinks = &sinks.view;
    const TensorView l = lse_view(lse);
    const auto tensors = test::forward_tensors(q.view, keys, values, out.view, &l);
    CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, options)));
  };
  attend(0, kFirst, false, p.out_a, p.lse_a);
  attend(kFirst, kKeys, false, p.out_b, p.lse_b);
  p.merge();

  Parts expected({1, 9, 2, 5}, DType::kFloat64, DType::kFloat64, Layout::kContiguous);
  const auto compare = [&](const Tensor& out, const Tensor& lse) {
    // LSEs are float32.
    lse.for_each(
        [&](const Index& i) { CHECK(std::fabs(lse.get(i) - expected.lse.get(i)) < 1e-6); });
    out.for_each(
        [&](const Index& i) { CHECK(std::fabs(out.get(i) - expected.out.get(i)) < 1e-6); });
  };
  attend(0, kKeys, false, expected.out, expected.lse);
  compare(p.out, p.lse);

  attend(0, kKeys, true, expected.out, expected.lse);
  Parts with_sink({1, 9, 2, 5}, DType::kFloat64, DType::kFloat64, Layout::kContiguous);
  with_sink.out_a.bytes = p.out.bytes;
  with_sink.lse_a.bytes = p.lse.bytes;
  with_sink.out_b.for_each([&](const Index& i) { with_sink.out_b.set(i, 0.0); });
  with_sink.lse_b.for_each(
      [&](const Index& i) { with_sink.lse_b.set(i, sinks.data<float>()[i[2]]); });
  with_sink.merge();
  compare(with_sink.out, with_sink.lse);
}

// Arguments that are allowed: batch 2, 5 rows, 3 heads, 7 columns.
struct Call {
  Parts parts{{2, 5, 3, 7}, DType::kFloat32, DType::kFloat32, Layout::kContiguous};
  TensorView out_a = parts.out_a.view, out_b = parts.out_b.view, out = parts.out.view;
  TensorView lse_a = lse_view(parts.lse_a), lse_b = lse_view(parts.lse_b),
             lse = lse_view(parts.lse);
  MergeOptions options;

  void merge() const { anyflash::merge_states(out_a, lse_a, out_b, lse_b, out, &lse, options); }
};

const test::CaseOf<Call> kCases[] = {
    {"rank",
     [](Call& c) { c.out_a.rank = 2; },
     kValue,
     {"out_a has 2 dimensions", "(batch, seqlen_q, heads, head_dim_v), or (total_q"}},
    {"b's rank",
     [](Call& c) { c.out_b.rank = 3; },
     kValue,
     {"out_b has 3 dim", "expected 4: as out_a"}},
    {"b's shape",
     [](Call& c) { c.out_b.shape[3] = 6; },
     kValue,
     {"out_b has shape (2, 5, 3, 6); expected (2, 5, 3, 7), as out_a"}},
    {"b's batch", [](Call& c) { c.out_b.shape[0] = 1; }, kValue, {"out_b has shape (1, 5, 3, 7)"}},
    {"packed lse_b's shape",
     [](Call& c) {
       for (TensorView* t : {&c.out_a, &c.out_b, &c.out}) t->rank = 3;
       c.lse_a.rank = c.lse_b.rank = 2;
       c.lse_a.shape = {5, 2, 0, 0};
     },
     kValue,
     {"lse_b has shape (2, 3); expected (5, 2): (heads, total_q)"}},
    {"address",
     [](Call& c) { c.out.data = static_cast<char*>(c.out.data) + 1; },
     kValue,
     {"out is float32, but its address is not a multiple of 4 bytes"}},
    {"b's address",
     [](Call& c) { c.out_b.data = static_cast<char*>(c.out_b.data) + 2; },
     kValue,
     {"out_b is float32, but its address"}},
    {"lse's address",
     [](Call& c) { c.lse_a.data = static_cast<char*>(c.lse_a.data) + 2; },
     kValue,
     {"lse_a is float32, but its address"}},
    {"shape", [](Call& c) { c.out.shape[1] = 1; }, kValue, {"out has shape (2, 1, 3, 7)"}},
    {"lse_a's shape",
     [](Call& c) { std::swap(c.lse_a.shape[1], c.lse_a.shape[2]); },
     kValue,
     {"lse_a has shape (2, 5, 3); expected (2, 3, 5): (batch, heads, seqlen_q)"}},
    {"lse_b's rank", [](Call& c) { c.lse_b.rank = 2; }, kValue, {"lse_b has 2 dim", "heads"}},
    {"lse's shape", [](Call& c) { c.lse.shape[0] = 1; }, kValue, {"lse has shape (1, 3, 5)"}},
    {"a's type",
     [](Call& c) { c.out_a.dtype = DType::kInt32; },
     kType,
     {"out_a is int32; float64, float32, float16 and bfloat16 are allowed"}},
    {"b's type",
     [](Call& c) { c.out_b.dtype = DType::kFloat16; },
     kType,
     {"out_b is float16, but out_a is float32; both must have one dtype"}},
    {"type", [](Call& c) { c.out.dtype = DType::kBool; }, kType, {"out is bool; float64"}},
    {"lse_a's type",
     [](Call& c) { c.lse_a.dtype = DType::kFloat16; },
     kType,
     {"lse_a is float16; it must be float32 or, on the CPU, float64"}},
    {"one of float64",
     [](Call& c) { c.lse_a.dtype = DType::kFloat64; },
     kType,
     {"lse_b is float32, but lse_a is float64; both must have one dtype"}},
    {"lse's type", [](Call& c) { c.lse.dtype = DType::kInt64; }, kType, {"lse is int64"}},
    {"device",
     [](Call& c) { c.out.device = {DeviceType::kCuda, 0}; },
     kValue,
     {"out is on cuda:0, but out_a is on cpu; all tensors"}},
    {"lse_b's device",
     [](Call& c) { c.lse_b.device = {DeviceType::kCuda, 2}; },
     kValue,
     {"lse_b is on cuda:2, but out_a is on cpu"}},
    {"data", [](Call& c) { c.lse_b.data = nullptr; }, kValue, {"lse_b has a NULL data pointer"}},
    {"repeats elements",
     [](Call& c) { c.out.stride[1] = 0; },
     kValue,
     {"out has stride 0 in dimension 1"}},
    {"lse repeats elements",
     [](Call& c) { c.lse.stride[1] = 0; },
     kValue,
     {"lse has stride 0 in dimension 1"}},
    {"threads", [](Call& c) { c.options.num_threads = -1; }, kValue, {"num_threads is -1"}},
};

void check_errors() {
  for (const auto& test_case : kCases) {
    Call call;
    test_case.change(call);
    check_throws([&] { call.merge(); }, test_case.name, test_case.code, test_case.words);
    CHECK_MSG(call.parts.out.untouched() && call.parts.lse.untouched(), test_case.name);
  }
  Call gpu;
  for (TensorView* t : {&gpu.out_a, &gpu.out_b, &gpu.out, &gpu.lse_a, &gpu.lse_b, &gpu.lse}) {
    t->device = {DeviceType::kCuda, 0};
  }
  gpu.lse_b.dtype = DType::kFloat64;
  check_throws([&] { gpu.merge(); }, "float64 LSE on a GPU", kType,
               {"lse_b is float64; it must be float32 or, on the CPU, float64"});
  gpu.out.dtype = DType::kFloat64;
  check_throws([&] { gpu.merge(); }, "float64 on a GPU", kType,
               {"out is float64; on a GPU float32, float16 and bfloat16 are allowed"});
}

void check_empty() {
  const Parts p({2, 0, 3, 7}, DType::kFloat32, DType::kFloat32, Layout::kContiguous);
  p.merge();
  CHECK(p.out.untouched() && p.lse.untouched());
}

}  // namespace

int main() {
  const test::ManyThreads many_threads;
  check_types_and_layouts();
  check_nothing_seen();
  check_range();
  check_in_place();
  check_attention();
  check_errors();
  check_empty();
  return check::report();
}
