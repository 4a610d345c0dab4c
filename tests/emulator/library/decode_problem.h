// The tensors that a case gives to KvCachePlan.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <random>
#include <stdexcept>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#endif

#include "case.h"
#include "tensor.h"

namespace driver {

// Every access becomes an error, under Address Sanitizer: it knows pieces of 8 bytes.
inline void forbid(void* data, int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_poison_memory_region(data, static_cast<std::size_t>(bytes));
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}
inline void allow(void* data, int64_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __asan_unpoison_memory_region(data, static_cast<std::size_t>(bytes));
#else
  static_cast<void>(data), static_cast<void>(bytes);
#endif
}

// Row `row` of page or sequence `slot`; -1: it does not exist.
struct CacheRow {
  int64_t slot, row;
};

class DecodeProblem {
 public:
  explicit DecodeProblem(const Case& problem)
      : c(problem),
        slots(c.page > 0 ? needed_pages() + 2 : c.batch + (c.batch_idx ? 1 : 0)),
        rows(c.page > 0 ? c.page : c.seqlen_k),
        q(dtype_of(c.dtype), {c.batch, c.seqlen_q, c.heads, c.head_dim}),
        k(dtype_of(c.cache), {slots, rows, c.heads_k, c.head_dim}),
        v(dtype_of(c.cache), {slots, rows, c.heads_k, c.head_dim_v}),
        out(dtype_of(c.out), {c.batch, c.seqlen_q, c.heads, c.head_dim_v}),
        lse(DType::kFloat32, {1, c.batch, c.heads, c.seqlen_q}),
        random_(c.seed) {
    check_case();
    randomise(q);
    make_integers();
    if (c.page > 0) make_table();
    if (c.tree) make_tree();
    if (c.new_keys > 0) make_new_keys();
    if (!c.scales.empty()) make_scales();
    if (c.alibi != 0) make_heads(slopes, c.alibi, c.alibi / 2);
    if (c.sink) make_heads(sinks, 3.0, -1.0);
    fill_cache();
  }

  int64_t filled(int64_t b) const {
    return c.filled.empty() ? c.seqlen_k - c.new_keys : c.filled[static_cast<std::size_t>(b)];
  }
  int64_t pad(int64_t b) const {
    return c.leftpad.empty() ? 0 : c.leftpad[static_cast<std::size_t>(b)];
  }
  // The rotary tables' row of the first new key.
  int64_t rotation(int64_t b) const {
    return c.rotary_seqlens.empty() ? filled(b) - pad(b)
                                    : c.rotary_seqlens[static_cast<std::size_t>(b)];
  }
  int64_t length(int64_t b) const { return filled(b) + c.new_keys; }  // in rows
  int64_t keys(int64_t b) const { return length(b) - pad(b); }

  CacheRow place(int64_t b, int64_t j) const {
    const int64_t row = pad(b) + j;
    if (c.page > 0) {
      return {static_cast<int64_t>(table->at(0, 0, b, row / c.page)), row % c.page};
    }
    return {c.batch_idx ? slots - 1 - b : b, row};
  }

  bool visible(int64_t b, int64_t i, int64_t j) const {
    const int64_t shift = keys(b) - c.seqlen_q;
    const int64_t right = c.causal != 0 ? 0 : c.right;
    if (c.left >= 0 && j < i + shift - c.left) return false;
    if (right >= 0 && j > i + shift + right) return false;
    return !tree || j < shift || tree->at(0, b, i, j - shift) != 0;
  }

  // In a tensor of scales by head, by slot and head, or by slot, row and head.
  int64_t scale_index(const Tensor& scale, const CacheRow& at, int64_t head) const {
    return c.scales == "row" ? scale.index(0, at.slot, at.row, head)
                             : scale.index(0, 0, at.slot, head);
  }

  // Column x of the value of the key there, and what scales it.
  double value(const CacheRow& at, int64_t head, int64_t x) const {
    return (c.latent ? k : v).at(at.slot, at.row, head, x);
  }
  const std::optional<Tensor>& value_scale() const { return c.latent ? k_scale : v_scale; }

