#include "convert.h"

#include <cstddef>
#include <string>
#include <vector>

#include "anyflash/error.h"
#include "describe.h"
#include "memory.h"

namespace anyflash::python {

namespace {

using Code = nb::dlpack::dtype_code;

bool convert_dtype(nb::dlpack::dtype type, bool bf16_bits, DType& result) {
  if (type.lanes != 1) return false;
  const auto code = static_cast<Code>(type.code);
  if (bf16_bits && code == Code::UInt && type.bits == 16) result = DType::kBFloat16;
  else if (code == Code::Bfloat && type.bits == 16) result = DType::kBFloat16;
  else if (code == Code::Float && type.bits == 64) result = DType::kFloat64;
  else if (code == Code::Float && type.bits == 32) result = DType::kFloat32;
  else if (code == Code::Float && type.bits == 16) result = DType::kFloat16;
  else return false;
  return true;
}

std::string dtype_text(nb::dlpack::dtype type) {
  static const char* const kNames[] = {"int",    "uint",    "float", "opaque",
                                       "bfloat", "complex", "bool"};
  return (type.code < std::size(kNames) ? kNames[type.code] : "type") + std::to_string(type.bits);
}

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  nb::dlpack::dtype type{};
  type.code = static_cast<uint8_t>(dtype == DType::kBFloat16 ? Code::Bfloat : Code::Float);
  type.bits = static_cast<uint8_t>(8 * bytes_of(dtype));
  type.lanes = 1;
  return type;
}

bool convert_device(const nb::ndarray<nb::ro>& array, Device& result) {
  switch (array.device_type()) {
    case nb::device::cpu::value:
    case nb::device::cuda_host::value:
      result = {DeviceType::kCpu, 0};
      return true;
    case nb::device::cuda::value:
    case nb::device::cuda_managed::value:
      result = {DeviceType::kCuda, array.device_id()};
      return true;
    default:
      return false;
  }
}

[[noreturn]] void invalid_type(const char* argument, const std::string& text) {
  throw Error(ErrorCode::kInvalidType, std::string(argument) + " " + text);
}

}  // namespace

Array import_array(nb::handle object, const char* argument, bool bf16_bits, bool writable) {
  Array array;
  bool imported = false;
  if (writable) {
    nb::ndarray<> owner;
    imported = nb::try_cast(object, owner, false);
    if (imported) array.owner = nb::ndarray<nb::ro>(owner);
  } else {
    imported = nb::try_cast(object, array.owner, false);
  }
  if (!imported) {
    PyErr_Clear();
    invalid_type(argument, std::string("cannot be read as an array through DLPack") +
                               (writable ? ", or is read-only" : ""));
  }
  TensorView& view = array.view;
  if (!convert_dtype(array.owner.dtype(), bf16_bits, view.dtype)) {
    invalid_type(argument, "is " + dtype_text(array.owner.dtype()) +
                               "; float64, float32, float16 and bfloat16 are allowed");
  }
  if (!convert_device(array.owner, view.device)) {
    invalid_type(argument, "is on a device of DLPack type " +
                               std::to_string(array.owner.device_type()) +
                               "; CPU and CUDA devices are allowed");
  }
  if (array.owner.ndim() > kMaxRank) {
    throw Error(ErrorCode::kInvalidValue, std::string(argument) + " has " +
                                              std::to_string(array.owner.ndim()) +
                                              " dimensions; 4 are expected");
  }
  view.data = const_cast<void*>(array.owner.data());
  view.rank = static_cast<int>(array.owner.ndim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = static_cast<int64_t>(array.owner.shape(i));
    view.stride[i] = array.owner.stride(i);
  }
  return array;
}

nb::object new_array(const nb::tuple& shape, int dtype, int device_type, int device_index) {
  std::vector<std::size_t> extents;
  std::size_t bytes = static_cast<std::size_t>(bytes_of(static_cast<DType>(dtype)));
  for (const nb::handle extent : shape) {
    extents.push_back(nb::cast<std::size_t>(extent));
    bytes *= extents.back();
  }
  struct Memory {
    Device device;
    void* data;
  };
  const Device device{static_cast<DeviceType>(device_type), device_index};
  auto* const memory = new Memory{device, allocate(device, bytes)};
  const nb::capsule owner(memory, [](void* p) noexcept {
    auto* const m = static_cast<Memory*>(p);
    deallocate(m->device, m->data);
    delete m;
  });
  const int dlpack_device =
      device.type == DeviceType::kCpu ? nb::device::cpu::value : nb::device::cuda::value;
  return nb::cast(nb::ndarray<nb::array_api>(memory->data, extents.size(), extents.data(), owner,
                                             nullptr, dlpack_dtype(static_cast<DType>(dtype)),
                                             dlpack_device, device_index));
}

}  // namespace anyflash::python
