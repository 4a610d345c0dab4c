// The module anyflash._core: signatures, error mapping, the GIL. Everything else is C++ or Python.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "anyflash/attention.h"
#include "anyflash/version.h"
#include "call.h"
#include "convert.h"
#include "direct.h"
#include "info.h"
#include "named_call.h"
#include "option_names.h"
#include "options.h"
#include "prefer_kernel.h"
#include "released_gil.h"
#include "torch_kernel.h"
#include "xla_ffi.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace anyflash::python {

namespace {

void run_forward(const char* operation, nb::handle q, nb::handle k, nb::handle v, nb::handle out,
                 nb::handle lse, std::optional<double> softmax_scale, bool causal,
                 std::uintptr_t stream, std::uint8_t as_bits, nb::handle given,
                 nb::handle allocate_gpu) {
  named(operation, [&] {
    const Array q_array = import_array(q, "q", as_bits, false);
    const Array k_array = import_array(k, "k", as_bits, false);
    const Array v_array = import_array(v, "v", as_bits, false);
    const Array out_array = import_array(out, "out", as_bits, true);
    Array lse_array;
    if (!lse.is_none()) lse_array = import_array(lse, "lse", 0, true);
    ForwardTensors tensors;
    tensors.q = q_array.view;
    tensors.k = k_array.view;
    tensors.v = v_array.view;
    tensors.out = out_array.view;
    if (!lse.is_none()) tensors.lse = &lse_array.view;
    attend(tensors, Options(softmax_scale, causal, stream, given), allocate_gpu);
  });
}

// tensors: dout, q, k, v, out, lse, dq, dk, dv.
void run_backward(const char* operation, const nb::tuple& tensors,
                  std::optional<double> softmax_scale, bool causal, std::uintptr_t stream,
                  std::uint8_t as_bits, nb::handle given, const nb::dict& given_backward,
                  nb::handle allocate_gpu) {
  named(operation, [&] {
    BackwardTensors views;
    std::vector<Array> arrays;
    for (const auto& [name, field, writable] : kBackwardArguments) {
      arrays.push_back(import_array(tensors[arrays.size()], name, as_bits, writable));
      views.*field = arrays.back().view;
    }
    const Options options(softmax_scale, causal, stream, given);
    BackwardOptions backward_options;
    std::vector<Array> backward_arrays;
    read_options(given_backward, backward_options, backward_arrays);
    run_plan(
        views.q.device, options.stream,
        [&] { return BackwardPlan(views, options.forward, backward_options); }, allocate_gpu);
  });
}

// Bytes of the backward's dq_sums for all rows of q; 0: none are kept.
std::size_t dq_sums_size(const char* operation, nb::handle q, std::uint8_t as_bits,
                         std::int64_t head_dim_v, std::optional<double> softmax_scale,
                         double softcap) {
  return named(operation, [&] {
    ForwardOptions options;
    options.softmax_scale = softmax_scale;
    options.softcap = softcap;
    const Array rows = import_array(q, "q", as_bits, false);
    return BackwardPlan::dq_sums_bytes(rows.view, head_dim_v, options);
  });
}

// A call of attention with a KV cache. tensors: q, k_cache, v_cache, out, lse, each a pair (array,
// it shows floats as unsigned integers), v_cache and lse also None. writes: the caches are written
// to.
class KvCacheCall {
 public:
  KvCacheCall(const nb::tuple& tensors, std::optional<double> softmax_scale, bool causal,
              std::uintptr_t stream, nb::handle given, const nb::dict& given_cache, bool writes)
      : has_lse_(!tensors[4].is_none()), options_(softmax_scale, causal, stream, given) {
    static constexpr const char* kNames[] = {"q", "k_cache", "v_cache", "out", "lse"};
    const bool writable[] = {false, writes, writes, true, true};
    for (std::size_t i = 0; i < arrays_.size(); ++i) {
      if (tensors[i].is_none()) continue;
      const auto pair = nb::cast<nb::tuple>(tensors[i]);
      arrays_[i] = import_array(pair[0], kNames[i], nb::cast<std::uint8_t>(pair[1]), writable[i]);
    }
    in_python_names([&] { read_options(given_cache, cache_options_, cache_arrays_); });
  }

