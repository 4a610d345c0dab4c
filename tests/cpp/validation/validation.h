// Calls that are allowed, and checks of what happens when an argument is changed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "check.h"
#include "tensor.h"

namespace test {

using anyflash::DeviceType;
using anyflash::Error;
using anyflash::ErrorCode;
using anyflash::ForwardOptions;

inline constexpr ErrorCode kValue = ErrorCode::kInvalidValue;
inline constexpr ErrorCode kType = ErrorCode::kInvalidType;

// A small tensor of any rank with memory of its own, all bytes 0: what options point to.
class SmallTensor {
 public:
  SmallTensor(DType dtype, const std::vector<int64_t>& shape) {
    view.dtype = dtype;
    view.rank = static_cast<int>(shape.size());
    int64_t step = 1;
    for (std::size_t i = shape.size(); i-- > 0;) {
      view.shape[i] = shape[i];
      view.stride[i] = step;
      step *= shape[i];
    }
    memory_.assign(static_cast<std::size_t>(step * bytes_of(dtype) / 8 + 1), 0);
    view.data = memory_.data();
  }
  SmallTensor(const SmallTensor&) = delete;
  SmallTensor& operator=(const SmallTensor&) = delete;

  template <class T>
  T* data() {
    return static_cast<T*>(view.data);
  }
  template <class T>
  void assign(const std::vector<T>& values) {
    std::copy(values.begin(), values.end(), data<T>());
  }
  // As an output that nothing has been written to.
  void poison() { std::fill(memory_.begin(), memory_.end(), kPoison); }
  bool poisoned() const {
    return std::count(memory_.begin(), memory_.end(), kPoison) ==
           static_cast<std::ptrdiff_t>(memory_.size());
  }

  TensorView view;

 private:
  static constexpr uint64_t kPoison = ~uint64_t{0};
  std::vector<uint64_t> memory_;
};

// The arguments of a ForwardPlan that is allowed: batch 2, seqlen_q 5, seqlen_k 6, heads 4
// and 2, head_dim 8 and head_dim_v 3.
struct Call {
  Call() {
    lse.rank = 3;
    lse.shape = {2, 4, 5, 0};
    lse.stride = {20, 5, 1, 0};
    unsigned seed = 1;
    for (Tensor* input : {&q_memory, &k_memory, &v_memory}) input->fill(seed++);
  }

  anyflash::ForwardPlan plan() const {
    return anyflash::ForwardPlan(forward_tensors(q, k, v, out, has_lse ? &lse : nullptr), options);
  }
  std::size_t workspace_size() const { return plan().workspace_bytes(); }
  void run(anyflash::Workspace workspace) const { plan().run(workspace); }
  bool untouched() const { return out_memory.untouched() && lse_memory.untouched(); }

  Tensor q_memory{DType::kFloat32, {2, 5, 4, 8}};
  Tensor k_memory{DType::kFloat32, {2, 6, 2, 8}};
  Tensor v_memory{DType::kFloat32, {2, 6, 2, 3}};
  Tensor out_memory{DType::kFloat32, {2, 5, 4, 3}};
  Tensor lse_memory{DType::kFloat32, {2, 4, 5, 1}};
  TensorView q = q_memory.view;
  TensorView k = k_memory.view;
  TensorView v = v_memory.view;
  TensorView out = out_memory.view;
  TensorView lse = lse_memory.view;
  bool has_lse = true;
  ForwardOptions options;
};

// A call that uses everything: batch 2, 4 heads, 5 queries, 6 keys.
struct Full : Call {
  Full() {
    options.window_left = 3;
    options.window_right = 2;
    options.softcap = 30.0;
    options.alibi_slopes = &slopes.view;
    options.bias = &bias.view;
    options.block_mask = &blocks.view;
    options.key_ranges = &ranges.view;
    options.sinks = &sinks.view;
    options.dropout_p = 0.25;
    options.rng_state = &rng_state.view;
    options.dropout_mask = &mask.view;
    options.max_logits = &maxima.view;
    options.seqused_k = &used.view;
    used.assign<int32_t>({6, 0});
  }

  SmallTensor slopes{DType::kFloat32, {2, 4}};
  SmallTensor bias{DType::kFloat64, {1, 4, 1, 6}};
  SmallTensor blocks{DType::kBool, {2, 1, 1, 1}};
  SmallTensor ranges{DType::kInt32, {2, 1, 6, 4}};
  SmallTensor sinks{DType::kBFloat16, {4}};
  SmallTensor rng_state{DType::kInt64, {2}};
  SmallTensor mask{DType::kBool, {2, 4, 5, 6}};
  SmallTensor maxima{DType::kFloat32, {2, 4}};
  SmallTensor used{DType::kInt32, {2}};
};

inline TensorView on_gpu(TensorView t) {
  t.device = {DeviceType::kCuda, 0};
  return t;
}

// Changes a call so that it is not allowed any more.
template <class AnyCall>
struct CaseOf {
  const char* name;
  std::function<void(AnyCall&)> change;
  ErrorCode code;
  std::vector<std::string> words;
};

using Case = CaseOf<Call>;

// Runs `function`, which must throw an Error with that code and these words.
inline void check_throws(const std::function<void()>& function, const std::string& name,
                         ErrorCode code, const std::vector<std::string>& words) {
  try {
    function();
    CHECK_MSG(false, name + ": no error");
  } catch (const Error& error) {
    const std::string message = error.what();
    CHECK_MSG(error.code() == code, name + ": " + message);
    for (const std::string& word : words) {
      CHECK_MSG(check::contains(message, word), name + ": '" + word + "' is not in: " + message);
    }
  }
}

// The message, which must not have these words: what it says beside is for other calls.
inline void check_says_no(const std::function<void()>& function, const std::string& words) {
  try {
    function();
    CHECK_MSG(false, "no error without " + words);
  } catch (const Error& error) {
    CHECK_MSG(!check::contains(error.what(), words), words + std::string(" in: ") + error.what());
  }
}

template <class AnyCall>
void check_case(const CaseOf<AnyCall>& test_case) {
  AnyCall call;
  const test::ExactBytes memory(call.workspace_size());
  test_case.change(call);
  check_throws([&] { call.run(memory.workspace()); }, test_case.name, test_case.code,
               test_case.words);
  check_throws([&] { call.workspace_size(); }, test_case.name, test_case.code, test_case.words);
  CHECK_MSG(call.untouched(), test_case.name);
}

template <class AnyCall>
void check_allowed() {
  AnyCall call;
  const test::ExactBytes memory(call.workspace_size());
  call.run(memory.workspace());
  CHECK(!call.untouched());
}

}  // namespace test
