#include "info.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>

#include "anyflash/attention.h"
#include "describe.h"
#include "tuned_tiles.h"

namespace anyflash::python {

namespace nb = nanobind;

namespace {

nb::list kernel_dicts() {
  nb::list result;
  for (const KernelInfo& kernel : kernels()) {
    nb::dict d;
    d["name"] = kernel.name;
    d["arch"] = kernel.arch;
    d["op"] = kernel.op;
    d["dtype"] = name(kernel.dtype);
    d["head_dim"] = kernel.head_dim;
    d["head_dim_v"] = kernel.head_dim_v;
    d["features"] = kernel.features;
    d["tile_config"] = kernel.tile_config;
    d["bits_group"] = kernel.bits_group;
    d["block_m"] = kernel.block_m;
    d["block_n"] = kernel.block_n;
    d["warps"] = kernel.warps;
    d["smem_bytes"] = kernel.smem_bytes;
    d["launches"] = kernel.launches;
    result.append(d);
  }
  return result;
}

nb::list device_dicts(const BuildInfo& info) {
  nb::list result;
  for (const DeviceInfo& device : info.devices) {
    nb::dict d;
    d["index"] = device.index;
    d["name"] = device.name;
    d["compute_capability"] = std::to_string(device.compute_capability / 10) + "." +
                              std::to_string(device.compute_capability % 10);
    d["supported"] = device.supported;
    result.append(d);
  }
  return result;
}

}  // namespace

nb::dict build_info_dict() {
  const BuildInfo info = build_info();
  nb::dict result;
  result["version"] = info.version;
  result["cuda"] = nb::none();
  if (info.cuda) {
    nb::dict cuda;
    cuda["runtime_version"] = info.cuda_version;
    cuda["archs"] = info.cuda_archs;
    result["cuda"] = cuda;
  }
  nb::dict cpu;
  cpu["isa"] = info.cpu_isa;
  cpu["compiled"] = info.cpu_isas;
  cpu["threads"] = info.cpu_threads;
  result["cpu"] = cpu;
  result["kernels"] = kernel_dicts();
  nb::dict tuned;
  tuned["grid_tile"] = kGridTile;
  tuned["short_rows"] = kShortRows;
  result["tuned_tiles"] = tuned;
  result["devices"] = device_dicts(info);
  result["device_error"] = nb::none();
  if (!info.device_error.empty()) result["device_error"] = info.device_error;
  return result;
}

}  // namespace anyflash::python
