// Errors of BackwardPlan: those of its own arguments, and some of each kind that it shares with
// ForwardPlan, which the other validation tests have.
#include <cmath>
#include <string>
#include <vector>

#include "check.h"
#include "tensor.h"
#include "validation.h"

namespace {

using anyflash::BackwardOptions;
using anyflash::DeviceType;
using anyflash::ErrorCode;
using anyflash::TensorView;
using test::CaseOf;
using test::check_case;
using test::check_throws;
using test::DType;
using test::Full;
using test::kType;
using test::kValue;
using test::on_gpu;
using test::SmallTensor;
using test::Tensor;

// A call that uses everything. Two outputs are those of the forward, which the backward ignores.
struct Backward : Full {
  Backward() {
    unsigned seed = 10;
    for (Tensor* input : {&out_memory, &lse_memory, &dout_memory}) input->fill(seed++);
    wanted.dlse = &dlse.view;
    wanted.dbias = &dbias.view;
    wanted.dsinks = &dsinks.view;
    wanted.dalibi_slopes = &dslopes.view;
    for (SmallTensor* t : {&dbias, &dsinks, &dslopes, &mask, &maxima}) t->poison();
  }

  anyflash::BackwardPlan plan() const {
    anyflash::BackwardTensors tensors;
    tensors.dout = dout;
    tensors.q = q;
    tensors.k = k;
    tensors.v = v;
    tensors.out = out;
    tensors.lse = lse;
    tensors.dq = dq;
    tensors.dk = dk;
    tensors.dv = dv;
    return anyflash::BackwardPlan(tensors, options, wanted);
  }
  std::size_t workspace_size() const { return plan().workspace_bytes(); }
  void run(anyflash::Workspace workspace) const { plan().run(workspace); }
  bool untouched() const {
    return dq_memory.untouched() && dk_memory.untouched() && dv_memory.untouched() &&
           dbias.poisoned() && dsinks.poisoned() && dslopes.poisoned() && ignored_untouched();
  }
  bool ignored_untouched() const { return mask.poisoned() && maxima.poisoned(); }

