// Which CPU kernel runs a problem.
#include "anyflash/error.h"
#include "cpu_features.h"
#include "describe.h"
#include "kernel_table.h"

namespace anyflash {

// The best instruction set that has a kernel; AMX has some only, and AVX-512 the others.
const KernelDescriptor& select_cpu_kernel(const Problem& problem) {
  const CpuIsa wanted = problem.cpu_isa;
  if (!cpu_has(wanted)) {
    throw Error(ErrorCode::kUnsupported,
                std::string("cpu_isa is ") + name(wanted) + ", which this processor does not have");
  }
  const auto is_allowed = [wanted](CpuIsa isa) {
    if (wanted == CpuIsa::kAuto) return cpu_has(isa);
    return isa == wanted || (wanted == CpuIsa::kAmx && isa == CpuIsa::kAvx512);
  };
  const KernelDescriptor* best = nullptr;
  for (const KernelDescriptor* kernel : cpu_kernels(problem.op, problem.dtype)) {
    if (is_allowed(kernel->isa) && (best == nullptr || kernel->isa > best->isa)) best = kernel;
  }
  if (best != nullptr) return *best;
  throw Error(ErrorCode::kUnsupported, std::string("cpu_isa is ") + name(wanted) +
                                           ", for which this build has no CPU " + name(problem.op) +
                                           " kernels");
}

}  // namespace anyflash
