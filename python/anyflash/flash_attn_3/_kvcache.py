"""FlashAttention-3's flash_attn_with_kvcache."""

# ruff: noqa: PLR0917 (FlashAttention-3's orders of arguments)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyflash._call.parsing import flags
from anyflash.flash_attn._kvcache import is_tensor, rows_in_cache
from anyflash.flash_attn._options import as_int, check_tensors, optional, score_options
from anyflash.flash_attn_3._arguments import refuse
from anyflash.torch import attention_with_kvcache
from anyflash.torch._paged import attention_varlen_paged, split_pages

_NAME = "flash_attn_with_kvcache"
_FUNCTION = f"anyflash.flash_attn_3.{_NAME}"
Tensor = torch.Tensor


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """:func:`anyflash.attention_with_kvcache` with FlashAttention-3's signature.

    k and v, if given, are written to the caches in place, from ``cache_seqlens`` on, and seen.
    There is no backward: the results require no grad.

    Parameters that are not listed are those of :func:`flash_attn_func`.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
        With ``cu_seqlens_q``: (total_q, heads, head_dim), without k and v.
    k_cache : (cache_batch, capacity, heads_k, head_dim)
    v_cache : (cache_batch, capacity, heads_k, head_dim_v)
        q's dtype. With ``page_table``: (pages, page_size, heads_k, head_dim or head_dim_v), any
        page size.
    k, v : (batch, seqlen_new, heads_k, head_dim or head_dim_v), optional
    rotary_cos, rotary_sin : (rows, rotary_dim / 2), optional
    cache_seqlens : int or (batch,) int32, optional
    cache_batch_idx, cache_leftpad : (batch,) int32, optional
    page_table : (batch, pages of a sequence) int32, optional
    cu_seqlens_q : (batch + 1,) int32, optional
        Where packed queries begin, and the last ones end; with ``max_seqlen_q``.
    rotary_seqlens : (batch,) int32, optional
        The row of the rotary tables of each sequence's first new key; default: ``cache_seqlens``.
    num_splits : int
        Parts that the keys are divided into; 0: chosen.
    qv, cu_seqlens_k_new, attention_chunk
        None, None and 0 alone are allowed.
    scheduler_metadata, q_descale, k_descale, v_descale, pack_gqa, sm_margin
        Change nothing.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v)
    softmax_lse : (batch, heads, seqlen_q), or (heads, total_q), float32
        Only with ``return_softmax_lse``; two empty tensors follow, where FlashAttention-3 has the
        results of splits.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn_3 import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 2, 8, 2, 16)
    >>> q, k, v = torch.randn(2, 1, 4, 16), torch.ones(2, 1, 2, 16), torch.ones(2, 1, 2, 16)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, causal=True).shape
    torch.Size([2, 1, 4, 16])
    >>> bool((k_cache[:, 3] == 1).all())
    True
    """
    refuse(_NAME, qv=qv, cu_seqlens_k_new=cu_seqlens_k_new, attention_chunk=attention_chunk)
    (return_softmax_lse,) = flags(_FUNCTION, return_softmax_lse=return_softmax_lse)
    pages = optional(page_table=page_table, cu_seqlens_q=cu_seqlens_q)
    check_tensors(_FUNCTION, q=q, k_cache=k_cache, v_cache=v_cache, **pages)
    if k_cache.dtype != q.dtype:
        raise TypeError(
            f"anyflash.flash_attn_3.{_NAME}: k_cache is {k_cache.dtype}, but q is {q.dtype}; both "
            "must have one dtype (anyflash.attention_with_kvcache takes caches of 8 bits)"
        )
    options = score_options(softmax_scale, causal, window_size, softcap, None)
    options |= {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad}
    options |= {"num_splits": num_splits}
    with torch.no_grad():
        if cu_seqlens_q is not None:
            refuse(_NAME, k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin)
            if max_seqlen_q is None:
                raise ValueError(
                    f"anyflash.flash_attn_3.{_NAME}: max_seqlen_q is None; with cu_seqlens_q it is "
                    "needed: an upper bound of the numbers of queries"
                )
            longest = as_int(max_seqlen_q, "max_seqlen_q")
            _check_packed(q, cu_seqlens_q, longest)
            lengths = (cu_seqlens_q, cache_seqlens, longest, page_table)
            out, lse = attention_varlen_paged(q, k_cache, v_cache, *lengths, options)
        else:
            k_cache, v_cache, table = split_pages(k_cache, v_cache, page_table)
            if rotary_cos is not None:
                options["window_size"] = _bounds(options["window_size"], q, k_cache, table)
            if rotary_cos is not None and rotary_seqlens is None:
                rotary_seqlens = rows_in_cache(q, cache_seqlens, cache_leftpad)
            out, lse = attention_with_kvcache(
                *(q, k_cache, v_cache, k, v),
                rotary_cos=rotary_cos,
                rotary_sin=rotary_sin,
                rotary_seqlens=rotary_seqlens,
                rotary_interleaved=rotary_interleaved,
                cache_seqlens=cache_seqlens,
                block_table=table,
                return_lse=True,
                **options,
            )
    empty = lse.new_empty(0)
    return (out, lse, empty, empty) if return_softmax_lse else out


def _check_packed(q: Tensor, cu_seqlens_q: Tensor, max_seqlen_q: int) -> None:
    """What is read of them before attention_with_kvcache checks its own arguments."""
    if q.dim() != 3:
        raise ValueError(
            f"{_FUNCTION}: q has {q.dim()} dimensions; with cu_seqlens_q 3 are expected: (total_q, "
            "heads, head_dim)"
        )
    shape = tuple(cu_seqlens_q.shape)
    if len(shape) != 1 or shape[0] < 1 or cu_seqlens_q.dtype != torch.int32:
        raise ValueError(
            f"{_FUNCTION}: cu_seqlens_q is {cu_seqlens_q.dtype} of shape {shape}; int32 of shape "
            "(batch + 1,) is allowed"
        )
    if not 0 <= max_seqlen_q < 1 << 31:
        raise ValueError(f"{_FUNCTION}: max_seqlen_q is {max_seqlen_q}; 0 to 2147483647 is allowed")


def _bounds(
    window: tuple[int, int], q: Tensor, k_cache: Tensor, table: Tensor | None
) -> tuple[int, int]:
    """A bound that no score can meet is none, which is what rotates all queries alike."""
    # What is not as it should be, attention_with_kvcache says.
    if not all(is_tensor(x) for x in (q, k_cache)) or not (table is None or is_tensor(table)):
        return window
    last_key = k_cache.shape[1] * (1 if table is None else table.shape[1]) - 1
    left, right = window
    return (
        -1 if left >= last_key else left,
        -1 if right >= q.shape[1] - 1 else right,
    )
