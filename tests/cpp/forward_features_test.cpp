// The forward's features, alone and together, on the CPU against the formula of options.h in double
// precision; batched and packed.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "isas.h"
#include "many_threads.h"
#include "tensor.h"

namespace {

using anyflash::CpuIsa;
using anyflash::ForwardOptions;
using anyflash::TensorView;
using test::DType;
using test::Index;
using test::Layout;
using test::Tensor;
using test::without;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

enum : unsigned {
  kCausal = 1,
  kWindow = 2,
  kSoftcap = 4,
  kAlibi = 8,
  kBias = 16,
  kBooleanBias = 32,  // instead of kBias
  kBlocks = 64,
  kSinks = 128,
  kDropout = 256,
  kUsed = 512,
  kPacked = 1024,
  kWideOut = 2048,  // float32 results
  kAll = 4095,
};

struct Sequence {
  int64_t first_q, first_k, seqlen_q, seqlen_k, used;
};

constexpr int64_t kHeads = 4;
constexpr int64_t kHeadsK = 2;

struct Problem {
  Problem(unsigned set_, DType dtype, Layout layout, int64_t head_dim_, int64_t head_dim_v_,
          unsigned seed)
      : set(set_), head_dim(head_dim_), head_dim_v(head_dim_v_), random(seed) {
    make_sequences();
    const bool packed = has(kPacked);
    const int64_t batch = packed ? 1 : static_cast<int64_t>(sequences.size());
    const int64_t rows_q = packed ? total_q : max_q;
    const int64_t rows_k = packed ? total_k : max_k;
    q.emplace(dtype, Index{batch, rows_q, kHeads, head_dim}, layout);
    k.emplace(dtype, Index{batch, rows_k, kHeadsK, head_dim}, layout);
    v.emplace(dtype, Index{batch, rows_k, kHeadsK, head_dim_v}, layout);
    out.emplace(has(kWideOut) ? DType::kFloat32 : dtype, Index{batch, rows_q, kHeads, head_dim_v},
                layout);
    lse.emplace(DType::kFloat32, Index{batch, kHeads, rows_q, 1}, layout);
    q->fill(random());
    k->fill(random());
    v->fill(random());
    make_options();
  }

  bool has(unsigned feature) const { return (set & feature) != 0; }
  int64_t batch() const { return static_cast<int64_t>(sequences.size()); }

  void make_sequences() {
    max_q = 3 + static_cast<int64_t>(random() % 70);
    max_k = 70 + static_cast<int64_t>(random() % 80);
    const int64_t lengths_q[] = {max_q, 0, 1, max_q / 2};
    const int64_t lengths_k[] = {max_k / 3, 9, max_k, 0};
    for (std::size_t i = 0; i < 4; ++i) {
      Sequence s;
      s.first_q = has(kPacked) ? total_q : 0;
      s.first_k = has(kPacked) ? total_k : 0;
      s.seqlen_q = has(kPacked) ? lengths_q[i] : max_q;
      s.seqlen_k = has(kPacked) ? lengths_k[i] : max_k;
      s.used = has(kUsed) ? static_cast<int64_t>(random()) % (s.seqlen_k + 1) : s.seqlen_k;
      total_q += s.seqlen_q;
      total_k += s.seqlen_k;
      sequences.push_back(s);
      if (!has(kPacked) && i == 1) break;
    }
  }

