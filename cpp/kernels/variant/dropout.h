// Which probabilities are dropped is a pure function of (seed, offset, batch, head, row, column).
// It is the same on every backend and whatever the tiles, so that the backward and a replay agree.
//
// The random bits come from Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1,
// 2, 3", SC 2011). Its input is
//   counter = (column / 8, row, batch * heads + head, lower half of offset)
//   key     = seed, its upper half XOR the upper half of offset.
// It gives 128 bits for eight columns. Column c takes the (c % 8)-th 16 bits, lowest first, and is
// dropped if they are below threshold = round(65536 p). Rows and columns count within their
// sequence. Where a call is a part of an attention (Part in params.h), all four, and heads, are
// those of the whole; its columns begin at a multiple of 8. Kept probabilities are divided by
// 1 - threshold / 65536, so that there is no bias.
#pragma once

#include <cstdint>

#include "common/macros.h"
#include "params.h"
#include "variant/sequence.h"

namespace ANYFLASH_SHARED_NAMESPACE {

// Sixteen bits for each of eight neighbouring columns.
struct Draws {
  uint32_t word[4];

  ANYFLASH_HOST_DEVICE uint32_t operator[](int i) const {
    return word[i / 2] >> (16 * (i % 2)) & 0xffffu;
  }
};

// Of one round.
struct PhiloxKeys {
  uint32_t key0;
  uint32_t key1;

  ANYFLASH_HOST_DEVICE void round(uint32_t& c0, uint32_t& c1, uint32_t& c2, uint32_t& c3) const {
    const uint64_t product0 = uint64_t{0xD2511F53u} * c0;
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ key0;
    c1 = static_cast<uint32_t>(product1);
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ key1;
    c3 = static_cast<uint32_t>(product0);
  }
  ANYFLASH_HOST_DEVICE void advance() {
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
};

ANYFLASH_HOST_DEVICE Draws philox(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t key0,
                                  uint32_t key1) {
  PhiloxKeys keys{key0, key1};
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round, keys.advance()) keys.round(c0, c1, c2, c3);
  return Draws{{c0, c1, c2, c3}};
}

// What kept probabilities are multiplied by.
ANYFLASH_HOST_DEVICE float dropout_scale(uint32_t threshold) {
  return 65536.0f / static_cast<float>(65536u - threshold);
}

// What Philox is told of seed and offset.
struct DropoutSeed {
  ANYFLASH_HOST_DEVICE explicit DropoutSeed(const Attention& p) {
    const uint64_t seed = p.rng_state != nullptr ? p.rng_state[0] : p.seed;
    const uint64_t all = p.rng_state != nullptr ? p.rng_state[1] : p.offset;
    key0 = static_cast<uint32_t>(seed);
    key1 = static_cast<uint32_t>(seed >> 32) ^ static_cast<uint32_t>(all >> 32);
    offset = static_cast<uint32_t>(all);
  }

  uint32_t key0;
  uint32_t key1;
  uint32_t offset;  // its lower half
};

ANYFLASH_HOST_DEVICE int64_t heads_of_whole(const Attention& p) {
  return p.part.total_heads == 0 ? p.heads : p.part.total_heads;
}

class Dropout {
 public:
  ANYFLASH_HOST_DEVICE Dropout(const Attention& p, int64_t batch, int head)
      : Dropout(p, DropoutSeed(p), batch, head) {}
  ANYFLASH_HOST_DEVICE Dropout(const Attention& p, const DropoutSeed& seed, int64_t batch, int head)
      : threshold_(p.dropout_threshold),
        pair_(static_cast<uint32_t>((p.part.batch_start + batch) * heads_of_whole(p) +
                                    p.part.head_start + head)),
        row_start_(static_cast<uint32_t>(number_of(p.part.query_start, batch))),
        group_start_(static_cast<uint32_t>(number_of(p.part.key_start, batch)) / 8),
        seed_(seed) {}

  ANYFLASH_HOST_DEVICE bool active() const { return threshold_ != 0; }

  // For the columns [8 * group, 8 * group + 8) of a row; draws[i] belongs to the i-th of them.
  ANYFLASH_HOST_DEVICE Draws draws(int row, int group) const {
    return philox(group_start_ + static_cast<uint32_t>(group),
                  row_start_ + static_cast<uint32_t>(row), pair_, seed_.offset, seed_.key0,
                  seed_.key1);
  }
  // The same for several rows in step, which then share the rounds' keys.
  template <int kRows>
  ANYFLASH_HOST_DEVICE void draws(Draws (&results)[kRows], const int (&rows)[kRows],
                                  int group) const {
    PhiloxKeys keys{seed_.key0, seed_.key1};
    for (int i = 0; i < kRows; ++i) {
      results[i] = {{group_start_ + static_cast<uint32_t>(group),
                     row_start_ + static_cast<uint32_t>(rows[i]), pair_, seed_.offset}};
    }
#if defined(__CUDACC__)
#pragma unroll
#endif
    for (int round = 0; round < 10; ++round, keys.advance()) {
      for (Draws& x : results) keys.round(x.word[0], x.word[1], x.word[2], x.word[3]);
    }
  }
  ANYFLASH_HOST_DEVICE bool keep(uint32_t draw) const { return draw >= threshold_; }
  // keep(draws[i]). In the upper half of a word a draw compares like a draw: with the threshold
  // there, too, the bits below do not count.
  ANYFLASH_HOST_DEVICE bool keep(const Draws& draws, int i) const {
    const uint32_t word = draws.word[i / 2];
    return (i % 2 == 0 ? word << 16 : word) >= threshold_ << 16;
  }

  // Whether the two draws in a word are kept, in the highest bit of each half. The others mean
  // nothing.
  ANYFLASH_HOST_DEVICE uint32_t kept_in_signs(uint32_t word) const {
    // A sum's highest bit says that the draw's lower 15 bits reach the threshold's. Below 0x8000,
    // that bit or the draw's own is enough; from 0x8000 on, both are needed.
    const uint32_t either = (threshold_ >> 15) - 1;
    const uint32_t lower = (word & 0x7fff7fffu) + (0x8000u - (threshold_ & 0x7fffu)) * 0x10001u;
    return (word & lower) | (either & (word | lower));
  }

  // Zeroes those halves of `pair` that are not kept; their draws are the halves of `word`.
  ANYFLASH_HOST_DEVICE uint32_t drop(uint32_t pair, uint32_t word) const {
    const uint32_t threshold = threshold_ << 16;
    if (word < threshold) pair &= 0xffffu;
    if (word << 16 < threshold) pair &= 0xffff0000u;
    return pair;
  }

  ANYFLASH_HOST_DEVICE float scale() const { return dropout_scale(threshold_); }

 private:
  uint32_t threshold_;
  uint32_t pair_;
  uint32_t row_start_;
  uint32_t group_start_;
  DropoutSeed seed_;
};

}  // namespace ANYFLASH_SHARED_NAMESPACE
