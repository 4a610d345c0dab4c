"""What ``torch.utils.flop_counter`` counts for the operators: as for PyTorch's attention, two
operations for each multiplication and addition, and none less for what a mask hides."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from anyflash.torch._dispatch_state import PLAIN
from anyflash.torch._problem import SIZE, Problem


def register() -> None:
    """Once the operators exist."""
    register_flop_formula(torch.ops.anyflash.forward, get_raw=True)(_forward)
    register_flop_formula(torch.ops.anyflash.backward, get_raw=True)(_backward)


def _forward(*arguments: Any, **_: Any) -> int:
    """S = Q K^T and P V."""
    return _count(arguments, of_qk=1, of_v=1)


def _backward(*arguments: Any, **_: Any) -> int:
    """S, dQ and dK; dP = dO V^T and dV."""
    return _count(arguments, of_qk=3, of_v=2)


def _count(arguments: tuple[Any, ...], of_qk: int, of_v: int) -> int:
    """``of_qk`` products with scores sum over, or give, head_dim columns; ``of_v`` head_dim_v."""
    p = Problem(*arguments[:SIZE])
    columns = of_qk * p.q.shape[-1] + of_v * p.v.shape[-1]
    return 2 * p.q.shape[-2] * columns * sum(rows * keys for rows, keys in _lengths(p))


def _lengths(p: Problem) -> Iterable[tuple[int, int]]:
    """Rows and keys of each sequence; of packed ones without numbers the largest allowed."""
    if p.cu_seqlens_q is None or p.cu_seqlens_k is None:
        return [(p.q.shape[1], p.k.shape[1])] * p.q.shape[0]
    both = (p.cu_seqlens_q, p.cu_seqlens_k)
    if all(type(x) in PLAIN and not x.is_meta for x in both):
        return zip(*(x.diff().tolist() for x in both), strict=True)
    return [(p.max_seqlen_q, p.max_seqlen_k)] * (p.cu_seqlens_q.shape[0] - 1)
