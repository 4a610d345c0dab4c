// The emulator's side of cpp/kernels/sm90/ptx.h.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/macros.h"
#include "emu.hpp"

namespace anyflash::sm90 {

inline uint32_t smem_address(const void* pointer) { return emu::shared_address(pointer); }

inline void sync_named(int id, int threads, const char* file = __builtin_FILE(),
                       int line = __builtin_LINE()) {
  emu::barrier_sync(id, threads, file, line);
}
inline void arrive_named(int id, int threads) { emu::barrier_arrive(id, threads); }

inline bool elect_lane() { return emu::ballot(0xffffffffu, true) != 0 && emu::lane_index() == 0; }

template <int kRegisters>
inline void release_registers() {
  static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256);
}
template <int kRegisters>
inline void acquire_registers() {
  static_assert(kRegisters % 8 == 0 && 24 <= kRegisters && kRegisters <= 256);
}

inline void mbarrier_init(uint64_t* mbarrier, int arrivals) {
  emu::mbarrier_init(mbarrier, arrivals);
}
inline void mbarrier_arrive(uint64_t* mbarrier) { emu::mbarrier_arrive(mbarrier); }
inline void mbarrier_arrive_expect(uint64_t* mbarrier, int bytes) {
  emu::mbarrier_arrive_expect(mbarrier, bytes);
}
inline bool mbarrier_try_wait(uint64_t* mbarrier, uint32_t parity,
                              const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emu::mbarrier_wait(mbarrier, static_cast<int>(parity), file, line);
  return true;
}
inline void fence_barrier_init() {}

inline uint32_t spread_signs(uint32_t word) {
  return (word >> 31) * 0xffff0000u | (word >> 15 & 1) * 0xffffu;
}

inline void cluster_arrive() {}
inline void cluster_wait(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  emu::cluster_meet(file, line);
}
inline void expect_sent(uint64_t* mbarrier, int bytes) {
  mbarrier_init(mbarrier, 1);
  mbarrier_arrive_expect(mbarrier, bytes);
}
inline void send_to_cta(float* to, float value, int rank, const uint64_t* mbarrier) {
  emu::send_to_cta(to, &value, 1, rank, mbarrier);
}
inline void send_to_cta(float* to, const float4& value, int rank, const uint64_t* mbarrier) {
  emu::send_to_cta(to, &value.x, 4, rank, mbarrier);
}
inline void arrive_at_cta(const uint64_t* mbarrier, int rank) {
  emu::mbarrier_arrive_at_cta(mbarrier, rank);
}
inline void wait_for_sent(uint64_t* mbarrier, const char* file = __builtin_FILE(),
                          int line = __builtin_LINE()) {
  emu::mbarrier_wait(mbarrier, 0, file, line);
}

enum class L2Hint : uint64_t { kEvictFirst, kEvictLast };

struct TileCoordinates {
  int column;
  int row;
  int head;
  int batch;
};

inline void prefetch_tensor_map(const CUtensorMap&) {}
inline void load_box(void* to, const CUtensorMap& map, const TileCoordinates& from,
                     const uint64_t* mbarrier, L2Hint) {
  emu::tma_load(to, &map, {from.column, from.row, from.head, from.batch}, mbarrier);
}
inline void store_box(const CUtensorMap& map, const TileCoordinates& to, const void* from) {
  emu::tma_store(&map, {to.column, to.row, to.head, to.batch}, from);
}
inline void load_bytes(void* to, const void* from, int bytes, const uint64_t* mbarrier) {
  emu::bulk_load(to, from, bytes, mbarrier);
}
inline void add_floats(float* to, const float* from, int bytes) { emu::bulk_add(to, from, bytes); }
inline void commit_stores() { emu::bulk_commit_group(); }
inline void wait_stores_read() { emu::bulk_wait_all_groups(); }
inline void wait_stores() { emu::bulk_wait_all_groups(); }

inline void fence_smem_writes() { emu::fence_proxy_async(); }
inline void fence_all_writes() { emu::fence_proxy_async(); }

inline void store_matrices(void* row, const uint32_t* words) { emu::stmatrix(row, words); }
inline void load_matrices(uint32_t* words, const void* row) { emu::ldmatrix(4, false, row, words); }
inline void load_transposed(uint32_t* words, const void* row) {
  emu::ldmatrix(4, true, row, words);
}
inline void store_transposed(void* column, uint32_t upper, uint32_t lower) {
  emu::stmatrix_transposed(column, upper, lower);
}

}  // namespace anyflash::sm90
