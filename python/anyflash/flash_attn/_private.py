"""flash-attn's private functions, which programs for context parallelism call."""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

import math
from typing import Any

import torch

import anyflash
from anyflash.flash_attn._options import (
    packing_of,
    probability,
    score_options,
    with_positive_infinity,
)
from anyflash.flash_attn._s_dmask import round_multiple, s_dmask
from anyflash.flash_attn._varlen import (
    attend_varlen,
    backward_varlen,
    like_rows,
    lse_like_rows,
    used_rows,
)
from anyflash.torch import attention
from anyflash.torch._dispatch_state import is_deterministic
from anyflash.torch._paged import attention_varlen_paged

_VARLEN = "anyflash.flash_attn.flash_attn_varlen_func"
Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def maybe_contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return x.contiguous() if x is not None and x.stride(-1) != 1 else x


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: tuple[Any, ...],
    options: dict[str, Any],
    dropout_p: float,
    return_softmax: bool,
    **further: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """out, the LSE as flash-attn gives it, S_dmask, and the state that dropout was done with."""
    dropped = return_softmax and probability(dropout_p) > 0
    function: Any = attend_varlen if packing else attention
    result = function(
        *(q, k, v, *packing),
        **options,
        **further,
        dropout_p=dropout_p,
        return_dropout_mask=dropped,
        return_result=True,
    )
    mask = (
        s_dmask(q, k, result.dropout_mask, packing, options) if dropped else q.detach().new_empty(0)
    )
    return result.out, with_positive_infinity(result.lse), mask, result.rng_state


def backward(
    tensors: tuple[torch.Tensor, ...],
    gradients: tuple[torch.Tensor | None, ...],
    packing: tuple[Any, ...],
    options: dict[str, Any],
    dropout_p: float,
    rng_state: torch.Tensor | None,
    deterministic: bool,
    dlse: torch.Tensor | None = None,
) -> None:
    """tensors: dout, q, k, v, out, softmax_lse; gradients: where dq, dk, dv are written."""
    options = {**options, "dlse": dlse, "deterministic": deterministic or is_deterministic()}
    if dropout_p > 0:
        options |= {"dropout_p": dropout_p, "rng_state": rng_state}
    if packing:
        backward_varlen(tensors, packing, gradients, **options)
    else:
        targets = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        function: Any = anyflash.attention_backward
        function(*tensors, **targets, **options)


def _with_state(result: tuple[Any, ...], q: torch.Tensor) -> Four:
    out, lse, mask, state = result
    # Without dropout nobody reads it, but a tensor is what is saved for the backward.
    if state is None:
        state = torch.empty(2, dtype=torch.int64, device=q.device)
    return out, lse, mask, state


def _flash_attn_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    return_softmax: bool,
) -> Four:
    """Without autograd: (out, softmax_lse, S_dmask, rng_state), of :func:`flash_attn_func`.

    ``rng_state`` is (2,) int64 on q's device, to be given to :func:`_flash_attn_backward`.
    """
    window = (window_size_left, window_size_right)
    options = score_options(softmax_scale, causal, window, softcap, alibi_slopes)
    with torch.no_grad():
        return _with_state(attend(q, k, v, (), options, dropout_p, return_softmax), q)


def _flash_attn_varlen_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    return_softmax: bool = False,
    block_table: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> Four:
    """Without autograd: (out, softmax_lse, S_dmask, rng_state), of :func:`flash_attn_varlen_func`.

    ``seqused_k`` (batch,) int32: of a sequence's keys only so many are used. ``zero_tensors``: rows
    of q behind the last sequence give 0, and an LSE of -inf; otherwise, on a GPU, anything.
    ``num_splits``: of the keys in pages, as :func:`flash_attn_with_kvcache` has it; packed ones are
    not split.
    """
    if leftpad_k is not None:
        raise NotImplementedError(
            "anyflash.flash_attn._flash_attn_varlen_forward: leftpad_k is given; only None is "
            "allowed (flash_attn_with_kvcache has cache_leftpad)"
        )
    window = (window_size_left, window_size_right)
    options = score_options(softmax_scale, causal, window, softcap, alibi_slopes)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    result: tuple[Any, ...]
    with torch.no_grad():
        if block_table is None:
            given = (q, k, v, packing, options, dropout_p, return_softmax)
            result = attend(*given, seqused_k=seqused_k)
        else:
            paged = (block_table, seqused_k, num_splits)
            result = attend_paged(q, k, v, packing, options, dropout_p, *paged)
    out, lse, mask, state = _with_state(result, q)
    if zero_tensors:
        outside = torch.arange(q.shape[0], device=q.device) >= cu_seqlens_q[-1]
        out = out.masked_fill(outside[:, None, None], 0)
        lse = lse.masked_fill(outside, -math.inf)
    return out, lse, mask, state


