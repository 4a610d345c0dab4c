"""Rows behind the last sequence, which flash-attn allows: 0 on the CPU, and so are gradients."""

from __future__ import annotations

import importlib
import math
from typing import Any

import pytest

import anyflash.flash_attn as fa
import anyflash.flash_attn_3 as fa3
from anyflash.flash_attn import flash_attn_interface as interface
from anyflash.flash_attn_3 import flash_attn_interface as interface_3

torch: Any = importlib.import_module("torch")

ROWS, KEYS, MORE = 5, 6, 2  # of all sequences, and behind them


def tensors(more: int) -> dict[str, Any]:
    """The first rows are the same whatever follows them."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q": (ROWS, 4, 16), "k": (KEYS, 2, 16), "v": (KEYS, 2, 16), "qkv": (ROWS, 3, 2, 16)}
    shapes["kv"] = (KEYS, 2, 2, 16)
    first = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    nan = {name: x.new_full((more, *x.shape[1:]), math.nan) for name, x in first.items()}
    return {name: torch.cat([x, nan[name]]).requires_grad_() for name, x in first.items()}


def ends(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int32)


PACKING = (ends(0, 2, ROWS), ends(0, 5, KEYS), 3, 5)
PAGES = {"block_table": ends(0, 1)[:, None]}
# The function, the names of its tensors, what else it is given; what its LSE is there.
CASES: dict[str, tuple[Any, tuple[str, ...], tuple[Any, ...], dict[str, Any], float]] = {
    "2": (fa.flash_attn_varlen_func, ("q", "k", "v"), PACKING, {"causal": True}, math.inf),
    "2-dropout": (fa.flash_attn_varlen_func, ("q", "k", "v"), (*PACKING, 0.2), {}, math.inf),
    "2-kv": (fa.flash_attn_varlen_kvpacked_func, ("q", "kv"), PACKING, {}, math.inf),
    "2-qkv": (fa.flash_attn_varlen_qkvpacked_func, ("qkv",), (PACKING[0], 3), {}, math.inf),
    "3": (fa3.flash_attn_varlen_func, ("q", "k", "v"), PACKING, {"causal": True}, -math.inf),
}


@pytest.mark.parametrize("name", CASES)
def test_varlen(name: str) -> None:
    function, names, packing, options, missing = CASES[name]

    def results(more: int) -> tuple[list[Any], list[Any]]:
        given = [x for key, x in tensors(more).items() if key in names]
        torch.manual_seed(0)
        out, lse, *_ = function(*given, *packing, **options, return_attn_probs=True)
        rows = given[0].shape[0]
        assert out.shape[0] == lse.shape[1] == rows
        torch.manual_seed(0)
        alone = function(*given, *packing, **options)
        assert torch.equal(alone[0] if isinstance(alone, tuple) else alone, out)
        loss = out.square().sum() + lse[:, :ROWS].sum()
        return [out, lse.transpose(0, 1)], list(torch.autograd.grad(loss, given))

    for kind, (found, right) in enumerate(zip(results(MORE), results(0), strict=True)):
        for i, (x, exact) in enumerate(zip(found, right, strict=True)):
            assert torch.equal(x[: exact.shape[0]], exact)
            further = missing if (kind, i) == (0, 1) else 0
            assert (x[exact.shape[0] :] == further).all()


def test_pages() -> None:
    """Keys lie in pages, which have no rows behind the last one."""
    q = tensors(MORE)["q"].detach()
    k, v = torch.randn(2, 2, 16, 2, 16)
    out, lse, _ = fa.flash_attn_varlen_func(q, k, v, *PACKING, **PAGES, return_attn_probs=True)
    right = fa.flash_attn_varlen_func(q[:ROWS], k, v, *PACKING, **PAGES)
    assert torch.equal(out[:ROWS], right)
    assert (out[ROWS:] == 0).all()
    assert torch.isposinf(lse[:, ROWS:]).all()


@pytest.mark.parametrize("version", [2, 3])
def test_private(version: int) -> None:
    def results(more: int) -> list[Any]:
        q, k, v, *_ = (x.detach() for x in tensors(more).values())
        written = [torch.full_like(x, 7.0) for x in (q, k, v)]
        if version == 2:
            numbers = (0.0, 0.25, True, -1, -1, 0.0, None)
            out, lse, *_ = interface._flash_attn_varlen_forward(q, k, v, *PACKING, *numbers)
            arguments = (*written, *PACKING, *numbers, False)
            interface._flash_attn_varlen_backward(out.cos(), q, k, v, out, lse, *arguments)
        else:
            names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
            packing = dict(zip(names, PACKING, strict=True))
            out, lse, *_ = interface_3._flash_attn_forward(q, k, v, **packing)
            targets = dict(zip(("dq", "dk", "dv"), written, strict=True))
            interface_3._flash_attn_backward(out.cos(), q, k, v, out, lse, **packing, **targets)
        return [out, *written]

    for x, exact in zip(results(MORE), results(0), strict=True):
        assert torch.equal(x[: exact.shape[0]], exact)
        assert (x[exact.shape[0] :] == 0).all()


@pytest.mark.parametrize("name", ["k", "v"])
def test_pages_that_lie_apart(name: str) -> None:
    """Of a number of rows that is no power of two, so that pages would have to be divided."""
    pages = {"k": torch.randn(2, 6, 2, 16), "v": torch.randn(2, 6, 2, 16)}
    apart = pages | {name: torch.randn(2, 7, 2, 16)[:, :6]}
    message = f"{name}\\w* has pages of 6 rows that do not follow one another in memory"
    q = tensors(0)["q"].detach()
    with pytest.raises(
        ValueError, match=r"^anyflash\.flash_attn\.flash_attn_varlen_func: " + message
    ):
        fa.flash_attn_varlen_func(q, apart["k"], apart["v"], *PACKING, **PAGES)
    table = PAGES["block_table"]
    q, apart = q[:2, None], tuple(apart.values())
    with pytest.raises(
        ValueError, match=r"^anyflash\.flash_attn\.flash_attn_with_k\w*: " + message
    ):
        fa.flash_attn_with_kvcache(q, *apart, cache_seqlens=2, block_table=table)
    with pytest.raises(
        ValueError, match=r"^anyflash\.flash_attn_3\.flash_attn_with_k\w*: " + message
    ):
        fa3.flash_attn_with_kvcache(q, *apart, cache_seqlens=2, page_table=table)


def test_too_few_rows() -> None:
    q, k, v, *_ = tensors(0).values()
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[2\] is 5; it must be the number of rows"):
        fa.flash_attn_varlen_func(q[:4], k, v, *PACKING)