  KvCachePlan plan() const {
    const auto& [q, k_cache, v_cache, out, lse] = arrays_;
    KvCacheTensors tensors;
    tensors.q = q.view;
    tensors.k_cache = k_cache.view;
    tensors.v_cache = v_cache.view;
    tensors.out = out.view;
    if (has_lse_) tensors.lse = &lse.view;
    return KvCachePlan(tensors, options_.forward, cache_options_);
  }

  const Device& device() const { return arrays_[0].view.device; }
  void* stream() const { return options_.stream; }

 private:
  bool has_lse_;
  std::array<Array, 5> arrays_;
  Options options_;
  KvCacheOptions cache_options_;
  std::vector<Array> cache_arrays_;
};

// All bytes of an array.
Workspace workspace_of(const Array& memory) {
  const TensorView& view = memory.view;
  std::size_t bytes = 1;
  bool contiguous = true;
  for (int i = view.rank - 1; i >= 0; --i) {
    contiguous &= view.shape[i] <= 1 || view.stride[i] == static_cast<int64_t>(bytes);
    bytes *= static_cast<std::size_t>(view.shape[i]);
  }
  if (!contiguous) throw Error(ErrorCode::kInvalidValue, "workspace is not contiguous");
  return {view.data, bytes};
}

void run_forward_with_kvcache(const char* operation, const nb::tuple& tensors,
                              std::optional<double> softmax_scale, bool causal,
                              std::uintptr_t stream, nb::handle given, const nb::dict& given_cache,
                              bool writes, nb::handle workspace, nb::handle allocate_gpu) {
  named(operation, [&] {
    const KvCacheCall call(tensors, softmax_scale, causal, stream, given, given_cache, writes);
    in_python_names([&] {
      if (workspace.is_none()) {
        run_plan(call.device(), call.stream(), [&] { return call.plan(); }, allocate_gpu);
        return;
      }
      const Array memory = import_array(workspace, "workspace", 0, true);
      const ReleasedGil release;
      call.plan().run(workspace_of(memory), call.stream());
    });
  });
}

std::size_t kvcache_workspace_size(const char* operation, const nb::tuple& tensors,
                                   std::optional<double> softmax_scale, bool causal,
                                   std::uintptr_t stream, nb::handle given,
                                   const nb::dict& given_cache, bool writes) {
  return named(operation, [&] {
    const KvCacheCall call(tensors, softmax_scale, causal, stream, given, given_cache, writes);
    return in_python_names([&] { return call.plan().workspace_bytes(); });
  });
}

void run_merge_states(const char* operation, nb::handle out_a, nb::handle lse_a, nb::handle out_b,
                      nb::handle lse_b, nb::handle out, nb::handle lse, std::uint8_t as_bits_in,
                      std::uint8_t as_bits_out, std::uintptr_t stream) {
  named(operation, [&] {
    const Array out_a_array = import_array(out_a, "out_a", as_bits_in, false);
    const Array lse_a_array = import_array(lse_a, "lse_a", 0, false);
    const Array out_b_array = import_array(out_b, "out_b", as_bits_in, false);
    const Array lse_b_array = import_array(lse_b, "lse_b", 0, false);
    const Array out_array = import_array(out, "out", as_bits_out, true);
    const Array lse_array = import_array(lse, "lse", 0, true);
    MergeOptions options;
    options.stream = reinterpret_cast<void*>(stream);
    const ReleasedGil release;
    merge_states(out_a_array.view, lse_a_array.view, out_b_array.view, lse_b_array.view,
                 out_array.view, &lse_array.view, options);
  });
}

void named_check(const char* operation, const char* function, const nb::dict& tensors,
                 const nb::dict& numbers) {
  named(operation, [&] { check_call(function, tensors, numbers); });
}

void named_prefer_kernel(std::optional<std::string> name) {
  named("prefer_kernel", [&] { prefer_kernel(name ? name->c_str() : nullptr); });
}

nb::object named_register_torch_kernel(const char* path, const char* key, nb::object fallback) {
  return named(nullptr, [&] { return register_torch_kernel(path, key, std::move(fallback)); });
}

nb::tuple named_describe(nb::handle object) {
  return named(nullptr, [&] { return describe(object); });
}

std::uintptr_t named_address(nb::handle object) {
  return named(nullptr, [&] { return address(object); });
}

nb::object named_new_array(const nb::tuple& shape, const std::string& dtype,
                           const std::string& device_kind, int device_index) {
  return named("anyflash", [&] { return new_array(shape, dtype, device_kind, device_index); });
}

}  // namespace

}  // namespace anyflash::python

