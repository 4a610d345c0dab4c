// What KvCachePlan::run() alone can say is wrong, as it alone reads lengths, places and tables:
// before anything is written.
#include <climits>
#include <string>
#include <vector>

#include "check.h"
#include "kvcache_problem.h"
#include "tensor.h"
#include "validation.h"

namespace {

using anyflash::TensorView;
using test::Appending;
using test::CaseOf;
using test::check_throws;
using test::DType;
using test::kValue;
using test::Paged;
using test::SmallTensor;

const CaseOf<Appending> kLengths[] = {
    {"negative length",
     [](Appending& c) { c.seqlens.data<int32_t>()[1] = -1; },
     kValue,
     {"cache_seqlens[1] is -1; 0 to 14 is allowed: k_cache has room for 16 rows of a sequence, "
      "and 2 are appended (k_new)"}},
    {"no room",
     [](Appending& c) { c.seqlens.data<int32_t>()[0] = 15; },
     kValue,
     {"cache_seqlens[0] is 15; 0 to 14"}},
    {"no room for an int",
     [](Appending& c) { c.seqlens.data<int32_t>()[0] = INT_MAX; },
     kValue,
     {"cache_seqlens[0] is 2147483647; 0 to 14"}},
    {"nothing appended",
     [](Appending& c) {
       c.cache.k_new = c.cache.v_new = c.cache.rotary_cos = c.cache.rotary_sin = nullptr;
       c.seqlens.data<int32_t>()[0] = 17;
     },
     kValue,
     {"cache_seqlens[0] is 17; 0 to 16 is allowed"}},
    {"negative pad",
     [](Appending& c) { c.pads.data<int32_t>()[1] = -1; },
     kValue,
     {"cache_leftpad[1] is -1; 0 to 4 is allowed: the rows that are filled, of cache_seqlens"}},
    {"large pad",
     [](Appending& c) { c.pads.data<int32_t>()[0] = 10; },
     kValue,
     {"cache_leftpad[0] is 10; 0 to 9"}},
    {"negative place",
     [](Appending& c) { c.places.data<int32_t>()[0] = -1; },
     kValue,
     {"cache_batch_idx[0] is -1; 0 to 2 is allowed: the sequences of k_cache"}},
    {"place behind the cache",
     [](Appending& c) { c.places.data<int32_t>()[1] = 3; },
     kValue,
     {"cache_batch_idx[1] is 3; 0 to 2"}},
    {"no place",
     [](Appending& c) { c.k_cache.shape[0] = c.v_cache.shape[0] = 0; },
     kValue,
     {"cache_batch_idx[0] is 2; none is allowed"}},
    // Keys 8 to 9, queries 8 to 10 of sequence 0.
    {"rotary rows for q",
     [](Appending& c) { c.cos.view.shape[0] = c.sin.view.shape[0] = 10; },
     kValue,
     {"rotary_cos has 10 rows; sequence 0 needs 11: 8 keys are in the cache (cache_seqlens, "
      "cache_leftpad), 2 are appended (k_new), and q has seqlen_q 3"}},
    {"rotary rows for k",
     [](Appending& c) {
       c.options.causal = false;
       c.options.window_left = -1;
       c.cos.view.shape[0] = c.sin.view.shape[0] = 9;
     },
     kValue,
     {"rotary_cos has 9 rows; sequence 0 needs 10"}},
    {"rotation of q behind the tables",
     [](Appending& c) {
       c.cache.rotary_seqlens = &c.rotations.view;
       c.rotations.assign<int32_t>({3, 14});
     },
     kValue,
     {"rotary_seqlens[1] is 14; 0 to 13 is allowed: rotary_cos has 16 rows, 2 are appended "
      "(k_new), "
      "and q has seqlen_q 3"}},
    {"rotation of k behind the tables",
     [](Appending& c) {
       c.cache.rotary_seqlens = &c.rotations.view;
       c.options.causal = false;
       c.options.window_left = -1;
       c.rotations.assign<int32_t>({15, 12});
     },
     kValue,
     {"rotary_seqlens[0] is 15; 0 to 14"}},
    {"negative rotation",
     [](Appending& c) {
       c.cache.rotary_seqlens = &c.rotations.view;
       c.rotations.assign<int32_t>({-1, 12});
     },
     kValue,
     {"rotary_seqlens[0] is -1; 0 to 13"}},
    {"no rows for the rotation",
     [](Appending& c) {
       c.cache.rotary_seqlens = &c.rotations.view;
       c.cos.view.shape[0] = c.sin.view.shape[0] = 2;
     },
     kValue,
     {"rotary_seqlens[0] is 3; none is allowed"}},
};

const CaseOf<Paged> kTables[] = {
    {"negative page",
     [](Paged& c) { c.table.data<int32_t>()[5] = -1; },
     kValue,
     {"block_table[1, 1] is -1; k_cache has 6 pages"}},
    {"page behind the cache",
     [](Paged& c) { c.table.data<int32_t>()[2] = 6; },
     kValue,
     {"block_table[0, 2] is 6; k_cache has 6 pages"}},
    {"room for what is appended alone",
     [](Paged& c) {
       c.table.view.shape[1] = 1;
       c.k_new.view.shape[1] = c.v_new.view.shape[1] = 4;
       c.seqlens.assign<int32_t>({1, 0});
       c.cache.rotary_cos = c.cache.rotary_sin = nullptr;
     },
     kValue,
     {"cache_seqlens[0] is 1; 0 to 0 is allowed: block_table has room for 4 rows"}},
    {"page of one row",
     [](Paged& c) {
       c.seqlens.data<int32_t>()[0] = 7;  // rows 7 and 8 are appended
       c.table.data<int32_t>()[2] = 6;
     },
     kValue,
     {"block_table[0, 2] is 6; k_cache has 6 pages"}},
    {"first page",
     [](Paged& c) { c.table.data<int32_t>()[0] = INT_MIN; },
     kValue,
     {"block_table[0, 0] is -2147483648"}},
    {"no room",
     [](Paged& c) { c.seqlens.data<int32_t>()[1] = 15; },
     kValue,
     {"cache_seqlens[1] is 15; 0 to 14 is allowed: block_table has room for 16 rows"}},
    // The table's rows run backwards: row 0 is 99 -1 2 1.
    {"reversed table",
     [](Paged& c) {
       c.table.view.stride = {-4, -1};
       c.table.view.data = c.table.data<int32_t>() + 7;
     },
     kValue,
     {"block_table[0, 0] is 99; k_cache has 6 pages"}},
};

// The memory of (batch, rows, heads, head_dim) as (batch * rows, heads, head_dim).
TensorView packed(const TensorView& t) {
  TensorView view = t;
  view.rank = 3;
  view.shape = {t.shape[0] * t.shape[1], t.shape[2], t.shape[3]};
  view.stride = {t.stride[1], t.stride[2], t.stride[3]};
  return view;
}

// 2 and 4 queries, of which 1 and 3 have new keys.
struct PackedQueries : Appending {
  PackedQueries() {
    q = packed(q);
    out = packed(out);
    lse.rank = 2;
    lse.shape = {4, 6};
    lse.stride = {6, 1};
    k_new.view = packed(k_new.view);
    v_new.view = packed(v_new.view);
    first_queries.assign<int32_t>({0, 2, 6});
    first_keys.assign<int32_t>({0, 1, 4});
    options.cu_seqlens_q = &first_queries.view;
    cache.cu_seqlens_k_new = &first_keys.view;
    cache.tree_mask = nullptr;
  }

