"""What test_mutations.py breaks in the Hopper kernels: waits, arrivals, fences and byte counts.

The emulator makes asynchronous copies and products happen at any time between their start and the
wait for them, so most mistakes give wrong results or a deadlock in plain runs. What it cannot see:
a missing __syncwarp() before a store by TMA, since it runs stmatrix and fences of a warp as one, or
before Q's place is released; or a missing wait of decoding's warps for one another's last product,
since those of a warpgroup hardly drift apart in the few steps from there to the result's place.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

HOPPER = "sm90_forward_f16_d64"
HOPPER_RANGES = "sm90_forward_f16_d128"
HOPPER_512 = "sm90_forward_f16_d512"
HOPPER_PREFILL = "sm90_prefill_f16_d64"
HOPPER_DECODE = "sm90_decode_f16_d64"
HOPPER_LATENT = "sm90_decode_f16_d576_512"
CACHED_BLOCK = "sm90/prefill/cached_block.h"
CACHE_BOXES = "sm90/cache_boxes.h"
DECODE_KERNEL = "sm90/decode/kernel.h"
DECODE_LOADER = "sm90/decode/loader.h"
DECODE_MAINLOOP = "sm90/decode/mainloop.h"
DECODE_PRODUCTS = "sm90/decode/products.h"
DECODE_SCALES = "sm90/decode/scales.h"
DECODE_EPILOGUE = "sm90/decode/epilogue.h"
PREFILL_LAUNCH = "sm90/prefill/launch.h"
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
    _of_ranges("hopper-nothing-dropped-at-first", MAINLOOP,
               "draw<kKeys>();", "kept_[0] = kept_[1] = 0xffffffffu;"),
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

_of_decode = partial(Mutation, unit=HOPPER_DECODE)
_of_latent = partial(Mutation, unit=HOPPER_LATENT)
DECODE = (
    _of_decode("hopper-decode-before-the-block", DECODE_KERNEL,
               "sync_named(static_cast<int>(NamedBarrier::kBlock), "
               "Traits::kConsumerThreads + 32);"),
    _of_decode("hopper-decode-inbox-not-announced", DECODE_KERNEL,
               "smem.inbox.arrived.expect(inbox_bytes<Traits>(params, block));"),
    _of_decode("hopper-decode-empty-part-is-computed", DECODE_KERNEL,
               "store_nothing<Traits>(params, block);"),
    _of_decode("hopper-decode-no-wait-for-empty", DECODE_LOADER,
               "smem.ring.empty[place.stage()].wait(place.parity() ^ 1);"),
    _of_decode("hopper-decode-first-phase", DECODE_LOADER, "place.parity() ^ 1", "place.parity()"),
    _of_decode("hopper-decode-last-tile-not-found", DECODE_LOADER, "key >= block.keys.end",
               "key + Traits::kBlockN >= block.keys.end"),
    _of_decode("hopper-decode-boxes-of-the-next-tile", DECODE_LOADER, "box = next;"),
    _of_decode("hopper-decode-no-wait-for-queries", DECODE_MAINLOOP,
               "sync(); // Q and what rows see are there"),
    _of_decode("hopper-decode-queries-on-their-way", DECODE_MAINLOOP,
               "cute::cp_async_wait<0>();"),
    _of_decode("hopper-decode-queries-without-fence", DECODE_MAINLOOP, "fence_smem_writes();",
               after="cute::cp_async_wait<0>();"),
    _of_decode("hopper-decode-no-wait-for-tile", DECODE_MAINLOOP,
               "smem_.ring.full[stage].wait(place_.parity());"),
    _of_decode("hopper-decode-tile-not-released", DECODE_MAINLOOP,
               "if (!Traits::kLatent) release_tile(k_stage);"),
    _of_decode("hopper-decode-scores-on-their-way", DECODE_PRODUCTS, "wgmma_wait<0>();",
               "wgmma_wait<1>();", after="issue_transposed<TileK"),
    _of_decode("hopper-decode-hidden-keys-seen", DECODE_MAINLOOP,
               "if (partial) hide_keys(scores, key);"),
    _of_decode("hopper-decode-hidden-nan-kept", DECODE_MAINLOOP,
               "if (partial) found_nonfinite |= clear_values(values, key);"),
    _of_decode("hopper-decode-probabilities-without-fence", DECODE_MAINLOOP, "fence_smem_writes();",
               after="found_nonfinite |= clear_values(values, key);"),
    _of_decode("hopper-decode-probabilities-not-waited-for", DECODE_MAINLOOP,
               "sync_for_values(partial); // P is there"),
    _of_decode("hopper-decode-maxima-not-waited-for", DECODE_MAINLOOP,
               "sync(); // every warp's are there"),
    _of_decode("hopper-decode-output-not-rescaled", DECODE_MAINLOOP,
               "element(out, c, 0) *= rescale[c];"),
    _of_decode("hopper-decode-values-not-restored", DECODE_MAINLOOP, "restore_values();",
               after="any_warp(found_nonfinite)"),
    _of_decode("hopper-decode-word-of-own-warp", DECODE_MAINLOOP,
               "sync_consumers<Traits::kConsumerThreads>(); // every warp's word is there",
               sanitizer="tsan"),
    _of_decode("hopper-decode-restored-to-all", DECODE_MAINLOOP,
               "seen.begin <= key && key < seen.end", "true", after="void restore_values() {"),
    _of_decode("hopper-decode-result-not-waited-for", DECODE_MAINLOOP,
               "sync_consumers<Traits::kConsumerThreads>(); // every warp's part is there"),
    _of_decode("hopper-decode-sum-of-one-warp", DECODE_EPILOGUE,
               "sum += smem.of_warps[warp][row];"),
    _of_decode("hopper-decode-sink-twice", DECODE_EPILOGUE, "/*has_sink=*/false", "true"),
    _of_decode("hopper-decode-slabs-in-one-place", DECODE_EPILOGUE, "slab * splits + block.split",
               "block.split", after="params.by_splits.divmod(rank"),
    _of_decode("hopper-decode-inbox-too-small", DECODE_EPILOGUE, "(columns + 1)", "columns"),
    _of_decode("hopper-decode-join-too-early", DECODE_EPILOGUE, "smem.inbox.arrived.wait();"),
    _of_decode("hopper-decode-join-of-one-split", DECODE_EPILOGUE, "slab * splits + s",
               "slab * splits"),
    _of_decode("hopper-quantized-scores-on-their-way", DECODE_PRODUCTS, "wgmma_wait<0>();",
               "wgmma_wait<1>();", after="first + step > 0"),
    _of_decode("hopper-quantized-columns-in-halves", DECODE_PRODUCTS, "2 * lane_row() + half",
               "lane_row() + 8 * half"),
    _of_decode("hopper-quantized-nan-kept", DECODE_PRODUCTS,
               "found |= clear_nonfinite_bytes(words[i], stored);"),
    _of_decode("hopper-quantized-scales-of-half-a-tile", DECODE_SCALES,
               "smem.scales.v_scale[stage][key_of_lane(i)] = v_[i];",
               "smem.scales.v_scale[stage][key_of_lane(i)] = v_[0];"),
    _of_decode("hopper-quantized-scales-on-their-way", DECODE_SCALES,
               "__syncwarp(); // the lane that says that the buffer is full says it of all scales",
               sanitizer="tsan"),
    _of_decode("hopper-quantized-scales-released-early", DECODE_SCALES,
               "__syncwarp(); // the lane that releases the buffer releases it for all",
               sanitizer="tsan"),
    _of_decode("hopper-quantized-units-not-waited-for", DECODE_SCALES,
               "sync(); // every warp's are there"),
    _of_decode("hopper-quantized-output-in-old-units", DECODE_SCALES,
               "element(block, c, 0) *= rescale;"),
    _of_decode("hopper-quantized-unit-not-told", DECODE_EPILOGUE, "return smem.scales.unit[row];",
               "return 1.0f;"),
    _of_latent("hopper-latent-values-cleared-early", DECODE_MAINLOOP,
               "if (Traits::kLatent) sync_consumers<Traits::kConsumerThreads>();"),
    _of_latent("hopper-latent-cleared-by-one-warpgroup", DECODE_MAINLOOP,
               "sync_for_values(partial)", "sync_for_values(false)"),
)  # fmt: skip

HOPPER_MUTATIONS = (
    *(BARRIERS + BLOCKS + LOADS + GUARD + CONSUMERS + ARITHMETIC + OUTPUT),
    *(RANGES + PARTS + PREFILL + DECODE),
)
