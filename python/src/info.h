// What is built, as Python dictionaries.
#pragma once

#include <nanobind/nanobind.h>

namespace anyflash::python {

nanobind::dict build_info_dict();

}  // namespace anyflash::python