  // Rows of the cache that no sequence has, and entries of the table that belong to none. Hopper's
  // kernels read a tile of rows to its end, within a slot.
  void forbid_unused() {
    const int64_t tile = c.gpu == 90 ? 128 : 1;
    std::vector<bool> used(static_cast<std::size_t>(slots * rows));
    for_each_key([&](int64_t, int64_t, const CacheRow& at) {
      for (int64_t row = at.row; row < std::min(at.row + tile, rows); ++row) {
        used[static_cast<std::size_t>(at.slot * rows + row)] = true;
      }
    });
    for (Tensor* const cache : {&k, &v}) {
      const int64_t bytes = cache->bytes() / (slots * rows);
      for (int64_t row = 0; row < slots * rows; ++row) {
        if (!used[static_cast<std::size_t>(row)]) forbid(cache->bytes_at(row * bytes), bytes);
      }
    }
    const int64_t columns = table ? table->extent()[3] : 0;
    for (int64_t b = 0; table && b < c.batch; ++b) {
      const int64_t needed = pages_of(b);
      forbid(table->bytes_at((b * columns + needed) * 4), (columns - needed) * 4);
    }
  }
  void allow_unused() {
    for (Tensor* const tensor : {&k, &v, table ? &*table : &k}) {
      allow(tensor->bytes_at(0), tensor->bytes());
    }
  }