  Tensor dout_memory{DType::kFloat32, {2, 5, 4, 3}};
  Tensor dq_memory{DType::kFloat32, {2, 5, 4, 8}};
  Tensor dk_memory{DType::kFloat32, {2, 6, 2, 8}};
  Tensor dv_memory{DType::kFloat32, {2, 6, 2, 3}};
  TensorView dout = dout_memory.view;
  TensorView dq = dq_memory.view;
  TensorView dk = dk_memory.view;
  TensorView dv = dv_memory.view;
  SmallTensor dlse{DType::kFloat32, {2, 4, 5}};
  SmallTensor dbias{DType::kFloat64, {1, 4, 1, 6}};
  SmallTensor dsinks{DType::kBFloat16, {4}};
  SmallTensor dslopes{DType::kFloat32, {2, 4}};
  BackwardOptions wanted;
};

using Case = CaseOf<Backward>;

const Case kShared[] = {
    {"q rank", [](Backward& c) { c.q.rank = 3; }, kValue, {"q has 3 dimensions", "expected 4"}},
    {"k heads", [](Backward& c) { c.k.shape[2] = 3; }, kValue, {"k has 3 heads", "divide q's 4"}},
    {"v dtype", [](Backward& c) { c.v.dtype = DType::kFloat16; }, kType, {"v is float16, but q"}},
    {"out dtype",
     [](Backward& c) { c.out.dtype = DType::kFloat64; },
     kType,
     {"out is float64, but q is float32; out must have q's dtype or be float32"}},
    {"out shape", [](Backward& c) { c.out.shape[3] = 8; }, kValue, {"out has shape (2, 5, 4, 8)"}},
    {"out device",
     [](Backward& c) { c.out = on_gpu(c.out); },
     kValue,
     {"out is on cuda:0, but q is on cpu"}},
    {"lse dtype",
     [](Backward& c) { c.lse.dtype = DType::kFloat64; },
     kType,
     {"lse is float64; it must be float32"}},
    {"lse shape",
     [](Backward& c) { c.lse.shape[1] = 5; },
     kValue,
     {"lse has shape (2, 5, 5); expected (2, 4, 5)"}},
    {"lse data", [](Backward& c) { c.lse.data = nullptr; }, kValue, {"lse has a NULL data poi"}},
    {"threads", [](Backward& c) { c.options.num_threads = -1; }, kValue, {"num_threads is -1"}},
    {"scale",
     [](Backward& c) { c.options.softmax_scale = std::nan(""); },
     kValue,
     {"softmax_scale is nan"}},
    {"bias shape", [](Backward& c) { c.bias.view.shape[3] = 5; }, kValue, {"bias has shape (1, 4"}},
    {"no keys of the other",
     [](Backward& c) { c.options.cu_seqlens_q = &c.used.view; },
     kValue,
     {"cu_seqlens_q is given without cu_seqlens_k"}},
};

const Case kMain[] = {
    {"dout rank",
     [](Backward& c) { c.dout.rank = 3; },
     kValue,
     {"dout has 3 dimensions, shape (2, 5, 4); expected 4: as out"}},
    {"dout shape",
     [](Backward& c) { c.dout.shape[1] = 6; },
     kValue,
     {"dout has shape (2, 6, 4, 3); expected (2, 5, 4, 3), as out"}},
    {"dout dtype",
     [](Backward& c) { c.dout.dtype = DType::kBFloat16; },
     kType,
     {"dout is bfloat16, but q is float32; dout must have q's dtype or be float32"}},
    {"dout device",
     [](Backward& c) { c.dout = on_gpu(c.dout); },
     kValue,
     {"dout is on cuda:0, but out is on cpu"}},
    {"dout data", [](Backward& c) { c.dout.data = nullptr; }, kValue, {"dout has a NULL data"}},
    {"dq shape",
     [](Backward& c) { c.dq.shape[3] = 7; },
     kValue,
     {"dq has shape (2, 5, 4, 7); expected (2, 5, 4, 8), as q"}},
    {"dq dtype",
     [](Backward& c) { c.dq.dtype = c.dk.dtype = c.dv.dtype = DType::kFloat64; },
     kType,
     {"dq is float64, but q is float32; dq must have q's dtype or be float32"}},
    {"dq device",
     [](Backward& c) { c.dq = on_gpu(c.dq); },
     kValue,
     {"dq is on cuda:0, but q is on cpu"}},
    {"dq repeats elements",
     [](Backward& c) { c.dq.stride[1] = 0; },
     kValue,
     {"dq has stride 0 in dimension 1 of shape (2, 5, 4, 8); an output must not"}},
    {"dq data", [](Backward& c) { c.dq.data = nullptr; }, kValue, {"dq has a NULL data pointer"}},
    {"dk shape",
     [](Backward& c) { c.dk.shape[2] = 4; },
     kValue,
     {"dk has shape (2, 6, 4, 8); expected (2, 6, 2, 8), as k"}},
    {"dk dtype",
     [](Backward& c) { c.dk.dtype = DType::kFloat16; },
     kType,
     {"dk is float16, but dq is float32; dq, dk and dv must have one dtype"}},
    {"dk device", [](Backward& c) { c.dk = on_gpu(c.dk); }, kValue, {"dk is on cuda:0, but k is"}},
    {"dk repeats elements",
     [](Backward& c) { c.dk.stride[0] = 0; },
     kValue,
     {"dk has stride 0 in dimension 0"}},
    {"dv rank",
     [](Backward& c) { c.dv.rank = 1; },
     kValue,
     {"dv has 1 dimensions, shape (2,); expected 4: as v"}},
    {"dv shape",
     [](Backward& c) { c.dv.shape[3] = 8; },
     kValue,
     {"dv has shape (2, 6, 2, 8); expected (2, 6, 2, 3), as v"}},
    {"dv dtype",
     [](Backward& c) { c.dv.dtype = DType::kFloat64; },
     kType,
     {"dv is float64, but dq is float32"}},
    {"dv device", [](Backward& c) { c.dv = on_gpu(c.dv); }, kValue, {"dv is on cuda:0, but v is"}},
    {"dv repeats elements",
     [](Backward& c) { c.dv.stride[3] = 0; },
     kValue,
     {"dv has stride 0 in dimension 3"}},
    {"dlse dtype",
     [](Backward& c) { c.dlse.view.dtype = DType::kFloat64; },
     kType,
     {"dlse is float64; it must be float32"}},
    {"dlse shape",
     [](Backward& c) { c.dlse.view.shape[2] = 4; },
     kValue,
     {"dlse has shape (2, 4, 4); expected (2, 4, 5), as lse"}},
    {"dlse device",
     [](Backward& c) { c.dlse.view = on_gpu(c.dlse.view); },
     kValue,
     {"dlse is on cuda:0, but lse is on cpu"}},
    {"dout address",
     [](Backward& c) { c.dout.data = static_cast<char*>(c.dout.data) + 2; },
     kValue,
     {"dout is float32, but its address is not a multiple of 4 bytes"}},
    {"dlse address",
     [](Backward& c) { c.dlse.view.data = c.dlse.data<char>() + 2; },
     kValue,
     {"dlse is float32", "not a multiple of 4 bytes"}},
};

const Case kSmall[] = {
    {"dbias without bias",
     [](Backward& c) { c.options.bias = nullptr; },
     kValue,
     {"dbias is given without bias"}},
    {"dbias of a boolean bias",
     [](Backward& c) { c.bias.view.dtype = DType::kBool; },
     kType,
     {"dbias is given, but bias is bool; only a bias of numbers has a gradient"}},
    {"dbias dtype",
     [](Backward& c) { c.dbias.view.dtype = DType::kFloat16; },
     kType,
     {"dbias is float16, but bias is float64; dbias must have bias's dtype or be float32"}},
    {"dbias shape",
     [](Backward& c) { c.dbias.view.shape[2] = 5; },
     kValue,
     {"dbias has shape (1, 4, 5, 6); expected (1, 4, 1, 6), as bias"}},
    {"dbias rank", [](Backward& c) { c.dbias.view.rank = 3; }, kValue, {"dbias has 3 dim"}},
    {"dbias device",
     [](Backward& c) { c.dbias.view = on_gpu(c.dbias.view); },
     kValue,
     {"dbias is on cuda:0, but bias is on cpu"}},
    {"dbias repeats elements",
     [](Backward& c) { c.dbias.view.stride[1] = 0; },
     kValue,
     {"dbias has stride 0 in dimension 1"}},
    {"dbias address",
     [](Backward& c) { c.dbias.view.data = c.dbias.data<char>() + 4; },
     kValue,
     {"dbias is float64", "not a multiple of 8 bytes"}},
    {"dsinks without sinks",
     [](Backward& c) { c.options.sinks = nullptr; },
     kValue,
     {"dsinks is given without sinks"}},
    {"dsinks dtype",
     [](Backward& c) { c.dsinks.view.dtype = DType::kFloat16; },
     kType,
     {"dsinks is float16, but sinks is bfloat16"}},
    {"dsinks shape",
     [](Backward& c) { c.dsinks.view.shape[0] = 2; },
     kValue,
     {"dsinks has shape (2,); expected (4,), as sinks"}},
    {"dsinks repeats elements",
     [](Backward& c) { c.dsinks.view.stride[0] = 0; },
     kValue,
     {"dsinks has stride 0 in dimension 0"}},
    {"dslopes without slopes",
     [](Backward& c) { c.options.alibi_slopes = nullptr; },
     kValue,
     {"dalibi_slopes is given without alibi_slopes"}},
    {"dslopes dtype",
     [](Backward& c) { c.dslopes.view.dtype = DType::kFloat64; },
     kType,
     {"dalibi_slopes is float64, but alibi_slopes is float32"}},
    {"dslopes rank",
     [](Backward& c) { c.dslopes.view.rank = 1; },
     kValue,
     {"dalibi_slopes has 1 dimensions, shape (2,); expected 2: as alibi_slopes"}},
    {"dslopes shape",
     [](Backward& c) { c.dslopes.view.shape[0] = 1; },
     kValue,
     {"dalibi_slopes has shape (1, 4); expected (2, 4), as alibi_slopes"}},
    {"dslopes device",
     [](Backward& c) { c.dslopes.view = on_gpu(c.dslopes.view); },
     kValue,
     {"dalibi_slopes is on cuda:0"}},
};

// Sequences of 3, 0 and 2 queries, and of 1, 3 and 2 keys.
struct PackedBackward : Backward {
  PackedBackward() {
    for (TensorView* t : {&q, &k, &v, &out, &dout, &dq, &dk, &dv}) {
      t->rank = 3;  // without the batch, of which the first is taken
      for (int i = 0; i < 3; ++i) {
        t->shape[i] = t->shape[i + 1];
        t->stride[i] = t->stride[i + 1];
      }
    }
    for (TensorView* t : {&lse, &dlse.view}) {
      t->rank = 2;
      t->shape = {4, 5};
      t->stride = {5, 1};
    }
    options.cu_seqlens_q = &starts_q.view;
    options.cu_seqlens_k = &starts_k.view;
    options.max_seqlen_q = options.max_seqlen_k = 3;
    options.bias = options.block_mask = options.alibi_slopes = options.seqused_k = nullptr;
    wanted.dbias = wanted.dalibi_slopes = options.key_ranges = nullptr;
    starts_q.assign<int32_t>({0, 3, 3, 5});
    starts_k.assign<int32_t>({0, 1, 4, 6});
  }
  SmallTensor starts_q{DType::kInt32, {4}};
  SmallTensor starts_k{DType::kInt32, {4}};
};

const CaseOf<PackedBackward> kPacked[] = {
    {"dout rank",
     [](PackedBackward& c) { c.dout.rank = 4; },
     kValue,
     {"dout has 4 dimensions", "expected 3: as out"}},
    {"dk rows",
     [](PackedBackward& c) { c.dk.shape[0] = 5; },
     kValue,
     {"dk has shape (5, 2, 8); expected (6, 2, 8), as k"}},
    {"dlse shape",
     [](PackedBackward& c) { c.dlse.view.shape[1] = 6; },
     kValue,
     {"dlse has shape (4, 6); expected (4, 5), as lse"}},
    {"only queries",
     [](PackedBackward& c) { c.options.cu_seqlens_k = nullptr; },
     kValue,
     {"cu_seqlens_q is given without cu_seqlens_k; both"}},
};

// Lengths, which only run() reads.
void check_lengths() {
  Backward batched;
  batched.used.data<int32_t>()[1] = 7;
  const test::ExactBytes memory(batched.workspace_size());
  check_throws([&] { batched.run(memory.workspace()); }, "batched", kValue,
               {"seqused_k[1] is 7", "keys, 6,"});
  CHECK(batched.untouched());
  PackedBackward packed;
  packed.starts_k.data<int32_t>()[3] = 7;
  const test::ExactBytes packed_memory(packed.workspace_size());
  check_throws([&] { packed.run(packed_memory.workspace()); }, "packed", kValue,
               {"cu_seqlens_k[3] is 7; it must be the number of rows of k, 6"});
  CHECK(packed.untouched());
}

// What the forward may not be given, but the backward only reads or ignores.
void check_allowed() {
  Backward call;
  call.out.stride[2] = call.dout.stride[0] = call.lse.stride[0] = 0;
  call.dlse.view.stride[1] = 0;
  call.mask.view.dtype = DType::kFloat64;
  call.maxima.view.shape[0] = 17;
  call.dbias.view.dtype = call.dsinks.view.dtype = DType::kFloat32;
  SmallTensor wide_sinks{DType::kFloat32, {4}};
  call.wanted.dsinks = &wide_sinks.view;
  const test::ExactBytes memory(call.workspace_size());
  call.run(memory.workspace());
  CHECK(call.ignored_untouched());
  CHECK(!call.untouched());

  // Gradients in float32 of what is not.
  Backward wide;
  for (TensorView* t : {&wide.q, &wide.k, &wide.v}) t->dtype = DType::kBFloat16;
  CHECK(wide.workspace_size() > 0);
  wide.out.dtype = wide.dout.dtype = DType::kBFloat16;
  CHECK(wide.workspace_size() > 0);
  for (TensorView* t : {&wide.dq, &wide.dk, &wide.dv}) t->dtype = DType::kBFloat16;
  CHECK(wide.workspace_size() > 0);
}

void check_no_device() {
  const anyflash::BuildInfo info = anyflash::build_info();
  if (!info.devices.empty()) return;
  Backward call;
  call.options = {};
  call.wanted = {};
  for (TensorView* t : {&call.q, &call.k, &call.v, &call.out, &call.lse, &call.dout, &call.dq,
                        &call.dk, &call.dv}) {
    t->device = {DeviceType::kCuda, 0};
  }
  const ErrorCode code = info.cuda ? ErrorCode::kDevice : ErrorCode::kUnsupported;
  check_throws([&] { call.workspace_size(); }, "no device", code, {info.device_error});
  check_throws([&] { call.run({}); }, "no device", code, {info.device_error});
  CHECK(call.untouched());
}

void check_workspace() {
  Backward call;
  const std::size_t bytes = call.workspace_size();
  CHECK(bytes > 0);
  const test::ExactBytes memory(bytes + 256);
  auto* const data = static_cast<char*>(memory.workspace().data);
  check_throws([&] { call.run({data, bytes - 1}); }, "too small", kValue,
               {"workspace has " + std::to_string(bytes - 1) + " bytes; " + std::to_string(bytes) +
                " are needed"});
  check_throws([&] { call.run({}); }, "none", kValue, {"workspace has 0 bytes"});
  check_throws([&] { call.run({nullptr, bytes}); }, "null", kValue, {"workspace has a null"});
  CHECK(call.untouched());
  call.run({data, bytes + 256});  // more is allowed
  CHECK(!call.untouched());
}

}  // namespace

int main() {
  test::check_allowed<Backward>();
  test::check_allowed<PackedBackward>();
  check_allowed();
  for (const auto& test_case : kShared) check_case(test_case);
  for (const auto& test_case : kMain) check_case(test_case);
  for (const auto& test_case : kSmall) check_case(test_case);
  for (const auto& test_case : kPacked) check_case(test_case);
  check_lengths();
  check_no_device();
  check_workspace();
  return check::report();
}
