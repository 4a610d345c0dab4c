// Python arrays as TensorViews.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <memory>
#include <string>

#include "anyflash/tensor_view.h"

namespace anyflash::python {

namespace nb = nanobind;

// A tensor that was taken out of its capsule; freed by its producer's function.
using Owner = std::unique_ptr<void, void (*)(void*)>;

// Keeps the array's memory alive while its view is used. Destroyed with the GIL held.
struct Array {
  Owner owner{nullptr, nullptr};
  TensorView view;
};

// `object` is a DLPack capsule, or an object with __dlpack__; nothing is copied. as_bits: DLPack's
// code of the type that unsigned integers stand for (NumPy can export neither bfloat16 nor types of
// 8 bits); 0: they are what they say. writable: arrays that are read-only, where DLPack tells, are
// refused. Throws anyflash::Error, or what __dlpack__ raises.
Array import_array(nb::handle object, const char* argument, std::uint8_t as_bits, bool writable);

// (shape, dtype) of anything that speaks DLPack, whether anyflash could use it or not. The messages
// of its errors do not begin with a name.
nb::tuple describe(nb::handle object);

// Of its first element, of anything that speaks DLPack. Errors as describe()'s.
std::uintptr_t address(nb::handle object);

// "float32" and so on. Throws Error, which calls it the argument's.
DType dtype_named(const std::string& dtype, const std::string& argument);

// Uninitialised memory that owns itself and speaks DLPack. device_kind: "cpu" or "cuda".
nb::object new_array(const nb::tuple& shape, const std::string& dtype,
                     const std::string& device_kind, int device_index);

}  // namespace anyflash::python
