// heuristics.h: what its comments promise, over a table of sizes.
#include "heuristics.h"

#include <climits>

#include "check.h"

using anyflash::BackwardParams;
using anyflash::ForwardParams;
using anyflash::heads_per_section;
using anyflash::heads_per_section_backward;

namespace {

constexpr int kBytes = 2;

ForwardParams causal_params(int64_t batch, int heads, int heads_k, int seqlen_k, int head_dim) {
  ForwardParams p;
  p.batch = batch;
  p.heads = heads;
  p.heads_k = heads_k;
  p.seqlen_q = seqlen_k;
  p.seqlen_k = seqlen_k;
  p.head_dim = head_dim;
  p.head_dim_v = head_dim;
  p.window.right = 0;
  return p;
}

void check_bounds(const ForwardParams& p, std::size_t l2_bytes) {
  const int64_t pairs = p.batch * p.heads;
  const int64_t group = p.heads / p.heads_k;
  const int64_t section = heads_per_section(p, kBytes, l2_bytes);
  CHECK(section >= 1);
  CHECK(section <= std::max<int64_t>(pairs, 1));
  // A section that is not cut short by the number of pairs consists of whole groups, and their keys
  // and values fit into half of the cache; one more group would not.
  const int64_t kv_bytes = int64_t{p.seqlen_k} * (p.head_dim + p.head_dim_v) * kBytes;
  const int64_t half = static_cast<int64_t>(l2_bytes / 2);
  if (section > 1) CHECK((section + group - 1) / group * kv_bytes <= half);
  if (section > 1 && section < pairs) {
    CHECK_EQ(section % group, 0);
    CHECK((section / group + 1) * kv_bytes > half);
  }
  CHECK(heads_per_section(p, kBytes, 2 * l2_bytes) >= section);

  ForwardParams all = p;
  all.window.right = -1;
  all.window.left = 5;
  CHECK_EQ(heads_per_section(all, kBytes, l2_bytes), 1);
  ForwardParams window = p;
  window.window.right = 1000;
  CHECK_EQ(heads_per_section(window, kBytes, l2_bytes), section);
}

BackwardParams backward_params(const ForwardParams& forward) {
  BackwardParams p;
  static_cast<ForwardParams&>(p) = forward;
  return p;
}

void check_backward_bounds(const BackwardParams& p, std::size_t l2_bytes) {
  const int64_t pairs = p.batch * p.heads_k;
  const int64_t section = heads_per_section_backward(p, kBytes, l2_bytes);
  CHECK(section >= 1);
  CHECK(section <= std::max<int64_t>(pairs, 1));
  // Q and dO in 16 bits, dQ in 32, of the group.
  const int64_t rows = int64_t{p.seqlen_q} * (p.heads / p.heads_k);
  const int64_t bytes = rows * (p.head_dim * (2 + 4) + p.head_dim_v * 2);
  const int64_t half = static_cast<int64_t>(l2_bytes / 2);
  if (section > 1) CHECK(section * bytes <= half);
  if (section < pairs && bytes > 0) CHECK((section + 1) * bytes > half);
  CHECK(heads_per_section_backward(p, kBytes, 2 * l2_bytes) >= section);

  BackwardParams window = p;
  window.window = {7, -1};
  CHECK_EQ(heads_per_section_backward(window, kBytes, l2_bytes), section);
  window.window = {-1, -1};
  CHECK_EQ(heads_per_section_backward(window, kBytes, l2_bytes), 1);
}

}  // namespace

int main() {
  constexpr int kMax = INT_MAX - 4095;
  for (const std::size_t l2_bytes : {std::size_t{0}, std::size_t{40} << 20, std::size_t{1} << 31}) {
    for (const int64_t batch : {0, 1, 3, 512}) {
      for (const int heads_k : {1, 2, 8}) {
        for (const int group : {1, 4, 16}) {
          for (const int seqlen_k : {0, 1, 511, 4096, 131072, kMax}) {
            for (const int head_dim : {1, 64, 256}) {
              const ForwardParams p =
                  causal_params(batch, heads_k * group, heads_k, seqlen_k, head_dim);
              check_bounds(p, l2_bytes);
              check_backward_bounds(backward_params(p), l2_bytes);
            }
          }
        }
      }
    }
  }
  // A100: 40 MiB of L2. 2048 keys of head dim 128 are 1 MiB of K and V: 20 groups of 4.
  CHECK_EQ(heads_per_section(causal_params(8, 32, 8, 2048, 128), kBytes, std::size_t{40} << 20),
           80);
  // 4 heads of 1024 queries of head dim 128 are 4 MiB of Q, dO and dQ: 5 key heads.
  const BackwardParams backward = backward_params(causal_params(8, 32, 8, 1024, 128));
  CHECK_EQ(heads_per_section_backward(backward, kBytes, std::size_t{40} << 20), 5);
  return check::report();
}
