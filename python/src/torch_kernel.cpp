#include "torch_kernel.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

#include "anyflash/attention.h"
#include "torch_shim.h"

namespace anyflash::python {

namespace {

using Handle = TorchShim::Tensor;
using Value = TorchShim::Value;

constexpr char kOperator[] = "_scaled_dot_product_flash_attention";

// PyTorch gives a kernel no state, and may call it until the process ends. So both stay; of
// fallbacks the latest.
const TorchShim* shim = nullptr;
PyObject* python_fallback = nullptr;

void check(TorchShim::Status status) {
  if (status != 0) throw Error(ErrorCode::kDevice, "PyTorch's C interface reports an error");
}

struct Deleter {
  void operator()(Handle tensor) const { shim->delete_tensor_object(tensor); }
};
using OwnedTensor = std::unique_ptr<std::remove_pointer_t<Handle>, Deleter>;

template <class T>
T number_of(Value value) {
  T number;
  std::memcpy(&number, &value, sizeof(T));
  return number;
}

// The operator's arguments, taken from PyTorch's stack.
struct Inputs {
  explicit Inputs(const Value* stack)
      : tensors{take(stack[0]), take(stack[1]), take(stack[2])},
        dropout_p(number_of<double>(stack[3])),
        is_causal(number_of<bool>(stack[4])),
        return_debug_mask(number_of<bool>(stack[5])) {
    if (stack[6] == 0) return;
    const std::unique_ptr<Value> given(reinterpret_cast<Value*>(stack[6]));
    scale = number_of<double>(*given);
  }

  static OwnedTensor take(Value value) { return OwnedTensor(reinterpret_cast<Handle>(value)); }

  std::array<OwnedTensor, 3> tensors;
  double dropout_p;
  bool is_causal;
  bool return_debug_mask;
  std::optional<double> scale;
};

// (output, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, rng_state, unused, debug_attn_mask)
struct Results {
  static constexpr std::size_t kCount = 9;
  static constexpr bool is_number(std::size_t i) { return i == 4 || i == 5; }

  void give(Value* stack) {
    for (std::size_t i = 0; i < kCount; ++i) {
      stack[i] = is_number(i) ? static_cast<Value>(numbers[i - 4])
                              : reinterpret_cast<Value>(tensors[i].release());
    }
  }

  std::array<OwnedTensor, kCount> tensors;
  std::array<std::int64_t, 2> numbers{};
};

// -- Without Python

std::optional<DType> dtype_of(std::int32_t number, const Device& device) {
  if (number == shim->float16) return DType::kFloat16;
  if (number == shim->bfloat16) return DType::kBFloat16;
  if (device.type != DeviceType::kCpu) return std::nullopt;
  if (number == shim->float32) return DType::kFloat32;
  if (number == shim->float64) return DType::kFloat64;
  return std::nullopt;
}

// As (batch, seqlen, heads, columns). Nothing for what the kernel does not take.
std::optional<TensorView> view_of(Handle tensor) {
  std::int32_t device_type = 0, device_index = 0, dtype = 0;
  std::int64_t rank = 0;
  std::int64_t *sizes = nullptr, *strides = nullptr;
  check(shim->get_device_type(tensor, &device_type));
  check(shim->get_device_index(tensor, &device_index));
  check(shim->get_dtype(tensor, &dtype));
  check(shim->get_dim(tensor, &rank));
  const bool on_cpu = device_type == shim->cpu;
  const bool on_gpu = device_type == shim->cuda && shim->get_current_cuda_stream != nullptr;
  if (rank != 4 || !(on_cpu || on_gpu)) return std::nullopt;
  check(shim->get_sizes(tensor, &sizes));
  check(shim->get_strides(tensor, &strides));

  TensorView view;
  if (!on_cpu) view.device = {DeviceType::kCuda, device_index};
  const std::optional<DType> known = dtype_of(dtype, view.device);
  if (!known) return std::nullopt;
  view.dtype = *known;
  check(shim->get_data_ptr(tensor, &view.data));
  view.rank = 4;
  view.shape = {sizes[0], sizes[2], sizes[1], sizes[3]};
  view.stride = {strides[0], strides[2], strides[1], strides[3]};
  return view;
}

// Whether its elements lie side by side, in any order of the axes.
bool is_dense(const TensorView& view) {
  std::array<int, kMaxRank> axes{0, 1, 2, 3};
  std::sort(axes.begin(), axes.end(), [&](int a, int b) {
    return std::pair(view.stride[a], view.shape[a]) < std::pair(view.stride[b], view.shape[b]);
  });
  std::int64_t elements = 1;
  for (const int axis : axes) {
    if (view.shape[axis] == 1) continue;
    if (view.shape[axis] == 0 || view.stride[axis] != elements) return false;
    elements *= view.shape[axis];
  }
  return true;
}

// New tensors beside q.
class Allocator {
 public:
  explicit Allocator(Handle q) {
    check(shim->get_device_type(q, &device_type_));
    check(shim->get_device_index(q, &device_index_));
    check(shim->get_dtype(q, &dtype_));
  }

  OwnedTensor make(std::int32_t dtype, std::int64_t rank, const std::int64_t* sizes,
                   const std::int64_t* strides) const {
    Handle made = nullptr;
    check(shim->empty_strided(rank, sizes, strides, dtype, device_type_, device_index_, &made));
    return OwnedTensor(made);
  }
  OwnedTensor vector(std::int32_t dtype, std::int64_t size) const {
    const std::int64_t stride = 1;
    return make(dtype, 1, &size, &stride);
  }
  std::int32_t dtype() const { return dtype_; }

