// Python arrays as TensorViews.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "anyflash/tensor_view.h"

namespace anyflash::python {

namespace nb = nanobind;

// Keeps the array's memory alive while its view is used.
struct Array {
  nb::ndarray<nb::ro> owner;
  TensorView view;
};

// `object` is a DLPack capsule, or an object with __dlpack__ or the buffer protocol; nothing is
// copied. as_bits: floats that are shown as unsigned integers of their size, bfloat16 and
// float8_e4m3fn (NumPy can export neither). writable: read-only arrays are refused. Throws
// anyflash::Error.
Array import_array(nb::handle object, const char* argument, bool as_bits, bool writable);

// (shape, dtype) of anything that speaks DLPack, whether anyflash could use it or not.
nb::tuple describe(nb::handle object);

// Uninitialised memory that owns itself and speaks DLPack.
nb::object new_array(const nb::tuple& shape, int dtype, int device_type, int device_index);

}  // namespace anyflash::python
