// ForwardPlan on the CPU against the textbook formula in double precision.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "isas.h"
#include "many_threads.h"
#include "tensor.h"

namespace {

using anyflash::CpuIsa;
using anyflash::ForwardOptions;
using anyflash::ForwardPlan;
using test::DType;
using test::Index;
using test::Layout;
using test::Tensor;

struct Shape {
  int64_t batch, seqlen_q, seqlen_k, heads, heads_k, head_dim, head_dim_v;
};

struct Problem {
  Problem(DType dtype, const Shape& s, Layout layout, unsigned seed)
      : shape(s),
        q(dtype, {s.batch, s.seqlen_q, s.heads, s.head_dim}, layout),
        k(dtype, {s.batch, s.seqlen_k, s.heads_k, s.head_dim}, layout),
        v(dtype, {s.batch, s.seqlen_k, s.heads_k, s.head_dim_v}, layout),
        out(dtype, {s.batch, s.seqlen_q, s.heads, s.head_dim_v}, layout),
        // As (batch, row, head, 1), which the call sees as (batch, head, row).
        lse(DType::kFloat32, {s.batch, s.seqlen_q, s.heads, 1}, layout) {
    q.fill(seed);
    k.fill(seed + 1);
    v.fill(seed + 2);
  }

  anyflash::TensorView lse_view() const {
    anyflash::TensorView view = lse.view;
    std::swap(view.shape[1], view.shape[2]);
    std::swap(view.stride[1], view.stride[2]);
    view.rank = 3;
    return view;
  }

  void run(const ForwardOptions& options, bool with_lse = true, void* stream = nullptr) {
    const anyflash::TensorView view = lse_view();
    const auto tensors =
        test::forward_tensors(q.view, k.view, v.view, out.view, with_lse ? &view : nullptr);
    CHECK(test::run_exactly(ForwardPlan(tensors, options), stream));
  }

  Shape shape;
  Tensor q, k, v, out, lse;
};

std::string text(const Problem& p, const ForwardOptions& o) {
  const Shape& s = p.shape;
  std::string result = "dtype " + std::to_string(static_cast<int>(p.q.view.dtype)) + ", shape";
  for (const int64_t n :
       {s.batch, s.seqlen_q, s.seqlen_k, s.heads, s.heads_k, s.head_dim, s.head_dim_v}) {
    result += " " + std::to_string(n);
  }
  return result + ", causal " + std::to_string(o.causal) + ", isa " +
         std::to_string(static_cast<int>(o.cpu_isa)) + ", strides " +
         std::to_string(p.q.view.stride[1]) + " " + std::to_string(p.q.view.stride[3]);
}

// One row of the formula: fills `out` and returns the log-sum-exp.
double textbook_row(const Problem& p, const ForwardOptions& o, const Index& row,
                    std::vector<double>& out) {
  const Shape& s = p.shape;
  const double scale = o.softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(s.head_dim)));
  const int64_t head_k = row[2] / (s.heads / s.heads_k);
  const int64_t diagonal = row[1] + s.seqlen_k - s.seqlen_q;
  const int64_t end = o.causal ? std::clamp<int64_t>(diagonal + 1, 0, s.seqlen_k) : s.seqlen_k;
  out.assign(static_cast<std::size_t>(s.head_dim_v), 0.0);
  std::vector<double> scores;
  double maximum = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < end; ++j) {
    double score = 0.0;
    for (int64_t c = 0; c < s.head_dim; ++c) {
      score += p.q.get({row[0], row[1], row[2], c}) * p.k.get({row[0], j, head_k, c});
    }
    scores.push_back(scale * score);
    maximum = std::max(maximum, scores.back());
  }
  double sum = 0.0;
  for (double& score : scores) sum += score = std::exp(score - maximum);
  for (int64_t j = 0; j < end; ++j) {
    for (int64_t c = 0; c < s.head_dim_v; ++c) {
      out[static_cast<std::size_t>(c)] +=
          scores[static_cast<std::size_t>(j)] / sum * p.v.get({row[0], j, head_k, c});
    }
  }
  return end == 0 ? maximum : maximum + std::log(sum);
}

// Errors: half a unit of the last place of the result, that of sums in the type of computation, and
// what else is `allowed`.
bool close(double got, double expected, DType dtype, double allowed) {
  if (!std::isfinite(expected)) return got == expected;
  const double half_ulp = dtype == DType::kFloat16    ? std::ldexp(1.0, -11)
                          : dtype == DType::kBFloat16 ? std::ldexp(1.0, -8)
                                                      : 0.0;
  const double sums = dtype == DType::kFloat64 ? 1e-13 : 4e-6;
  return std::fabs(got - expected) <= half_ulp * std::fabs(expected) + sums + allowed;
}

// AMX rounds the probabilities of bfloat16 to it: 2^-9 of values up to the largest.
double allowed_by_amx(const Problem& p, const ForwardOptions& o) {
  const bool best = o.cpu_isa == CpuIsa::kAuto && anyflash::build_info().cpu_isa == "amx";
  if (p.v.view.dtype != DType::kBFloat16 || (o.cpu_isa != CpuIsa::kAmx && !best)) return 0;
  double largest = 0;
  p.v.for_each([&](const Index& at) {
    const double size = std::fabs(p.v.get(at));
    if (std::isfinite(size)) largest = std::max(largest, size);
  });
  return std::ldexp(largest, -9);
}

