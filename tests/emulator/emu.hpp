// A thread block on the CPU: what a kernel's source sees when g++ compiles it.
//
// The kernels are the ones nvcc compiles, unchanged. Names that nvcc would know by itself come from
// here and from intrinsics.hpp; the atoms of CuTe that would be inline assembly come from the
// shadow headers in include/. Include this file before anything of CuTe or CUTLASS, or force it
// with `-include emu.hpp`.
//
// The emulator is stricter than a GPU about what a correct kernel never needs:
// - A thread that has ended does not count as having arrived at a barrier.
// - Blocks are made of whole warps.
// - A barrier is reached from one place in the source by all lanes of a warp.
#pragma once

#if defined(__CUDACC__)
#error "emu.hpp is for builds without nvcc"
#endif

#include <vector_types.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>

// A section cannot be given to a local variable, so `__shared__ float x[32];` inside a kernel,
// which would silently become an array per thread, does not compile. Dynamic shared memory is
// `anyflash_smem`.
#undef __shared__
#define __shared__ __attribute__((section("emu_shared")))

#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

// Constant within a thread, and defined under another type in launch.cpp, which changes them at
// every switch. No fiber sees another's values, so the compiler may keep them in registers.
extern const uint3 threadIdx;
extern const uint3 blockIdx;
extern const dim3 blockDim;
extern const dim3 gridDim;
extern unsigned char* const anyflash_smem;
inline constexpr int warpSize = 32;

namespace emu {

using Dim3 = ::dim3;

// Any error of the emulated kernel: a deadlock, a misuse of an instruction, a launch that the
// device would refuse. The text names the block, the threads and the seed.
class Failure : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  // Decides the order of blocks, warps and lanes. Starts as the environment's EMU_SEED, or 0.
  uint64_t seed = 0;
  // Turns of lanes before another warp is drawn: 0 runs a warp until it is blocked, 1 and 2 mix
  // the warps finely. -1 lets the seed choose.
  int burst = -1;
  // What the emulated device grants to a block: compute capability 8.0 by default, 101376 for 8.6.
  size_t shared_memory_limit = 166912;
  // For code that asks for it while it is compiled for a GPU. From 90 on there are clusters.
  int compute_capability = 80;
  // Subnormal operands and results of instructions for float32 become 0, as in GPU code, which is
  // compiled with -ftz=true. Where the processor knows that (SSE); so do instructions here that are
  // conversions or tensor cores on a GPU, which keeps subnormal numbers there.
  bool flushes_subnormals = false;
};
Options& options();

// Since the start of the program, or reset_counters().
struct Counters {
  uint64_t launches = 0;
  uint64_t blocks = 0;
  uint64_t barriers = 0;  // completed, named ones included
  uint64_t mma = 0;       // warp-wide instructions
  uint64_t ldmatrix_matrices =
      0;  // 8x8 matrices: one shared memory wavefront each, without conflicts
  uint64_t ldmatrix_conflicts = 0;  // wavefronts that bank conflicts add
  uint64_t cp_async = 0;
};
const Counters& counters();
void reset_counters();

// Ends the running launch with Failure.
[[noreturn]] void fail(const std::string& what);

void launch(Dim3 grid, Dim3 block, size_t dynamic_smem_bytes, int cluster, void (*body)(void*),
            void* arg);

