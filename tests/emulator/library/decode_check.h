// Attention with a KV cache in double precision, by plain loops over the keys where they lie, and
// how far results are from it: 1 is the limit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "check.h"
#include "decode_problem.h"

namespace driver {

// Rotary embedding of a row, in float32 (KvCacheOptions).
inline std::vector<double> rotated(const DecodeProblem& p, const Tensor& tensor, int64_t first,
                                   int64_t position) {
  const Case& c = p.c;
  std::vector<double> row(static_cast<std::size_t>(c.head_dim));
  for (int64_t x = 0; x < c.head_dim; ++x) {
    row[static_cast<std::size_t>(x)] = tensor.get(first + x);
  }
  for (int64_t pair = 0; p.cos && pair < c.rotary / 2; ++pair) {
    const auto a = static_cast<std::size_t>(c.halves ? pair : 2 * pair);
    const auto b = static_cast<std::size_t>(c.halves ? pair + c.rotary / 2 : 2 * pair + 1);
    const auto cos = static_cast<float>(p.cos->at(0, 0, position, pair));
    const auto sin = static_cast<float>(p.sin->at(0, 0, position, pair));
    const auto first_of_pair = static_cast<float>(row[a]), second = static_cast<float>(row[b]);
    row[a] = first_of_pair * cos - second * sin;
    row[b] = second * cos + first_of_pair * sin;
  }
  return row;
}

inline double scale_of(const DecodeProblem& p, const std::optional<Tensor>& scale,
                       const CacheRow& at, int64_t head) {
  return scale ? scale->get(p.scale_index(*scale, at, head)) : 1.0;
}

inline double round_to(DType dtype, double x) {
  Tensor number(dtype, {1, 1, 1, 1});
  number.set(0, x);
  return number.get(0);
}

// What a call leaves of a cache: the new rows in their places, and all others as they were.
class CacheValues {
 public:
  explicit CacheValues(const DecodeProblem& p) : k_(p.k.values()), v_(p.v.values()) {
    p.for_each_key([&](int64_t b, int64_t j, const CacheRow& at) {
      const int64_t before = p.filled(b) - p.pad(b);
      if (j < before) return;
      for (int64_t head = 0; head < p.c.heads_k; ++head) {
        const int64_t from = p.k_new->index(b, j - before, head, 0);
        write(p, p.k, k_, at, head, rotated(p, *p.k_new, from, p.rotation(b) + j - before),
              p.k_scale);
        if (p.c.latent) continue;
        std::vector<double> value;
        for (int64_t x = 0; x < p.c.head_dim_v; ++x) {
          value.push_back(p.v_new->at(b, j - before, head, x));
        }
        write(p, p.v, v_, at, head, value, p.v_scale);
      }
    });
  }

  double check(const DecodeProblem& p) const {
    return std::max(check(p, p.k, k_), check(p, p.v, v_));
  }

 private:
  static void write(const DecodeProblem& p, const Tensor& cache, std::vector<double>& values,
                    const CacheRow& at, int64_t head, const std::vector<double>& row,
                    const std::optional<Tensor>& scale) {
    const auto divisor = static_cast<float>(scale_of(p, scale, at, head));
    const auto first = static_cast<std::size_t>(cache.index(at.slot, at.row, head, 0));
    for (std::size_t x = 0; x < row.size(); ++x) {
      const auto rounded = static_cast<float>(round_to(p.q.dtype(), row[x]));
      values[first + x] = round_to(cache.dtype(), rounded / divisor);
    }
  }

  static double check(const DecodeProblem& p, const Tensor& cache,
                      const std::vector<double>& expected) {
    // A rotation may end on the other side of where it is rounded.
    const double step = cache.dtype() == DType::kFloat8E4M3   ? 0x1p-3
                        : cache.dtype() == DType::kFloat8E5M2 ? 0x1p-2
                                                              : 0x1p-7;
    const bool is_int8 = cache.dtype() == DType::kInt8;
    double worst = 0;
    for (std::size_t i = 0; i < expected.size(); ++i) {
      const double limit = !p.cos ? 0 : is_int8 ? 1 : step * std::abs(expected[i]);
      worst = std::max(worst, deviation(cache.get(static_cast<int64_t>(i)), expected[i], limit));
    }
    return worst;
  }

