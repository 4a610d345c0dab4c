// repack.h on the host: what fits the CUDA kernels as it is, and what copies hold. The copy is this
// test's own, element by element.
#include "repack.h"

#include <cstdint>
#include <vector>

#include "check.h"
#include "copy_rows.h"
#include "workspace.h"

namespace anyflash {

void copy_rows(const CopyRowsParams& p, void*) {
  const auto offset = [](const Strides& s, int64_t b, int64_t i, int64_t h, int64_t c) {
    return b * s.batch + i * s.row + h * s.head + c * s.col;
  };
  for (int64_t b = 0; b < p.batch; ++b) {
    for (int64_t i = 0; i < p.rows; ++i) {
      for (int64_t h = 0; h < p.heads; ++h) {
        for (int64_t c = 0; c < p.target_columns; ++c) {
          static_cast<uint16_t*>(p.target)[offset(p.target_stride, b, i, h, c)] =
              c < p.source_columns
                  ? static_cast<const uint16_t*>(p.source)[offset(p.source_stride, b, i, h, c)]
                  : uint16_t{0};
        }
      }
    }
  }
}

}  // namespace anyflash

using anyflash::DType;
using anyflash::InputRules;
using anyflash::Repacked;
using anyflash::Strides;
using anyflash::TensorView;

