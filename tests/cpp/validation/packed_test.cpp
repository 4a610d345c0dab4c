// Errors of packed sequences: their tensors, and their lengths, which only run() reads.
#include <algorithm>
#include <string>
#include <vector>

#include "backward_problem.h"
#include "check.h"
#include "tensor.h"
#include "validation.h"

namespace {

using anyflash::TensorView;
using test::CaseOf;
using test::check_allowed;
using test::check_case;
using test::check_throws;
using test::DType;
using test::Full;
using test::kType;
using test::kValue;
using test::on_gpu;
using test::SmallTensor;

// The same elements as three packed sequences: queries 3, 0, 2 and keys 1, 2, 3.
struct Packed : Full {
  Packed() {
    for (TensorView* t : {&q, &k, &v, &out}) {
      t->rank = 3;
      for (std::size_t i = 0; i < 3; ++i) {
        t->shape[i] = t->shape[i + 1];
        t->stride[i] = t->stride[i + 1];
      }
    }
    lse.rank = 2;
    lse.shape = {4, 5};
    lse.stride = {5, 1};
    starts_q.assign<int32_t>({0, 3, 3, 5});
    starts_k.assign<int32_t>({0, 1, 3, 6});
    packed_used.assign<int32_t>({1, 0, 2});
    options.cu_seqlens_q = &starts_q.view;
    options.cu_seqlens_k = &starts_k.view;
    options.max_seqlen_q = 4;
    options.max_seqlen_k = 7;  // more than there are
    options.seqused_k = &packed_used.view;
    options.alibi_slopes = &packed_slopes.view;
    options.bias = &packed_bias.view;
    options.block_mask = &packed_blocks.view;
    options.key_ranges = &packed_ranges.view;
    options.dropout_mask = &packed_mask.view;
    options.max_logits = &packed_maxima.view;
  }

