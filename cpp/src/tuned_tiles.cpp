// Which tiles are the fastest, where the rules of dispatch.cpp choose others: measurements of the
// compute capabilities that `python -m anyflash bench tune --write` ran on. A row (TunedTile) is
// {compute capability, operation, head dims, the mask is bounded, size, room}. Those of 9.0 are an
// H200's (--quick, commit 8375463). The backward's loop has changed since: two short rows of it,
// 128 and 256, are by hand from timings of the new one, and those of 32 that fill a GPU left out.
#include "kernel_table.h"

namespace anyflash {

// clang-format off
const TunedTile kTunedTiles[] = {
    {90, Op::kBackward, 32, 32, false, ProblemSize::kSmallGrid, Room::kUsual},
    {90, Op::kBackward, 32, 32, true, ProblemSize::kShort, Room::kUsual},
    {90, Op::kBackward, 32, 32, true, ProblemSize::kSmallGrid, Room::kUsual},
    {90, Op::kBackward, 128, 128, false, ProblemSize::kSmallGrid, Room::kCompact},
    {90, Op::kBackward, 128, 128, true, ProblemSize::kShort, Room::kCompact},
    {90, Op::kBackward, 128, 128, true, ProblemSize::kSmallGrid, Room::kCompact},
    {90, Op::kBackward, 192, 128, false, ProblemSize::kSmallGrid, Room::kUsual},
    {90, Op::kBackward, 192, 128, true, ProblemSize::kSmallGrid, Room::kUsual},
    {90, Op::kBackward, 192, 192, false, ProblemSize::kSmallGrid, Room::kUsual},
    {90, Op::kBackward, 192, 192, true, ProblemSize::kShort, Room::kUsual},
    {90, Op::kBackward, 192, 192, true, ProblemSize::kSmallGrid, Room::kUsual},
    {90, Op::kBackward, 256, 256, false, ProblemSize::kSmallGrid, Room::kUsual},
    {90, Op::kBackward, 256, 256, true, ProblemSize::kShort, Room::kUsual},
    {90, Op::kBackward, 256, 256, true, ProblemSize::kSmallGrid, Room::kUsual},
    {90, Op::kForward, 128, 128, true, ProblemSize::kLong, Room::kUsual},
    {},
};
// clang-format on

}  // namespace anyflash