  SmallTensor first_queries{DType::kInt32, {3}};
  SmallTensor first_keys{DType::kInt32, {3}};
};

const CaseOf<PackedQueries> kPacked[] = {
    {"room for packed keys",
     [](PackedQueries& c) { c.seqlens.assign<int32_t>({9, 14}); },
     kValue,
     {"cache_seqlens[1] is 14; 0 to 13 is allowed: k_cache has room for 16 rows of a sequence, "
      "and 3 are appended (cu_seqlens_k_new)"}},
    {"no room for packed keys",
     [](PackedQueries& c) { c.k_cache.shape[1] = c.v_cache.shape[1] = 2; },
     kValue,
     {"sequence 1 of cu_seqlens_k_new has length 3; k_cache has room for 2 rows of a sequence"}},
    {"bound of the lengths",
     [](PackedQueries& c) { c.options.max_seqlen_q = 3; },
     kValue,
     {"sequence 1 of cu_seqlens_q has length 4; max_seqlen_q is 3"}},
    {"more queries than rows",
     [](PackedQueries& c) { c.first_queries.assign<int32_t>({0, 7, 6}); },
     kValue,
     {"sequence 0 of cu_seqlens_q has length 7; q has 6 rows"}},
    {"a bound above the rows",
     [](PackedQueries& c) {
       c.first_queries.assign<int32_t>({0, 9, 6});
       c.options.max_seqlen_q = 8;
     },
     kValue,
     {"sequence 0 of cu_seqlens_q has length 9; max_seqlen_q is 8"}},
    // Keys 8 to 8 of sequence 0, queries 8 to 9.
    {"rotary rows for packed queries",
     [](PackedQueries& c) { c.cos.view.shape[0] = c.sin.view.shape[0] = 9; },
     kValue,
     {"rotary_cos has 9 rows; sequence 0 needs 10: 8 keys are in the cache (cache_seqlens, "
      "cache_leftpad), 1 are appended (cu_seqlens_k_new), and 2 are queries (cu_seqlens_q)"}},
    {"rotation of packed queries",
     [](PackedQueries& c) {
       c.cache.rotary_seqlens = &c.rotations.view;
       c.rotations.assign<int32_t>({3, 13});
     },
     kValue,
     {"rotary_seqlens[1] is 13; 0 to 12 is allowed: rotary_cos has 16 rows, 3 are appended "
      "(cu_seqlens_k_new), and 4 are queries (cu_seqlens_q)"}},
};

template <class AnyCall>
void check_refused(const CaseOf<AnyCall>& test_case) {
  AnyCall call;
  test_case.change(call);
  const test::ExactBytes memory(call.workspace_size());
  check_throws([&] { call.run(memory.workspace()); }, test_case.name, test_case.code,
               test_case.words);
  CHECK_MSG(call.untouched(), test_case.name);
}

template <class AnyCall, class Change>
void check_runs(const Change& change) {
  AnyCall call;
  change(call);
  const test::ExactBytes memory(call.workspace_size());
  call.run(memory.workspace());
  CHECK(!call.untouched());
  CHECK(memory.guard_untouched());
}

// Before a workspace is asked for.
void check_number_of_lengths() {
  PackedQueries call;
  call.seqlens.view.shape[0] = 1;
  check_throws(
      [&] { call.workspace_size(); }, "lengths of packed queries", kValue,
      {"cache_seqlens has shape (1,); expected (2,), one for each sequence of cu_seqlens_q"});
}

// The limits themselves, and entries that belong to no row in use.
void check_allowed_lengths() {
  check_runs<PackedQueries>([](PackedQueries& c) { c.seqlens.assign<int32_t>({9, 12}); });
  check_runs<Appending>([](Appending& c) { c.seqlens.assign<int32_t>({13, 0}); });
  check_runs<Appending>([](Appending& c) { c.pads.assign<int32_t>({9, 4}); });
  check_runs<Appending>([](Appending& c) { c.cos.view.shape[0] = c.sin.view.shape[0] = 11; });
  check_runs<Appending>([](Appending& c) {  // q by row 8
    c.options.causal = false;
    c.options.window_left = -1;
    c.cos.view.shape[0] = c.sin.view.shape[0] = 10;
  });
  check_runs<Appending>([](Appending& c) {  // tables shorter than the sequences
    c.cache.rotary_seqlens = &c.rotations.view;
    c.rotations.assign<int32_t>({0, 1});
    c.cos.view.shape[0] = c.sin.view.shape[0] = 4;
  });
  check_runs<Paged>([](Paged& c) {  // pages 0 hold no key
    c.pads.assign<int32_t>({4, 4});
    c.table.assign<int32_t>({-1, 0, 3, -7, 99, 2, -1, 99});
  });
  check_runs<Paged>([](Paged& c) {  // no key at all, beside page 1
    c.cache.k_new = c.cache.v_new = nullptr;
    c.cache.rotary_cos = c.cache.rotary_sin = nullptr;
    c.seqlens.assign<int32_t>({9, 5});
    c.pads.assign<int32_t>({0, 5});
    c.table.assign<int32_t>({5, 0, 3, -7, 99, -1, -1, 99});
  });
  check_runs<Paged>([](Paged& c) {
    c.table.assign<int32_t>({99, -1, 2, 1, -7, 3, 0, 5});
    c.table.view.stride = {-4, -1};
    c.table.view.data = c.table.data<int32_t>() + 7;
  });
}

}  // namespace

int main() {
  for (const auto& test_case : kLengths) check_refused(test_case);
  for (const auto& test_case : kTables) check_refused(test_case);
  for (const auto& test_case : kPacked) check_refused(test_case);
  check_number_of_lengths();
  check_allowed_lengths();
  return check::report();
}
