#include "torch_shim.h"

#include <string>

#include "anyflash/error.h"

#if !defined(_WIN32)
#include <dlfcn.h>
#endif

namespace anyflash::python {

namespace {

#if defined(_WIN32)
void* loaded(const char*) { return nullptr; }
void* symbol(void*, const char*) { return nullptr; }
#else
// Symbols of the libraries that this one needs are found, too.
void* loaded(const char* path) { return dlopen(path, RTLD_LAZY | RTLD_NOLOAD); }
void* symbol(void* handle, const char* name) { return dlsym(handle, name); }
#endif

}  // namespace

template <class Function>
void TorchShim::find(Function*& function, const char* name, bool needed) const {
  const std::string full = std::string("aoti_torch_") + name;
  void* const found = handle_ == nullptr ? nullptr : symbol(handle_, full.c_str());
  if (found == nullptr && needed) {
    throw Error(ErrorCode::kUnsupported, "this PyTorch has no " + full);
  }
  function = reinterpret_cast<Function*>(found);
}

std::int32_t TorchShim::number(const char* name) const {
  std::int32_t (*function)() = nullptr;
  find(function, name);
  return function();
}

TorchShim::TorchShim(const char* path) : handle_(loaded(path)) {
  find(get_data_ptr, "get_data_ptr");
  find(get_dim, "get_dim");
  find(get_sizes, "get_sizes");
  find(get_strides, "get_strides");
  find(get_dtype, "get_dtype");
  find(get_device_type, "get_device_type");
  find(get_device_index, "get_device_index");
  find(empty_strided, "empty_strided");
  find(new_uninitialized_tensor, "new_uninitialized_tensor");
  find(delete_tensor_object, "delete_tensor_object");
  find(get_current_cuda_stream, "get_current_cuda_stream", false);
  find(library_init_impl, "library_init_impl");
  find(library_impl, "library_impl");
  find(delete_library_object, "delete_library_object");
  cpu = number("device_type_cpu");
  cuda = number("device_type_cuda");
  float64 = number("dtype_float64");
  float32 = number("dtype_float32");
  float16 = number("dtype_float16");
  bfloat16 = number("dtype_bfloat16");
  uint8 = number("dtype_uint8");
  uint64 = number("dtype_uint64");
}

}  // namespace anyflash::python
