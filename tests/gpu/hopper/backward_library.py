"""A library built from backward.cu, called with PyTorch tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from library import Problem, fields, fill, launcher, sequences, visible

POINTERS = (
    "q", "k", "v", "out", "lse", "dout", "dq", "dk", "dv", "cu_seqlens_q", "cu_seqlens_k",
    "seqused_k", "stream", "scratch",
)  # fmt: skip
STRIDES = ("q_stride", "k_stride", "v_stride", "lse_stride")
NUMBERS = (
    "batch", "heads", "heads_k", "seqlen_q", "seqlen_k", "head_dim", "float_grad", "deterministic",
    "multiprocessors",
)  # fmt: skip


class BackwardCall(ctypes.Structure):
    """Mirrors backward_call.h's."""

    _fields_ = fields(POINTERS, STRIDES, NUMBERS)


@dataclass
class Gradients:
    """Of q, k and v, in their layout; with dout and the forward's results."""

    out: torch.Tensor
    lse: torch.Tensor
    dout: torch.Tensor
    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


class BackwardLibrary:
    def __init__(self, path: str) -> None:
        library = ctypes.CDLL(path)
        self._run, self._scratch = library.hopper_backward, library.hopper_backward_scratch
        self._scratch.restype = ctypes.c_int64

    def call(self, p: Problem, g: Gradients, deterministic: bool = False) -> Any:
        """Returns a function that launches; lse is (batch, head, row) or (head, token)."""
        c = BackwardCall()
        tensors = {
            "q": p.q, "k": p.k, "v": p.v, "out": g.out, "lse": g.lse, "dout": g.dout,
            "dq": g.dq, "dk": g.dk, "dv": g.dv, "cu_seqlens_q": p.cu_q, "cu_seqlens_k": p.cu_k,
            "seqused_k": p.used_k,
        }  # fmt: skip
        fill(c, p, tensors)
        c.float_grad = g.dq.dtype == torch.float32
        c.deterministic = deterministic
        c.multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
        scratch = torch.empty(self._scratch(ctypes.byref(c)), dtype=torch.uint8, device="cuda")
        c.scratch = scratch.data_ptr()
        return launcher(self._run, c, p, g, scratch)


def gradients_like(p: Problem, dout: torch.Tensor, dtype: torch.dtype | None = None) -> Gradients:
    """The forward's results in float64, rounded; gradients of NaN: what is not written shows."""
    out, lse = torch.zeros_like(p.q), torch.full(p.q.shape[:-1], -float("inf"), device="cuda")
    for q, k, v, place in sequences(p):
        scores, _ = _scores(p, q, k)
        row_lse = torch.logsumexp(scores, 2)
        weights = torch.exp(scores - row_lse.masked_fill(row_lse == -float("inf"), 0)[:, :, None])
        group = q.shape[1] // k.shape[1]
        values = v.double().repeat_interleave(group, 1)
        weights = torch.where(scores == -float("inf"), 0.0, weights)
        out[place] = torch.einsum("hqk,khd->qhd", weights, values).to(out.dtype)
        lse[place] = row_lse.T.float()
    lse = lse.transpose(-1, -2).contiguous()

    def empty(x: torch.Tensor) -> torch.Tensor:
        return torch.full_like(x, float("nan"), dtype=dtype or x.dtype)

    return Gradients(out, lse, dout, empty(p.q), empty(p.k), empty(p.v))


def _scores(p: Problem, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    keys = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * p.softmax_scale
    seen = visible(q.shape[0], k.shape[0], p.left, p.right, q.device)
    return scores.masked_fill(~seen, float("-inf")), seen


def reference_gradients(
    p: Problem, g: Gradients
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv in float64, from the out and LSE that the kernels are given.

    NaN and infinity of Q, K and dO count by way of LSE and delta: they reach what sees them.
    """
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float64) for x in (p.q, p.k, p.v))
    lse = g.lse.transpose(-1, -2).double()
    used = None if p.used_k is None else p.used_k.tolist()
    for i, (q, k, v, place) in enumerate(sequences(p)):
        keys = place if p.cu_k is None else (slice(int(p.cu_k[i]), int(p.cu_k[i]) + k.shape[0]),)
        if used is not None and p.cu_k is None:
            keys = (i, slice(0, used[i]))
        group = q.shape[1] // k.shape[1]
        scores, seen = _scores(p, q, k)
        row_lse = lse[place].T
        weights = torch.exp(scores - row_lse.masked_fill(row_lse == -float("inf"), 0)[:, :, None])
        weights = torch.where(seen, weights, 0.0)
        dout, out = g.dout[place].double(), g.out[place].double()
        delta = (dout * out).sum(-1).T
        k_all, v_all = (x.double().repeat_interleave(group, 1) for x in (k, v))
        dp = torch.einsum("qhd,khd->hqk", dout, v_all) - delta[:, :, None]
        ds = torch.where(seen, weights * dp, 0.0)
        bad = (~dout.isfinite()).double()
        k_all, rows, dout = (torch.where(x.isfinite(), x, 0.0) for x in (k_all, q.double(), dout))
        dq[place] = torch.einsum("hqk,khd->qhd", ds, k_all) * p.softmax_scale
        shape = (k.shape[0], k.shape[1], group, p.q.shape[-1])
        dk[keys] = torch.einsum("hqk,qhd->khd", ds, rows).reshape(shape).sum(2)
        dk[keys] *= p.softmax_scale
        lost = torch.einsum("hqk,qhd->khd", seen.expand_as(weights).double(), bad).reshape(shape)
        dv[keys] = torch.einsum("hqk,qhd->khd", weights, dout).reshape(shape).sum(2)
        dv[keys] = torch.where(lost.sum(2) > 0, float("nan"), dv[keys])
    return dq, dk, dv