  // function(b, j, place) of all keys whose place exists.
  template <class Function>
  void for_each_key(const Function& function) const {
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t j = 0; j < keys(b); ++j) {
        const CacheRow at = place(b, j);
        if (at.slot >= 0) function(b, j, at);
      }
    }
  }

  Case c;
  int64_t slots, rows;  // of the cache, and of one of them
  Tensor q, k, v, out, lse;
  std::optional<Tensor> slopes, sinks, seqlens, leftpad, batch_idx, table, tree, k_new, v_new;
  std::optional<Tensor> cos, sin, rotary_seqlens, k_scale, v_scale;

 private:
  int64_t pages_of(int64_t b) const { return (length(b) + c.page - 1) / c.page; }
  int64_t needed_pages() const {
    int64_t pages = 0;
    for (int64_t b = 0; b < c.batch; ++b) pages += pages_of(b);
    return pages;
  }

  void check_case() const {
    const bool others = c.packed() || !c.used.empty() || !c.bias.empty() || !c.block.empty();
    if (others || c.dropout > 0) throw std::invalid_argument("not an option of decoding");
    if (c.rotary > 0 && c.new_keys == 0) throw std::invalid_argument("nothing is rotated");
    if (c.page > 0 && c.seqlen_k % c.page != 0) throw std::invalid_argument("half a page");
    for (int64_t b = 0; b < c.batch; ++b) {
      if (length(b) > c.seqlen_k || pad(b) > filled(b)) throw std::invalid_argument("no room");
    }
  }

  // By some query, or appended.
  bool seen(int64_t b, int64_t j) const {
    if (j >= filled(b) - pad(b)) return true;
    for (int64_t i = 0; i < c.seqlen_q; ++i) {
      if (visible(b, i, j)) return true;
    }
    return false;
  }

  bool seen_by_all(int64_t b, int64_t j) const {
    for (int64_t i = 0; i < c.seqlen_q; ++i) {
      if (!visible(b, i, j)) return false;
    }
    return true;
  }

  void randomise(Tensor& tensor) {
    for (int64_t i = 0; i < tensor.size(); ++i) tensor.set(i, normal_(random_));
  }

  void make_heads(std::optional<Tensor>& tensor, double even, double odd) {
    tensor.emplace(DType::kFloat32, std::array<int64_t, 4>{1, 1, 1, c.heads});
    for (int64_t i = 0; i < c.heads; ++i) tensor->set(i, i % 2 == 0 ? even : odd);
  }

  template <class Function>
  void make_vector(std::optional<Tensor>& tensor, const Function& value) {
    tensor.emplace(DType::kInt32, std::array<int64_t, 4>{1, 1, 1, c.batch});
    for (int64_t b = 0; b < c.batch; ++b) tensor->set(b, static_cast<double>(value(b)));
  }

  void make_integers() {
    if (!c.filled.empty() || c.new_keys > 0) {
      make_vector(seqlens, [&](int64_t b) { return filled(b); });
    }
    if (!c.leftpad.empty()) make_vector(leftpad, [&](int64_t b) { return pad(b); });
    if (!c.rotary_seqlens.empty()) {
      make_vector(rotary_seqlens, [&](int64_t b) { return rotation(b); });
    }
    if (c.batch_idx) make_vector(batch_idx, [&](int64_t b) { return slots - 1 - b; });
  }

  // An even number of columns: see forbid().
  void make_table() {
    const int64_t columns = (c.seqlen_k / c.page + 1) / 2 * 2;
    table.emplace(DType::kInt32, std::array<int64_t, 4>{1, 1, c.batch, columns});
    std::vector<int64_t> pages(static_cast<std::size_t>(slots));
    std::iota(pages.begin(), pages.end(), 0);
    std::shuffle(pages.begin(), pages.end(), random_);
    std::size_t next = 0;
    for (int64_t b = 0; b < c.batch; ++b) {
      for (int64_t page = 0; page < pages_of(b); ++page) {
        table->set(b * columns + page, static_cast<double>(pages[next++]));
      }
    }
    if (c.hole) table->set(0, -1);
  }

  void make_tree() {
    tree.emplace(DType::kBool, std::array<int64_t, 4>{1, c.batch, c.seqlen_q, c.seqlen_q});
    std::bernoulli_distribution kept(0.5);
    for (int64_t i = 0; i < tree->size(); ++i) tree->set(i, kept(random_) ? 1 : 0);
  }

  void make_new_keys() {
    const DType dtype = dtype_of(c.dtype);
    k_new.emplace(dtype, std::array<int64_t, 4>{c.batch, c.new_keys, c.heads_k, c.head_dim});
    v_new.emplace(dtype, std::array<int64_t, 4>{c.batch, c.new_keys, c.heads_k, c.head_dim_v});
    randomise(*k_new);
    randomise(*v_new);
    if (c.rotary == 0) return;
    int64_t positions = 0;
    for (int64_t b = 0; b < c.batch; ++b) {
      positions = std::max(positions, rotation(b) + std::max(c.new_keys, c.seqlen_q));
    }
    cos.emplace(DType::kFloat32, std::array<int64_t, 4>{1, 1, positions, c.rotary / 2});
    sin.emplace(DType::kFloat32, std::array<int64_t, 4>{1, 1, positions, c.rotary / 2});
    for (int64_t i = 0; i < cos->size(); ++i) {
      const double angle = 3 * normal_(random_);
      cos->set(i, std::cos(angle));
      sin->set(i, std::sin(angle));
    }
  }

  // Elements of an 8-bit cache are so many times larger than what they stand for.
  double magnitude() const {
    return c.cache == "int8" ? 40 : c.cache == "e4m3" || c.cache == "e5m2" ? 4 : 1;
  }

  void make_scales() {
    std::uniform_real_distribution<double> factor(0.5, 1.5);
    for (std::optional<Tensor>* const scale : {&k_scale, &v_scale}) {
      std::array<int64_t, 4> extent{1, 1, 1, c.heads_k};
      if (c.scales == "slot") extent[2] = slots;
      if (c.scales == "row") extent = {1, slots, rows, c.heads_k};
      scale->emplace(DType::kFloat32, extent);
      const auto set = [&](const CacheRow& at) {
        for (int64_t head = 0; head < c.heads_k; ++head) {
          (*scale)->set(scale_index(**scale, at, head), factor(random_) / magnitude());
        }
      };
      // Those of slots of which nothing is seen remain NaN, or larger than all others.
      for (int64_t i = 0; i < (*scale)->size(); i += 2) (*scale)->set(i, 1e38);
      if (c.scales == "head") set({0, 0});
      else
        for_each_key([&](int64_t b, int64_t j, const CacheRow& at) {
          if (seen(b, j)) set(at);
        });
    }
  }

  // Keys that some query sees, but for those that will be appended.
  void fill_cache() {
    std::bernoulli_distribution chosen(0.05);
    for_each_key([&](int64_t b, int64_t j, const CacheRow& at) {
      if (j >= filled(b) - pad(b) || !seen(b, j)) return;
      for (Tensor* const cache : {&k, &v}) {
        const int64_t first = cache->index(at.slot, at.row, 0, 0);
        const int64_t count = c.heads_k * cache->extent()[3];
        for (int64_t x = 0; x < count; ++x) cache->set(first + x, magnitude() * normal_(random_));
        if (cache == &v && c.nan == "seen" && chosen(random_)) {
          cache->set(first + j % count, c.cache != "e4m3" && j % 2 == 0 ? INFINITY : NAN);
        }
        // A query that sees NaN has it in every column: the others must be left. Of infinity, it
        // has NaN in its column if the score is -inf.
        if (cache == &k && c.latent && c.nan == "seen" && j % 2 == 0 && !seen_by_all(b, j)) {
          cache->set(first + j % count, c.cache != "e4m3" && j % 4 == 0 ? INFINITY : NAN);
        }
      }
    });
  }

  std::mt19937 random_;
  std::normal_distribution<double> normal_;
};

}  // namespace driver
