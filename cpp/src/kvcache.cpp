// KvCachePlan: validate, plan, append and launch, as forward.cpp. Decoding takes any strides;
// prefill's queries and results may be repacked, a cache never is.
#include <algorithm>
#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>

#include "anyflash/attention.h"
#include "append.h"
#include "arguments.h"
#include "describe.h"
#include "device.h"
#include "heuristics.h"
#include "plan.h"
#include "repack.h"
#include "validate.h"

namespace anyflash {

namespace {

// A tile of prefill has 128 queries of one head, or 192; decoding's has 64 rows of all heads of a
// group. A sequence with fewer queries would leave most of a prefill tile empty.
constexpr int kPrefillQueries = 64;

// Which sequences a kernel takes, and into how many splits it divides their keys.
struct DecodeLaunch {
  const KernelDescriptor* kernel = nullptr;  // null: none
  int least_queries = 0;
  int most_queries = INT_MAX;
  int num_splits = 1;
  bool packed_parts = false;

  KvCacheParams params_of(KvCacheParams params) const {
    params.least_queries = least_queries;
    params.most_queries = most_queries;
    params.num_splits = num_splits;
    if (num_splits == 1) params.split_size = 0;
    params.packed_parts = packed_parts;
    return params;
  }
};

}  // namespace

struct KvCachePlan::State : KernelPlan {
  State(const KvCacheTensors& t, const ForwardOptions& options, const KvCacheOptions& cache_options)
      : append(validate_kvcache(t, options, cache_options)), max_seqlen_q(options.max_seqlen_q) {
    const KvCacheParams& params = append.cache;
    const bool packed = params.attention.cu_seqlens_q != nullptr;
    Problem problem = problem_of(t.q, params, options.cpu_isa);
    if (packed) problem.rows = params.attention.heads / params.attention.heads_k;
    problem.cache_in_boxes = lies_in_boxes(t);
    select(problem, options);
    if (!reads_cache(t, *kernel)) {
      problem.cache_in_boxes = false;
      select(problem, options);
    }
    empty = params.attention.batch == 0 || params.attention.seqlen_q == 0;
    rotates_q = append.rotary_cos.data != nullptr && !empty;
    appends = params.attention.batch > 0 && params.seqlen_new > 0;
    if (packed && on_gpu) plan_by_length(problem, t);
    else plan_all();
    decode = params;
    if (rotates_q) reserve_rotated_q(bytes_of(t.q.dtype));
    for (const DecodeLaunch& one : launches) {
      if (one.kernel == nullptr || empty) continue;
      const std::size_t needed =
          one.kernel->decode.scratch_bytes(one.params_of(decode), context(nullptr, nullptr));
      scratch_bytes = std::max(scratch_bytes, needed);
    }
    scratch_offset = reserve(bytes, scratch_bytes);
  }

  // One kernel for all sequences.
  void plan_all() {
    const KvCacheParams& params = append.cache;
    int splits = params.num_splits;
    if (splits == 0) {
      const Attention& a = params.attention;
      splits = on_gpu ? splits_for(*kernel, row_tiles_of(a, kernel->tile) * a.heads_k)
                      : decode_num_splits_on_cpu(a);
    }
    launches[0] = {kernel, 0, INT_MAX, splits};
  }

  // Packed queries. A sequence's own number of them decides how it is done, so that its bits do not
  // depend on the others.
  // A given number of splits divides only the first launch. The others store parts for all rows,
  // which would take too much workspace.
  void plan_by_length(Problem problem, const KvCacheTensors& t) {
    const Attention& a = append.cache.attention;
    const int most_of_short = kernel->tile.block_m / (a.heads / a.heads_k);
    if (most_of_short > 0) plan_short(most_of_short);
    if (a.seqlen_q <= most_of_short) return;
    problem.rows = INT_MAX;
    const KernelDescriptor& prefill = select_prefill(problem, t);
    const int least_of_prefill =
        prefill.prefill ? std::max(most_of_short + 1, kPrefillQueries) : INT_MAX;
    if (most_of_short + 1 < least_of_prefill) {
      plan_long(select_kernel(problem), most_of_short + 1, least_of_prefill - 1);
    }
    if (a.seqlen_q >= least_of_prefill) plan_prefill(prefill, least_of_prefill, t);
  }

  // Sequences that fit the tile that one query's rows of a head of K fit.
  void plan_short(int most_queries) {
    const KvCacheParams& params = append.cache;
    const int64_t ctas = params.attention.batch * params.attention.heads_k;
    const int given = params.num_splits;
    launches[0] = {kernel, 1, most_queries, given > 0 ? given : splits_for(*kernel, ctas)};
  }

  // Longer ones, by decoding's largest tile. Where no query fits a tile, they are the first launch.
  void plan_long(const KernelDescriptor& large, int least_queries, int most_queries) {
    const Attention& a = append.cache.attention;
    const int given = append.cache.num_splits;
    const int group = a.heads / a.heads_k;
    const int64_t tiles = packed_row_tiles(a, group, large.tile.block_m, least_queries);
    const int chosen = given == 0 ? splits_for(large, tiles * a.heads_k) : 1;
    const bool is_first = launches[0].kernel == nullptr;
    launches[1] = {&large, least_queries, most_queries, is_first && given > 0 ? given : chosen};
    launches[1].packed_parts = true;
  }

