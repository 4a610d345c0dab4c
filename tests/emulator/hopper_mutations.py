"""What test_mutations.py breaks in the Hopper kernels: waits, arrivals, fences and byte counts.

The emulator makes asynchronous copies and products happen at any time between their start and the
wait for them, so most mistakes give wrong results or a deadlock in plain runs. What it cannot see:
a missing __syncwarp() before a store by TMA, since it runs stmatrix and fences of a warp as one, or
before Q's place is released.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

HOPPER = "sm90_forward_f16_d64"
HOPPER_RANGES = "sm90_forward_f16_d128"
HOPPER_512 = "sm90_forward_f16_d512"
HOPPER_PREFILL = "sm90_prefill_f16_d64"
CACHED_BLOCK = "sm90/prefill/cached_block.h"
PREFILL_LAUNCH = "sm90/prefill/launch.h"
CACHE_BOXES = "sm90/cache_boxes.h"
COLUMN_PASS = "cuda/column_pass.h"
KERNEL = "sm90/forward/kernel.h"
LAUNCH = "sm90/forward/launch.h"
BLOCKS_OF_ROWS = "sm90/forward/blocks.h"
LOAD = "sm90/forward/load.h"
PANEL_TILE = "sm90/panel_tile.h"
TRAITS = "sm90/forward/traits.h"
STAGES = "sm90/forward/stages.h"
MAINLOOP = "sm90/forward/mainloop.h"
SOFTMAX = "sm90/forward/softmax.h"
EPILOGUE = "sm90/forward/epilogue.h"
STAGED_ROWS = "sm90/staged_rows.h"
FLOAT_ROWS = "sm90/float_rows.h"
VISITED = "sm90/visited_tiles.h"
TILE_LISTS = "sm90/forward/tile_lists.h"

_mutation = partial(Mutation, unit=HOPPER)

BARRIERS = (
    _mutation("hopper-no-barrier-after-init", KERNEL, "__syncthreads();", ""),
    _mutation("hopper-guard-does-not-count-for-q", KERNEL,
              "(is_guarded ? Traits::kGuardWarps : 0)", "0"),
)  # fmt: skip

BLOCKS = (
    _mutation("hopper-counter-begins-late", LAUNCH, "*counter = 0;", "*counter = 1;"),
    _mutation("hopper-block-left-out", BLOCKS_OF_ROWS, "gridDim.x + atomicAdd(params_.taken, 1u)",
              "gridDim.x + atomicAdd(params_.taken, 1u) + 1"),
    _mutation("hopper-one-known-block", TRAITS, "kConfig.finds_tiles ? 8 : 4", "1", alone=True),
)  # fmt: skip

LOADS = (
    _mutation("hopper-no-wait-for-empty-k", LOAD, "ring.empty[stage].wait(k_place_.parity() ^ 1);"),
    _mutation(
        "hopper-no-wait-for-empty-v", LOAD, "smem_.v_ring.empty[stage].wait(v_place_.parity() ^ 1);"
    ),
    _mutation("hopper-no-wait-for-empty-q", LOAD, "ring.empty[stage].wait(q_place_.parity() ^ 1);"),
    _mutation("hopper-first-phase-of-k", LOAD, "k_place_.parity() ^ 1", "k_place_.parity()"),
    _mutation("hopper-bytes-too-few", PANEL_TILE, "Tile::kBytes", "Tile::kBytes - 16"),
    _mutation("hopper-bytes-too-many", PANEL_TILE, "Tile::kBytes", "Tile::kBytes + 16"),
    _mutation("hopper-k-in-one-buffer", LOAD, "smem_.keys(stage, part)", "smem_.keys(0, part)"),
    _mutation(
        "hopper-v-in-one-buffer",
        LOAD,
        "stage * Traits::TileV::kSize",
        "0",
        after="void load_values(const Block& block, const KeyTile& tile, KeyPlace place) {",
    ),
    _mutation("hopper-end-is-not-told", LOAD, "ring.full[q_place_.stage()].arrive();"),
)

GUARD = (
    _mutation("hopper-masked-v-past-the-guard", LOAD,
              "tile.needs_mask ? smem_.v_unguarded[stage] : smem_.v_ring.full[stage]",
              "smem_.v_ring.full[stage]"),
    _mutation("hopper-guard-before-v", LOAD,
              "smem_.v_unguarded[stage].wait(parities_ >> stage & 1);"),
    _mutation("hopper-phase-of-guard", LOAD, "parities_ ^= 1u << stage;"),
    _mutation("hopper-guard-without-fence", LOAD, "if (found) fence_smem_writes();"),
    _mutation("hopper-guard-warps-do-not-wait", LOAD,
              "sync_named(static_cast<int>(NamedBarrier::kGuard), kThreads);"),
    _mutation("hopper-guard-tells-nobody", LOAD,
              "if (thread_ == 0) smem_.v_ring.full[stage].arrive();"),
    _mutation("hopper-guard-before-q", LOAD, "queries.full[stage].wait(q_place_.parity());"),
    _mutation(
        "hopper-guard-keeps-q", LOAD, "if (threadIdx.x % 32 == 0) queries.empty[stage].arrive();"
    ),
    _mutation("hopper-guard-counts-tiles-wrong", LOAD, "v_place_.advance(visits);",
              "v_place_.advance(visits + 1);"),
    _mutation("hopper-guard-finds-nothing", PANEL_TILE,
              "!all_finite(vector_of<Tile>(tile, i))", "false"),
    _mutation("hopper-found-is-forgotten", STAGES,
              "found_nonfinite_ |= smem_.v_cleared[stage][warp] != 0;"),
    _mutation("hopper-guard-of-last-tile", MAINLOOP, "was_masked_ = kMasked;",
              "was_masked_ = false;"),
    _mutation(
        "hopper-found-is-overwritten", STAGES,
        "__syncwarp(); // all lanes have read what lane 0 will release", sanitizer="tsan",
    ),
)  # fmt: skip

CONSUMERS = (
    _mutation("hopper-no-wait-for-q", STAGES,
              "smem_.q_ring[warpgroup_].full[q_place_.stage()].wait(q_place_.parity());"),
    _mutation(
        "hopper-no-wait-for-k", STAGES,
        "smem_.k_ring[part].full[k_place_.stage()].wait(k_place_.parity());",
    ),
    _mutation(
        "hopper-no-wait-for-v", STAGES, "smem_.v_ring.full[stage].wait(v_place_.parity());"
    ),
    _mutation("hopper-no-fence-before-scores", STAGES, "wgmma_fence();", "",
              after="void issue_scores(AccS& acc_s) {"),
    _mutation("hopper-no-fence-before-values", STAGES, "wgmma_fence();", "",
              after="void issue_values(AccO& acc_o, const Probabilities& p) {"),
    _mutation("hopper-scores-not-awaited", STAGES, "wgmma_wait<kYounger>();"),
    _mutation("hopper-values-not-awaited", STAGES, "wgmma_wait<0>();", "wgmma_wait<1>();"),
    _mutation("hopper-k-not-released", STAGES, "release_keys(Traits::kKeyParts - 1);"),
    _mutation("hopper-v-not-released", STAGES, "release(smem_.v_ring.empty[v_place_.stage()]);",
              after="void land_values(AccO& acc_o) {"),
    _mutation("hopper-skipped-k-not-released", STAGES, "release_keys(part);"),
    _mutation("hopper-skipped-v-not-released", STAGES,
              "release(smem_.v_ring.empty[v_place_.stage()]);",
              after="void skip_values(bool masked) {"),
    _mutation("hopper-skipped-k-released-by-one-lane", STAGES,
              "__syncwarp(); // no lane still waits for a phase that lane 0 lets pass"),
    _mutation("hopper-skipped-v-released-by-one-lane", STAGES, "__syncwarp();",
              after="void skip_values(bool masked) {"),
    _mutation("hopper-q-not-released", STAGES,
              "release(smem_.q_ring[warpgroup_].empty[q_stage]);"),
    _mutation("hopper-wrong-buffer-of-k", STAGES, "smem_.keys(k_place_.stage(), part)",
              "smem_.keys(0, part)"),
    _mutation("hopper-wrong-buffer-of-v", STAGES, "v_place_.stage() * TileV::kSize", "0"),
    _mutation("hopper-wrong-buffer-of-q", TRAITS, "stage * kConsumers + warpgroup", "warpgroup"),
    _mutation("hopper-no-first-turn", STAGES,
              "if (kPingPong && warpgroup == 0) "
              "arrive_named(ping_pong_barrier(0), kPingPongThreads);"),
    _mutation("hopper-turn-not-passed", STAGES,
              "if (kPingPong) arrive_named(ping_pong_barrier(next), kPingPongThreads);"),
)  # fmt: skip

ARITHMETIC = (
    _mutation("hopper-mask-one-key-late", STAGES, "max(visible.end[row] - lane_col, 0)",
              "max(visible.end[row] + 1 - lane_col, 0)"),
    _mutation("hopper-mask-one-key-early", STAGES, "max(visible.first[row] - lane_col, 0)",
              "max(visible.first[row] + 1 - lane_col, 0)"),
    _mutation("hopper-warp-without-mask", STAGES, "first_col + kKeys > visible.end_of_all",
              "first_col + kKeys > visible.end_of_all + 15"),
    _mutation("hopper-tile-skipped", MAINLOOP, "tiles.n() * Traits::kBlockN >= end_key",
              "(tiles.n() + 1) * Traits::kBlockN >= end_key"),
    _mutation("hopper-too-few-keys", MAINLOOP,
              "tiles_.n() * Traits::kBlockN + Traits::kFewKeys >= end_key", "true"),
    _mutation("hopper-output-not-rescaled", MAINLOOP, "rescale_.apply(out);"),
    _mutation("hopper-division-by-zero", SOFTMAX, "sums(row) == 0.0f", "false"),
    _mutation("hopper-sum-not-rescaled", SOFTMAX, "sum_(row) *= rescale.factor[row];"),
    _mutation("hopper-largest-not-kept", SOFTMAX,
              "largest_(row) = fmaxf(largest_(row), larger);"),
    _mutation("hopper-large-scores-by-the-series", "variant/softcap.h",
              "is_large(__float_as_uint(score)) ? large(score) : small(score)", "small(score)"),
    _mutation("hopper-softcap-of-another-unit", "variant/forward_variants.h",
              "Softcap::unit(static_cast<float>(attention.softcap)) * kLog2E",
              "attention.scale_log2"),
)  # fmt: skip

OUTPUT = (
    _mutation("hopper-prior-lse-overwritten", EPILOGUE,
              "__syncwarp(); // all lanes have read the LSE"),
    _mutation("hopper-float32-not-exchanged", FLOAT_ROWS, "first + 6", "first + 8"),
    _mutation("hopper-unaligned-float32", FLOAT_ROWS, "columns % 4 == 0", "true"),
    _mutation("hopper-prior-lse-not-joined", EPILOGUE,
              "if (first + kChunk == kColumns) lse(row) = merge.lse();"),
    _mutation("hopper-output-without-fence", STAGED_ROWS, "fence_smem_writes();"),
    _mutation("hopper-output-overwritten", STAGES,
              "if (threadIdx.x % 32 == 0) wait_stores_read();"),
    _mutation("hopper-next-sequence-overwritten", STAGED_ROWS,
              "target.rows < kStagedRows && packed", "false"),
    _mutation("hopper-restored-before-stored", EPILOGUE,
              "if (threadIdx.x % 32 == 0) wait_stores();"),
    _mutation(
        "hopper-restored-before-others", EPILOGUE,
        "sync_consumers<Traits::kThreads>();",
    ),
)  # fmt: skip

# Of the kernels of one feature, mostly of those whose loader leaves tiles out.
_of_ranges = partial(Mutation, unit=HOPPER_RANGES)
RANGES = (
    _of_ranges("hopper-tile-is-not-told", LOAD,
               "if (kFinds && part == 0) smem_.key_tiles[stage] = tile.packed();"),
    _of_ranges("hopper-guard-keeps-lists", LOAD, "release(smem_.list_ring.empty[place.stage()]);"),
    _of_ranges("hopper-list-gone-before-the-guard", KERNEL,
               "smem.list_ring.init(Traits::kGuardWarps + 1)", "smem.list_ring.init(1)"),
    _of_ranges("hopper-guard-before-the-list", LOAD,
               "smem_.list_ring.full[place.stage()].wait(place.parity());"),
    _of_ranges("hopper-list-not-awaited", TILE_LISTS,
               "smem_.list_ring.full[place_.stage()].wait(place_.parity());"),
    _of_ranges("hopper-list-overwritten", TILE_LISTS,
               "smem_.list_ring.empty[place_.stage()].wait(place_.parity() ^ 1);",
               after="void tell(const Found& found, bool are_last) {"),
    _of_ranges("hopper-list-not-released", TILE_LISTS,
               "smem_.list_ring.empty[place_.stage()].arrive();"),
    _of_ranges("hopper-words-of-the-list-missing", TILE_LISTS,
               "__syncwarp(); // all words are there", sanitizer="tsan"),
    _of_ranges("hopper-range-cleared-while-it-is-read", TILE_LISTS,
               "__syncwarp(); // all lanes have read the range", sanitizer="tsan"),
    _of_ranges("hopper-last-of-each-list", TILE_LISTS, "are_last && from_here == 1",
               "from_here == 1"),
    _of_ranges("hopper-two-known-blocks", TRAITS, "kConfig.finds_tiles ? 8 : 4", "2", alone=True),
    _of_ranges("hopper-tile-with-ranges-unmasked", VISITED,
               "range.needs_mask(n) || !seen.all", "range.needs_mask(n)"),
    _of_ranges("hopper-32-tiles-at-most", TILE_LISTS, "asked < range.size()",
               "asked < min(range.size(), 32)"),
    _of_ranges("hopper-order-of-tiles", "variant/mask.h",
               "tile >= begin ? tile : tile + unmasked + (unmasked_begin - begin)", "tile"),
    _of_ranges("hopper-bits-of-ranges", "sm90/seen_elements.h", "bits >>= kStep;"),
    _of_ranges("hopper-warp-sees-some", STAGES, "if (of_warp.all) return;",
               "if (of_warp.any) return;"),
    _of_ranges("hopper-bounds-not-made", LAUNCH,
               "make_key_range_bounds(a, context.stream, prepared.taken);"),
    _of_ranges("hopper-some-blocks-are-all", "variant/block_mask.h", "seen.all &= kept;"),
    _of_ranges("hopper-all-blocks-are-some", "variant/block_mask.h", "seen.any |= kept;",
               "seen.any = kept;"),
    _of_ranges("hopper-blocks-begin-with-tiles", "variant/block_mask.h", "size - begin % size",
               "size"),
    _of_ranges("hopper-blocks-of-one-warp", STAGES,
               "min(first_row + warp_row(), sequence.seqlen_q - 1)",
               "min(first_row, sequence.seqlen_q - 1)"),
    _of_ranges("hopper-draws-of-another-lane", "sm90/kept_elements.h",
               "first_col / 8 + begin + lane", "first_col / 8 + begin"),
    _of_ranges("hopper-bits-stay-in-their-lane", "sm90/kept_elements.h",
               "exchange_bits(word, distance, 1, 0xaaaaaaaau)", "word"),
    _of_ranges("hopper-either-bit-of-a-draw", "variant/dropout.h", "(threshold_ >> 15) - 1",
               "0xffffffffu"),
    _of_ranges("hopper-nothing-dropped-at-first", MAINLOOP,
               "draw<kKeys>();", "kept_.words[0] = kept_.words[1] = 0xffffffffu;"),
    # Up to head dim 64 P V lands behind both rows, here between them.
    _of_ranges("hopper-rounded-before-values-land", MAINLOOP,
               "if (Traits::kConfig.lands_between_rows) land();",
               "if (Traits::kConfig.lands_between_rows) { p_.round(acc_s_); land(); }"),
    _of_ranges("hopper-values-not-awaited-between-rows", STAGES, "wgmma_wait<0>();",
               "wgmma_wait<1>();"),
)  # fmt: skip

_of_512 = partial(Mutation, unit=HOPPER_512)
PARTS = (
    _of_512("hopper-part-not-awaited", STAGES, "if (part > 0) wait_keys(part);"),
    _of_512("hopper-part-released-early", STAGES, "wgmma_wait<1>(); // the part before"),
    _of_512("hopper-part-not-released", STAGES, "release_keys(part - 1);"),
    _of_512("hopper-part-of-other-columns", LOAD, "part * TileK::kColumns", "0"),
    _of_512("hopper-parts-in-one-place", TRAITS, "stage * kKeyParts + part", "stage * kKeyParts"),
    _of_512("hopper-part-of-another-step", STAGES, "k + step_bytes(i, kPanelK)",
            "k + step_bytes(0, kPanelK)"),
    _of_512("hopper-pass-of-other-values", COLUMN_PASS,
            "static_cast<const char*>(a.v) + bytes_before(a.v_stride, sizeof(Element))", "a.v"),
    _of_512("hopper-pass-of-other-results", COLUMN_PASS,
            "bytes_before(params.out_stride, float_out ? sizeof(float) : sizeof(Element))", "0"),
    _of_512("hopper-pass-of-other-prior-results", COLUMN_PASS,
            "bytes_before(params.prior.out_stride, sizeof(float))", "0"),
    _of_512("hopper-pass-overwrites-prior-lse", COLUMN_PASS, "params.lse = nullptr;"),
)  # fmt: skip

_of_prefill = partial(Mutation, unit=HOPPER_PREFILL)
PREFILL = (
    _of_prefill("hopper-prefill-boxes-in-one-place", CACHE_BOXES,
                "static_cast<int>(threadIdx.x) % 32 * box_rows", "0"),
    _of_prefill("hopper-prefill-boxes-behind-the-tile", CACHE_BOXES,
                "if (first >= Tile::kRows) return;"),
    _of_prefill("hopper-prefill-queries-of-a-split", CACHED_BLOCK, "return 0;",
                "return static_cast<int>(tile.sequence.batch);"),
    _of_prefill("hopper-prefill-boxes-across-pages", CACHE_BOXES,
                "std::min(1 << std::min(cache.page_shift, 16), divides)", "divides"),
    _of_prefill("hopper-prefill-counter-begins-late", PREFILL_LAUNCH, "*params.taken = 0;",
                "*params.taken = 1;"),
    _of_prefill("hopper-prefill-first-block-alone", PREFILL_LAUNCH,
                "find_packed_block<kBlockM>(params.cache, thread / 32)",
                "find_packed_block<kBlockM>(params.cache, 0)"),
)  # fmt: skip

HOPPER_MUTATIONS = (
    *(BARRIERS + BLOCKS + LOADS + GUARD + CONSUMERS + ARITHMETIC + OUTPUT),
    *(RANGES + PARTS + PREFILL),
)
