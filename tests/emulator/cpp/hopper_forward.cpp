// A Hopper forward kernel (tests/gpu/hopper/forward.cu) on the emulator, against float64.
//
//   hopper_forward [SEEDS]    EMU_SEED: the first one
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "call.h"
#include "emu.hpp"

namespace {

constexpr int kD = HEAD_DIM;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Case {
  std::string name;
  std::vector<int> lengths_q;  // one: of each sequence of the batch; more: packed sequences
  std::vector<int> lengths_k;
  int left = -1;
  int right = -1;
  int batch = 1;
  int heads = 2;
  int heads_k = 1;
  int ctas = 0;
  bool float_out = false;
  bool poison = false;  // NaN in V and K, where few rows see it
  int used_k = -1;      // of lengths_k; what is beyond is NaN
  int head_dim = kD;
};

uint16_t to_bfloat16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
float from_bfloat16(uint16_t x) {
  const uint32_t bits = uint32_t{x} << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return result;
}

using Numbers = std::vector<uint16_t>;

Numbers random_numbers(size_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  Numbers result(count);
  for (uint16_t& x : result) x = to_bfloat16(normal(random));
  return result;
}

class Problem {
 public:
  Problem(const Case& c, uint64_t seed) : c_(c), random_(static_cast<unsigned>(seed)) {
    packed_ = c.lengths_q.size() > 1;
    sequences_ = packed_ ? static_cast<int>(c.lengths_q.size()) : c.batch;
    for (int i = 0; i < sequences_; ++i) {
      starts_q_.push_back(starts_q_.back() + length_q(i));
      starts_k_.push_back(starts_k_.back() + length_k(i));
    }
    const size_t spare = packed_ ? 5 : 0;  // rows of no sequence
    rows_q_ = starts_q_.back() + spare;
    rows_k_ = starts_k_.back() + spare;
    const size_t d = c.head_dim;
    q_ = random_numbers(rows_q_ * c.heads * d, random_);
    k_ = random_numbers(rows_k_ * c.heads_k * d, random_);
    v_ = random_numbers(rows_k_ * c.heads_k * d, random_);
    poison();
    out_.assign(rows_q_ * c.heads * d, 0x7fff);
    float_out_.assign(c.float_out ? out_.size() : 0, kNan);
    lse_.assign(rows_q_ * c.heads, kNan);
    used_.assign(sequences_, c.used_k);
  }

  bool run() {
    Call call{};
    call.q = q_.data();
    call.k = k_.data();
    call.v = v_.data();
    call.out = c_.float_out ? static_cast<void*>(float_out_.data()) : out_.data();
    call.lse = lse_.data();
    call.batch = sequences_;
    call.heads = c_.heads;
    call.heads_k = c_.heads_k;
    call.head_dim = call.head_dim_v = c_.head_dim;
    call.softmax_scale = scale();
    call.window_left = c_.left;
    call.window_right = c_.right;
    call.multiprocessors = 8;
    call.ctas = c_.ctas;
    call.float_out = c_.float_out;
    for (int i = 0; i < sequences_; ++i) {
      call.seqlen_q = std::max(call.seqlen_q, length_q(i));
      call.seqlen_k = std::max(call.seqlen_k, length_k(i));
    }
    if (packed_) {
      call.cu_seqlens_q = starts_q_.data();
      call.cu_seqlens_k = starts_k_.data();
      call.total_q = rows_q_;
      call.total_k = rows_k_;
    }
    if (c_.used_k >= 0) call.seqused_k = used_.data();
    set_strides(call.q_stride, c_.heads, call.seqlen_q);
    set_strides(call.out_stride, c_.heads, call.seqlen_q);
    set_strides(call.k_stride, c_.heads_k, call.seqlen_k);
    set_strides(call.v_stride, c_.heads_k, call.seqlen_k);
    call.lse_stride[0] = int64_t{call.seqlen_q} * c_.heads;
    call.lse_stride[1] = c_.heads;
    call.lse_stride[2] = 1;
    return hopper_forward(&call) == 0;
  }

