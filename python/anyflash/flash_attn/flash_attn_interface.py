"""flash-attn's functions, with its signatures and returns, on anyflash's kernels.

All take CPU tensors too (float64, float32, float16, bfloat16), head dims that are no multiple of 8,
v with a head dim of its own, and softcap together with dropout.
"""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from anyflash.flash_attn import flash_attn_2_cuda as flash_attn_gpu
from anyflash.flash_attn._kvcache import flash_attn_with_kvcache
from anyflash.flash_attn._options import check_pages, packing_of, read_flags, score_options
from anyflash.flash_attn._packed import attend_kv, attend_packed
from anyflash.flash_attn._paged import ForwardOnly
from anyflash.flash_attn._private import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
    attend,
    attend_paged,
    maybe_contiguous,
)
from anyflash.flash_attn._s_dmask import _get_block_size_n, round_multiple
from anyflash.flash_attn._varlen import attend_varlen
from anyflash.torch import attention
from anyflash.torch._dispatch_state import is_grad_enabled

__all__ = [
    "FlashAttnFunc",
    "FlashAttnKVPackedFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "FlashAttnVarlenKVPackedFunc",
    "FlashAttnVarlenQKVPackedFunc",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "_get_block_size_n",
    "flash_attn_func",
    "flash_attn_gpu",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_unpadded_func",
    "flash_attn_unpadded_kvpacked_func",
    "flash_attn_unpadded_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "maybe_contiguous",
    "round_multiple",
]

# What flash-attn's own functions call: operators there, functions here.
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward
USE_TRITON_ROCM = False


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`anyflash.torch.attention` with flash-attn's signature.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k, v : (batch, seqlen_k, heads_k, head_dim)
        heads_k divides heads.
    dropout_p : float
        Drawn from torch's default generator.
    softmax_scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    causal : bool
        Aligned at the bottom right: the last query sees all keys.
    window_size : (left, right)
        Query i sees the keys ``i + seqlen_k - seqlen_q - left`` to
        ``i + seqlen_k - seqlen_q + right``; negative: no bound on that side.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0: none.
    alibi_slopes : (heads,) or (batch, heads) float32, optional
        ``slope * |i + seqlen_k - seqlen_q - j|`` is taken from the score of query i and key j.
    deterministic : bool
        Gradients have the same bits in every run.
    return_attn_probs : bool
        Return ``(out, softmax_lse, S_dmask)``.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim)
        0 where a query sees no key.
    softmax_lse : (batch, heads, seqlen_q) float32
        Natural logarithm of the softmax's denominator; +inf where a query sees no key (anyflash's
        own functions give -inf). Unlike flash-attn's it is differentiable.
    S_dmask : (batch, heads, seqlen_q, seqlen_k), lengths rounded up to 128
        For tests, with a matrix of scores in memory: negative where dropout drops. The magnitude
        is ``exp(score - m)``, as flash-attn's kernel leaves it: m is the row's largest score from
        this key's block to the last (``_get_block_size_n`` keys are a block). Without dropout
        it is empty.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`anyflash.attention`.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn import flash_attn_func
    >>> q = torch.randn(2, 5, 4, 16, requires_grad=True)
    >>> k = v = torch.randn(2, 7, 2, 16)
    >>> flash_attn_func(q, k, v, 0.1, causal=True).sum().backward()
    >>> out, softmax_lse, S_dmask = flash_attn_func(q, k, v, return_attn_probs=True)
    >>> out.shape, softmax_lse.shape, S_dmask.shape
    (torch.Size([2, 5, 4, 16]), torch.Size([2, 4, 5]), torch.Size([0]))
    """
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    deterministic, return_attn_probs = read_flags(deterministic, return_attn_probs)
    if return_attn_probs:
        given = (q, k, v, (), options, dropout_p, True)
        return attend(*given, deterministic=deterministic or None)[:3]
    return attention(
        *(q, k, v), **options, dropout_p=dropout_p, deterministic=deterministic or None
    )


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """:func:`flash_attn_func` over sequences of different lengths, packed one after the other.

    Parameters that are not listed are those of :func:`flash_attn_func`.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k, v : (total_k, heads_k, head_dim)
        With ``block_table``: (pages, page_size, heads_k, head_dim), any page size.
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
        Where the sequences begin, and the last one ends. Rows behind it give 0, an LSE of +inf and
        gradients of 0; on a GPU anything. A CPU refuses them within ``torch.compile``.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths.
    block_table : (batch, pages of a sequence) int32, optional
        Row r of sequence b is row ``r % page_size`` of page ``block_table[b, r // page_size]``.
        Forward only, without dropout.

    Returns
    -------
    out : (total_q, heads, head_dim)
    softmax_lse : (heads, total_q) float32
    S_dmask : (batch, heads, max_seqlen_q, max_seqlen_k), lengths rounded up to 128

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn import flash_attn_varlen_func
    >>> q = torch.randn(5, 2, 16)
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 3, 3, causal=True).shape
    torch.Size([5, 2, 16])
    """
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    deterministic, return_attn_probs = read_flags(deterministic, return_attn_probs)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    if block_table is not None:
        dropout_p = check_pages((q, k, v, *packing, block_table), dropout_p)

        def paged(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return attend_paged(q, k, v, packing, options, dropout_p, block_table)[:3]

        recorded = is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        function: Any = partial(ForwardOnly.apply, paged) if recorded else paged
        results = function(q, k, v)
        return results if return_attn_probs else results[0]
    if return_attn_probs:
        given = (q, k, v, packing, options, dropout_p, True)
        return attend(*given, deterministic=deterministic or None)[:3]
    return attend_varlen(
        *(q, k, v, *packing), **options, dropout_p=dropout_p, deterministic=deterministic or None
    )


def flash_attn_qkvpacked_func(
    qkv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of ``qkv`` (batch, seqlen, 3, heads, head_dim).

    Its gradient is written as one tensor.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn import flash_attn_qkvpacked_func
    >>> qkv = torch.randn(2, 5, 3, 4, 16, requires_grad=True)
    >>> flash_attn_qkvpacked_func(qkv, causal=True).sum().backward()
    >>> qkv.grad.shape
    torch.Size([2, 5, 3, 4, 16])
    """
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    deterministic, return_attn_probs = read_flags(deterministic, return_attn_probs)
    results = attend_packed(None, qkv, (), options, dropout_p, deterministic, return_attn_probs)
    return results if return_attn_probs else results[0]


