// Results that go on from earlier ones: the forward with prior_out and prior_lse, the backward that
// adds to its gradients.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "backward_problem.h"
#include "check.h"
#include "tensor.h"
#include "validation/validation.h"

namespace {

using anyflash::ForwardOptions;
using anyflash::TensorView;
using test::BackwardProblem;
using test::Call;
using test::check_case;
using test::DType;
using test::Index;
using test::kType;
using test::kValue;
using test::Layout;
using test::Tensor;

// Keys from `begin` on, `count` of them.
TensorView keys(const Tensor& t, int64_t begin, int64_t count) {
  TensorView part = t.view;
  part.data = static_cast<char*>(part.data) + begin * part.stride[1] * test::bytes_of(t.view.dtype);
  part.shape[1] = count;
  return part;
}

TensorView lse_of(const Tensor& t) {
  TensorView view = t.view;
  view.rank = 3;
  return view;
}

// Attention over 2 and then 4 of 6 keys is that over all.
void check_parts(DType dtype, Layout layout, bool packed) {
  Tensor q(dtype, {packed ? 1 : 2, 5, 4, 8}, layout), k(dtype, {packed ? 1 : 2, 6, 2, 8}, layout);
  Tensor v(dtype, {packed ? 1 : 2, 6, 2, 3}, layout);
  const DType wide = dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  const Index of_out = {packed ? 1 : 2, 5, 4, 3}, of_lse = {packed ? 1 : 2, 4, 5, 1};
  Tensor whole(wide, of_out), part(wide, of_out, layout), joined(wide, of_out, layout);
  Tensor lse(DType::kFloat32, of_lse), lse_part(DType::kFloat32, of_lse, layout);
  Tensor lse_joined(DType::kFloat32, of_lse, layout);
  for (Tensor* t : {&q, &k, &v}) t->fill(static_cast<unsigned>(t->view.shape[3]));

  test::SmallTensor starts(DType::kInt32, {2}), ends(DType::kInt32, {2});
  const auto run = [&](int64_t begin, int64_t count, const Tensor& out, const Tensor& lses,
                       ForwardOptions options) {
    // AMX rounds probabilities to bfloat16, by another reference in each part.
    if (dtype == DType::kBFloat16) options.cpu_isa = anyflash::CpuIsa::kBaseline;
    TensorView views[] = {q.view, keys(k, begin, count), keys(v, begin, count), out.view};
    TensorView l = lse_of(lses);
    if (packed) {
      starts.assign<int32_t>({0, 5});
      ends.assign<int32_t>({0, static_cast<int32_t>(count)});
      options.cu_seqlens_q = &starts.view;
      options.cu_seqlens_k = &ends.view;
      options.max_seqlen_q = 5;
      options.max_seqlen_k = count;
      for (TensorView& t : views) {
        t.rank = 3;
        for (int i = 0; i < 3; ++i) t.shape[i] = t.shape[i + 1], t.stride[i] = t.stride[i + 1];
      }
      l.rank = 2;
      for (int i = 0; i < 2; ++i) l.shape[i] = l.shape[i + 1], l.stride[i] = l.stride[i + 1];
    }
    TensorView prior_out = part.view, prior_lse = lse_of(lse_part);
    if (packed) {
      prior_out = test::without(part, 1);
      prior_lse = test::without(lse_part, 1);
      prior_lse.rank = 2;
    }
    if (begin > 0) {
      options.prior_out = &prior_out;
      options.prior_lse = &prior_lse;
    }
    const auto tensors = test::forward_tensors(views[0], views[1], views[2], views[3], &l);
    CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, options)));
  };
  run(0, 6, whole, lse, {});
  run(0, 2, part, lse_part, {});
  run(2, 4, joined, lse_joined, {});
  int wrong = 0;
  joined.for_each([&](const Index& i) {
    wrong += !(std::fabs(joined.get(i) - whole.get(i)) <= 1e-5 + 1e-5 * std::fabs(whole.get(i)));
  });
  lse_joined.for_each(
      [&](const Index& i) { wrong += !(std::fabs(lse_joined.get(i) - lse.get(i)) <= 1e-5); });
  CHECK_MSG(wrong == 0, "dtype " + std::to_string(static_cast<int>(dtype)) + ", layout " +
                            std::to_string(static_cast<int>(layout)) + (packed ? ", packed" : ""));
}

