"""anyflash.torch.attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from anyflash._call.options import (
    BLOCK_SIZE,
    NO_DROPOUT,
    NO_SOFTCAP,
    UNBOUNDED,
    OutputRequest,
    given_options,
    plain_options,
)
from anyflash._call.results import AttentionResult
from anyflash.torch import _plain
from anyflash.torch._attend import attend

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


_NAME = "anyflash.torch.attention"


@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deterministic: bool | None = ...,
    **options: Unpack[Plain[Tensor, int]],
) -> Tensor: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deterministic: bool | None = ...,
    **options: Unpack[WithLse[Tensor, int]],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deterministic: bool | None = ...,
    **options: Unpack[WithResult[Tensor, int]],
) -> AttentionResult[Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deterministic: bool | None = ...,
    **options: Unpack[WithMaxLogits[Tensor, int]],
) -> AttentionResult[Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deterministic: bool | None = ...,
    **options: Unpack[WithDropoutMask[Tensor, int]],
) -> AttentionResult[Tensor]: ...
@overload
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    deterministic: bool | None = ...,
    **options: Unpack[Unknown[Tensor, int]],
) -> Tensor | tuple[Tensor, Tensor] | AttentionResult[Tensor]: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
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
    seqused_k: Tensor | None = None,
    deterministic: bool | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_dropout_mask: bool = False,
    return_result: bool = False,
    out_dtype: torch.dtype | str | None = None,
) -> Tensor | tuple[Tensor, Tensor] | AttentionResult[Tensor]:
    """:func:`anyflash.attention` for PyTorch, differentiable.

    Gradients flow to q, k, v, a bias of numbers, sinks and alibi_slopes, from the output and from
    ``lse``. Within ``torch.compile``, ``torch.export`` and ``torch.func`` it is the operator
    ``torch.ops.anyflash.forward``. Gradients of gradients (``create_graph=True``) recompute
    attention in plain PyTorch: memory is then quadratic in the sequence lengths. There is no
    forward-mode derivative.

    Under ``torch.autocast``, q, k and v of 16 and 32 bits are taken in the autocast dtype.

    DTensors may be sharded on batch or heads, q, k and v alike, where the ranks divide ``heads``
    and ``heads_k``. The output is placed as q, and nothing is communicated. Dropout drops what it
    drops of the whole tensors, and needs a ``seed``, the same on every rank.

    Parameters that are not listed are those of :func:`anyflash.attention`. There, tensors that
    require grad come here.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k : (batch, seqlen_k, heads_k, head_dim)
    v : (batch, seqlen_k, heads_k, head_dim_v)
        CPU: float64, float32, float16, bfloat16. CUDA: float16, bfloat16.
    seed, rng_state
        As in :func:`anyflash.attention`. Where dropout is given neither, a state is drawn on q's
        device from its default generator. ``torch.manual_seed``, activation checkpointing and
        replayed CUDA graphs then do what they do for torch's own dropout.
    deterministic : bool, optional
        Of the gradients, as in :func:`anyflash.attention_backward`. Default:
        ``torch.are_deterministic_algorithms_enabled()``.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
    lse : (batch, heads, seqlen_q), float32, only with ``return_lse``
    AttentionResult
        Instead of both, where one is asked for; ``rng_state`` is a tensor (2,) of int64 where the
        random state was drawn.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`anyflash.attention`.
    RuntimeError
        DTensors in other placements.

    Examples
    --------
    >>> import torch
    >>> import anyflash.torch
    >>> q = torch.randn(1, 4, 2, 8, requires_grad=True)
    >>> bias = torch.zeros(4, 4, requires_grad=True)
    >>> out, lse = anyflash.torch.attention(q, q, q, bias=bias, causal=True, return_lse=True)
    >>> (out.sum() + lse.sum()).backward()
    >>> q.grad.shape, bias.grad.shape
    (torch.Size([1, 4, 2, 8]), torch.Size([4, 4]))
    """
    # A small call takes 3 us: what is left at its default is not read.
    options = None
    if not (
        window_size is UNBOUNDED
        and softcap is NO_SOFTCAP
        and dropout_p is NO_DROPOUT
        and alibi_slopes is None
        and bias is None
        and block_mask is None
        and key_ranges is None
        and sinks is None
        and seed is None
        and rng_state is None
        and seqused_k is None
    ):
        options = given_options(
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
    if (
        options is None
        and out_dtype is None
        and (deterministic is None or isinstance(deterministic, bool))
        and return_max_logits is False
        and return_dropout_mask is False
        and return_result is False
    ):
        result: Tensor | tuple[Tensor, Tensor] | None = _plain.attend(
            _NAME, q, k, v, softmax_scale, causal, return_lse, deterministic
        )
        if result is not None:
            return result
    if options is None:
        options = plain_options(softmax_scale, causal)
    outputs = OutputRequest(
        return_lse, return_max_logits, return_dropout_mask, return_result, out_dtype
    )
    return attend((q, k, v), options, None, outputs, deterministic)
