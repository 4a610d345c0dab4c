// BackwardPlan on the CPU: plain problems against the textbook formula in double precision, and
// every feature in float64 against differences of the forward.
#include <algorithm>
#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "backward_problem.h"
#include "check.h"
#include "isas.h"
#include "many_threads.h"
#include "tensor.h"

namespace {

using anyflash::CpuIsa;
using test::DType;
using test::Index;
using test::Layout;
using test::Sequence;
using test::Shape;
using test::Tensor;
using Problem = test::BackwardProblem;

// One double for each element of a tensor.
class Numbers {
 public:
  explicit Numbers(const Tensor& t) : n_(t.view.shape) {
    values_.assign(static_cast<std::size_t>(n_[0] * n_[1] * n_[2] * n_[3]), 0.0);
  }
  static Numbers of(const Tensor& t) {
    Numbers numbers(t);
    t.for_each([&](const Index& i) { numbers.at(i) = t.get(i); });
    return numbers;
  }
  // The element, and the others of its row behind the first.
  double& at(const Index& i) { return *row(i[0], i[1], i[2], i[3]); }
  double* row(int64_t batch, int64_t row, int64_t head, int64_t column = 0) {
    const int64_t offset = ((batch * n_[1] + row) * n_[2] + head) * n_[3] + column;
    return values_.data() + offset;
  }

 private:
  Index n_;
  std::vector<double> values_;
};

double dot(const double* a, const double* b, int64_t n) {
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += a[i] * b[i];
  return sum;
}

// y += factor * x
void add(double* y, double factor, const double* x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) y[i] += factor * x[i];
}

// The gradients by the formula. Of the features, causal masks, packed sequences and the LSE's
// gradient.
class Textbook {
 public:
  explicit Textbook(const Problem& problem)
      : dq(*problem.q),
        dk(*problem.k),
        dv(*problem.v),
        p_(problem),
        q_(Numbers::of(*problem.q)),
        k_(Numbers::of(*problem.k)),
        v_(Numbers::of(*problem.v)),
        dout_(Numbers::of(*problem.dout)) {
    for (const Sequence& s : p_.sequences) {
      for (int64_t head = 0; head < p_.shape.heads; ++head) {
        for (int64_t i = 0; i < s.seqlen_q; ++i) row(s, head, i);
      }
    }
  }

  Numbers dq, dk, dv;

 private:
  void row(const Sequence& s, int64_t head, int64_t i) {
    const Shape& n = p_.shape;
    const int64_t head_k = head / (n.heads / n.heads_k);
    const int64_t at = s.first_q + i;
    const int64_t diagonal = i + s.seqlen_k - s.seqlen_q;
    const int64_t end =
        p_.has(test::kCausal) ? std::clamp<int64_t>(diagonal + 1, 0, s.seqlen_k) : s.seqlen_k;
    const double scale = 1.0 / std::sqrt(static_cast<double>(n.head_dim));
    const double* const q = q_.row(s.batch, at, head);
    const double* const dout = dout_.row(s.batch, at, head);
    std::vector<double> probability(static_cast<std::size_t>(end)), product(probability);
    double sum = 0.0;
    for (int64_t j = 0; j < end; ++j) {
      const int64_t key = s.first_k + j;
      sum += probability[j] = std::exp(scale * dot(q, k_.row(s.batch, key, head_k), n.head_dim));
      product[j] = dot(dout, v_.row(s.batch, key, head_k), n.head_dim_v);
    }
    double delta = p_.has(test::kGivenLse) ? -p_.dlse->get({s.batch, head, at, 0}) : 0.0;
    for (int64_t j = 0; j < end; ++j) delta += (probability[j] /= sum) * product[j];
    for (int64_t j = 0; j < end; ++j) {
      const int64_t key = s.first_k + j;
      const double ds = scale * probability[j] * (product[j] - delta);
      add(dq.row(s.batch, at, head), ds, k_.row(s.batch, key, head_k), n.head_dim);
      add(dk.row(s.batch, key, head_k), ds, q, n.head_dim);
      add(dv.row(s.batch, key, head_k), probability[j], dout, n.head_dim_v);
    }
  }

  const Problem& p_;
  Numbers q_, k_, v_, dout_;
};

// Half a unit of the last place of the result, and what the types of inputs and sums make of it.
double tolerance(DType dtype, double expected) {
  const double size = 1.0 + std::fabs(expected);
  if (dtype == DType::kFloat64) return 2e-6 * size;  // the LSE is float32
  if (dtype == DType::kFloat32) return 2e-5 * size;
  return (dtype == DType::kFloat16 ? 0.01 : 0.08) * size;  // `out` too is rounded
}

void check_numbers(const Tensor& got, Numbers& expected, const std::string& what) {
  int wrong = 0;
  got.for_each([&](const Index& i) {
    wrong += !(std::fabs(got.get(i) - expected.at(i)) <= tolerance(got.view.dtype, expected.at(i)));
  });
  CHECK_MSG(wrong == 0, what);
}

const Shape kShapes[] = {
    {1, 1, 1, 1, 1, 1, 1},       {2, 5, 7, 4, 2, 8, 8},     {1, 33, 70, 3, 3, 20, 13},
    {1, 70, 33, 2, 1, 16, 24},   {2, 1, 130, 8, 2, 64, 64}, {4, 150, 129, 2, 2, 7, 5},
    {3, 130, 140, 4, 1, 64, 32},
};

