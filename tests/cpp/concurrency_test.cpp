// Threads that call at once: each gets the bits that it gets alone. Every function of the library
// is called beside every other one, on shared inputs. cmake --preset tsan builds this with the
// library under Thread Sanitizer, which reports a race that results may not show.
#include <algorithm>
#include <atomic>
#include <functional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "anyflash/anyflash.h"
#include "anyflash/attention.h"
#include "backward_problem.h"
#include "check.h"
#include "isas.h"
#include "kvcache_problem.h"
#include "many_threads.h"
#include "tensor.h"

namespace anyflash {

void prefer_kernel(const char* name);  // the library's: cpp/src/prefer_kernel.h

}  // namespace anyflash

namespace {

using anyflash::CpuIsa;
using anyflash::DType;
using anyflash::TensorView;
using test::BackwardProblem;
using test::Index;
using test::Tensor;
using Bytes = std::vector<unsigned char>;
// What a thread does over and over; its results.
using Work = std::function<Bytes()>;

constexpr int kRounds = 8;
constexpr test::Shape kShape{2, 40, 70, 4, 2, 24, 16};

Bytes joined(std::initializer_list<const Tensor*> tensors) {
  Bytes result;
  for (const Tensor* t : tensors) result.insert(result.end(), t->bytes.begin(), t->bytes.end());
  return result;
}

// Forward and backward of a problem that all threads read, into tensors of the thread's own.
class Training {
 public:
  explicit Training(const BackwardProblem& problem) : p_(problem) {}

  Bytes forward() {
    const TensorView lse = p_.lse_view(lse_);
    auto options = p_.options;
    TensorView max_logits = test::without(max_logits_, 2);
    options.max_logits = &max_logits;
    const anyflash::ForwardPlan plan(
        test::forward_tensors(p_.main_view(*p_.q), p_.main_view(*p_.k), p_.main_view(*p_.v),
                              p_.main_view(out_), &lse),
        options);
    CHECK(test::run_exactly(plan));
    return joined({&out_, &lse_, &max_logits_});
  }

  Bytes backward() {
    anyflash::BackwardTensors tensors;
    tensors.dout = p_.main_view(*p_.dout);
    tensors.q = p_.main_view(*p_.q);
    tensors.k = p_.main_view(*p_.k);
    tensors.v = p_.main_view(*p_.v);
    tensors.out = p_.main_view(*p_.out);
    tensors.lse = p_.lse_view(*p_.lse);
    tensors.dq = p_.main_view(dq_);
    tensors.dk = p_.main_view(dk_);
    tensors.dv = p_.main_view(dv_);
    CHECK(test::run_exactly(anyflash::BackwardPlan(tensors, p_.options, {})));
    return joined({&dq_, &dk_, &dv_});
  }

 private:
  static Index shape(const Tensor& t) { return t.view.shape; }

