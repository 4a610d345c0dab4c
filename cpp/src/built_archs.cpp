// For which GPUs this build holds code.
#include <algorithm>
#include <cstdlib>

#include "anyflash/error.h"
#include "kernel_table.h"

namespace anyflash {

namespace {

// Jetson and DRIVE: Orin is 8.7, Thor is 10.1 to CUDA 12 and 11.0 to CUDA 13. They share no machine
// code with other GPUs of their major version.
bool is_tegra(int capability) { return capability == 87 || capability == 101 || capability == 110; }

// One of kCudaArchs.
struct BuiltArch {
  int capability = 0;
  bool ptx = false;
  bool arch_specific = false;  // sm_90a: runs on 9.0 and on nothing else

  explicit BuiltArch(const std::string& name)
      : capability(std::atoi(name.c_str() + name.find('_') + 1)),
        ptx(name.rfind("compute_", 0) == 0),
        arch_specific(name.back() == 'a') {}

  bool runs_on(int compute_capability) const {
    if (arch_specific) return capability == compute_capability;
    // Machine code runs on later minor versions of its major version; PTX on everything later.
    const bool same_code = capability / 10 == compute_capability / 10 &&
                           is_tegra(capability) == is_tegra(compute_capability);
    return capability <= compute_capability && (ptx || same_code);
  }
};

const std::vector<BuiltArch>& built_archs() {
  static const std::vector<BuiltArch> archs = [] {
    std::vector<BuiltArch> found;
    for (const char* const* arch = kCudaArchs; *arch != nullptr; ++arch) found.emplace_back(*arch);
    return found;
  }();
  return archs;
}

std::string names_of_built_archs() {
  std::string list;
  for (const char* const* arch = kCudaArchs; *arch != nullptr; ++arch) {
    list += (list.empty() ? "" : ", ") + std::string(*arch);
  }
  return list;
}

std::string remedy(int compute_capability) {
  constexpr int kOldest = 80;
  if (compute_capability < kOldest) return "GPUs of compute capability 8.0 or later can be used";
  const std::string arch = std::to_string(compute_capability);
  std::string archs = arch;
  for (const char* const* specific = kSpecificArchs; *specific != nullptr; ++specific) {
    if (std::atoi(*specific) == compute_capability) archs += std::string(";") + *specific;
  }
  return "build it with ANYFLASH_ARCHS=" + (archs == arch ? arch : "'" + archs + "'") +
         ", or install a newer release";
}

}  // namespace

// What every GPU needs is code that is not specific to an architecture: appending to a cache, say,
// and the features that only the kernels for all GPUs have.
bool built_for(int compute_capability) {
  const auto& archs = built_archs();
  return std::any_of(archs.begin(), archs.end(), [&](const BuiltArch& arch) {
    return !arch.arch_specific && arch.runs_on(compute_capability);
  });
}

bool built_for(const KernelFamily& family, int compute_capability) {
  if (!family.gpus.contain(compute_capability)) return false;
  const auto& archs = built_archs();
  return std::any_of(archs.begin(), archs.end(), [&](const BuiltArch& arch) {
    return arch.arch_specific == family.arch_specific && arch.runs_on(compute_capability);
  });
}

void check_built_for(int index) {
  const DeviceProperties& device = device_properties(index);
  const int cc = device.compute_capability;
  if (built_for(cc)) return;
  throw Error(ErrorCode::kUnsupported, "CUDA device " + std::to_string(index) + " (" + device.name +
                                           ") has compute capability " + std::to_string(cc / 10) +
                                           "." + std::to_string(cc % 10) +
                                           "; this build holds code for " + names_of_built_archs() +
                                           "; " + remedy(cc));
}

}  // namespace anyflash
