// The C ABI in tvm-ffi's calling convention: tvm_ffi.load_module of this library, or the same in
// another language, gives the functions whose symbols begin with __tvm_ffi_.
//
//   forward(q, k, v, out, lse, *options)                          what anyflash.h says of
//   backward(dout, q, k, v, out, lse, dq, dk, dv, *options)       anyflash_forward, and so on;
//   forward_with_kvcache(q, k_cache, v_cache, out, lse, *options) lse may be None, and v_cache
//   merge_states(out_a, lse_a, out_b, lse_b, out, lse, *options)
//   forward_workspace_size(...), ...                              bytes, for the same arguments
//   version()
//
// Options are names, each with its value behind it: "causal", True, "softmax_scale", 0.1. They are
// the fields of the C ABI's options (options.h), and `workspace`, a uint8 tensor. Where there is
// none, memory for a GPU comes from the allocator that the caller's framework gives tvm-ffi. The
// work goes to tvm-ffi's current stream.
//
// What libtvm_ffi has is found in the process that loads this library: nothing is linked. There are
// no exceptions and nothing of the C++ library, so that no second copy of it comes along.
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "anyflash/anyflash.h"
#include "arguments.h"
#include "options.h"

namespace anyflash_tvm_ffi {

namespace {

// What went wrong in the C ABI.
int raise_status(anyflash_status status) {
  switch (status) {
    case ANYFLASH_OK:
      return 0;
    case ANYFLASH_INVALID_VALUE:
      return raise("ValueError", anyflash_last_error());
    case ANYFLASH_INVALID_TYPE:
      return raise("TypeError", anyflash_last_error());
    case ANYFLASH_UNSUPPORTED:
      return raise("NotImplementedError", anyflash_last_error());
    default:
      return raise("RuntimeError", anyflash_last_error());
  }
}

anyflash_status workspace_size(const Signature& signature, const Call& call, std::size_t* bytes) {
  const DLTensor* const* t = call.tensors;
  const Options& o = call.options;
  switch (signature.function) {
    case kForward:
      return anyflash_forward_workspace_size(t[0], t[1], t[2], t[3], t[4], &o.forward, bytes);
    case kBackward:
      return anyflash_backward_workspace_size(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8],
                                              &o.forward, &o.backward, bytes);
    case kKvCache:
      return anyflash_forward_with_kvcache_workspace_size(t[0], t[1], t[2], t[3], t[4], &o.forward,
                                                          &o.cache, bytes);
    default:
      *bytes = 0;
      return ANYFLASH_OK;
  }
}

anyflash_status run(const Signature& signature, const Call& call, void* workspace,
                    std::size_t bytes) {
  const DLTensor* const* t = call.tensors;
  const Options& o = call.options;
  switch (signature.function) {
    case kForward:
      return anyflash_forward(t[0], t[1], t[2], t[3], t[4], &o.forward, workspace, bytes);
    case kBackward:
      return anyflash_backward(t[0], t[1], t[2], t[3], t[4], t[5], t[6], t[7], t[8], &o.forward,
                               &o.backward, workspace, bytes);
    case kKvCache:
      return anyflash_forward_with_kvcache(t[0], t[1], t[2], t[3], t[4], &o.forward, &o.cache,
                                           workspace, bytes);
    default:
      return anyflash_merge_states(t[0], t[1], t[2], t[3], t[4], t[5], &o.merge);
  }
}

int run_in_given(const Signature& signature, const Call& call) {
  const DLTensor& given = *call.options.workspace;
  const DLDevice device = call.tensors[0]->device;
  const bool is_bytes = given.dtype.code == kDLUInt && given.dtype.bits == 8 &&
                        given.dtype.lanes == 1 && given.ndim == 1;
  if (!is_bytes || (given.strides != nullptr && given.shape[0] > 1 && given.strides[0] != 1)) {
    return refuse("TypeError", "%s: workspace must be uint8, one-dimensional and contiguous",
                  signature.name);
  }
  if (given.device.device_type != device.device_type ||
      given.device.device_id != device.device_id) {
    return refuse("ValueError",
                  "%s: workspace is on device (%d, %d), %s on (%d, %d); one device "
                  "is allowed",
                  signature.name, given.device.device_type, given.device.device_id,
                  signature.tensors[0], device.device_type, device.device_id);
  }
  char* const data = static_cast<char*>(given.data) + given.byte_offset;
  return raise_status(run(signature, call, data, static_cast<std::size_t>(given.shape[0])));
}

// Memory on a GPU from the allocator that tvm-ffi was given. It may be handed back at once: who
// takes it next works on the same stream.
int run_in_allocated(const Signature& signature, const Call& call, std::size_t bytes) {
  int64_t shape = static_cast<int64_t>(bytes);
  DLTensor prototype = {};
  prototype.device = call.tensors[0]->device;
  prototype.ndim = 1;
  prototype.dtype = {kDLUInt, 8, 1};
  prototype.shape = &shape;
  TVMFFIObjectHandle memory = nullptr;
  if (TVMFFIEnvTensorAlloc(&prototype, &memory) != 0) {
    return refuse(
        "RuntimeError",
        "%s: it needs %zu bytes on the tensors' device, and tvm-ffi has no allocator here "
        "or no memory; pass workspace",
        signature.name, bytes);
  }
  const DLTensor& tensor = *TVMFFITensorGetDLTensorPtr(memory);
  const anyflash_status status =
      run(signature, call, static_cast<char*>(tensor.data) + tensor.byte_offset, bytes);
  TVMFFIObjectDecRef(memory);
  return raise_status(status);
}

int call(const Signature& signature, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  Call call;
  if (read(signature, args, count, call) != 0) return kFailed;
  *result = {};  // None
  if (call.options.workspace != nullptr) return run_in_given(signature, call);
  std::size_t bytes = 0;
  const anyflash_status status = workspace_size(signature, call, &bytes);
  if (status != ANYFLASH_OK) return raise_status(status);
  if (bytes == 0) return raise_status(run(signature, call, nullptr, 0));
  if (!is_host(call.tensors[0]->device)) return run_in_allocated(signature, call, bytes);
  void* const memory = std::malloc(bytes);
  if (memory == nullptr) {
    return refuse("MemoryError", "%s: no memory for %zu bytes", signature.name, bytes);
  }
  const anyflash_status done = run(signature, call, memory, bytes);
  std::free(memory);
  return raise_status(done);
}

int ask(const Signature& signature, const TVMFFIAny* args, int32_t count, TVMFFIAny* result) {
  Call call;
  if (read(signature, args, count, call) != 0) return kFailed;
  std::size_t bytes = 0;
  const anyflash_status status = workspace_size(signature, call, &bytes);
  if (status != ANYFLASH_OK) return raise_status(status);
  *result = {};
  result->type_index = kTVMFFIInt;
  result->v_int64 = static_cast<int64_t>(bytes);
  return 0;
}

}  // namespace

}  // namespace anyflash_tvm_ffi

