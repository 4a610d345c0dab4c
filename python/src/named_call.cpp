#include "named_call.h"

#include <nanobind/stl/string.h>

#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "convert.h"
#include "dlpack.h"
#include "option_names.h"

namespace anyflash::python {

namespace nb = nanobind;

NamedCall::NamedCall(std::string_view function, NamedTensors tensors)
    : operation_(function == "forward"    ? Operation::kForward
                 : function == "backward" ? Operation::kBackward
                                          : Operation::kForwardWithKvCache),
      tensors_(std::move(tensors)) {
  for (const auto& option : kForwardTensors) forward_.*option.field = optional(option.name);
  for (const auto& option : kBackwardTensors) backward_.*option.field = optional(option.name);
  for (const auto& option : kKvCacheTensors) cache_.*option.field = optional(option.name);
}

const TensorView& NamedCall::tensor(std::string_view name) const {
  const TensorView* const result = optional(name);
  if (result == nullptr) throw std::logic_error("the call has no tensor " + std::string(name));
  return *result;
}

ForwardPlan NamedCall::forward_plan() const {
  ForwardTensors tensors;
  tensors.q = tensor("q");
  tensors.k = tensor("k");
  tensors.v = tensor("v");
  tensors.out = tensor("out");
  tensors.lse = optional("lse");
  return ForwardPlan(tensors, forward_);
}

BackwardPlan NamedCall::backward_plan() const {
  BackwardTensors tensors;
  for (const auto& argument : kBackwardArguments) {
    tensors.*argument.field = tensor(argument.name);
  }
  return BackwardPlan(tensors, forward_, backward_);
}

KvCachePlan NamedCall::kvcache_plan() const {
  KvCacheTensors tensors;
  tensors.q = tensor("q");
  tensors.k_cache = tensor("k_cache");
  if (const TensorView* const v_cache = optional("v_cache")) tensors.v_cache = *v_cache;
  tensors.out = tensor("out");
  tensors.lse = optional("lse");
  return KvCachePlan(tensors, forward_, cache_);
}

template <class Function>
void NamedCall::with_plan(const Function& function) const {
  switch (operation_) {
    case Operation::kForward:
      return function(forward_plan());
    case Operation::kBackward:
      return function(backward_plan());
    default:
      return in_python_names([&] { function(kvcache_plan()); });
  }
}

void NamedCall::check() const {
  with_plan([](const auto&) {});
}

void NamedCall::run(void* stream, const std::function<Workspace(std::size_t)>& allocate) const {
  with_plan([&](const auto& plan) {
    const std::size_t bytes = plan.workspace_bytes();
    plan.run(bytes == 0 ? Workspace{} : allocate(bytes), stream);
  });
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
  const DType type = dtype_named(dtype, argument);
  std::vector<int64_t> extents;
  for (const nb::handle extent : shape) extents.push_back(nb::cast<int64_t>(extent));
  TensorView view =
      dense_view(extents.data(), static_cast<int64_t>(extents.size()), argument.c_str());
  view.data = reinterpret_cast<void*>(4096);
  view.dtype = type;
  return view;
}

}  // namespace

void check_call(const char* function, const nb::dict& tensors, const nb::dict& numbers) {
  NamedTensors views;
  for (const auto [key, value] : tensors) {
    const auto argument = nb::cast<std::string>(key);
    const auto pair = nb::cast<nb::tuple>(value);
    const TensorView view = in_python_names([&] {
      return described(argument, nb::cast<nb::tuple>(pair[0]), nb::cast<std::string>(pair[1]));
    });
    views.add(argument, view);
  }
  NamedCall call(function, std::move(views));
  call.read_numbers(PythonNumbers{numbers});
  call.check();
}

}  // namespace anyflash::python
