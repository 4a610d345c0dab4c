// KvCachePlan's errors where the values are columns of the keys (latent attention).
#include "check.h"
#include "kvcache_problem.h"
#include "validation.h"

namespace {

using test::check_case;
using test::kValue;
using test::Latent;
using test::on_gpu;
using test::SmallTensor;

using Case = test::CaseOf<Latent>;

const SmallTensor kAny(test::DType::kFloat32, {2, 2});

const Case kCases[] = {
    {"no values",
     [](Latent& c) { c.cache.head_dim_v = 0; },
     kValue,
     {"v_cache is missing; it, or head_dim_v, so many columns of k_cache that are the values, is"}},
    {"two values",
     [](Latent& c) { c.v_cache = c.v_memory.view; },
     kValue,
     {"v_cache is given with head_dim_v, with which the values are k_cache's columns; only one "
      "of"}},
    {"v_cache without memory",
     [](Latent& c) { c.v_cache.rank = 4; },
     kValue,
     {"v_cache is given with head_dim_v"}},
    {"new values",
     [](Latent& c) { c.cache.v_new = &c.v_new.view; },
     kValue,
     {"v_new is given with head_dim_v"}},
    {"scale of values",
     [](Latent& c) { c.cache.v_scale = &kAny.view; },
     kValue,
     {"v_scale is given with head_dim_v"}},
    {"negative",
     [](Latent& c) { c.cache.head_dim_v = -1; },
     kValue,
     {"head_dim_v is -1; 1 to 8, the columns of k_cache, is allowed"}},
    {"many", [](Latent& c) { c.cache.head_dim_v = 9; }, kValue, {"head_dim_v is 9; 1 to 8"}},
    {"huge",
     [](Latent& c) { c.cache.head_dim_v = (int64_t{1} << 32) + 3; },
     kValue,
     {"head_dim_v is 4294967299; 1 to 8"}},
    {"out",
     [](Latent& c) { c.cache.head_dim_v = 4; },
     kValue,
     {"out has shape (2, 3, 4, 3); expected (2, 3, 4, 4)", "and head_dim_v"}},
    {"k_cache rank",
     [](Latent& c) { c.k_cache.rank = 3; },
     kValue,
     {"k_cache has 3 dimensions", "expected 4: (cache_batch, capacity, heads_k, head_dim)"}},
    {"k_cache columns",
     [](Latent& c) { c.k_cache.shape[3] = 7; },
     kValue,
     {"k_cache has shape (3, 16, 2, 7); expected (3, 16, 2, 8), with q's head_dim"}},
    {"k_cache device",
     [](Latent& c) { c.k_cache = on_gpu(c.k_cache); },
     kValue,
     {"k_cache is on cuda:0, but q is on cpu"}},
    {"k_new columns",
     [](Latent& c) { c.k_new.view.shape[3] = 3; },
     kValue,
     {"k_new has shape (2, 2, 2, 3); expected (2, 2, 2, 8)"}},
    {"repeated rows",
     [](Latent& c) { c.k_cache.stride[1] = 0; },
     kValue,
     {"k_cache has stride 0 in dimension 1"}},
    {"nowhere to append",
     [](Latent& c) { c.cache.cache_seqlens = nullptr; },
     kValue,
     {"k_new is given without cache_seqlens"}},
    {"nothing to rotate",
     [](Latent& c) { c.cache.k_new = nullptr; },
     kValue,
     {"rotary_cos is given without k_new"}},
    {"scale of floats",
     [](Latent& c) { c.cache.k_scale = &kAny.view; },
     kValue,
     {"k_scale is given, but k_cache is float32"}},
};

}  // namespace

int main() {
  test::check_allowed<Latent>();
  for (const auto& test_case : kCases) check_case(test_case);
  return check::report();
}
