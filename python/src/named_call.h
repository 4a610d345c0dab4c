// A call of the core whose tensors and numbers are known by name, as a framework's compiler knows
// them. XLA's handlers make one of the buffers they get. Python makes one of shapes alone, to check
// them.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "anyflash/attention.h"

namespace anyflash::python {

// A call has few tensors and asks for many names: to look at all takes less than a tree.
class NamedTensors {
 public:
  // Null if there is none.
  const TensorView* find(std::string_view name) const {
    for (const auto& [known, view] : tensors_) {
      if (known == name) return &view;
    }
    return nullptr;
  }
  void add(std::string name, const TensorView& view) {
    tensors_.emplace_back(std::move(name), view);
  }

 private:
  std::vector<std::pair<std::string, TensorView>> tensors_;
};

class NamedCall {
 public:
  // function: "forward", "backward" or "forward_with_kvcache". tensors: its arguments and the
  // tensors of its options; bias and block_mask have 4 dimensions, tree_mask has 3, or 2 with
  // packed queries.
  NamedCall(std::string_view function, NamedTensors tensors);
  NamedCall(const NamedCall&) = delete;
  NamedCall& operator=(const NamedCall&) = delete;

  // source.read(name, field) sets the field if the source has that name.
  template <class Source>
  void read_numbers(Source&& source) {
    source.read("softmax_scale", forward_.softmax_scale);
    source.read("causal", forward_.causal);
    source.read("window_left", forward_.window_left);
    source.read("window_right", forward_.window_right);
    source.read("softcap", forward_.softcap);
    source.read("block_size_q", forward_.block_size[0]);
    source.read("block_size_k", forward_.block_size[1]);
    source.read("dropout_p", forward_.dropout_p);
    source.read("max_seqlen_q", forward_.max_seqlen_q);
    source.read("max_seqlen_k", forward_.max_seqlen_k);
    source.read("validate", forward_.validate);
    source.read("batch_start", forward_.batch_start);
    source.read("head_start", forward_.head_start);
    source.read("total_heads", forward_.total_heads);
    source.read("deterministic", backward_.deterministic);
    source.read("rotary_interleaved", cache_.rotary_interleaved);
    source.read("num_splits", cache_.num_splits);
    source.read("split_size", cache_.split_size);
    source.read("head_dim_v", cache_.head_dim_v);
  }

  // All but the tensors' elements; throws Error.
  void check() const;
  // allocate(bytes): where the call needs a workspace, once.
  void run(void* stream, const std::function<Workspace(std::size_t)>& allocate) const;

 private:
  enum class Operation { kForward, kBackward, kForwardWithKvCache };

  const TensorView& tensor(std::string_view name) const;
  const TensorView* optional(std::string_view name) const { return tensors_.find(name); }
  // Calls function(the plan).
  template <class Function>
  void with_plan(const Function& function) const;
  ForwardPlan forward_plan() const;
  BackwardPlan backward_plan() const;
  KvCachePlan kvcache_plan() const;

  Operation operation_;
  NamedTensors tensors_;
  ForwardOptions forward_;
  BackwardOptions backward_;
  KvCacheOptions cache_;
};

// Throws what the call on the CPU would throw because of shapes, dtypes and numbers. tensors: name:
// (shape, dtype's name); numbers: name: int, float or bool.
void check_call(const char* function, const nanobind::dict& tensors, const nanobind::dict& numbers);

}  // namespace anyflash::python
