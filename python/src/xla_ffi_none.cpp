// Without XLA's headers.
#include "xla_ffi.h"

namespace anyflash::python {

nanobind::list xla_handlers() { return {}; }

}  // namespace anyflash::python
