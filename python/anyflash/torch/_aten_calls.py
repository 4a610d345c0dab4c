"""How PyTorch's operators of flash attention become calls of anyflash, for _aten.py."""

# ruff: noqa: PLR0917 (the operators' orders of arguments)

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from anyflash._call.backward import Backward
from anyflash._call.forward import Forward
from anyflash._call.options import (
    NO_DROPOUT,
    UNBOUNDED,
    AttentionOptions,
    GradientRequest,
    OutputRequest,
    Packing,
)
from anyflash.torch._dispatch_state import is_deterministic, is_recorded
from anyflash.torch._kvcache import attention_with_kvcache
from anyflash.torch._paged import attention_varlen_paged, split_pages
from anyflash.torch._random import draw

Gradients = tuple[Tensor, Tensor, Tensor]
Qkv = tuple[Tensor, Tensor, Tensor]


def refuse(name: str, argument: str, given: Any, advice: str) -> NoReturn:
    shown = "a tensor" if isinstance(given, Tensor) else given
    raise NotImplementedError(f"aten::{name} (anyflash): {argument} is {shown}; {advice}")


def check(name: str, tensors: Qkv, return_debug_mask: bool, **inference_only: Any) -> None:
    """Refuses what is not computed, and what the operator's backward would not be told of."""
    if return_debug_mask:
        advice = "only False is allowed (anyflash.torch.attention has return_dropout_mask)"
        refuse(name, "return_debug_mask", True, advice)
    if not is_recorded(*tensors):
        return
    for argument, given in inference_only.items():
        if given is not None:
            advice = "PyTorch's backward does not get it; gradients need None, or torch.no_grad()"
            refuse(name, argument, given, advice)


def options_of(
    scale: float | None,
    is_causal: bool,
    window: tuple[int | None, int | None],
    dropout_p: float,
    rng_state: Tensor | None,
    alibi_slopes: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> AttentionOptions:
    left, right = (-1 if bound is None or bound < 0 else int(bound) for bound in window)
    return AttentionOptions(
        scale,
        is_causal,
        UNBOUNDED if left == right == -1 else (left, right),
        alibi_slopes=alibi_slopes,
        dropout_p=dropout_p if dropout_p else NO_DROPOUT,
        rng_state=rng_state if dropout_p else None,
        seqused_k=seqused_k,
    )


def packing_of(
    name: str, cum_seq_q: Tensor | None, cum_seq_k: Tensor | None, max_q: int, max_k: int
) -> Packing | None:
    if cum_seq_q is None and cum_seq_k is None:
        return None
    if cum_seq_q is None or cum_seq_k is None:
        argument = "cum_seq_q" if cum_seq_q is None else "cum_seq_k"
        refuse(name, argument, None, "without a block_table both are given, or neither")
    return Packing(cum_seq_q, cum_seq_k, int(max_q), int(max_k), False)


def out_like(query: Tensor, value: Tensor) -> Tensor:
    """In query's layout, as compiled code expects."""
    if query.shape[-1] == value.shape[-1]:
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def random_state(query: Tensor, dropout_p: float) -> Tensor:
    """As PyTorch passes it to the backward; without dropout nobody reads it."""
    if dropout_p:
        return draw(query.device).view(torch.uint64)
    return query.new_empty(2, dtype=torch.uint64)


def unused_results(query: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of the operators' results: PyTorch's second random tensor, the debug mask."""
    return query.new_empty((), dtype=torch.uint64), query.new_empty(0)


# -- the forward


def attend(
    name: str,
    tensors: Qkv,
    packing: Packing | None,
    options: AttentionOptions,
    out: Tensor,
) -> Tensor:
    """Writes out, and returns the LSE."""
    request = OutputRequest(return_lse=True, out=out)
    call = Forward(f"aten::{name} (anyflash)", tensors, options, packing)
    results: Any = call.run(request)
    lse: Tensor = results[1]
    return lse


def attend_to_pages(
    name: str,
    tensors: Qkv,
    cum_seqs: tuple[Tensor | None, Tensor | None],
    max_q: int,
    block_table: Tensor,
    options: AttentionOptions,
    num_splits: int | None,
    out: Tensor,
) -> Tensor:
    query, key, value = tensors
    cum_seq_q, cum_seq_k = cum_seqs
    result: Tensor
    lse: Tensor
    if options.dropout_p:
        refuse(name, "dropout_p", options.dropout_p, "with a block_table only 0 is allowed")
    lengths = options.seqused_k
    if lengths is None:
        if cum_seq_k is None:
            refuse(name, "seqused_k", None, "with a block_table it, or cum_seq_k, is needed")
        lengths = cum_seq_k.diff()
    given: dict[str, Any] = {
        "softmax_scale": options.softmax_scale,
        "causal": options.causal,
        "window_size": options.window_size,
        "alibi_slopes": options.alibi_slopes,
        "num_splits": 0 if num_splits is None else num_splits,
    }
    if cum_seq_q is None:
        key, value, table = split_pages(name, key, value, block_table, ("key", "value"))
        result, lse = attention_with_kvcache(
            *(query, key, value), cache_seqlens=lengths, block_table=table, return_lse=True, **given
        )
    else:
        result, lse = attention_varlen_paged(
            *(name, query, key, value, cum_seq_q, lengths, int(max_q), block_table),
            given,
            ("key", "value"),
        )
    out.copy_(result)
    return lse.contiguous()


def flash_forward(
    name: str,
    tensors: Qkv,
    cum_seqs: tuple[Tensor | None, Tensor | None],
    maxima: tuple[int, int],
    options: AttentionOptions,
    block_table: Tensor | None,
    num_splits: int | None,
    out: Tensor,
) -> Tensor:
    with torch.no_grad():
        if block_table is not None:
            return attend_to_pages(
                *(name, tensors, cum_seqs, maxima[0], block_table, options, num_splits, out)
            )
        return attend(name, tensors, packing_of(name, *cum_seqs, *maxima), options, out)


def check_scales(name: str, *scales: Tensor | None) -> None:
    for argument, scale in zip(("q_descale", "k_descale", "v_descale"), scales, strict=True):
        if scale is not None:
            advice = "only None is allowed, because q, k and v of 8 bits are not computed"
            refuse(name, argument, scale, advice)


def as_drawn(state: Tensor, dropout_p: float) -> Tensor | None:
    return state.view(torch.int64) if dropout_p else None


# -- the backward


def gradients(
    name: str,
    tensors: Qkv,
    packing: Packing | None,
    options: AttentionOptions,
    results: tuple[Tensor, Tensor, Tensor],
    transposed: bool,
) -> Gradients:
    """``results`` are grad_out, out and the LSE; ``transposed`` tensors have heads before rows."""
    grad_out, out, lse = results
    grads = tuple(torch.empty_like(x) for x in tensors)  # the layout that compiled code expects
    given = (*tensors, *grads, grad_out.resolve_neg(), out)
    with torch.no_grad():
        if transposed:
            given = tuple(x.transpose(1, 2) for x in given)
        q, k, v, dq, dk, dv, dout, out = given
        deterministic = is_deterministic()
        request = GradientRequest(deterministic, dq=dq, dk=dk, dv=dv)
        call = Backward(f"aten::{name} (anyflash)", (q, k, v), options, packing)
        call.run(dout, out, lse, None, request)
    return grads[0], grads[1], grads[2]