  // What is wrong, or nothing.
  std::string check() const {
    double squares = 0, errors = 0;
    for (int i = 0; i < sequences_; ++i) {
      for (int row = 0; row < length_q(i); ++row) {
        for (int head = 0; head < c_.heads; ++head) {
          const std::string wrong = check_row(i, row, head, squares, errors);
          if (!wrong.empty()) return wrong;
        }
      }
    }
    for (size_t i = size_t(starts_q_.back()) * c_.heads * c_.head_dim; i < out_.size(); ++i) {
      if (!std::isnan(output(i))) return "rows of no sequence were written";
    }
    const double relative = std::sqrt(errors / std::max(squares, 1e-9));
    if (relative > 4e-3) return "relative error " + std::to_string(relative);
    return "";
  }

 private:
  int length_q(int i) const { return c_.lengths_q[packed_ ? i : 0]; }
  int length_k(int i) const { return c_.lengths_k[packed_ ? i : 0]; }
  double scale() const { return 1.0 / std::sqrt(double(c_.head_dim)); }
  float output(size_t i) const { return c_.float_out ? float_out_[i] : from_bfloat16(out_[i]); }

  void set_strides(int64_t (&stride)[3], int heads, int rows) const {
    stride[1] = int64_t{heads} * c_.head_dim;
    stride[0] = packed_ ? 0 : stride[1] * rows;
    stride[2] = c_.head_dim;
  }

  void poison() {
    const size_t row = size_t(c_.heads_k) * c_.head_dim;
    for (int i = 0; i < sequences_; ++i) {
      if (c_.poison && length_k(i) > 1) {
        v_[size_t(starts_k_[i + 1] - 1) * row + 3] = 0x7fff;
        v_[size_t(starts_k_[i] + length_k(i) / 2) * row + 5] = 0x7f80;
        k_[size_t(starts_k_[i + 1] - 1) * row] = 0x7fff;
      }
      if (c_.used_k < 0) continue;
      for (size_t j = (starts_k_[i] + c_.used_k) * row; j < starts_k_[i + 1] * row; ++j) {
        k_[j] = v_[j] = 0x7fff;
      }
    }
    for (size_t j = starts_k_.back() * row; j < k_.size(); ++j) k_[j] = v_[j] = 0x7fff;
  }

  std::string check_row(int i, int row, int head, double& squares, double& errors) const {
    const int d = c_.head_dim, head_k = head / (c_.heads / c_.heads_k);
    const int keys = c_.used_k >= 0 ? std::min(c_.used_k, length_k(i)) : length_k(i);
    const int64_t at = int64_t{row} + keys - length_q(i);
    const auto key_row = [&](int key) {
      return ((starts_k_[i] + key) * size_t(c_.heads_k) + head_k) * d;
    };
    const size_t first = ((starts_q_[i] + row) * size_t(c_.heads) + head) * d;
    std::vector<double> scores(keys, -INFINITY);
    double largest = -INFINITY;
    for (int key = 0; key < keys; ++key) {
      if (c_.left >= 0 && key < at - c_.left) continue;
      if (c_.right >= 0 && key > at + c_.right) continue;
      double sum = 0;
      for (int x = 0; x < d; ++x) {
        sum += double{from_bfloat16(q_[first + x])} * from_bfloat16(k_[key_row(key) + x]);
      }
      scores[key] = sum * scale();
      largest = std::max(largest, scores[key]);
    }
    double sum = 0;
    std::vector<double> expected(d, 0.0);
    for (int key = 0; key < keys; ++key) {
      if (scores[key] == -INFINITY) continue;
      const double weight = std::exp(scores[key] - largest);
      sum += weight;
      for (int x = 0; x < d; ++x) expected[x] += weight * from_bfloat16(v_[key_row(key) + x]);
    }
    const std::string where = "sequence " + std::to_string(i) + " row " + std::to_string(row) +
                              " head " + std::to_string(head);
    const double lse = sum == 0 ? -INFINITY : largest + std::log(sum);
    const float got_lse = lse_[(starts_q_[i] + row) * size_t(c_.heads) + head];
    const bool same = std::isnan(lse) ? std::isnan(got_lse) : got_lse == lse;
    if (!same && !(std::abs(got_lse - lse) < 2e-3)) {
      return where + ": LSE " + std::to_string(got_lse) + " for " + std::to_string(lse);
    }
    for (int x = 0; x < d; ++x) {
      const double wanted = sum == 0 ? 0 : expected[x] / sum;
      const double got = output(first + x);
      if (std::isfinite(wanted) != std::isfinite(got) ||
          (std::isfinite(wanted) && std::abs(wanted - got) > 0.03)) {
        return where + " column " + std::to_string(x) + ": " + std::to_string(got) + " for " +
               std::to_string(wanted);
      }
      if (!std::isfinite(wanted)) continue;
      squares += wanted * wanted;
      errors += (wanted - got) * (wanted - got);
    }
    return "";
  }