def attend_paged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    packing: tuple[Any, ...],
    options: dict[str, Any],
    dropout_p: float,
    block_table: torch.Tensor,
    seqused_k: torch.Tensor | None = None,
    num_splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
    if dropout_p > 0:
        raise NotImplementedError(
            f"{_VARLEN}: dropout_p is {dropout_p}, but "
            "block_table is given; with pages only 0 is allowed"
        )
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, _ = packing
    lengths = cu_seqlens_k.diff() if seqused_k is None else seqused_k
    out, lse = attention_varlen_paged(
        *(_VARLEN, used_rows(q, cu_seqlens_q), k, v, cu_seqlens_q),
        *(lengths, max_seqlen_q, block_table),
        options | {"num_splits": num_splits},
    )
    out, lse = like_rows(out, q), lse_like_rows(lse, q)
    return out, with_positive_infinity(lse), q.detach().new_empty(0), None


def _row_sums(dout: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """rowsum(dout * out), float32: (batch, heads, seqlen_q), or of packed sequences
    (heads, total_q)."""
    products = dout.to(torch.promote_types(dout.dtype, torch.float32)) * out
    return products.sum(-1).float().transpose(-1, -2)


def _flash_attn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes dq, dk and dv; gives rowsum(dout * out).

    That is softmax_d (batch, heads, seqlen_q rounded up to 128), float32, 0 behind seqlen_q. out
    and softmax_lse need not be those of k and v: where keys are spread over several calls, those of
    the whole are given each time.
    """
    window = (window_size_left, window_size_right)
    options = score_options(softmax_scale, causal, window, softcap, alibi_slopes)
    tensors = (dout, q, k, v, out, softmax_lse)
    with torch.no_grad():
        backward(tensors, (dq, dk, dv), (), options, dropout_p, rng_state, deterministic)
        rows = q.shape[1]
        padding = (0, round_multiple(rows, 128) - rows)
        return torch.nn.functional.pad(_row_sums(dout, out), padding)


def _flash_attn_varlen_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor | None,
    dk: torch.Tensor | None,
    dv: torch.Tensor | None,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: torch.Tensor | None,
    deterministic: bool,
    rng_state: torch.Tensor | None = None,
    zero_tensors: bool = False,
) -> torch.Tensor:
    """Writes dq, dk and dv; gives rowsum(dout * out).

    That is softmax_d (heads, total_q + 128 batch), float32: sequence b begins at
    ``cu_seqlens_q[b] + 128 b``, and 0 is between. Rows behind the last sequence get 0 on the CPU,
    and on a GPU with ``zero_tensors``.
    """
    window = (window_size_left, window_size_right)
    options = score_options(softmax_scale, causal, window, softcap, alibi_slopes)
    packing = packing_of(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    tensors, gradients = (dout, q, k, v, out, softmax_lse), (dq, dk, dv)
    with torch.no_grad():
        if zero_tensors:
            for gradient in gradients:
                if gradient is not None:
                    gradient.zero_()
        backward(tensors, gradients, packing, options, dropout_p, rng_state, deterministic)
        sums = _row_sums(dout, out)
        batch = cu_seqlens_q.shape[0] - 1
        rows = torch.arange(q.shape[0], dtype=cu_seqlens_q.dtype, device=q.device)
        sequence = torch.searchsorted(cu_seqlens_q[1:], rows, right=True)
        softmax_d = sums.new_zeros(q.shape[1], q.shape[0] + 128 * batch)
        return softmax_d.index_copy_(1, rows + 128 * sequence, sums)
