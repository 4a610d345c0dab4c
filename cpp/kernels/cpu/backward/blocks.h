// Blocks of query rows and of keys: from memory to packed copies in the compute type, and the
// gradients back.
#pragma once

#include <cstdint>

#include "cpu/backward/products.h"
#include "cpu/backward/scratch.h"
#include "cpu/scores.h"
#include "cpu/simd/convert.h"
#include "params.h"
#include "variant/mask.h"
#include "variant/sequence.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

template <typename E>
class Blocks {
 public:
  using T = typename Compute<E>::Type;

  Blocks(const BackwardParams& p, const RowSums<T>& sums, const BackwardScratch<T>& scratch)
      : p_(p),
        a_(p.attention),
        sums_(sums),
        modifier_(p.attention),
        scratch_(scratch),
        ld_(scratch.ld),
        ld_v_(scratch.ld_v) {}

  const ScoreModifier<T>& modifier() const { return modifier_; }

  // The sequence whose blocks are loaded and stored from now on.
  void begin(std::int64_t index) {
    index_ = index;
    sequence_ = sequence_of(a_, index);
  }
  std::int64_t index() const { return index_; }
  const Sequence& sequence() const { return sequence_; }
  Mask mask() const { return Mask(sequence_, a_.window); }
  int head_k(int head) const { return head / (a_.heads / a_.heads_k); }

  void load_rows(int head, int first_row, RowBlock<T>* block) const {
    const int rest = sequence_.seqlen_q - first_row;
    block->head = head;
    block->first_row = first_row;
    block->count = rest < kBlockM ? rest : kBlockM;
    block->width = round_up(block->count, kColumnPad<T>);
    block->in_floats = false;
    block->in_tiles = load_tiles(block);
    if (!block->in_tiles) load_floats(block);
    describe_rows(block);
  }

  // q and dO in the compute type, if they are not yet.
  void load_floats(RowBlock<T>* block) const {
    if (block->in_floats) return;
    block->in_floats = true;
    const int padding = block->width - block->count;
    load<E>(a_.q, a_.q_stride, row(block->first_row), block->head, block->count, padding,
            a_.head_dim, ld_, block->q);
    if (p_.dout_dtype == DType::kFloat32) {
      load_dout<float>(block, padding);
    } else {
      load_dout<E>(block, padding);
    }
    transpose_block(block->q, ld_, block->width, static_cast<int>(ld_), block->q_across, kBlockM);
    transpose_block(block->dout, ld_v_, block->width, static_cast<int>(ld_v_), block->dout_across,
                    kBlockM);
  }

  void load_keys(int head_k, int first_key, KeyBlock<T>* block) const {
    const int rest = sequence_.seqlen_k - first_key;
    block->first_key = first_key;
    block->count = rest < 0 ? 0 : rest < kBlockN ? rest : kBlockN;
    block->padded = round_up(block->count, kGroupPad);
    block->head_k = head_k;
    block->in_floats = false;
    block->in_tiles = load_tiles(block);
    if (!block->in_tiles) load_floats(block);
  }

  // k and v in the compute type, if they are not yet.
  void load_floats(KeyBlock<T>* block) const {
    if (block->in_floats) return;
    block->in_floats = true;
    const int padding = block->padded - block->count;
    load<E>(a_.k, a_.k_stride, key(block->first_key), block->head_k, block->count, padding,
            a_.head_dim, ld_, block->k);
    load<E>(a_.v, a_.v_stride, key(block->first_key), block->head_k, block->count, padding,
            a_.head_dim_v, ld_v_, block->v);
  }

