// What plans of all operations promise: they need no TensorView and no options once they are made,
// may be copied, and run as often as wanted.
#include <algorithm>
#include <functional>
#include <vector>

#include "backward_problem.h"
#include "check.h"
#include "kvcache_problem.h"
#include "tensor.h"
#include "validation/validation.h"

namespace {

using test::Appending;
using test::BackwardProblem;
using test::DType;
using test::Layout;
using test::Tensor;

// `forget` overwrites all that the plan was made of. Each run writes the results anew.
template <class Plan>
void check_plan(const Plan& plan, const std::vector<Tensor*>& results,
                const std::function<void()>& forget) {
  const auto run = [&](const Plan& of) {
    std::vector<std::vector<unsigned char>> written;
    for (Tensor* t : results) std::fill(t->bytes.begin(), t->bytes.end(), 0xa5);
    CHECK(test::run_exactly(of));
    for (const Tensor* t : results) written.push_back(t->bytes);
    return written;
  };
  const auto expected = run(plan);
  for (const auto& bytes : expected) CHECK(bytes != std::vector<unsigned char>(bytes.size(), 0xa5));
  forget();
  CHECK(run(plan) == expected);
  const Plan copy = plan;
  CHECK(run(copy) == expected);
}

void forget_options(BackwardProblem& p) {
  p.options = {};
  p.wanted = {};
  for (auto& view : p.views) view = {};
  if (p.blocks) p.blocks->view = {};
}

void check_forward_and_backward(unsigned set) {
  const test::Shape shape{2, 70, 90, 4, 2, 33, 20};
  BackwardProblem forward(shape, set, DType::kFloat32, Layout::kContiguous, 1);
  check_plan(forward.forward_plan(), {&*forward.out, &*forward.lse},
             [&] { forget_options(forward); });
  BackwardProblem p(shape, set, DType::kFloat32, Layout::kContiguous, 1);
  p.forward();
  std::vector<Tensor*> gradients = {&*p.dq, &*p.dk, &*p.dv};
  for (auto* t : {&p.dbias, &p.dsinks, &p.dslopes}) {
    if (*t) gradients.push_back(&**t);
  }
  check_plan(p.backward_plan(), gradients, [&] { forget_options(p); });
}

// The forward's outputs among the options.
void check_side_outputs() {
  test::Full call;
  Tensor mask(DType::kBool, {2, 4, 5, 6});
  call.options.dropout_mask = &mask.view;
  const auto plan = call.plan();
  check_plan(plan, {&mask, &call.out_memory}, [&] {
    call.options = {};
    mask.view = {};
    for (auto* t : {&call.slopes, &call.bias, &call.blocks, &call.sinks, &call.rng_state,
                    &call.maxima, &call.used}) {
      t->view = {};
    }
  });
}

void check_decoding() {
  Appending call;
  check_plan(call.plan(), {&call.out_memory, &call.lse_memory}, [&] {
    call.options = {};
    call.cache = {};
    for (auto* t : {&call.seqlens, &call.places, &call.pads, &call.tree, &call.cos, &call.sin,
                    &call.slopes, &call.sinks}) {
      t->view = {};
    }
    for (Tensor* t : {&call.k_new, &call.v_new}) t->view = {};
  });
}

}  // namespace

int main() {
  check_forward_and_backward(0);
  check_forward_and_backward(test::kAll & ~test::kPacked);
  check_forward_and_backward(test::kAll);
  check_side_outputs();
  check_decoding();
  return check::report();
}