 private:
  std::int32_t dtype_ = 0;
  std::int32_t device_type_ = 0;
  std::int32_t device_index_ = 0;
};

// (batch, heads, seqlen), whose memory is not there yet.
TensorView lse_of(const TensorView& q) {
  TensorView view;
  view.dtype = DType::kFloat32;
  view.device = q.device;
  view.rank = 3;
  view.shape = {q.shape[0], q.shape[2], q.shape[1]};
  view.stride = {q.shape[2] * q.shape[1], q.shape[1], 1};
  return view;
}

void* data_of(const OwnedTensor& tensor) {
  void* data = nullptr;
  check(shim->get_data_ptr(tensor.get(), &data));
  return data;
}

void run(const ForwardTensors& tensors, const ForwardOptions& options, const Allocator& allocator) {
  const Device& device = tensors.q.device;
  void* stream = nullptr;
  if (device.type == DeviceType::kCuda) {
    check(shim->get_current_cuda_stream(device.index, &stream));
  }
  const ForwardPlan plan(tensors, options);
  const std::size_t bytes = plan.workspace_bytes();
  Workspace workspace{};
  OwnedTensor memory;  // reused in the stream's order
  if (bytes > 0) {
    memory = allocator.vector(shim->uint8, static_cast<std::int64_t>(bytes));
    workspace = {data_of(memory), bytes};
  }
  plan.run(workspace, stream);
}

// False where Python has a part in it. Throws what the kernel or PyTorch throws.
bool attend(const Inputs& inputs, Results& results) {
  if (inputs.dropout_p != 0 || inputs.return_debug_mask) return false;
  const Handle query = inputs.tensors[0].get();
  const auto q = view_of(query);
  const auto k = view_of(inputs.tensors[1].get());
  const auto v = view_of(inputs.tensors[2].get());
  if (!q || !k || !v || v->shape[3] != q->shape[3] || !is_dense(*q)) return false;

  const Allocator allocator(query);
  std::int64_t *sizes = nullptr, *strides = nullptr;
  check(shim->get_sizes(query, &sizes));
  check(shim->get_strides(query, &strides));
  results.tensors[0] = allocator.make(allocator.dtype(), 4, sizes, strides);
  ForwardTensors tensors;
  tensors.q = *q;
  tensors.k = *k;
  tensors.v = *v;
  tensors.out = *q;
  tensors.out.data = data_of(results.tensors[0]);
  TensorView lse = lse_of(*q);
  results.tensors[1] = allocator.make(shim->float32, 3, lse.shape.data(), lse.stride.data());
  lse.data = data_of(results.tensors[1]);
  tensors.lse = &lse;

  ForwardOptions options;
  options.softmax_scale = inputs.scale;
  options.causal = inputs.is_causal;
  run(tensors, options, allocator);

  results.numbers = {q->shape[1], k->shape[1]};
  results.tensors[6] = allocator.vector(shim->uint64, 2);  // nobody reads it without dropout
  results.tensors[7] = allocator.make(shim->uint64, 0, nullptr, nullptr);
  results.tensors[8] = allocator.vector(allocator.dtype(), 0);
  return true;
}

// -- By Python

nb::object capsule_of(OwnedTensor& tensor) {
  return nb::steal(PyCapsule_New(tensor.release(), nullptr, nullptr));
}

void call_fallback(Inputs& inputs, Results& results) {
  auto& [q, k, v] = inputs.tensors;
  const nb::object scale = inputs.scale ? nb::object(nb::float_(*inputs.scale)) : nb::none();
  const auto given = nb::cast<nb::tuple>(
      nb::handle(python_fallback)(capsule_of(q), capsule_of(k), capsule_of(v), inputs.dropout_p,
                                  inputs.is_causal, inputs.return_debug_mask, scale));
  for (std::size_t i = 0; i < Results::kCount; ++i) {
    const nb::handle result = given[i];
    if (Results::is_number(i)) {
      results.numbers[i - 4] = nb::cast<std::int64_t>(result);
    } else if (!result.is_none()) {
      const char* const name = PyCapsule_GetName(result.ptr());
      results.tensors[i].reset(static_cast<Handle>(PyCapsule_GetPointer(result.ptr(), name)));
    }
  }
}

// PyTorch knows exceptions of the standard library, and makes them RuntimeError.
void attend_by_python(Inputs& inputs, Results& results) {
  std::string message;
  {
    const nb::gil_scoped_acquire acquire;
    try {
      call_fallback(inputs, results);
      return;
    } catch (const nb::python_error& error) {
      message = nb::str(error.value()).c_str();
    }
  }
  throw std::runtime_error(message);
}

void define_missing(Results& results) {
  for (std::size_t i = 0; i < Results::kCount; ++i) {
    if (Results::is_number(i) || results.tensors[i]) continue;
    Handle undefined = nullptr;
    check(shim->new_uninitialized_tensor(&undefined));
    results.tensors[i].reset(undefined);
  }
}

void kernel(Value* stack, std::uint64_t, std::uint64_t) {
  Inputs inputs(stack);
  Results results;
  bool done = false;
  try {
    done = attend(inputs, results);
  } catch (const std::exception&) {
  }
  if (!done) {
    results = Results{};
    attend_by_python(inputs, results);
  }
  define_missing(results);
  results.give(stack);
}

}  // namespace

nb::object register_torch_kernel(const char* path, const char* key, nb::object fallback) {
  if (shim == nullptr) shim = new TorchShim(path);
  python_fallback = fallback.release().ptr();
  TorchShim::Library library = nullptr;
  check(shim->library_init_impl("aten", key, "anyflash", 0, &library));
  const auto unregister = [](void* registered) noexcept {
    shim->delete_library_object(static_cast<TorchShim::Library>(registered));
  };
  nb::capsule owner(library, unregister);
  check(shim->library_impl(library, kOperator, kernel));
  return owner;
}

}  // namespace anyflash::python
