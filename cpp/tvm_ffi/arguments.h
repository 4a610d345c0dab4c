// Reading a call's arguments, in tvm-ffi's calling convention.
#pragma once

#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "options.h"

namespace anyflash_tvm_ffi {

inline constexpr int kFailed = -1;

inline int raise(const char* kind, const char* message) {
  TVMFFIErrorSetRaisedFromCStr(kind, message);
  return kFailed;
}

template <class... Values>
int refuse(const char* kind, const char* format, Values... values) {
  char message[512];
  std::snprintf(message, sizeof(message), format, values...);
  return raise(kind, message);
}

inline const char* name_of_type(int32_t type) {
  switch (type) {
    case kTVMFFINone:
      return "None";
    case kTVMFFIInt:
      return "an int";
    case kTVMFFIBool:
      return "a bool";
    case kTVMFFIFloat:
      return "a float";
    case kTVMFFIDLTensorPtr:
    case kTVMFFITensor:
      return "a tensor";
    case kTVMFFIRawStr:
    case kTVMFFISmallStr:
    case kTVMFFIStr:
      return "a string";
    default:
      return "of another type";
  }
}

// The tensor; null for None. Fails for all else.
inline bool read_tensor(const TVMFFIAny& any, const DLTensor** tensor) {
  *tensor = nullptr;
  if (any.type_index == kTVMFFITensor) {
    *tensor = TVMFFITensorGetDLTensorPtr(any.v_obj);
  } else if (any.type_index == kTVMFFIDLTensorPtr) {
    *tensor = static_cast<const DLTensor*>(any.v_ptr);
  } else {
    return any.type_index == kTVMFFINone;
  }
  return true;
}

struct Text {
  const char* data = nullptr;  // null: no string
  std::size_t size = 0;
};

inline Text text_of(const TVMFFIAny& any) {
  switch (any.type_index) {
    case kTVMFFIRawStr:
      return {any.v_c_str, std::strlen(any.v_c_str)};
    case kTVMFFISmallStr:
      return {any.v_bytes, any.small_str_len};
    case kTVMFFIStr: {
      const TVMFFIByteArray* const bytes = TVMFFIBytesGetByteArrayPtr(any.v_obj);
      return {bytes->data, bytes->size};
    }
    default:
      return {};
  }
}

template <class T>
T& field(Options& options, std::size_t offset) {
  return *reinterpret_cast<T*>(reinterpret_cast<char*>(&options) + offset);
}

// False where the value is of another kind.
inline bool set(Options& options, const Option& option, const TVMFFIAny& any) {
  const bool is_integer = any.type_index == kTVMFFIInt;
  const bool is_flag =
      any.type_index == kTVMFFIBool || (is_integer && (any.v_int64 == 0 || any.v_int64 == 1));
  switch (option.kind) {
    case Kind::kNumber:
      if (any.type_index != kTVMFFIFloat && !is_integer) return false;
      field<double>(options, option.place.value) =
          is_integer ? static_cast<double>(any.v_int64) : any.v_float64;
      break;
    case Kind::kInteger:
      if (!is_integer) return false;
      field<int64_t>(options, option.place.value) = any.v_int64;
      break;
    case Kind::kBits:
      if (!is_integer) return false;
      field<uint64_t>(options, option.place.value) = static_cast<uint64_t>(any.v_int64);
      break;
    case Kind::kInt32:
      if (!is_integer || any.v_int64 != static_cast<int32_t>(any.v_int64)) return false;
      field<int32_t>(options, option.place.value) = static_cast<int32_t>(any.v_int64);
      break;
    case Kind::kFlag:
      if (!is_flag) return false;
      field<int32_t>(options, option.place.value) = any.v_int64 != 0 ? 1 : 0;
      break;
    case Kind::kTensor: {
      const DLTensor* tensor = nullptr;
      if (!read_tensor(any, &tensor)) return false;
      field<const DLTensor*>(options, option.place.value) = tensor;
      break;
    }
  }
  if (option.place.given != kNone) field<int32_t>(options, option.place.given) = 1;
  return true;
}

inline const char* wanted(Kind kind) {
  switch (kind) {
    case Kind::kNumber:
      return "a float";
    case Kind::kFlag:
      return "a bool";
    case Kind::kTensor:
      return "a tensor";
    case Kind::kInt32:
      return "an int of 32 bits";
    default:
      return "an int of 64 bits";
  }
}

inline const Option* find(Text name, unsigned function) {
  for (const Option& option : kOptions) {
    if ((option.functions & function) != 0 && std::strlen(option.name) == name.size &&
        std::memcmp(option.name, name.data, name.size) == 0) {
      return &option;
    }
  }
  return nullptr;
}

inline constexpr int kMostTensors = 9;

// A function's name, and what its tensors are called.
struct Signature {
  const char* name;
  Function function;
  int count;
  const char* tensors[kMostTensors];

