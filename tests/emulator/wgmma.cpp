// Products of warpgroups. Each warp's quarter of an instruction depends on no other warp, so each
// has a queue of its own.
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "block.hpp"

namespace emu {
namespace {

constexpr int kRows = 16;  // of a warp
constexpr int kSum = 16;
constexpr int kMaxN = 256;

struct Accumulator {
  std::array<float*, kWarpSize> d;
  int n = 0;
  uint32_t last_group = 0;
  float values[kRows][kMaxN];
};

struct Product {
  WgmmaArguments arguments;
  std::array<const uint32_t*, kWarpSize> a;
  int accumulator;
  uint32_t group;
};

struct Queue {
  static constexpr int kProducts = 128;
  static constexpr int kAccumulators = 8;
  std::array<Product, kProducts> products;
  uint32_t first = 0;  // both only grow
  uint32_t last = 0;
  std::array<Accumulator, kAccumulators> accumulators;  // n of 0: free
  uint32_t open_group = 0;
  bool is_fenced = false;
  bool begins_group = true;
  bool reads_now = false;  // the group's operands, or as late as may be
};
std::array<std::array<Queue, kMaxWarps>, kMaxCluster> g_queues;  // of each block
std::array<Queue, kMaxWarps>& queues() { return g_queues[Block::current_block().rank()]; }

float widen(MmaType type, uint32_t bits) {
  if (type == MmaType::kBfloat16) {
    bits <<= 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
  }
  const uint32_t exponent = bits >> 10 & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  float result = exponent == 0 ? std::ldexp(mantissa, -24)
                               : std::ldexp(1024.0f + mantissa, static_cast<int>(exponent) - 25);
  if (exponent == 31) {
    result = mantissa == 0 ? std::numeric_limits<float>::infinity()
                           : std::numeric_limits<float>::quiet_NaN();
  }
  return (bits & 0x8000) != 0 ? -result : result;
}

// A matrix descriptor, with the 128-byte swizzle: eight rows of 128 bytes are an atom.
class Operand {
 public:
  explicit Operand(uint64_t descriptor)
      : start_((descriptor & 0x3fff) << 4),
        leading_((descriptor >> 16 & 0x3fff) << 4),
        stride_((descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) fail("wgmma: only the 128-byte swizzle is emulated");
    if ((descriptor >> 49 & 7) != 0) fail("wgmma: a base offset is not emulated");
  }

  // The sum's axis is contiguous, in 64 elements, which are one row.
  uint32_t k_major(int row, int k) const {
    return load(start_ + row / 8 * stride_ + row % 8 * 128 + k * 2);
  }
  // The other axis is contiguous, in panels of 64 elements.
  uint32_t mn_major(int row, int k) const {
    return load(start_ + row / 64 * leading_ + k / 8 * stride_ + k % 8 * 128 + row % 64 * 2);
  }

 private:
  // Bits 4 to 6 of an address are exclusive-ored with bits 7 to 9.
  static uint32_t load(size_t address) {
    address ^= (address >> 7 & 7) << 4;
    if (address + 2 > shared_memory_bytes()) fail("wgmma: an operand outside of shared memory");
    uint16_t bits;
    std::memcpy(&bits, async_shared_memory() + address, sizeof(bits));
    return bits;
  }

  size_t start_;
  size_t leading_;
  size_t stride_;
};

void read_a(const Product& product, int warp, float (&a)[kRows][kSum]) {
  const MmaType type = product.arguments.type;
  if (product.arguments.a_registers == nullptr) {
    const Operand operand(product.arguments.a);
    for (int row = 0; row < kRows; ++row) {
      for (int k = 0; k < kSum; ++k) {
        const int place = warp % 4 * kRows + row;
        a[row][k] = widen(type, product.arguments.a_rows_along_sum ? operand.mn_major(place, k)
                                                                   : operand.k_major(place, k));
      }
    }
    return;
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < 8; ++i) {
      const uint32_t bits = product.a[lane][i / 2] >> 16 * (i % 2) & 0xffff;
      a[lane / 4 + i / 2 % 2 * 8][lane % 4 * 2 + i % 2 + i / 4 * 8] = widen(type, bits);
    }
  }
}

void execute(Queue& queue, int warp, const Product& product) {
  const WgmmaArguments& arguments = product.arguments;
  Accumulator& accumulator = queue.accumulators[product.accumulator];
  float a[kRows][kSum];
  read_a(product, warp, a);
  static float b[kSum][kMaxN];
  const Operand operand(arguments.b);
  for (int column = 0; column < arguments.n; ++column) {
    for (int k = 0; k < kSum; ++k) {
      b[k][column] = widen(arguments.type, arguments.rows_along_sum ? operand.mn_major(column, k)
                                                                    : operand.k_major(column, k));
    }
  }
  for (int row = 0; row < kRows; ++row) {
    float* const sums = accumulator.values[row];
    for (int column = 0; column < arguments.n; ++column) {
      if (!arguments.accumulate) sums[column] = 0.0f;
    }
    for (int k = 0; k < kSum; ++k) {
      for (int column = 0; column < arguments.n; ++column) sums[column] += a[row][k] * b[k][column];
    }
  }
}

void execute_groups_before(Queue& queue, int warp, uint32_t group) {
  for (; queue.first != queue.last; ++queue.first) {
    const Product& product = queue.products[queue.first % Queue::kProducts];
    if (product.group >= group) return;
    execute(queue, warp, product);
  }
}

// Calls visit(accumulator of the lane, sum) for each of a warp's sums.
template <class Visit>
void for_each_sum(Accumulator& accumulator, const Visit& visit) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    for (int i = 0; i < accumulator.n / 2; ++i) {
      const int row = lane / 4 + i / 2 % 2 * 8;
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      visit(accumulator.d[lane][i], accumulator.values[row][column]);
    }
  }
}

