"""Attention as flash-attn defines it, in plain PyTorch of any precision, and calls of each of its
functions with the same q, k and v."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

import anyflash.flash_attn as fa

torch: Any = importlib.import_module("torch")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The reference's many small products take ten times as long with two on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Case:
    """seqlens: of each sequence, queries and keys; the dense functions take one pair only."""

    seqlens: tuple[tuple[int, int], ...] = ((113, 203), (113, 203))
    head_dim: int = 32
    heads: int = 6
    heads_k: int = 6
    dropout_p: float = 0.0
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi: str = ""  # or "(h)" or "(b, h)"
    scale: float | None = None
    deterministic: bool = False
    dtype: str = "float32"

    def number(self) -> Any:
        return getattr(torch, self.dtype)

    def options(self) -> dict[str, Any]:
        """Arguments of every function."""
        return {
            "dropout_p": self.dropout_p,
            "softmax_scale": self.scale,
            "causal": self.causal,
            "window_size": self.window,
            "softcap": self.softcap,
            "alibi_slopes": self.slopes(),
            "deterministic": self.deterministic,
        }

    def slopes(self) -> Any:
        if not self.alibi:
            return None
        shape = (self.heads,) if self.alibi == "(h)" else (len(self.seqlens), self.heads)
        return torch.rand(shape, generator=torch.Generator().manual_seed(5)) * 0.3

    def tensors(self) -> list[list[Any]]:
        """q, k, v and dout of each sequence, (seqlen, heads, head_dim)."""
        generator = torch.Generator().manual_seed(0)

        def draw(rows: int, heads: int) -> Any:
            shape = (rows, heads, self.head_dim)
            return torch.randn(shape, generator=generator).to(self.number())

        return [
            [
                draw(rows, self.heads),
                draw(keys, self.heads_k),
                draw(keys, self.heads_k),
                draw(rows, self.heads),
            ]
            for rows, keys in self.seqlens
        ]


@dataclass
class Result:
    """Per sequence: out (rows, heads, d), lse (heads, rows), dq, dk, dv; and what dropout kept
    (heads, rows, keys), with the probabilities that S_dmask told."""

    out: list[Any]
    lse: list[Any] = field(default_factory=list)
    grads: list[list[Any]] = field(default_factory=list)
    mask: Any = None  # S_dmask


def scores_of(case: Case, index: int, q: Any, k: Any) -> Any:
    """(heads, rows, keys), -inf where a key is hidden, in q's precision."""
    keys = k.repeat_interleave(case.heads // case.heads_k, 1)
    s = torch.einsum("ihd,jhd->hij", q, keys)
    s = s * (case.head_dim**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        s = case.softcap * torch.tanh(s / case.softcap)
    i, j = torch.arange(q.shape[0])[:, None], torch.arange(k.shape[0])
    distance = i + k.shape[0] - q.shape[0] - j
    slopes = case.slopes()
    if slopes is not None:
        slopes = slopes.expand(len(case.seqlens), -1)[index].to(s.dtype)
        s = s - slopes[:, None, None] * distance.abs()
    left, right = (math.inf if bound < 0 else bound for bound in case.window)
    right = 0 if case.causal else right
    return s.masked_fill((distance > left) | (-distance > right), -math.inf)


def reference(case: Case, dtype: Any, kept: list[Any] | None = None) -> Result:
    """Every step is rounded to dtype."""
    result = Result([])
    for index, (*inputs, dout) in enumerate(case.tensors()):
        q, k, v = leaves = [x.to(dtype).requires_grad_() for x in inputs]
        s = scores_of(case, index, q, k)
        hidden = (s == -math.inf).all(-1)
        p = torch.softmax(s.masked_fill(hidden[..., None], 0), -1)
        p = p.masked_fill(hidden[..., None], 0)
        if kept is not None:
            p = p * kept[index].to(dtype) / (1 - round(case.dropout_p * 2**16) / 2**16)
        out = torch.einsum("hij,jhd->ihd", p, v.repeat_interleave(case.heads // case.heads_k, 1))
        result.out.append(out.detach())
        lse = torch.logsumexp(s.detach(), -1)
        result.lse.append(lse.masked_fill(hidden, math.inf))
        result.grads.append(list(torch.autograd.grad(out, leaves, dout.to(dtype))))
    return result


def cumulative(lengths: list[int]) -> Any:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def run(name: str, case: Case, device: str = "cpu") -> Result:
    """The function of fa that has this name."""
    tensors = [[x.to(device) for x in one] for one in case.tensors()]
    rows, keys = zip(*case.seqlens, strict=True)
    varlen = "varlen" in name
    join = torch.cat if varlen else torch.stack
    q, k, v, dout = (join(column) for column in zip(*tensors, strict=True))
    if "qkvpacked" in name:
        given = [torch.stack([q, k, v], -3)]
    elif "kvpacked" in name:
        given = [q, torch.stack([k, v], -3)]
    else:
        given = [q, k, v]
    given = [x.requires_grad_() for x in given]
    packing: list[Any] = []
    if varlen:
        packing = [cumulative(x).to(device) for x in (rows, keys)] + [max(rows), max(keys)]
        packing = packing[::2] if "qkvpacked" in name else packing
    options = case.options()
    if case.alibi:
        options["alibi_slopes"] = options["alibi_slopes"].to(device)
    out, lse, mask = getattr(fa, name)(*given, *packing, **options, return_attn_probs=True)
    grads = torch.autograd.grad(out, given, dout)
    for x, gradient in zip(given, grads, strict=True):
        assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)
        assert gradient.is_contiguous()
    parts = [y for x in grads for y in (x.unbind(-3) if x.ndim > q.ndim else [x])]
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert lse.dtype == torch.float32
    assert lse.shape == ((case.heads, len(q)) if varlen else (len(q), case.heads, rows[0]))

    def split(x: Any, lengths: Any, axis: int = 0) -> list[Any]:
        x = x.detach().cpu()
        return list(x.split(lengths, axis) if varlen else x)

    columns = [split(x, n) for x, n in zip(parts, (rows, keys, keys), strict=True)]
    return Result(
        split(out, rows),
        split(lse, rows, 1),
        [list(column) for column in zip(*columns, strict=True)],
        mask.cpu(),
    )


def kept_of(case: Case, mask: Any) -> list[Any]:
    """What dropout kept, of S_dmask."""
    return [mask[b, :, :rows, :keys] >= 0 for b, (rows, keys) in enumerate(case.seqlens)]


def close(what: str, factor: float, actual: list[Any], truth: list[Any], naive: list[Any]) -> None:
    """Of all sequences: at most ``factor`` times as far from the truth as the naive program, and
    two roundings."""
    assert [x.shape for x in actual] == [x.shape for x in truth], what
    dtype = naive[0].dtype
    got, true, plain = (
        torch.cat([x.double().flatten() for x in y]) for y in (actual, truth, naive)
    )
    finite = true.isfinite()
    assert torch.equal(got[~finite], true[~finite]), what
    error = (got - true)[finite].abs()
    if not error.numel():
        return
    rounded = true[finite].to(dtype)
    rounding = ((rounded + 0.3 - 0.3).double() - rounded.double()).abs().max()
    allowed = factor * (plain - true)[finite].abs().max() + 2 * rounding
    assert error.max() <= allowed, f"{what}: error {error.max():.3g}, allowed {allowed:.3g}"


def randn(*shape: int, seed: int = 0, dtype: Any = None) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def integers(values: list[Any]) -> Any:
    return torch.tensor(values, dtype=torch.int32)


def paged(dense: Any, table: Any, pages: int, size: int) -> Any:
    """A pool of pages that holds dense (batch, capacity, ...); the others are NaN."""
    pool = torch.full((pages, size, *dense.shape[2:]), torch.nan, dtype=dense.dtype)
    for row, blocks in zip(dense, table, strict=True):
        for at, page in enumerate(blocks):
            part = row[at * size : (at + 1) * size]
            pool[page, : len(part)] = part
    return pool