  // The last one, but for the backward's; and v_cache, in whose place there may be head_dim_v.
  bool may_be_none(int i) const {
    return (function != kBackward && i == count - 1) || (function == kKvCache && i == 2);
  }
};

inline constexpr Signature kForwardSignature = {
    "forward", kForward, 5, {"q", "k", "v", "out", "lse"}};
inline constexpr Signature kBackwardSignature = {
    "backward", kBackward, 9, {"dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv"}};
inline constexpr Signature kKvCacheSignature = {
    "forward_with_kvcache", kKvCache, 5, {"q", "k_cache", "v_cache", "out", "lse"}};
inline constexpr Signature kMergeSignature = {
    "merge_states", kMerge, 6, {"out_a", "lse_a", "out_b", "lse_b", "out", "lse"}};

// Pinned memory counts as the host's.
inline bool is_host(const DLDevice& device) {
  return device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
}

struct Call {
  const DLTensor* tensors[kMostTensors] = {};
  Options options;
};

inline int read_option(const Signature& signature, const TVMFFIAny& key, const TVMFFIAny& value,
                       Call& call) {
  const Text name = text_of(key);
  if (name.data == nullptr) {
    return refuse("TypeError",
                  "%s: behind the tensors there is %s; the name of an option is allowed, with its "
                  "value behind it",
                  signature.name, name_of_type(key.type_index));
  }
  const int shown = name.size < 64 ? static_cast<int>(name.size) : 64;
  const Option* const option = find(name, signature.function);
  if (option == nullptr) {
    return refuse("ValueError",
                  "%s: there is no option '%.*s'; the fields of the options in anyflash/anyflash.h "
                  "that this function reads, and workspace, are allowed",
                  signature.name, shown, name.data);
  }
  if (value.type_index == kTVMFFINone) return 0;  // as if it were not there
  if (!set(call.options, *option, value)) {
    return refuse("TypeError", "%s: %s is %s; %s is allowed", signature.name, option->name,
                  name_of_type(value.type_index), wanted(option->kind));
  }
  return 0;
}

inline int read(const Signature& signature, const TVMFFIAny* args, int32_t count, Call& call) {
  if (count < signature.count || (count - signature.count) % 2 != 0) {
    return refuse("TypeError",
                  "%s: got %d arguments; %d tensors are allowed, then names and values of options",
                  signature.name, static_cast<int>(count), signature.count);
  }
  for (int i = 0; i < signature.count; ++i) {
    const bool optional = signature.may_be_none(i);
    if (!read_tensor(args[i], &call.tensors[i]) || (call.tensors[i] == nullptr && !optional)) {
      return refuse("TypeError", "%s: %s is %s; a tensor%s is allowed", signature.name,
                    signature.tensors[i], name_of_type(args[i].type_index),
                    optional ? " or None" : "");
    }
  }
  for (int i = signature.count; i < count; i += 2) {
    if (read_option(signature, args[i], args[i + 1], call) != 0) return kFailed;
  }
  anyflash_forward_options& forward = call.options.forward;
  const DLDevice device = call.tensors[0]->device;
  if (!is_host(device)) {
    forward.stream = TVMFFIEnvGetStream(device.device_type, device.device_id);
    call.options.merge.stream = forward.stream;
  }
  return 0;
}

}  // namespace anyflash_tvm_ffi
