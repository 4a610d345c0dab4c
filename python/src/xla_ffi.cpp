#include "xla_ffi.h"

#include <xla/ffi/api/ffi.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>

#include "anyflash/attention.h"
#include "dlpack.h"
#include "memory.h"
#include "named_call.h"

namespace anyflash::python {

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace {

// The value, or an exception that says why there is none.
template <class T>
T value_of(const ffi::ErrorOr<T>& result) {
  if (result.has_error()) throw std::logic_error(result.error().message());
  return result.value();
}

// Each is read once. When all were, other names are not looked for: calls have few of them.
class Attributes {
 public:
  explicit Attributes(const ffi::Dictionary& given) : given_(given), left_(given.size()) {}

  template <class T>
  void read(std::string_view name, T& field) {
    if (left_ > 0 && given_.contains(name)) field = get<T>(name);
  }
  void read(std::string_view name, std::optional<double>& field) {
    if (left_ > 0 && given_.contains(name)) field = get<double>(name);
  }
  template <class T>
  T get(std::string_view name) {
    --left_;
    return value_of(given_.get<T>(name));
  }

 private:
  const ffi::Dictionary& given_;
  std::size_t left_;
};

DType dtype_of(ffi::DataType type, const std::string& name) {
  switch (type) {
    case ffi::F64:
      return DType::kFloat64;
    case ffi::F32:
      return DType::kFloat32;
    case ffi::F16:
      return DType::kFloat16;
    case ffi::BF16:
      return DType::kBFloat16;
    case ffi::PRED:
      return DType::kBool;
    case ffi::S32:
      return DType::kInt32;
    case ffi::S8:
      return DType::kInt8;
    case ffi::F8E4M3FN:
      return DType::kFloat8E4M3;
    case ffi::F8E5M2:
      return DType::kFloat8E5M2;
    default:
      throw Error(ErrorCode::kInvalidType, name + " is of a type that anyflash does not know");
  }
}

TensorView view_of(const ffi::AnyBuffer& buffer, const std::string& name, const Device& device) {
  const bool is_state =
      buffer.element_type() == ffi::U32 && name == "rng_state" && buffer.element_count() == 4;
  constexpr int64_t kStateExtent = 2;
  const auto extents = buffer.dimensions();
  TensorView view =
      is_state ? dense_view(&kStateExtent, 1, name.c_str())
               : dense_view(extents.begin(), static_cast<int64_t>(extents.size()), name.c_str());
  view.dtype = is_state ? DType::kInt64 : dtype_of(buffer.element_type(), name);
  view.data = buffer.untyped_data();
  view.device = device;
  return view;
}

// Calls visit(number, name) for names with a space between them. A string stream takes as long as
// the rest of a small call.
template <class Visit>
void for_each_name(std::string_view names, const Visit& visit) {
  for (std::size_t i = 0; !names.empty(); ++i) {
    const std::size_t end = std::min(names.find(' '), names.size());
    visit(i, std::string(names.substr(0, end)));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
}

NamedTensors tensors_of(const ffi::RemainingArgs& operands, const ffi::RemainingRets& results,
                        Attributes& attributes, const Device& device) {
  NamedTensors tensors;
  const auto operand_names = attributes.get<std::string_view>("operands");
  for_each_name(operand_names, [&](std::size_t i, const std::string& name) {
    tensors.add(name, view_of(value_of(operands.get<ffi::AnyBuffer>(i)), name, device));
  });
  const auto result_names = attributes.get<std::string_view>("results");
  for_each_name(result_names, [&](std::size_t i, const std::string& name) {
    const TensorView view = view_of(*value_of(results.get<ffi::AnyBuffer>(i)), name, device);
    const TensorView* const operand = tensors.find(name);
    if (operand == nullptr) {
      tensors.add(name, view);
    } else if (operand->data != view.data) {
      throw std::logic_error(name + " and the result of that name are not one buffer");
    }
  });
  return tensors;
}

ffi::ErrorCode code_of(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kUnsupported:
      return ffi::ErrorCode::kUnimplemented;
    case ErrorCode::kDevice:
      return ffi::ErrorCode::kInternal;
    default:
      return ffi::ErrorCode::kInvalidArgument;
  }
}

// Makes the call and hands it to `run`; what goes wrong becomes XLA's error.
template <class Run>
ffi::Error handle(const char* function, const Device& device, const ffi::RemainingArgs& operands,
                  const ffi::RemainingRets& results, const ffi::Dictionary& dictionary,
                  const Run& run) {
  std::string operation = "anyflash";
  try {
    Attributes attributes(dictionary);
    operation = attributes.get<std::string_view>("operation");
    NamedCall call(function, tensors_of(operands, results, attributes, device));
    call.read_numbers(attributes);
    run(call);
    return ffi::Error::Success();
  } catch (const Error& error) {
    return ffi::Error(code_of(error), operation + ": " + error.what());
  } catch (const std::exception& error) {
    return ffi::Error::Internal(operation + ": " + error.what());
  }
}

constexpr const char* kForward = "forward";
constexpr const char* kBackward = "backward";
constexpr const char* kForwardWithKvCache = "forward_with_kvcache";

template <const char* const& function>
XLA_FFI_Error* on_cpu(XLA_FFI_CallFrame* frame) {
  static const auto* const handler =
      ffi::Ffi::Bind()
          .RemainingArgs()
          .RemainingRets()
          .Attrs()
          .To([](ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
            const Device cpu;
            return handle(function, cpu, operands, results, attributes, [&](NamedCall& call) {
              const auto free = [&](void* data) { deallocate(cpu, data); };
              std::unique_ptr<void, decltype(free)> memory(nullptr, free);
              call.run(nullptr, [&](std::size_t bytes) {
                memory.reset(allocate(cpu, bytes));
                return Workspace{memory.get(), bytes};
              });
            });
          })
          .release();
  return handler->Call(frame);
}

template <const char* const& function>
XLA_FFI_Error* on_cuda(XLA_FFI_CallFrame* frame) {
  static const auto* const handler =
      ffi::Ffi::Bind()
          .Ctx<ffi::PlatformStream<void*>>()
          .Ctx<ffi::ScratchAllocator>()
          .Ctx<ffi::DeviceOrdinal>()
          .RemainingArgs()
          .RemainingRets()
          .Attrs()
          .To([](void* stream, ffi::ScratchAllocator scratch, std::int32_t ordinal,
                 ffi::RemainingArgs operands, ffi::RemainingRets results,
                 ffi::Dictionary attributes) {
            const Device gpu{DeviceType::kCuda, ordinal};
            return handle(function, gpu, operands, results, attributes, [&](NamedCall& call) {
              call.run(stream, [&](std::size_t bytes) {
                const std::optional<void*> memory = scratch.Allocate(bytes);
                if (!memory) {
                  throw Error(ErrorCode::kDevice,
                              "XLA could not allocate " + std::to_string(bytes) + " bytes");
                }
                return Workspace{*memory, bytes};
              });
            });
          })
          .release();
  return handler->Call(frame);
}

}  // namespace

nb::list xla_handlers() {
  nb::list result;
  const auto add = [&](const char* function, const char* platform, XLA_FFI_Handler* handler) {
    const std::string target = std::string("anyflash_") + function;
    result.append(nb::make_tuple(nb::str(target.c_str()), platform,
                                 nb::capsule(reinterpret_cast<const void*>(handler))));
  };
  add(kForward, "cpu", &on_cpu<kForward>);
  add(kForward, "CUDA", &on_cuda<kForward>);
  add(kBackward, "cpu", &on_cpu<kBackward>);
  add(kBackward, "CUDA", &on_cuda<kBackward>);
  add(kForwardWithKvCache, "cpu", &on_cpu<kForwardWithKvCache>);
  add(kForwardWithKvCache, "CUDA", &on_cuda<kForwardWithKvCache>);
  return result;
}

}  // namespace anyflash::python
