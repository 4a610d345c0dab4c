// Lets one test source run in the emulator (g++) and on a GPU (nvcc -x cu -arch=sm_80). That the
// two agree is the evidence that the emulator's instructions are the hardware's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#if defined(ANYFLASH_EMULATED)
#include "emu.hpp"
#else
extern __shared__ __align__(1024) unsigned char anyflash_smem[];
#endif

namespace device {

#if defined(ANYFLASH_EMULATED)

template <class T>
T* allocate(size_t count) {
  return new T[count]();
}
template <class T>
void release(T* pointer) {
  delete[] pointer;
}

template <class... Args, class... Actual>
void launch(int blocks, int threads, size_t shared_bytes, void (*kernel)(Args...), Actual... args) {
  emu::launch(emu::Dim3(blocks), emu::Dim3(threads), shared_bytes, [=] { kernel(args...); });
}

#else

inline void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(status));
  std::exit(1);
}

template <class T>
T* allocate(size_t count) {
  void* pointer = nullptr;
  // Page-locked memory of the host, which the GPU reads and writes in place.
  check(cudaMallocHost(&pointer, count * sizeof(T)));
  std::memset(pointer, 0, count * sizeof(T));
  return static_cast<T*>(pointer);
}
template <class T>
void release(T* pointer) {
  check(cudaFreeHost(pointer));
}

template <class... Args, class... Actual>
void launch(int blocks, int threads, size_t shared_bytes, void (*kernel)(Args...), Actual... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Args>(args)...));
  check(cudaDeviceSynchronize());
}

#endif

// An array of its own, exactly as long as asked for: Address Sanitizer sees what reads past it.
template <class T>
class Array {
 public:
  explicit Array(size_t size) : data_(allocate<T>(size)), size_(size) {}
  ~Array() { release(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  T* data() { return data_; }
  size_t size() const { return size_; }
  T& operator[](size_t i) { return data_[i]; }

 private:
  T* data_;
  size_t size_;
};

}  // namespace device