  std::vector<double> k_, v_;
};

// Row i of head h: to be compared with the cache as the call has left it.
struct DecodeRow {
  std::vector<double> out, size;  // size: the sum of the terms' absolute values
  double lse;
  bool empty;  // without keys
};

inline DecodeRow decode_row(const DecodeProblem& p, int64_t b, int64_t h, int64_t i) {
  const Case& c = p.c;
  const int64_t head = h / (c.heads / c.heads_k);
  const int64_t keys = p.keys(b);
  const bool steps = c.causal != 0 || c.left >= 0 || c.right >= 0;
  std::vector<double> q = rotated(p, p.q, p.q.index(b, i, h, 0), p.rotation(b) + (steps ? i : 0));
  for (double& x : q) x = round_to(p.q.dtype(), x);

  std::vector<double> scores(static_cast<std::size_t>(keys), -INFINITY);
  const double sink = p.sinks ? p.sinks->get(h) : -INFINITY;
  double top = sink;
  for (int64_t j = 0; j < keys; ++j) {
    if (!p.visible(b, i, j)) continue;
    double& score = scores[static_cast<std::size_t>(j)];
    score = 0;
    const CacheRow at = p.place(b, j);
    for (int64_t x = 0; at.slot >= 0 && x < c.head_dim; ++x) {
      score += q[static_cast<std::size_t>(x)] * p.k.at(at.slot, at.row, head, x);
    }
    if (at.slot >= 0) score *= c.scale * scale_of(p, p.k_scale, at, head);
    if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
    if (p.slopes) score -= p.slopes->get(h) * std::abs(double(i + keys - c.seqlen_q - j));
    top = std::max(top, score);
  }
  const bool empty =
      std::all_of(scores.begin(), scores.end(), [](double score) { return score == -INFINITY; });
  double sum = sink == -INFINITY ? 0 : std::exp(sink - top);
  for (const double score : scores) sum += score == -INFINITY ? 0 : std::exp(score - top);
  const auto columns = static_cast<std::size_t>(c.head_dim_v);
  DecodeRow row{std::vector<double>(columns), std::vector<double>(columns),
                sum == 0 ? -INFINITY : top + std::log(sum), empty};
  for (int64_t j = 0; j < keys; ++j) {
    const double score = scores[static_cast<std::size_t>(j)];
    const CacheRow at = p.place(b, j);
    if (empty || !p.visible(b, i, j) || at.slot < 0) continue;
    const double weight = std::exp(score - top) / sum * scale_of(p, p.value_scale(), at, head);
    for (std::size_t x = 0; x < columns; ++x) {
      const double term = weight * p.value(at, head, static_cast<int64_t>(x));
      row.out[x] += term;
      row.size[x] += std::abs(term);
    }
  }
  return row;
}

inline double check_decode(const DecodeProblem& p, const CacheValues& caches) {
  const double epsilon = p.c.dtype == "fp16" ? 0x1p-11 : 0x1p-8;
  double worst = caches.check(p);
  for (int64_t b = 0; b < p.c.batch; ++b) {
    for (int64_t h = 0; h < p.c.heads; ++h) {
      for (int64_t i = 0; i < p.c.seqlen_q; ++i) {
        const DecodeRow row = decode_row(p, b, h, i);
        worst = std::max(worst, deviation(p.lse.at(0, b, h, i), row.lse, fp32_error(row.lse)));
        for (std::size_t x = 0; x < row.out.size(); ++x) {
          const double limit = 1.5 * epsilon * (row.size[x] + std::abs(row.out[x])) + 1e-6;
          const double actual = p.out.at(b, i, h, static_cast<int64_t>(x));
          worst = std::max(worst, deviation(actual, row.out[x], row.empty ? 0 : limit));
        }
      }
    }
  }
  return worst;
}

}  // namespace driver
