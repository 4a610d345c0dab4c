// The C ABI: converts arguments, catches everything, keeps the message of the last failure.
#include <cstddef>
#include <exception>
#include <string>

#include "anyflash/anyflash.h"
#include "anyflash/attention.h"
#include "anyflash/version.h"
#include "c_arguments.h"
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

// Of kernel `index`; of one that there is not, or without memory for the list of kernels: nothing.
template <class T, class Function>
T of_kernel(const char* name, std::size_t index, T nothing, const Function& function) noexcept {
  guarded(name, [&] {
    const auto& kernels = all_kernels();
    if (index < kernels.size()) nothing = function(*kernels[index]);
  });
  return nothing;
}

void check_bytes(const std::size_t* bytes) {
  if (bytes == nullptr) throw Error(ErrorCode::kInvalidValue, "bytes is NULL");
}

}  // namespace

}  // namespace anyflash

using anyflash::BackwardArguments;
using anyflash::CKvCacheArguments;
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
    *bytes = a.plan().workspace_bytes();
  });
}

anyflash_status anyflash_forward(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                                 const DLTensor* out, const DLTensor* lse,
                                 const anyflash_forward_options* options, void* workspace,
                                 size_t workspace_bytes) {
  return guarded("anyflash_forward", [&] {
    const ForwardArguments a(q, k, v, out, lse, options);
    a.plan().run({workspace, workspace_bytes}, a.stream);
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
    *bytes = a.plan().workspace_bytes();
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
    a.plan().run({workspace, workspace_bytes}, a.stream);
  });
}

anyflash_status anyflash_dq_sums_size(const DLTensor* q, int64_t head_dim_v,
                                      const anyflash_forward_options* options, size_t* bytes) {
  return guarded("anyflash_dq_sums_size", [&] {
    anyflash::check_bytes(bytes);
    const anyflash::CommonArguments a(q, q, anyflash::known_inputs(options));
    *bytes = anyflash::BackwardPlan::dq_sums_bytes(a.q, head_dim_v, a.options);
  });
}

anyflash_status anyflash_forward_with_kvcache_workspace_size(
    const DLTensor* q, const DLTensor* k_cache, const DLTensor* v_cache, const DLTensor* out,
    const DLTensor* lse, const anyflash_forward_options* options,
    const anyflash_kvcache_options* cache_options, size_t* bytes) {
  return guarded("anyflash_forward_with_kvcache_workspace_size", [&] {
    anyflash::check_bytes(bytes);
    const CKvCacheArguments a(q, k_cache, v_cache, out, lse, options, cache_options);
    *bytes = a.plan().workspace_bytes();
  });
}

anyflash_status anyflash_forward_with_kvcache(const DLTensor* q, const DLTensor* k_cache,
                                              const DLTensor* v_cache, const DLTensor* out,
                                              const DLTensor* lse,
                                              const anyflash_forward_options* options,
                                              const anyflash_kvcache_options* cache_options,
                                              void* workspace, size_t workspace_bytes) {
  return guarded("anyflash_forward_with_kvcache", [&] {
    const CKvCacheArguments a(q, k_cache, v_cache, out, lse, options, cache_options);
    a.plan().run({workspace, workspace_bytes}, a.stream);
  });
}

anyflash_status anyflash_merge_states(const DLTensor* out_a, const DLTensor* lse_a,
                                      const DLTensor* out_b, const DLTensor* lse_b,
                                      const DLTensor* out, const DLTensor* lse,
                                      const anyflash_merge_options* options) {
  using namespace anyflash;
  return guarded("anyflash_merge_states", [&] {
    const OptionalView lse_view(lse, "lse", kLsesAllowed);
    merge_states(view_of(out_a, "out_a"), view_of(lse_a, "lse_a", kLsesAllowed),
                 view_of(out_b, "out_b"), view_of(lse_b, "lse_b", kLsesAllowed),
                 view_of(out, "out"), lse_view.get(), options_of(options));
  });
}

const char* anyflash_last_error(void) { return anyflash::last_error.c_str(); }

const char* anyflash_version(void) { return ANYFLASH_VERSION_STRING; }

size_t anyflash_kernel_count(void) {
  std::size_t count = 0;
  guarded("anyflash_kernel_count", [&] { count = anyflash::all_kernels().size(); });
  return count;
}

const char* anyflash_kernel_name(size_t index) {
  const auto name_of = [](const anyflash::KernelDescriptor& kernel) { return kernel.name; };
  return anyflash::of_kernel<const char*>("anyflash_kernel_name", index, nullptr, name_of);
}

uint64_t anyflash_kernel_launches(size_t index) {
  return anyflash::of_kernel<uint64_t>("anyflash_kernel_launches", index, 0, anyflash::launches_of);
}

}  // extern "C"
