// KvCachePlan's errors about addresses, and about extents of 0.
#include "check.h"
#include "kvcache_problem.h"
#include "validation.h"

namespace {

using anyflash::TensorView;
using test::Appending;
using test::check_case;
using test::kValue;

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

}  // namespace

int main() {
  check_splits();
  test::check_allowed<Appending>();
  for (const auto& test_case : kCases) check_case(test_case);
  return check::report();
}
