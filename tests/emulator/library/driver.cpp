// Runs forward() on the emulated GPU and compares with float64: the program behind the sanitizer
// and mutation tests, where Python cannot be the host.
//
//   emulated_driver [--stop] < cases        one case a line:
//   dtype batch seqlen_q seqlen_k heads heads_k head_dim head_dim_v causal scale seed key=value ...
//
// dtype is fp16 or bf16, causal 0 or 1, seed decides values and the emulator's schedule. Keys:
//   left, right         window                  softcap         sink=1     a logit for each head
//   alibi=SLOPE         of the first head       dropout=P       out=fp32   type of the output
//   bias=TYPE           fp32, fp16, bf16 (a tenth and every seventh key -inf) or bool
//   bias_axes=bhqk      with 1 for each axis that is broadcast
//   block=ROWS,KEYS     random block mask       used=N,N,...    seqused_k
//   cu_q=0,N,... cu_k=  packed sequences; seqlen_q and seqlen_k are the totals, batch is not read
//   nan=hidden          NaN in K and V of the keys that no query sees
//   nan=seen            and NaN and infinity at random places of V
// Exit status 0: all cases are right. --stop: nothing is run after the first wrong one.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <string>

#include "emu.hpp"
#include "problem.h"
#include "reference.h"

namespace driver {
namespace {

// Of what is allowed, 1 being the limit; 0 for what must be the same and is.
double deviation(double actual, double expected, double allowed) {
  if (std::isnan(expected)) return std::isnan(actual) ? 0 : INFINITY;
  if (actual == expected) return 0;
  const double error = std::abs(actual - expected) / allowed;
  return std::isnan(error) ? INFINITY : error;
}

double fp32_error(double expected) { return 1e-5 * (1 + std::abs(expected)); }

double check_row(const Problem& p, const Reference::Row& row, int64_t b, int64_t h, int64_t i) {
  const Sequence s = p.sequence(b);
  double worst = deviation(p.lse.at(0, s.batch, h, s.first_q + i), row.lse, fp32_error(row.lse));
  const double epsilon = p.c.dtype == "fp16" ? 0x1p-11 : 0x1p-8;
  for (std::size_t x = 0; x < row.out.size(); ++x) {
    // P and the result are rounded once each; fp32 sums and exp2 add little. Nothing is exactly 0.
    const double limit = 1.5 * epsilon * (row.size[x] + std::abs(row.out[x])) + 1e-6;
    const double actual = p.out.at(s.batch, s.first_q + i, h, static_cast<int64_t>(x));
    worst = std::max(worst, deviation(actual, row.out[x], row.empty ? 0 : limit));
  }
  return worst;
}

double check_dropout_mask(const Problem& p, const Reference& reference, int64_t b, int64_t h,
                          int64_t i) {
  for (int64_t j = 0; j < p.sequence(b).all_keys; ++j) {
    if ((p.dropout_mask->at(b, h, i, j) == 0) != reference.dropped(b, h, i, j)) return INFINITY;
  }
  return 0;
}

// NaN in every key that no query of its group of heads sees; and at random places of V, if `seen`.
void put_nan(Problem& p, const std::array<uint64_t, 2>& rng, bool seen) {
  const Reference reference(p, rng);
  const int64_t group = p.c.heads / p.c.heads_k;
  std::mt19937 random(p.c.seed);
  std::bernoulli_distribution chosen(0.05);
  const auto fill = [](Tensor& t, int64_t first, int64_t count) {
    for (int64_t x = 0; x < count; ++x) t.set(first + x, NAN);
  };
  for (int64_t b = 0; b < p.c.batch; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t head = 0; head < p.c.heads_k; ++head) {
      for (int64_t j = 0; j < s.all_keys; ++j) {
        bool visible = false;
        for (int64_t h = head * group; h < (head + 1) * group; ++h) {
          for (int64_t i = 0; i < s.queries && !visible; ++i) {
            visible = reference.visible(s, b, h, i, j);
          }
        }
        const int64_t first = p.v.index(s.batch, s.first_k + j, head, 0);
        if (!visible) {
          fill(p.k, p.k.index(s.batch, s.first_k + j, head, 0), p.c.head_dim);
          fill(p.v, first, p.c.head_dim_v);
        } else if (seen && chosen(random)) {
          p.v.set(first + j % p.c.head_dim_v, j % 2 == 0 ? INFINITY : NAN);
        }
      }
    }
  }
}

double run(const Case& c) {
  emu::options().seed = c.seed;
  // All four halves count.
  const std::array<uint64_t, 2> rng{0x0123456789abcdefu * (c.seed + 1u),
                                    0xfedcba9876543210u + c.seed};
  Problem p(c);
  if (!c.nan.empty()) put_nan(p, rng, c.nan == "seen");
  p.forward(rng);

  const Reference reference(p, rng);
  double worst = 0;
  for (int64_t b = 0; b < c.batch; ++b) {
    for (int64_t h = 0; h < c.heads; ++h) {
      double largest = -INFINITY;
      for (int64_t i = 0; i < p.sequence(b).queries; ++i) {
        const Reference::Row row = reference.row(b, h, i);
        largest = std::max(largest, row.max_score);
        worst = std::max(worst, check_row(p, row, b, h, i));
        if (p.dropout_mask) worst = std::max(worst, check_dropout_mask(p, reference, b, h, i));
      }
      const double actual = p.max_logits.at(0, 0, b, h);
      worst = std::max(worst, deviation(actual, largest, fp32_error(largest)));
    }
  }
  return worst;
}

// Whether the line's case is right.
bool run_line(const std::string& line, const Case& c) {
  try {
    const double worst = run(c);
    std::printf("%s %s: %.3f of the allowed error\n", worst <= 1 ? "ok   " : "WRONG", line.c_str(),
                worst);
    return worst <= 1;
  } catch (const std::exception& error) {
    std::printf("WRONG %s: %s\n", line.c_str(), error.what());
    return false;
  }
}

}  // namespace
}  // namespace driver

int main(int count, char** arguments) {
  const bool stop = count > 1 && std::string(arguments[1]) == "--stop";
  int wrong = 0;
  std::string line;
  while (std::getline(std::cin, line) && !(stop && wrong > 0)) {
    try {
      if (!driver::run_line(line, driver::Case(line))) ++wrong;
    } catch (const std::exception& error) {
      std::fprintf(stderr, "not a case: %s: %s\n", line.c_str(), error.what());
      return 2;
    }
  }
  return wrong == 0 ? 0 : 1;
}
