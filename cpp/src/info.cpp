// What is built and what this machine can run.
#include <omp.h>

#include <algorithm>

#include "anyflash/attention.h"
#include "anyflash/version.h"
#include "cpu_features.h"
#include "device.h"
#include "kernel_table.h"

namespace anyflash {

namespace {

std::string arch_name(const KernelDescriptor& row) {
  return row.arch == Arch::kCpu ? std::string("cpu-") + name(row.isa) : "sm80";
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
  for (const CountedKernel& kernel : counted_kernels()) {
    if (kernel.row->arch != Arch::kCpu) continue;
    const std::string isa = name(kernel.row->isa);
    if (std::find(info.cpu_isas.begin(), info.cpu_isas.end(), isa) == info.cpu_isas.end()) {
      info.cpu_isas.push_back(isa);
    }
  }
  info.cpu_isa = name(best_isa());
  info.cpu_threads = omp_get_max_threads();

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
  for (const CountedKernel& kernel : counted_kernels()) {
    const KernelDescriptor& row = *kernel.row;
    result.push_back({row.name, arch_name(row), name(row.op), row.dtype, row.head_dim,
                      row.head_dim_v, feature_names(row.features), name(row.tile_config),
                      row.tile.block_m, row.tile.block_n, row.tile.warps, row.smem_bytes,
                      kernel.launches});
  }
  return result;
}

}  // namespace anyflash
