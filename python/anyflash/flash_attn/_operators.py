"""torch.ops.flash_attn: programs name these operators, to save their results in checkpointing, say.

They are registered by install() alone: flash-attn itself registers the same names.
"""

# ruff: noqa: PLR0917 (flash-attn's orders of arguments)

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyflash.flash_attn import _private
from anyflash.flash_attn._s_dmask import round_multiple

_SCORES = (
    "float dropout_p, float softmax_scale, bool causal, SymInt window_size_left{0}, "
    "SymInt window_size_right{0}, float softcap{1}, Tensor? alibi_slopes{2}"
)
_REQUIRED = _SCORES.format("", "", "")
_LENGTHS = "Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, SymInt max_seqlen_k"
_GRADIENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
    "Tensor(a6!)? dq, Tensor(a7!)? dk, Tensor(a8!)? dv"
)
_FOUR = "(Tensor, Tensor, Tensor, Tensor)"
_SCHEMAS = {
    "_flash_attn_forward": (
        f"(Tensor q, Tensor k, Tensor v, {_REQUIRED}, bool return_softmax) -> {_FOUR}"
    ),
    "_flash_attn_varlen_forward": (
        f"(Tensor q, Tensor k, Tensor v, {_LENGTHS}, {_SCORES.format('=-1', '=0.0', '=None')}, "
        "bool return_softmax=False, Tensor? block_table=None, Tensor? leftpad_k=None, "
        f"Tensor? seqused_k=None, bool zero_tensors=False, SymInt num_splits=0) -> {_FOUR}"
    ),
    "_flash_attn_backward": (
        f"({_GRADIENTS}, {_REQUIRED}, bool deterministic, Tensor? rng_state=None) -> Tensor"
    ),
    "_flash_attn_varlen_backward": (
        f"({_GRADIENTS}, {_LENGTHS}, {_REQUIRED}, bool deterministic, Tensor? rng_state=None, "
        "bool zero_tensors=False) -> Tensor"
    ),
}


def register() -> None:
    """Unless flash-attn has done it."""
    for name, schema in _SCHEMAS.items():
        if not hasattr(torch.ops.flash_attn, name):
            mutates = ("dq", "dk", "dv") if name.endswith("backward") else ()
            operator = torch.library.custom_op(
                f"flash_attn::{name}", getattr(_private, name), mutates_args=mutates, schema=schema
            )
            operator.register_fake(_FAKES[name])


def _fake_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Any:
    batch, rows, heads, _ = q.shape
    dropout_p, *_, return_softmax = options
    sizes = (batch, rows, k.shape[1])
    return _forward_results(q, v, (batch, heads, rows), sizes, return_softmax and dropout_p > 0)


def _fake_varlen_forward(
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
    *others: Any,
) -> Any:
    sizes = (cu_seqlens_q.shape[0] - 1, max_seqlen_q, max_seqlen_k)
    lse = (q.shape[1], q.shape[0])
    return _forward_results(q, v, lse, sizes, return_softmax and dropout_p > 0)


def _forward_results(
    q: torch.Tensor, v: torch.Tensor, lse: tuple[Any, ...], sizes: tuple[Any, ...], mask: bool
) -> Any:
    batch, rows, columns = sizes
    shape = (batch, q.shape[-2], round_multiple(rows, 128), round_multiple(columns, 128))
    return (
        q.new_empty(*q.shape[:-1], v.shape[-1]),
        q.new_empty(lse, dtype=torch.float32),
        q.new_empty(shape if mask else (0,)),
        q.new_empty(2, dtype=torch.int64),
    )


def _fake_backward(dout: torch.Tensor, q: torch.Tensor, *others: Any) -> torch.Tensor:
    batch, rows, heads, _ = q.shape
    return q.new_empty(batch, heads, round_multiple(rows, 128), dtype=torch.float32)


def _fake_varlen_backward(dout: torch.Tensor, q: torch.Tensor, *others: Any) -> torch.Tensor:
    batch = others[7].shape[0] - 1  # of cu_seqlens_q
    return q.new_empty(q.shape[1], q.shape[0] + 128 * batch, dtype=torch.float32)


_FAKES: dict[str, Callable[..., Any]] = {
    "_flash_attn_forward": _fake_forward,
    "_flash_attn_varlen_forward": _fake_varlen_forward,
    "_flash_attn_backward": _fake_backward,
    "_flash_attn_varlen_backward": _fake_varlen_backward,
}
