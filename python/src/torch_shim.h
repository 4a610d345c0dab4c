// PyTorch's stable C interface: what torch_kernel.cpp calls of it, found in the PyTorch that the
// process has loaded. Nothing is compiled or linked with PyTorch.
#pragma once

#include <cstdint>

namespace anyflash::python {

// Names and types of torch/csrc/inductor/aoti_torch/c/shim.h. A status other than 0 is an error.
struct TorchShim {
  using Tensor = struct AtenTensorOpaque*;
  using Library = struct TorchLibraryOpaque*;
  using Status = std::int32_t;
  using Value = std::uint64_t;  // StableIValue: a number's bits, or a pointer
  using Kernel = void(Value* stack, std::uint64_t inputs, std::uint64_t outputs);

  // Throws Error for a name that PyTorch lacks. path: of torch._C.
  explicit TorchShim(const char* path);

  Status (*get_data_ptr)(Tensor, void**);
  Status (*get_dim)(Tensor, std::int64_t*);
  Status (*get_sizes)(Tensor, std::int64_t**);
  Status (*get_strides)(Tensor, std::int64_t**);
  Status (*get_dtype)(Tensor, std::int32_t*);
  Status (*get_device_type)(Tensor, std::int32_t*);
  Status (*get_device_index)(Tensor, std::int32_t*);
  Status (*empty_strided)(std::int64_t dim, const std::int64_t* sizes, const std::int64_t* strides,
                          std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                          Tensor*);
  Status (*new_uninitialized_tensor)(Tensor*);
  Status (*delete_tensor_object)(Tensor);
  Status (*get_current_cuda_stream)(std::int32_t device_index, void**);  // null without CUDA

  Status (*library_init_impl)(const char* name_space, const char* key, const char* file,
                              std::uint32_t line, Library*);
  Status (*library_impl)(Library, const char* name, Kernel*);
  Status (*delete_library_object)(Library);

  std::int32_t cpu, cuda;  // device types
  std::int32_t float64, float32, float16, bfloat16, uint8, uint64;

 private:
  template <class Function>
  void find(Function*& function, const char* name, bool needed = true) const;
  std::int32_t number(const char* name) const;

  void* handle_;
};

}  // namespace anyflash::python
