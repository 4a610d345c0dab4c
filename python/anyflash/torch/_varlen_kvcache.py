"""anyflash.torch.attention_varlen_with_kvcache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from anyflash._call.kvcache import check_packed
from anyflash._call.options import (
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    KvCacheOptions,
    OutputRequest,
)
from anyflash.torch._kvcache import attend_with_kvcache

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyflash._api.keywords import VarlenKvCacheKeywords


@overload
def attention_varlen_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    cu_seqlens_q: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenKvCacheKeywords[Tensor]],
) -> Tensor: ...
@overload
def attention_varlen_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    cu_seqlens_q: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[VarlenKvCacheKeywords[Tensor]],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    cu_seqlens_q: Tensor,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[VarlenKvCacheKeywords[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_varlen_with_kvcache(  # noqa: PLR0917 (as attention_varlen and attention_with_kvcache)
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    cu_seqlens_q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    validate: bool = False,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
    split_size: int | None = None,
    head_dim_v: int | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`anyflash.attention_varlen_with_kvcache` for PyTorch, also within ``torch.compile``.

    The caches are written in place where k is given. There is no backward. DTensors may be sharded
    on heads, as for :func:`attention_with_kvcache`.

    Parameters that are not listed are those of :func:`anyflash.attention_varlen_with_kvcache`.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k_cache : (cache_batch, capacity, heads_k, head_dim)
    v_cache : (cache_batch, capacity, heads_k, head_dim_v); or None, with ``head_dim_v``
        With ``block_table``: (pages, page_size, heads_k, head_dim or head_dim_v).
    cu_seqlens_q : (batch + 1,) int32
    k, v : (total_new, heads_k, head_dim or head_dim_v), optional

    Returns
    -------
    out : (total_q, heads, head_dim_v)
    lse : (heads, total_q), float32, only with ``return_lse``

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`anyflash.attention_with_kvcache`.

    Examples
    --------
    A prompt of three tokens beside a single one:

    >>> import torch
    >>> import anyflash.torch
    >>> k_cache, v_cache = torch.zeros(2, 2, 16, 2, 8)
    >>> q = k = v = torch.ones(4, 2, 8)
    >>> ends = torch.tensor([0, 3, 4], dtype=torch.int32)
    >>> filled = torch.tensor([0, 5], dtype=torch.int32)
    >>> anyflash.torch.attention_varlen_with_kvcache(
    ...     q, k_cache, v_cache, ends, k, v, cache_seqlens=filled, causal=True
    ... ).shape
    torch.Size([4, 2, 8])
    >>> bool((k_cache[0, :3] == 1).all() and (k_cache[1, 5] == 1).all())
    True
    """
    check_packed("anyflash.torch.attention_varlen_with_kvcache", cu_seqlens_q)
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
    outputs = OutputRequest(return_lse, out_dtype=out_dtype)
    return attend_with_kvcache((q, k_cache, v_cache), cache, options, outputs)
