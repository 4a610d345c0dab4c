// The instructions of compute capability 8.0 that CuTe's atoms stand for.
//
// Lane layouts are those of the PTX manual; CuTe's traits describe the same hardware independently,
// and a kernel's result is right only where the two agree.
#include <cstdio>
#include <cstring>

#include "block.hpp"

namespace emu {
namespace {

// -- mma.sync -------------------------------------------------------------------------------------

float from_bits(uint32_t bits) {
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

float widen_bfloat16(uint32_t bits) { return from_bits(bits << 16); }

// Exact for subnormals as well: the exponent is moved by a multiplication.
float widen_half(uint32_t bits) {
  const float magnitude = from_bits((bits & 0x7fff) << 13) * 0x1p112f;
  uint32_t result;
  std::memcpy(&result, &magnitude, sizeof(result));
  if ((bits & 0x7c00) == 0x7c00) result |= 0x7f800000;
  return from_bits(result | (bits & 0x8000) << 16);
}

// Products of 16-bit values are exact in fp32; the sum is rounded after every addition, in the
// order of k. Tensor cores round less often and in an order that is not documented.
template <int kK, float (*kWiden)(uint32_t)>
void execute_mma(void* const* lanes, uint32_t) {
  constexpr int kM = 16, kN = 8;
  float a[kM][kK], b[kK][kN], sum[kM][kN];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& registers = *static_cast<const MmaRegisters*>(lanes[lane]);
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int half = 0; half < 2; ++half) {
      const int shift = 16 * half;
      for (int i = 0; i < kK / 4; ++i) {
        const uint32_t bits = registers.a[i] >> shift & 0xffff;
        a[group + i % 2 * 8][pair + i / 2 * 8 + half] = kWiden(bits);
      }
      for (int i = 0; i < kK / 8; ++i) {
        b[pair + i * 8 + half][group] = kWiden(registers.b[i] >> shift & 0xffff);
      }
    }
    for (int i = 0; i < 4; ++i) sum[group + i / 2 * 8][pair + i % 2] = registers.c[i];
  }
  for (int m = 0; m < kM; ++m) {
    for (int k = 0; k < kK; ++k) {
      for (int n = 0; n < kN; ++n) sum[m][n] += a[m][k] * b[k][n];
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    auto& registers = *static_cast<MmaRegisters*>(lanes[lane]);
    for (int i = 0; i < 4; ++i) registers.d[i] = sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
  }
  ++mutable_counters().mma;
}

constexpr CollectiveOp kMma16Half = {"mma.m16n8k16.f16", &execute_mma<16, widen_half>, false};
constexpr CollectiveOp kMma16Bfloat16 = {"mma.m16n8k16.bf16", &execute_mma<16, widen_bfloat16>,
                                         false};
constexpr CollectiveOp kMma8Half = {"mma.m16n8k8.f16", &execute_mma<8, widen_half>, false};
constexpr CollectiveOp kMma8Bfloat16 = {"mma.m16n8k8.bf16", &execute_mma<8, widen_bfloat16>, false};

// -- ldmatrix -------------------------------------------------------------------------------------

constexpr int kMatrixRows = 8;
constexpr int kRowBytes = 16;

struct LdmatrixLane {
  const unsigned char* row;
  uint32_t* registers;
  const unsigned char* all_rows[kWarpSize];  // filled in by the lane that executes
};

// The address of element `half` of register `matrix`, in the rows that the lanes provided.
const unsigned char* source_of(const unsigned char* const* rows, bool transposed, int matrix,
                               int lane, int half) {
  const int major = lane / 4, minor = lane % 4 * 2 + half;
  const int row = transposed ? minor : major;
  const int column = transposed ? major : minor;
  return rows[matrix * kMatrixRows + row] + column * 2;
}

// Eight rows of 16 bytes are one wavefront if they cover the 32 banks once. Rows at the same
// address are read once.
int extra_wavefronts(const unsigned char* const* rows) {
  int most = 1;
  for (int i = 0; i < kMatrixRows; ++i) {
    int same_banks = 1;
    for (int j = 0; j < i; ++j) {
      const size_t a = (rows[i] - shared_memory()) / kRowBytes;
      const size_t b = (rows[j] - shared_memory()) / kRowBytes;
      if (a == b) {
        same_banks = 0;
        break;
      }
      same_banks += a % 8 == b % 8;
    }
    most = same_banks > most ? same_banks : most;
  }
  return most - 1;
}

template <int kCount, bool kTransposed>
void execute_ldmatrix(void* const* lanes, uint32_t) {
  const unsigned char* rows[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) rows[i] = static_cast<LdmatrixLane*>(lanes[i])->row;
  for (int matrix = 0; matrix < kCount; ++matrix) {
    mutable_counters().ldmatrix_conflicts += extra_wavefronts(rows + matrix * kMatrixRows);
    ++mutable_counters().ldmatrix_matrices;
  }
  for (int i = 0; i < kWarpSize; ++i) {
    auto& lane = *static_cast<LdmatrixLane*>(lanes[i]);
    for (int matrix = 0; matrix < kCount; ++matrix) {
      uint16_t halves[2];
      for (int half = 0; half < 2; ++half) {
        std::memcpy(&halves[half], source_of(rows, kTransposed, matrix, i, half), 2);
      }
      lane.registers[matrix] = halves[0] | static_cast<uint32_t>(halves[1]) << 16;
    }
    for (int row = 0; row < kWarpSize; ++row) lane.all_rows[row] = rows[row];
  }
}

std::string hex(size_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%zx", value);
  return text;
}

template <int kCount, bool kTransposed>
void ldmatrix(const void* row, uint32_t* registers) {
  static constexpr CollectiveOp op = {kTransposed ? "ldmatrix.trans" : "ldmatrix",
                                      &execute_ldmatrix<kCount, kTransposed>, false};
  // Addresses of the other lanes are ignored.
  if (lane_index() < kCount * kMatrixRows) check_shared(op.name, row, kRowBytes, kRowBytes);
  LdmatrixLane lane = {static_cast<const unsigned char*>(row), registers, {}};
  Block::current().collective(op, kFullMask, &lane);
#ifdef EMU_TSAN
  // A lane reads the elements it receives: those need an order, not the row it points to.
  for (int matrix = 0; matrix < kCount; ++matrix) {
    for (int half = 0; half < 2; ++half) {
      tsan_read(source_of(lane.all_rows, kTransposed, matrix, lane_index(), half), 2);
    }
  }
#endif
}

// -- shfl and vote --------------------------------------------------------------------------------

struct ShuffleLane {
  uint64_t value;
  int source;
  uint64_t result;
};

void execute_shuffle(void* const* lanes, uint32_t mask) {
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    auto& lane = *static_cast<ShuffleLane*>(lanes[__builtin_ctz(rest)]);
    if ((mask >> lane.source & 1) == 0) {
      fail("shfl.sync: lane " + std::to_string(__builtin_ctz(rest)) + " reads lane " +
           std::to_string(lane.source) + ", which is not in the mask");
    }
    lane.result = static_cast<ShuffleLane*>(lanes[lane.source])->value;
  }
}

struct BallotLane {
  bool predicate;
  uint32_t result;
};

void execute_ballot(void* const* lanes, uint32_t mask) {
  uint32_t votes = 0;
  for (int i = 0; i < kWarpSize; ++i) {
    if ((mask >> i & 1) != 0 && static_cast<BallotLane*>(lanes[i])->predicate) votes |= 1u << i;
  }
  for (uint32_t rest = mask; rest != 0; rest &= rest - 1) {
    static_cast<BallotLane*>(lanes[__builtin_ctz(rest)])->result = votes;
  }
}

constexpr CollectiveOp kShuffle = {"shfl.sync", &execute_shuffle, false};
constexpr CollectiveOp kBallot = {"vote.sync", &execute_ballot, false};
constexpr CollectiveOp kSyncwarp = {"__syncwarp", nullptr, true};

// -- cp.async -------------------------------------------------------------------------------------

// Of a fixed size each, so that no call of memcpy remains: Thread Sanitizer would intercept it, and
// take the queue, which blocks reuse, for memory of the kernel.
void copy_bytes(unsigned char* to, const unsigned char* from, int bytes) {
  if (bytes == 4) std::memcpy(to, from, 4);
  if (bytes == 8) std::memcpy(to, from, 8);
  if (bytes == 16) std::memcpy(to, from, 16);
}

void land_groups_before(uint32_t group) {
  CpAsyncQueue& queue = Block::current_thread().cp_async;
  for (; queue.first != queue.last; ++queue.first) {
    const CpAsyncQueue::Entry& entry = queue.entries[queue.first % CpAsyncQueue::kCapacity];
    if (entry.group >= group) return;
    tsan_write(entry.destination, entry.bytes);
    copy_bytes(entry.destination, entry.data, entry.bytes);
  }
}

CpAsyncQueue::Entry& next_entry(CpAsyncQueue& queue) {
  if (queue.last - queue.first == CpAsyncQueue::kCapacity) {
    fail("cp.async: more than 1024 of one thread are in flight");
  }
  return queue.entries[queue.last++ % CpAsyncQueue::kCapacity];
}

// -- stmatrix -------------------------------------------------------------------------------------

struct StmatrixLane {
  unsigned char* row;
  const uint32_t* registers;
};

void execute_stmatrix(void* const* lanes, uint32_t) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& source = *static_cast<const StmatrixLane*>(lanes[lane]);
    for (int matrix = 0; matrix < 4; ++matrix) {
      const int row = matrix * kMatrixRows + lane / 4;
      std::memcpy(static_cast<StmatrixLane*>(lanes[row])->row + lane % 4 * 4,
                  &source.registers[matrix], 4);
    }
  }
}

