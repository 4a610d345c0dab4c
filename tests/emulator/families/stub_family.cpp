// A second family of kernels beside sm80: it is built, listed, and dispatched to where it can run.
#include <cmath>
#include <cstdint>
#include <string>

#include "../../cpp/check.h"
#include "../../cpp/tensor.h"
#include "anyflash/attention.h"

extern "C" void emulated_set_compute_capability(int value);  // device_emulated.cpp

namespace {

using anyflash::DType;
using anyflash::ForwardOptions;
using anyflash::KernelInfo;
using test::Layout;
using test::Tensor;

uint64_t launches(const std::string& arch) {
  uint64_t count = 0;
  for (const KernelInfo& kernel : anyflash::kernels()) {
    if (kernel.arch == arch) count += kernel.launches;
  }
  return count;
}

// Of a causal problem whose last rows fill no tile.
struct Problem {
  Problem() {
    q.fill(1);
    k.fill(2);
    v.fill(3);
    for (Tensor* t : {&q, &k, &v, &out}) t->view.device.type = anyflash::DeviceType::kCuda;
  }

  // The family that ran.
  std::string run(const ForwardOptions& options) {
    const uint64_t stub = launches("stub");
    const uint64_t sm80 = launches("sm80");
    const auto tensors = test::forward_tensors(q.view, k.view, v.view, out.view);
    CHECK(test::run_exactly(anyflash::ForwardPlan(tensors, options)));
    if (launches("stub") > stub) return "stub";
    return launches("sm80") > sm80 ? "sm80" : "none";
  }

  Tensor q{DType::kFloat16, {2, 45, 4, 32}, Layout{}};
  Tensor k{DType::kFloat16, {2, 70, 2, 32}, Layout{}};
  Tensor v{DType::kFloat16, {2, 70, 2, 32}, Layout{}};
  Tensor out{DType::kFloat16, {2, 45, 4, 32}, Layout{}};
};

void check_listed() {
  int found = 0;
  for (const KernelInfo& kernel : anyflash::kernels()) {
    if (kernel.name != "stub_forward_f16_d32") continue;
    ++found;
    CHECK_EQ(kernel.arch, std::string("stub"));
    CHECK_EQ(kernel.block_m, 32);
    CHECK(kernel.features.empty());
  }
  CHECK_EQ(found, 1);
}

void check_dispatched() {
  ForwardOptions options;
  options.causal = true;
  Problem of_stub;
  CHECK_EQ(of_stub.run(options), std::string("stub"));
  // On a GPU that the family does not know, and with a feature that it lacks, sm80 runs.
  Problem of_sm80;
  emulated_set_compute_capability(89);
  CHECK_EQ(of_sm80.run(options), std::string("sm80"));
  emulated_set_compute_capability(80);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 45; ++i) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t x = 0; x < 32; ++x) {
          const double difference = of_stub.out.get({b, i, h, x}) - of_sm80.out.get({b, i, h, x});
          CHECK(std::fabs(difference) < 4e-3);
        }
      }
    }
  }
  options.softcap = 3.0;
  CHECK_EQ(of_sm80.run(options), std::string("sm80"));
}

}  // namespace

int main() {
  check_listed();
  check_dispatched();
  return check::report();
}
