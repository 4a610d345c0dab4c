// variant/mask.h against its definition, element by element.
#include "variant/mask.h"

#include <algorithm>
#include <climits>
#include <optional>
#include <vector>

#include "check.h"

using anyflash::KRange;
using anyflash::Mask;
using anyflash::MRange;
using anyflash::Window;

namespace {

// A mask and its definition.
struct Case {
  int seqlen_q;
  int seqlen_k;
  Window window;
  std::optional<int64_t> shift = {};  // none: aligned at the bottom right

  Mask mask() const {
    if (shift) return Mask(seqlen_q, seqlen_k, *shift, window);
    return Mask::at_bottom_right(seqlen_q, seqlen_k, window);
  }

  bool keep(int64_t i, int64_t j) const {
    const int64_t diagonal = i + shift.value_or(int64_t{seqlen_k} - seqlen_q);
    return j >= 0 && j < seqlen_k && (window.left < 0 || j >= diagonal - window.left) &&
           (window.right < 0 || j <= diagonal + window.right);
  }

  std::string text() const {
    return "seqlen_q " + std::to_string(seqlen_q) + ", seqlen_k " + std::to_string(seqlen_k) +
           ", window " + std::to_string(window.left) + ", " + std::to_string(window.right) +
           (shift ? ", shift " + std::to_string(*shift) : "");
  }
};

void check_elements(const Case& c) {
  const Mask mask = c.mask();
  for (int i = 0; i < c.seqlen_q; ++i) {
    int visible = 0;
    for (int j = 0; j < c.seqlen_k + 3; ++j) {
      visible += c.keep(i, j) ? 1 : 0;
      CHECK_MSG(mask.keep(i, j) == c.keep(i, j), c.text());
    }
    CHECK_MSG(std::max(0, mask.end_key(i) - mask.first_key(i)) == visible, c.text());
  }
  // The same for rows that exist; those behind the last one see no key behind its last one.
  const Mask bounded = mask.up_to_last_row();
  for (int i = 0; i < c.seqlen_q + 3; ++i) {
    for (int j = 0; j < c.seqlen_k; ++j) {
      const bool kept = bounded.keep(i, j);
      if (i < c.seqlen_q) CHECK_MSG(kept == c.keep(i, j), c.text());
      else CHECK_MSG(!kept || j < mask.end_key(c.seqlen_q - 1), c.text());
    }
  }
}

// How many pairs of an existing row of the block and a column of the tile are kept.
int kept(const Case& c, int first_row, int rows, int tile, int block_n) {
  int count = 0;
  for (int i = first_row; i < std::min(first_row + rows, c.seqlen_q); ++i) {
    for (int j = tile * block_n; j < (tile + 1) * block_n; ++j) count += c.keep(i, j);
  }
  return count;
}

// The tiles in the order of visits: each once, masked ones first.
void check_order(const KRange& range, int tiles, const std::string& what) {
  std::vector<int> visits(static_cast<std::size_t>(tiles), 0);
  bool unmasked = false;
  int steps = 0;
  for (int tile = range.first(); tile >= 0 && steps <= tiles; tile = range.next(tile), ++steps) {
    if (!CHECK_MSG(range.begin <= tile && tile < range.end, what)) return;
    ++visits[static_cast<std::size_t>(tile)];
    CHECK_MSG(!unmasked || !range.needs_mask(tile), what + ": a masked tile after others");
    unmasked = !range.needs_mask(tile);
  }
  for (int tile = 0; tile < tiles; ++tile) {
    const int expected = range.begin <= tile && tile < range.end ? 1 : 0;
    CHECK_MSG(visits[static_cast<std::size_t>(tile)] == expected, what + ": visits");
  }
}

void check_tiles(const Case& c, int block_m, int block_n) {
  const std::string what =
      c.text() + ", blocks " + std::to_string(block_m) + " x " + std::to_string(block_n);
  const Mask mask = c.mask();
  const int tiles = (c.seqlen_k + block_n - 1) / block_n;
  for (int first_row = 0; first_row < c.seqlen_q; first_row += block_m) {
    const KRange range = mask.k_range(first_row, block_m, block_n);
    CHECK_MSG(0 <= range.begin && range.begin <= range.unmasked_begin &&
                  range.unmasked_begin <= range.unmasked_end && range.unmasked_end <= range.end &&
                  range.end <= tiles,
              what);
    check_order(range, tiles, what);
    const int full = std::min(block_m, c.seqlen_q - first_row) * block_n;
    for (int tile = 0; tile < tiles; ++tile) {
      const int count = kept(c, first_row, block_m, tile, block_n);
      if (tile < range.begin || tile >= range.end) {
        CHECK_MSG(count == 0, what + ": a tile is left out");
      } else if (range.needs_mask(tile)) {
        CHECK_MSG(count < full, what + ": a tile is masked for nothing");
        CHECK_MSG(count > 0, what + ": a tile is visited for nothing");
      } else {
        CHECK_MSG(count == full, what + ": an unmasked tile needs a mask");
      }
    }
  }
}

// The same for the tiles of rows that see one block of keys. Both ask kept(), whose tiles of keys
// may end beyond the last one, where nothing is kept.
void check_row_tiles(const Case& c, int block_m, int block_n) {
  const std::string what =
      c.text() + ", row blocks " + std::to_string(block_m) + " x " + std::to_string(block_n);
  const Mask mask = c.mask();
  const int tiles = (c.seqlen_q + block_m - 1) / block_m;
  for (int tile_n = 0; tile_n * block_n < c.seqlen_k; ++tile_n) {
    const MRange range = mask.m_range(int64_t{tile_n} * block_n, block_n, block_m);
    CHECK_MSG(0 <= range.begin && range.begin <= range.unmasked_begin &&
                  range.unmasked_begin <= range.unmasked_end && range.unmasked_end <= range.end &&
                  range.end <= tiles,
              what);
    for (int tile = 0; tile < tiles; ++tile) {
      const int rows = std::min(block_m, c.seqlen_q - tile * block_m);
      const int count = kept(c, tile * block_m, block_m, tile_n, block_n);
      if (tile < range.begin || tile >= range.end) {
        CHECK_MSG(count == 0, what + ": a tile is left out");
      } else if (range.needs_mask(tile)) {
        CHECK_MSG(count < rows * block_n, what + ": a tile is masked for nothing");
        CHECK_MSG(count > 0, what + ": a tile is visited for nothing");
      } else {
        CHECK_MSG(count == rows * block_n, what + ": an unmasked tile needs a mask");
      }
    }
  }
}

void check_small() {
  constexpr int kLengths = 14;
  constexpr int kBlocks = 5;
  for (int seqlen_q = 0; seqlen_q < kLengths; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k < kLengths; ++seqlen_k) {
      for (const int64_t left : {-1, 0, 1, 2, 5, 13, 40}) {
        for (const int64_t right : {-1, 0, 1, 3, 12, 40}) {
          const Case c{seqlen_q, seqlen_k, {left, right}};
          check_elements(c);
          for (int block_m = 1; block_m <= kBlocks; ++block_m) {
            for (int block_n = 1; block_n <= kBlocks; ++block_n) {
              check_tiles(c, block_m, block_n);
              check_row_tiles(c, block_m, block_n);
            }
          }
        }
      }
    }
  }
}

