"""A library built from forward.cu, called with PyTorch tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

POINTERS = (
    "q", "k", "v", "out", "lse", "max_logits", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_k",
    "stream", "scratch",
)  # fmt: skip
STRIDES = ("q_stride", "k_stride", "v_stride", "out_stride", "lse_stride")
SIZES = ("total_q", "total_k", "window_left", "window_right")
NUMBERS = (
    "batch", "heads", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "float_out",
    "multiprocessors",
)  # fmt: skip


def fields(
    pointers: tuple[str, ...], strides: tuple[str, ...], numbers: tuple[str, ...]
) -> list[tuple[str, Any]]:
    """Those of a call's structure, in the order of call.h and backward_call.h."""
    return [
        *((name, ctypes.c_void_p) for name in pointers),
        *((name, ctypes.c_int64 * 3) for name in strides),
        *((name, ctypes.c_int64) for name in SIZES),
        ("softmax_scale", ctypes.c_double),
        *((name, ctypes.c_int32) for name in numbers),
    ]


class Call(ctypes.Structure):
    """Mirrors call.h's."""

    _fields_ = fields(POINTERS, STRIDES, NUMBERS)


@dataclass
class Problem:
    """Tensors are (batch, row, head, column), or packed (token, head, column)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    left: int = -1
    right: int = -1
    scale: float | None = None
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None
    max_q: int = 0
    max_k: int = 0
    used_k: torch.Tensor | None = None
    sinks: torch.Tensor | None = None

    @property
    def softmax_scale(self) -> float:
        return self.q.shape[-1] ** -0.5 if self.scale is None else self.scale


def strides_of(x: torch.Tensor) -> tuple[int, int, int]:
    """Those of batch, row and head."""
    strides = x.stride()[:-1]
    return strides if len(strides) == 3 else (0, *strides)


def fill(c: Any, p: Problem, tensors: dict[str, torch.Tensor | None]) -> None:
    """Writes what the calls of both directions have: pointers, strides, sizes and the stream.

    The structure says which tensors have strides; `lse` is (batch, head, row) or (head, token).
    """
    packed = p.cu_q is not None
    for name, tensor in tensors.items():
        setattr(c, name, None if tensor is None else tensor.data_ptr())
        if tensor is None or not hasattr(c, f"{name}_stride"):
            continue
        # The LSE's strides are those of (batch, row, head), too, and it has no columns.
        by_row = tensor.transpose(-1, -2)[..., None] if name == "lse" else tensor
        setattr(c, f"{name}_stride", (ctypes.c_int64 * 3)(*strides_of(by_row)))
    c.stream = torch.cuda.current_stream().cuda_stream
    c.total_q, c.total_k = (p.q.shape[0], p.k.shape[0]) if packed else (0, 0)
    c.window_left, c.window_right = p.left, p.right
    c.softmax_scale = p.softmax_scale
    c.batch = p.cu_q.numel() - 1 if packed else p.q.shape[0]
    c.heads, c.heads_k = p.q.shape[-2], p.k.shape[-2]
    c.seqlen_q = p.max_q if packed else p.q.shape[1]
    c.seqlen_k = p.max_k if packed else p.k.shape[1]
    c.head_dim = p.q.shape[-1]


def launcher(function: Any, c: Any, *keep: Any) -> Any:
    """Returns a function that launches, and keeps what the call points to."""

    def launch() -> None:
        if function(ctypes.byref(c)) != 0:
            raise RuntimeError("the launch failed")

    launch.keep = keep  # type: ignore[attr-defined]
    return launch


class Library:
    def __init__(self, path: str) -> None:
        self._forward = ctypes.CDLL(path).hopper_forward

    def call(
        self,
        p: Problem,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
        max_logits: torch.Tensor | None = None,
        ctas: int = 0,
    ) -> Any:
        """Returns a function that launches; `lse` is (batch, head, row) or (head, token).

        There are at most `ctas` CTAs, 0: as many as multiprocessors.
        """
        c = Call()
        tensors = {
            "q": p.q, "k": p.k, "v": p.v, "out": out, "lse": lse, "max_logits": max_logits,
            "sinks": p.sinks, "cu_seqlens_q": p.cu_q, "cu_seqlens_k": p.cu_k,
            "seqused_k": p.used_k,
        }  # fmt: skip
        fill(c, p, tensors)
        c.head_dim_v = p.v.shape[-1]
        c.float_out = out.dtype == torch.float32
        c.multiprocessors = ctas or torch.cuda.get_device_properties(0).multi_processor_count
        scratch = torch.empty(1, dtype=torch.int32, device=p.q.device)
        c.scratch = scratch.data_ptr()
        return launcher(self._forward, c, p, out, lse, max_logits, scratch)


def output_like(p: Problem, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Of NaN: what is not written shows."""
    shape = (*p.q.shape[:-1], p.v.shape[-1])
    return torch.full(shape, float("nan"), dtype=dtype or p.q.dtype, device=p.q.device)


