// A custom operator for ONNX Runtime (1.16 or later), on the CPU:
//
//   Attention, domain "anyflash"
//     q     (batch, seqlen_q, heads, head_dim)
//     k     (batch, seqlen_k, heads_k, head_dim)     heads_k divides heads
//     v     (batch, seqlen_k, heads_k, head_dim_v)
//     bias  (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1), optional: added to the scores
//     out   (batch, seqlen_q, heads, head_dim_v)
//   all float32 or all float16. Attributes, all optional: causal (int, 0), softmax_scale (float,
//   1 / sqrt(head_dim)), window_left, window_right (int, -1: no bound).
//
//   options = onnxruntime.SessionOptions()
//   options.register_custom_ops_library("libanyflash_onnxruntime.so")
#include <anyflash/attention.h>
#include <onnxruntime_c_api.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// ONNX Runtime's failures on the way through our functions.
class StatusError : public std::exception {
 public:
  explicit StatusError(OrtStatus* status) : status(status) {}
  OrtStatus* const status;
};

void check(OrtStatus* status) {
  if (status != nullptr) throw StatusError(status);
}

// Runs function(); no exception may reach ONNX Runtime.
template <class Function>
OrtStatus* guarded(const OrtApi& api, const Function& function) noexcept {
  try {
    function();
    return nullptr;
  } catch (const StatusError& error) {
    return error.status;
  } catch (const anyflash::Error& error) {
    return api.CreateStatus(ORT_INVALID_ARGUMENT, error.what());
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_FAIL, error.what());
  }
}

struct Kernel {
  const OrtApi& api;
  anyflash::DType dtype;
  anyflash::ForwardOptions options;

  Kernel(const OrtApi& table, anyflash::DType type, const OrtKernelInfo* info)
      : api(table), dtype(type) {
    options.causal = integer(info, "causal").value_or(0) != 0;
    options.window_left = integer(info, "window_left").value_or(-1);
    options.window_right = integer(info, "window_right").value_or(-1);
    float scale = 0;
    if (found(api.KernelInfoGetAttribute_float(info, "softmax_scale", &scale))) {
      options.softmax_scale = scale;
    }
  }

  // An attribute that is not there is a status, too.
  bool found(OrtStatus* status) const {
    api.ReleaseStatus(status);
    return status == nullptr;
  }

  std::optional<int64_t> integer(const OrtKernelInfo* info, const char* name) const {
    int64_t value = 0;
    if (!found(api.KernelInfoGetAttribute_int64(info, name, &value))) return std::nullopt;
    return value;
  }

  anyflash::TensorView contiguous(void* data, const std::vector<int64_t>& shape) const {
    anyflash::TensorView view;
    view.data = data;
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    int64_t stride = 1;
    for (int i = view.rank - 1; i >= 0; --i) {
      view.shape[i] = shape[static_cast<std::size_t>(i)];
      view.stride[i] = stride;
      stride *= view.shape[i];
    }
    return view;
  }

  // Nothing if the optional input is absent.
  std::optional<anyflash::TensorView> input(OrtKernelContext* context, std::size_t index) const {
    const OrtValue* value = nullptr;
    check(api.KernelContext_GetInput(context, index, &value));
    if (value == nullptr) return std::nullopt;
    OrtTensorTypeAndShapeInfo* info = nullptr;
    check(api.GetTensorTypeAndShape(value, &info));
    const std::unique_ptr<OrtTensorTypeAndShapeInfo,
                          decltype(OrtApi::ReleaseTensorTypeAndShapeInfo)>
        owner(info, api.ReleaseTensorTypeAndShapeInfo);
    std::size_t rank = 0;
    check(api.GetDimensionsCount(info, &rank));
    if (rank != 4) {
      throw std::invalid_argument("anyflash.Attention: input " + std::to_string(index) + " has " +
                                  std::to_string(rank) + " dimensions; expected 4");
    }
    std::vector<int64_t> shape(rank);
    check(api.GetDimensions(info, shape.data(), rank));
    void* data = nullptr;  // only read
    check(api.GetTensorMutableData(const_cast<OrtValue*>(value), &data));
    return contiguous(data, shape);
  }

