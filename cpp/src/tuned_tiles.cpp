// Measured exceptions to the rules of select_gpu.cpp, as tests/tune/tuner.py --write writes them. A
// row (TunedTile) is {{compute capability, family}, {operation, head dims}, {the mask is bounded,
// size}, tile config}. Those of 9.0 are an H200's (--quick, commit 8375463).
// The backward's loop has changed since. Two short rows of it, 128 and 256, are by hand from
// timings of the new one. Those of 32 that fill a GPU are left out.
#include "tuned_tiles.h"

namespace anyflash {

using Size = ProblemSize;  // so that a row fits a line

// clang-format off
const TunedTile kTunedTiles[] = {
    {{90, "sm80"}, {Op::kBackward, 32, 32}, {false, Size::kSmallGrid}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 32, 32}, {true, Size::kShort}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 32, 32}, {true, Size::kSmallGrid}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 128, 128}, {false, Size::kSmallGrid}, TileConfig::kCompact},
    {{90, "sm80"}, {Op::kBackward, 128, 128}, {true, Size::kShort}, TileConfig::kCompact},
    {{90, "sm80"}, {Op::kBackward, 128, 128}, {true, Size::kSmallGrid}, TileConfig::kCompact},
    {{90, "sm80"}, {Op::kBackward, 192, 128}, {false, Size::kSmallGrid}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 192, 128}, {true, Size::kSmallGrid}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 192, 192}, {false, Size::kSmallGrid}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 192, 192}, {true, Size::kShort}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 192, 192}, {true, Size::kSmallGrid}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 256, 256}, {false, Size::kSmallGrid}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 256, 256}, {true, Size::kShort}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kBackward, 256, 256}, {true, Size::kSmallGrid}, TileConfig::kDefault},
    {{90, "sm80"}, {Op::kForward, 128, 128}, {true, Size::kLong}, TileConfig::kDefault},
    {},
};
// clang-format on

}  // namespace anyflash
