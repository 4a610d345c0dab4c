"""FlashAttention-3's functions, with its signatures and returns, on anyflash's kernels.

All take CPU tensors too (float64, float32, float16, bfloat16), and head dims that are no multiple
of 8. float8 inputs, ``qv``, ``attention_chunk`` and ``seqused_q`` are refused.
"""

# ruff: noqa: PLR0917 (FlashAttention-3's orders of arguments)

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from anyflash._call import parsing
from anyflash.flash_attn._options import (
    as_int,
    check_tensors,
    optional,
    packing_of,
    read_flags,
    score_options,
)
from anyflash.flash_attn._varlen import attend_varlen
from anyflash.flash_attn_3._arguments import check_pack_gqa, refuse
from anyflash.flash_attn_3._kvcache import flash_attn_with_kvcache
from anyflash.flash_attn_3._private import Applied, _flash_attn_backward, _flash_attn_forward
from anyflash.torch import attention

__all__ = [
    "FlashAttnFunc",
    "FlashAttnQKVPackedFunc",
    "FlashAttnVarlenFunc",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Tensor = torch.Tensor
_NAME = "anyflash.flash_attn_3"
_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`anyflash.torch.attention` with FlashAttention-3's signature.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k : (batch, seqlen_k, heads_k, head_dim)
    v : (batch, seqlen_k, heads_k, head_dim_v)
        heads_k divides heads.
    softmax_scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    causal : bool
        Aligned at the bottom right: the last query sees all keys.
    window_size : (left, right)
        Query i sees the keys ``i + seqlen_k - seqlen_q - left`` to
        ``i + seqlen_k - seqlen_q + right``; negative: no bound on that side.
    softcap : float
        Scores become ``softcap * tanh(score / softcap)``; 0: none.
    deterministic : bool
        Gradients have the same bits in every run.
    return_attn_probs : bool
        Return ``(out, softmax_lse)``.
    qv, attention_chunk
        None and 0 alone are allowed.
    q_descale, k_descale, v_descale, num_splits, pack_gqa, sm_margin
        Change nothing: of float8 inputs, which are refused, and of how FlashAttention-3 divides the
        work.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
        0 where a query sees no key.
    softmax_lse : (batch, heads, seqlen_q) float32
        Natural logarithm of the softmax's denominator; -inf where a query sees no key. Unlike
        FlashAttention-3's it is differentiable.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`anyflash.attention`; or an argument that anyflash has nothing for.

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn_3 import flash_attn_func
    >>> q = torch.randn(2, 5, 4, 16, requires_grad=True)
    >>> k = v = torch.randn(2, 7, 2, 16)
    >>> flash_attn_func(q, k, v, causal=True).sum().backward()
    >>> out, softmax_lse = flash_attn_func(q, k, v, return_attn_probs=True)
    >>> out.shape, softmax_lse.shape
    (torch.Size([2, 5, 4, 16]), torch.Size([2, 4, 5]))
    """
    refuse("flash_attn_func", qv=qv, attention_chunk=attention_chunk)
    check_pack_gqa("flash_attn_func", pack_gqa)
    options = score_options(softmax_scale, causal, window_size, softcap, None)
    deterministic, return_attn_probs = read_flags(deterministic, return_attn_probs)
    return attention(
        *(q, k, v), **options, deterministic=deterministic or None, return_lse=return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` over sequences of different lengths, packed one after the other.

    Parameters that are not listed are those of :func:`flash_attn_func`.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k : (total_k, heads_k, head_dim)
    v : (total_k, heads_k, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
        Where the sequences begin, and the last one ends. Both are needed. Rows behind it give 0, an
        LSE of -inf and gradients of 0; on a GPU anything. Within ``torch.compile`` the CPU refuses
        them.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the lengths.
    seqused_k : (batch,) int32, optional
        Of a sequence's keys only so many are used.
    seqused_q
        None alone is allowed.

    Returns
    -------
    out : (total_q, heads, head_dim_v)
    softmax_lse : (heads, total_q) float32, only with ``return_attn_probs``

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn_3 import flash_attn_varlen_func
    >>> q = torch.randn(5, 2, 16)
    >>> cu_seqlens = torch.tensor([0, 2, 5], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, q, q, cu_seqlens, cu_seqlens, 3, 3, causal=True).shape
    torch.Size([5, 2, 16])
    """
    name = "flash_attn_varlen_func"
    refuse(name, seqused_q=seqused_q, qv=qv, attention_chunk=attention_chunk)
    check_pack_gqa(name, pack_gqa)
    for of, cu_seqlens in (("q", cu_seqlens_q), ("k", cu_seqlens_k)):
        if cu_seqlens is None:
            raise NotImplementedError(
                f"anyflash.flash_attn_3.{name}: cu_seqlens_{of} is None; both are needed: anyflash "
                "packs q, k and v alike"
            )
    options = score_options(softmax_scale, causal, window_size, softcap, None)
    deterministic, return_attn_probs = read_flags(deterministic, return_attn_probs)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    return attend_varlen(
        *(q, k, v, *packing),
        **options,
        seqused_k=seqused_k,
        deterministic=deterministic or None,
        return_lse=return_attn_probs,
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """:func:`flash_attn_func` of ``qkv`` (batch, seqlen, 3, heads, head_dim), or, with
    ``num_heads_q``, (batch, seqlen, num_heads_q + 2 heads_k, head_dim).

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn_3 import flash_attn_qkvpacked_func
    >>> qkv = torch.randn(2, 5, 8, 16, requires_grad=True)
    >>> flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4).shape
    torch.Size([2, 5, 4, 16])
    """
    check_tensors(f"{_NAME}.flash_attn_qkvpacked_func", qkv=qkv)
    heads = None if num_heads_q is None else as_int(num_heads_q, "num_heads_q")
    if qkv.ndim == 5 and qkv.shape[2] == 3:
        q, k, v = qkv.unbind(2)
    elif (
        qkv.ndim == 4
        and heads is not None
        and 0 < heads <= qkv.shape[2]
        and (qkv.shape[2] - heads) % 2 == 0
    ):
        heads_k = (qkv.shape[2] - heads) // 2
        q, k, v = torch.split(qkv, [heads, heads_k, heads_k], 2)
    else:
        raise ValueError(
            f"{_NAME}.flash_attn_qkvpacked_func: qkv has shape {tuple(qkv.shape)}, "
            f"and num_heads_q is {num_heads_q}; expected (batch, seqlen, 3, heads, head_dim), or "
            "(batch, seqlen, num_heads_q + 2 heads_k, head_dim) with num_heads_q"
        )
    return flash_attn_func(
        *(q, k, v, softmax_scale, causal),
        window_size=window_size,
        attention_chunk=attention_chunk,
        softcap=softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def _varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    seqused_q: None,
    seqused_k: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *others: Any,
) -> Any:
    """:func:`flash_attn_varlen_func` in the order of its autograd Function."""
    lengths = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q, seqused_k)
    return flash_attn_varlen_func(q, k, v, *lengths, *others)


FlashAttnFunc = Applied(flash_attn_func)
FlashAttnQKVPackedFunc = Applied(flash_attn_qkvpacked_func)
FlashAttnVarlenFunc = Applied(_varlen)


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Joins attention over disjoint sets of keys, given each one's result and LSE.

    Parameters
    ----------
    out_partial : (parts, batch, seqlen, heads, head_dim) float32
    lse_partial : (parts, batch, seqlen, heads) float32
        -inf where a part saw no key: its result counts nothing, whatever it holds.
    out : (batch, seqlen, heads, head_dim), optional
        Where the result is written.
    out_dtype : torch.dtype, optional
        Default: ``out``'s, else float32.

    Returns
    -------
    out : (batch, seqlen, heads, head_dim)
    softmax_lse : (batch, seqlen, heads) float32

    Examples
    --------
    >>> import torch
    >>> from anyflash.flash_attn_3 import flash_attn_combine
    >>> parts, lse = torch.randn(3, 2, 5, 4, 16), torch.zeros(3, 2, 5, 4)
    >>> out, _ = flash_attn_combine(parts, lse)
    >>> bool(torch.allclose(out, parts.mean(0), atol=1e-6))
    True
    """
    _check_parts(out_partial, lse_partial, out, out_dtype)
    if out_partial.ndim != 5 or lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"{_NAME}.flash_attn_combine: out_partial has shape "
            f"{tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; expected "
            "(parts, batch, seqlen, heads, head_dim) and the same without head_dim"
        )
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(
            f"{_NAME}.flash_attn_combine: out has shape {tuple(out.shape)}; expected "
            f"{tuple(out_partial.shape[1:])}: out_partial's without the parts"
        )
    with torch.no_grad():
        lse = torch.logsumexp(lse_partial, 0)
        empty = lse_partial == -math.inf
        weights = torch.exp(lse_partial - lse).masked_fill(empty, 0)
        parts = out_partial.masked_fill(empty[..., None], 0)
        result = (weights[..., None] * parts).sum(0)
        if out is not None:
            return out.copy_(result), lse
        return result.to(out_dtype or result.dtype), lse


def _check_parts(out_partial: Any, lse_partial: Any, out: Any, out_dtype: Any) -> None:
    """Types and dtypes of flash_attn_combine's arguments."""
    function = f"{_NAME}.flash_attn_combine"
    given = {"out_partial": out_partial, "lse_partial": lse_partial, **optional(out=out)}
    check_tensors(function, **given)
    dtypes = {name: x.dtype for name, x in given.items()} | optional(out_dtype=out_dtype)
    for name, dtype in dtypes.items():
        if not isinstance(dtype, torch.dtype):
            raise TypeError(
                f"{function}: {name} is {type(dtype).__name__}; a torch.dtype is allowed"
            )
        if dtype not in _DTYPES:
            raise TypeError(
                f"{function}: {name} is {dtype}; float64, float32, float16 and bfloat16 are allowed"
            )


def get_scheduler_metadata(
    batch_size: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    num_heads_q: int,
    num_heads_kv: int,
    headdim: int,
    cache_seqlens: Tensor,
    qkv_dtype: torch.dtype = torch.bfloat16,
    headdim_v: int | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_size: int | None = None,
    max_seqlen_k_new: int = 0,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    attention_chunk: int = 0,
    has_softcap: bool = False,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor:
    """Nothing: (0,) int32 on the device of ``cache_seqlens``.

    anyflash's kernels read all lengths themselves, so there is nothing to prepare. It is what
    ``scheduler_metadata`` of :func:`flash_attn_with_kvcache` may be.
    """
    name = "get_scheduler_metadata"
    check_tensors(f"{_NAME}.{name}", cache_seqlens=cache_seqlens)
    parsing.flags(f"{_NAME}.{name}", causal=causal, has_softcap=has_softcap)
    check_pack_gqa(name, pack_gqa)
    return cache_seqlens.new_empty(0, dtype=torch.int32)