  const BackwardProblem& p_;
  Tensor out_{p_.out->view.dtype, shape(*p_.out)};
  Tensor lse_{DType::kFloat32, shape(*p_.lse)};
  Tensor max_logits_{DType::kFloat32, {1, 1, p_.shape.batch, p_.shape.heads}};
  Tensor dq_{p_.q->view.dtype, shape(*p_.q)};
  Tensor dk_{p_.k->view.dtype, shape(*p_.k)};
  Tensor dv_{p_.v->view.dtype, shape(*p_.v)};
};

// Every call begins with the same caches.
template <class Call>
Bytes generate(Call& call) {
  call.k_memory.bytes = call.k_before;
  call.v_memory.bytes = call.v_before;
  CHECK(test::run_exactly(call.plan()));
  return joined({&call.out_memory, &call.lse_memory, &call.k_memory, &call.v_memory});
}

Bytes merge(const BackwardProblem& parts) {
  Tensor out(parts.out->view.dtype, parts.out->view.shape);
  const TensorView lse = parts.lse_view(*parts.lse);
  anyflash::MergeOptions options;
  options.num_threads = 3;
  anyflash::merge_states(parts.out->view, lse, parts.dout->view, lse, out.view, nullptr, options);
  return out.bytes;
}

// An error that another thread does not make: the last one is each thread's own.
Bytes refused(int number) {
  std::vector<float> x(64);
  std::vector<int64_t> shape(4, 2);
  shape[0] = number;
  DLTensor q{};
  q.data = x.data();
  q.device = {kDLCPU, 0};
  q.ndim = 4;
  q.dtype = {kDLFloat, 32, 1};
  q.shape = shape.data();
  DLTensor k = q;
  k.ndim = 3;
  CHECK_EQ(anyflash_forward(&q, &k, &q, &q, nullptr, nullptr, nullptr, 0), ANYFLASH_INVALID_VALUE);
  std::this_thread::yield();
  CHECK(check::contains(anyflash_last_error(), "k has 3 dimensions"));
  k = q;
  k.dtype.bits = static_cast<uint8_t>(number);
  CHECK_EQ(anyflash_forward(&q, &k, &q, &q, nullptr, nullptr, nullptr, 0), ANYFLASH_INVALID_TYPE);
  std::this_thread::yield();
  const std::string error = anyflash_last_error();
  return {error.begin(), error.end()};
}

// Everything that asks, or sets what results do not depend on.
Bytes configure() {
  anyflash::prefer_kernel("");
  std::size_t found = 0;
  for (const anyflash::KernelInfo& kernel : anyflash::kernels()) found += kernel.name.size();
  for (std::size_t i = 0; i < anyflash_kernel_count(); ++i) {
    found += std::string(anyflash_kernel_name(i)).size();
    anyflash_kernel_launches(i);
  }
  const std::string isa = anyflash::build_info().cpu_isa;
  anyflash::prefer_kernel(nullptr);
  return Bytes(1 + found % 200, static_cast<unsigned char>(isa.size()));
}

// Each alone first, then all at once.
void check_together(const std::vector<Work>& works, const std::string& what) {
  std::vector<Bytes> expected;
  expected.reserve(works.size());
  for (const Work& work : works) expected.push_back(work());
  std::atomic<std::size_t> ready{0};
  std::atomic<int> different{0};
  std::vector<std::thread> threads;
  for (std::size_t i = 0; i < works.size(); ++i) {
    threads.emplace_back([&, i] {
      ++ready;
      while (ready < works.size()) std::this_thread::yield();
      for (int round = 0; round < kRounds; ++round) different += works[i]() != expected[i];
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_MSG(different == 0, what);
}

void check_on(CpuIsa isa) {
  BackwardProblem dense(kShape, test::kAll & ~unsigned{test::kPacked}, DType::kFloat32,
                        test::Layout::kContiguous, 1);
  BackwardProblem packed(kShape, test::kPacked | test::kCausal, DType::kBFloat16,
                         test::Layout::kContiguous, 2);
  for (BackwardProblem* p : {&dense, &packed}) {
    p->options.cpu_isa = isa;
    p->options.num_threads = 3;
    p->forward();
  }
  Training one(dense), two(dense), three(dense), four(packed);
  test::Appending appending;
  test::Paged paged;
  for (auto* options : {&appending.options, &paged.options}) {
    options->cpu_isa = isa;
    options->num_threads = 3;
  }
  check_together({
                     [&] { return one.forward(); },
                     [&] { return two.forward(); },
                     [&] { return three.backward(); },
                     [&] { return four.forward(); },
                     [&] { return generate(appending); },
                     [&] { return generate(paged); },
                     [&] { return merge(dense); },
                     [] { return refused(3); },
                     [] { return refused(5); },
                     [] { return configure(); },
                     [] { return configure(); },
                 },
                 "instruction set " + std::to_string(static_cast<int>(isa)));
  Training five(packed), six(dense);
  check_together({[&] { return four.backward(); }, [&] { return five.backward(); },
                  [&] { return six.backward(); }, [&] { return one.backward(); }},
                 "gradients, " + std::to_string(static_cast<int>(isa)));
}

// A plan may be asked, and run with memory of the caller's own, by several threads; what they write
// is the same place, so that they take turns there.
void check_shared_plan() {
  BackwardProblem p(kShape, test::kCausal, DType::kFloat32, test::Layout::kContiguous, 3);
  const anyflash::ForwardPlan plan = p.forward_plan();
  std::vector<std::thread> threads;
  std::atomic<std::size_t> sum{0};
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      const anyflash::ForwardPlan copy = plan;
      sum += plan.workspace_bytes() + copy.workspace_bytes();
    });
  }
  CHECK(test::run_exactly(plan));
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(sum, 8 * plan.workspace_bytes());
}

}  // namespace

int main() {
  const test::ManyThreads many_threads;
  for (const CpuIsa isa : test::isas()) check_on(isa);
  check_shared_plan();
  return check::report();
}