def flash_attn_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of q and ``kv`` (batch, seqlen_k, 2, heads_k, head_dim)."""
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    deterministic, return_attn_probs = read_flags(deterministic, return_attn_probs)
    results = attend_kv(q, kv, (), options, dropout_p, deterministic, return_attn_probs)
    return results if return_attn_probs else results[0]


def flash_attn_varlen_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of ``qkv`` (total, 3, heads, head_dim)."""
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    deterministic, return_attn_probs = read_flags(deterministic, return_attn_probs)
    packing = packing_of(cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, "max_seqlen")
    results = attend_packed(
        None, qkv, packing, options, dropout_p, deterministic, return_attn_probs
    )
    return results if return_attn_probs else results[0]


def flash_attn_varlen_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` of q and ``kv`` (total_k, 2, heads_k, head_dim)."""
    options = score_options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    deterministic, return_attn_probs = read_flags(deterministic, return_attn_probs)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    results = attend_kv(q, kv, packing, options, dropout_p, deterministic, return_attn_probs)
    return results if return_attn_probs else results[0]


# FlashAttention 1's names, with its order of arguments. "causal" is aligned at the bottom right
# here too, which is the same where a sequence has as many keys as queries.


def flash_attn_unpadded_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_func` as FlashAttention 1 had it."""
    return flash_attn_varlen_func(
        *(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal),
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_unpadded_kvpacked_func(
    q: torch.Tensor,
    kv: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_kvpacked_func` as FlashAttention 1 had it."""
    return flash_attn_varlen_kvpacked_func(
        *(q, kv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k),
        *(dropout_p, softmax_scale, causal),
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_unpadded_qkvpacked_func(
    qkv: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_seqlen: int,
    dropout_p: float,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_attn_probs: bool = False,
    deterministic: bool = False,
) -> Any:
    """:func:`flash_attn_varlen_qkvpacked_func` as FlashAttention 1 had it."""
    return flash_attn_varlen_qkvpacked_func(
        *(qkv, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal),
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


class _Applied:
    """``apply`` as flash-attn's Functions have it: arguments, and whether gradients are enabled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def apply(self, *arguments: Any) -> Any:
        *given, enabled = arguments
        with torch.set_grad_enabled(enabled):
            return self._function(*given)


FlashAttnFunc = _Applied(flash_attn_func)
FlashAttnKVPackedFunc = _Applied(flash_attn_kvpacked_func)
FlashAttnQKVPackedFunc = _Applied(flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = _Applied(flash_attn_varlen_func)
FlashAttnVarlenKVPackedFunc = _Applied(flash_attn_varlen_kvpacked_func)
FlashAttnVarlenQKVPackedFunc = _Applied(flash_attn_varlen_qkvpacked_func)
