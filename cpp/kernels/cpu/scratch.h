// The memory that a thread needs for a task: its slice of LaunchContext::scratch. Its size grows
// with the head dims, not with the lengths.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cpu/simd/vector.h"
#include "cpu/tasks.h"
#include "params.h"

namespace anyflash::cpu::ANYFLASH_CPU_ISA {

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }

// Columns of v and o are padded to whole groups (gemm.h) and whole vectors (cpu/gemv.h).
template <typename T>
inline constexpr int kColumnPad = Simd<T>::kLanes > kGroupPad ? Simd<T>::kLanes : kGroupPad;

// Divides memory into aligned arrays; without memory it only counts.
class Carver {
 public:
  explicit Carver(char* base) : base_(base) {}

  template <typename Type>
  void take(Type*& at, std::int64_t count) {
    at = base_ == nullptr ? nullptr : reinterpret_cast<Type*>(base_ + size_);
    size_ += (static_cast<std::size_t>(count) * sizeof(Type) + 63) / 64 * 64;
  }

  std::size_t size() const { return size_; }

 private:
  char* base_;
  std::size_t size_ = 0;
};

template <typename T>
struct QueryRow {
  int head;
  int query;
  std::int64_t diagonal;  // the key at distance 0: query + shift
  std::int64_t bias;      // element of the bias for key 0
  T slope;                // ALiBi's
};

template <typename T>
struct Scratch {
  using Int = typename Simd<T>::Int;

  // In a panel                                  With few rows
  T* q;     // (panel, head_dim, rows)           (rows, head_dim padded)
  T* o;     // (panel, head_dim_v, rows)         (rows, head_dim_v padded)
  T* s;     // (kPanelKeys, rows)                (kBlockN): scores, then probabilities
  T* p;     // of a panel by tiles: (kPanelKeys / 2, rows, 2) in bfloat16
  T* bias;  // (kPanelKeys, rows)                (kBlockN)
  T* k;     // (kPanelKeys, head_dim)            (kBlockN, head_dim padded)
  T* v;     // (head_dim_v / 8, kPanelKeys, 8)   (kBlockN, head_dim_v padded)
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

  static std::size_t bytes(const Attention& p) { return carve(p, nullptr).size; }

  static Scratch carve(const Attention& p, char* base) {
    constexpr int kRows = kTaskPanels<T> * kPanelRows<T>;
    constexpr std::int64_t kBlock = std::int64_t{kPanelKeys} * kPanelRows<T>;
    const std::int64_t d = round_up(p.head_dim, Simd<T>::kLanes);
    const std::int64_t dv = round_up(p.head_dim_v, kColumnPad<T>);
    const bool block_mask = p.block_mask.data != nullptr;
    Carver carver(base);
    Scratch x;
    carver.take(x.q, kRows * d);
    carver.take(x.o, kRows * dv);
    carver.take(x.s, kBlock);
    carver.take(x.p, kHasTiles ? kBlock / 2 : 0);
    carver.take(x.bias, p.bias.data != nullptr || p.key_ranges.data != nullptr ? kBlock : 0);
    carver.take(x.k, kPanelKeys * d);
    carver.take(x.v, kPanelKeys * dv);
    carver.take(x.m, kRows);
    carver.take(x.l, kRows);
    carver.take(x.row, d > dv ? d : dv);
    carver.take(x.first, kRows);
    carver.take(x.end, kRows);
    x.seen_first = x.first;
    x.seen_end = x.end;
    if (block_mask) {
      carver.take(x.seen_first, kRows);
      carver.take(x.seen_end, kRows);
    }
    carver.take(x.rows, kRows);
    x.size = carver.size();
    return x;
  }
};

}  // namespace anyflash::cpu::ANYFLASH_CPU_ISA
