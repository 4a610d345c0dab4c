"""anyflash.attention_varlen_with_kvcache: sequences of any numbers of queries, packed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

from anyflash._api.kvcache import attend_with_kvcache
from anyflash._call.kvcache import check_packed
from anyflash._call.options import (
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    KvCacheOptions,
    OutputRequest,
)
from anyflash._call.results import ArrayT

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyflash._api.keywords import VarlenKvCacheKeywords


@overload
def attention_varlen_with_kvcache(
    q: ArrayT,
    k_cache: Any,
    v_cache: Any,
    cu_seqlens_q: Any,
    k: Any = ...,
    v: Any = ...,
    *,
    return_lse: Literal[False] = ...,
    out: Any = ...,
    workspace: Any = ...,
    stream: int | None = ...,
    **options: Unpack[VarlenKvCacheKeywords[Any]],
) -> ArrayT: ...
@overload
def attention_varlen_with_kvcache(
    q: ArrayT,
    k_cache: Any,
    v_cache: Any,
    cu_seqlens_q: Any,
    k: Any = ...,
    v: Any = ...,
    *,
    return_lse: Literal[True],
    out: Any = ...,
    workspace: Any = ...,
    stream: int | None = ...,
    **options: Unpack[VarlenKvCacheKeywords[Any]],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_varlen_with_kvcache(
    q: ArrayT,
    k_cache: Any,
    v_cache: Any,
    cu_seqlens_q: Any,
    k: Any = ...,
    v: Any = ...,
    *,
    return_lse: bool = ...,
    out: Any = ...,
    workspace: Any = ...,
    stream: int | None = ...,
    **options: Unpack[VarlenKvCacheKeywords[Any]],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def attention_varlen_with_kvcache(  # noqa: PLR0917 (as attention_varlen and attention_with_kvcache)
    q: ArrayT,
    k_cache: Any,
    v_cache: Any,
    cu_seqlens_q: Any,
    k: Any = None,
    v: Any = None,
    *,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    validate: bool = False,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_seqlens: Any = None,
    rotary_interleaved: bool = True,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Any = None,
    sinks: Any = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    num_splits: int = 0,
    split_size: int | None = None,
    head_dim_v: int | None = None,
    return_lse: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    workspace: Any = None,
    stream: int | None = None,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """:func:`attention_with_kvcache` of sequences with different numbers of queries.

    Continuous batching: prompts, pieces of prompts, single tokens and guesses to be verified are
    packed one after the other, without padding, and done by one call. Sequence b's queries are rows
    ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]`` of q. All else is as there, with each sequence's
    own ``seqlen_q`` and ``seqlen_new``.

    On a GPU, which kernel a sequence takes depends on its own number of queries alone; from 64 on
    they are prefilled. Work and memory follow from shapes and ``max_seqlen_q``, so that a CUDA
    graph serves any lengths.

    Parameters that are not listed are those of :func:`attention_with_kvcache`.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k_cache : (cache_batch, capacity, heads_k, head_dim), or pages with ``block_table``
    v_cache : (cache_batch, capacity, heads_k, head_dim_v), or pages; or None, with ``head_dim_v``
    cu_seqlens_q : (batch + 1,) int32
        Where each sequence begins, and the last one ends: at total_q. A sequence may have no
        queries.
    k : (total_new, heads_k, head_dim), optional
    v : (total_new, heads_k, head_dim_v), optional
        New keys and values, packed likewise.
    cu_seqlens_k_new : (batch + 1,) int32, optional
        Where the sequences of k and v begin; default: ``cu_seqlens_q``.
    max_seqlen_q : int, optional
        No sequence has more queries; 0: not known. It spares a launch where all are short: 1, for
        single tokens.
    validate : bool
        Check lengths, places and pages on a GPU, too, which waits for it. On the CPU they are
        always checked.
    tree_mask : (total_q, columns) bool, optional
        Column j says who sees the key that the sequence's query j is aligned with. Keys behind the
        last column are seen as without it.
    num_splits, split_size : int
        On a GPU they divide the keys of sequences with few queries, whose rows of a K/V head fit
        the tile of one query. Those of longer ones are only split where the number is chosen.

    Returns
    -------
    out : (total_q, heads, head_dim_v)
    lse : (heads, total_q), float32, only with ``return_lse``

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention_with_kvcache`.

    Examples
    --------
    A prompt of three tokens beside a sequence that has five and gets one; pages of 4 rows:

    >>> import numpy as np
    >>> import anyflash
    >>> k_cache, v_cache = np.zeros((2, 8, 4, 2, 16), np.float32)
    >>> table = np.array([[6, 0], [1, 3]], np.int32)
    >>> ends = np.array([0, 3, 4], np.int32)
    >>> q, k = np.ones((4, 4, 16), np.float32), np.ones((4, 2, 16), np.float32)
    >>> out = anyflash.attention_varlen_with_kvcache(
    ...     q, k_cache, v_cache, ends, k, k, cache_seqlens=np.array([0, 5], np.int32),
    ...     block_table=table, causal=True,
    ... )
    >>> out.shape
    (4, 4, 16)
    >>> bool((k_cache[6, :3] == 1).all() and (v_cache[3, 1] == 1).all())
    True
    """
    name = "anyflash.attention_varlen_with_kvcache"
    check_packed(name, cu_seqlens_q)
    options = AttentionOptions(
        softmax_scale, causal, window_size, softcap, alibi_slopes, sinks=sinks
    )
    cache = KvCacheOptions(
        k,
        v,
        rotary_cos,
        rotary_sin,
        rotary_seqlens,
        rotary_interleaved,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        tree_mask,
        k_scale,
        v_scale,
        num_splits,
        split_size,
        head_dim_v,
        cu_seqlens_q,
        cu_seqlens_k_new,
        max_seqlen_q,
        validate,
    )
    outputs = OutputRequest(return_lse, out_dtype=out_dtype, out=out, stream=stream)
    tensors = (q, k_cache, v_cache)
    return attend_with_kvcache(name, tensors, cache, options, outputs, workspace=workspace)
