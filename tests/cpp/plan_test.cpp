// What plans of all operations promise: they need no TensorView and no options once they are made,
// may be copied, and run as often as wanted.
#include <algorithm>
#include <cstdint>
#include <fstream>
#include <functional>
#include <string>
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

// How many threads the process has; 0 where that is not known.
int threads() {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.rfind("Threads:", 0) == 0) return std::stoi(line.substr(8));
  }
  return 0;
}

// Two threads are worth their while for this much; the caller asks for one.
void check_one_thread() {
  const int before = threads();
  Tensor q(DType::kFloat32, {1, 512, 2, 64}), out(DType::kFloat32, {1, 512, 2, 64});
  q.fill(1);
  anyflash::ForwardOptions options;
  options.num_threads = 1;
  const auto tensors = test::forward_tensors(q.view, q.view, q.view, out.view);
  CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, options)));
  CHECK_EQ(threads(), before);
}

uint64_t launches() {
  uint64_t count = 0;
  for (const auto& kernel : anyflash::kernels()) count += kernel.launches;
  return count;
}

// Nothing is launched where nothing is written, and nothing is needed for it.
void check_empty_backward() {
  BackwardProblem no_rows({2, 0, 0, 4, 2, 33, 20}, 0, DType::kFloat32, Layout::kContiguous, 1);
  BackwardProblem no_batch({0, 3, 5, 4, 2, 8, 8}, 0, DType::kFloat32, Layout::kContiguous, 1);
  test::SmallTensor bias(DType::kFloat32, {0, 4, 3, 5});
  no_batch.options.bias = no_batch.wanted.dbias = &bias.view;
  for (BackwardProblem* p : {&no_rows, &no_batch}) {
    const auto plan = p->backward_plan();
    CHECK_EQ(plan.workspace_bytes(), std::size_t{0});
    const uint64_t before = launches();
    plan.run({});
    CHECK_EQ(launches(), before);
  }
}

}  // namespace

int main() {
  check_one_thread();
  check_empty_backward();
  check_forward_and_backward(0);
  check_forward_and_backward(test::kAll & ~test::kPacked);
  check_forward_and_backward(test::kAll);
  check_side_outputs();
  check_decoding();
  return check::report();
}
