// The table of kernels, the counters of launches, and the thread-local error message.
#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "anyflash/anyflash.h"
#include "check.h"
#include "many_threads.h"
#include "tensor.h"

namespace {

using anyflash::BuildInfo;
using anyflash::CpuIsa;
using anyflash::KernelInfo;
using test::DType;
using test::Tensor;

constexpr const char* kOps[] = {"forward", "backward", "decode"};  // GPUs also prefill

// What the CPU's kernels of an operation can do.
std::vector<std::string> all_features(const std::string& op) {
  if (op == "decode") return {"softcap", "alibi", "quantized_cache"};
  if (op == "prefill") return {"softcap", "alibi"};
  return {"softcap", "alibi", "bias", "block_mask", "key_ranges", "dropout"};
}

void check_table() {
  const std::vector<KernelInfo> kernels = anyflash::kernels();
  CHECK_EQ(kernels.size(), anyflash_kernel_count());
  std::set<std::string> names;
  for (std::size_t i = 0; i < kernels.size(); ++i) {
    const KernelInfo& kernel = kernels[i];
    CHECK_MSG(names.insert(kernel.name).second, kernel.name + " is listed twice");
    CHECK_EQ(kernel.name, std::string(anyflash_kernel_name(i)));
    const bool known = std::find(std::begin(kOps), std::end(kOps), kernel.op) != std::end(kOps);
    CHECK_MSG(known || kernel.op == "prefill", kernel.op);
    CHECK_MSG(check::contains(kernel.name, "_" + kernel.op + "_"), kernel.name);
    for (const std::string tile_config : {"compact", "wide"}) {
      CHECK_MSG(
          check::contains(kernel.name, "_" + tile_config) == (kernel.tile_config == tile_config),
          kernel.name);
    }
    CHECK_MSG(kernel.block_m > 0 && kernel.block_n > 0, kernel.name);
    const bool cpu = kernel.arch.rfind("cpu-", 0) == 0;
    CHECK_MSG(cpu == (kernel.head_dim == 0 && kernel.head_dim_v == 0 && kernel.warps == 0 &&
                      kernel.smem_bytes == 0),
              kernel.name);
    const std::vector<std::string> all = all_features(kernel.op);
    if (cpu) CHECK_MSG(kernel.features == all, kernel.name);
    for (const std::string& feature : kernel.features) {
      CHECK_MSG(std::find(all.begin(), all.end(), feature) != all.end(), feature);
    }
  }
}

// AMX has tiles of bfloat16; what else there is runs as for AVX-512.
bool is_row_of(const std::string& isa, const std::string& op, DType dtype) {
  return isa != "amx" || (op != "decode" && dtype == DType::kBFloat16);
}

// Every instruction set of the build has every operation and dtype, once.
void check_cpu_rows() {
  const BuildInfo info = anyflash::build_info();
  CHECK(!info.cpu_isas.empty());
  CHECK(info.cpu_threads >= 1);
  CHECK_EQ(info.version, std::string(anyflash_version()));
  CHECK_EQ(info.cuda, !info.cuda_archs.empty());
  CHECK_EQ(info.cuda, !info.cuda_version.empty());
  CHECK_EQ(info.devices.empty(), !info.device_error.empty());
  bool used_is_built = false;
  std::size_t cpu_rows = 0;
  for (const std::string& isa : info.cpu_isas) {
    used_is_built = used_is_built || isa == info.cpu_isa;
    for (const std::string op : kOps) {
      for (const DType dtype : test::kDTypes) {
        int count = 0;
        for (const KernelInfo& kernel : anyflash::kernels()) {
          count += kernel.arch == "cpu-" + isa && kernel.op == op && kernel.dtype == dtype;
        }
        const int expected = is_row_of(isa, op, dtype);
        CHECK_MSG(count == expected,
                  isa + ", " + op + ", dtype " + std::to_string(static_cast<int>(dtype)));
        cpu_rows += static_cast<std::size_t>(expected);
      }
    }
  }
  CHECK(used_is_built);
  for (const KernelInfo& kernel : anyflash::kernels()) cpu_rows -= kernel.arch != "sm80";
  CHECK_EQ(cpu_rows, std::size_t{0});
}

std::map<std::string, std::uint64_t> launches() {
  std::map<std::string, std::uint64_t> result;
  for (std::size_t i = 0; i < anyflash_kernel_count(); ++i) {
    result[anyflash_kernel_name(i)] = anyflash_kernel_launches(i);
  }
  for (const KernelInfo& kernel : anyflash::kernels()) {
    CHECK_EQ(kernel.launches, result[kernel.name]);
  }
  return result;
}

void call_backward(const Tensor& t, int64_t batch, const anyflash::ForwardOptions& options) {
  Tensor lse(DType::kFloat32, {batch, 2, 4, 1});
  lse.fill(5);
  lse.view.rank = 3;
  const Tensor dq(t.view.dtype, t.view.shape);
  const Tensor dk(t.view.dtype, t.view.shape);
  const Tensor dv(t.view.dtype, t.view.shape);
  const auto& x = t.view;
  anyflash::BackwardTensors tensors;
  tensors.dout = tensors.q = tensors.k = tensors.v = tensors.out = x;
  tensors.lse = lse.view;
  tensors.dq = dq.view;
  tensors.dk = dk.view;
  tensors.dv = dv.view;
  CHECK(test::run_exactly(anyflash::BackwardPlan(tensors, options, {})));
}

void call_decode(const Tensor& q, const Tensor& cache, const Tensor& out,
                 const anyflash::ForwardOptions& options) {
  const auto& x = cache.view;
  const auto tensors = test::kvcache_tensors(q.view, x, x, out.view);
  CHECK(test::run_exactly(anyflash::KvCachePlan(tensors, options, {})));
}

void call(const std::string& op, DType dtype, int64_t batch, int num_threads) {
  Tensor q(dtype, {batch, 4, 2, 8});
  Tensor k(dtype, {batch, 4, 2, 8});
  Tensor v(dtype, {batch, 4, 2, 8});
  const Tensor out(dtype, {batch, 4, 2, 8});
  unsigned seed = 1;
  for (Tensor* input : {&q, &k, &v}) input->fill(seed++);
  anyflash::ForwardOptions options;
  options.num_threads = num_threads;
  if (op == "backward") return call_backward(q, batch, options);
  if (op == "decode") return call_decode(q, k, out, options);
  const auto tensors = test::forward_tensors(q.view, k.view, v.view, out.view);
  CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, options)));
}