// The same with the diagonal anywhere.
void check_shifted() {
  for (const int seqlen_q : {1, 4, 13}) {
    for (const int seqlen_k : {1, 5, 12}) {
      for (const int64_t left : {-1, 0, 2, 13}) {
        for (const int64_t right : {-1, 0, 3}) {
          for (const int64_t shift : {-1000, -20, -5, -1, 0, 2, 7, 12, 14, 30, 1 << 30}) {
            const Case c{seqlen_q, seqlen_k, {left, right}, shift};
            check_elements(c);
            for (const int block : {1, 3, 4, 16}) {
              check_tiles(c, block, 4);
              check_row_tiles(c, 4, block);
            }
          }
        }
      }
    }
  }
}

// The largest lengths and windows that validation lets through; blocks reach beyond the last row.
void check_large_case(const Case& c, int block_m, int block_n) {
  const Mask mask = c.mask();
  // No distance between a row and a key is larger, so wider windows hide nothing more.
  constexpr int64_t kWidest = int64_t{1} << 33;
  const auto clamped = [&](int64_t key) { return std::clamp<int64_t>(key, 0, c.seqlen_k); };
  const auto first_key = [&](int64_t i) {
    const int64_t left = std::min(c.window.left, kWidest);
    return left < 0 ? 0 : clamped(i + c.seqlen_k - c.seqlen_q - left);
  };
  const auto end_key = [&](int64_t i) {
    const int64_t right = std::min(c.window.right, kWidest);
    return right < 0 ? c.seqlen_k : clamped(i + c.seqlen_k - c.seqlen_q + right + 1);
  };
  const int64_t last_block = (c.seqlen_q - 1) / block_m * block_m;
  for (const int64_t row :
       {int64_t{0}, int64_t{c.seqlen_q} / 2, last_block, int64_t{c.seqlen_q} - 1}) {
    CHECK_MSG(mask.first_key(row) == first_key(row), c.text());
    CHECK_MSG(mask.end_key(row) == end_key(row), c.text());
  }
  for (const int64_t first_row : {int64_t{0}, last_block / 2 / block_m * block_m, last_block}) {
    const int64_t last_row = std::min<int64_t>(first_row + block_m, c.seqlen_q) - 1;
    const KRange range = mask.k_range(first_row, block_m, block_n);
    if (first_key(first_row) >= end_key(last_row)) {
      CHECK_MSG(range.begin == range.end && range.first() < 0, c.text());
      continue;
    }
    CHECK_MSG(range.begin == first_key(first_row) / block_n, c.text());
    CHECK_MSG(range.end == (end_key(last_row) + block_n - 1) / block_n, c.text());
    const int64_t left = (first_key(last_row) + block_n - 1) / block_n;
    const int64_t masked = end_key(first_row) / block_n;
    if (left < masked) {
      CHECK_MSG(range.unmasked_begin == left && range.unmasked_end == masked, c.text());
    } else {
      CHECK_MSG(range.unmasked_begin == range.unmasked_end, c.text());
    }
  }
}

