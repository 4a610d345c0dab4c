// The memory that a thread needs for a task: its slice of LaunchContext::scratch. Its size grows
// with the head dims, not with the lengths.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd.h"
#include "cpu/tasks.h"
#include "params.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Columns of v and o are padded to whole groups (gemm.h) and whole vectors (thin.h).
template <typename T>
inline constexpr int kColumnPad = Simd<T>::kLanes > kGroupPad ? Simd<T>::kLanes : kGroupPad;

template <typename T>
struct QueryRow {
  int head;
  int query;
  std::int64_t diagonal;  // the key at distance 0: query + seqlen_k - seqlen_q
  std::int64_t bias;      // element of the bias for key 0
  T slope;                // ALiBi's
};

template <typename T>
struct Scratch {
  using Int = typename Simd<T>::Int;

  // In a panel                                  With few rows
  T* q;     // (panel, head_dim, rows)           (rows, head_dim padded)
  T* o;     // (panel, head_dim_v, rows)         (rows, head_dim_v padded)
  T* s;     // (kBlockN, rows)                   (kBlockN): scores, then probabilities
  T* bias;  // (kBlockN, rows)                   (kBlockN)
  T* k;     // (kBlockN, head_dim)               (kBlockN, head_dim padded)
  T* v;     // (head_dim_v / 8, kBlockN, 8)      (kBlockN, head_dim_v padded)
  T* m;     // row maxima
  T* l;     // row sums
  T* row;   // one row of any tensor
  // Row r sees the keys [first[r], end[r]), and of one block those of [seen_first, seen_end), which
  // a block mask may have emptied.
  Int* first;
  Int* end;
  Int* seen_first;
  Int* seen_end;
  QueryRow<T>* rows;
  std::size_t size;

  static std::size_t bytes(const ForwardParams& p) { return carve(p, nullptr).size; }

  static Scratch carve(const ForwardParams& p, char* base) {
    constexpr int kRows = kTaskPanels<T> * kPanelRows<T>;
    constexpr std::int64_t kBlock = std::int64_t{kBlockN} * kPanelRows<T>;
    const std::int64_t d = round_up(p.head_dim, Simd<T>::kLanes);
    const std::int64_t dv = round_up(p.head_dim_v, kColumnPad<T>);
    const bool block_mask = p.block_mask.data != nullptr;
    Scratch x;
    x.size = 0;
    const auto take = [&](auto*& at, std::int64_t count) {
      at = nullptr;
      if (base != nullptr) at = reinterpret_cast<decltype(+at)>(base + x.size);
      x.size += (static_cast<std::size_t>(count) * sizeof(*at) + 63) / 64 * 64;
    };
    take(x.q, kRows * d);
    take(x.o, kRows * dv);
    take(x.s, kBlock);
    take(x.bias, p.bias.data != nullptr ? kBlock : 0);
    take(x.k, kBlockN * d);
    take(x.v, kBlockN * dv);
    take(x.m, kRows);
    take(x.l, kRows);
    take(x.row, d > dv ? d : dv);
    take(x.first, kRows);
    take(x.end, kRows);
    x.seen_first = x.first;
    x.seen_end = x.end;
    if (block_mask) {
      take(x.seen_first, kRows);
      take(x.seen_end, kRows);
    }
    take(x.rows, kRows);
    return x;
  }
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
