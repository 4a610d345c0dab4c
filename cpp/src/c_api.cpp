// The C ABI: converts arguments, catches everything, keeps the message of the last failure.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
#include <optional>
#include <string>

#include "anyflash/anyflash.h"
#include "anyflash/attention.h"
#include "anyflash/version.h"
#include "dlpack.h"
#include "kernel_table.h"

namespace anyflash {

namespace {

thread_local std::string last_error;

anyflash_status fail(anyflash_status status, const char* function, const char* message) noexcept {
  try {
    last_error = std::string(function) + ": " + message;
  } catch (...) {
    last_error.clear();
  }
  return status;
}

template <class Function>
anyflash_status guarded(const char* name, const Function& function) noexcept {
  try {
    function();
    return ANYFLASH_OK;
  } catch (const Error& error) {
    return fail(static_cast<anyflash_status>(error.code()), name, error.what());
  } catch (const std::exception& error) {
    return fail(ANYFLASH_INTERNAL_ERROR, name, error.what());
  } catch (...) {
    return fail(ANYFLASH_INTERNAL_ERROR, name, "unknown error");
  }
}

// Reads the fields that the caller knows into `known`, whose others keep their defaults. A caller
// that is newer than this library may only pass defaults (zeros) in what this library does not
// know.
template <class Options>
void read_options(const Options* given, const char* type, Options& known) {
  if (given == nullptr) return;
  if (given->size < sizeof(given->size)) {
    throw Error(ErrorCode::kInvalidValue, "options.size is " + std::to_string(given->size) +
                                              "; it must be sizeof(" + type + ")");
  }
  const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
  bool unknown = false;
  for (std::size_t i = sizeof(known); i < given->size; ++i) unknown |= bytes[i] != 0;
  std::memcpy(&known, given, std::min(sizeof(known), given->size));
  if (unknown || known.reserved != 0) {
    throw Error(ErrorCode::kUnsupported,
                "options sets a field that this version of anyflash, " ANYFLASH_VERSION_STRING
                ", does not know");
  }
}

ForwardOptions options_of(const anyflash_forward_options& c) {
  if (c.cpu_isa < ANYFLASH_CPU_AUTO || c.cpu_isa > ANYFLASH_CPU_NEON) {
    throw Error(ErrorCode::kInvalidValue, "options.cpu_isa is " + std::to_string(c.cpu_isa) +
                                              "; a value of anyflash_cpu_isa is allowed");
  }
  ForwardOptions options;
  if (c.has_softmax_scale != 0) options.softmax_scale = c.softmax_scale;
  options.causal = c.causal != 0;
  options.num_threads = c.num_threads;
  options.cpu_isa = static_cast<CpuIsa>(c.cpu_isa);
  options.stream = c.stream;
  if (c.has_window_left != 0) options.window_left = c.window_left;
  if (c.has_window_right != 0) options.window_right = c.window_right;
  options.softcap = c.softcap;
  if (c.block_mask != nullptr) options.block_size = {c.block_size[0], c.block_size[1]};
  options.dropout_p = c.dropout_p;
  options.seed = c.seed;
  options.offset = c.offset;
  options.max_seqlen_q = c.max_seqlen_q;
  options.max_seqlen_k = c.max_seqlen_k;
  options.validate = c.validate != 0;
  return options;
}

// A tensor that may be absent.
class OptionalView {
 public:
  OptionalView(const DLTensor* tensor, const char* argument, const char* allowed) {
    if (tensor != nullptr) view_ = view_of(tensor, argument, allowed);
  }
  const TensorView* get() const { return view_ ? &*view_ : nullptr; }

 private:
  std::optional<TensorView> view_;
};

constexpr char kMustBeFloat32[] = "it must be float32";
constexpr char kMustBeBool[] = "it must be bool";
constexpr char kMustBeInt32[] = "it must be int32";

// The options' tensors as views, at addresses that stay.
struct OptionalTensors {
  explicit OptionalTensors(const anyflash_forward_options& c)
      : alibi_slopes(c.alibi_slopes, "alibi_slopes", nullptr),
        bias(c.bias, "bias", "bool, float64, float32, float16 and bfloat16 are allowed"),
        block_mask(c.block_mask, "block_mask", kMustBeBool),
        sinks(c.sinks, "sinks", nullptr),
        rng_state(c.rng_state, "rng_state", "it must be int64"),
        dropout_mask(c.dropout_mask, "dropout_mask", kMustBeBool),
        max_logits(c.max_logits, "max_logits", kMustBeFloat32),
        cu_seqlens_q(c.cu_seqlens_q, "cu_seqlens_q", kMustBeInt32),
        cu_seqlens_k(c.cu_seqlens_k, "cu_seqlens_k", kMustBeInt32),
        seqused_k(c.seqused_k, "seqused_k", kMustBeInt32) {}

