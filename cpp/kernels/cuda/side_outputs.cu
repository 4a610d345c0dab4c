// See side_outputs.h. One thread a unit of work.
#include "common/launch.h"
#include "side_outputs.h"
#include "variant/side_outputs.h"

namespace anyflash {

namespace {

constexpr int kThreads = 256;

__global__ void side_outputs_kernel(const __grid_constant__ SideOutputs outputs) {
  const SideOutputFiller filler(outputs);
  const int64_t units = filler.units();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < units; i += step) {
    filler.fill(i);
  }
}

}  // namespace

void fill_side_outputs(const SideOutputs& outputs, void* stream) {
  const int64_t units = SideOutputFiller(outputs).units();
  launch_grid_stride<side_outputs_kernel>(units, kThreads, kThreads, 0, stream, outputs);
}

}  // namespace anyflash
