// variant/mask.h against its definition, element by element.
#include "variant/mask.h"

#include <algorithm>
#include <climits>

#include "check.h"

using anyflash::ForwardParams;
using anyflash::KRange;
using anyflash::Mask;

namespace {

ForwardParams params_of(int seqlen_q, int seqlen_k, bool causal) {
  ForwardParams params;
  params.seqlen_q = seqlen_q;
  params.seqlen_k = seqlen_k;
  params.causal = causal;
  return params;
}

bool defined_keep(const ForwardParams& p, int64_t i, int64_t j) {
  return j < p.seqlen_k && (!p.causal || j <= i + p.seqlen_k - p.seqlen_q);
}

std::string text(const ForwardParams& p) {
  return "seqlen_q " + std::to_string(p.seqlen_q) + ", seqlen_k " + std::to_string(p.seqlen_k) +
         (p.causal ? ", causal" : "");
}

void check_elements(const ForwardParams& p) {
  const Mask mask(p);
  for (int i = 0; i < p.seqlen_q; ++i) {
    int visible = 0;
    for (int j = 0; j < p.seqlen_k + 3; ++j) {
      visible += defined_keep(p, i, j) ? 1 : 0;
      CHECK_MSG(mask.keep(i, j) == defined_keep(p, i, j), text(p));
    }
    CHECK_MSG(mask.visible(i) == visible, text(p));
  }
}

// How many pairs of an existing row of the block and a column of the tile are kept.
int kept(const ForwardParams& p, int first_row, int rows, int tile, int block_n) {
  int count = 0;
  for (int i = first_row; i < std::min(first_row + rows, p.seqlen_q); ++i) {
    for (int j = tile * block_n; j < (tile + 1) * block_n; ++j) count += defined_keep(p, i, j);
  }
  return count;
}

void check_tiles(const ForwardParams& p, int block_m, int block_n) {
  const std::string what =
      text(p) + ", blocks " + std::to_string(block_m) + " x " + std::to_string(block_n);
  const Mask mask(p);
  const int tiles = (p.seqlen_k + block_n - 1) / block_n;
  for (int first_row = 0; first_row < p.seqlen_q; first_row += block_m) {
    const KRange range = mask.k_range(first_row, block_m, block_n);
    CHECK_MSG(0 <= range.masked && range.masked <= range.end && range.end <= tiles, what);
    const int full = std::min(block_m, p.seqlen_q - first_row) * block_n;
    for (int tile = 0; tile < tiles; ++tile) {
      const int count = kept(p, first_row, block_m, tile, block_n);
      if (tile < range.masked) CHECK_MSG(count == full, what + ": an unmasked tile needs a mask");
      if (tile >= range.end) CHECK_MSG(count == 0, what + ": a tile is left out");
      if (tile == range.masked) CHECK_MSG(count < full, what + ": a tile is masked for nothing");
      if (tile == range.end - 1) CHECK_MSG(count > 0, what + ": a tile is visited for nothing");
    }
  }
}

// The largest lengths that validation lets through; blocks reach beyond the last row.
void check_large() {
  constexpr int kMax = INT_MAX - 4095;
  constexpr int kBlockM = 128;
  for (const int seqlen_q : {1, 1000, kMax - 1, kMax}) {
    for (const int seqlen_k : {0, 1, 1000, kMax - 1, kMax}) {
      for (const bool causal : {false, true}) {
        const ForwardParams p = params_of(seqlen_q, seqlen_k, causal);
        const Mask mask(p);
        const auto visible = [&](int64_t i) {
          const int64_t last = causal ? i + seqlen_k - seqlen_q : int64_t{seqlen_k} - 1;
          return std::clamp<int64_t>(last + 1, 0, seqlen_k);
        };
        const int last_block = (seqlen_q - 1) / kBlockM * kBlockM;
        for (const int row : {0, seqlen_q / 2, last_block, seqlen_q - 1}) {
          CHECK_MSG(mask.visible(row) == visible(row), text(p));
        }
        for (const int first_row : {0, last_block / 2 / kBlockM * kBlockM, last_block}) {
          const int last_row = std::min(first_row + (kBlockM - 1), seqlen_q - 1);
          for (const int block_n : {1, 64, 96, 128}) {
            const KRange range = mask.k_range(first_row, kBlockM, block_n);
            CHECK_MSG(range.masked == visible(first_row) / block_n, text(p));
            CHECK_MSG(range.end == (visible(last_row) + block_n - 1) / block_n, text(p));
          }
        }
      }
    }
  }
}

}  // namespace

int main() {
  constexpr int kLengths = 21;
  constexpr int kBlocks = 8;
  for (int seqlen_q = 0; seqlen_q < kLengths; ++seqlen_q) {
    for (int seqlen_k = 0; seqlen_k < kLengths; ++seqlen_k) {
      for (const bool causal : {false, true}) {
        const ForwardParams p = params_of(seqlen_q, seqlen_k, causal);
        check_elements(p);
        for (int block_m = 1; block_m <= kBlocks; ++block_m) {
          for (int block_n = 1; block_n <= kBlocks; ++block_n) check_tiles(p, block_m, block_n);
        }
      }
    }
  }
  check_large();
  return check::report();
}
