"""What a call is asked for, in a few objects: the public functions make them of their arguments,
which everything behind them takes whole.

Values are as the caller gave them; parsing.py reads them. The functions make the objects by
position, in the order of the fields: by keywords that takes 0.3 us more, a tenth of a small call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

BLOCK_SIZE = (128, 128)
# Defaults: recognized by identity, a call that leaves them alone does not pay for their reading.
UNBOUNDED = (-1, -1)
NO_SOFTCAP = 0.0
NO_DROPOUT = 0.0


class Part(NamedTuple):
    """Which part of a larger attention a call computes.

    Its query row i is row ``query_start + i`` of the whole, its key j is key ``key_start + j``, and
    row r of the whole is on the diagonal with key ``r + diagonal``. Causal masks, windows and ALiBi
    count from that diagonal. So key ``i + query_start + diagonal - key_start`` of the call is at
    distance 0 from its row i. Dropout drops what it drops in the whole.

    Attributes
    ----------
    query_start, key_start, diagonal : int or (batch,) int32, optional
        At most 2**30; starts are at least 0. A larger sum of query_start + diagonal - key_start
        counts as 2**30. An array has a number for each sequence and lies on q's device. What is
        None is 0, but if all three are None, the diagonal ends at the bottom right of the call's
        own scores. With dropout, ``key_start`` is a multiple of 8.
    batch_start, head_start : int
        The whole's numbers of the first sequence and of q's first head. For dropout.
    total_heads : int
        Query heads of the whole; 0: q's. For dropout.

    Examples
    --------
    The last two of four rows, and the first three keys:

    >>> import numpy as np
    >>> import anyflash
    >>> q = np.ones((1, 4, 2, 8), np.float32)
    >>> out, lse = anyflash.attention(
    ...     q[:, 2:], q[:, :3], q[:, :3], causal=True, return_lse=True,
    ...     part=anyflash.Part(query_start=2),
    ... )
    >>> rest, rest_lse = anyflash.attention(
    ...     q[:, 2:], q[:, 3:], q[:, 3:], causal=True, return_lse=True,
    ...     part=anyflash.Part(query_start=2, key_start=3),
    ... )
    >>> out, lse = anyflash.merge_states(out, lse, rest, rest_lse)
    >>> bool(np.allclose(out, anyflash.attention(q, q, q, causal=True)[:, 2:]))
    True
    """

    query_start: Any = None
    key_start: Any = None
    diagonal: Any = None
    batch_start: int = 0
    head_start: int = 0
    total_heads: int = 0


# Where pickle looks for it, wherever this file lies.
Part.__module__ = "anyflash"


class AttentionOptions(NamedTuple):
    """How scores are made and hidden, and what dropout drops: what a forward is given besides its
    tensors, and its backward again."""

    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int | None, int | None] = UNBOUNDED
    softcap: float = NO_SOFTCAP
    alibi_slopes: Any = None
    bias: Any = None
    block_mask: Any = None
    block_size: tuple[int, int] = BLOCK_SIZE
    key_ranges: Any = None
    sinks: Any = None
    dropout_p: float = NO_DROPOUT
    seed: Any = None
    rng_state: Any = None
    seqused_k: Any = None
    part: Part | None = None


# Made once: what most calls ask for.
PLAIN = AttentionOptions()
CAUSAL = AttentionOptions(causal=True)


def given_options(  # noqa: PLR0917 (in the order of the fields)
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    softcap: float,
    alibi_slopes: Any,
    bias: Any,
    block_mask: Any,
    block_size: tuple[int, int],
    key_ranges: Any,
    sinks: Any,
    dropout_p: float,
    seed: Any,
    rng_state: Any,
    seqused_k: Any,
    part: Part | None = None,
) -> AttentionOptions | None:
    """The object; None where nothing but softmax_scale and causal is asked for, since to make one
    and to ask it takes 0.3 us, and the smallest calls 3 us."""
    if (
        alibi_slopes
        is bias
        is block_mask
        is key_ranges
        is sinks
        is seed
        is rng_state
        is seqused_k
        is part
        is None
        and _is_unbounded(window_size)
        and _is_zero(softcap)
        and _is_zero(dropout_p)
    ):
        return None
    return AttentionOptions(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        bias,
        block_mask,
        block_size,
        key_ranges,
        sinks,
        dropout_p,
        seed,
        rng_state,
        seqused_k,
        part,
    )


def plain_options(softmax_scale: float | None, causal: bool) -> AttentionOptions:
    """Of a call for which `given_options` gives None."""
    if softmax_scale is None and (causal is True or causal is False):
        return CAUSAL if causal else PLAIN
    return AttentionOptions(softmax_scale, causal)


def _is_unbounded(window: Any) -> bool:
    return type(window) is tuple and [type(x) for x in window] == [int, int] and window == UNBOUNDED


def _is_zero(value: Any) -> bool:
    return type(value) is float and value == 0


class Packing(NamedTuple):
    """Where packed sequences lie."""

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: Any
    max_seqlen_k: Any
    validate: Any


class OutputRequest(NamedTuple):
    """What a forward gives, where it is written, and on which stream."""

    return_lse: Any = False
    return_max_logits: Any = False
    return_dropout_mask: Any = False
    return_result: Any = False
    out_dtype: Any = None
    out: Any = None
    stream: Any = None
    lse: Any = None
    prior: Any = None


OUTPUT_ALONE = OutputRequest()  # made once, as PLAIN


class DqSums(NamedTuple):
    """Memory that the backward's calls over the same rows share (options.h says what for)."""

    memory: Any  # float32, (elements,)
    first: int  # the call's rows begin there,
    rows: int  # of so many
    begin: bool  # it is the first call
    end: bool  # it is the last one, which writes dq


class GradientRequest(NamedTuple):
    """What a backward gives, where it is written, and on which stream."""

    deterministic: Any = False
    return_dbias: Any = False
    return_dsinks: Any = False
    return_dalibi_slopes: Any = False
    dq: Any = None
    dk: Any = None
    dv: Any = None
    grad_dtype: Any = None
    stream: Any = None
    accumulate_dq: Any = False
    accumulate_dkv: Any = False
    dq_sums: DqSums | None = None  # then dq is not written, but by the last call


class KvCacheOptions(NamedTuple):
    """What attention with a KV cache is given besides. These are the keys and values to append, how
    they and the queries are rotated, and where packed ones lie. Of the cache's keys they are where
    these lie, what they are, and how they are divided."""

    k: Any
    v: Any
    rotary_cos: Any
    rotary_sin: Any
    rotary_seqlens: Any
    rotary_interleaved: Any
    cache_seqlens: Any
    cache_batch_idx: Any
    cache_leftpad: Any
    block_table: Any
    tree_mask: Any
    k_scale: Any
    v_scale: Any
    num_splits: Any
    split_size: Any
    head_dim_v: Any
    cu_seqlens_q: Any = None
    cu_seqlens_k_new: Any = None
    max_seqlen_q: Any = None
    validate: Any = False