  // Small tensors have the axes that their option has, behind axes of extent 1.
  void make_options() {
    options.causal = has(kCausal);
    if (has(kWindow)) {
      options.window_left = static_cast<int64_t>(random() % 40);
      options.window_right = static_cast<int64_t>(random() % 60);
    }
    if (has(kSoftcap)) options.softcap = 1.5;
    const int64_t b = batch();
    const auto one = [&](int64_t n) { return random() % 2 == 0 ? n : 1; };
    if (has(kAlibi)) {
      const bool rank1 = random() % 2 == 0;
      slopes.emplace(DType::kFloat32, Index{1, 1, rank1 ? 1 : one(b), kHeads});
      slopes->fill(random());
      // Scores of hundreds would be rounded to 1e-5.
      slopes->for_each([&](const Index& i) { slopes->set(i, slopes->get(i) / 8); });
      views[0] = without(*slopes, rank1 ? 3 : 2);
      options.alibi_slopes = &views[0];
    }
    if (has(kBias) || has(kBooleanBias)) {
      const DType type = has(kBias) ? test::kDTypes[random() % 4] : DType::kBool;
      bias.emplace(type, Index{one(b), one(kHeads), one(max_q), one(max_k)},
                   static_cast<Layout>(random() % 4));
      bias->fill(random());
      bias->for_each([&](const Index& i) {
        if (type == DType::kBool) bias->set(i, random() % 3 == 0 ? 0.0 : 1.0);
        else if (random() % 8 == 0) bias->set(i, -kInfinity);
      });
      options.bias = &bias->view;
    }
    if (has(kBlocks)) {
      options.block_size = {64, random() % 2 == 0 ? 64 : 128};
      blocks.emplace(DType::kBool, Index{one(b), one(kHeads), (max_q + 63) / 64,
                                         (max_k - 1) / options.block_size[1] + 1});
      blocks->for_each([&](const Index& i) { blocks->set(i, random() % 3 == 0 ? 0.0 : 1.0); });
      options.block_mask = &blocks->view;
    }
    if (has(kSinks)) {
      sinks.emplace(DType::kBFloat16, Index{1, 1, 1, kHeads});
      sinks->fill(random());
      views[1] = without(*sinks, 3);
      options.sinks = &views[1];
    }
    if (has(kDropout)) {
      options.dropout_p = 0.25;
      options.seed = random();
      mask.emplace(DType::kBool, Index{b, kHeads, max_q, max_k});
      options.dropout_mask = &mask->view;
    }
    maxima.emplace(DType::kFloat32, Index{1, 1, b, kHeads}, Layout::kSpread);
    views[2] = without(*maxima, 2);
    options.max_logits = &views[2];
    make_lengths();
  }

  void make_lengths() {
    const int64_t b = batch();
    if (has(kUsed)) {
      used.emplace(DType::kInt32, Index{1, 1, 1, b});
      for (int64_t i = 0; i < b; ++i) used->set({0, 0, 0, i}, static_cast<double>(at(i).used));
      views[3] = without(*used, 3);
      options.seqused_k = &views[3];
    }
    if (!has(kPacked)) return;
    starts_q.emplace(DType::kInt32, Index{1, 1, 1, b + 1});
    starts_k.emplace(DType::kInt32, Index{1, 1, 1, b + 1});
    for (int64_t i = 0; i <= b; ++i) {
      starts_q->set({0, 0, 0, i}, static_cast<double>(i < b ? at(i).first_q : total_q));
      starts_k->set({0, 0, 0, i}, static_cast<double>(i < b ? at(i).first_k : total_k));
    }
    views[4] = without(*starts_q, 3);
    views[5] = without(*starts_k, 3);
    options.cu_seqlens_q = &views[4];
    options.cu_seqlens_k = &views[5];
    options.max_seqlen_q = max_q;
    options.max_seqlen_k = max_k;
  }

  void run() {
    const int first = has(kPacked) ? 1 : 0;
    TensorView lse_view = without(*lse, first);
    --lse_view.rank;
    const auto tensors = test::forward_tensors(without(*q, first), without(*k, first),
                                               without(*v, first), without(*out, first), &lse_view);
    CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, options)));
  }

  const Sequence& at(int64_t b) const { return sequences[static_cast<std::size_t>(b)]; }

  unsigned set;
  int64_t head_dim, head_dim_v;
  int64_t max_q = 0, max_k = 0, total_q = 0, total_k = 0;
  std::mt19937 random;
  std::vector<Sequence> sequences;
  std::optional<Tensor> q, k, v, out, lse;
  std::optional<Tensor> slopes, bias, blocks, sinks, mask, maxima, used, starts_q, starts_k;
  TensorView views[6];
  ForwardOptions options;
};