  SmallTensor starts_q{DType::kInt32, {4}};
  SmallTensor starts_k{DType::kInt32, {4}};
  SmallTensor packed_used{DType::kInt32, {3}};
  SmallTensor packed_slopes{DType::kFloat32, {4}};
  SmallTensor packed_bias{DType::kBool, {3, 1, 4, 7}};
  SmallTensor packed_blocks{DType::kBool, {1, 4, 1, 1}};
  SmallTensor packed_ranges{DType::kInt32, {2, 6, 2}};
  SmallTensor packed_mask{DType::kBool, {3, 4, 4, 7}};
  SmallTensor packed_maxima{DType::kFloat32, {3, 4}};
};

const CaseOf<Packed> kPacked[] = {
    {"only queries",
     [](Packed& c) { c.options.cu_seqlens_k = nullptr; },
     kValue,
     {"cu_seqlens_q is given without cu_seqlens_k; both or none are allowed"}},
    {"only keys",
     [](Packed& c) { c.options.cu_seqlens_q = nullptr; },
     kValue,
     {"cu_seqlens_k is given without cu_seqlens_q"}},
    {"only keys, and queries as without both",
     [](Packed& c) {
       c.options.cu_seqlens_q = nullptr;
       c.q.rank = 4;
     },
     kValue,
     {"cu_seqlens_k is given without cu_seqlens_q"}},
    {"q rank",
     [](Packed& c) { c.q.rank = 4; },
     kValue,
     {"q has 4 dimensions, shape (5, 4, 8, ", "expected 3: (total_q, heads, head_dim) with cu_"}},
    {"out rank", [](Packed& c) { c.out.rank = 2; }, kValue, {"out has 2 dim", "expected 3"}},
    {"lse rank",
     [](Packed& c) { c.lse.rank = 3; },
     kValue,
     {"lse has 3 dimensions", "expected 2: (heads, total_q)"}},
    {"lse shape",
     [](Packed& c) { std::swap(c.lse.shape[0], c.lse.shape[1]); },
     kValue,
     {"lse has shape (5, 4); expected (4, 5): (heads, total_q)"}},
    {"k head dim",
     [](Packed& c) { c.k.shape[2] = 7; },
     kValue,
     {"k has shape (6, 2, 7); expected (6, 2, 8), with q's head_dim"}},
    {"v rows",
     [](Packed& c) { c.v.shape[0] = 5; },
     kValue,
     {"v has shape (5, 2, 3); expected (6, 2, 3), with k's total_k and heads"}},
    {"out rows",
     [](Packed& c) { c.out.shape[0] = 6; },
     kValue,
     {"out has shape (6, 4, 3); expected (5, 4, 3): q's total_q and heads"}},
    {"k heads", [](Packed& c) { c.k.shape[1] = 3; }, kValue, {"k has 3 heads", "divide q's 4"}},
    {"too many rows",
     [](Packed& c) { c.q.shape[0] = c.out.shape[0] = c.lse.shape[1] = int64_t{1} << 31; },
     kValue,
     {"q has total_q 2147483648; at most"}},
    {"starts type",
     [](Packed& c) { c.starts_q.view.dtype = DType::kInt64; },
     kType,
     {"cu_seqlens_q is int64; it must be int32"}},
    {"starts rank",
     [](Packed& c) { c.starts_k.view.rank = 2; },
     kValue,
     {"cu_seqlens_k has 2 dimensions", "(batch + 1,)"}},
    {"no starts",
     [](Packed& c) { c.starts_q.view.shape[0] = c.starts_k.view.shape[0] = 0; },
     kValue,
     {"cu_seqlens_q has shape (0,); expected batch + 1 elements"}},
    {"fewer starts",
     [](Packed& c) { c.starts_k.view.shape[0] = 3; },
     kValue,
     {"cu_seqlens_k has shape (3,); expected (4,), as cu_seqlens_q"}},
    {"starts stride",
     [](Packed& c) { c.starts_q.view.stride[0] = -1; },
     kValue,
     {"cu_seqlens_q has stride -1; it must be contiguous"}},
    {"starts device",
     [](Packed& c) { c.starts_k.view = on_gpu(c.starts_k.view); },
     kValue,
     {"cu_seqlens_k is on cuda:0, but q is on cpu"}},
    {"negative bound",
     [](Packed& c) { c.options.max_seqlen_q = -1; },
     kValue,
     {"max_seqlen_q is -1; the length of the longest sequence"}},
    {"large bound",
     [](Packed& c) { c.options.max_seqlen_k = int64_t{1} << 31; },
     kValue,
     {"max_seqlen_k is 2147483648", "0 to 2147479552"}},
    {"bias of another length",
     [](Packed& c) { c.packed_bias.view.shape[3] = 6; },
     kValue,
     {"bias has shape (3, 1, 4, 6); expected (3 or 1, 4 or 1, 4 or 1, 7 or 1): (batch or 1, "
      "heads or 1, max_seqlen_q or 1, max_seqlen_k or 1)"}},
    {"dropout mask of another length",
     [](Packed& c) { c.packed_mask.view.shape[2] = 5; },
     kValue,
     {"expected (3, 4, 4, 7): (batch, heads, max_seqlen_q, max_seqlen_k)"}},
    {"blocks of another length",
     [](Packed& c) { c.packed_blocks.view.shape[2] = 2; },
     kValue,
     {"blocks of 128 x 128 of 4 queries and 7 keys, max_seqlen_q and max_seqlen_k"}},
    {"ranges of a batch",
     [](Packed& c) { c.packed_ranges.view.rank = 4; },
     kValue,
     {"key_ranges has 4 dim", "expected 3: (heads_k or 1, total_k, 2 or 4)"}},
    {"ranges of the longest",
     [](Packed& c) { c.packed_ranges.view.shape[1] = 7; },
     kValue,
     {"key_ranges has shape (2, 7, 2); expected (2 or 1, 6, 2): (heads_k or 1, total_k, 2 or 4)"}},
    {"used of another batch",
     [](Packed& c) { c.packed_used.view.shape[0] = 2; },
     kValue,
     {"seqused_k has shape (2,); expected (3,)"}},
};

// Of lengths, only run() can say that they are wrong: making a plan reads nothing.
const CaseOf<Packed> kLengths[] = {
    {"first",
     [](Packed& c) { c.starts_q.data<int32_t>()[0] = 1; },
     kValue,
     {"cu_seqlens_q[0] is 1; it must be 0"}},
    {"decreases",
     [](Packed& c) { c.starts_k.data<int32_t>()[2] = 0; },
     kValue,
     {"cu_seqlens_k[2] is 0, less than cu_seqlens_k[1], 1"}},
    {"last, smaller",
     [](Packed& c) { c.starts_q.data<int32_t>()[3] = 4; },
     kValue,
     {"cu_seqlens_q[3] is 4; it must be the number of rows of q, 5"}},
    {"last, larger",
     [](Packed& c) { c.starts_k.data<int32_t>()[3] = 7; },
     kValue,
     {"cu_seqlens_k[3] is 7; it must be the number of rows of k, 6"}},
    {"overflow",
     [](Packed& c) {
       c.starts_q.data<int32_t>()[1] = INT32_MAX;
       c.starts_q.data<int32_t>()[2] = INT32_MIN;
       c.options.max_seqlen_q = 2147479552;
       c.options.bias = c.options.block_mask = c.options.dropout_mask = nullptr;
     },
     kValue,
     {"cu_seqlens_q"}},
    {"longer than the bound",
     [](Packed& c) {
       c.options.max_seqlen_q = 2;
       c.options.bias = nullptr;
       c.options.dropout_mask = nullptr;
     },
     kValue,
     {"sequence 0 of cu_seqlens_q has length 3; max_seqlen_q is 2"}},
    {"longer than there are rows",
     [](Packed& c) {
       c.starts_q.assign<int32_t>({0, 9, 9, 5});
       c.options.max_seqlen_q = 0;
       c.options.bias = c.options.dropout_mask = nullptr;
     },
     kValue,
     {"sequence 0 of cu_seqlens_q has length 9; q has 5 rows"}},
    {"negative use",
     [](Packed& c) { c.packed_used.data<int32_t>()[1] = -1; },
     kValue,
     {"seqused_k[1] is -1; 0 to the sequence's number of keys, 2, is allowed"}},
    {"a negative start",
     [](Packed& c) {
       static SmallTensor starts(DType::kInt32, {3});
       starts.assign<int32_t>({0, -1, 0});
       c.options.query_starts = &starts.view;
     },
     kValue,
     {"query_starts[1] is -1; 0 to 1073741824 is allowed"}},
    {"a start between draws",
     [](Packed& c) {
       static SmallTensor starts(DType::kInt32, {3});
       starts.assign<int32_t>({8, 9, 0});
       c.options.key_starts = &starts.view;
     },
     kValue,
     {"key_starts[1] is 9; 0 to 1073741824, with dropout a multiple of 8, is allowed"}},
    {"a diagonal too low",
     [](Packed& c) {
       static SmallTensor diagonals(DType::kInt32, {3});
       diagonals.assign<int32_t>({0, -(1 << 30), -(1 << 30) - 1});
       c.options.diagonals = &diagonals.view;
     },
     kValue,
     {"diagonals[2] is -1073741825; -1073741824 to 1073741824 is allowed"}},
    {"a diagonal too high",
     [](Packed& c) {
       static SmallTensor diagonals(DType::kInt32, {3});
       diagonals.assign<int32_t>({(1 << 30) + 1, 0, 0});
       c.options.diagonals = &diagonals.view;
     },
     kValue,
     {"diagonals[0] is 1073741825; -1073741824 to 1073741824 is allowed"}},
    {"more use than keys",
     [](Packed& c) { c.packed_used.data<int32_t>()[0] = 2; },
     kValue,
     {"seqused_k[0] is 2", "keys, 1,"}},
};

void check_lengths() {
  for (const CaseOf<Packed>& test_case : kLengths) {
    Packed call;
    test_case.change(call);
    const test::ExactBytes memory(call.workspace_size());
    check_throws([&] { call.run(memory.workspace()); }, test_case.name, test_case.code,
                 test_case.words);
    CHECK_MSG(call.untouched(), test_case.name);
    CHECK_MSG(call.packed_maxima.data<float>()[0] == 0.0f, test_case.name);
  }
  Full batched;
  batched.used.data<int32_t>()[1] = 7;
  const test::ExactBytes memory(batched.workspace_size());
  check_throws([&] { batched.run(memory.workspace()); }, "batched", kValue,
               {"seqused_k[1] is 7", "keys, 6,"});
  CHECK(batched.untouched());
}

// Bounds that are not given are the numbers of rows: the forward and the backward do the same.
void check_no_bounds() {
  Packed call;
  call.options.bias = call.options.dropout_mask = nullptr;
  CHECK(test::run_exactly(call.plan()));
  const std::vector<unsigned char> out = call.out_memory.bytes, lse = call.lse_memory.bytes;
  std::fill(call.out_memory.bytes.begin(), call.out_memory.bytes.end(), 0xff);
  call.options.max_seqlen_q = call.options.max_seqlen_k = 0;
  CHECK(test::run_exactly(call.plan()));
  CHECK(call.out_memory.bytes == out && call.lse_memory.bytes == lse);
  // What has the shape of the bounds has that of the rows then.
  SmallTensor bias(DType::kFloat32, {1, 1, 5, 6}), mask(DType::kBool, {3, 4, 5, 6});
  call.options.bias = &bias.view;
  call.options.dropout_mask = &mask.view;
  CHECK(test::run_exactly(call.plan()));
  mask.view.shape[2] = 4;
  check_throws([&] { call.plan(); }, "mask", kValue, {"dropout_mask has shape (3, 4, 4, 6)"});

  test::BackwardProblem p({3, 6, 7, 4, 2, 8, 3}, test::kPacked, DType::kFloat32,
                          test::Layout::kContiguous, 1);
  p.forward();
  p.backward();
  const std::vector<unsigned char> dq = p.dq->bytes, dk = p.dk->bytes;
  p.options.max_seqlen_q = p.options.max_seqlen_k = 0;
  for (auto* t : {&p.dq, &p.dk}) std::fill((*t)->bytes.begin(), (*t)->bytes.end(), 0xff);
  p.backward();
  CHECK(p.dq->bytes == dq && p.dk->bytes == dk);
}

// The address and the strides of what has no second element mean nothing.
void check_no_sequences() {
  Packed none;
  for (TensorView* t : {&none.starts_q.view, &none.starts_k.view}) {
    t->shape[0] = 1;
    t->stride[0] = 100;
  }
  none.packed_used.view.shape[0] = none.packed_mask.view.shape[0] = 0;
  none.packed_maxima.view.shape[0] = 0;
  none.packed_bias.view.shape[0] = 1;
  none.packed_ranges.view.shape[1] = 0;
  for (TensorView* t : {&none.q, &none.k, &none.v, &none.out}) t->shape[0] = 0;
  none.lse.shape[1] = 0;
  CHECK_EQ(none.workspace_size(), std::size_t{0});
  none.run({});
  CHECK(none.untouched());
}

}  // namespace

int main() {
  check_allowed<Packed>();
  for (const auto& test_case : kPacked) check_case(test_case);
  check_lengths();
  check_no_bounds();
  check_no_sequences();
  return check::report();
}