def sequences(p: Problem) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]]:
    """(q, k, v, place) of each sequence, without what is not used; place indexes the output."""
    result = []
    used = None if p.used_k is None else p.used_k.tolist()
    if p.cu_q is not None and p.cu_k is not None:
        cu_q, cu_k = p.cu_q.tolist(), p.cu_k.tolist()
        for b in range(len(cu_q) - 1):
            rows = slice(cu_q[b], cu_q[b + 1])
            end = cu_k[b + 1] if used is None else cu_k[b] + used[b]
            keys = slice(cu_k[b], end)
            result.append((p.q[rows], p.k[keys], p.v[keys], (rows,)))
        return result
    for b in range(p.q.shape[0]):
        end = p.k.shape[1] if used is None else used[b]
        result.append((p.q[b], p.k[b, :end], p.v[b, :end], (b,)))
    return result


def visible(sq: int, sk: int, left: int, right: int, device: torch.device) -> torch.Tensor:
    """(row, key)"""
    at = torch.arange(sq, device=device)[:, None] + sk - sq
    key = torch.arange(sk, device=device)[None, :]
    seen = torch.ones(sq, sk, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= key >= at - left
    if right >= 0:
        seen &= key <= at + right
    return seen


def reference(p: Problem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output and LSE in float64, and max_logits; NaN of K and V reaches the rows that see it."""
    out = torch.full((*p.q.shape[:-1], p.v.shape[-1]), float("nan"), dtype=torch.float64,
                     device=p.q.device)  # fmt: skip
    lse = torch.full(p.q.shape[:-1], float("nan"), dtype=torch.float64, device=p.q.device)
    maxima = []
    for q, keys, values, place in sequences(p):
        group = q.shape[1] // keys.shape[1]
        seen = visible(q.shape[0], keys.shape[0], p.left, p.right, q.device)
        k = keys.double().repeat_interleave(group, 1)
        v = values.double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q.double(), k) * p.softmax_scale
        scores = scores.masked_fill(~seen, float("-inf"))
        sinks = torch.full((q.shape[1],), float("-inf"), dtype=torch.float64, device=q.device)
        if p.sinks is not None:
            sinks = p.sinks.double()
        all_scores = torch.cat([scores, sinks[:, None, None].expand(-1, q.shape[0], 1)], 2)
        row_lse = torch.logsumexp(all_scores, 2)
        weights = torch.exp(scores - row_lse.masked_fill(row_lse == float("-inf"), 0)[:, :, None])
        finite = torch.isfinite(v)
        clean = torch.where(finite, v, 0.0)
        result = torch.einsum("hqk,khd->qhd", weights, clean)
        hidden = (~finite).double()
        touched = torch.einsum("qk,khd->qhd", seen.double(), hidden) > 0
        out[place] = result.masked_fill(touched, float("nan"))
        lse[place] = row_lse.T
        maxima.append(scores.flatten(1).amax(1) if scores[0].numel() else sinks * 0 - float("inf"))
    return out, lse, torch.stack(maxima)
