"""flash_attn_with_kvcache."""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from anyflash._call.parsing import flags
from anyflash.flash_attn._options import score_options, with_positive_infinity
from anyflash.torch import attention_with_kvcache
from anyflash.torch._paged import split_pages


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """:func:`anyflash.attention_with_kvcache` with flash-attn's signature.

    k and v, if given, are written to the caches in place, from ``cache_seqlens`` on, and seen. As
    in flash-attn there is no backward: the results require no grad.

    What the cache's parameters mean is said there. Those that are not listed are those of
    :func:`flash_attn_func`.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k_cache, v_cache : (cache_batch, capacity, heads_k, head_dim)
        With ``block_table``: (pages, page_size, heads_k, head_dim), any page size.
    k, v : (batch, seqlen_new, heads_k, head_dim), optional
    rotary_cos, rotary_sin : (rows, rotary_dim / 2), optional
        The first new key of sequence b is rotated by row ``cache_seqlens[b]``.
    cache_seqlens : int or (batch,) int32, optional
    cache_batch_idx, cache_leftpad : (batch,) int32, optional
    block_table : (batch, pages of a sequence) int32, optional
    num_splits : int
        Parts that the keys are divided into; 0: chosen.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim)
    softmax_lse : (batch, heads, seqlen_q) float32, only with ``return_softmax_lse``
        +inf where a query sees no key.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 2, 8, 2, 16)
    >>> q, k, v = torch.randn(2, 1, 4, 16), torch.ones(2, 1, 2, 16), torch.ones(2, 1, 2, 16)
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3, causal=True).shape
    torch.Size([2, 1, 4, 16])
    >>> bool((k_cache[:, 3] == 1).all())
    True
    """
    rotary_interleaved, return_softmax_lse = flags(
        "anyflash.flash_attn",
        rotary_interleaved=rotary_interleaved,
        return_softmax_lse=return_softmax_lse,
    )
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    with torch.no_grad():
        k_cache, v_cache, block_table = split_pages(
            "anyflash.flash_attn.flash_attn_with_kvcache", k_cache, v_cache, block_table
        )
        rotary_seqlens = None
        if rotary_cos is not None:
            rotary_seqlens = rows_in_cache(q, cache_seqlens, cache_leftpad)
            options["window_size"] = _bounds(options["window_size"], q, k_cache, block_table)
        result = attention_with_kvcache(
            *(q, k_cache, v_cache, k, v),
            rotary_cos=rotary_cos,
            rotary_sin=rotary_sin,
            rotary_seqlens=rotary_seqlens,
            rotary_interleaved=rotary_interleaved,
            cache_seqlens=cache_seqlens,
            cache_batch_idx=cache_batch_idx,
            cache_leftpad=cache_leftpad,
            block_table=block_table,
            num_splits=num_splits,
            return_lse=return_softmax_lse,
            **options,
        )
        return (result[0], with_positive_infinity(result[1])) if return_softmax_lse else result


def rows_in_cache(
    q: torch.Tensor,
    cache_seqlens: int | torch.Tensor | None,
    cache_leftpad: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """flash-attn rotates by the row in the cache, the pad included, anyflash without it."""
    if cache_leftpad is None:
        return None
    if cache_seqlens is None or isinstance(cache_seqlens, torch.Tensor):
        return cache_seqlens
    if not (isinstance(cache_seqlens, int) and 0 <= cache_seqlens < 1 << 31 and is_tensor(q)):
        return None  # which attention_with_kvcache refuses
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    return torch.full((batch,), cache_seqlens, dtype=torch.int32, device=q.device)


def is_tensor(x: Any) -> bool:
    """One that has rows."""
    return isinstance(x, torch.Tensor) and x.dim() > 1


def _bounds(
    window: tuple[int, int],
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor | None,
) -> tuple[int, int]:
    """A bound that no score can meet is none, which is what rotates all queries alike. The limits
    are flash-attn 2's: bounds of at least seqlen_k, which is the cache's capacity, are none."""
    # What is not as it should be, attention_with_kvcache says.
    if not all(is_tensor(x) for x in (q, k_cache)) or not (
        block_table is None or is_tensor(block_table)
    ):
        return window
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    left, right = window
    return (
        -1 if left >= capacity else left,
        -1 if right >= max(capacity, q.shape[1]) else right,
    )
