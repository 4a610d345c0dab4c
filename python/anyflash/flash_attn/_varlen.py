"""Packed sequences as flash-attn takes them: with rows of q, k and v behind the last sequence.

anyflash refuses them on the CPU, where lengths can be read, so that they are cut off. On a GPU
nobody waits for the lengths, and within torch.compile nobody has them yet.
"""

from __future__ import annotations

import math
from typing import Any

import torch

import anyflash
from anyflash.torch import attention_varlen
from anyflash.torch._dispatch_state import is_traced

Tensor = torch.Tensor


def used_rows(x: Any, cu_seqlens: Any) -> Any:
    """x (total, ...) without the rows behind ``cu_seqlens[-1]``, where that can be read. What is
    not as it should be, attention says."""
    if not (
        isinstance(x, Tensor)
        and isinstance(cu_seqlens, Tensor)
        and x.device.type == cu_seqlens.device.type == "cpu"
        and x.dim() > 1
        and cu_seqlens.dim() == 1
        and cu_seqlens.shape[0] > 0
        and cu_seqlens.dtype == torch.int32
        and not is_traced(x)
    ):
        return x
    total = int(cu_seqlens[-1])
    return x[:total] if 0 <= total < x.shape[0] else x


def like_rows(out: Tensor, q: Tensor) -> Tensor:
    """(rows used, heads, head_dim) with as many rows as q: the others are 0."""
    missing = q.shape[0] - out.shape[0]
    return torch.nn.functional.pad(out, (0, 0, 0, 0, 0, missing)) if missing else out


def lse_like_rows(lse: Tensor, q: Tensor) -> Tensor:
    """(heads, rows used) with as many rows as q: the others see no key."""
    missing = q.shape[0] - lse.shape[1]
    return torch.nn.functional.pad(lse, (0, missing), value=-math.inf) if missing else lse


def attend_varlen(q: Tensor, k: Tensor, v: Tensor, *packing: Any, **options: Any) -> Any:
    """:func:`anyflash.torch.attention_varlen`; out is 0 in the rows that it does not take, and the
    LSE -inf."""
    cu_seqlens_q, cu_seqlens_k, *_ = packing
    rows, keys = used_rows(q, cu_seqlens_q), (used_rows(x, cu_seqlens_k) for x in (k, v))
    result: Any = attention_varlen(rows, *keys, *packing, **options)
    if rows is q:
        return result
    if isinstance(result, Tensor):
        return like_rows(result, q)
    if isinstance(result, tuple) and type(result) is tuple:
        return like_rows(result[0], q), lse_like_rows(result[1], q)
    return result._replace(out=like_rows(result.out, q), lse=lse_like_rows(result.lse, q))


def backward_varlen(
    tensors: tuple[Tensor, ...],
    packing: tuple[Any, ...],
    targets: tuple[Tensor | None, ...],
    dlse: Tensor | None = None,
    **options: Any,
) -> None:
    """:func:`anyflash.attention_varlen_backward` of dout, q, k, v, out and lse, into dq, dk and dv:
    0 in the rows that it does not take."""
    dout, q, k, v, out, lse = tensors
    cu_seqlens_q, cu_seqlens_k, *_ = packing
    ends = (cu_seqlens_q, cu_seqlens_k, cu_seqlens_k)
    rows, keys, values = map(used_rows, (q, k, v), ends)
    written = [
        _zeroed(x, cut.shape[0]) if cut is not whole and x is not None else x
        for x, whole, cut in zip(targets, (q, k, v), (rows, keys, values), strict=True)
    ]
    if rows is not q:
        dout, out = (used_rows(x, cu_seqlens_q) for x in (dout, out))
        lse = lse[:, : rows.shape[0]].contiguous()
        dlse = None if dlse is None else dlse[:, : rows.shape[0]].contiguous()
    function: Any = anyflash.attention_varlen_backward
    function(
        *(dout, rows, keys, values, out, lse, *packing),
        **dict(zip(("dq", "dk", "dv"), written, strict=True)),
        dlse=dlse,
        **options,
    )


def _zeroed(x: Tensor, used: int) -> Tensor:
    """The rows of a gradient that are used, with 0 in the others."""
    x[used:].zero_()
    return x[:used]
