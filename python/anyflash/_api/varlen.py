"""anyflash.attention_varlen: sequences of different lengths, packed one after the other."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from anyflash._call.dispatch import adapter_of, refuse
from anyflash._call.forward import Forward
from anyflash._call.options import (
    BLOCK_SIZE,
    NO_DROPOUT,
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    OutputRequest,
    Packing,
    Part,
)
from anyflash._call.results import ArrayT, AttentionResult

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyflash._api.keywords import (
        Plain,
        Unknown,
        WithDropoutMask,
        WithLse,
        WithMaxLogits,
        WithResult,
    )


@overload
def attention_varlen(
    q: ArrayT,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[Plain[Any, int]],
) -> ArrayT: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[WithLse[Any, int]],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[WithResult[Any, int]],
) -> AttentionResult[ArrayT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[WithMaxLogits[Any, int]],
) -> AttentionResult[ArrayT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[WithDropoutMask[Any, int]],
) -> AttentionResult[ArrayT]: ...
@overload
def attention_varlen(
    q: ArrayT,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[Unknown[Any, int]],
) -> ArrayT | tuple[ArrayT, ArrayT] | AttentionResult[ArrayT]: ...
def attention_varlen(  # noqa: PLR0917 (in the order that flash-attn has)
    q: ArrayT,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Any = None,
    validate: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Any = None,
    bias: Any = None,
    block_mask: Any = None,
    block_size: tuple[int, int] = BLOCK_SIZE,
    key_ranges: Any = None,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    rng_state: Any = None,
    part: Part | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_dropout_mask: bool = False,
    return_result: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    lse: Any = None,
    prior: tuple[Any, Any] | None = None,
    stream: int | None = None,
) -> ArrayT | tuple[ArrayT, ArrayT] | AttentionResult[ArrayT]:
    """:func:`attention` over sequences of different lengths, packed without padding.

    Sequence b has the queries ``q[cu_seqlens_q[b] : cu_seqlens_q[b + 1]]`` and the keys and values
    ``k, v[cu_seqlens_k[b] : cu_seqlens_k[b + 1]]``. Its result has the same bits as alone or in any
    other batch. Sequences may be empty; rows and columns count within their sequence.

    Parameters that are not listed are those of :func:`attention`.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k : (total_k, heads_k, head_dim)
    v : (total_k, heads_k, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32, contiguous
        Where the sequences begin and the last one ends: from 0, never less, to total_q or total_k.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the sequences' lengths. 0: total_q or total_k.
    seqused_k : (batch,) int32, contiguous, optional
        Of a sequence's keys only so many, the first ones, are used.
    validate : bool
        Check the lengths also on a GPU, which waits for it. Without, wrong ones are clamped to what
        the arrays hold: results are wrong, but no memory outside is touched. On the CPU they are
        always checked. Refused while a CUDA graph is captured.
    bias : (batch or 1, heads or 1, max_seqlen_q or 1, max_seqlen_k or 1), optional
    block_mask : (batch or 1, heads or 1, query blocks, key blocks) bool, optional
        As in :func:`attention`, for sequences of the largest lengths.
    key_ranges : (heads_k or 1, total_k, 2 or 4) int32, optional
        Queries count from the first of the key's sequence.

    Returns
    -------
    out : (total_q, heads, head_dim_v)
    lse : (heads, total_q), float32, only with ``return_lse``
    AttentionResult
        Instead of both, where one is asked for; ``max_logits`` (batch, heads), ``dropout_mask``
        (batch, heads, max_seqlen_q, max_seqlen_k).

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention`.

    Examples
    --------
    Three sequences of 2, 0 and 3 tokens:

    >>> import numpy as np
    >>> import anyflash
    >>> q = np.ones((5, 2, 8), np.float32)
    >>> ends = np.array([0, 2, 2, 5], np.int32)
    >>> out, lse = anyflash.attention_varlen(
    ...     q, q, q, ends, ends, 3, 3, causal=True, return_lse=True
    ... )
    >>> out.shape, lse.shape
    ((5, 2, 8), (2, 5))
    """
    options = AttentionOptions(
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
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
    outputs = OutputRequest(
        return_lse,
        return_max_logits,
        return_dropout_mask,
        return_result,
        out_dtype,
        out,
        stream,
        lse,
        prior,
    )
    tensors = (q, k, v)
    targets = any(x is not None for x in (out, lse, prior, stream))
    adapter = adapter_of(q, k, v, bias, sinks, alibi_slopes, autocast=not targets)
    if adapter is not None:
        refuse("anyflash.attention_varlen", out=out, lse=lse, prior=prior, stream=stream, part=part)
        return adapter.attend(tensors, options, packing, outputs)
    return Forward("anyflash.attention_varlen", tensors, options, packing).run(outputs)
