// Operands that ldmatrix brings from tiles of the kernels' shapes, against the coordinates that
// CuTe gives for their MMAs.
#include <cstdio>
#include <cute/tensor.hpp>
#include <type_traits>

#include "device.h"
#include "sm80/backward/traits.h"
#include "sm80/forward/traits.h"
#include "sm80/ldmatrix_operand.h"

namespace {

using anyflash::TileConfig;
using namespace anyflash::sm80;
using Element = cutlass::half_t;

int g_failures = 0;

// A region of a tile: so many rows and columns from (kRow, kColumn) on.
template <int kRow_, int kRows_, int kColumn_, int kColumns_>
struct Part {
  static constexpr int kRow = kRow_;
  static constexpr int kRows = kRows_;
  static constexpr int kColumn = kColumn_;
  static constexpr int kColumns = kColumns_;
};

// The tile's element (row, column) is the number row * kColumns + column.
template <class Mma, Side kSide, class Tile, bool kTransposed, class Part>
__global__ void load_kernel(uint16_t* loaded) {
  auto* const tile = reinterpret_cast<Element*>(anyflash_smem);
  const auto layout = typename Tile::Layout{};
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kColumns; i += blockDim.x) {
    tile[layout(i / Tile::kColumns, i % Tile::kColumns)] =
        Element::bitcast(static_cast<uint16_t>(i));
  }
  __syncthreads();
  const LdmatrixOperand<Mma, kSide, Tile, kTransposed> whole(tile, static_cast<int>(threadIdx.x));
  const auto operand =
      whole.template region<Part::kRow, Part::kRows, Part::kColumn, Part::kColumns>();
  auto fragment = operand.fragment();
  for (int k = 0; k < operand.kBlocks; ++k) operand.load(fragment, k);
  constexpr int kSize = decltype(cute::size(fragment))::value;
  for (int i = 0; i < kSize; ++i) loaded[threadIdx.x * kSize + i] = fragment(i).raw();
}

template <class Mma, Side kSide, class Tile, bool kTransposed = false,
          class Part = Part<0, Tile::kRows, 0, Tile::kColumns>>
void check(const char* what) {
  using namespace cute;
  using Rows = Int<kTransposed ? Part::kColumns : Part::kRows>;
  using Depth = Int<kTransposed ? Part::kRows : Part::kColumns>;
  constexpr int kThreads = decltype(size(Mma{}))::value;
  const auto places = [](int thread) {
    const auto slice = Mma{}.get_slice(thread);
    const auto all = make_identity_tensor(Shape<Rows, Depth>{});
    if constexpr (kSide == Side::kA) return slice.partition_A(all);
    else return slice.partition_B(all);
  };
  constexpr int kSize = decltype(size(places(0)))::value;
  device::Array<uint16_t> loaded(kThreads * kSize);
  device::launch(1, kThreads, sizeof(Element) * Tile::kRows * Tile::kColumns,
                 &load_kernel<Mma, kSide, Tile, kTransposed, Part>, loaded.data());
  for (int thread = 0; thread < kThreads; ++thread) {
    const auto place = places(thread);
    for (int i = 0; i < kSize; ++i) {
      const int x = get<0>(place(i));
      const int k = get<1>(place(i));
      const int row = (kTransposed ? k : x) + Part::kRow;
      const int column = (kTransposed ? x : k) + Part::kColumn;
      const int want = row * Tile::kColumns + column;
      const int got = loaded[thread * kSize + i];
      if (got == want || ++g_failures > 20) continue;
      std::printf("%s: element %d of thread %d is (%d, %d), not (%d, %d)\n", what, i, thread,
                  got / Tile::kColumns, got % Tile::kColumns, row, column);
    }
  }
}

template <int kHeadDim, bool kGeneric, bool kKeysInRuns, TileConfig kTileConfig>
void check_backward(const char* what) {
  using Traits = BackwardTraits<Element, kHeadDim, kHeadDim, kGeneric, kKeysInRuns, kTileConfig>;
  using TileQ = typename Traits::TileQ;
  using TileK = typename Traits::TileK;
  using TileP = typename Traits::TileP;
  constexpr int kRows = TileQ::kRows;
  constexpr int kKeys = TileK::kRows;
  constexpr int kPartKeys = Traits::kPartKeys;
  constexpr int kColumns = Traits::kPartColumns;
  check<typename Traits::ScoreMma, Side::kA, TileQ>(what);
  check<typename Traits::ScoreMma, Side::kB, TileK, false,
        Part<kKeys - kPartKeys, kPartKeys, 0, kHeadDim>>(what);
  check<typename Traits::KeyMma, Side::kA, TileP, true>(what);
  check<typename Traits::KeyMma, Side::kB, TileQ, true>(what);
  check<typename Traits::QueryMma, Side::kA, TileP>(what);
  check<typename Traits::QueryMma, Side::kB, TileK, true,
        Part<0, kKeys, kHeadDim - kColumns, kColumns>>(what);
  if constexpr (!kGeneric && Traits::kSkipsMaskedHalf) {
    constexpr int kLate = kRows - Traits::kTopRows == 0 ? 0 : Traits::kTopRows;
    check<typename Traits::ScoreMma, Side::kA, TileQ, false,
          Part<kLate, kRows - kLate, 0, kHeadDim>>(what);
    check<typename Traits::KeyMma, Side::kB, TileQ, true, Part<kLate, kRows - kLate, 0, kHeadDim>>(
        what);
    check<typename Traits::QueryMma, Side::kA, TileP, false, Part<kLate, kRows - kLate, 0, kKeys>>(
        what);
  }
}

}  // namespace

int main() {
  check_backward<32, false, false, TileConfig::kDefault>("backward, head dim 32");
  check_backward<64, false, false, TileConfig::kDefault>("backward, head dim 64");
  check_backward<96, false, false, TileConfig::kDefault>("backward, head dim 96");
  check_backward<128, false, false, TileConfig::kDefault>("backward, head dim 128");
  check_backward<128, false, false, TileConfig::kCompact>("backward, head dim 128 for 99 KB");
  check_backward<32, false, false, TileConfig::kWide>("backward, head dim 32 for 227 KB");
  check_backward<128, false, false, TileConfig::kWide>("backward, head dim 128 for 227 KB");
  check_backward<192, false, false, TileConfig::kWide>("backward, head dim 192 for 227 KB");
  check_backward<256, false, false, TileConfig::kWide>("backward, head dim 256 for 227 KB");
  check_backward<64, false, true, TileConfig::kDefault>("backward, head dim 64, one feature");
  check_backward<256, true, false, TileConfig::kCompact>("backward, head dim 256 for 99 KB");
  // Decoding: each warp takes its own rows of a tile.
  using Mma =
      cute::TiledMMA<MmaAtom<Element>, cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>,
                     cute::Tile<cute::_16, cute::_16, cute::_16>>;
  using Tile = SmemTile<Element, 128, 128, 64>;
  check<Mma, Side::kB, Tile, false, Part<96, 32, 0, 64>>("decoding, K");
  check<Mma, Side::kB, Tile, true, Part<96, 32, 0, 64>>("decoding, V");
  if (g_failures != 0) std::printf("%d elements are wrong\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
