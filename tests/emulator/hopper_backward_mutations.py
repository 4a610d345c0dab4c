"""What test_mutations.py breaks in Hopper's backward: waits, fences, and what is hidden.

Tried, and noticed by no case: the loader's wait for an empty buffer of dO, which that for Q
implies; consumers' waits for K, V and the first dO, which have landed by then on the emulated
GPU; rows that only round up a tile and see all keys (up_to_last_row()), whose P is 0; and what
pytest's table of cases has instead: NaN in rows that see no key beside a sink, and
behind the end of a packed sequence, and infinite keys in plain steps (test_key_hidden_by_infinity).
"""

from __future__ import annotations

from functools import partial

from mutations import Mutation

HOPPER_BACKWARD = "sm90_backward_f16_d64"
HOPPER_WIDE = "sm90_backward_f16_d256"
HOPPER_192 = "sm90_backward_f16_d192"
HOPPER_PAIR = "sm90_backward_f16_d512"
HOPPER_FEATURES = "sm90_backward_f16_d128"
KERNEL = "sm90/backward/kernel.h"
KEY_BLOCK = "sm90/backward/key_block.h"
LOAD = "sm90/backward/load.h"
ROW_STAGES = "sm90/backward/row_stages.h"
STAGES = "sm90/backward/stages.h"
WIDE = "sm90/backward/wide_mainloop.h"
PAIR = "sm90/backward/pair.h"
MAINLOOP = "sm90/backward/mainloop.h"
STAGED_ROWS = "sm90/staged_rows.h"
EPILOGUE = "sm90/backward/epilogue.h"
DQ = "sm90/backward/dq_by_rows.h"
DQ_STAGES = "sm90/backward/dq_stages.h"
PRODUCTS = "sm90/products.h"
KEPT = "sm90/kept_elements.h"

_mutation = partial(Mutation, unit=HOPPER_BACKWARD)

BARRIERS = (
    _mutation("hopper-backward-no-barrier-after-init", KEY_BLOCK, "__syncthreads();", ""),
    _mutation(
        "hopper-backward-no-wait-for-empty-q",
        LOAD,
        "smem_.q_ring.empty[stage].wait(q_place_.parity() ^ 1);",
        after="ANYFLASH_DEVICE void load_queries(const Tiles& tiles, const Mask& mask) {",
    ),
    _mutation("hopper-backward-turn-kept", MAINLOOP,
              "if (kAddsToDq && Traits::kPingPong) stages.pass_ping_pong();"),
    _mutation("hopper-backward-turn-of-zeros-kept", STAGES, "if (kAddsToDq) pass_ping_pong();"),
    _mutation("hopper-backward-bytes-too-few", LOAD, "TileQ::kBytes + 2 * kLseOrDeltaBytes",
              "TileQ::kBytes + kLseOrDeltaBytes"),
)  # fmt: skip

DS = (
    _mutation("hopper-backward-no-fence-after-ds", STAGES, "fence_smem_writes();",
              after="ANYFLASH_DEVICE void pass_ds() {"),
    _mutation("hopper-backward-no-wait-for-ds", STAGES,
              "smem_.ds_ring.full[dq_place_.stage()].wait(dq_place_.parity());"),
    _mutation("hopper-backward-no-fence-after-dq", STAGES, "fence_smem_writes();",
              after="ANYFLASH_DEVICE void add_dq(const AccS& acc_dq) {"),
    _mutation("hopper-backward-sums-overwritten", STAGES, "if (lane == 0) wait_stores_read();"),
    _mutation("hopper-backward-last-dq-left-out", MAINLOOP, "if (stages.is_first()) return;",
              "return;"),
)  # fmt: skip

# dK and dV on their way out.
STAGED = (
    _mutation("hopper-backward-gradients-without-fence", STAGED_ROWS, "fence_smem_writes();"),
    _mutation("hopper-backward-dk-over-rows-in-use", STAGES, "this->place_.stage()",
              "1 - this->place_.stage()",
              after="ANYFLASH_DEVICE Element* free_rows() const {"),
    _mutation("hopper-backward-next-sequence-overwritten", STAGED_ROWS,
              "target.rows < kStagedRows && packed", "false"),
    _mutation("hopper-backward-restored-before-stored", KERNEL,
              "if (threadIdx.x % 32 == 0) wait_stores();"),
    _mutation("hopper-backward-told-too-early", KERNEL, "BackwardLoader<Traits>::kQArrivals", "1"),
)  # fmt: skip

