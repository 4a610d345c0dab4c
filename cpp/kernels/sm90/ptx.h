// Hopper's instructions in PTX, but for wgmma: barriers, copies of tiles, fences. The tests'
// emulator has its own.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "common/macros.h"

namespace anyflash::sm90 {

ANYFLASH_DEVICE uint32_t smem_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// --- Barriers

ANYFLASH_DEVICE void sync_named(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
ANYFLASH_DEVICE void arrive_named(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// One lane of a converged warp.
ANYFLASH_DEVICE bool elect_lane() {
  uint32_t elected;
  asm volatile("{\n.reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.b32 %0, 1, 0, p;\n}\n"
               : "=r"(elected));
  return elected != 0;
}

// By all warps of a warpgroup; multiples of 8 registers a thread.
template <int kRegisters>
ANYFLASH_DEVICE void release_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
ANYFLASH_DEVICE void acquire_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

ANYFLASH_DEVICE void mbarrier_init(uint64_t* mbarrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(smem_address(mbarrier)),
               "r"(arrivals)
               : "memory");
}
ANYFLASH_DEVICE void mbarrier_arrive(uint64_t* mbarrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(smem_address(mbarrier)) : "memory");
}
ANYFLASH_DEVICE void mbarrier_arrive_expect(uint64_t* mbarrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(smem_address(mbarrier)),
      "r"(bytes)
      : "memory");
}
// May be false too early: the hardware gives up after a while.
ANYFLASH_DEVICE bool mbarrier_try_wait(uint64_t* mbarrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n.reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.b32 %0, 1, 0, p;\n}\n"
      : "=r"(ended)
      : "r"(smem_address(mbarrier)), "r"(parity)
      : "memory");
  return ended != 0;
}
// After init(), by the thread that did it, before others and TMA use the barriers.
ANYFLASH_DEVICE void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// --- Registers

// All ones in each half whose highest bit is set, and 0 in the others. (__byte_perm() is not said
// to know the selector's bit that spreads a sign.)
ANYFLASH_DEVICE uint32_t spread_signs(uint32_t word) {
  uint32_t spread;
  asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(spread) : "r"(word));
  return spread;
}

// --- Clusters

// All threads of the cluster have arrived before one has waited. It publishes nothing but what
// fence_barrier_init() did.
ANYFLASH_DEVICE void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
ANYFLASH_DEVICE void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Makes `mbarrier` one that waits for so many bytes of send_to_cta().
ANYFLASH_DEVICE void expect_sent(uint64_t* mbarrier, int bytes) {
  mbarrier_init(mbarrier, 1);
  mbarrier_arrive_expect(mbarrier, bytes);
}
ANYFLASH_DEVICE uint32_t address_in_cta(const void* pointer, int rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(smem_address(pointer)), "r"(rank));
  return address;
}
// Writes to `to` as CTA `rank` has it, and counts the bytes at its `mbarrier`.
ANYFLASH_DEVICE void send_to_cta(float* to, float value, int rank, const uint64_t* mbarrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(
                   address_in_cta(to, rank)),
               "f"(value), "r"(address_in_cta(mbarrier, rank))
               : "memory");
}
ANYFLASH_DEVICE void send_to_cta(float* to, const float4& value, int rank,
                                 const uint64_t* mbarrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(address_in_cta(to, rank)),
      "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(address_in_cta(mbarrier, rank))
      : "memory");
}
// Arrives at `mbarrier` as CTA `rank` has it, when what this thread has read from shared memory has
// come. It publishes no writes to other CTAs: that would wait for all of the thread's, sent ones,
// too (MEMBAR.ALL.GPU).
ANYFLASH_DEVICE void arrive_at_cta(const uint64_t* mbarrier, int rank) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_cta(mbarrier, rank))
               : "memory");
}
ANYFLASH_DEVICE void wait_for_sent(uint64_t* mbarrier) {
  while (!mbarrier_try_wait(mbarrier, 0)) {
  }
}

// --- Tensor memory accelerator

// How long a line should stay in the L2 cache.
enum class L2Hint : uint64_t {
  kEvictFirst = 0x12f0000000000000,
  kEvictLast = 0x14f0000000000000,
};

struct TileCoordinates {
  int column;
  int row;
  int head;
  int batch;
};

ANYFLASH_DEVICE void prefetch_tensor_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// One box to shared memory; its bytes, also those of zeros for what does not exist, count at
// `mbarrier`.
ANYFLASH_DEVICE void load_box(void* to, const CUtensorMap& map, const TileCoordinates& from,
                              const uint64_t* mbarrier, L2Hint hint) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(smem_address(to)),
      "l"(&map), "r"(smem_address(mbarrier)), "r"(from.column), "r"(from.row), "r"(from.head),
      "r"(from.batch), "l"(static_cast<uint64_t>(hint))
      : "memory");
}

// A piece of memory to shared memory; addresses and size are multiples of 16 bytes.
ANYFLASH_DEVICE void load_bytes(void* to, const void* from, int bytes, const uint64_t* mbarrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(smem_address(to)),
      "l"(from), "r"(bytes), "r"(smem_address(mbarrier))
      : "memory");
}

// Adds float32 numbers in shared memory to those in global memory, in any order. It joins this
// thread's open group; addresses and size are multiples of 16 bytes.
ANYFLASH_DEVICE void add_floats(float* to, const float* from, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(smem_address(from)), "r"(bytes)
      : "memory");
}

// One box to global memory, without what does not exist there. It joins this thread's open group.
ANYFLASH_DEVICE void store_box(const CUtensorMap& map, const TileCoordinates& to,
                               const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(smem_address(from)), "r"(to.column), "r"(to.row), "r"(to.head), "r"(to.batch)
      : "memory");
}
ANYFLASH_DEVICE void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// This thread's stores have read shared memory.
ANYFLASH_DEVICE void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
// This thread's stores are in global memory.
ANYFLASH_DEVICE void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// By each thread that wrote to shared memory, before the barrier after which wgmma or TMA reads it.
ANYFLASH_DEVICE void fence_smem_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for writes anywhere, and for what TMA wrote before generic accesses.
ANYFLASH_DEVICE void fence_all_writes() { asm volatile("fence.proxy.async;" ::: "memory"); }

// Four 8x8 matrices of 16-bit numbers from registers to shared memory; lane l names the place of
// row l % 8 of matrix l / 8. In the order of `words`, 16 rows and 16 columns of accumulators are:
// the upper and lower eight rows of the left eight columns, then of the right.
ANYFLASH_DEVICE void store_matrices(void* row, const uint32_t* words) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem_address(row)),
      "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
      : "memory");
}

// The same from shared memory to registers: an operand A of wgmma, of 16 columns.
ANYFLASH_DEVICE void load_matrices(uint32_t* words, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(smem_address(row))
               : "memory");
}

// Each of the four transposed: two rows become a word of what was a column.
ANYFLASH_DEVICE void load_transposed(uint32_t* words, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(smem_address(row))
               : "memory");
}

// Two of them, `upper` with the eight rows above those of `lower`: each is stored transposed. Lanes
// 0 to 15 name the places of the upper matrix's columns, then of the lower one's.
ANYFLASH_DEVICE void store_transposed(void* column, uint32_t upper, uint32_t lower) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(smem_address(column)),
      "r"(upper), "r"(lower)
      : "memory");
}

}  // namespace anyflash::sm90