NB_MODULE(_core, m) {
  using namespace anyflash::python;
  m.def("forward", &run_forward, "operation"_a, "q"_a, "k"_a, "v"_a, "out"_a, "lse"_a.none(),
        "softmax_scale"_a.none(), "causal"_a, "stream"_a, "as_bits"_a, "options"_a.none(),
        "allocate"_a.none());
  bind_pytorch(m);
  m.def("forward_direct", &forward_direct, "operation"_a, "q"_a, "k"_a, "v"_a,
        "softmax_scale"_a.none(), "causal"_a.none(), "options"_a.none(), "return_lse"_a.none(),
        "heads_first"_a, "pytorch"_a);
  m.def("backward_direct", &backward_direct, "operation"_a, "dout"_a, "q"_a, "k"_a, "v"_a, "out"_a,
        "lse"_a, "dlse"_a.none(), "softmax_scale"_a.none(), "causal"_a.none(), "deterministic"_a,
        "pytorch"_a);
  m.def("backward", &run_backward, "operation"_a, "tensors"_a, "softmax_scale"_a.none(), "causal"_a,
        "stream"_a, "as_bits"_a, "options"_a.none(), "backward_options"_a, "allocate"_a.none());
  m.def("dq_sums_size", &dq_sums_size, "operation"_a, "q"_a, "as_bits"_a, "head_dim_v"_a,
        "softmax_scale"_a.none(), "softcap"_a);
  m.def("forward_with_kvcache", &run_forward_with_kvcache, "operation"_a, "tensors"_a,
        "softmax_scale"_a.none(), "causal"_a, "stream"_a, "options"_a.none(), "cache_options"_a,
        "writes"_a, "workspace"_a.none(), "allocate"_a.none());
  m.def("kvcache_workspace_size", &kvcache_workspace_size, "operation"_a, "tensors"_a,
        "softmax_scale"_a.none(), "causal"_a, "stream"_a, "options"_a.none(), "cache_options"_a,
        "writes"_a);
  m.def("merge_states", &run_merge_states, "operation"_a, "out_a"_a, "lse_a"_a, "out_b"_a,
        "lse_b"_a, "out"_a, "lse"_a, "as_bits_in"_a, "as_bits_out"_a, "stream"_a);
  m.def("describe", &named_describe, "array"_a);
  m.def("address", &named_address, "array"_a);
  m.def("new_array", &named_new_array, "shape"_a, "dtype"_a, "device_kind"_a, "device_index"_a);
  m.def("check_call", &named_check, "operation"_a, "function"_a, "tensors"_a, "numbers"_a);
  m.def("register_torch_kernel", &named_register_torch_kernel, "path"_a, "key"_a, "fallback"_a);
  m.def("xla_handlers", &xla_handlers);
  m.def("build_info", &build_info_dict);
  m.def("prefer_kernel", &named_prefer_kernel, "name"_a.none());
  m.def("set_work_per_thread", &anyflash::set_work_per_thread, "work"_a);
  m.attr("version") = ANYFLASH_VERSION_STRING;
  end_calls_at_exit();
}