HIDDEN = (
    _mutation("hopper-backward-p-not-hidden", ROW_STAGES,
              "if (kHides && hides_any_) hide(acc_s, seen_);"),
    _mutation("hopper-backward-plain-steps-beside-masks", STAGES, "!needs_mask()", "true",
              after="ANYFLASH_DEVICE bool is_plain() const {"),
    _mutation("hopper-backward-ds-not-hidden", ROW_STAGES,
              "if (kHides && hides_any_) hide(acc_dp, seen_);"),
    _mutation("hopper-backward-rows-not-cleared", MAINLOOP,
              "if (clears_rows) stages.clear_rows();"),
    _mutation("hopper-backward-keys-not-cleared", STAGES, "keys_ != KeyState::kNotLookedAt",
              "true"),
    _mutation("hopper-dq-not-added", EPILOGUE, "columns.add(to, four);",
              "columns.store(to, four);"),
    _mutation("hopper-dq-keys-not-cleared", DQ, "stages.clear_keys();"),
    _mutation("hopper-dq-not-hidden", DQ_STAGES, "hide(acc_dp, seen);"),
    _mutation("hopper-dq-no-fence-after-clearing", DQ_STAGES, "fence_smem_writes();"),
    _mutation("hopper-backward-too-much-hidden", STAGES, "this->tile().row + kBlockM",
              "this->tile().row", after="ANYFLASH_DEVICE bool sees_nothing() const {"),
)  # fmt: skip

# Of the kernels for wide heads.
WIDE_HEADS = (
    Mutation("hopper-wide-no-wait-for-p", WIDE,
             "smem_.p_ring.full[0].wait(p_place_.parity());", unit=HOPPER_WIDE),
    Mutation("hopper-wide-p-overwritten", WIDE,
             "smem_.p_ring.empty[0].wait(p_place_.parity() ^ 1);", unit=HOPPER_WIDE),
    Mutation("hopper-wide-scale-left-out", "sm90/backward/wide_kernel.h",
             "scale(acc, params.ds_scale);", unit=HOPPER_WIDE),
    Mutation("hopper-dq-v-overwritten", DQ,
             "smem.v_ring.empty[v_place.stage()].wait(v_place.parity() ^ 1);", unit=HOPPER_WIDE),
)  # fmt: skip

# Of the kernels whose CTAs share columns.
_of_pair = partial(Mutation, unit=HOPPER_PAIR)
PAIRS = (
    _of_pair("hopper-ctas-sent-too-early", PAIR, "barriers.may_send.wait(n % 2 ^ 1);",
             after="send_to_peer("),
    _of_pair("hopper-ctas-added-too-early", PAIR, "barriers.arrived.wait(n % 2);"),
    _of_pair("hopper-ctas-own-place", PAIR, "1 - rank_in_pair<Traits>()", "rank_in_pair<Traits>()",
             after="send_to_peer(const Acc& acc,"),
    _of_pair("hopper-ctas-bytes-too-few", PAIR, "sizeof(pieces)", "sizeof(pieces) / 2"),
    _of_pair("hopper-ctas-do-not-meet", PAIR, "cluster_wait();"),
    _of_pair("hopper-ctas-end-too-early", PAIR, "barriers.may_send.wait(n % 2 ^ 1);",
             after="finish_exchange("),
    _of_pair("hopper-ctas-whole-scores", WIDE,
             "add_from_peer(acc_s, smem_.p, barriers, p_place_.count());"),
    _of_pair("hopper-ctas-scores-over-p", WIDE,
             "let_peer_send<Traits>(smem_.from_peer.s_barriers);",
             after="piece.w;"),
    _of_pair("hopper-ctas-first-columns-twice", LOAD,
             "rank_in_pair<Traits>() * Traits::kHeadDimV", "0"),
    _of_pair("hopper-ctas-other-columns", PAIR, "rank_in_pair<Traits>() * kColumns", "0"),
    _of_pair("hopper-ctas-restored-columns", "sm90/backward/wide_kernel.h",
             "rank_in_pair<Traits>() * Traits::kHeadDimV", "0"),
    _of_pair("hopper-ctas-parts-of-one", "sm90/backward/wide_kernel.h",
             "part * Traits::kCtas + rank_in_pair<Traits>()", "part * Traits::kCtas"),
    _of_pair("hopper-ctas-dq-first-columns-twice", DQ, "rank_in_pair<Traits>() * Traits::kHeadDimV",
             "0"),
)  # fmt: skip