  void compute(OrtKernelContext* context) const {
    anyflash::ForwardTensors tensors;
    tensors.q = input(context, 0).value();
    tensors.k = input(context, 1).value();
    tensors.v = input(context, 2).value();
    std::size_t count = 0;
    check(api.KernelContext_GetInputCount(context, &count));
    const auto bias = count > 3 ? input(context, 3) : std::nullopt;
    anyflash::ForwardOptions with_bias = options;
    if (bias) with_bias.bias = &*bias;

    std::vector<int64_t> shape(tensors.q.shape.begin(), tensors.q.shape.end());
    shape[3] = tensors.v.shape[3];
    OrtValue* result = nullptr;
    check(api.KernelContext_GetOutput(context, 0, shape.data(), shape.size(), &result));
    void* data = nullptr;
    check(api.GetTensorMutableData(result, &data));
    tensors.out = contiguous(data, shape);

    const anyflash::ForwardPlan plan(tensors, with_bias);
    std::vector<std::byte> workspace(plan.workspace_bytes());
    plan.run({workspace.data(), workspace.size()});
  }
};

// The operator for one type of tensors: a table of functions, then what they need.
struct AttentionOp : OrtCustomOp {
  ONNXTensorElementDataType type;
  anyflash::DType dtype;

  AttentionOp(ONNXTensorElementDataType onnx_type, anyflash::DType our_type)
      : OrtCustomOp{}, type(onnx_type), dtype(our_type) {
    version = ORT_API_VERSION;
    GetName = [](const OrtCustomOp*) { return "Attention"; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return nullptr; };
    GetInputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 4; };
    GetInputType = [](const OrtCustomOp* op, std::size_t) { return self(op).type; };
    GetInputCharacteristic = [](const OrtCustomOp*, std::size_t index) {
      return index < 3 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
    };
    GetInputMemoryType = [](const OrtCustomOp*, std::size_t) { return OrtMemTypeDefault; };
    GetOutputTypeCount = [](const OrtCustomOp*) -> std::size_t { return 1; };
    GetOutputType = [](const OrtCustomOp* op, std::size_t) { return self(op).type; };
    GetOutputCharacteristic = [](const OrtCustomOp*, std::size_t) { return INPUT_OUTPUT_REQUIRED; };
    CreateKernelV2 = [](const OrtCustomOp* op, const OrtApi* api, const OrtKernelInfo* info,
                        void** kernel) -> OrtStatusPtr {
      return guarded(*api, [&] { *kernel = new Kernel(*api, self(op).dtype, info); });
    };
    KernelComputeV2 = [](void* kernel, OrtKernelContext* context) -> OrtStatusPtr {
      const Kernel& k = *static_cast<const Kernel*>(kernel);
      return guarded(k.api, [&] { k.compute(context); });
    };
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

  static const AttentionOp& self(const OrtCustomOp* op) {
    return *static_cast<const AttentionOp*>(op);
  }
};

// Sessions hold pointers to the domain and the operators: these live as long as the process.
OrtCustomOpDomain* domain(const OrtApi& api) {
  static const AttentionOp ops[] = {
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, anyflash::DType::kFloat32},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, anyflash::DType::kFloat16},
  };
  static OrtCustomOpDomain* const result = [&] {
    OrtCustomOpDomain* made = nullptr;
    check(api.CreateCustomOpDomain("anyflash", &made));
    for (const AttentionOp& op : ops) check(api.CustomOpDomain_Add(made, &op));
    return made;
  }();
  return result;
}

}  // namespace

// What ONNX Runtime looks for in the library.
extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* const api = base->GetApi(ORT_API_VERSION);
  if (api == nullptr) {  // an older ONNX Runtime than the header
    return base->GetApi(1)->CreateStatus(ORT_FAIL, "anyflash: this ONNX Runtime is too old");
  }
  return guarded(*api, [&] { check(api->AddCustomOpDomain(options, domain(*api))); });
}