// The first row in [0, rows) of which `is` holds, which then holds of all later ones; else `rows`.
template <class Predicate>
int64_t first_row_where(int64_t rows, const Predicate& is) {
  int64_t begin = 0;
  int64_t end = rows;
  while (begin < end) {
    const int64_t middle = begin + (end - begin) / 2;
    if (is(middle)) {
      end = middle;
    } else {
      begin = middle + 1;
    }
  }
  return begin;
}

// m_range() of such lengths, by bisection over the rows' ranges of keys, which check_large_case()
// compares to their definition.
void check_large_row_tiles(const Case& c, int block_m, int block_n) {
  const Mask mask = c.mask();
  const int64_t n = c.seqlen_q;
  const int64_t last_block = (int64_t{c.seqlen_k} - 1) / block_n * block_n;
  for (const int64_t first : {int64_t{0}, last_block / 2 / block_n * block_n, last_block}) {
    const int64_t end = std::min<int64_t>(first + block_n, c.seqlen_k);
    const int64_t begin_row =
        first_row_where(n, [&](int64_t i) { return mask.end_key(i) > first; });
    const int64_t end_row = first_row_where(n, [&](int64_t i) { return mask.first_key(i) >= end; });
    const MRange range = mask.m_range(first, block_n, block_m);
    if (begin_row >= end_row) {
      CHECK_MSG(range.begin == range.end, c.text());
      continue;
    }
    CHECK_MSG(range.begin == begin_row / block_m, c.text());
    CHECK_MSG(range.end == (end_row + block_m - 1) / block_m, c.text());
    const int64_t full_row =
        first_row_where(n, [&](int64_t i) { return mask.end_key(i) >= first + block_n; });
    const int64_t full_end =
        first_row_where(n, [&](int64_t i) { return mask.first_key(i) > first; });
    const int64_t full = (full_row + block_m - 1) / block_m;
    const int64_t masked = full_end == n ? (n + block_m - 1) / block_m : full_end / block_m;
    if (full_row < full_end && full < masked) {
      CHECK_MSG(range.unmasked_begin == full && range.unmasked_end == masked, c.text());
    } else {
      CHECK_MSG(range.unmasked_begin == range.unmasked_end, c.text());
    }
  }
}

