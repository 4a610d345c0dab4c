#include "convert.h"

#include <nanobind/stl/string.h>

#include <cstddef>
#include <string>
#include <vector>

#include "anyflash/error.h"
#include "describe.h"
#include "memory.h"

namespace anyflash::python {

namespace {

using Code = nb::dlpack::dtype_code;

bool convert_dtype(nb::dlpack::dtype type, bool as_bits, DType& result) {
  struct Known {
    Code code;
    int bits;
    DType dtype;
  };
  static constexpr Known kKnown[] = {
      {Code::Float, 32, DType::kFloat32},
      {Code::Float, 16, DType::kFloat16},
      {Code::Bfloat, 16, DType::kBFloat16},
      {Code::Float, 64, DType::kFloat64},
      {Code::Bool, 8, DType::kBool},
      {Code::UInt, 8, DType::kBool},
      {Code::Int, 32, DType::kInt32},
      {Code::Int, 64, DType::kInt64},
      {Code::UInt, 64, DType::kInt64},
      {Code::Int, 8, DType::kInt8},
      {Code::Float8_E4M3FN, 8, DType::kFloat8E4M3},
  };
  if (type.lanes != 1) return false;
  const auto code = static_cast<Code>(type.code);
  if (as_bits && code == Code::UInt && (type.bits == 16 || type.bits == 8)) {
    result = type.bits == 16 ? DType::kBFloat16 : DType::kFloat8E4M3;
    return true;
  }
  for (const Known& known : kKnown) {
    if (known.code == code && known.bits == type.bits) {
      result = known.dtype;
      return true;
    }
  }
  return false;
}

std::string dtype_text(nb::dlpack::dtype type) {
  static const char* const kNames[] = {"int",    "uint",    "float", "opaque",
                                       "bfloat", "complex", "bool"};
  return (type.code < std::size(kNames) ? kNames[type.code] : "type") + std::to_string(type.bits);
}

Code dlpack_code(DType dtype) {
  switch (dtype) {
    case DType::kBFloat16:
      return Code::Bfloat;
    case DType::kBool:
      return Code::Bool;
    case DType::kInt8:
    case DType::kInt32:
    case DType::kInt64:
      return Code::Int;
    case DType::kFloat8E4M3:
      return Code::Float8_E4M3FN;
    default:
      return Code::Float;
  }
}

nb::dlpack::dtype dlpack_dtype(DType dtype) {
  nb::dlpack::dtype type{};
  type.code = static_cast<uint8_t>(dlpack_code(dtype));
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

Array import_array(nb::handle object, const char* argument, bool as_bits, bool writable) {
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
  if (!convert_dtype(array.owner.dtype(), as_bits, view.dtype)) {
    invalid_type(argument,
                 "is " + dtype_text(array.owner.dtype()) + ", which anyflash does not know");
  }
  if (!convert_device(array.owner, view.device)) {
    invalid_type(argument, "is on a device of DLPack type " +
                               std::to_string(array.owner.device_type()) +
                               "; CPU and CUDA devices are allowed");
  }
  if (array.owner.ndim() > kMaxRank) {
    throw Error(ErrorCode::kInvalidValue, std::string(argument) + " has " +
                                              std::to_string(array.owner.ndim()) +
                                              " dimensions; at most 4 are allowed");
  }
  view.data = const_cast<void*>(array.owner.data());
  view.rank = static_cast<int>(array.owner.ndim());
  for (int i = 0; i < view.rank; ++i) {
    view.shape[i] = static_cast<int64_t>(array.owner.shape(i));
    view.stride[i] = array.owner.stride(i);
  }
  return array;
}

nb::tuple describe(nb::handle object) {
  nb::ndarray<nb::ro> array;
  if (!nb::try_cast(object, array, false)) {
    PyErr_Clear();
    invalid_type("array", "cannot be read through DLPack");
  }
  nb::list shape;
  for (std::size_t i = 0; i < array.ndim(); ++i) shape.append(array.shape(i));
  DType dtype;
  const bool known = convert_dtype(array.dtype(), false, dtype);
  return nb::make_tuple(nb::tuple(shape), known ? name(dtype) : dtype_text(array.dtype()));
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
