// Which tiles are the fastest, where the rules of dispatch.cpp choose others: measurements of the
// compute capabilities that `python -m anyflash bench tune --write` ran on. A row (TunedTile) is
// {compute capability, operation, head dims, the mask is bounded, size, room}. The row of the
// backward on 9.0 is by hand, from timings on an H200; the tuner has not run there yet.
#include "kernel_table.h"

namespace anyflash {

// clang-format off
const TunedTile kTunedTiles[] = {
    {90, Op::kBackward, 128, 128, true, ProblemSize::kShort, Room::kCompact},
    {},
};
// clang-format on

}  // namespace anyflash
