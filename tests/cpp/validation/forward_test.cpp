// Every error of ForwardPlan: its code, its words, and that nothing has been written.
#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "many_threads.h"
#include "tensor.h"
#include "validation.h"

namespace {

using anyflash::CpuIsa;
using anyflash::DeviceType;
using anyflash::ErrorCode;
using anyflash::TensorView;
using test::Call;
using test::Case;
using test::check_case;
using test::check_throws;
using test::DType;
using test::kType;
using test::kValue;

constexpr int64_t kHuge = int64_t{1} << 31;

const Case kShapeCases[] = {
    {"q rank", [](Call& c) { c.q.rank = 3; }, kValue, {"q has 3 dim", "(2, 5, 4)", "expected 4"}},
    {"q rank 5", [](Call& c) { c.q.rank = 5; }, kValue, {"q has 5 dimensions", "expected 4"}},
    {"k rank", [](Call& c) { c.k.rank = 2; }, kValue, {"k has 2 dim", "(2, 6)", "seqlen_k"}},
    {"v rank", [](Call& c) { c.v.rank = 1; }, kValue, {"v has 1 dim", "(2,)", "head_dim_v"}},
    {"out rank", [](Call& c) { c.out.rank = 0; }, kValue, {"out has 0 dim", "shape ()"}},
    {"no heads", [](Call& c) { c.q.shape[2] = 0; }, kValue, {"q has shape (2, 5, 0, 8)", "heads"}},
    {"no head dim", [](Call& c) { c.q.shape[3] = 0; }, kValue, {"(2, 5, 4, 0)", "head_dim"}},
    {"no k heads", [](Call& c) { c.k.shape[2] = 0; }, kValue, {"k has 0 heads", "q's 4"}},
    {"k heads", [](Call& c) { c.k.shape[2] = 3; }, kValue, {"k has 3 heads", "divide q's 4"}},
    {"more k heads", [](Call& c) { c.k.shape[2] = 8; }, kValue, {"k has 8 heads", "q's 4"}},
    {"k batch",
     [](Call& c) { c.k.shape[0] = 3; },
     kValue,
     {"k has shape (3, 6, 2, 8)", "expected (2, 6, 2, 8)", "q's batch"}},
    {"k head dim",
     [](Call& c) { c.k.shape[3] = 7; },
     kValue,
     {"k has shape (2, 6, 2, 7)", "expected (2, 6, 2, 8)", "head_dim"}},
    {"v length",
     [](Call& c) { c.v.shape[1] = 7; },
     kValue,
     {"v has shape (2, 7, 2, 3)", "expected (2, 6, 2, 3)", "seqlen_k"}},
    {"v heads", [](Call& c) { c.v.shape[2] = 4; }, kValue, {"v has shape (2, 6, 4, 3)", "k's"}},
    {"no v columns", [](Call& c) { c.v.shape[3] = 0; }, kValue, {"v has shape (2, 6, 2, 0)"}},
    {"out batch", [](Call& c) { c.out.shape[0] = 1; }, kValue, {"out has shape (1, 5, 4, 3)"}},
    {"out columns",
     [](Call& c) { c.out.shape[3] = 8; },
     kValue,
     {"out has shape (2, 5, 4, 8)", "expected (2, 5, 4, 3)", "v's head_dim"}},
    {"lse rank", [](Call& c) { c.lse.rank = 2; }, kValue, {"lse has 2 dim", "expected 3"}},
    {"lse shape",
     [](Call& c) { std::swap(c.lse.shape[1], c.lse.shape[2]); },
     kValue,
     {"lse has shape (2, 5, 4)", "expected (2, 4, 5)"}},
    {"negative length", [](Call& c) { c.k.shape[1] = c.v.shape[1] = -1; }, kValue, {"-1"}},
    {"negative batch",
     [](Call& c) {
       for (TensorView* t : {&c.q, &c.k, &c.v, &c.out, &c.lse}) t->shape[0] = -2;
     },
     kValue,
     {"q", "-2"}},
    {"long q",
     [](Call& c) { c.q.shape[1] = c.out.shape[1] = c.lse.shape[2] = kHuge; },
     kValue,
     {"q has seqlen_q 2147483648", "at most 2147479552"}},
    {"long k",
     [](Call& c) { c.k.shape[1] = c.v.shape[1] = kHuge; },
     kValue,
     {"k has seqlen_k 2147483648", "at most 2147479552"}},
    {"wide q",
     [](Call& c) { c.q.shape[3] = c.k.shape[3] = kHuge; },
     kValue,
     {"q has head_dim 2147483648", "at most"}},
    {"wide v",
     [](Call& c) { c.v.shape[3] = c.out.shape[3] = kHuge; },
     kValue,
     {"v has head_dim_v 2147483648", "at most"}},
};

const Case kOtherCases[] = {
    {"k dtype",
     [](Call& c) { c.k.dtype = DType::kFloat64; },
     kType,
     {"k is float64", "q is float32", "one dtype"}},
    {"q is of integers",
     [](Call& c) { c.q.dtype = DType::kInt32; },
     kType,
     {"q is int32; float64, float32, float16 and bfloat16 are allowed"}},
    {"q is boolean", [](Call& c) { c.q.dtype = DType::kBool; }, kType, {"q is bool; float64"}},
    {"v dtype", [](Call& c) { c.v.dtype = DType::kFloat16; }, kType, {"v is float16", "q is"}},
    {"out dtype",
     [](Call& c) { c.out.dtype = DType::kBFloat16; },
     kType,
     {"out is bfloat16", "or be float32"}},
    {"integer out", [](Call& c) { c.out.dtype = DType::kInt64; }, kType, {"out is int64"}},
    {"lse dtype",
     [](Call& c) { c.lse.dtype = DType::kFloat16; },
     kType,
     {"lse is float16; it must be float32 or, on the CPU, float64"}},
    {"k device",
     [](Call& c) { c.k.device = {DeviceType::kCuda, 1}; },
     kValue,
     {"k is on cuda:1", "q is on cpu", "one device"}},
    {"out device",
     [](Call& c) { c.out.device = {DeviceType::kCuda, 0}; },
     kValue,
     {"out is on cuda:0", "q is on cpu"}},
    {"lse device",
     [](Call& c) { c.lse.device = {DeviceType::kCuda, 0}; },
     kValue,
     {"lse is on cuda:0", "q is on cpu"}},
    {"out repeats elements",
     [](Call& c) { c.out.stride[2] = 0; },
     kValue,
     {"out has stride 0 in dimension 2", "(2, 5, 4, 3)"}},
    {"lse repeats elements",
     [](Call& c) { c.lse.stride[0] = 0; },
     kValue,
     {"lse has stride 0 in dimension 0", "(2, 4, 5)"}},
    {"threads", [](Call& c) { c.options.num_threads = -3; }, kValue, {"num_threads is -3", "0"}},
    {"k rank, and heads that do not fit",
     [](Call& c) {
       c.k.rank = 3;
       c.k.shape = {2, 6, 8, 0};
     },
     kValue,
     {"k has 3 dimensions, shape (2, 6, 8); expected 4"}},
    {"k address",
     [](Call& c) { c.k.data = static_cast<char*>(c.k.data) + 1; },
     kValue,
     {"k is float32, but its address is not a multiple of 4 bytes"}},
    {"v address",
     [](Call& c) { c.v.data = static_cast<char*>(c.v.data) + 2; },
     kValue,
     {"v is float32, but its address"}},
    {"out address",
     [](Call& c) { c.out.data = static_cast<char*>(c.out.data) + 3; },
     kValue,
     {"out is float32, but its address"}},
    {"infinite scale",
     [](Call& c) { c.options.softmax_scale = std::numeric_limits<double>::infinity(); },
     kValue,
     {"softmax_scale is inf", "finite"}},
    {"scale is not a number",
     [](Call& c) { c.options.softmax_scale = std::nan(""); },
     kValue,
     {"softmax_scale is nan", "finite"}},
    {"scale beyond float32",
     [](Call& c) { c.options.softmax_scale = 1e39; },
     kValue,
     {"softmax_scale is", "float32"}},
#if defined(__x86_64__)
    {"another processor",
     [](Call& c) { c.options.cpu_isa = CpuIsa::kNeon; },
     ErrorCode::kUnsupported,
     {"cpu_isa is neon"}},
#elif defined(__aarch64__)
    {"another processor",
     [](Call& c) { c.options.cpu_isa = CpuIsa::kAvx2; },
     ErrorCode::kUnsupported,
     {"cpu_isa is avx2"}},
#endif
};

// float64 has the range for what float32 refuses.
void check_wide_scale() {
  Call call;
  for (TensorView* t : {&call.q, &call.k, &call.v, &call.out}) t->dtype = DType::kFloat64;
  call.options.softmax_scale = 1e39;
  CHECK(call.workspace_size() > 0);
}

void check_no_device() {
  const anyflash::BuildInfo info = anyflash::build_info();
  if (!info.devices.empty()) return;
  Call call;
  for (TensorView* t : {&call.q, &call.k, &call.v, &call.out, &call.lse}) {
    t->device = {DeviceType::kCuda, 0};
  }
  CHECK(!info.device_error.empty());
  const ErrorCode code = info.cuda ? ErrorCode::kDevice : ErrorCode::kUnsupported;
  check_throws([&] { call.workspace_size(); }, "no device", code, {info.device_error});
  check_throws([&] { call.run({nullptr, 0}); }, "no device", code, {info.device_error});
  CHECK(call.untouched());
}

// Extents that no tensor has: what is counted first is named.
void check_huge() {
  constexpr int64_t kMuch = int64_t{1} << 53;
  for (const int64_t batch : {1, 2}) {  // 2^56 elements, and 2^57
    Call call;
    call.k.shape = {batch, kMuch, 1, 8};
    const char* const words = batch == 2 ? "at most 2^56 elements are allowed" : "k";
    check_throws([&] { call.plan(); }, "huge k", kValue, {"k", words});
    if (batch == 1) test::check_says_no([&] { call.plan(); }, "2^56");
  }
  Call heads;
  heads.q.shape[2] = heads.out.shape[2] = heads.lse.shape[1] = int64_t{1} << 32;
  check_throws([&] { heads.plan(); }, "heads", kValue, {"q has heads 4294967296; at most"});
  Call ranks;
  ranks.q.rank = 9;
  test::check_says_no([&] { ranks.plan(); }, "shape");
}

void check_workspace() {
  Call call;
  const std::size_t bytes = call.workspace_size();
  CHECK_EQ(call.workspace_size(), bytes);
  const test::ExactBytes memory(bytes + 256);
  auto* const data = static_cast<char*>(memory.workspace().data);
  check_throws([&] { call.run({data, bytes - 1}); }, "too small", kValue,
               {"workspace has " + std::to_string(bytes - 1) + " bytes", std::to_string(bytes)});
  check_throws([&] { call.run({}); }, "none", kValue, {"workspace has 0 bytes"});
  check_throws([&] { call.run({nullptr, bytes}); }, "null", kValue, {"workspace"});
  CHECK(call.untouched());
  call.run({data, bytes + 256});  // more is allowed
  CHECK(!call.untouched());

  // More threads need more memory; without work none is needed.
  const test::ManyThreads many_threads;
  Call threads;
  threads.options.num_threads = 1;
  const std::size_t one = threads.workspace_size();
  threads.options.num_threads = 4;
  CHECK(threads.workspace_size() > one);
  Call empty;
  for (TensorView* t : {&empty.q, &empty.k, &empty.v, &empty.out, &empty.lse}) t->shape[0] = 0;
  CHECK_EQ(empty.workspace_size(), std::size_t{0});
  empty.run({});
  CHECK(empty.untouched());
}

}  // namespace

int main() {
  for (const Case& test_case : kShapeCases) check_case(test_case);
  for (const Case& test_case : kOtherCases) check_case(test_case);
  check_wide_scale();
  check_no_device();
  check_huge();
  check_workspace();
  Call largest;  // of the scales that float32 kernels take
  largest.options.softmax_scale = static_cast<double>(std::numeric_limits<float>::max()) / 2;
  CHECK(largest.plan().workspace_bytes() > 0);
  return check::report();
}