  // dQ = scale sum(dS K)
  void store_rows(const RowBlock<T>& block) const {
    if (p_.dq_sums.data != nullptr) join_dq_sums(block);
    if (p_.ends_dq()) {
      const Target dq{p_.dq, p_.dq_stride, block.head, p_.accumulates_dq};
      store(dq, row(block.first_row), block.count, a_.head_dim, ld_,
            static_cast<T>(a_.softmax_scale), block.dq);
    }
    if (sums_.slope == nullptr) return;
    double* const slope = sums_.slope + sums_.offset(p_, sequence_, block.head) + block.first_row;
    for (int r = 0; r < block.count; ++r) slope[r] = block.slope_sum[r];
  }

  // dK = scale sum(dS^T Q), dV; also of keys that are not used.
  void store_keys(int head_k, const KeyBlock<T>& block) const {
    const int rest = sequence_.all_keys - block.first_key;
    const int count = rest < kBlockN ? rest : kBlockN;
    const Target dk{p_.dk, p_.dk_stride, head_k, p_.accumulates_dkv};
    const Target dv{p_.dv, p_.dv_stride, head_k, p_.accumulates_dkv};
    const std::int64_t first = key(block.first_key);
    store(dk, first, count, a_.head_dim, ld_, static_cast<T>(a_.softmax_scale), block.dk);
    store(dv, first, count, a_.head_dim_v, ld_v_, T(1), block.dv);
  }

 private:
#if ANYFLASH_CPU_TILES
  // False where a product by tiles would not do: NaN and infinity of what is hidden must not meet
  // the zeros that stand for it.
  bool load_tiles(RowBlock<T>* block) const {
    if (p_.dout_dtype == DType::kFloat32) return false;
    const QueryTiles& tiles = block->tiles;
    const std::int64_t first = row(block->first_row);
    BFloat16* const rows = scratch_.tiles.block;
    if (!load_block(rows_of(a_.q, a_.q_stride, first, block->head), a_.q_stride, block->count,
                    a_.head_dim, rows)) {
      return false;
    }
    pair_rows(rows, a_.head_dim, tiles.q);
    pair_columns(rows, a_.head_dim, tiles.q_across);
    if (!load_block(rows_of(p_.dout, p_.dout_stride, first, block->head), p_.dout_stride,
                    block->count, a_.head_dim_v, rows)) {
      return false;
    }
    pair_rows(rows, a_.head_dim_v, tiles.dout);
    pair_columns(rows, a_.head_dim_v, tiles.dout_across);
    return true;
  }

  bool load_tiles(KeyBlock<T>* block) const {
    const KeyTiles& tiles = block->tiles;
    const std::int64_t first = key(block->first_key);
    const bool finite = load_block(rows_of(a_.k, a_.k_stride, first, block->head_k), a_.k_stride,
                                   block->count, a_.head_dim, tiles.k) &&
                        load_block(rows_of(a_.v, a_.v_stride, first, block->head_k), a_.v_stride,
                                   block->count, a_.head_dim_v, tiles.v);
    if (finite) pair_rows(tiles.k, a_.head_dim, tiles.k_pairs);
    return finite;
  }

  const E* rows_of(const void* data, const Strides& stride, std::int64_t first, int head) const {
    return static_cast<const E*>(data) + element(stride, first, head);
  }
#else
  bool load_tiles(RowBlock<T>* /*block*/) const { return false; }
  bool load_tiles(KeyBlock<T>* /*block*/) const { return false; }
#endif

  std::int64_t row(int row) const { return sequence_.first_q + row; }
  std::int64_t key(int key) const { return sequence_.first_k + key; }

  std::int64_t element(const Strides& stride, std::int64_t row, int head) const {
    return sequence_.batch * stride.batch + row * stride.row + head * stride.head;
  }

  // `count` rows and `padding` rows of zeros.
  template <typename In>
  void load(const void* data, const Strides& stride, std::int64_t first, int head, int count,
            int padding, int columns, std::int64_t ld, T* to) const {
    const In* const from = static_cast<const In*>(data) + element(stride, first, head);
    for (int r = 0; r < count; ++r) {
      load_row(from + r * stride.row, stride.col, columns, to + r * ld);
      for (std::int64_t c = columns; c < ld; ++c) to[r * ld + c] = T(0);
    }
    for (std::int64_t i = count * ld; i < (count + padding) * ld; ++i) to[i] = T(0);
  }

