// Attention in double precision, by plain loops, in the order of anyflash/options.h.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "problem.h"

namespace driver {

// The definition of philox-4x32-10 (Salmon et al., SC 2011), written without the kernels'.
inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter,
                                      std::array<uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{counter[0]} * 0xD2511F53;
    const uint64_t b = uint64_t{counter[2]} * 0xCD9E8D57;
    counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
               static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
    key = {key[0] + 0x9E3779B9, key[1] + 0xBB67AE85};
  }
  return counter;
}

class Reference {
 public:
  Reference(const Problem& problem, const std::array<uint64_t, 2>& rng)
      : p_(problem),
        c_(problem.c),
        rng_(rng),
        threshold_(std::round(c_.dropout * 65536)),
        q_(p_.q.values()),
        k_(p_.k.values()) {}

  struct Row {
    std::vector<double> out, size;  // size: the sum of the terms' absolute values
    double lse;
    double max_score;
    bool empty;  // without keys
  };

  Row row(int64_t b, int64_t h, int64_t i) const {
    const Sequence s = p_.sequence(b);
    const double sink = p_.sinks ? p_.sinks->get(h) : -INFINITY;
    std::vector<double> scores(static_cast<std::size_t>(s.keys), -INFINITY);
    double maximum = -INFINITY;
    for (int64_t j = 0; j < s.keys; ++j) {
      if (!visible(s, b, h, i, j)) continue;
      double& x = scores[static_cast<std::size_t>(j)];
      x = score(s, b, h, i, j).value;
      maximum = std::max(maximum, x);
    }
    const double larger = std::max(maximum, sink);
    double sum = sink == -INFINITY ? 0 : std::exp(sink - larger);
    for (const double x : scores) sum += x == -INFINITY ? 0 : std::exp(x - larger);
    const auto columns = static_cast<std::size_t>(c_.head_dim_v);
    Row result;
    result.out.resize(columns);
    result.size.resize(columns);
    result.lse = sum == 0 ? -INFINITY : larger + std::log(sum);
    result.max_score = maximum;
    result.empty = maximum == -INFINITY;
    for (int64_t j = 0; j < s.keys; ++j) {
      const double x = scores[static_cast<std::size_t>(j)];
      if (x == -INFINITY) continue;
      const double kept = dropped(b, h, i, j) ? 0 : dropout_factor();
      const double weight = kept * std::exp(x - larger) / sum;
      for (std::size_t col = 0; col < columns; ++col) {
        const double term =
            weight * p_.v.at(s.batch, s.first_k + j, head_k(h), static_cast<int64_t>(col));
        result.out[col] += term;
        result.size[col] += std::abs(term);
      }
    }
    return result;
  }

  bool dropped(int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (threshold_ == 0) return false;
    const auto low = [](uint64_t x) { return static_cast<uint32_t>(x); };
    const auto draws = philox({low(static_cast<uint64_t>(j / 8)), low(static_cast<uint64_t>(i)),
                               low(static_cast<uint64_t>(b * c_.heads + h)), low(rng_[1])},
                              {low(rng_[0]), low(rng_[0] >> 32) ^ low(rng_[1] >> 32)});
    const auto place = static_cast<std::size_t>(j % 8);
    return (draws[place / 2] >> (place % 2 * 16) & 0xffff) < threshold_;
  }

  // Query 0 and this key are on the diagonal.
  int64_t shift(const Sequence& s) const { return c_.diagonal.value_or(s.keys - s.queries); }

  // Whether query i sees key j, both counted within sequence b.
  bool visible(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    if (j >= s.keys) return false;
    const int64_t diagonal = i + shift(s);
    const int64_t right = c_.causal != 0 ? 0 : c_.right;
    if (c_.left >= 0 && j < diagonal - c_.left) return false;
    if (right >= 0 && j > diagonal + right) return false;
    if (p_.bias && p_.bias->at(b, h, i, j) == (c_.bias == "bool" ? 0 : -INFINITY)) return false;
    if (p_.block_mask && p_.block_mask->at(b, h, i / c_.block[0], j / c_.block[1]) == 0)
      return false;
    bool in_range = !p_.key_ranges;
    for (int64_t x = 0; p_.key_ranges && x < 2 * c_.ranges[1]; x += 2) {
      const auto number = [&](int64_t y) {
        return static_cast<int64_t>(p_.key_ranges->at(s.batch, head_k(h), s.first_k + j, y));
      };
      in_range |= number(x) <= i && i < number(x + 1);
    }
    return in_range;
  }

  // slope: that of the softcap; size: the sum of all absolute values.
  struct Score {
    double value, slope, size;
  };
  Score score(const Sequence& s, int64_t b, int64_t h, int64_t i, int64_t j) const {
    const double* const q = q_.data() + p_.q.index(s.batch, s.first_q + i, h, 0);
    const double* const k = k_.data() + p_.k.index(s.batch, s.first_k + j, head_k(h), 0);
    double score = 0, slope = 1, size = 0;
    for (int64_t x = 0; x < c_.head_dim; ++x) {
      score += q[x] * k[x];
      size += std::abs(q[x] * k[x]);
    }
    score *= c_.scale;
    size *= std::abs(c_.scale);
    if (c_.softcap > 0) {
      const double tanh = std::tanh(score / c_.softcap);
      score = c_.softcap * tanh;
      slope = 1 - tanh * tanh;
    }
    const double bias = p_.bias && c_.bias != "bool" ? p_.bias->at(b, h, i, j) : 0;
    const double alibi = p_.slopes ? p_.slopes->at(0, 0, b, h) * distance(s, i, j) : 0;
    return {score + bias - alibi, slope, size + std::abs(bias) + std::abs(alibi)};
  }

  double distance(const Sequence& s, int64_t i, int64_t j) const {
    return std::abs(static_cast<double>(i + shift(s) - j));
  }

  // Of what is not dropped.
  double dropout_factor() const { return 1 / (1 - threshold_ / 65536); }

  int64_t head_k(int64_t h) const { return h / (c_.heads / c_.heads_k); }

 private:
  const Problem& p_;
  const Case& c_;
  std::array<uint64_t, 2> rng_;
  double threshold_;
  std::vector<double> q_, k_;
};

}  // namespace driver