# Of the kernels with K and V in registers.
OPERANDS = (
    Mutation("hopper-operand-no-wait-for-k", ROW_STAGES, "smem_.k_full.wait(0);", unit=HOPPER_192,
             after="ANYFLASH_DEVICE void load_keys() {"),
    Mutation("hopper-operand-no-wait-for-v", ROW_STAGES, "smem_.v_full.wait(0);", unit=HOPPER_192,
             after="ANYFLASH_DEVICE void load_values() {"),
    Mutation("hopper-operand-no-wait-for-dout", ROW_STAGES, "wait_dout();", unit=HOPPER_192,
             after="const Element* const dout ="),
    Mutation("hopper-operand-of-another-warp", PRODUCTS, "warp_row + lane % 16", "lane % 16",
             unit=HOPPER_192),
    Mutation("hopper-operand-of-another-step", PRODUCTS, "a.words + 4 * step", "a.words",
             unit=HOPPER_192, after="const OperandRows<TileA, kColumns>& a,"),
)  # fmt: skip

# Of the kernels of one feature.
_of_features = partial(Mutation, unit=HOPPER_FEATURES)
FEATURES = (
    _of_features("hopper-dq-32-tiles-at-most", "sm90/visited_tiles.h", "asked_ < range.size()",
                 "asked_ < min(range.size(), 32)"),
    _of_features("hopper-backward-no-ranges", LOAD,
                 "find_key_ranges<typename Traits::Variant, Traits::kBlockN>"
                 "(params.attention, block);"),
    _of_features("hopper-backward-one-range", ROW_STAGES, "row_at(seen.second_end)",
                 "row_at(seen.second_begin)"),
    _of_features("hopper-dq-ranges", DQ_STAGES, "!uniform(tile().sees_all)", "false"),
    _of_features("hopper-dq-blocks", DQ_STAGES, "leave_blocks(seen);"),
    _of_features("hopper-backward-blocks", ROW_STAGES,
                 "smem_.visible[thread_key(i)].bits(row) & kept",
                 "smem_.visible[thread_key(i)].bits(row)"),
    _of_features("hopper-backward-blocks-of-a-warpgroup", ROW_STAGES,
                 "smem_.kept[place_.stage()][key_warpgroup_]", "smem_.kept[place_.stage()][0]"),
    _of_features("hopper-backward-first-block-of-a-tile", "variant/block_mask.h",
                 "i <= (end_row - 1) / rows_", "i <= row / rows_"),
    _of_features("hopper-backward-blocks-unmasked", "sm90/backward/visited_rows.h",
                 "!seen.all || range_.needs_mask(m)", "range_.needs_mask(m)"),
    _of_features("hopper-backward-slope-sign", ROW_STAGES, "slope < 0.0f", "false"),
    _of_features("hopper-backward-diagonal", ROW_STAGES,
                 "block.sequence.shift - block.first_key", "-block.first_key"),
    _of_features("hopper-dq-slope-left-out", DQ_STAGES, "slope_log2_ * fabsf(distance(i))",
                 "0.0f"),
    _of_features("hopper-dq-slope-sums-left", DQ,
                 "clear_slope_sums<Traits>(params, block);"),
    _of_features("hopper-dq-slope-sum-of-a-warp", DQ_STAGES,
                 "(of_warps[0] + of_warps[1]) + (of_warps[2] + of_warps[3])", "of_warps[0]"),
    _of_features("hopper-backward-another-head-dropped", LOAD, "smem_.heads[stage] = tiles.head();",
                 "smem_.heads[stage] = 0;"),
    _of_features("hopper-backward-nothing-dropped", ROW_STAGES, "drop(acc_p, kept_);"),
    _of_features("hopper-backward-capped-p-not-hidden", ROW_STAGES, "hide(rounded, seen_);"),
    _of_features("hopper-backward-slope-of-softcap", "variant/backward_single_feature.h",
                 "t - t * t", "0.25f"),
    _of_features("hopper-backward-dropped-ds", ROW_STAGES, "drop(acc_dp, kept_);"),
    _of_features("hopper-backward-delta-of-dropout", ROW_STAGES, "1.0f / Variant::p_scale(params_)",
                 "1.0f"),
    _of_features("hopper-backward-dv-scale", "sm90/backward/kernel.h",
                 "scale(acc_dv, Variant::p_scale(params));"),
    _of_features("hopper-halves-of-draws", KEPT, "exchange_bits(word, 4, 16, 0x0000ffffu)", "word"),
    _of_features("hopper-dq-dropped-ds", DQ_STAGES, "drop(acc_dp, kept_);"),
    _of_features("hopper-dq-delta-of-dropout", DQ_STAGES, "delta_[i] /= Variant::p_scale(params);"),
)  # fmt: skip

HOPPER_BACKWARD_MUTATIONS = (
    BARRIERS + DS + STAGED + HIDDEN + WIDE_HEADS + PAIRS + OPERANDS + FEATURES
)
