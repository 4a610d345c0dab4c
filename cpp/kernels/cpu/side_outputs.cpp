// See side_outputs.h.
#include "side_outputs.h"

#include <cstdint>

#include "variant/side_outputs.h"

namespace anyflash {

void fill_side_outputs_on_cpu(const SideOutputs& outputs, int num_threads) {
  const SideOutputFiller filler(outputs);
  const int64_t units = filler.units();
  constexpr int64_t kWorthThreads = 4096;
#pragma omp parallel for num_threads(num_threads) schedule(static) if (units > kWorthThreads)
  for (int64_t unit = 0; unit < units; ++unit) filler.fill(unit);
}

}  // namespace anyflash
