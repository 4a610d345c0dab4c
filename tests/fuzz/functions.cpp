// The functions of the C ABI, called with what a Call holds.
#include <algorithm>
#include <cstring>
#include <memory>

#include "call.h"

namespace fuzz {

namespace {

// Options as a caller of another version has them: of the size that they say, and nothing behind.
template <class Options>
class Given {
 public:
  explicit Given(const Options& options) {
    constexpr std::size_t kNewest = 4096;
    const bool is_size = options.size >= sizeof options.size && options.size <= kNewest;
    const std::size_t bytes = is_size ? options.size : sizeof options;
    memory_ = std::make_unique<unsigned char[]>(bytes);
    std::memcpy(memory_.get(), &options, std::min(bytes, sizeof options));
  }
  const Options* get() const { return reinterpret_cast<const Options*>(memory_.get()); }

 private:
  std::unique_ptr<unsigned char[]> memory_;
};

}  // namespace

anyflash_forward_options Call::forward_options_given() const {
  anyflash_forward_options o = options_;
  o.alibi_slopes = tensor("alibi_slopes");
  o.bias = tensor("bias");
  o.block_mask = tensor("block_mask");
  o.key_ranges = tensor("key_ranges");
  o.sinks = tensor("sinks");
  o.rng_state = tensor("rng_state");
  o.dropout_mask = tensor("dropout_mask");
  o.max_logits = tensor("max_logits");
  o.cu_seqlens_q = tensor("cu_seqlens_q");
  o.cu_seqlens_k = tensor("cu_seqlens_k");
  o.seqused_k = tensor("seqused_k");
  return o;
}

anyflash_backward_options Call::backward_options_given() const {
  anyflash_backward_options o = backward_options_;
  o.dlse = tensor("dlse");
  o.dbias = tensor("dbias");
  o.dsinks = tensor("dsinks");
  o.dalibi_slopes = tensor("dalibi_slopes");
  o.dq_sums = tensor("dq_sums");
  return o;
}

anyflash_kvcache_options Call::cache_options_given() const {
  anyflash_kvcache_options o = cache_options_;
  o.cache_seqlens = tensor("cache_seqlens");
  o.cache_batch_idx = tensor("cache_batch_idx");
  o.cache_leftpad = tensor("cache_leftpad");
  o.block_table = tensor("block_table");
  o.k_new = tensor("k_new");
  o.v_new = tensor("v_new");
  o.rotary_cos = tensor("rotary_cos");
  o.rotary_sin = tensor("rotary_sin");
  o.tree_mask = tensor("tree_mask");
  o.k_scale = tensor("k_scale");
  o.v_scale = tensor("v_scale");
  o.rotary_seqlens = tensor("rotary_seqlens");
  o.cu_seqlens_k_new = tensor("cu_seqlens_k_new");
  return o;
}

anyflash_status Call::workspace_size(std::size_t* bytes) const {
  calls += op_ != Op::kMerge;
  const auto t = [this](const char* name) { return tensor(name); };
  const Given options(forward_options_given());
  switch (op_) {
    case Op::kForward:
      return anyflash_forward_workspace_size(t("q"), t("k"), t("v"), t("out"), t("lse"),
                                             options.get(), bytes);
    case Op::kBackward:
      return anyflash_backward_workspace_size(t("dout"), t("q"), t("k"), t("v"), t("out"), t("lse"),
                                              t("dq"), t("dk"), t("dv"), options.get(),
                                              Given(backward_options_given()).get(), bytes);
    case Op::kKvCache:
      return anyflash_forward_with_kvcache_workspace_size(
          t("q"), t("k_cache"), t("v_cache"), t("out"), t("lse"), options.get(),
          Given(cache_options_given()).get(), bytes);
    case Op::kMerge:
      break;
  }
  *bytes = 0;
  return ANYFLASH_OK;
}

anyflash_status Call::run(void* workspace, std::size_t bytes) const {
  ++calls;
  const auto t = [this](const char* name) { return tensor(name); };
  const Given options(forward_options_given());
  switch (op_) {
    case Op::kForward:
      return anyflash_forward(t("q"), t("k"), t("v"), t("out"), t("lse"), options.get(), workspace,
                              bytes);
    case Op::kBackward:
      return anyflash_backward(t("dout"), t("q"), t("k"), t("v"), t("out"), t("lse"), t("dq"),
                               t("dk"), t("dv"), options.get(),
                               Given(backward_options_given()).get(), workspace, bytes);
    case Op::kKvCache:
      return anyflash_forward_with_kvcache(t("q"), t("k_cache"), t("v_cache"), t("out"), t("lse"),
                                           options.get(), Given(cache_options_given()).get(),
                                           workspace, bytes);
    case Op::kMerge:
      break;
  }
  return anyflash_merge_states(t("out_a"), t("lse_a"), t("out_b"), t("lse_b"), t("out"), t("lse"),
                               Given(merge_options_).get());
}

}  // namespace fuzz
