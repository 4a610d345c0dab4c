#include "convert.h"

#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <vector>

#include "anyflash/error.h"
#include "describe.h"
#include "dlpack.h"
#include "memory.h"

namespace anyflash::python {

namespace {

using Code = nb::dlpack::dtype_code;

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
    case DType::kFloat8E5M2:
      return Code::Float8_E5M2;
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

[[noreturn]] void invalid(ErrorCode code, const std::string& argument, const std::string& text) {
  throw Error(code, argument.empty() ? text : argument + " " + text);
}

// The text of Python's current exception, which is cleared.
std::string take_error() {
  const nb::python_error error;
  return nb::cast<std::string>(nb::str(error.value()));
}

// A producer's capsule. Versions are asked for first only where they tell something, whether the
// array is read-only: not every producer knows the keyword, and the call without it is the fastest.
nb::object export_array(nb::handle object, const char* argument, bool writable) {
  if (PyCapsule_CheckExact(object.ptr())) return nb::borrow(object);
  static PyObject* const method_name = PyUnicode_InternFromString("__dlpack__");
  enum Keywords { kNone, kVersion, kVersionAndCopy };
  constexpr Keywords kToRead[] = {kNone, kVersion, kVersionAndCopy};
  constexpr Keywords kToWrite[] = {kVersion, kVersionAndCopy, kNone};
  std::string reason;
  bool refused = false;  // rather than not understood
  for (const Keywords keywords : writable ? kToWrite : kToRead) {
    PyObject* capsule = nullptr;
    if (keywords == kNone) {
      capsule = PyObject_CallMethodObjArgs(object.ptr(), method_name, nullptr);
    } else {
      nb::dict given;
      given["max_version"] = nb::make_tuple(DLPACK_MAJOR_VERSION, DLPACK_MINOR_VERSION);
      if (keywords == kVersionAndCopy) given["copy"] = nb::none();
      capsule = PyObject_Call(object.attr("__dlpack__").ptr(), nb::tuple().ptr(), given.ptr());
    }
    if (capsule != nullptr) return nb::steal(capsule);
    const bool refuses = PyErr_ExceptionMatches(PyExc_BufferError);
    if (!refuses && !PyErr_ExceptionMatches(PyExc_TypeError)) nb::raise_python_error();
    const std::string text = take_error();
    if (reason.empty() || (refuses && !refused)) reason = text;
    refused |= refuses;
  }
  invalid(ErrorCode::kInvalidType, argument, "cannot be read through DLPack: " + reason);
}

template <class Managed>
Owner own(void* managed) {
  return {managed, [](void* p) {
            auto* const tensor = static_cast<Managed*>(p);
            if (tensor->deleter != nullptr) tensor->deleter(tensor);
          }};
}

// Takes the tensor out of the capsule. flags: those of a versioned one.
DLTensor consume(nb::handle capsule, const char* argument, Owner& owner, std::uint64_t& flags) {
  static constexpr char kUnversioned[] = "dltensor";
  static constexpr char kVersioned[] = "dltensor_versioned";
  PyObject* const p = capsule.ptr();
  flags = 0;
  if (PyCapsule_IsValid(p, kUnversioned)) {
    auto* const managed = static_cast<DLManagedTensor*>(PyCapsule_GetPointer(p, kUnversioned));
    PyCapsule_SetName(p, "used_dltensor");
    owner = own<DLManagedTensor>(managed);
    return managed->dl_tensor;
  }
  if (!PyCapsule_IsValid(p, kVersioned)) {
    invalid(ErrorCode::kInvalidType, argument,
            "cannot be read through DLPack: its __dlpack__ gives no capsule of a tensor, or one "
            "that was read before");
  }
  auto* const managed = static_cast<DLManagedTensorVersioned*>(PyCapsule_GetPointer(p, kVersioned));
  if (managed->version.major != DLPACK_MAJOR_VERSION) {
    // Nothing else may be read; the capsule, which still owns the tensor, frees it.
    invalid(ErrorCode::kInvalidType, argument,
            "is exported as DLPack " + std::to_string(managed->version.major) + "." +
                std::to_string(managed->version.minor) + "; versions " +
                std::to_string(DLPACK_MAJOR_VERSION) + ".x and those before are allowed");
  }
  PyCapsule_SetName(p, "used_dltensor_versioned");
  owner = own<DLManagedTensorVersioned>(managed);
  flags = managed->flags;
  return managed->dl_tensor;
}

}  // namespace

Array import_array(nb::handle object, const char* argument, std::uint8_t as_bits, bool writable) {
  Array array;
  std::uint64_t flags;
  DLTensor tensor = consume(export_array(object, argument, writable), argument, array.owner, flags);
  if (writable && (flags & DLPACK_FLAG_BITMASK_READ_ONLY) != 0) {
    invalid(ErrorCode::kInvalidValue, argument, "is read-only");
  }
  if (writable && (flags & DLPACK_FLAG_BITMASK_IS_COPIED) != 0) {
    invalid(ErrorCode::kInvalidValue, argument,
            "is exported as a copy, so that what is written to it would be lost");
  }
  if (as_bits != 0 && tensor.dtype.code == kDLUInt) tensor.dtype.code = as_bits;
  array.view = view_of(&tensor, argument, "anyflash knows no such dtype");
  return array;
}

nb::tuple describe(nb::handle object) {
  Owner owner{nullptr, nullptr};
  std::uint64_t flags;
  const DLTensor tensor = consume(export_array(object, "", false), "", owner, flags);
  nb::list shape;
  for (int i = 0; i < tensor.ndim; ++i) shape.append(tensor.shape[i]);
  DType dtype;
  const bool known = dtype_of(tensor.dtype, dtype);
  return nb::make_tuple(nb::tuple(shape), known ? name(dtype) : text_of(tensor.dtype));
}

std::uintptr_t address(nb::handle object) {
  Owner owner{nullptr, nullptr};
  std::uint64_t flags;
  const DLTensor tensor = consume(export_array(object, "", false), "", owner, flags);
  return reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
}

DType dtype_named(const std::string& dtype, const std::string& argument) {
  static constexpr DType kDTypes[] = {
      DType::kFloat64, DType::kFloat32, DType::kFloat16, DType::kBFloat16,   DType::kBool,
      DType::kInt32,   DType::kInt64,   DType::kInt8,    DType::kFloat8E4M3, DType::kFloat8E5M2};
  const auto known = std::find_if(std::begin(kDTypes), std::end(kDTypes),
                                  [&](DType known_dtype) { return dtype == name(known_dtype); });
  if (known == std::end(kDTypes)) {
    throw Error(ErrorCode::kInvalidType,
                argument + " is " + dtype + ", which anyflash does not know");
  }
  return *known;
}

nb::object new_array(const nb::tuple& shape, const std::string& dtype_name,
                     const std::string& device_kind, int device_index) {
  const DType dtype = dtype_named(dtype_name, "a new array");
  std::vector<std::size_t> extents;
  std::size_t bytes = static_cast<std::size_t>(bytes_of(dtype));
  for (const nb::handle extent : shape) {
    extents.push_back(nb::cast<std::size_t>(extent));
    bytes *= extents.back();
  }
  struct Memory {
    Device device;
    void* data;
  };
  const Device device{device_kind == "cpu" ? DeviceType::kCpu : DeviceType::kCuda, device_index};
  auto* const memory = new Memory{device, allocate(device, bytes)};
  const nb::capsule owner(memory, [](void* p) noexcept {
    auto* const m = static_cast<Memory*>(p);
    deallocate(m->device, m->data);
    delete m;
  });
  const int dlpack_device =
      device.type == DeviceType::kCpu ? nb::device::cpu::value : nb::device::cuda::value;
  return nb::cast(nb::ndarray<nb::array_api>(memory->data, extents.size(), extents.data(), owner,
                                             nullptr, dlpack_dtype(dtype), dlpack_device,
                                             device_index));
}

}  // namespace anyflash::python