// Calls from several threads count once each, on the row that ran and on no other.
void check_counters() {
  constexpr int kThreads = 4;
  constexpr int kCalls = 25;
  const std::string best = anyflash::build_info().cpu_isa;
  for (const std::string op : kOps) {
    for (const DType dtype : test::kDTypes) {
      const std::string arch = "cpu-" + (is_row_of(best, op, dtype) ? best : "avx512");
      std::map<std::string, std::uint64_t> expected = launches();
      for (const KernelInfo& kernel : anyflash::kernels()) {
        if (kernel.arch == arch && kernel.op == op && kernel.dtype == dtype) {
          expected[kernel.name] += kThreads * kCalls;
        }
      }
      std::vector<std::thread> threads;
      for (int i = 0; i < kThreads; ++i) {
        threads.emplace_back([op, dtype] {
          for (int repeat = 0; repeat < kCalls; ++repeat) call(op, dtype, 1, 1);
        });
      }
      for (std::thread& thread : threads) thread.join();
      CHECK(launches() == expected);
    }
  }
}

// What fails, or has nothing to do, launches nothing.
void check_not_counted() {
  const auto before = launches();
  for (const std::string op : kOps) {
    call(op, DType::kFloat32, 0, 1);
    try {
      call(op, DType::kFloat32, 1, -1);
      CHECK(false);
    } catch (const anyflash::Error&) {
      CHECK(true);
    }
  }
  CHECK(launches() == before);
}

void check_error_is_thread_local() {
  size_t bytes = 0;
  CHECK(anyflash_forward_workspace_size(nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                        &bytes) == ANYFLASH_INVALID_VALUE);
  CHECK(check::contains(anyflash_last_error(), "q is NULL"));
  std::string other = "not read";
  std::thread([&other] { other = anyflash_last_error(); }).join();
  CHECK_EQ(other, std::string());
  CHECK(check::contains(anyflash_last_error(), "q is NULL"));
}

}  // namespace

int main() {
  const test::ManyThreads many_threads;
  check_table();
  check_cpu_rows();
  check_counters();
  check_not_counted();
  check_error_is_thread_local();
  return check::report();
}