// A call with the state of another one.
struct Continued : Call {
  Continued() {
    options.prior_out = &state;
    options.prior_lse = &state_lse;
    state_memory.fill(7);
    state_lse_memory.fill(8);
  }
  Tensor state_memory{DType::kFloat32, {2, 5, 4, 3}};
  Tensor state_lse_memory{DType::kFloat32, {2, 4, 5, 1}};
  TensorView state = state_memory.view;
  TensorView state_lse = lse_of(state_lse_memory);
};

const test::CaseOf<Continued> kCases[] = {
    {"out alone",
     [](Continued& c) { c.options.prior_lse = nullptr; },
     kValue,
     {"prior_out is given without prior_lse; both"}},
    {"lse alone",
     [](Continued& c) { c.options.prior_out = nullptr; },
     kValue,
     {"prior_lse is given without prior_out; both"}},
    {"out shape",
     [](Continued& c) { c.state.shape[2] = 3; },
     kValue,
     {"prior_out has shape (2, 5, 3, 3); expected (2, 5, 4, 3), as out"}},
    {"out device",
     [](Continued& c) { c.state = test::on_gpu(c.state); },
     kValue,
     {"prior_out is on cuda:0"}},
    {"out type",
     [](Continued& c) { c.state.dtype = DType::kFloat64; },
     kType,
     {"prior_out is float64; it must be float32"}},
    {"out address",
     [](Continued& c) { c.state.data = static_cast<char*>(c.state.data) + 2; },
     kValue,
     {"prior_out is float32, but its address is not a multiple of 4"}},
    {"lse shape",
     [](Continued& c) { c.state_lse.shape[1] = 3; },
     kValue,
     {"prior_lse has shape (2, 3, 5)"}},
    {"lse type",
     [](Continued& c) { c.state_lse.dtype = DType::kFloat16; },
     kType,
     {"prior_lse is float16; it must be float32 or, on the CPU, float64"}},
};

// The widest windows hide nothing, also where the host knows the positions: a call is not left out.
void check_bug_widest_windows() {
  const auto set = [](ForwardOptions& options, bool left) {
    (left ? options.window_left : options.window_right) = INT64_MAX;
    (left ? options.key_start : options.query_start) = 8;
  };
  for (const bool left : {false, true}) {
    Continued call;
    set(call.options, left);
    call.out = call.state;
    call.lse = call.state_lse;
    const std::vector<unsigned char> before = call.state_memory.bytes;
    CHECK(test::run_exactly(call.plan()));
    CHECK_MSG(call.state_memory.bytes != before, left ? "left" : "right");

    BackwardProblem p({1, 5, 6, 4, 2, 8, 3}, 0, DType::kFloat32, Layout::kContiguous, 5);
    set(p.options, left);
    p.forward();
    p.backward();
    const std::vector<unsigned char> once = p.dk->bytes;
    p.wanted.accumulate_dq = p.wanted.accumulate_dkv = true;
    p.backward();
    CHECK_MSG(p.dk->bytes != once, left ? "left" : "right");
  }
}

// The second of two calls adds what the first one has written.
void check_accumulated() {
  const test::Shape shape{2, 33, 40, 4, 2, 16, 24};
  for (const bool queries : {false, true}) {
    BackwardProblem p(shape, test::kCausal, DType::kFloat32, Layout::kContiguous, 5);
    p.forward();
    p.backward();
    const Tensor& added = queries ? *p.dq : *p.dk;
    const Tensor& written = queries ? *p.dk : *p.dq;
    const std::vector<unsigned char> once = added.bytes, same = written.bytes;
    (queries ? p.wanted.accumulate_dq : p.wanted.accumulate_dkv) = true;
    p.backward();
    CHECK(written.bytes == same);
    int wrong = 0;
    Tensor first(DType::kFloat32, added.view.shape);
    first.bytes = once;
    first.view.data = first.bytes.data();
    first.for_each([&](const Index& i) {
      wrong +=
          !(std::fabs(added.get(i) - 2 * first.get(i)) <= 1e-6 + 1e-6 * std::fabs(first.get(i)));
    });
    CHECK_MSG(wrong == 0, queries ? "dq" : "dk");
  }
}

}  // namespace

int main() {
  for (const bool packed : {false, true}) {
    for (int layout = 0; layout <= static_cast<int>(Layout::kLast); ++layout) {
      for (const DType dtype : test::kDTypes) {
        check_parts(dtype, static_cast<Layout>(layout), packed);
      }
    }
  }
  test::check_allowed<Continued>();
  for (const auto& test_case : kCases) check_case(test_case);
  check_accumulated();
  check_bug_widest_windows();
  return check::report();
}
