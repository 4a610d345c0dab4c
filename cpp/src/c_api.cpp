// The C ABI: converts arguments, catches everything, keeps the message of the last failure.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <exception>
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

// Reads the fields that the caller knows; the others keep their defaults. A caller that is newer
// than this library may only pass defaults (zeros) in what this library does not know.
ForwardOptions options_of(const anyflash_forward_options* given) {
  anyflash_forward_options c = ANYFLASH_FORWARD_OPTIONS_INIT;
  if (given != nullptr) {
    if (given->size < sizeof(given->size)) {
      throw Error(ErrorCode::kInvalidValue, "options.size is " + std::to_string(given->size) +
                                                "; it must be sizeof(anyflash_forward_options)");
    }
    const auto* const bytes = reinterpret_cast<const unsigned char*>(given);
    for (std::size_t i = sizeof(c); i < given->size; ++i) {
      if (bytes[i] != 0) {
        throw Error(ErrorCode::kUnsupported,
                    "options sets a field that this version of anyflash, " ANYFLASH_VERSION_STRING
                    ", does not know");
      }
    }
    std::memcpy(&c, given, std::min(sizeof(c), given->size));
  }
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
  return options;
}

// The arguments that both functions share.
struct ForwardArguments {
  TensorView q, k, v, out, lse;
  bool has_lse;
  ForwardOptions options;

  ForwardArguments(const DLTensor* q_, const DLTensor* k_, const DLTensor* v_, const DLTensor* out_,
                   const DLTensor* lse_, const anyflash_forward_options* options_)
      : q(view_of(q_, "q")),
        k(view_of(k_, "k")),
        v(view_of(v_, "v")),
        out(view_of(out_, "out")),
        has_lse(lse_ != nullptr),
        options(options_of(options_)) {
    if (has_lse) lse = view_of(lse_, "lse");
  }
  const TensorView* lse_or_null() const { return has_lse ? &lse : nullptr; }
};

}  // namespace

}  // namespace anyflash

using anyflash::ForwardArguments;
using anyflash::guarded;

extern "C" {

anyflash_status anyflash_forward_workspace_size(const DLTensor* q, const DLTensor* k,
                                                const DLTensor* v, const DLTensor* out,
                                                const DLTensor* lse,
                                                const anyflash_forward_options* options,
                                                size_t* bytes) {
  return guarded("anyflash_forward_workspace_size", [&] {
    if (bytes == nullptr) {
      throw anyflash::Error(anyflash::ErrorCode::kInvalidValue, "bytes is NULL");
    }
    const ForwardArguments a(q, k, v, out, lse, options);
    *bytes = anyflash::forward_workspace_size(a.q, a.k, a.v, a.out, a.lse_or_null(), a.options);
  });
}

anyflash_status anyflash_forward(const DLTensor* q, const DLTensor* k, const DLTensor* v,
                                 const DLTensor* out, const DLTensor* lse,
                                 const anyflash_forward_options* options, void* workspace,
                                 size_t workspace_bytes) {
  return guarded("anyflash_forward", [&] {
    const ForwardArguments a(q, k, v, out, lse, options);
    anyflash::forward(a.q, a.k, a.v, a.out, a.lse_or_null(), a.options,
                      {workspace, workspace_bytes});
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
