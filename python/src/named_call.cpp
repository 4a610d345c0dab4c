#include "named_call.h"

#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <utility>

#include "convert.h"
#include "option_names.h"

namespace anyflash::python {

namespace nb = nanobind;

NamedCall::NamedCall(const std::string& function, std::map<std::string, TensorView> tensors)
    : function_(function == "forward"    ? Function::kForward
                : function == "backward" ? Function::kBackward
                                         : Function::kForwardWithKvCache),
      tensors_(std::move(tensors)) {
  for (const auto& option : kForwardTensors) forward_.*option.field = optional(option.name);
  for (const auto& option : kBackwardTensors) backward_.*option.field = optional(option.name);
  for (const auto& option : kKvCacheTensors) cache_.*option.field = optional(option.name);
}

const TensorView* NamedCall::optional(const char* name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

const TensorView& NamedCall::tensor(const char* name) const {
  const TensorView* const result = optional(name);
  if (result == nullptr) throw std::logic_error(std::string("the call has no tensor ") + name);
  return *result;
}

template <class Forward, class Backward, class KvCache, class... More>
auto NamedCall::call(const Forward& forward, const Backward& backward, const KvCache& kvcache,
                     const More&... more) const {
  switch (function_) {
    case Function::kForward:
      return forward(tensor("q"), tensor("k"), tensor("v"), tensor("out"), optional("lse"),
                     forward_, more...);
    case Function::kBackward:
      return backward(tensor("dout"), tensor("q"), tensor("k"), tensor("v"), tensor("out"),
                      tensor("lse"), tensor("dq"), tensor("dk"), tensor("dv"), forward_, backward_,
                      more...);
    default:
      break;
  }
  return in_python_names([&] {
    return kvcache(tensor("q"), tensor("k_cache"), tensor("v_cache"), tensor("out"),
                   optional("lse"), forward_, cache_, more...);
  });
}

std::size_t NamedCall::workspace_size() const {
  return call(forward_workspace_size, backward_workspace_size, forward_with_kvcache_workspace_size);
}

void NamedCall::run(Workspace workspace) const {
  call(forward, backward, forward_with_kvcache, workspace);
}

namespace {

struct PythonNumbers {
  template <class T>
  void read(const char* name, T& field) const {
    if (given.contains(name)) field = nb::cast<T>(given[name]);
  }
  void read(const char* name, std::optional<double>& field) const {
    if (given.contains(name)) field = nb::cast<double>(given[name]);
  }

  const nb::dict& given;
};

// A dense tensor that nobody reads or writes.
TensorView described(const std::string& argument, const nb::tuple& shape,
                     const std::string& dtype) {
  TensorView view;
  view.data = reinterpret_cast<void*>(4096);
  view.dtype = dtype_named(dtype, argument);
  if (shape.size() > kMaxRank) {
    throw Error(ErrorCode::kInvalidValue, argument + " has " + std::to_string(shape.size()) +
                                              " dimensions; at most 4 are allowed");
  }
  view.rank = static_cast<int>(shape.size());
  int64_t stride = 1;
  for (int i = view.rank - 1; i >= 0; --i) {
    view.shape[i] = nb::cast<int64_t>(shape[i]);
    view.stride[i] = stride;
    stride *= view.shape[i];
  }
  return view;
}

}  // namespace

void check_call(const char* function, const nb::dict& tensors, const nb::dict& numbers) {
  std::map<std::string, TensorView> views;
  for (const auto [key, value] : tensors) {
    const auto argument = nb::cast<std::string>(key);
    const auto pair = nb::cast<nb::tuple>(value);
    views[argument] = in_python_names([&] {
      return described(argument, nb::cast<nb::tuple>(pair[0]), nb::cast<std::string>(pair[1]));
    });
  }
  NamedCall call(function, std::move(views));
  call.read_numbers(PythonNumbers{numbers});
  static_cast<void>(call.workspace_size());
}

}  // namespace anyflash::python
