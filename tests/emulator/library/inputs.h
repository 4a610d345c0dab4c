// What a case's tensors hold beside random numbers.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>

#include "gradients.h"
#include "problem.h"
#include "reference.h"

namespace driver {

inline void fill(Tensor& t, int64_t first, int64_t count, double x) {
  for (int64_t i = first; i < first + count; ++i) t.set(i, x);
}

// NaN in every key that no query of its group of heads sees; and at random places of V, if `seen`.
inline void put_nan(Problem& p, const std::array<uint64_t, 2>& rng, bool seen) {
  const Reference reference(p, rng);
  const int64_t group = p.c.heads / p.c.heads_k;
  std::mt19937 random(p.c.seed);
  std::bernoulli_distribution chosen(0.05);
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
          fill(p.k, p.k.index(s.batch, s.first_k + j, head, 0), p.c.head_dim, NAN);
          fill(p.v, first, p.c.head_dim_v, NAN);
        } else if (seen && chosen(random)) {
          p.v.set(first + j % p.c.head_dim_v, j % 2 == 0 ? INFINITY : NAN);
        }
      }
    }
  }
}

// And in every query that sees no key, in its dO, and what it is said to have given.
inline void put_nan_of_rows(Problem& p, Gradients& g, const Reference& reference) {
  for (int64_t b = 0; b < p.c.batch; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t h = 0; h < p.c.heads; ++h) {
      for (int64_t i = 0; i < s.queries; ++i) {
        bool sees = false;
        for (int64_t j = 0; j < s.keys && !sees; ++j) sees = reference.visible(s, b, h, i, j);
        if (sees) continue;
        fill(p.q, p.q.index(s.batch, s.first_q + i, h, 0), p.c.head_dim, NAN);
        fill(g.dout, g.dout.index(s.batch, s.first_q + i, h, 0), p.c.head_dim_v, NAN);
      }
    }
  }
}

// NaN or infinity in one place of one tensor in each head, so that most gradients remain finite.
inline void put_one_nan(Problem& p, Gradients& g, const std::string& where) {
  std::mt19937 random(p.c.seed);
  Tensor& t = where == "q" ? p.q : where == "k" ? p.k : where == "v" ? p.v : g.dout;
  const std::array<int64_t, 4> extent = t.extent();
  for (int64_t b = 0; b < extent[0]; ++b) {
    for (int64_t h = 0; h < extent[2] && extent[1] > 0; ++h) {
      const auto row = static_cast<int64_t>(random() % static_cast<uint64_t>(extent[1]));
      const auto col = static_cast<int64_t>(random() % static_cast<uint64_t>(extent[3]));
      const bool infinite = (where == "v" || where == "dout") && h % 2 == 0;
      t.set(t.index(b, row, h, col), infinite ? INFINITY : NAN);
    }
  }
}

// -inf in one place of K in each head, where queries are positive: it hides the key.
inline void put_hiding_infinity(Problem& p) {
  std::mt19937 random(p.c.seed);
  const std::array<int64_t, 4> extent = p.k.extent();
  const int64_t group = p.c.heads / p.c.heads_k;
  for (int64_t b = 0; b < extent[0]; ++b) {
    for (int64_t head = 0; head < extent[2] && extent[1] > 0; ++head) {
      const auto row = static_cast<int64_t>(random() % static_cast<uint64_t>(extent[1]));
      const auto col = static_cast<int64_t>(random() % static_cast<uint64_t>(extent[3]));
      p.k.set(p.k.index(b, row, head, col), -INFINITY);
      for (int64_t h = head * group; h < (head + 1) * group; ++h) {
        for (int64_t i = 0; i < p.q.extent()[1]; ++i) {
          const int64_t at = p.q.index(b, i, h, col);
          p.q.set(at, std::abs(p.q.get(at)) + 0.1);
        }
      }
    }
  }
}

// Adds to what the gradients hold.
inline void add(Gradients& g, double x) {
  for (Tensor* t : {&g.dq, &g.dk, &g.dv}) {
    for (int64_t i = 0; i < t->size(); ++i) t->set(i, t->get(i) + x);
  }
}

// The out and LSE that the backward is given: the reference's, rounded.
inline void set_forward(Problem& p, const Reference& reference) {
  for (int64_t b = 0; b < p.c.batch; ++b) {
    const Sequence s = p.sequence(b);
    for (int64_t h = 0; h < p.c.heads; ++h) {
      for (int64_t i = 0; i < s.queries; ++i) {
        const Reference::Row row = reference.row(b, h, i);
        const int64_t first = p.out.index(s.batch, s.first_q + i, h, 0);
        for (int64_t x = 0; x < p.c.head_dim_v; ++x) {
          p.out.set(first + x, row.out[static_cast<std::size_t>(x)]);
        }
        const bool unseeing = p.c.keyless && i % 5 == 3;
        const double lse = unseeing ? (i % 2 == 0 ? -INFINITY : INFINITY) : row.lse;
        p.lse.set(p.lse.index(0, s.batch, h, s.first_q + i), lse);
      }
    }
  }
}

}  // namespace driver