namespace {

// Pieces of 16 bytes, and offsets within a tile that fit in 32 bits.
constexpr InputRules kRules{16, INT32_MAX / 256};
// And strides that are unsigned.
constexpr InputRules kPositiveRules{16, INT64_MAX, true};
constexpr std::size_t kPrevious = 512;  // of the workspace, taken by others

// 2 batches, 3 rows, 2 heads of 8 columns, bfloat16.
struct Contiguous {
  Contiguous() {
    view.data = memory;
    view.dtype = DType::kBFloat16;
    view.rank = 4;
    view.shape = {2, 3, 2, 8};
    view.stride = {48, 16, 8, 1};
  }
  bool fits(const InputRules& rules = kRules) const {
    std::size_t total = kPrevious;
    const bool needed = plan_repack(view, rules, total).needed;
    CHECK_EQ(total > kPrevious, needed);
    return !needed;
  }
  alignas(16) uint16_t memory[128] = {};
  TensorView view;
};

void check_fits() {
  Contiguous t;
  CHECK(t.fits());
  t.view.stride = {0, 16, -8, 1};
  CHECK(t.fits());
  t.view.stride = {48, INT32_MAX / 256 / 8 * 8, 8, 1};
  CHECK(t.fits());
  t.view.stride[1] = INT32_MAX / 256 / 8 * 8 + 8;  // offsets within a tile beyond 32 bits
  CHECK(!t.fits());
  for (const int axis : {0, 1, 2}) {
    Contiguous odd;
    odd.view.stride[axis] += 4;
    CHECK(!odd.fits());
    odd.view.shape[axis] = 1;  // then the stride means nothing
    CHECK(odd.fits());
  }
  for (const int axis : {0, 1, 2}) {
    for (const int64_t stride : {0, -16}) {
      Contiguous turned;
      CHECK(turned.fits(kPositiveRules));
      turned.view.stride[axis] = stride;
      CHECK(!turned.fits(kPositiveRules));
      turned.view.shape[axis] = 1;
      CHECK(turned.fits(kPositiveRules));
    }
  }
  Contiguous single;  // 8 rows of one column
  single.view.shape = {1, 8, 1, 1};
  single.view.stride = {8, 1, 8, 1};
  CHECK(single.fits({2, INT64_MAX, true}));
  Contiguous columns;
  columns.view.stride[3] = 2;
  CHECK(!columns.fits());
  Contiguous narrow;
  narrow.view.shape[3] = 7;
  CHECK(!narrow.fits());
  Contiguous address;
  address.view.data = address.memory + 4;
  CHECK(!address.fits());
}

// The first axis is asked also where there is one slot: bits must not depend on their number.
void check_box_slots() {
  for (const int64_t slots : {1, 2}) {
    Contiguous cache;
    cache.view.shape[0] = slots;
    CHECK(has_box_slots(cache.view));
    for (const int64_t stride : {0, -48, 52}) {
      Contiguous odd;
      odd.view.shape[0] = slots;
      odd.view.stride[0] = stride;
      CHECK(!has_box_slots(odd.view));
    }
  }
}

// 5 of 11 columns, which run backwards; 0xffff lies between the elements.
struct Odd {
  Odd() {
    view.data = memory.data() + 4;
    view.dtype = DType::kFloat16;
    view.rank = 4;
    view.shape = {2, 3, 2, 5};
    view.stride = {66, 22, 11, -1};
    for (int i = 0; i < kRows; ++i) {
      for (int c = 0; c < 5; ++c) at(i, c) = value(i, c);
    }
  }
  // Rows of (batch, row, head).
  static constexpr int kRows = 12;
  uint16_t& at(int row, int column) {
    return memory[static_cast<std::size_t>(row * 11 + 4 - column)];
  }
  static uint16_t value(int row, int column) {
    return static_cast<uint16_t>(100 * row + column + 1);
  }
  std::vector<uint16_t> memory = std::vector<uint16_t>(132, 0xffff);
  TensorView view;
};

struct Workspace {
  char* data() { return reinterpret_cast<char*>(memory.data()); }
  std::vector<uint16_t> memory = std::vector<uint16_t>(4096, 0xeeee);
};

void check_input() {
  Odd t;
  Workspace workspace;
  std::size_t total = kPrevious;
  const Repacked repacked = plan_repack(t.view, kRules, total);
  CHECK(repacked.needed);
  CHECK_EQ(repacked.columns, 8);
  CHECK_EQ(repacked.offset, kPrevious);
  CHECK_EQ(total, kPrevious + 256);  // 12 rows of 16 bytes, rounded up
  const void* data = t.view.data;
  Strides stride;
  repack_input(repacked, workspace.data(), nullptr, data, stride);
  CHECK(data == workspace.data() + kPrevious);
  CHECK(stride.batch == 48 && stride.row == 16 && stride.head == 8 && stride.col == 1);
  const auto* const copy = static_cast<const uint16_t*>(data);
  for (int i = 0; i < Odd::kRows; ++i) {
    for (int c = 0; c < 8; ++c) CHECK_EQ(copy[8 * i + c], c < 5 ? Odd::value(i, c) : 0);
  }
  CHECK_EQ(workspace.memory[kPrevious / 2 - 1], 0xeeee);
  CHECK_EQ(copy[8 * Odd::kRows], 0xeeee);
}

void check_output(bool packed) {
  Odd t;
  Workspace workspace;
  std::size_t total = kPrevious;
  const Repacked repacked = plan_repack(t.view, kRules, total);
  void* data = t.view.data;
  Strides stride;
  redirect_output(repacked, packed, workspace.data(), nullptr, data, stride);
  CHECK(data == workspace.data() + kPrevious);
  // The kernel writes all rows but the last, and all columns that there is room for.
  auto* const copy = static_cast<uint16_t*>(data);
  for (int i = 0; i < 8 * (Odd::kRows - 1); ++i) copy[i] = static_cast<uint16_t>(7000 + i);
  CHECK_EQ(t.at(0, 0), Odd::value(0, 0));
  write_back(repacked, workspace.data(), nullptr);
  for (int i = 0; i < Odd::kRows; ++i) {
    for (int c = 0; c < 5; ++c) {
      const bool written = i < Odd::kRows - 1;
      if (written) CHECK_EQ(t.at(i, c), 7000 + 8 * i + c);
      if (!written && packed) CHECK_EQ(t.at(i, c), Odd::value(i, c));
    }
    for (int c = 5; c < 11 && i < Odd::kRows - 1; ++c) CHECK_EQ(t.at(i + 1, c), 0xffff);
  }
}

// Rows of 9 columns take two pieces of 16 bytes.
void check_size() {
  Contiguous t;
  t.view.shape = {2, 3, 2, 9};
  std::size_t total = 0;
  const Repacked repacked = plan_repack(t.view, kRules, total);
  CHECK(repacked.needed);
  CHECK_EQ(repacked.columns, 16);
  CHECK_EQ(total, std::size_t{512});  // 12 rows of 32 bytes, rounded up
}

// What fits stays where it is.
void check_not_needed() {
  Contiguous t;
  Workspace workspace;
  const Repacked none;
  const void* input = t.memory;
  void* output = t.memory;
  Strides stride{1, 2, 3, 4};
  repack_input(none, workspace.data(), nullptr, input, stride);
  redirect_output(none, true, workspace.data(), nullptr, output, stride);
  write_back(none, workspace.data(), nullptr);
  CHECK(input == t.memory && output == t.memory && stride.batch == 1 && stride.col == 4);
  CHECK_EQ(workspace.memory[0], 0xeeee);
}

// workspace.h: the pieces begin at a multiple of 256 and end within the memory, wherever it begins.
void check_workspace() {
  using anyflash::Workspace;
  CHECK_EQ(anyflash::size_with_slack(0), std::size_t{0});
  const std::size_t needed = anyflash::size_with_slack(256);
  std::vector<char> memory(1024);
  for (int begin = 0; begin < 256; ++begin) {
    char* const data = memory.data() + begin;
    char* const piece = anyflash::first_piece({data, needed}, 256);
    CHECK_EQ(reinterpret_cast<std::uintptr_t>(piece) % 256, std::uintptr_t{0});
    CHECK(piece >= data && piece + 256 <= data + needed);
  }
  CHECK(anyflash::first_piece(Workspace{}, 0) == nullptr);
}

}  // namespace

int main() {
  check_fits();
  check_box_slots();
  check_workspace();
  check_input();
  check_output(/*packed=*/false);
  check_output(/*packed=*/true);
  check_size();
  check_not_needed();
  return check::report();
}