  void put_into(ForwardOptions& options) const {
    options.alibi_slopes = alibi_slopes.get();
    options.bias = bias.get();
    options.block_mask = block_mask.get();
    options.sinks = sinks.get();
    options.rng_state = rng_state.get();
    options.dropout_mask = dropout_mask.get();
    options.max_logits = max_logits.get();
    options.cu_seqlens_q = cu_seqlens_q.get();
    options.cu_seqlens_k = cu_seqlens_k.get();
    options.seqused_k = seqused_k.get();
  }

  OptionalView alibi_slopes, bias, block_mask, sinks, rng_state, dropout_mask, max_logits;
  OptionalView cu_seqlens_q, cu_seqlens_k, seqused_k;
};

anyflash_forward_options known_options(const anyflash_forward_options* given) {
  anyflash_forward_options known = ANYFLASH_FORWARD_OPTIONS_INIT;
  read_options(given, "anyflash_forward_options", known);
  return known;
}

// The options that the forward was given, without its outputs.
anyflash_forward_options known_inputs(const anyflash_forward_options* given) {
  anyflash_forward_options known = known_options(given);
  known.dropout_mask = known.max_logits = nullptr;
  return known;
}

// The arguments that all functions share. `options` points into the object.
struct CommonArguments {
  CommonArguments(const DLTensor* q_, const DLTensor* k_, const DLTensor* v_, const DLTensor* out_,
                  const anyflash_forward_options& known)
      : q(view_of(q_, "q")),
        k(view_of(k_, "k")),
        v(view_of(v_, "v")),
        out(view_of(out_, "out")),
        options(options_of(known)),
        tensors(known) {
    tensors.put_into(options);
  }
  CommonArguments(const CommonArguments&) = delete;
  CommonArguments& operator=(const CommonArguments&) = delete;

  TensorView q, k, v, out;
  ForwardOptions options;
  OptionalTensors tensors;
};

struct ForwardArguments : CommonArguments {
  ForwardArguments(const DLTensor* q_, const DLTensor* k_, const DLTensor* v_, const DLTensor* out_,
                   const DLTensor* lse_, const anyflash_forward_options* options_)
      : CommonArguments(q_, k_, v_, out_, known_options(options_)),
        lse(lse_, "lse", kMustBeFloat32) {}

  OptionalView lse;
};

anyflash_backward_options known_options(const anyflash_backward_options* given) {
  anyflash_backward_options known = ANYFLASH_BACKWARD_OPTIONS_INIT;
  read_options(given, "anyflash_backward_options", known);
  return known;
}

struct BackwardArguments : CommonArguments {
  BackwardArguments(const DLTensor* dout_, const DLTensor* q_, const DLTensor* k_,
                    const DLTensor* v_, const DLTensor* out_, const DLTensor* lse_,
                    const DLTensor* dq_, const DLTensor* dk_, const DLTensor* dv_,
                    const anyflash_forward_options* options_,
                    const anyflash_backward_options& known)
      : CommonArguments(q_, k_, v_, out_, known_inputs(options_)),
        dout(view_of(dout_, "dout")),
        lse(view_of(lse_, "lse", kMustBeFloat32)),
        dq(view_of(dq_, "dq")),
        dk(view_of(dk_, "dk")),
        dv(view_of(dv_, "dv")),
        dlse(known.dlse, "dlse", kMustBeFloat32),
        dbias(known.dbias, "dbias", nullptr),
        dsinks(known.dsinks, "dsinks", nullptr),
        dalibi_slopes(known.dalibi_slopes, "dalibi_slopes", nullptr) {
    backward_options.deterministic = known.deterministic != 0;
    backward_options.dlse = dlse.get();
    backward_options.dbias = dbias.get();
    backward_options.dsinks = dsinks.get();
    backward_options.dalibi_slopes = dalibi_slopes.get();
  }

