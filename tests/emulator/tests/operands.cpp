// Operands that ldmatrix brings from tiles of the kernels' shapes, against the coordinates that
// CuTe gives for their MMAs.
#include <cstdio>
#include <cute/tensor.hpp>
#include <type_traits>

#include "device.h"
#include "sm80/bwd_traits.h"
#include "sm80/operand.h"
#include "sm80/traits.h"

namespace {

using anyflash::Room;
using namespace anyflash::sm80;
using Element = cutlass::half_t;

int g_failures = 0;

// The tile's element (row, column) is the number row * kColumns + column.
template <class Mma, Side kSide, class Tile, bool kTransposed, int kTileRows>
__global__ void load_kernel(uint16_t* loaded) {
  auto* const tile = reinterpret_cast<Element*>(anyflash_smem);
  const auto layout = typename Tile::Layout{};
  for (int i = threadIdx.x; i < Tile::kRows * Tile::kColumns; i += blockDim.x) {
    tile[layout(i / Tile::kColumns, i % Tile::kColumns)] =
        Element::bitcast(static_cast<uint16_t>(i));
  }
  __syncthreads();
  // The second half of the rows, where not all are asked for.
  const Operand<Mma, kSide, Tile, kTransposed, kTileRows> operand(
      tile + (Tile::kRows - kTileRows) * Tile::kPage, static_cast<int>(threadIdx.x));
  auto fragment = operand.fragment();
  for (int k = 0; k < operand.kBlocks; ++k) operand.load(fragment, k);
  constexpr int kSize = decltype(cute::size(fragment))::value;
  for (int i = 0; i < kSize; ++i) loaded[threadIdx.x * kSize + i] = fragment(i).raw();
}

template <class Mma, Side kSide, class Tile, bool kTransposed = false, int kTileRows = Tile::kRows>
void check(const char* what) {
  using namespace cute;
  using Rows = Int<kTransposed ? Tile::kColumns : kTileRows>;
  using Depth = Int<kTransposed ? kTileRows : Tile::kColumns>;
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
                 &load_kernel<Mma, kSide, Tile, kTransposed, kTileRows>, loaded.data());
  for (int thread = 0; thread < kThreads; ++thread) {
    const auto place = places(thread);
    for (int i = 0; i < kSize; ++i) {
      const int x = get<0>(place(i));
      const int k = get<1>(place(i));
      const int row = (kTransposed ? k : x) + Tile::kRows - kTileRows;
      const int want = row * Tile::kColumns + (kTransposed ? x : k);
      const int got = loaded[thread * kSize + i];
      if (got == want || ++g_failures > 20) continue;
      std::printf("%s: element %d of thread %d is (%d, %d), not (%d, %d)\n", what, i, thread,
                  got / Tile::kColumns, got % Tile::kColumns, row, want % Tile::kColumns);
    }
  }
}

template <int kHeadDim, bool kGeneric, bool kQuadKeys, Room kRoom>
void check_backward(const char* what) {
  using Traits = BackwardTraits<Element, kHeadDim, kHeadDim, kGeneric, kQuadKeys, kRoom>;
  check<typename Traits::ScoreMma, Side::kA, typename Traits::TileQ>(what);
  check<typename Traits::ScoreMma, Side::kB, typename Traits::TileK, false, Traits::kPartKeys>(
      what);
  check<typename Traits::KeyMma, Side::kA, typename Traits::TileP, true>(what);
  check<typename Traits::KeyMma, Side::kB, typename Traits::TileQ, true>(what);
  check<typename Traits::QueryMma, Side::kA, typename Traits::TileP>(what);
  check<typename Traits::QueryMma, Side::kB, typename Traits::TilePartK, true>(what);
}

}  // namespace

int main() {
  check_backward<32, false, false, Room::kUsual>("backward, head dim 32");
  check_backward<64, false, false, Room::kUsual>("backward, head dim 64");
  check_backward<96, false, false, Room::kUsual>("backward, head dim 96");
  check_backward<128, false, false, Room::kUsual>("backward, head dim 128");
  check_backward<128, false, false, Room::kCompact>("backward, head dim 128 for 99 KB");
  check_backward<32, false, false, Room::kWide>("backward, head dim 32 for 227 KB");
  check_backward<128, false, false, Room::kWide>("backward, head dim 128 for 227 KB");
  check_backward<192, false, false, Room::kWide>("backward, head dim 192 for 227 KB");
  check_backward<256, false, false, Room::kWide>("backward, head dim 256 for 227 KB");
  check_backward<64, false, true, Room::kUsual>("backward, head dim 64, one feature");
  check_backward<256, true, false, Room::kCompact>("backward, head dim 256 for 99 KB");
  // Decoding: each warp takes its own rows of a tile.
  using Mma =
      cute::TiledMMA<MmaAtom<Element>, cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>,
                     cute::Tile<cute::_16, cute::_16, cute::_16>>;
  using Tile = SmemTile<Element, 128, 128, 64>;
  check<Mma, Side::kB, Tile, false, 32>("decoding, K");
  check<Mma, Side::kB, Tile, true, 32>("decoding, V");
  if (g_failures != 0) std::printf("%d elements are wrong\n", g_failures);
  return g_failures == 0 ? 0 : 1;
}