// The element of a tensor with broadcast axes.
double broadcast(const Tensor& t, Index i) {
  for (std::size_t axis = 0; axis < 4; ++axis) {
    if (t.view.shape[axis] == 1) i[axis] = 0;
  }
  return t.get(i);
}

struct Row {
  int64_t b, head, i;
};

// The final score of a key, -inf if it is hidden.
double score_of(const Problem& p, const Row& row, int64_t j) {
  const Sequence& s = p.at(row.b);
  const ForwardOptions& o = p.options;
  const int64_t batch = p.has(kPacked) ? 0 : row.b;
  const int64_t head_k = row.head / (kHeads / kHeadsK);
  double score = 0.0;
  for (int64_t c = 0; c < p.head_dim; ++c) {
    score += p.q->get({batch, s.first_q + row.i, row.head, c}) *
             p.k->get({batch, s.first_k + j, head_k, c});
  }
  score /= std::sqrt(static_cast<double>(p.head_dim));
  const int64_t distance = row.i + s.used - s.seqlen_q - j;  // to the left
  if (o.softcap > 0.0) score = o.softcap * std::tanh(score / o.softcap);
  if (p.bias) {
    const double bias = broadcast(*p.bias, {row.b, row.head, row.i, j});
    if (p.bias->view.dtype != DType::kBool) score += bias;
    else if (bias == 0.0) return -kInfinity;
  }
  if (p.slopes) {
    score -=
        broadcast(*p.slopes, {0, 0, row.b, row.head}) * std::fabs(static_cast<double>(distance));
  }
  if (o.causal && distance < 0) return -kInfinity;
  if (o.window_left >= 0 && distance > o.window_left) return -kInfinity;
  if (o.window_right >= 0 && -distance > o.window_right) return -kInfinity;
  if (p.blocks) {
    const Index block{row.b, row.head, row.i / o.block_size[0], j / o.block_size[1]};
    if (broadcast(*p.blocks, block) == 0.0) return -kInfinity;
  }
  return score;
}

struct Expected {
  std::vector<double> out;
  double lse;
  double largest;
};

Expected expected_row(const Problem& p, const Row& row) {
  const Sequence& s = p.at(row.b);
  std::vector<double> scores;
  Expected e{std::vector<double>(static_cast<std::size_t>(p.head_dim_v), 0.0), -kInfinity,
             -kInfinity};
  for (int64_t j = 0; j < s.used; ++j) {
    scores.push_back(score_of(p, row, j));
    e.largest = std::max(e.largest, scores.back());
  }
  const double sink = p.sinks ? p.sinks->get({0, 0, 0, row.head}) : -kInfinity;
  const double base = std::max(e.largest, sink);
  if (base == -kInfinity) return e;
  double sum = std::exp(sink - base);
  for (const double score : scores) sum += std::exp(score - base);
  e.lse = base + std::log(sum);
  const int64_t batch = p.has(kPacked) ? 0 : row.b;
  for (int64_t j = 0; j < s.used; ++j) {
    double weight = std::exp(scores[static_cast<std::size_t>(j)] - e.lse);
    if (p.mask) weight *= p.mask->get({row.b, row.head, row.i, j}) / (1.0 - p.options.dropout_p);
    for (int64_t c = 0; c < p.head_dim_v; ++c) {
      e.out[static_cast<std::size_t>(c)] +=
          weight * p.v->get({batch, s.first_k + j, row.head / (kHeads / kHeadsK), c});
    }
  }
  return e;
}

