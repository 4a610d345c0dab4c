#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <numeric>
#include <random>
#include <vector>

#include "block.hpp"
#include "cluster.hpp"

#if defined(__SSE__)
#include <xmmintrin.h>
#endif
#ifdef EMU_ASAN
#include <sanitizer/asan_interface.h>
#endif
#ifdef EMU_TSAN
#include <sys/mman.h>
#endif

namespace {

constexpr size_t kSharedBytes = 256 * 1024;

}  // namespace

// The objects behind the constants of emu.hpp: the same symbols, but writable.
unsigned char* g_shared asm("anyflash_smem");
uint3 g_thread_idx asm("threadIdx");
uint3 g_block_idx asm("blockIdx");
dim3 g_block_dim asm("blockDim");
dim3 g_grid_dim asm("gridDim");

namespace emu {
namespace {

// One for each block of a cluster. At page boundaries, so that it can be mapped anew between
// blocks.
alignas(4096) unsigned char g_shared_memory[kMaxCluster][kSharedBytes];

std::mutex g_launch_mutex;
Counters g_counters;
size_t g_shared_bytes = 0;

Options initial_options() {
  Options result;
  if (const char* seed = std::getenv("EMU_SEED")) result.seed = std::strtoull(seed, nullptr, 10);
  return result;
}

std::string text(dim3 d) {
  return "(" + std::to_string(d.x) + "," + std::to_string(d.y) + "," + std::to_string(d.z) + ")";
}

void check_launch(dim3 grid, dim3 block, int cluster, size_t shared_bytes) {
  const std::string what = "launch of grid " + text(grid) + ", block " + text(block) + ": ";
  if (grid.x == 0 || grid.y == 0 || grid.z == 0) throw Failure(what + "the grid is empty");
  if (grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535) {
    throw Failure(what + "a grid is at most (2147483647,65535,65535)");
  }
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  if (threads == 0 || threads > 1024 || threads % kWarpSize != 0) {
    throw Failure(what + "a block has a multiple of 32 threads, at most 1024");
  }
  if (cluster > 1 && options().compute_capability < 90) {
    throw Failure(what + "the device has no clusters");
  }
  if (cluster < 1 || cluster > kMaxCluster || grid.x % cluster != 0) {
    throw Failure(what + "a cluster of " + std::to_string(cluster) +
                  " blocks; it has at most 8, and the grid whole ones");
  }
  if (shared_bytes > options().shared_memory_limit || shared_bytes > kSharedBytes) {
    throw Failure(what + std::to_string(shared_bytes) +
                  " bytes of shared memory, but the device has " +
                  std::to_string(options().shared_memory_limit));
  }
}

// Ascending for even seeds; descending or shuffled for odd ones.
std::vector<uint64_t> block_order(uint64_t count, uint64_t seed) {
  std::vector<uint64_t> order(count);
  std::iota(order.begin(), order.end(), uint64_t{0});
  if (seed % 4 == 1) std::reverse(order.begin(), order.end());
  if (seed % 4 == 3) std::shuffle(order.begin(), order.end(), std::mt19937_64(seed));
  return order;
}

// Sets up what a launch shares between its blocks, and takes it down again.
class LaunchScope {
 public:
  LaunchScope(dim3 grid, dim3 block, size_t shared_bytes) {
    if (options().flushes_subnormals) flush_subnormals();
    g_grid_dim = grid;
    g_block_dim = block;
    g_shared_bytes = shared_bytes;
#ifdef EMU_ASAN
    for (auto& block : g_shared_memory) {
      __asan_poison_memory_region(block + shared_bytes, kSharedBytes - shared_bytes);
    }
#endif
  }
  ~LaunchScope() {
    restore_subnormals();
    g_shared_bytes = 0;
#ifdef EMU_ASAN
    __asan_unpoison_memory_region(g_shared_memory, sizeof(g_shared_memory));
#endif
  }

 private:
#if defined(__SSE__)
  void flush_subnormals() {
    constexpr unsigned kFlushToZero = 0x8000;
    constexpr unsigned kDenormalsAreZero = 0x0040;
    _mm_setcsr(modes_ | kFlushToZero | kDenormalsAreZero);
  }
  void restore_subnormals() { _mm_setcsr(modes_); }

  const unsigned modes_ = _mm_getcsr();
#else
  void flush_subnormals() {}
  void restore_subnormals() {}
#endif
};

}  // namespace

void launch(dim3 grid, dim3 block, size_t dynamic_smem_bytes, int cluster, void (*body)(void*),
            void* arg) {
  if (Block::inside_kernel()) fail("a kernel cannot launch a kernel");
  const std::lock_guard<std::mutex> lock(g_launch_mutex);
  check_launch(grid, block, cluster, dynamic_smem_bytes);
  const LaunchScope scope(grid, block, dynamic_smem_bytes);
  ++g_counters.launches;
  const uint64_t seed = options().seed;
  const Policy policy = policy_of(options());
  for (uint64_t i : block_order(uint64_t{grid.x} * grid.y * grid.z / cluster, seed)) {
    Cluster(i * cluster, cluster, block, policy, seed, body, arg).run();
  }
  tsan_acquire(&g_launch_end);  // from here on the host may read what the threads wrote
}

Options& options() {
  static Options result = initial_options();
  return result;
}

char g_launch_end = 0;

Counters& mutable_counters() { return g_counters; }
const Counters& counters() { return g_counters; }
void reset_counters() { g_counters = {}; }

unsigned char* shared_memory() { return g_shared; }
unsigned char* shared_memory_of(int rank) { return g_shared_memory[rank]; }
void use_shared_memory(int rank) { g_shared = g_shared_memory[rank]; }
size_t shared_memory_bytes() { return g_shared_bytes; }

// Up to the launch's size; what is beyond it is out of bounds.
void prepare_shared_memory(int rank, const Policy& policy) {
  unsigned char* const memory = g_shared_memory[rank];
#ifdef EMU_TSAN
  // Mapped anew, so that Thread Sanitizer forgets the block before: blocks share global memory
  // without order, which it shall see, but not this array.
  mmap(memory, kSharedBytes, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1,
       0);
#endif
  std::memset(memory, policy.looks_right ? kLooksRight : kPoison, g_shared_bytes);
}

}  // namespace emu

extern "C" {
void emu_set_options(uint64_t seed, int burst, size_t shared_memory_limit) {
  emu::options().seed = seed;
  emu::options().burst = burst;
  emu::options().shared_memory_limit = shared_memory_limit;
}
__attribute__((visibility("default"))) void emu_flush_subnormals(int flushes) {
  emu::options().flushes_subnormals = flushes != 0;
}
void emu_get_counters(emu::Counters* result) { *result = emu::counters(); }
void emu_reset_counters(void) { emu::reset_counters(); }
}