  TensorView dout, lse, dq, dk, dv;
  OptionalView dlse, dbias, dsinks, dalibi_slopes;
  BackwardOptions backward_options;
};

void check_bytes(const std::size_t* bytes) {
  if (bytes == nullptr) throw Error(ErrorCode::kInvalidValue, "bytes is NULL");
}

MergeOptions options_of(const anyflash_merge_options* given) {
  anyflash_merge_options known = ANYFLASH_MERGE_OPTIONS_INIT;
  read_options(given, "anyflash_merge_options", known);
  MergeOptions options;
  options.num_threads = known.num_threads;
  options.stream = known.stream;
  return options;
}

}  // namespace

}  // namespace anyflash

using anyflash::BackwardArguments;
using anyflash::ForwardArguments;
using anyflash::guarded;

extern "C" {

anyflash_status anyflash_forward_workspace_size(const DLTensor* q, const DLTensor* k,
                                                const DLTensor* v, const DLTensor* out,
                                                const DLTensor* lse,
                                                const anyflash_forward_options* options,
                                                size_t* bytes) {
  return guarded("anyflash_forward_workspace_size", [&] {
    anyflash::check_bytes(bytes);
    const ForwardArguments a(q, k, v, out, lse, options);
    *bytes = anyflash::forward_workspace_size(a.q, a.k, a.v, a.out, a.lse.get(), a.options);
  });
}

anyflash_status anyflash_forward(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                                 const DLTensor* out, const DLTensor* lse,
                                 const anyflash_forward_options* options, void* workspace,
                                 size_t workspace_bytes) {
  return guarded("anyflash_forward", [&] {
    const ForwardArguments a(q, k, v, out, lse, options);
    anyflash::forward(a.q, a.k, a.v, a.out, a.lse.get(), a.options, {workspace, workspace_bytes});
  });
}

anyflash_status anyflash_backward_workspace_size(
    const DLTensor* dout, const DLTensor* q, const DLTensor* k, const DLTensor* v,
    const DLTensor* out, const DLTensor* lse, const DLTensor* dq, const DLTensor* dk,
    const DLTensor* dv, const anyflash_forward_options* options,
    const anyflash_backward_options* backward_options, size_t* bytes) {
  return guarded("anyflash_backward_workspace_size", [&] {
    anyflash::check_bytes(bytes);
    const BackwardArguments a(dout, q, k, v, out, lse, dq, dk, dv, options,
                              anyflash::known_options(backward_options));
    *bytes = anyflash::backward_workspace_size(a.dout, a.q, a.k, a.v, a.out, a.lse, a.dq, a.dk,
                                               a.dv, a.options, a.backward_options);
  });
}

anyflash_status anyflash_backward(const DLTensor* dout, const DLTensor* q, const DLTensor* k,
                                  const DLTensor* v, const DLTensor* out, const DLTensor* lse,
                                  const DLTensor* dq, const DLTensor* dk, const DLTensor* dv,
                                  const anyflash_forward_options* options,
                                  const anyflash_backward_options* backward_options,
                                  void* workspace, size_t workspace_bytes) {
  return guarded("anyflash_backward", [&] {
    const BackwardArguments a(dout, q, k, v, out, lse, dq, dk, dv, options,
                              anyflash::known_options(backward_options));
    anyflash::backward(a.dout, a.q, a.k, a.v, a.out, a.lse, a.dq, a.dk, a.dv, a.options,
                       a.backward_options, {workspace, workspace_bytes});
  });
}

anyflash_status anyflash_merge_states(const DLTensor* out_a, const DLTensor* lse_a,
                                      const DLTensor* out_b, const DLTensor* lse_b,
                                      const DLTensor* out, const DLTensor* lse,
                                      const anyflash_merge_options* options) {
  using namespace anyflash;
  return guarded("anyflash_merge_states", [&] {
    const OptionalView lse_view(lse, "lse", kMustBeFloat32);
    merge_states(view_of(out_a, "out_a"), view_of(lse_a, "lse_a", kMustBeFloat32),
                 view_of(out_b, "out_b"), view_of(lse_b, "lse_b", kMustBeFloat32),
                 view_of(out, "out"), lse_view.get(), options_of(options));
  });
}

const char* anyflash_last_error(void) { return anyflash::last_error.c_str(); }

const char* anyflash_version(void) { return ANYFLASH_VERSION_STRING; }

size_t anyflash_kernel_count(void) { return anyflash::counted_kernels().size(); }

const char* anyflash_kernel_name(size_t index) {
  const auto kernels = anyflash::counted_kernels();
  return index < kernels.size() ? kernels[index].row->name : nullptr;
}

uint64_t anyflash_kernel_launches(size_t index) {
  const auto kernels = anyflash::counted_kernels();
  return index < kernels.size() ? kernels[index].launches : 0;
}

}  // extern "C"