// Half a unit of the last place of the result, and what sums in float32 lose.
bool close(double got, double expected, DType dtype, DType computed) {
  if (!std::isfinite(expected)) return got == expected;
  const double half_ulp = dtype == DType::kFloat16    ? std::ldexp(1.0, -11)
                          : dtype == DType::kBFloat16 ? std::ldexp(1.0, -8)
                          : dtype == DType::kFloat32  ? std::ldexp(1.0, -24)
                                                      : 0.0;
  const double sums = computed == DType::kFloat64 ? 1e-13 : 1e-5;
  return std::fabs(got - expected) <= (half_ulp + sums) * std::fabs(expected) + sums;
}

void check_problem(Problem& p, const std::string& what) {
  p.run();
  const DType computed = p.q->view.dtype;
  int wrong_out = 0, wrong_lse = 0, wrong_maximum = 0;
  for (int64_t b = 0; b < p.batch(); ++b) {
    for (int64_t head = 0; head < kHeads; ++head) {
      double largest = -kInfinity;
      for (int64_t i = 0; i < p.at(b).seqlen_q; ++i) {
        const Expected e = expected_row(p, {b, head, i});
        const int64_t batch = p.has(kPacked) ? 0 : b;
        const int64_t row = p.at(b).first_q + i;
        for (int64_t c = 0; c < p.head_dim_v; ++c) {
          wrong_out += !close(p.out->get({batch, row, head, c}), e.out[static_cast<std::size_t>(c)],
                              p.out->view.dtype, computed);
        }
        wrong_lse += !close(p.lse->get({batch, head, row, 0}), e.lse, DType::kFloat32, computed);
        largest = std::max(largest, e.largest);
      }
      wrong_maximum += !close(p.maxima->get({0, 0, b, head}), largest, DType::kFloat32, computed);
    }
  }
  CHECK_MSG(wrong_out == 0, what + ": " + std::to_string(wrong_out) + " results");
  CHECK_MSG(wrong_lse == 0, what + ": " + std::to_string(wrong_lse) + " LSEs");
  CHECK_MSG(wrong_maximum == 0, what + ": " + std::to_string(wrong_maximum) + " maxima");
}

// Each feature alone, all of them, and sets of them; the rest takes turns.
void check_sets() {
  std::vector<unsigned> sets = {0, kAll & ~kBooleanBias, kAll & ~kBias};
  for (unsigned bit = 1; bit < kAll; bit *= 2) {
    sets.push_back(bit);
    sets.push_back(bit | kPacked);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 60; ++i) sets.push_back(random() & kAll);
  const std::vector<CpuIsa> isas = test::isas();
  unsigned seed = 0;
  for (unsigned set : sets) {
    if ((set & kBias) != 0) set &= ~static_cast<unsigned>(kBooleanBias);
    for (const DType dtype : test::kDTypes) {
      ++seed;
      const int64_t head_dim = 1 + static_cast<int64_t>(seed * 7 % 40);
      const int64_t head_dim_v = 1 + static_cast<int64_t>(seed * 11 % 40);
      Problem p(set, dtype, static_cast<Layout>(seed % 4), head_dim, head_dim_v, seed);
      p.options.cpu_isa = isas[seed % isas.size()];
      p.options.num_threads = 1 + static_cast<int>(seed % 3);
      check_problem(p, "features " + std::to_string(set) + ", dtype " +
                           std::to_string(static_cast<int>(dtype)) + ", seed " +
                           std::to_string(seed));
    }
  }
}

// Where there is nothing to compute, maxima are written all the same.
void check_empty() {
  const Tensor q(DType::kFloat32, {2, 0, 4, 8});
  const Tensor k(DType::kFloat32, {2, 0, 4, 8});
  const Tensor maxima(DType::kFloat32, {1, 1, 2, 4});
  const TensorView view = without(maxima, 2);
  ForwardOptions options;
  options.max_logits = &view;
  const auto tensors = test::forward_tensors(q.view, k.view, k.view, q.view);
  anyflash::ForwardPlan(tensors, options).run({});
  maxima.for_each([&](const Index& i) { CHECK(maxima.get(i) == -kInfinity); });
}

}  // namespace

int main() {
  const test::ManyThreads many_threads;
  check_sets();
  check_empty();
  return check::report();
}
