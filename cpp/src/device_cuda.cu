// The GPU through the CUDA runtime, which is linked statically: without a driver every call fails
// with an error code and nothing else happens.
#include <cuda_runtime_api.h>

#include <vector>

#include "anyflash/error.h"
#include "device.h"

namespace anyflash {

namespace {

std::string version_string(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string missing_device(cudaError_t status) {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  cudaGetLastError();  // the failure is reported here and not by the next call
  const std::string needed = version_string(CUDART_VERSION);
  if (driver == 0) {
    return "no NVIDIA driver is installed on this machine; arrays on a GPU need one that supports "
           "CUDA " +
           needed;
  }
  if (status == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver supports CUDA up to " + version_string(driver) +
           ", but this build of anyflash needs CUDA " + needed +
           "; update the driver, or build anyflash with the older toolkit";
  }
  return std::string("no CUDA device can be used: ") + cudaGetErrorString(status) +
         "; nvidia-smi and CUDA_VISIBLE_DEVICES say which there are";
}

void check(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    throw Error(ErrorCode::kDevice, std::string(what) + ": " + cudaGetErrorString(status));
  }
}

// 0 if nobody knows it.
int attribute(cudaDeviceAttr which, int index) {
  int value = 0;
  return cudaDeviceGetAttribute(&value, which, index) == cudaSuccess ? value : 0;
}

DeviceProperties query(int index) {
  cudaDeviceProp p{};
  check(cudaGetDeviceProperties(&p, index), "cudaGetDeviceProperties");
  DeviceProperties properties;
  properties.name = p.name;
  properties.compute_capability = p.major * 10 + p.minor;
  properties.multiprocessors = properties.full_grid = p.multiProcessorCount;
  properties.smem_per_block = p.sharedMemPerBlockOptin;
  properties.smem_per_multiprocessor = p.sharedMemPerMultiprocessor;
  const double kilohertz = attribute(cudaDevAttrMemoryClockRate, index);
  const double bits = attribute(cudaDevAttrGlobalMemoryBusWidth, index);
  properties.memory_gigabytes_per_second = 2.0 * kilohertz * bits / 8.0 / 1e6;
  return properties;
}

std::vector<DeviceProperties> query_all() {
  const DeviceList devices = list_devices();
  if (devices.count == 0) {
    throw Error(ErrorCode::kDevice, "a CUDA array cannot be used here: " + devices.error);
  }
  std::vector<DeviceProperties> found;
  for (int i = 0; i < devices.count; ++i) found.push_back(query(i));
  return found;
}

}  // namespace

DeviceList list_devices() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess || count == 0) return {0, missing_device(status)};
  return {count, ""};
}

const DeviceProperties& device_properties(int index) {
  // Where it throws, the next call tries again.
  static const std::vector<DeviceProperties> devices = query_all();
  if (index < 0 || index >= static_cast<int>(devices.size())) {
    throw Error(ErrorCode::kDevice, "CUDA device " + std::to_string(index) +
                                        " does not exist; there are " +
                                        std::to_string(devices.size()));
  }
  return devices[static_cast<std::size_t>(index)];
}

std::string cuda_version() { return version_string(CUDART_VERSION); }

void* device_allocate(int index, std::size_t bytes) {
  const DeviceGuard guard(index);
  void* data = nullptr;
  check(cudaMalloc(&data, bytes), "cudaMalloc");
  return data;
}

// Also runs when the process ends, where the runtime may be gone: nothing to report to.
void device_free(int index, void* data) noexcept {
  int previous = 0;
  cudaGetDevice(&previous);
  cudaSetDevice(index);
  cudaFree(data);
  cudaSetDevice(previous);
}

bool is_capturing(int index, void* stream) {
  const DeviceGuard guard(index);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  const cudaError_t status = cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &capture);
  if (status == cudaErrorStreamCaptureImplicit) {  // the legacy stream beside one that captures
    cudaGetLastError();
    return true;
  }
  check(status, "cudaStreamIsCapturing");
  return capture != cudaStreamCaptureStatusNone;
}

void copy_to_host(int index, void* target, const void* source, std::size_t bytes, void* stream) {
  const DeviceGuard guard(index);
  const auto on = static_cast<cudaStream_t>(stream);
  check(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDeviceToHost, on), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(on), "cudaStreamSynchronize");
}

DeviceGuard::DeviceGuard(int index) {
  device_properties(index);  // says what is missing, if anything is
  check(cudaGetDevice(&previous_), "cudaGetDevice");
  if (previous_ == index) {
    previous_ = -1;
  } else {
    check(cudaSetDevice(index), "cudaSetDevice");
  }
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace anyflash
