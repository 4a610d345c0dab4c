// What is built and what this machine can run.
#include <algorithm>
#include <utility>

#include "anyflash/attention.h"
#include "anyflash/version.h"
#include "cpu_features.h"
#include "device.h"
#include "kernel_table.h"
#include "threads.h"

namespace anyflash {

namespace {

// "sm80", "cpu-avx2".
std::string arch_name(const KernelDescriptor& kernel) {
  const KernelFamily& family = *kernel.family;
  return family.is_gpu() ? family.name : std::string(family.name) + "-" + name(kernel.isa);
}

}  // namespace

BuildInfo build_info() {
  BuildInfo info;
  info.version = ANYFLASH_VERSION_STRING;
  info.cuda_version = cuda_version();
  info.cuda = !info.cuda_version.empty();
  for (const char* const* arch = kCudaArchs; *arch != nullptr; ++arch) {
    info.cuda_archs.push_back(*arch);
  }
  for (const KernelDescriptor* kernel : all_kernels()) {
    if (kernel->family->is_gpu()) continue;
    const std::string isa = name(kernel->isa);
    if (std::find(info.cpu_isas.begin(), info.cpu_isas.end(), isa) == info.cpu_isas.end()) {
      info.cpu_isas.push_back(isa);
    }
  }
  info.cpu_isa = name(best_isa());
  info.cpu_threads = default_threads();

  const DeviceList devices = list_devices();
  info.device_error = devices.error;
  for (int i = 0; i < devices.count; ++i) {
    const DeviceProperties& p = device_properties(i);
    info.devices.push_back({i, p.name, p.compute_capability, built_for(p.compute_capability)});
  }
  return info;
}

std::vector<KernelInfo> kernels() {
  std::vector<KernelInfo> result;
  for (const KernelDescriptor* kernel : all_kernels()) {
    KernelInfo info;
    info.name = kernel->name;
    info.arch = arch_name(*kernel);
    info.op = kernel->prefill ? "prefill" : name(kernel->op);
    info.dtype = kernel->dtype;
    info.head_dim = kernel->head_dim;
    info.head_dim_v = kernel->head_dim_v;
    info.features = feature_names(kernel->features);
    info.tile_config = name(kernel->tile_config);
    info.bits_group = kernel->bits_group;
    info.block_m = kernel->tile.block_m;
    info.block_n = kernel->tile.block_n;
    info.warps = kernel->tile.warps;
    info.smem_bytes = kernel->smem_bytes;
    info.launches = launches_of(*kernel);
    result.push_back(std::move(info));
  }
  return result;
}

}  // namespace anyflash
