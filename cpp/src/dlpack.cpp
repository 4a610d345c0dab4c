// Conversion of DLPack's tensor description.
#include "dlpack.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "anyflash/error.h"
#include "describe.h"

namespace anyflash {

namespace {

bool device_of(const DLDevice& device, Device& result) {
  switch (device.device_type) {
    case kDLCPU:
    case kDLCUDAHost:
      result = {DeviceType::kCpu, 0};
      return true;
    case kDLCUDA:
    case kDLCUDAManaged:
      result = {DeviceType::kCuda, device.device_id};
      return true;
    default:
      return false;
  }
}

// Types that DLPack adds later have no name here.
std::string name_of(DLDeviceType type) {
  switch (type) {
    case kDLOpenCL:
      return "opencl";
    case kDLVulkan:
      return "vulkan";
    case kDLMetal:
      return "metal";
    case kDLVPI:
      return "vpi";
    case kDLROCM:
      return "rocm";
    case kDLROCMHost:
      return "rocm_host";
    case kDLExtDev:
      return "ext_dev";
    case kDLOneAPI:
      return "oneapi";
    case kDLWebGPU:
      return "webgpu";
    case kDLHexagon:
      return "hexagon";
    case kDLMAIA:
      return "maia";
    case kDLTrn:
      return "trn";
    default:
      return "DLPack " + std::to_string(static_cast<int>(type));
  }
}

}  // namespace

bool dtype_of(const DLDataType& type, DType& result) {
  struct Known {
    DLDataTypeCode code;
    int bits;
    DType dtype;
  };
  static constexpr Known kKnown[] = {
      {kDLFloat, 64, DType::kFloat64},
      {kDLFloat, 32, DType::kFloat32},
      {kDLFloat, 16, DType::kFloat16},
      {kDLBfloat, 16, DType::kBFloat16},
      {kDLBool, 8, DType::kBool},
      {kDLUInt, 8, DType::kBool},
      {kDLInt, 32, DType::kInt32},
      {kDLInt, 64, DType::kInt64},
      {kDLUInt, 64, DType::kInt64},
      {kDLInt, 8, DType::kInt8},
      {kDLFloat8_e4m3fn, 8, DType::kFloat8E4M3},
      {kDLFloat8_e5m2, 8, DType::kFloat8E5M2},
  };
  for (const Known& known : kKnown) {
    if (type.code == known.code && type.bits == known.bits && type.lanes == 1) {
      result = known.dtype;
      return true;
    }
  }
  return false;
}

std::string text_of(const DLDataType& type) {
  static const char* const kCodes[] = {"int",    "uint",    "float", "opaque",
                                       "bfloat", "complex", "bool"};
  // Types of one size, which their names hold.
  if (type.code == kDLFloat8_e4m3fn && type.lanes == 1) return "float8_e4m3fn";
  if (type.code == kDLFloat8_e5m2 && type.lanes == 1) return "float8_e5m2";
  const std::string code = type.code < std::size(kCodes)
                               ? kCodes[type.code]
                               : "type code " + std::to_string(type.code) + ", bits ";
  return code + std::to_string(type.bits) +
         (type.lanes == 1 ? "" : "x" + std::to_string(type.lanes));
}

TensorView dense_view(const int64_t* extents, int64_t rank, const char* argument) {
  if (rank < 0 || rank > kMaxRank) {
    throw Error(ErrorCode::kInvalidValue, std::string(argument) + " has " + std::to_string(rank) +
                                              " dimensions; at most " + std::to_string(kMaxRank) +
                                              " are allowed");
  }
  TensorView view;
  view.rank = static_cast<int>(rank);
  uint64_t stride = 1;  // may wrap
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = extents[i];
    view.stride[i] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(extents[i]);
  }
  return view;
}

TensorView view_of(const DLTensor* tensor, const char* argument, const char* allowed) {
  const std::string what = argument;
  if (tensor == nullptr) throw Error(ErrorCode::kInvalidValue, what + " is NULL");
  DType dtype{};
  const bool known = dtype_of(tensor->dtype, dtype);
  if (allowed == nullptr && (!known || !is_float(dtype))) {
    // Here, where the type still has DLPack's name: bytes may be called bool or uint8.
    throw Error(ErrorCode::kInvalidType,
                what + " is " + text_of(tensor->dtype) + "; " + kFloatsAllowed);
  }
  if (!known) {
    throw Error(ErrorCode::kInvalidType, what + " is " + text_of(tensor->dtype) + "; " + allowed);
  }
  Device device;
  if (!device_of(tensor->device, device)) {
    throw Error(ErrorCode::kInvalidType, what + " is on a device of type " +
                                             name_of(tensor->device.device_type) +
                                             "; CPU and CUDA devices are allowed");
  }
  if (tensor->ndim > 0 && tensor->shape == nullptr) {
    throw Error(ErrorCode::kInvalidValue, what + " has a NULL shape pointer");
  }
  TensorView view = dense_view(tensor->shape, tensor->ndim, argument);
  view.dtype = dtype;
  view.device = device;
  if (tensor->strides != nullptr) std::copy_n(tensor->strides, view.rank, view.stride.begin());
  if (tensor->data != nullptr) {
    // As numbers: an offset that no memory is as large as must not be undefined behaviour.
    const auto address = reinterpret_cast<std::uintptr_t>(tensor->data);
    view.data = reinterpret_cast<void*>(address + static_cast<std::uintptr_t>(tensor->byte_offset));
  }
  return view;
}

}  // namespace anyflash