constexpr CollectiveOp kStmatrix = {"stmatrix", &execute_stmatrix, false};

// Of two matrices; a lane's register has two neighbours of a row.
void execute_stmatrix_transposed(void* const* lanes, uint32_t) {
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& source = *static_cast<const StmatrixLane*>(lanes[lane]);
    for (int matrix = 0; matrix < 2; ++matrix) {
      for (int i = 0; i < 2; ++i) {
        const int column = matrix * kMatrixRows + lane % 4 * 2 + i;
        const auto number = static_cast<uint16_t>(source.registers[matrix] >> 16 * i);
        std::memcpy(static_cast<StmatrixLane*>(lanes[column])->row + lane / 4 * 2, &number, 2);
      }
    }
  }
}

constexpr CollectiveOp kStmatrixTransposed = {"stmatrix.trans", &execute_stmatrix_transposed,
                                              false};

}  // namespace

void check_shared(const char* name, const void* pointer, size_t bytes, size_t alignment) {
  const size_t offset = static_cast<const unsigned char*>(pointer) - shared_memory();
  if (offset >= shared_memory_bytes() || shared_memory_bytes() - offset < bytes) {
    fail(std::string(name) + ": address " + hex(offset) + " is outside of the launch's " +
         hex(shared_memory_bytes()) + " bytes of shared memory");
  }
  if (offset % alignment != 0) {
    fail(std::string(name) + ": shared memory address " + hex(offset) + " is not a multiple of " +
         std::to_string(alignment));
  }
}

