"""Attention in plain PyTorch, dense and packed, and packed tensors to call it with."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

Hidden = Callable[[Any, Any], Any]  # (how far the key is behind the query, number of the key)


def randn(torch: ModuleType, *shape: int, seed: int = 0) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def math(  # noqa: PLR0917
    torch: ModuleType,
    q: Any,
    k: Any,
    v: Any,
    scale: float | None = None,
    hidden: Hidden | None = None,
    slopes: Any = None,
    factor: Any = 1.0,
) -> tuple[Any, Any]:
    """(out, LSE) of (batch, seqlen, heads, head_dim); `factor` multiplies the weights."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or q.shape[-1] ** -0.5)
    key = torch.arange(k.shape[1])
    behind = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1] - key
    if slopes is not None:
        scores = scores - slopes[:, None, None] * behind.abs()
    if hidden is not None:
        scores = scores.masked_fill(hidden(behind, key), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.clamp(min=-1e30)[..., None]) * factor
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def packed_math(
    torch: ModuleType, q: Any, k: Any, v: Any, ends: tuple[list[int], list[int]], **options: Any
) -> tuple[Any, Any]:
    """The same, sequence by sequence."""
    outs, lses = [], []
    for i in range(len(ends[0]) - 1):
        rows, keys = (slice(x[i], x[i + 1]) for x in ends)
        out, lse = math(torch, q[None, rows], k[None, keys], v[None, keys], **options)
        outs.append(out[0])
        lses.append(lse[0])
    return torch.cat(outs), torch.cat(lses, 1)


def close(torch: ModuleType, actual: Any, right: Any) -> None:
    torch.testing.assert_close(actual, right, rtol=1e-4, atol=2e-5)


def gradients(torch: ModuleType, out: Any, tensors: Any, dout: Any) -> Any:
    return torch.autograd.grad(out, tensors, dout)


def causal(behind: Any, key: Any) -> Any:
    return behind < 0


def window(left: int, right: int) -> Hidden:
    return lambda behind, key: (behind > left) | (behind < -right)


ENDS = ([0, 4, 4, 9, 10], [0, 6, 9, 16, 20])


def packed(torch: ModuleType) -> tuple[Any, ...]:
    q, k, v = (
        randn(torch, n, h, 8, seed=n).requires_grad_() for n, h in ((10, 4), (20, 2), (20, 2))
    )
    ends = [torch.tensor(x, dtype=torch.int32) for x in ENDS]
    return q, k, v, *ends, 5, 7


USED = [6, 1, 5, 3]


def used_math(torch: ModuleType, q: Any, k: Any, v: Any, hidden: Any) -> tuple[Any, Any]:
    """As if the keys that are not used were not there."""
    keys = torch.cat([torch.arange(i, i + n) for i, n in zip(ENDS[1], USED, strict=False)])
    ends = [0, *torch.tensor(USED).cumsum(0).tolist()]
    return packed_math(torch, q, k[keys], v[keys], (ENDS[0], ends), hidden=hidden)


def in_pages(torch: ModuleType, x: Any) -> tuple[Any, Any]:
    """Packed keys in pages of 4 rows, which lie in any order; and the table of pages."""
    pages = torch.full((9, 4, *x.shape[1:]), torch.nan)
    table = torch.tensor([[7, 2], [0, 8], [3, 1], [5, 4]], dtype=torch.int32)
    for i, (begin, end) in enumerate(zip(ENDS[1], ENDS[1][1:], strict=False)):
        for row in range(end - begin):
            pages[table[i, row // 4], row % 4] = x[begin + row]
    return pages, table