extern "C" {

#define ANYFLASH_EXPORT(name, action, signature)                                       \
  TVM_FFI_DLL_EXPORT int __tvm_ffi_##name(void*, const TVMFFIAny* args, int32_t count, \
                                          TVMFFIAny* result) {                         \
    return anyflash_tvm_ffi::action(anyflash_tvm_ffi::signature, args, count, result); \
  }

ANYFLASH_EXPORT(forward, call, kForwardSignature)
ANYFLASH_EXPORT(backward, call, kBackwardSignature)
ANYFLASH_EXPORT(forward_with_kvcache, call, kKvCacheSignature)
ANYFLASH_EXPORT(merge_states, call, kMergeSignature)
ANYFLASH_EXPORT(forward_workspace_size, ask, kForwardSignature)
ANYFLASH_EXPORT(backward_workspace_size, ask, kBackwardSignature)
ANYFLASH_EXPORT(forward_with_kvcache_workspace_size, ask, kKvCacheSignature)

#undef ANYFLASH_EXPORT

TVM_FFI_DLL_EXPORT int __tvm_ffi_version(void*, const TVMFFIAny*, int32_t, TVMFFIAny* result) {
  const TVMFFIByteArray version{anyflash_version(), std::strlen(anyflash_version())};
  return TVMFFIStringFromByteArray(&version, result);
}

}  // extern "C"