void stmatrix(void* row, const uint32_t* registers) {
  check_shared(kStmatrix.name, row, kRowBytes, kRowBytes);
  StmatrixLane lane = {static_cast<unsigned char*>(row), registers};
  Block::current().collective(kStmatrix, kFullMask, &lane);
}

void stmatrix_transposed(void* column, uint32_t first, uint32_t second) {
  if (lane_index() < 2 * kMatrixRows) {
    check_shared(kStmatrixTransposed.name, column, kRowBytes, kRowBytes);
  }
  const uint32_t registers[2] = {first, second};
  StmatrixLane lane = {static_cast<unsigned char*>(column), registers};
  Block::current().collective(kStmatrixTransposed, kFullMask, &lane);
}

void mma_m16n8k16(MmaType type, MmaRegisters& registers) {
  const CollectiveOp& op = type == MmaType::kHalf ? kMma16Half : kMma16Bfloat16;
  Block::current().collective(op, kFullMask, &registers);
}

void mma_m16n8k8(MmaType type, MmaRegisters& registers) {
  const CollectiveOp& op = type == MmaType::kHalf ? kMma8Half : kMma8Bfloat16;
  Block::current().collective(op, kFullMask, &registers);
}

void ldmatrix(int count, bool transposed, const void* row, uint32_t* registers) {
  switch (count) {
    case 1:
      return transposed ? ldmatrix<1, true>(row, registers) : ldmatrix<1, false>(row, registers);
    case 2:
      return transposed ? ldmatrix<2, true>(row, registers) : ldmatrix<2, false>(row, registers);
    case 4:
      return transposed ? ldmatrix<4, true>(row, registers) : ldmatrix<4, false>(row, registers);
  }
  fail("ldmatrix: 1, 2 or 4 matrices");
}

