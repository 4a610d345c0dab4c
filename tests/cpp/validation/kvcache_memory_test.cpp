// KvCachePlan's errors about addresses, and about extents of 0.
#include "check.h"
#include "kvcache_problem.h"
#include "validation.h"

namespace {

using anyflash::TensorView;
using test::Appending;
using test::check_case;
using test::check_says_no;
using test::check_throws;
using test::kValue;
using test::Paged;

using Case = test::CaseOf<Appending>;

void move(TensorView& t) { t.data = static_cast<char*>(t.data) + 1; }

const Case kCases[] = {
    {"q address",
     [](Appending& c) { move(c.q); },
     kValue,
     {"q is float32, but its address is not a multiple of 4 bytes"}},
    {"k_cache address",
     [](Appending& c) { move(c.k_cache); },
     kValue,
     {"k_cache is float32, but its address"}},
    {"v_cache address",
     [](Appending& c) { move(c.v_cache); },
     kValue,
     {"v_cache is float32, but its address"}},
    {"out address", [](Appending& c) { move(c.out); }, kValue, {"out is float32, but its address"}},
    {"lse address", [](Appending& c) { move(c.lse); }, kValue, {"lse is float32, but its address"}},
    {"k_new address",
     [](Appending& c) { move(c.k_new.view); },
     kValue,
     {"k_new is float32, but its address"}},
    {"v_new address",
     [](Appending& c) { move(c.v_new.view); },
     kValue,
     {"v_new is float32, but its address"}},
    {"rotary_cos address",
     [](Appending& c) { move(c.cos.view); },
     kValue,
     {"rotary_cos is float32, but its address"}},
    {"rotary_sin address",
     [](Appending& c) { move(c.sin.view); },
     kValue,
     {"rotary_sin is float32, but its address"}},
    {"no head dim",
     [](Appending& c) { c.q.shape[3] = c.k_cache.shape[3] = 0; },
     kValue,
     {"q has shape (2, 3, 4, 0); heads and head_dim must be at least 1"}},
    {"no heads of the cache",
     [](Appending& c) { c.k_cache.shape[2] = c.v_cache.shape[2] = 0; },
     kValue,
     {"k_cache has 0 heads, which does not divide q's 4"}},
    {"huge heads",
     [](Appending& c) { c.q.shape[2] = int64_t{1} << 32; },
     kValue,
     {"q has heads 4294967296; at most"}},
    {"lse device",
     [](Appending& c) { c.lse = test::on_gpu(c.lse); },
     kValue,
     {"lse is on cuda:0, but q is on cpu"}},
    {"v_cache rank",
     [](Appending& c) { c.v_cache.rank = 3; },
     kValue,
     {"v_cache has 3 dimensions", "expected 4: (cache_batch, capacity, heads_k, head_dim_v)"}},
};

// A split size stands for as many splits as there are; the most that are allowed.
void check_splits() {
  const auto bytes = [](int64_t capacity, int64_t splits, int64_t size) {
    Appending c;
    c.k_cache.shape[1] = c.v_cache.shape[1] = capacity;  // a plan reads nothing
    c.cache.num_splits = splits;
    c.cache.split_size = size;
    return c.plan().workspace_bytes();
  };
  CHECK_EQ(bytes(640, 0, 64), bytes(640, 10, 0));
  CHECK_EQ(bytes(641, 0, 64), bytes(641, 11, 0));
  CHECK(bytes(640, 0, 64) < bytes(641, 0, 64));
  CHECK(bytes(640, 65535, 0) > 0);
}

// A split size beyond the rows is one split, also where it does not fit an int.
void check_large_split() {
  const auto bytes = [](int64_t capacity, int64_t splits, int64_t size) {
    Appending c;
    c.k_cache.shape[1] = c.v_cache.shape[1] = capacity;
    c.cache.num_splits = splits;
    c.cache.split_size = size;
    return c.plan().workspace_bytes();
  };
  for (const int64_t capacity : {70, 640, 1 << 20}) {
    for (const int64_t size : {int64_t{1} << 20, int64_t{1} << 40}) {
      CHECK_EQ(bytes(capacity, 0, size), bytes(capacity, 1, 0));
    }
  }
  CHECK_EQ(bytes(127, 0, 128), bytes(127, 1, 0));
}

// Rotated queries have rows of whole 32 bytes, side by side.
void check_rotated() {
  const auto bytes = [](int64_t head_dim, bool rotated) {
    Appending c;
    c.q.shape[3] = c.k_cache.shape[3] = c.k_new.view.shape[3] = head_dim;
    if (!rotated) c.cache.rotary_cos = c.cache.rotary_sin = nullptr;
    return c.plan().workspace_bytes();
  };
  for (const int64_t head_dim : {8, 16, 17, 24, 33}) {
    const std::size_t columns = static_cast<std::size_t>(head_dim + 15) / 16 * 16;
    const std::size_t pieces = (2 * 3 * 4 * columns * 4 + 255) / 256 * 256;
    CHECK_EQ(bytes(head_dim, true) - bytes(head_dim, false), pieces);
  }
}

// What a message says of pages is for caches with pages.
void check_layouts() {
  Paged scaled;
  scaled.k_scale.view.shape[0] = 2;
  check_says_no([&] { scaled.plan(); }, "cache_batch");
  Paged ranked;
  ranked.k_cache.rank = 2;
  check_throws([&] { ranked.plan(); }, "pages", kValue,
               {"k_cache", "(pages, page_size, heads_k, head_dim) with block_table"});
  Paged odd;  // 8 bits may lie anywhere
  move(odd.k_cache);
  CHECK(odd.workspace_size() > 0);
  Appending dense;  // 8 bits, without pages
  test::Tensor bytes(test::DType::kInt8, {3, 16, 2, 8}), values(test::DType::kInt8, {3, 16, 2, 3});
  test::SmallTensor scale(test::DType::kFloat32, {2, 2});
  dense.k_cache = bytes.view;
  dense.v_cache = values.view;
  dense.cache.k_scale = dense.cache.v_scale = &scale.view;
  check_throws(
      [&] { dense.plan(); }, "scale", kValue,
      {"k_scale has shape (2, 2); expected (3, 2): (heads_k,), (cache_batch, heads_k) or "});
}

const test::CaseOf<Paged> kPagedCases[] = {
    {"scale address",
     [](Paged& c) { move(c.k_scale.view); },
     kValue,
     {"k_scale is float32, but its address is not a multiple of 4 bytes"}},
};

}  // namespace

int main() {
  check_splits();
  check_large_split();
  check_rotated();
  check_layouts();
  for (const auto& test_case : kPagedCases) check_case(test_case);
  test::check_allowed<Appending>();
  for (const auto& test_case : kCases) check_case(test_case);
  return check::report();
}