  // The longest, where tensors allow it.
  void plan_prefill(const KernelDescriptor& prefill, int least_queries, const KvCacheTensors& t) {
    const Attention& a = append.cache.attention;
    const int64_t tiles = packed_row_tiles(a, 1, prefill.tile.block_m, least_queries);
    const bool chooses = append.cache.num_splits == 0;
    launches[2] = {&prefill, least_queries, INT_MAX,
                   chooses ? splits_for(prefill, tiles * a.heads) : 1};
    launches[2].packed_parts = true;
    const InputRules& rules = prefill.family->input_rules;
    if (!rotates_q) q = plan_repack(with_batch(t.q, true), rules, bytes);
    if (t.out.dtype == t.q.dtype) out = plan_repack(with_batch(t.out, true), rules, bytes);
  }

  // For long sequences: a kernel for them, if one can read the cache where it lies.
  const KernelDescriptor& select_prefill(Problem problem, const KvCacheTensors& t) const {
    const KvCacheParams& params = append.cache;
    problem.prefill = params.cache_dtype == t.q.dtype && !params.latent &&
                      params.tree_mask.data == nullptr && fits_cache(t, *kernel);
    const KernelDescriptor& chosen = select_kernel(problem);
    if (reads_cache(t, chosen)) return chosen;
    problem.cache_in_boxes = false;
    return select_kernel(problem);
  }
  bool lies_in_boxes(const KvCacheTensors& t) const {
    constexpr int kLeastBoxShift = 3;  // boxes have at least 8 rows
    const KvCacheParams& params = append.cache;
    return has_box_slots(t.k_cache) && (params.latent || has_box_slots(t.v_cache)) &&
           (params.block_table == nullptr ||
            (params.page_shift >= kLeastBoxShift && params.cache_leftpad == nullptr));
  }
  // What loads boxes takes tensors as its family says, and what decodes otherwise takes any.
  bool reads_cache(const KvCacheTensors& t, const KernelDescriptor& one) const {
    return !one.loads_boxes || fits_cache(t, one);
  }
  bool fits_cache(const KvCacheTensors& t, const KernelDescriptor& one) const {
    const InputRules& rules = one.family->input_rules;
    const bool latent = append.cache.latent;
    return fits_kernel(t.k_cache, rules) && (latent || fits_kernel(t.v_cache, rules));
  }

  int splits_for(const KernelDescriptor& one, int64_t ctas) const {
    return splits_on_gpu(one, device_properties(device.index), append.cache.attention, ctas);
  }

  // Rows that begin at multiples of 32 bytes, for the kernels that read them.
  void reserve_rotated_q(int bytes_per_element) {
    const Attention& a = append.cache.attention;
    const int64_t columns = (int64_t{a.head_dim} + 15) / 16 * 16;
    const int64_t row_elements = columns * a.heads;
    const bool packed = a.cu_seqlens_q != nullptr;
    const int64_t rows = packed ? a.total_q : a.batch * a.seqlen_q;
    append.rotated_q_stride = {packed ? 0 : a.seqlen_q * row_elements, row_elements, columns, 1};
    decode.attention.q_stride = append.rotated_q_stride;
    rotated_q_offset = reserve(bytes, static_cast<std::size_t>(rows * row_elements) *
                                          static_cast<unsigned>(bytes_per_element));
  }

  void launch(const LaunchContext& context, char* workspace) const {
    AppendParams appended = append;
    KvCacheParams attended = decode;
    if (rotates_q) attended.attention.q = appended.rotated_q = workspace + rotated_q_offset;
    if (appends || rotates_q) {
      if (on_gpu) {
        append_to_cache(appended, context.stream);
      } else {
        append_to_cache_on_cpu(appended, context.num_threads);
      }
    }
    if (empty) return;
    for (const DecodeLaunch& one : launches) {
      if (one.kernel == nullptr) continue;
      KvCacheParams params = one.params_of(attended);
      const bool copies = one.kernel->prefill;
      if (copies) {
        repack_input(q, workspace, context.stream, params.attention.q, params.attention.q_stride);
        redirect_output(out, true, workspace, context.stream, params.out, params.out_stride);
      }
      one.kernel->decode.launch(params, context);
      if (copies) write_back(out, workspace, context.stream);
      count_launch(*one.kernel);
    }
  }

  AppendParams append;
  int64_t max_seqlen_q;  // as it was given
  KvCacheParams decode;  // with q's strides after the rotation
  std::array<DecodeLaunch, 3> launches;
  Repacked q, out;  // of prefill
  bool rotates_q = false;
  bool appends = false;
  std::size_t rotated_q_offset = 0;
};

KvCachePlan::KvCachePlan(const KvCacheTensors& tensors, const ForwardOptions& options,
                         const KvCacheOptions& cache_options) {
  emplace_state<State>(state_, tensors, options, cache_options);
}

std::size_t KvCachePlan::workspace_bytes() const {
  return size_with_slack(state_in<State>(state_).bytes);
}

void KvCachePlan::run(Workspace workspace, void* stream) const {
  const State& state = state_in<State>(state_);
  char* const base = first_piece(workspace, state.bytes);
  if (state.checks_lengths) {
    check_kvcache_lengths(state.append, state.max_seqlen_q, state.device, stream);
  }

  const LaunchContext context = state.context(base, stream);
  if (state.on_gpu) {
    const DeviceGuard guard(state.device.index);
    state.launch(context, base);
  } else {
    state.launch(context, base);
  }
}

}  // namespace anyflash