  const Case& c_;
  std::mt19937 random_;
  bool packed_;
  int sequences_;
  std::vector<int32_t> starts_q_{0};
  std::vector<int32_t> starts_k_{0};
  size_t rows_q_;
  size_t rows_k_;
  Numbers q_, k_, v_, out_;
  std::vector<float> float_out_, lse_;
  std::vector<int32_t> used_;
};

std::vector<Case> cases() {
  std::vector<Case> result;
  const auto add = [&](const char* name, std::vector<int> q, std::vector<int> k) -> Case& {
    Case c;
    c.name = name;
    c.lengths_q = q;
    c.lengths_k = k;
    result.push_back(c);
    return result.back();
  };
  for (const int length : {64, 100, 127, 128, 129, 300}) {
    add("full", {length}, {length}).ctas = length % 3;
    add("causal", {length}, {length}).right = 0;
    result.back().ctas = length % 2;
  }
  for (const int right : {-1, 0}) {
    Case& c = add(right < 0 ? "full, 2 CTAs" : "causal, 2 CTAs", {400}, {700});
    c.right = right;
    c.heads = 3;
    c.ctas = 2;
    add("more rows than keys, 1 CTA", {500}, {130}).right = right;
    result.back().ctas = 1;
    add("one CTA, many blocks", {270}, {513}).right = right;
    result.back().ctas = 1;
    result.back().heads = 4;
    result.back().heads_k = 2;
  }
  for (const int width : {0, 40, 200}) {
    Case& c = add("window", {400}, {450});
    c.left = width;
    c.right = width / 2;
    c.ctas = 1;
    c.poison = true;
    add("left", {300}, {400}).left = width;
    result.back().ctas = 2;
  }
  for (const bool float_out : {false, true}) {
    Case& c = add("poison, causal", {300}, {389});
    c.right = 0;
    c.poison = true;
    c.ctas = 1;
    c.float_out = float_out;
    add("packed", {100, 0, 27, 300, 1}, {100, 50, 0, 270, 129}).float_out = float_out;
    result.back().ctas = 1;
    add("packed, causal", {100, 0, 27, 300, 1}, {100, 50, 0, 270, 129}).right = 0;
    result.back().float_out = float_out;
    result.back().poison = true;
  }
  for (const int used : {0, 1, 128, 200}) {
    add("used keys", {70}, {300}).used_k = used;
    result.back().batch = 2;
    result.back().ctas = 1;
  }
  add("no keys", {70}, {0}).ctas = 1;
  add("head dim", {150}, {150}).head_dim = kD - 24;
  result.back().right = 0;
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  const int seeds = argc > 1 ? std::atoi(argv[1]) : 1;
  const uint64_t first = emu::options().seed;
  emu::options().shared_memory_limit = 232448;
  int failures = 0, count = 0;
  for (const Case& c : cases()) {
    for (int i = 0; i < seeds; ++i, ++count) {
      emu::options().seed = first + i;
      Problem problem(c, first + i);
      const std::string wrong = problem.run() ? problem.check() : "the launch failed";
      if (wrong.empty()) continue;
      ++failures;
      std::printf("FAILED %s %d x %d, seed %d: %s\n", c.name.c_str(), c.lengths_q[0],
                  c.lengths_k[0], static_cast<int>(first) + i, wrong.c_str());
      std::fflush(stdout);
    }
  }
  std::printf("%d runs, %d failed\n", count, failures);
  return failures != 0;
}