void check_large() {
  constexpr int kMax = INT_MAX - 4095;
  const int64_t widths[] = {-1,        0,         1000,          kMax,          INT_MAX,
                            1LL << 31, 1LL << 40, INT64_MAX / 2, INT64_MAX - 1, INT64_MAX};
  for (const int seqlen_q : {1, 1000, kMax - 1, kMax}) {
    for (const int seqlen_k : {0, 1, 1000, kMax - 1, kMax}) {
      for (const int64_t left : widths) {
        for (const int64_t right : widths) {
          for (const int block_n : {1, 64, 96, 128}) {
            const Case c{seqlen_q, seqlen_k, {left, right}};
            check_large_case(c, 128, block_n);
            if (seqlen_k > 0) check_large_row_tiles(c, 64, block_n);
          }
        }
      }
    }
  }
}

// flash-attn's issue 895: a window that ends right of the last key, for more queries than keys.
void check_right_of_the_keys() {
  const Case c{8, 4, {-1, 6}};
  const Mask mask = c.mask();
  CHECK_EQ(mask.end_key(0), 3);  // keys j <= 0 + 4 - 8 + 6
  for (int i = 1; i < 8; ++i) CHECK_EQ(mask.end_key(i), 4);
  CHECK(!mask.keep(7, 4));
}

// Causal, query i of 8 sees the keys up to i: blocks of two keys begin at the diagonal, whose tile
// alone is masked.
void check_causal_row_tiles() {
  const Mask mask = Case{8, 8, {-1, 0}}.mask();
  for (int tile = 0; tile < 4; ++tile) {
    const MRange range = mask.m_range(2 * tile, 2, 2);
    CHECK_EQ(range.begin, tile);
    CHECK_EQ(range.end, 4);
    for (int row_tile = tile; row_tile < 4; ++row_tile) {
      CHECK_EQ(range.needs_mask(row_tile), row_tile == tile);
    }
  }
}

// Blocks of keys that do not exist, and of keys that are not used, are seen by nobody.
void check_beyond_the_keys() {
  for (const int64_t left : {-1, 3}) {
    for (const int64_t right : {-1, 0, 3}) {
      for (const int64_t first_key : {20, 32}) {
        const MRange range = Case{10, 20, {left, right}}.mask().m_range(first_key, 16, 4);
        CHECK_EQ(range.begin, range.end);
      }
      const MRange none = Case{10, 0, {left, right}}.mask().m_range(0, 16, 4);
      CHECK_EQ(none.begin, none.end);
    }
  }
}

// Blocks of rows that do not exist see nothing.
void check_beyond_the_rows() {
  for (const int64_t left : {-1, 3}) {
    for (const int64_t right : {-1, 0, 3}) {
      const KRange range = Case{10, 20, {left, right}}.mask().k_range(16, 16, 4);
      CHECK_EQ(range.begin, range.end);
      CHECK(range.first() < 0);
    }
  }
}

}  // namespace

int main() {
  check_small();
  check_shifted();
  check_large();
  check_right_of_the_keys();
  check_beyond_the_rows();
  check_causal_row_tiles();
  check_beyond_the_keys();
  return check::report();
}
