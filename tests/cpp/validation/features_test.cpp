// Errors of ForwardPlan's options, as forward_test.cpp has those of q, k, v, out and lse.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "check.h"
#include "tensor.h"
#include "validation.h"

namespace {

using anyflash::DeviceType;
using anyflash::TensorView;
using test::CaseOf;
using test::check_allowed;
using test::check_case;
using test::check_says_no;
using test::check_throws;
using test::DType;
using test::Full;
using test::kType;
using test::kValue;
using test::on_gpu;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

const CaseOf<Full> kNumbers[] = {
    {"left", [](Full& c) { c.options.window_left = -2; }, kValue, {"window_left is -2; -1 (no b"}},
    {"right",
     [](Full& c) { c.options.window_right = INT64_MIN; },
     kValue,
     {"window_right is -9223372036854775808; -1"}},
    {"negative softcap", [](Full& c) { c.options.softcap = -1; }, kValue, {"softcap is -1; 0 ("}},
    {"NaN softcap", [](Full& c) { c.options.softcap = std::nan(""); }, kValue, {"softcap is nan"}},
    {"infinite softcap", [](Full& c) { c.options.softcap = kInfinity; }, kValue, {"is inf", "0"}},
    {"softcap beyond float32", [](Full& c) { c.options.softcap = 1e39; }, kValue, {"float32's"}},
    {"softcap below float32", [](Full& c) { c.options.softcap = 1e-40; }, kValue, {"float32's"}},
    {"p = 1",
     [](Full& c) { c.options.dropout_p = 1.0; },
     kValue,
     {"dropout_p is 1; 0 <= dropout_p < 1"}},
    {"negative p", [](Full& c) { c.options.dropout_p = -0.1; }, kValue, {"dropout_p is -0.1"}},
    {"NaN p", [](Full& c) { c.options.dropout_p = std::nan(""); }, kValue, {"dropout_p is nan"}},
    {"block rows",
     [](Full& c) { c.options.block_size = {32, 64}; },
     kValue,
     {"block_size[0] is 32; a positive multiple of 64"}},
    {"block columns",
     [](Full& c) { c.options.block_size = {64, 0}; },
     kValue,
     {"block_size[1] is 0; a positive multiple of 64"}},
    {"query_start",
     [](Full& c) { c.options.query_start = -1; },
     kValue,
     {"query_start is -1; 0 to 1073741824 is allowed"}},
    {"key_start", [](Full& c) { c.options.key_start = INT64_MAX; }, kValue, {"key_start is 9223"}},
    {"key_start with dropout",
     [](Full& c) {
       c.options.dropout_p = 0.5;
       c.options.key_start = 12;
     },
     kValue,
     {"key_start is 12; with dropout a multiple of 8 is allowed"}},
    {"another key_start with dropout",
     [](Full& c) { c.options.key_start = 9; },
     kValue,
     {"key_start is 9; with dropout a multiple of 8 is allowed"}},
    {"diagonal",
     [](Full& c) { c.options.diagonal = -(int64_t{1} << 31); },
     kValue,
     {"diagonal is -2147483648; -1073741824 to 1073741824 is allowed"}},
    {"batch_start", [](Full& c) { c.options.batch_start = -3; }, kValue, {"batch_start is -3; 0"}},
    {"head_start", [](Full& c) { c.options.head_start = -3; }, kValue, {"head_start is -3; 0"}},
    {"total_heads",
     [](Full& c) {
       c.options.head_start = 2;
       c.options.total_heads = 5;
     },
     kValue,
     {"total_heads is 5; at least 6, head_start and q's heads, is expected"}},
    {"large block",
     [](Full& c) { c.options.block_size = {int64_t{1} << 31, 64}; },
     kValue,
     {"block_size[0] is 2147483648"}},
};

const CaseOf<Full> kInputs[] = {
    {"starts of the wrong type",
     [](Full& c) {
       static const test::SmallTensor starts(DType::kInt64, {2});
       c.options.query_starts = &starts.view;
     },
     kType,
     {"query_starts is int64; it must be int32"}},
    {"starts of the wrong length",
     [](Full& c) {
       static const test::SmallTensor starts(DType::kInt32, {3});
       c.options.key_starts = &starts.view;
     },
     kValue,
     {"key_starts has shape (3,); expected (2,), one for each sequence"}},
    {"a number and an array",
     [](Full& c) {
       static const test::SmallTensor starts(DType::kInt32, {2});
       c.options.diagonals = &starts.view;
       c.options.diagonal = 3;
     },
     kValue,
     {"diagonal is given with diagonals; only one of both is allowed"}},
    {"slopes of no float",
     [](Full& c) { c.slopes.view.dtype = DType::kInt32; },
     kType,
     {"alibi_slopes is int32; float64, float32, float16 and bfloat16 are allowed"}},
    {"slopes rank",
     [](Full& c) { c.slopes.view.rank = 0; },
     kValue,
     {"alibi_slopes has 0 dimensions", "(heads,) or (batch or 1, heads)"}},
    {"slopes batch",
     [](Full& c) { c.slopes.view.shape[0] = 3; },
     kValue,
     {"alibi_slopes has shape (3, 4); expected (2 or 1, 4)"}},
    {"slopes heads",
     [](Full& c) { c.slopes.view.shape[1] = 1; },
     kValue,
     {"alibi_slopes has shape (2, 1); expected (2 or 1, 4)"}},
    {"slopes of one rank",
     [](Full& c) {
       c.slopes.view.rank = 1;
       c.slopes.view.shape[0] = 2;
     },
     kValue,
     {"alibi_slopes has shape (2,); expected (4,), one for each head of q"}},
    {"slopes device",
     [](Full& c) { c.slopes.view = on_gpu(c.slopes.view); },
     kValue,
     {"alibi_slopes is on cuda:0, but q is on cpu", "one device"}},
    {"slopes address",
     [](Full& c) { c.slopes.view.data = c.slopes.data<char>() + 2; },
     kValue,
     {"alibi_slopes is float32", "not a multiple of 4 bytes"}},
    {"slopes of nothing",
     [](Full& c) { c.slopes.view.data = nullptr; },
     kValue,
     {"alibi_slopes has a NULL data pointer"}},
    {"bias of integers",
     [](Full& c) { c.bias.view.dtype = DType::kInt64; },
     kType,
     {"bias is int64; bool, float64, float32"}},
    {"bias rank",
     [](Full& c) { c.bias.view.rank = 3; },
     kValue,
     {"bias has 3 dimensions", "(batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1)"}},
    {"bias keys",
     [](Full& c) { c.bias.view.shape[3] = 5; },
     kValue,
     {"bias has shape (1, 4, 1, 5); expected (2 or 1, 4 or 1, 5 or 1, 6 or 1)"}},
    {"bias rows", [](Full& c) { c.bias.view.shape[2] = 0; }, kValue, {"bias has shape (1, 4, 0"}},
    {"bias heads", [](Full& c) { c.bias.view.shape[1] = 2; }, kValue, {"bias has shape (1, 2"}},
    {"bias batch", [](Full& c) { c.bias.view.shape[0] = 3; }, kValue, {"bias has shape (3, 4"}},
    {"bias device",
     [](Full& c) { c.bias.view = on_gpu(c.bias.view); },
     kValue,
     {"bias is on cuda:0, but q is on cpu"}},
    {"boolean bias device",
     [](Full& c) {
       c.bias.view = on_gpu(c.bias.view);
       c.bias.view.dtype = DType::kBool;
     },
     kValue,
     {"bias is on cuda:0, but q is on cpu"}},
    {"blocks of numbers",
     [](Full& c) { c.blocks.view.dtype = DType::kFloat32; },
     kType,
     {"block_mask is float32; it must be bool"}},
    {"blocks rank", [](Full& c) { c.blocks.view.rank = 2; }, kValue, {"block_mask has 2 dim"}},
    {"blocks data",
     [](Full& c) { c.blocks.view.data = nullptr; },
     kValue,
     {"block_mask has a NULL data pointer"}},
    {"blocks of queries",
     [](Full& c) { c.blocks.view.shape[2] = 2; },
     kValue,
     {"block_mask has shape (2, 1, 2, 1); expected (2 or 1, 4 or 1, 1, 1)",
      "blocks of 128 x 128 of 5 queries and 6 keys"}},
    {"blocks of keys",
     [](Full& c) { c.blocks.view.shape[3] = 0; },
     kValue,
     {"block_mask has shape (2, 1, 1, 0); expected (2 or 1, 4 or 1, 1, 1)"}},
    {"blocks device",
     [](Full& c) { c.blocks.view = on_gpu(c.blocks.view); },
     kValue,
     {"block_mask is on cuda:0"}},
    {"ranges of numbers",
     [](Full& c) { c.ranges.view.dtype = DType::kFloat32; },
     kType,
     {"key_ranges is float32; it must be int32"}},
    {"ranges of wide numbers",
     [](Full& c) { c.ranges.view.dtype = DType::kInt64; },
     kType,
     {"key_ranges is int64; it must be int32"}},
    {"ranges rank",
     [](Full& c) { c.ranges.view.rank = 3; },
     kValue,
     {"key_ranges has 3 dim", "expected 4: (batch or 1, heads_k or 1, seqlen_k, 2 or 4)"}},
    {"ranges batch", [](Full& c) { c.ranges.view.shape[0] = 3; }, kValue, {"(3, 1, 6, 4)"}},
    {"ranges heads",
     [](Full& c) { c.ranges.view.shape[1] = 4; },
     kValue,
     {"key_ranges has shape (2, 4, 6, 4); expected (2 or 1, 2 or 1, 6, 4): (batch or 1"}},
    {"ranges of one key",
     [](Full& c) { c.ranges.view.shape[2] = 1; },
     kValue,
     {"key_ranges has shape (2, 1, 1, 4); expected (2 or 1, 2 or 1, 6, 4)"}},
    {"ranges of three numbers",
     [](Full& c) { c.ranges.view.shape[3] = 3; },
     kValue,
     {"key_ranges has shape (2, 1, 6, 3); expected (2 or 1, 2 or 1, 6, 2)", "2 or 4)"}},
    {"ranges data",
     [](Full& c) { c.ranges.view.data = nullptr; },
     kValue,
     {"key_ranges has a NULL data pointer"}},
    {"ranges device",
     [](Full& c) { c.ranges.view = on_gpu(c.ranges.view); },
     kValue,
     {"key_ranges is on cuda:0"}},
    {"ranges address",
     [](Full& c) { c.ranges.view.data = static_cast<char*>(c.ranges.view.data) + 2; },
     kValue,
     {"key_ranges is int32, but its address is not a multiple of 4 bytes"}},
    {"sinks type", [](Full& c) { c.sinks.view.dtype = DType::kBool; }, kType, {"sinks is bool"}},
    {"sinks shape",
     [](Full& c) { c.sinks.view.shape[0] = 2; },
     kValue,
     {"sinks has shape (2,); expected (4,), one for each head of q"}},
    {"sinks rank", [](Full& c) { c.sinks.view.rank = 2; }, kValue, {"sinks has 2 dim", "heads,"}},
    {"state type",
     [](Full& c) { c.rng_state.view.dtype = DType::kInt32; },
     kType,
     {"rng_state is int32; it must be int64"}},
    {"state shape",
     [](Full& c) { c.rng_state.view.shape[0] = 1; },
     kValue,
     {"rng_state has shape (1,); expected (2,): seed and offset"}},
    {"state stride",
     [](Full& c) { c.rng_state.view.stride[0] = 2; },
     kValue,
     {"rng_state has stride 2; it must be contiguous"}},
    {"state address",
     [](Full& c) { c.rng_state.view.data = c.rng_state.data<char>() + 4; },
     kValue,
     {"rng_state is int64", "not a multiple of 8 bytes"}},
    {"ranges rank",
     [](Full& c) { c.ranges.view.rank = 3; },
     kValue,
     {"key_ranges has 3 dimensions, shape (2, 1, 6); expected 4: (batch or 1, heads_k or 1, seq"}},
    {"used type",
     [](Full& c) { c.used.view.dtype = DType::kInt64; },
     kType,
     {"seqused_k is int64; it must be int32"}},
    {"used shape",
     [](Full& c) { c.used.view.shape[0] = 3; },
     kValue,
     {"seqused_k has shape (3,); expected (2,), one for each sequence"}},
    {"used stride",
     [](Full& c) { c.used.view.stride[0] = 0; },
     kValue,
     {"seqused_k has stride 0; it must be contiguous"}},
};

const CaseOf<Full> kOutputs[] = {
    {"mask type",
     [](Full& c) { c.mask.view.dtype = DType::kFloat32; },
     kType,
     {"dropout_mask is float32; it must be bool"}},
    {"mask shape",
     [](Full& c) { c.mask.view.shape[2] = 1; },
     kValue,
     {"dropout_mask has shape (2, 4, 1, 6); expected (2, 4, 5, 6)"}},
    {"mask repeats elements",
     [](Full& c) { c.mask.view.stride[1] = 0; },
     kValue,
     {"dropout_mask has stride 0 in dimension 1"}},
    {"mask device",
     [](Full& c) { c.mask.view = on_gpu(c.mask.view); },
     kValue,
     {"dropout_mask is on cuda:0"}},
    {"maxima type",
     [](Full& c) { c.maxima.view.dtype = DType::kFloat64; },
     kType,
     {"max_logits is float64; it must be float32"}},
    {"maxima shape",
     [](Full& c) { c.maxima.view.shape[0] = 1; },
     kValue,
     {"max_logits has shape (1, 4); expected (2, 4)"}},
    {"maxima device",
     [](Full& c) { c.maxima.view = on_gpu(c.maxima.view); },
     kValue,
     {"max_logits is on cuda:0, but q is on cpu"}},
    {"maxima repeat elements",
     [](Full& c) { c.maxima.view.stride[0] = 0; },
     kValue,
     {"max_logits has stride 0 in dimension 0"}},
};

// At the edge of what is allowed.
void check_edges() {
  Full wide;
  for (TensorView* t : {&wide.q, &wide.k, &wide.v, &wide.out}) t->dtype = DType::kFloat64;
  wide.options.softcap = 1e39;
  CHECK(wide.workspace_size() > 0);
  Full windows;
  windows.options.window_left = windows.options.window_right = INT64_MAX;
  windows.options.dropout_p = 1.0 - 1e-16;
  CHECK(windows.workspace_size() > 0);
  for (const int64_t start : {0, 8}) {
    Full part;
    part.options.key_start = start;
    CHECK(part.workspace_size() > 0);
  }
  Full starts;  // of no multiple of 8, but without dropout
  test::SmallTensor key_starts(DType::kInt32, {2});
  key_starts.assign<int32_t>({4, 0});
  starts.options.key_starts = &key_starts.view;
  starts.options.dropout_p = 0;
  starts.options.rng_state = nullptr;
  starts.options.dropout_mask = nullptr;
  CHECK(test::run_exactly(starts.plan()));
}

// float64 has no bound of float32's, and sequences that are not packed have no longest one.
void check_messages() {
  Full wide;
  for (TensorView* t : {&wide.q, &wide.k, &wide.v, &wide.out}) t->dtype = DType::kFloat64;
  wide.options.softcap = 1e-300;
  CHECK(wide.workspace_size() > 0);
  wide.options.softmax_scale = kInfinity;
  check_says_no([&] { wide.plan(); }, "half of float32's");
  Full blocks;
  blocks.blocks.view.shape[2] = 2;
  check_says_no([&] { blocks.plan(); }, "max_seqlen_q");
}

// What the host refuses for a GPU's tensors, before it looks for one.
void check_gpu_types() {
  Full call;
  for (TensorView* t : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.slopes.view,
                        &call.bias.view, &call.blocks.view, &call.sinks.view, &call.rng_state.view,
                        &call.mask.view, &call.maxima.view, &call.used.view}) {
    t->device = {DeviceType::kCuda, 0};
  }
  check_throws([&] { call.workspace_size(); }, "float64 bias", kType,
               {"bias is float64; on a GPU bool, float32, float16 and bfloat16 are allowed"});
  call.bias.view.dtype = DType::kBool;
  for (const int64_t stride : {int64_t{1} << 31, -(int64_t{1} << 31) - 1}) {
    call.bias.view.stride[3] = stride;
    check_throws([&] { call.workspace_size(); }, "stride along the keys",
                 anyflash::ErrorCode::kUnsupported,
                 {"bias has stride " + std::to_string(stride) + " along the keys", "32 bits"});
  }
  call.slopes.view.dtype = DType::kFloat64;
  check_throws([&] { call.workspace_size(); }, "float64 slopes", kType,
               {"alibi_slopes is float64; on a GPU float32, float16 and bfloat16 are allowed"});
}

}  // namespace

int main() {
  check_allowed<Full>();
  for (const auto& test_case : kNumbers) check_case(test_case);
  for (const auto& test_case : kInputs) check_case(test_case);
  for (const auto& test_case : kOutputs) check_case(test_case);
  check_edges();
  check_messages();
  check_gpu_types();
  return check::report();
}