uint64_t shuffle(uint32_t mask, uint64_t value, int source_lane) {
  ShuffleLane lane = {value, source_lane, 0};
  Block::current().collective(kShuffle, mask, &lane);
  return lane.result;
}

uint32_t ballot(uint32_t mask, bool predicate) {
  BallotLane lane = {predicate, 0};
  Block::current().collective(kBallot, mask, &lane);
  return lane.result;
}

void syncwarp(uint32_t mask) { Block::current().collective(kSyncwarp, mask, nullptr); }

void cp_async(void* shared, const void* global, int bytes, bool valid) {
  constexpr unsigned char kZero[16] = {};
  unsigned char poison[16];
  std::memset(poison, kPoison, sizeof(poison));
  if (bytes != 4 && bytes != 8 && bytes != 16) fail("cp.async: 4, 8 or 16 bytes");
  check_shared("cp.async", shared, bytes, bytes);
  if (valid && reinterpret_cast<uintptr_t>(global) % bytes != 0) {
    fail("cp.async: the source's address is not a multiple of " + std::to_string(bytes));
  }
  CpAsyncQueue& queue = Block::current_thread().cp_async;
  CpAsyncQueue::Entry& entry = next_entry(queue);
  entry.destination = static_cast<unsigned char*>(shared);
  entry.bytes = bytes;
  entry.group = queue.open_group;
  if (valid) tsan_read(global, bytes);
  copy_bytes(entry.data, valid ? static_cast<const unsigned char*>(global) : kZero, bytes);
  tsan_write(shared, bytes);
  copy_bytes(entry.destination, poison, bytes);
  ++mutable_counters().cp_async;
}

void cp_async_commit_group() { ++Block::current_thread().cp_async.open_group; }

void cp_async_wait_group(int groups_left) {
  // Only what the instruction promises: later groups stay in flight.
  const uint32_t committed = Block::current_thread().cp_async.open_group;
  const uint32_t left = static_cast<uint32_t>(groups_left);
  if (committed > left) land_groups_before(committed - left);
}

void cp_async_wait_all() {
  cp_async_commit_group();
  cp_async_wait_group(0);
}

uint32_t shared_address(const void* pointer) {
  check_shared("an address for an instruction", pointer, 1, 1);
  return static_cast<uint32_t>(static_cast<const unsigned char*>(pointer) - shared_memory());
}

}  // namespace emu
