"""What test_mutations.py breaks in Hopper's decoding kernels.

Beside what hopper_mutations.py says of the emulator, it cannot see a missing wait of the warps for
one another's last product. Those of a warpgroup hardly drift apart in the few steps from there to
the result's place. In latent attention's pairs of tiles it does not see three mistakes:

* A warpgroup's own values are released one product too early. The wait for the next one follows at
  once.
* The fence after values have been cleared is missing. A fence publishes what all threads wrote, so
  that the one after P stands in for it.
* A warpgroup releases P that the other one still reads. Both end their products together.
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

HOPPER_DECODE = "sm90_decode_f16_d64"
HOPPER_LATENT = "sm90_decode_f16_d576_512"
KERNEL = "sm90/decode/kernel.h"
LOADER = "sm90/decode/loader.h"
MAINLOOP = "sm90/decode/mainloop.h"
PRODUCTS = "sm90/decode/products.h"
SHARED_ROWS = "sm90/decode/shared_rows.h"
PAIRED = "sm90/decode/paired_tiles.h"
CONVERTED = "sm90/decode/converted_tiles.h"
SCALES = "sm90/decode/scales.h"
EPILOGUE = "sm90/decode/epilogue.h"

_of_decode = partial(Mutation, unit=HOPPER_DECODE)
DECODE = (
    _of_decode("hopper-decode-before-the-block", KERNEL,
               "sync_named(static_cast<int>(NamedBarrier::kBlock), "
               "Traits::kConsumerThreads + 32);"),
    _of_decode("hopper-decode-inbox-not-announced", KERNEL,
               "smem.inbox.arrived.expect(inbox_bytes<Traits>(params, block));"),
    _of_decode("hopper-decode-empty-part-is-computed", KERNEL,
               "store_nothing<Traits>(params, block);"),
    _of_decode("hopper-decode-no-wait-for-empty", LOADER,
               "smem.ring.empty[place.stage()].wait(place.parity() ^ 1);"),
    _of_decode("hopper-decode-first-phase", LOADER, "place.parity() ^ 1", "place.parity()"),
    _of_decode("hopper-decode-last-tile-not-found", LOADER, "key >= block.keys.end",
               "key + Traits::kBlockN >= block.keys.end"),
    _of_decode("hopper-decode-boxes-of-the-next-tile", LOADER, "box = next;"),
    _of_decode("hopper-decode-no-wait-for-queries", MAINLOOP,
               "sync(); // Q and what rows see are there"),
    _of_decode("hopper-decode-queries-on-their-way", MAINLOOP,
               "cute::cp_async_wait<0>();"),
    _of_decode("hopper-decode-queries-without-fence", MAINLOOP, "fence_smem_writes();",
               after="cute::cp_async_wait<0>();"),
    _of_decode("hopper-decode-no-wait-for-tile", MAINLOOP,
               "smem_.ring.full[stage].wait(place_.parity());"),
    _of_decode("hopper-decode-tile-not-released", MAINLOOP,
               "if (!Traits::kLatent) release_tile(k_stage);"),
    _of_decode("hopper-decode-scores-on-their-way", PRODUCTS, "wgmma_wait<0>();",
               "wgmma_wait<1>();", after="issue_transposed<TileK"),
    _of_decode("hopper-decode-hidden-keys-seen", MAINLOOP,
               "if (partial) hide_keys(scores, key);"),
    _of_decode("hopper-decode-hidden-nan-kept", MAINLOOP,
               "if (partial) found_nonfinite |= clear_values(values, key);"),
    _of_decode("hopper-decode-probabilities-without-fence", MAINLOOP, "fence_smem_writes();",
               after="found_nonfinite |= clear_values(values, key);"),
    _of_decode("hopper-decode-probabilities-not-waited-for", MAINLOOP,
               "sync_for_values(partial); // P is there"),
    _of_decode("hopper-decode-maxima-not-waited-for", MAINLOOP,
               "sync(); // every warp's are there"),
    _of_decode("hopper-decode-output-not-rescaled", MAINLOOP,
               "element(out, c, 0) *= rescale[c];"),
    _of_decode("hopper-decode-values-not-restored", MAINLOOP, "restore_values();",
               after="any_warp(found_nonfinite)"),
    _of_decode("hopper-decode-word-of-own-warp", MAINLOOP,
               "sync_consumers<Traits::kConsumerThreads>(); // every warp's word is there",
               sanitizer="tsan"),
    _of_decode("hopper-decode-restored-to-all", MAINLOOP,
               "seen.begin <= key && key < seen.end", "true", after="void restore_values() {"),
    _of_decode("hopper-decode-result-not-waited-for", MAINLOOP,
               "sync_consumers<Traits::kConsumerThreads>(); // every warp's part is there"),
    _of_decode("hopper-decode-sum-of-one-warp", EPILOGUE,
               "sum += smem.of_warps[warp][row];"),
    _of_decode("hopper-decode-sink-twice", EPILOGUE, "/*has_sink=*/false", "true"),
    _of_decode("hopper-decode-slabs-in-one-place", EPILOGUE, "slab * splits + block.split",
               "block.split", after="params.by_splits.divmod(rank"),
    _of_decode("hopper-decode-inbox-too-small", EPILOGUE, "(columns + 1)", "columns"),
    _of_decode("hopper-decode-join-too-early", EPILOGUE, "smem.inbox.arrived.wait();"),
    _of_decode("hopper-decode-join-of-one-split", EPILOGUE, "slab * splits + s",
               "slab * splits"),
    _of_decode("hopper-quantized-scores-on-their-way", PRODUCTS, "wgmma_wait<0>();",
               "wgmma_wait<1>();", after="first + step > 0"),
    _of_decode("hopper-quantized-columns-in-halves", PRODUCTS, "2 * lane_row() + half",
               "lane_row() + 8 * half"),
    _of_decode("hopper-quantized-nan-kept", PRODUCTS,
               "found |= clear_nonfinite_bytes(words[i], stored);"),
    _of_decode("hopper-quantized-scales-of-half-a-tile", SCALES,
               "smem.scales.v_scale[stage][key_of_lane(i)] = v_[i];",
               "smem.scales.v_scale[stage][key_of_lane(i)] = v_[0];"),
    _of_decode("hopper-quantized-scales-on-their-way", SCALES,
               "__syncwarp(); // the lane that says that the buffer is full says it of all scales",
               sanitizer="tsan"),
    _of_decode("hopper-quantized-scales-released-early", SCALES,
               "__syncwarp(); // the lane that releases the buffer releases it for all",
               sanitizer="tsan"),
    _of_decode("hopper-quantized-units-not-waited-for", SCALES,
               "sync(); // every warp's are there"),
    _of_decode("hopper-quantized-output-in-old-units", SCALES,
               "element(block, c, 0) *= rescale;"),
    _of_decode("hopper-quantized-unit-not-told", EPILOGUE, "return smem.scales.unit[row];",
               "return 1.0f;"),
    _of_decode("hopper-decode-cleared-by-one-warpgroup", MAINLOOP, "sync_for_values(partial)",
               "sync_for_values(false)"),
)  # fmt: skip

_of_latent = partial(Mutation, unit=HOPPER_LATENT)
LATENT = (
    _of_latent("hopper-latent-no-wait-for-queries", SHARED_ROWS,
               "sync_all(); // Q and what rows see are there"),
    _of_latent("hopper-latent-tree-ignored", SHARED_ROWS, "if (!tree.active()) continue;",
               "continue;"),
    _of_latent("hopper-latent-cleared-early", SHARED_ROWS,
               "sync(); // all warps have done with the tile as keys"),
    _of_latent("hopper-latent-maxima-not-waited-for", SHARED_ROWS,
               "sync_all(); // both warpgroups' maxima are there, and V is finite"),
    _of_latent("hopper-latent-maximum-of-half", SHARED_ROWS,
               "fmaxf(largest[i], smem_.of_warps[1 - warpgroup_][row(i)])", "largest[i]"),
    _of_latent("hopper-latent-output-not-rescaled", SHARED_ROWS, "out(i, x) *= rescale_[i];"),
    _of_latent("hopper-latent-probabilities-without-fence", SHARED_ROWS, "fence_smem_writes();",
               after="p.words + 4 * i);"),
    _of_latent("hopper-latent-sums-of-scores-left", SHARED_ROWS,
               "smem_.of_warps[2 + warpgroup_][row(i)] = 0.0f;"),
    _of_latent("hopper-latent-result-not-waited-for", SHARED_ROWS,
               "sync_all(); // every warp's part is there"),
    _of_latent("hopper-latent-restored-to-all", SHARED_ROWS, "seen.begin <= key && key < seen.end",
               "true"),
    _of_latent("hopper-latent-word-of-own-warp", SHARED_ROWS,
               "sync_all(); // every warp's word is there", sanitizer="tsan"),
    _of_latent("hopper-latent-sums-not-rescaled", SHARED_ROWS, "sum_[i] *= rescale_[i];"),
    _of_latent("hopper-latent-first-keys-not-restored", SHARED_ROWS,
               "restore(keys.begin, shown);"),
    _of_latent("hopper-latent-last-keys-not-restored", SHARED_ROWS,
               "restore(max(shown, block_.shown.end), keys.end);"),
    _of_latent("hopper-latent-restored-columns-not-waited-for", SHARED_ROWS,
               "sync_all(); // every thread's columns are there"),
    _of_latent("hopper-pair-no-wait-for-empty", PAIRED,
               "ring.empty[0].wait(place.parity() ^ 1);"),
    _of_latent("hopper-pair-of-one-tile", PAIRED, "first + tile * Traits::kBlockN", "first"),
    _of_latent("hopper-pair-first-columns-alone", PAIRED, "first_panel * kPanelColumns", "0"),
    _of_latent("hopper-pair-no-wait-for-part", PAIRED,
               "part(warpgroup_, number).full[0].wait(place_.parity());"),
    _of_latent("hopper-pair-scores-on-their-way", PAIRED, "wgmma_wait<0>();",
               "wgmma_wait<1>();", after="kOtherPanels>(scores, Traits::kOthers);"),
    _of_latent("hopper-pair-hidden-keys-seen", PAIRED, "this->hide_keys(scores, first_key);"),
    _of_latent("hopper-pair-hidden-nan-kept", PAIRED,
               "found_nonfinite |= this->clear_values(own_tile(), /*first_row=*/0, first_key);"),
    _of_latent("hopper-pair-probabilities-not-waited-for", PAIRED, "wait_probabilities();",
               after="issue_own_values(p);"),
    _of_latent("hopper-pair-other-values-released-early", PAIRED, "wgmma_wait<0>();",
               "wgmma_wait<1>();", after="release(own_values().empty[0]);"),
    _of_latent("hopper-converted-no-wait-for-tile", CONVERTED,
               "smem_.ring.full[0].wait(place_.parity());"),
    _of_latent("hopper-converted-over-values", CONVERTED,
               "this->sync_all(); // all have done with the tile before"),
    _of_latent("hopper-converted-without-fence", CONVERTED, "fence_smem_writes();",
               after="load_key_scales();"),
    _of_latent("hopper-converted-released-early", CONVERTED,
               "__syncwarp(); // the lane that releases the buffer releases it for all",
               sanitizer="tsan"),
    _of_latent("hopper-converted-keys-not-waited-for", CONVERTED,
               "this->sync(); // all of this warpgroup's keys are there"),
    _of_latent("hopper-converted-keys-of-the-first", CONVERTED,
               "keys() + first_row() * kPanelColumns", "keys()"),
    _of_latent("hopper-converted-scores-on-their-way", CONVERTED, "wgmma_wait<0>();",
               "wgmma_wait<1>();", after="/*is_first=*/true);"),
    _of_latent("hopper-converted-scales-of-half-a-tile", CONVERTED,
               "first_row() + thread_column()", "thread_column()"),
    _of_latent("hopper-converted-hidden-keys-seen", CONVERTED,
               "this->hide_keys(scores, first_key);"),
    _of_latent("hopper-converted-hidden-nan-kept", CONVERTED,
               "found_nonfinite |= this->clear_values(keys(), first_row(), first_key);"),
    _of_latent("hopper-converted-probabilities-not-waited-for", CONVERTED,
               "this->sync_all(); // P is there"),
    _of_latent("hopper-converted-units-not-waited-for", CONVERTED,
               "this->sync_all(); // both warpgroups' are there"),
    _of_latent("hopper-converted-unit-of-half", CONVERTED,
               "smem_.scales.units_of_warps[1 - warpgroup_][row(i)]", "0.0f"),
    _of_latent("hopper-converted-output-in-old-units", CONVERTED, "out(i, x) *= rescale;"),
    _of_latent("hopper-converted-units-not-told", CONVERTED,
               "smem_.scales.unit[row(i)] = unit_[i];"),
)  # fmt: skip

HOPPER_DECODE_MUTATIONS = DECODE + LATENT