void check_result(const Problem& p, const ForwardOptions& options, bool with_lse = true) {
  std::vector<double> expected;
  int wrong = 0;
  int wrong_lse = 0;
  const double allowed = allowed_by_amx(p, options);
  p.lse.for_each([&](const Index& row) {
    const double lse = textbook_row(p, options, row, expected);
    for (int64_t c = 0; c < p.shape.head_dim_v; ++c) {
      const double got = p.out.get({row[0], row[1], row[2], c});
      wrong += !close(got, expected[static_cast<std::size_t>(c)], p.out.view.dtype, allowed);
    }
    // LSE is float32 for every dtype.
    if (with_lse)
      wrong_lse += !(std::fabs(p.lse.get(row) - lse) <= 4e-6 * (1 + std::fabs(lse)) ||
                     p.lse.get(row) == lse);
  });
  CHECK_MSG(wrong == 0, text(p, options));
  CHECK_MSG(wrong_lse == 0, text(p, options));
}

const Shape kShapes[] = {
    {1, 1, 1, 1, 1, 1, 1},     {2, 5, 7, 4, 2, 8, 8},      {1, 33, 70, 3, 3, 20, 13},
    {1, 70, 33, 2, 1, 16, 24}, {2, 1, 130, 8, 2, 64, 64},  {1, 200, 129, 2, 2, 7, 5},
    {1, 3, 0, 2, 1, 4, 4},     {1, 65, 65, 1, 1, 128, 96},
};

void check_shapes() {
  unsigned seed = 1;
  for (const CpuIsa isa : test::isas()) {
    for (const DType dtype : test::kDTypes) {
      for (const Shape& shape : kShapes) {
        for (const bool causal : {false, true}) {
          // The layouts take turns, so that each meets every dtype and instruction set.
          const auto layout = static_cast<Layout>(seed % (static_cast<int>(Layout::kLast) + 1));
          Problem p(dtype, shape, layout, seed);
          ForwardOptions options;
          options.causal = causal;
          options.cpu_isa = isa;
          options.num_threads = 1 + static_cast<int>(seed % 3);
          p.run(options);
          check_result(p, options);
          seed += 3;
        }
      }
    }
  }
}

void check_layouts() {
  const Shape shape{2, 19, 21, 4, 2, 12, 10};
  for (int i = 0; i <= static_cast<int>(Layout::kLast); ++i) {
    Problem p(DType::kFloat32, shape, static_cast<Layout>(i), 5);
    ForwardOptions options;
    options.causal = true;
    p.run(options);
    check_result(p, options);
    // Only the elements of out and lse are written, not the gaps between them.
    const auto elements = static_cast<std::size_t>(2 * 19 * 4 * 10);
    CHECK(p.out.unwritten() + elements * 4 >= p.out.bytes.size());
  }
  // Keys and values that are shared by all batches: stride 0.
  Problem p(DType::kFloat32, shape, Layout::kContiguous, 6);
  p.k.view.stride[0] = p.v.view.stride[0] = 0;
  p.run({});
  check_result(p, {});
}

void check_options() {
  const Shape shape{1, 40, 50, 2, 2, 16, 16};
  for (const double scale : {1.0, 0.0, -0.5, 3.0}) {
    Problem p(DType::kFloat64, shape, Layout::kContiguous, 7);
    ForwardOptions options;
    options.softmax_scale = scale;
    p.run(options);
    check_result(p, options);
  }
  Problem with(DType::kFloat32, shape, Layout::kContiguous, 8);
  Problem without(DType::kFloat32, shape, Layout::kContiguous, 8);
  ForwardOptions options;
  with.run(options);
  options.num_threads = 5;
  int stream = 0;  // means nothing on a CPU
  without.run(options, /*with_lse=*/false, &stream);
  CHECK(with.out.bytes == without.out.bytes);  // whatever the number of threads, bit by bit
  CHECK(without.lse.untouched());
}

void check_empty() {
  for (const Shape& shape : {Shape{0, 4, 4, 2, 1, 8, 8}, Shape{2, 0, 4, 2, 1, 8, 8}}) {
    Problem p(DType::kFloat32, shape, Layout::kContiguous, 9);
    p.run({});
    CHECK(p.out.untouched());
    CHECK(p.lse.untouched());
  }
}

// Eight callers at once, each with tensors of its own, all with one result.
void check_threads() {
  const Shape shape{1, 96, 160, 4, 2, 32, 32};
  ForwardOptions options;
  options.causal = true;
  options.num_threads = 2;
  Problem reference(DType::kBFloat16, shape, Layout::kContiguous, 10);
  reference.run(options);
  check_result(reference, options);
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 5; ++repeat) {
        Problem p(DType::kBFloat16, shape, Layout::kContiguous, 10);
        p.run(options);
        CHECK(p.out.bytes == reference.out.bytes);
        CHECK(p.lse.bytes == reference.lse.bytes);
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main() {
  const test::ManyThreads many_threads;
  check_shapes();
  check_layouts();
  check_options();
  check_empty();
  check_threads();
  return check::report();
}
