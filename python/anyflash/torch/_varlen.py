"""anyflash.torch.attention_varlen."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from anyflash._call.options import (
    BLOCK_SIZE,
    NO_DROPOUT,
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    OutputRequest,
    Packing,
)
from anyflash._call.results import AttentionResult
from anyflash.torch._attend import attend, check_tensor

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
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool | None = ...,
    **options: Unpack[Plain[Tensor, int]],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool | None = ...,
    **options: Unpack[WithLse[Tensor, int]],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool | None = ...,
    **options: Unpack[WithResult[Tensor, int]],
) -> AttentionResult[Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool | None = ...,
    **options: Unpack[WithMaxLogits[Tensor, int]],
) -> AttentionResult[Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool | None = ...,
    **options: Unpack[WithDropoutMask[Tensor, int]],
) -> AttentionResult[Tensor]: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool | None = ...,
    **options: Unpack[Unknown[Tensor, int]],
) -> Tensor | tuple[Tensor, Tensor] | AttentionResult[Tensor]: ...
def attention_varlen(  # noqa: PLR0917 (in the order that flash-attn has)
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    validate: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    bias: Tensor | None = None,
    block_mask: Tensor | None = None,
    block_size: tuple[int, int] = BLOCK_SIZE,
    key_ranges: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = NO_DROPOUT,
    seed: int | None = None,
    rng_state: Tensor | tuple[int, int] | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_dropout_mask: bool = False,
    return_result: bool = False,
    out_dtype: torch.dtype | str | None = None,
) -> Tensor | tuple[Tensor, Tensor] | AttentionResult[Tensor]:
    """:func:`anyflash.attention_varlen` for PyTorch, differentiable as :func:`attention` is.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k : (total_k, heads_k, head_dim)
    v : (total_k, heads_k, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
    max_seqlen_q, max_seqlen_k : int
        As in :func:`anyflash.attention_varlen`; all others as in :func:`attention`.

    Returns
    -------
    out : (total_q, heads, head_dim_v)
    lse : (heads, total_q), float32, only with ``return_lse``
    AttentionResult
        Instead of both, where one is asked for.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`anyflash.attention_varlen`.

    Examples
    --------
    >>> import torch
    >>> import anyflash.torch
    >>> q = torch.randn(5, 2, 8, requires_grad=True)
    >>> ends = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    >>> anyflash.torch.attention_varlen(q, q, q, ends, ends, 3, 3, causal=True).sum().backward()
    >>> q.grad.shape
    torch.Size([5, 2, 8])
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
    )
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
    outputs = OutputRequest(
        return_lse, return_max_logits, return_dropout_mask, return_result, out_dtype
    )
    check_tensor("anyflash.torch.attention_varlen", q)
    if cu_seqlens_q is None or cu_seqlens_k is None:  # which would mean no packed sequences
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise TypeError(
            f"anyflash.torch.attention_varlen: {name} is None; a tensor of int32 is allowed"
        )
    return attend((q, k, v), options, packing, outputs, deterministic)