// Calls `body` once for every thread of the grid, and returns when all have ended. Clusters of so
// many blocks run one after another; the blocks of one take turns. Launches from several host
// threads wait for each other.
template <class F>
void launch(Dim3 grid, Dim3 block, size_t dynamic_smem_bytes, F&& body, int cluster = 1) {
  using Callable = std::remove_reference_t<F>;
  launch(
      grid, block, dynamic_smem_bytes, cluster, [](void* f) { (*static_cast<Callable*>(f))(); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// -- Instructions of compute capability 8.0, for the shadow headers and intrinsics.hpp
// --------------

// D = A * B + C of one warp. Registers as in the PTX manual; A is 16 x k row-major, B k x 8
// column-major, with two 16-bit values in a register.
enum class MmaType { kHalf, kBfloat16 };
struct MmaRegisters {
  uint32_t a[4];
  uint32_t b[2];
  float c[4];
  float d[4];
};
void mma_m16n8k16(MmaType type, MmaRegisters& registers);
void mma_m16n8k8(MmaType type, MmaRegisters& registers);

// ldmatrix.sync.aligned.m8n8.x{count}[.trans].shared.b16; `row` is the address this lane provides.
void ldmatrix(int count, bool transposed, const void* row, uint32_t* registers);

// cp.async of 4, 8 or 16 bytes; with `valid` false the destination becomes zero and the source is
// not read. The bytes land at the wait that promises them, and not earlier: until then the
// destination holds NaN.
void cp_async(void* shared, const void* global, int bytes, bool valid);
void cp_async_commit_group();
void cp_async_wait_group(int groups_left);
void cp_async_wait_all();

void barrier_sync(int id, int threads, const char* file, int line);
void barrier_arrive(int id, int threads);
// An mbarrier object, 64 bits of shared memory.
void mbarrier_init(uint64_t* barrier, int threads);
void mbarrier_arrive(uint64_t* barrier);
void mbarrier_wait(uint64_t* barrier, int parity, const char* file, int line);
// Returns how many threads of the block came with a true predicate.
int syncthreads_count(bool predicate, const char* file, int line);
void syncwarp(uint32_t mask);

// Every lane of `mask` names the lane whose value it wants.
uint64_t shuffle(uint32_t mask, uint64_t value, int source_lane);
uint32_t ballot(uint32_t mask, bool predicate);
int lane_index();
int warp_index();

// -- Instructions of compute capability 9.0 ------------------------------------------------------

// The barrier of a cluster. cluster_meet() publishes nothing that a thread has written before.
void cluster_sync(const char* file = __builtin_FILE(), int line = __builtin_LINE());
void cluster_meet(const char* file = __builtin_FILE(), int line = __builtin_LINE());
// The place of this block's `pointer` in the shared memory of block `rank`; to be read.
const void* in_cta(const void* pointer, int rank);
// st.async to such a place. The numbers come there at some time, and count at the mbarrier that
// lies where `barrier` does here.
void send_to_cta(float* to, const float* values, int count, int rank, const uint64_t* barrier);
// Arrives at such an mbarrier.
void mbarrier_arrive_at_cta(const uint64_t* barrier, int rank);

// Announces bytes, and arrives.
void mbarrier_arrive_expect(uint64_t* barrier, int bytes);

// TMA copies of a box of four axes, between global memory and panels with the 128-byte swizzle.
// They happen at some time between the instruction and the wait that promises them. `map` is what
// the emulator's cuTensorMapEncodeTiled has written.
void tma_load(void* shared, const void* map, const int (&at)[4], const uint64_t* barrier);
void tma_store(const void* map, const int (&at)[4], const void* shared);
// The same for pieces of memory, whose addresses and sizes are multiples of 16 bytes. The second
// one adds float32 numbers to those in global memory.
void bulk_load(void* shared, const void* global, int bytes, const uint64_t* barrier);
void bulk_add(float* global, const float* shared, int bytes);
void bulk_commit_group();
void bulk_wait_all_groups();

// TMA and wgmma see what was written to shared memory before some thread's latest fence.
void fence_proxy_async();

// wgmma.m64n{n}k16 with float32 accumulators, of which a thread has n / 2. What it reads is read at
// some time before the wait for it; until then the accumulators hold NaN.
struct WgmmaArguments {
  MmaType type;
  int n;
  bool a_rows_along_sum;  // A in shared memory is MN-major
  bool rows_along_sum;    // so is B
  bool accumulate;
  float* d;
  const uint32_t* a_registers;  // null: A is in shared memory
  uint64_t a;                   // descriptors
  uint64_t b;
};
void wgmma(const WgmmaArguments& arguments);
void wgmma_fence();
void wgmma_commit_group();
void wgmma_wait_group(int groups_left);

// stmatrix.sync.aligned.m8n8.x4.shared.b16
void stmatrix(void* row, const uint32_t* registers);
// stmatrix.sync.aligned.m8n8.x2.trans.shared.b16
void stmatrix_transposed(void* column, uint32_t first, uint32_t second);

// What a 32-bit shared memory address stands for: the offset in the block's shared memory.
uint32_t shared_address(const void* pointer);

}  // namespace emu

// For programs that load the emulated kernels as a shared library.
extern "C" {
__attribute__((visibility("default"))) void emu_set_options(uint64_t seed, int burst,
                                                            size_t shared_memory_limit);
__attribute__((visibility("default"))) void emu_get_counters(emu::Counters* result);
__attribute__((visibility("default"))) void emu_reset_counters(void);
}

#include "intrinsics.hpp"
