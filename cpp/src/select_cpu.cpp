// Which CPU kernel runs a problem.
#include <algorithm>
#include <string>
#include <vector>

#include "anyflash/error.h"
#include "cpu_features.h"
#include "describe.h"
#include "kernel_table.h"

namespace anyflash {

namespace {

// Instruction sets that have a kernel.
std::vector<std::string> built_isas(const Problem& problem) {
  std::vector<std::string> names;
  for (const KernelDescriptor* kernel : cpu_kernels(problem.op, problem.dtype)) {
    const std::string isa = name(kernel->isa);
    if (std::find(names.begin(), names.end(), isa) == names.end()) names.push_back(isa);
  }
  return names;
}

}  // namespace

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
  const std::vector<std::string> built = built_isas(problem);
  throw Error(ErrorCode::kUnsupported,
              std::string("cpu_isa is ") + name(wanted) + ", for which this build has no CPU " +
                  name(problem.op) + " kernels for " + name(problem.dtype) + "; it has those of " +
                  (built.empty() ? "none" : listed(built)));
}

}  // namespace anyflash
