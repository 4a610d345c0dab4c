"""PyTorch's operators of flash attention as anyflash.torch computes them, called directly: the
functions are the same on every device."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

import anyflash.torch
from calls.torch_math import (
    ENDS,
    USED,
    causal,
    close,
    gradients,
    in_pages,
    math,
    packed,
    packed_math,
    randn,
    used_math,
    window,
)

aten = importlib.import_module("anyflash.torch._aten")

# Dense ----------------------------------------------------------------------------------------


# shape of q, shape of k; options of the operator, and of `math`
DENSE: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "plain": ((2, 9, 3, 8), (2, 9, 3, 8), {}, {}),
    "gqa-scale": ((2, 5, 6, 8), (2, 9, 2, 8), {"scale": 0.3}, {"scale": 0.3}),
    "causal": ((2, 5, 3, 8), (2, 9, 3, 8), {"is_causal": True}, {"hidden": causal}),
    "window": (
        (2, 9, 3, 8),
        (2, 9, 3, 8),
        {"window_size_left": 3, "window_size_right": 1},
        {"hidden": window(3, 1)},
    ),
    "one-bound": (
        (2, 9, 3, 8),
        (2, 9, 3, 8),
        {"window_size_left": -1, "window_size_right": 2},
        {"hidden": lambda behind, key: behind < -2},
    ),
    "causal-window": (
        (2, 9, 4, 8),
        (2, 9, 2, 8),
        {"is_causal": True, "window_size_left": 3},
        {"hidden": window(3, 0)},
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_dense(torch: ModuleType, name: str) -> None:
    """aten::_flash_attention_forward and its backward."""
    shape_q, shape_k, given, options = DENSE[name]
    q, k, v = (
        randn(torch, *s, seed=i).requires_grad_() for i, s in enumerate((shape_q, shape_k, shape_k))
    )
    given = dict(given)
    maxima, is_causal = (shape_q[1], shape_k[1]), given.pop("is_causal", False)
    with torch.no_grad():
        out, lse, state, unused, mask = aten.flash_attention_forward(
            *(q, k, v, None, None, *maxima, 0.0, is_causal, False), **given
        )
    right, right_lse = math(torch, q, k, v, **options)
    close(torch, out, right)
    close(torch, lse, right_lse)
    assert mask.numel() == 0
    dout = randn(torch, *out.shape, seed=9)
    found = aten.flash_attention_backward(
        *(dout, q, k, v, out, lse, None, None, *maxima, 0.0, is_causal, state, unused), **given
    )
    for x, wanted in zip(found, gradients(torch, right, (q, k, v), dout), strict=True):
        close(torch, x, wanted)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_scaled_dot_product(torch: ModuleType, is_causal: bool, scale: float | None) -> None:
    """aten::_scaled_dot_product_flash_attention has heads before the sequence."""
    q = randn(torch, 2, 4, 7, 8).requires_grad_()
    k, v = (randn(torch, 2, 2, 7, 8, seed=i).requires_grad_() for i in (1, 2))
    with torch.no_grad():
        out, lse, cum_q, cum_k, max_q, max_k, state, unused, _ = (
            aten.scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
        )
    swapped = [x.transpose(1, 2) for x in (q, k, v)]
    right, right_lse = math(torch, *swapped, scale=scale, hidden=causal if is_causal else None)
    right = right.transpose(1, 2)
    close(torch, out, right)
    close(torch, lse, right_lse)
    assert (cum_q, cum_k, max_q, max_k) == (None, None, 7, 7)
    dout = randn(torch, 2, 4, 7, 1).expand(2, 4, 7, 8)
    found = aten.scaled_dot_product_flash_attention_backward(
        *(dout, q, k, v, out, lse, None, None, 7, 7, 0.0, is_causal, state, unused), scale=scale
    )
    for x, wanted in zip(found, gradients(torch, right, (q, k, v), dout), strict=True):
        close(torch, x, wanted)


def test_dropout(torch: ModuleType) -> None:
    """The random state that the forward returns gives the same mask to the backward."""
    q, k, v = (randn(torch, 2, 9, 3, 8, seed=i).requires_grad_() for i in range(3))
    torch.manual_seed(4)
    with torch.no_grad():
        out, lse, state, unused, _ = aten.flash_attention_forward(
            q, k, v, None, None, 9, 9, 0.25, False, False
        )
    torch.manual_seed(4)
    assert (state.dtype, state.shape) == (torch.uint64, (2,))
    assert torch.equal(torch.randint(2**63 - 1, (2,)), state.view(torch.int64))
    words = state.view(torch.int64)
    kept = anyflash.torch.attention(
        *(q.detach(), k.detach(), v.detach()),
        dropout_p=0.25,
        rng_state=words,
        return_dropout_mask=True,
    ).dropout_mask
    assert 0 < kept.double().mean() < 1
    right, right_lse = math(torch, q, k, v, factor=kept / 0.75)
    close(torch, out, right)
    close(torch, lse, right_lse)
    dout = randn(torch, *out.shape, seed=9)
    found = aten.flash_attention_backward(
        dout, q, k, v, out, lse, None, None, 9, 9, 0.25, False, state, unused
    )
    for x, wanted in zip(found, gradients(torch, right, (q, k, v), dout), strict=True):
        close(torch, x, wanted)


def test_negated_gradient(torch: ModuleType) -> None:
    """PyTorch negates some tensors without touching their memory."""
    q = randn(torch, 1, 2, 5, 8)
    out, lse, *_, state, unused, _ = aten.scaled_dot_product_flash_attention(q, q, q)
    dout = torch._neg_view(randn(torch, 1, 2, 5, 8, seed=1))
    rest = (q, q, q, out, lse, None, None, 5, 5, 0.0, False, state, unused)
    found, right = (
        aten.scaled_dot_product_flash_attention_backward(x, *rest) for x in (dout, dout.clone())
    )
    for x, wanted in zip(found, right, strict=True):
        assert torch.equal(x, wanted)


# Packed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("is_causal", "bounds", "hidden"),
    [(False, (None, None), None), (True, (-1, 0), causal), (False, (3, 0), window(3, 0))],
)
def test_packed(torch: ModuleType, is_causal: bool, bounds: Any, hidden: Any) -> None:
    q, k, v, *rest = packed(torch)
    given = {"window_size_left": bounds[0], "window_size_right": bounds[1]}
    with torch.no_grad():
        out, lse, state, unused, _ = aten.flash_attention_forward(
            q, k, v, *rest, 0.0, is_causal, False, **given
        )
    right, right_lse = packed_math(torch, q, k, v, ENDS, hidden=hidden)
    close(torch, out, right)
    close(torch, lse, right_lse)
    dout = randn(torch, *out.shape, seed=9)
    found = aten.flash_attention_backward(
        dout, q, k, v, out, lse, *rest, 0.0, is_causal, state, unused, **given
    )
    for x, wanted in zip(found, gradients(torch, right, (q, k, v), dout), strict=True):
        close(torch, x, wanted)


def test_alibi(torch: ModuleType) -> None:
    q, k, v, *rest = packed(torch)
    slopes = torch.tensor([0.5, 0.25, 0.1, 0.0])
    with torch.no_grad():
        out, lse, *_ = aten.flash_attention_forward(
            q, k, v, *rest, 0.0, False, False, alibi_slopes=slopes
        )
    right, right_lse = packed_math(torch, q, k, v, ENDS, slopes=slopes)
    close(torch, out, right)
    close(torch, lse, right_lse)


@pytest.mark.parametrize("is_causal", [False, True])
def test_used_keys(torch: ModuleType, is_causal: bool) -> None:
    q, k, v, *rest = packed(torch)
    with torch.no_grad():
        out, lse, *_ = aten.flash_attention_forward(
            *(q, k, v, *rest, 0.0, is_causal, False),
            seqused_k=torch.tensor(USED, dtype=torch.int32),
        )
    right, right_lse = used_math(torch, q, k, v, causal if is_causal else None)
    close(torch, out, right)
    close(torch, lse, right_lse)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("num_splits", [None, 1, 2])
@pytest.mark.parametrize("by_used", [False, True])
def test_pages(torch: ModuleType, is_causal: bool, num_splits: int | None, by_used: bool) -> None:
    q, k, v, cum_q, cum_k, *maxima = packed(torch)
    with torch.no_grad():
        k_pages, table = in_pages(torch, k)
        v_pages, _ = in_pages(torch, v)
        used = torch.tensor(USED, dtype=torch.int32) if by_used else None
        out, lse, *_ = aten.flash_attention_forward(
            *(q, k_pages, v_pages, cum_q, None if by_used else cum_k, *maxima),
            *(0.0, is_causal, False),
            seqused_k=used,
            block_table=table,
            num_splits=num_splits,
        )
    hidden = causal if is_causal else None
    right, right_lse = (
        used_math(torch, q, k, v, hidden) if by_used
        else packed_math(torch, q, k, v, ENDS, hidden=hidden)
    )  # fmt: skip
    close(torch, out, right)
    close(torch, lse, right_lse)


def test_dense_queries_and_pages(torch: ModuleType) -> None:
    q = randn(torch, 4, 2, 4, 8)
    _, k, v, *_ = packed(torch)
    with torch.no_grad():
        (k_pages, table), (v_pages, _) = in_pages(torch, k), in_pages(torch, v)
        out, lse, *_ = aten.flash_attention_forward(
            *(q, k_pages, v_pages, None, None, 2, 8, 0.0, True, False),
            seqused_k=torch.tensor(USED, dtype=torch.int32),
            block_table=table,
        )
    for i, used in enumerate(USED):
        keys = slice(ENDS[1][i], ENDS[1][i] + used)
        right, right_lse = math(torch, q[i : i + 1], k[None, keys], v[None, keys], hidden=causal)
        close(torch, out[i : i + 1], right)
        close(torch, lse[i : i + 1], right_lse)


@pytest.mark.parametrize("paged", [False, True])
def test_given_output(torch: ModuleType, paged: bool) -> None:
    q, k, v, *rest = (x.detach() if hasattr(x, "detach") else x for x in packed(torch))
    right, right_lse = packed_math(torch, q, k, v, ENDS)
    out, options = torch.full_like(q, torch.nan), {}
    if paged:
        (k, options["block_table"]), (v, _) = in_pages(torch, k), in_pages(torch, v)
    lse = aten.flash_attention_forward_no_dropout_inplace(
        *(out, q, k, v, *rest, 0.0, False, False), **options
    )
    close(torch, out, right)
    close(torch, lse, right_lse)


# What is refused ------------------------------------------------------------------------------


def test_refused(torch: ModuleType) -> None:
    q, k, v, cum_q, cum_k, *maxima = packed(torch)
    tensors, cum = (q.detach(), k.detach(), v.detach()), (cum_q, cum_k)
    forward = aten.flash_attention_forward

    def refuses(what: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        with pytest.raises(NotImplementedError, match=what):
            function(*arguments, **options)

    refuses(
        r"^aten::_flash_attention_forward \(anyflash\): return_debug_mask is True; only False",
        *(forward, *tensors, *cum, *maxima, 0.0, False, True),
    )
    refuses(
        "return_debug_mask",
        aten.scaled_dot_product_flash_attention,
        *[q[None]] * 3,
        0.0,
        True,
        True,
    )
    refuses("cum_seq_k is None", forward, *tensors, cum_q, None, *maxima, 0.0, False, False)
    refuses("cum_seq_q is None", forward, *tensors, None, cum_k, *maxima, 0.0, False, False)
    table = torch.zeros(4, 2, dtype=torch.int32)
    pages = (tensors[0], *[torch.zeros(3, 4, 2, 8)] * 2, cum_q)
    refuses(
        "seqused_k is None", forward, *pages, None, *maxima, 0.0, False, False, block_table=table
    )
    refuses(
        "dropout_p is 0.5",
        *(forward, *pages, cum_k, *maxima, 0.5, False, False),
        block_table=table,
    )
    refuses(
        "dropout_p is 0.5",
        aten.flash_attention_forward_no_dropout_inplace,
        *(q, *tensors, *cum, *maxima, 0.5, False, False),
    )
    one = torch.ones(1)
    refuses(
        "k_descale is a tensor",
        aten.flash_attention_forward_quantized,
        *(*tensors, *cum, *maxima, 0.0, False, False, None, one, None),
    )
    refuses(
        "q_descale is a tensor",
        aten.scaled_dot_product_flash_attention_quantized,
        *(*[q[None]] * 3, one, None, None),
    )


def test_options_that_the_backward_does_not_get(torch: ModuleType) -> None:
    """Gradients that would be wrong are refused; without gradients the options are served."""
    tensors = packed(torch)
    used = torch.tensor(USED, dtype=torch.int32)
    for options in (
        {"seqused_k": used},
        {"alibi_slopes": torch.zeros(4)},
        {"block_table": used[:, None]},
    ):
        (name,) = options
        with pytest.raises(NotImplementedError, match=f"{name} is a tensor; PyTorch's backward"):
            aten.flash_attention_forward(*tensors, 0.0, False, False, **options)


def test_quantized_overloads_of_other_tensors(torch: ModuleType) -> None:
    q, k, v, *rest = (x.detach() if hasattr(x, "detach") else x for x in packed(torch))
    out, *_ = aten.flash_attention_forward_quantized(
        *(q, k, v, *rest, 0.0, True, False, None, None, None), scale=0.2
    )
    right, *_ = aten.flash_attention_forward(q, k, v, *rest, 0.0, True, False, scale=0.2)
    assert torch.equal(out, right)
    x = randn(torch, 1, 2, 5, 8)
    out, *_ = aten.scaled_dot_product_flash_attention_quantized(
        x, x, x, None, None, None, 0.0, True
    )
    right, *_ = aten.scaled_dot_product_flash_attention(x, x, x, 0.0, True)
    assert torch.equal(out, right)