void check_plain() {
  const unsigned kSets[] = {0, test::kCausal | test::kGivenLse, test::kPacked | test::kGivenLse,
                            test::kPacked | test::kCausal};
  unsigned seed = 1;
  for (const CpuIsa isa : test::isas()) {
    for (const DType dtype : test::kDTypes) {
      for (const Shape& shape : kShapes) {
        // Sets and layouts take turns, so that each meets every dtype and instruction set.
        const unsigned set = kSets[seed % 4];
        const auto layout = static_cast<Layout>(seed / 4 % (static_cast<int>(Layout::kLast) + 1));
        Problem p(shape, set, dtype, layout, seed);
        p.options.cpu_isa = isa;
        p.options.num_threads = 1 + static_cast<int>(seed % 3);
        p.forward();
        p.backward();
        Textbook expected(p);
        check_numbers(*p.dq, expected.dq, "dq, " + p.what);
        check_numbers(*p.dk, expected.dk, "dk, " + p.what);
        check_numbers(*p.dv, expected.dv, "dv, " + p.what);
        ++seed;
      }
    }
  }
}

// One gradient against central differences, at some of its elements.
void check_differences(Problem& p, Tensor& input, const Tensor& gradient, const std::string& name) {
  constexpr double kStep = 1e-4;
  constexpr unsigned kElements = 12;
  const Index& n = input.view.shape;
  for (unsigned element = 0; element < kElements; ++element) {
    Index at;
    for (int axis = 0; axis < 4; ++axis) at[axis] = static_cast<int64_t>(p.random()) % n[axis];
    const double x = input.get(at);
    input.set(at, x + kStep);
    const double above = p.loss();
    input.set(at, x - kStep);
    const double below = p.loss();
    input.set(at, x);
    const double expected = (above - below) / (2 * kStep);
    const double got = gradient.get(at);
    CHECK_MSG(
        std::fabs(got - expected) <= 1e-5 * (1.0 + std::fabs(expected)),
        name + " is " + std::to_string(got) + ", not " + std::to_string(expected) + ", " + p.what);
  }
}

void check_features() {
  const Shape shapes[] = {{2, 5, 7, 4, 2, 6, 3}, {3, 90, 140, 2, 1, 20, 24}};
  std::vector<unsigned> sets;
  for (unsigned feature = test::kCausal; feature <= test::kPacked; feature *= 2) {
    sets.push_back(feature);
    sets.push_back(test::kAll & ~feature);
  }
  sets.push_back(test::kAll);
  unsigned seed = 1000;
  for (const Shape& shape : shapes) {
    for (const unsigned set : sets) {
      Problem p(shape, set, DType::kFloat64, Layout::kContiguous, ++seed);
      p.forward();
      p.backward();
      check_differences(p, *p.q, *p.dq, "dq");
      check_differences(p, *p.k, *p.dk, "dk");
      check_differences(p, *p.v, *p.dv, "dv");
      if (p.dbias) check_differences(p, *p.bias, *p.dbias, "dbias");
      if (p.dslopes) check_differences(p, *p.slopes, *p.dslopes, "dalibi_slopes");
      if (p.dsinks) check_differences(p, *p.sinks, *p.dsinks, "dsinks");
    }
  }
}

// Bit by bit the same, whatever the number of threads.
void check_threads() {
  const Shape shape{3, 150, 170, 4, 2, 32, 32};
  std::vector<unsigned char> first[6];
  for (const int threads : {1, 2, 5}) {
    Problem p(shape, test::kAll, DType::kFloat32, Layout::kContiguous, 77);
    p.options.num_threads = threads;
    p.forward();
    p.backward();
    int i = 0;
    for (const auto* t : {&p.dq, &p.dk, &p.dv, &p.dbias, &p.dslopes, &p.dsinks}) {
      if (threads == 1) first[i] = (*t)->bytes;
      CHECK_MSG((*t)->bytes == first[i++], p.what);
    }
  }
}

void check_zero(const Tensor& t, const std::string& what) {
  int other = 0;
  t.for_each([&](const Index& i) { other += t.get(i) != 0.0; });
  CHECK_MSG(other == 0, what);
}

// Without queries, keys or sequences all that there is of the gradients is 0.
void check_empty() {
  for (const Shape& shape : {Shape{2, 0, 70, 4, 2, 8, 8}, Shape{2, 70, 0, 4, 2, 8, 8},
                             Shape{2, 0, 0, 4, 2, 8, 8}, Shape{0, 70, 70, 4, 2, 8, 8}}) {
    for (const unsigned set : {0u, test::kAlibi | test::kBias | test::kSinks,
                               test::kPacked | test::kAlibi | test::kBias | test::kSinks}) {
      Problem p(shape, set, DType::kFloat32, Layout::kContiguous, 9);
      p.lse->for_each([&](const Index& i) { p.lse->set(i, -INFINITY); });
      p.out->for_each([&](const Index& i) { p.out->set(i, 0.0); });
      p.backward();
      for (const auto* t : {&p.dq, &p.dk, &p.dv, &p.dbias, &p.dslopes, &p.dsinks}) {
        if (*t) check_zero(**t, p.what);
      }
    }
  }
}

}  // namespace

int main() {
  const test::ManyThreads many_threads;
  check_plain();
  check_features();
  check_threads();
  check_empty();
  return check::report();
}