  template <typename In>
  void load_dout(RowBlock<T>* block, int padding) const {
    load<In>(p_.dout, p_.dout_stride, row(block->first_row), block->head, block->count, padding,
             a_.head_dim_v, ld_v_, block->dout);
  }

  // The block's dQ and what earlier calls have kept, (batch, heads, rows, head_dim), become their
  // sum.
  void join_dq_sums(const RowBlock<T>& block) const {
    const DqSums& kept = p_.dq_sums;
    const std::int64_t first =
        (sequence_.batch * a_.heads + block.head) * kept.rows + kept.first + block.first_row;
    T* const sums = static_cast<T*>(kept.data) + first * a_.head_dim;
    for (int r = 0; r < block.count; ++r) {
      for (int c = 0; c < a_.head_dim; ++c) {
        T& dq = block.dq[r * ld_ + c];
        T& sum = sums[std::int64_t{r} * a_.head_dim + c];
        if (!kept.begin) dq += sum;
        sum = dq;
      }
    }
  }

  // One head of a gradient.
  struct Target {
    void* data;
    const Strides& stride;
    int head;
    bool accumulates;
  };

  // Rows [first, first + count) of the target are `factor` times those of `from`.
  void store(const Target& target, std::int64_t first, int count, int columns, std::int64_t ld,
             T factor, T* from) const {
    for (int r = 0; r < count; ++r) {
      T* const x = from + r * ld;
      for (int c = 0; c < columns; ++c) x[c] *= factor;
      const std::int64_t at = element(target.stride, first + r, target.head);
      if (p_.grad_dtype == DType::kFloat32) {
        store_or_add(target, x, columns, static_cast<float*>(target.data) + at);
      } else {
        store_or_add(target, x, columns, static_cast<E*>(target.data) + at);
      }
    }
  }

  template <typename Out>
  static void store_or_add(const Target& target, T* x, int columns, Out* out) {
    const std::int64_t step = target.stride.col;
    if constexpr (sizeof(Out) >= sizeof(float)) {  // what 16 bits hold is never added to
      for (int c = 0; target.accumulates && c < columns; ++c) x[c] += static_cast<T>(out[c * step]);
    }
    store_row(x, columns, out, step);
  }

  void describe_rows(RowBlock<T>* block) const {
    const Mask mask = this->mask();
    const std::int64_t offset = sums_.offset(p_, sequence_, block->head) + block->first_row;
    block->full_first = mask.first_key(block->first_row + block->count - 1);
    block->full_end = block->count == block->width ? mask.end_key(block->first_row) : 0;
    for (int r = 0; r < block->width; ++r) {
      const bool exists = r < block->count;
      QueryRow<T>& query = block->rows[r];
      query.head = block->head;
      query.query = block->first_row + (exists ? r : block->count - 1);
      query.diagonal = std::int64_t{query.query} + sequence_.shift;
      if (modifier_.active()) modifier_.begin_row(index_, 0, &query);
      block->diagonal[r] = static_cast<T>(query.diagonal);
      block->lse[r] = exists ? sums_.lse[offset + r] : T(kInfinity);
      const bool sees = block->lse[r] != T(kInfinity);
      block->delta[r] = sees ? sums_.delta[offset + r] : T(0);
      block->first[r] = mask.first_key(query.query);
      block->end[r] = sees ? mask.end_key(query.query) : 0;
      if (!sees) block->full_end = 0;
    }
  }

  const BackwardParams& p_;
  const Attention& a_;
  const RowSums<T> sums_;
  const ScoreModifier<T> modifier_;
  const BackwardScratch<T>& scratch_;
  std::int64_t ld_;
  std::int64_t ld_v_;
  std::int64_t index_ = 0;
  Sequence sequence_{};
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