int accumulator_of(Queue& queue, const WgmmaArguments* const* lanes) {
  int free = -1;
  for (int i = 0; i < Queue::kAccumulators; ++i) {
    const Accumulator& accumulator = queue.accumulators[i];
    if (accumulator.n == 0) free = i;
    else if (accumulator.d[0] == lanes[0]->d) return i;
  }
  if (free < 0) fail("wgmma: more than eight accumulators in flight are not emulated");
  Accumulator& accumulator = queue.accumulators[free];
  accumulator.n = lanes[0]->n;
  for (int lane = 0; lane < kWarpSize; ++lane) accumulator.d[lane] = lanes[lane]->d;
  for_each_sum(accumulator, [](float& register_, float& value) {
    value = register_;
    register_ = std::numeric_limits<float>::quiet_NaN();
  });
  return free;
}

void execute_wgmma(void* const* lane_arguments, uint32_t) {
  const WgmmaArguments* lanes[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) {
    lanes[i] = static_cast<const WgmmaArguments*>(lane_arguments[i]);
    if (lanes[i]->a != lanes[0]->a || lanes[i]->b != lanes[0]->b ||
        lanes[i]->accumulate != lanes[0]->accumulate) {
      fail("wgmma: descriptors differ between lanes");
    }
  }
  const int warp = warp_index();
  Queue& queue = queues()[warp];
  if (!queue.is_fenced) fail("wgmma without wgmma.fence since the last wait");
  if (queue.last - queue.first == Queue::kProducts) fail("wgmma: more than 128 in flight");
  Product& product = queue.products[queue.last++ % Queue::kProducts];
  product.arguments = *lanes[0];
  for (int i = 0; i < kWarpSize; ++i) product.a[i] = lanes[i]->a_registers;
  product.accumulator = accumulator_of(queue, lanes);
  product.group = queue.open_group;
  queue.accumulators[product.accumulator].last_group = queue.open_group;
  if (queue.begins_group) queue.reads_now = Block::current().random() % 2 == 0;
  queue.begins_group = false;
  if (queue.reads_now) execute_groups_before(queue, warp, queue.open_group + 1);
}

void execute_fence(void* const*, uint32_t) { queues()[warp_index()].is_fenced = true; }
void execute_commit(void* const*, uint32_t) {
  Queue& queue = queues()[warp_index()];
  ++queue.open_group;
  queue.begins_group = true;
}

void execute_wait(void* const* lanes, uint32_t) {
  const int warp = warp_index();
  Queue& queue = queues()[warp];
  queue.is_fenced = false;
  const uint32_t left = static_cast<uint32_t>(*static_cast<const int*>(lanes[0]));
  if (queue.open_group <= left) return;
  const uint32_t landed = queue.open_group - left;
  execute_groups_before(queue, warp, landed);
  for (Accumulator& accumulator : queue.accumulators) {
    if (accumulator.n == 0 || accumulator.last_group >= landed) continue;
    for_each_sum(accumulator, [](float& register_, float& value) { register_ = value; });
    accumulator.n = 0;
  }
}

constexpr CollectiveOp kWgmma = {"wgmma", &execute_wgmma, false};
constexpr CollectiveOp kFence = {"wgmma.fence", &execute_fence, false};
constexpr CollectiveOp kCommit = {"wgmma.commit_group", &execute_commit, false};
constexpr CollectiveOp kWait = {"wgmma.wait_group", &execute_wait, false};

}  // namespace

void reset_async() {
  for (Queue& queue : queues()) {
    queue.first = queue.last = queue.open_group = 0;
    queue.is_fenced = false;
    queue.begins_group = true;
    for (Accumulator& accumulator : queue.accumulators) accumulator.n = 0;
  }
  reset_async_copies();
}

void check_async_has_ended() {
  for (const Queue& queue : queues()) {
    for (const Accumulator& accumulator : queue.accumulators) {
      if (accumulator.n == 0) continue;
      throw Failure("emulated kernel, " + name_of_block() + ": a wgmma was not waited for");
    }
  }
  check_async_copies();
}

void wgmma(const WgmmaArguments& arguments) {
  WgmmaArguments copy = arguments;
  Block::current().collective(kWgmma, kFullMask, &copy);
}
void wgmma_fence() { Block::current().collective(kFence, kFullMask, nullptr); }
void wgmma_commit_group() { Block::current().collective(kCommit, kFullMask, nullptr); }
void wgmma_wait_group(int groups_left) {
  Block::current().collective(kWait, kFullMask, &groups_left);
}

}  // namespace emu
