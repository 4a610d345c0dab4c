"""anyflash.torch.scaled_dot_product_attention against PyTorch's own in float64."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from anyflash.torch import scaled_dot_product_attention
from cases.sdpa import CASES, Case, Shape, draw, leaves, same

DTYPES = ("float64", "float32", "float16", "bfloat16")


def own(torch: ModuleType, case: Case, query: Any, key: Any, value: Any, *mask: Any) -> Any:
    """PyTorch's function, which knows no enable_gqa before 2.5, and no mask with one axis of
    extent 1 in all its backends."""
    if case.enable_gqa:
        heads = query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    math = torch.nn.attention.SDPBackend.MATH
    with torch.nn.attention.sdpa_kernel(math):
        return torch.nn.functional.scaled_dot_product_attention(
            query, key, value, *mask, **case.options
        )


def ours(case: Case, *tensors: Any) -> Any:
    return scaled_dot_product_attention(*tensors, **case.options, enable_gqa=case.enable_gqa)


def agree(torch: ModuleType, actual: list[Any], right: list[Any]) -> None:
    """A result and its gradients, of float64; the latter are made with an LSE of float32."""
    for i, (x, wanted) in enumerate(zip(actual, right, strict=True)):
        torch.testing.assert_close(x, wanted, rtol=1e-6 if i else 1e-11, atol=1e-6 if i else 1e-11)


def with_gradients(torch: ModuleType, out: Any, tensors: list[Any]) -> list[Any]:
    dout = draw(torch, *out.shape, seed=9).detach().to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


@pytest.mark.parametrize("name", CASES)
def test_result_and_gradients(torch: ModuleType, name: str) -> None:
    case = CASES[name]
    tensors = leaves(torch, case)
    right = with_gradients(torch, own(torch, case, *tensors), tensors)
    out = ours(case, *tensors)
    assert out.transpose(-3, -2).is_contiguous() if out.dim() > 2 else out.is_contiguous()
    agree(torch, with_gradients(torch, out, tensors), right)


def without_gradients(torch: ModuleType, case: Case, *tensors: Any) -> None:
    """There the kernel is called in another way: the same bits, and the same order in memory."""
    right = ours(case, *tensors)
    with torch.no_grad():
        out = ours(case, *tensors)
    assert torch.equal(out, right)
    assert not out.numel() or out.stride() == right.stride()


@pytest.mark.parametrize("name", CASES)
def test_result_without_gradients(torch: ModuleType, name: str) -> None:
    without_gradients(torch, CASES[name], *leaves(torch, CASES[name]))


def naive(torch: ModuleType, case: Case, query: Any, key: Any, value: Any, *mask: Any) -> Any:
    """The formula in the tensors' own dtype."""
    if case.enable_gqa:
        heads = query.shape[-3]
        key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if case.scale is None else case.scale)
    if mask:
        scores = scores + mask[0]
    if case.is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ value


@pytest.mark.parametrize("dtype", DTYPES[1:])
@pytest.mark.parametrize("name", ["tiles", "causal-tiles", "axes-cross", "gqa-mask", "mask-of-5d"])
def test_errors_are_those_of_the_dtype(torch: ModuleType, name: str, dtype: str) -> None:
    case = CASES[name]
    low = leaves(torch, case, dtype)
    exact = [x.detach().double().requires_grad_() for x in low]
    right = with_gradients(torch, own(torch, case, *exact), exact)
    usual = with_gradients(torch, naive(torch, case, *low), low)
    actual = with_gradients(torch, ours(case, *low), low)
    for i, (x, plain, wanted) in enumerate(zip(actual, usual, right, strict=True)):
        assert x.dtype == low[0].dtype
        error, bound = ((y.double() - wanted).abs().max() for y in (x, plain))
        roundings = 4 * torch.finfo(x.dtype).eps * wanted.abs().max()  # the naive one may be lucky
        assert error <= (3 if i else 2) * bound + roundings


@pytest.mark.parametrize("mask", [None, (1, 3, 1, 4), (2, 1, 5, 1), (5, 4)])
def test_gradcheck(torch: ModuleType, mask: Shape | None) -> None:
    case = Case((2, 3, 5, 4), (1, 3, 4, 4), (2, 1, 4, 2), mask=mask)
    assert torch.autograd.gradcheck(lambda *x: ours(case, *x), leaves(torch, case), fast_mode=True)


# Masks --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape", [(2, 3, 9, 11), (2, 1, 1, 11), (9, 11), (3, 9, 1), (1, 3, 9, 11), (1, 1, 1, 1)]
)
@pytest.mark.parametrize("leading", [(2,), (4, 2)])
def test_boolean_mask(torch: ModuleType, shape: Shape, leading: Shape) -> None:
    case = same(*leading, 3, 9, 8, length_k=11)
    tensors = leaves(torch, case)
    keep = draw(torch, *shape).detach() > -0.7
    keep[..., :1] = True  # every query sees a key
    assert shape[-1] == 1 or not keep.all()
    right = with_gradients(torch, own(torch, case, *tensors, keep), tensors)
    agree(torch, with_gradients(torch, ours(case, *tensors, keep), tensors), right)
    without_gradients(torch, case, *tensors, keep)


def test_negative_mask(torch: ModuleType) -> None:
    """Which torch never computed: a bit says that it is."""
    query, key, value, mask = (x.detach() for x in leaves(torch, CASES["mask"]))
    with pytest.raises(TypeError, match="bias is a conjugate or a negative"):
        scaled_dot_product_attention(query, key, value, torch._neg_view(mask))


def test_only_the_mask_requires_grad(torch: ModuleType) -> None:
    tensors = leaves(torch, CASES["mask"])
    right = with_gradients(torch, ours(CASES["mask"], *tensors), tensors)[-1]
    given = [*(x.detach() for x in tensors[:3]), tensors[3]]
    assert torch.equal(with_gradients(torch, ours(CASES["mask"], *given), given[3:])[-1], right)


@pytest.mark.parametrize("form", ["bool", "numbers"])
def test_queries_that_see_no_key_give_0(torch: ModuleType, form: str) -> None:
    case = same(2, 3, 9, 8, length_k=11)
    tensors = leaves(torch, case)
    keep = torch.ones(9, 11, dtype=torch.bool)
    keep[2:4] = False
    mask = keep if form == "bool" else torch.where(keep, 0.0, -torch.inf).double()
    out, dq, dk, dv = with_gradients(torch, ours(case, *tensors, mask), tensors)
    assert (out[:, :, 2:4] == 0).all()
    assert (dq[:, :, 2:4] == 0).all()
    rows = [0, 1, *range(4, 9)]
    seeing = [tensors[0].detach()[:, :, rows].requires_grad_(), *tensors[1:]]
    seen = own(torch, case, *seeing)
    dout = draw(torch, *out.shape, seed=9).detach()[:, :, rows]
    right = [seen, *torch.autograd.grad(seen, seeing, dout)]
    agree(torch, [out[:, :, rows], dq[:, :, rows], dk, dv], right)


@pytest.mark.parametrize("mask_dtype", DTYPES)
def test_dtype_of_the_mask_is_its_own(torch: ModuleType, mask_dtype: str) -> None:
    case = same(2, 3, 9, 8, length_k=11)
    tensors = leaves(torch, case, "float32")
    mask = draw(torch, 3, 9, 11, dtype=mask_dtype)
    actual = with_gradients(torch, ours(case, *tensors, mask), [*tensors, mask])
    exact = [x.detach().double().requires_grad_() for x in (*tensors, mask)]
    right = with_gradients(torch, own(torch, case, *exact), exact)
    assert actual[-1].dtype == mask.dtype
    for x, wanted in zip(actual, right, strict=True):
        rtol = 1e-2 if x.dtype in (torch.float16, torch.bfloat16) else 1e-5
        torch.testing.assert_close(x.double(), wanted, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("lengths", [(9, 9), (9, 14), (14, 9)])
@pytest.mark.parametrize("variant", ["causal_upper_left", "causal_lower_right"])
def test_causal_bias(torch: ModuleType, variant: str, lengths: tuple[int, int]) -> None:
    module = importlib.import_module("torch.nn.attention.bias")
    case = same(2, 3, lengths[0], 8, length_k=lengths[1])
    tensors = leaves(torch, case)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of NaN where a query sees no key
        bias = getattr(module, variant)(*lengths)
    offset = lengths[1] - lengths[0] if variant == "causal_lower_right" else 0
    keep = torch.ones(lengths, dtype=torch.bool).tril(offset)
    right = own(torch, case, *tensors, keep)
    torch.testing.assert_close(ours(case, *tensors, bias), right.nan_to_num())
    with pytest.raises(ValueError, match="a CausalBias and is_causal are both given"):
        scaled_dot_product_attention(*tensors, bias, is_causal=True)
    with pytest.raises(RuntimeError, match=r"attn_mask is a CausalBias of .* expected \(3, 14\)"):
        scaled_dot_product_attention(
            tensors[0][:, :, :3], *leaves(torch, same(2, 3, 14, 8))[1:], bias
        )


def test_nan_reaches_only_queries_that_see_it(torch: ModuleType) -> None:
    query, key, value = (x.detach() for x in leaves(torch, same(2, 3, 9, 8)))
    right = scaled_dot_product_attention(query, key, value, is_causal=True)
    key[:, :, 5], value[:, :, 6] = torch.nan, torch.inf
    out = scaled_dot_product_attention(query, key, value, is_causal=True)
    assert torch.equal(out[:, :, :5], right[:, :, :5])
    assert out[:, :, 5:].isnan().all()


# Memory -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["4d", "axes-cross", "mask-of-5d-outer", "causal-longer-keys"])
def test_strides(torch: ModuleType, name: str) -> None:
    case = CASES[name]
    tensors = [x.detach() for x in leaves(torch, case)]
    right = ours(case, *tensors)
    strided = [x.transpose(-3, -2).contiguous().transpose(-3, -2) for x in tensors]
    assert torch.equal(ours(case, *strided), right)
    strided = [torch.stack([x, x], -1)[..., 1] for x in tensors]
    assert torch.equal(ours(case, *strided), right)
    before = [x.clone() for x in tensors]
    ours(case, *tensors)
    assert all(map(torch.equal, tensors, before))


# Dropout ------------------------------------------------------------------------------------------


def test_dropout(torch: ModuleType) -> None:
    """Equal scores, and values that show the probabilities."""
    query = torch.zeros(2, 3, 50, 4, dtype=torch.float64)
    value = torch.eye(50, dtype=torch.float64).expand(2, 3, 50, 50).clone().requires_grad_()
    torch.manual_seed(3)
    out = scaled_dot_product_attention(query, query, value, dropout_p=0.25)
    kept = out > 0
    assert 0.7 < kept.double().mean() < 0.8
    torch.testing.assert_close(out, kept.double() / (50 * 0.75))
    (dvalue,) = torch.autograd.grad(out, value, torch.ones_like(out))
    torch.testing.assert_close(dvalue, out.sum(-2)[..., None].expand(2, 3, 50, 50).detach())
    assert not torch.equal(out, scaled_dot_product_attention(query, query, value, dropout_p=0.25))
    torch.manual_seed(3)
    with torch.no_grad():
        assert torch.equal(out, scaled_dot_product_attention(query, query, value, None, 0.25))


def test_all_is_dropped(torch: ModuleType) -> None:
    tensors = leaves(torch, CASES["fewer-axes"])
    out = scaled_dot_product_attention(*tensors, dropout_p=1.0)
    assert out.shape == (4, 2, 3, 9, 8)
    for x in with_gradients(torch, out, tensors):
        assert (x == 0).all()


# Errors -------------------------------------------------------------------------------------------

NAME = r"anyflash\.torch\.scaled_dot_product_attention: "
ERRORS = {
    "1d": ({"query": (8,)}, "query has shape .*at least 2 axes"),
    "head-dim": ({"key": (2, 3, 11, 7)}, "query, key and value have shapes"),
    "lengths": ({"value": (2, 3, 10, 8)}, "query, key and value have shapes"),
    "heads": ({"query": (2, 6, 9, 8)}, "the leading axes must be equal or 1"),
    "batch": ({"query": (3, 3, 9, 8)}, "the leading axes must be equal or 1"),
    "gqa": ({"query": (2, 4, 9, 8), "enable_gqa": True}, "must divide query's"),
    "gqa-inverse": ({"query": (2, 1, 9, 8), "enable_gqa": True}, "must divide query's"),
    "gqa-batch": ({"query": (3, 6, 9, 8), "enable_gqa": True}, "the leading axes must be"),
    "dtype": ({"key": "float16"}, r"key is torch\.float16, but query is torch\.float64"),
    "device": ({"value": "meta"}, "value is on meta, but query is on cpu"),
    "no-heads": (
        dict.fromkeys(("query", "key", "value"), (2, 0, 9, 8)) | {"attn_mask": None},
        r"have shapes \(2, 0, 9, 8\), .*; heads and head dims must be at least 1",
    ),
    "no-columns": ({"value": (2, 3, 11, 0)}, r"\(2, 3, 11, 0\); heads and head dims must be"),
    "mask-device": ({"attn_mask": "meta"}, "attn_mask is on meta, but query is on cpu"),
    "mask-dtype": ({"attn_mask": "int32"}, "attn_mask is torch.int32; bool or floats"),
    "mask-shape": ({"attn_mask": (8, 11)}, r"attn_mask has shape \(8, 11\)"),
    "mask-axes": ({"attn_mask": (1, 2, 3, 9, 11)}, r"attn_mask has shape \(1, 2, 3, 9, 11\)"),
    "mask-and-causal": ({"is_causal": True}, "attn_mask and is_causal are both given"),
    "dropout": ({"dropout_p": 1.5}, r"dropout_p is 1\.5; 0 <= dropout_p <= 1"),
    "dropout-negative": ({"dropout_p": -0.5}, r"dropout_p is -0\.5; 0 <= dropout_p <= 1"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_pytorch_refuses(torch: ModuleType, name: str) -> None:
    changes, message = ERRORS[name]
    arguments = dict(
        zip(
            ("query", "key", "value", "attn_mask"),
            leaves(torch, same(2, 3, 9, 8, length_k=11, mask=(9, 11))),
            strict=True,
        )
    )
    for key, change in changes.items():
        value: Any = change
        if isinstance(change, tuple):
            value = draw(torch, *change)
        elif isinstance(change, str):
            value = arguments[key].detach().to(getattr(torch, change, change))
        arguments[key] = value
    with pytest.raises(RuntimeError, match=NAME + ".*" + message):
        scaled_dot_product_attention(**arguments)


@pytest.mark.parametrize("axes", [2, 4])
@pytest.mark.parametrize("dtype", ["int32", "complex64"])
def test_other_dtypes(torch: ModuleType, dtype: str, axes: int) -> None:
    x = torch.zeros((2, 3, 9, 8)[-axes:], dtype=getattr(torch, dtype))
    with pytest.raises(
        TypeError, match=rf"{NAME}query is torch\.{dtype}; float64, float32, float16"
    ):
        scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("name", ["query", "key", "value", "attn_mask"])
def test_only_tensors(torch: ModuleType, name: str) -> None:
    x = torch.zeros(2, 3, 9, 9)
    for wrong in (np.zeros((2, 3, 9, 9)), None, 3):
        arguments = {"query": x, "key": x, "value": x, "attn_mask": x} | {name: wrong}
        if name == "attn_mask" and wrong is None:
            continue
        with pytest.raises(TypeError, match=f"{NAME}{name} is .*; a torch.Tensor is allowed"):
            scaled_dot_product_attention(**arguments)


def test_nested_tensors_are_refused(torch: ModuleType) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        nested = torch.nested.nested_tensor([torch.zeros(3, 5, 8), torch.zeros(3, 4, 8)])
    for name in ("query", "key", "value"):
        arguments = dict.fromkeys(("query", "key", "value"), torch.zeros(2, 3, 5, 8))
        with pytest.raises(RuntimeError, match=f"{NAME}{name} is a nested tensor; use"):
            scaled_dot_product_attention(**arguments | {name: nested})


def test_keywords_only(torch: ModuleType) -> None:
    x = torch.zeros(2, 3, 9, 8)
    with pytest.raises(TypeError, match="positional arguments"):
        scaled_dot_product_attention(x, x, x, None, 0.0, False, 0.5)


# At home in PyTorch -------------------------------------------------------------------------------


def test_autocast(torch: ModuleType) -> None:
    """Also of different dtypes, as PyTorch's function."""
    case = same(2, 3, 9, 8, length_k=11)
    query, key, value = leaves(torch, case, "float32")
    mask = draw(torch, 9, 11, dtype="float32")
    with torch.autocast("cpu", torch.bfloat16):
        for given in ((query, key, value), (query, key, value.bfloat16())):
            out = ours(case, *given, mask)
            assert out.dtype == torch.bfloat16
            without_gradients(torch, case, *given, mask)
            right = own(torch, case, *[x.double() for x in (*given, mask)])
            torch.testing.assert_close(out.double(), right, rtol=0.03, atol=0.03)
            (dmask,) = torch.autograd.grad(out.sum(), mask)
            assert dmask.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "dynamic"),
    [
        ("gqa", False),
        ("mask-of-5d-outer", False),
        ("4d", True),
        ("axes-cross", True),
        ("causal-longer-queries", True),
        ("causal-longer-keys", True),
    ],
)
def test_compile(torch: ModuleType, name: str, dynamic: bool) -> None:
    case = CASES[name]
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *x: ours(case, *x) * 2, backend="aot_eager", fullgraph=True, dynamic=dynamic
    )
    tensors = leaves(torch, case)
    right = with_gradients(torch, ours(case, *tensors) * 2, tensors)
    for x, wanted in zip(with_gradients(torch, compiled(*tensors), tensors), right, strict=True):
        assert torch.equal(x, wanted)


def test_numbers_in_tensors(torch: ModuleType) -> None:
    x = torch.randn(1, 2, 5, 8)
    found = scaled_dot_product_attention(x, x, x, None, torch.tensor(0.0), scale=torch.tensor(0.5))
    assert torch.equal(found, scaled_dot_product_attention(x, x, x, scale=0.5))
    for name in ("scale", "dropout_p"):
        for wrong in (torch.ones(1, 1), torch.tensor(0.5, requires_grad=True)):
            with pytest.raises(TypeError, match=f"{name}.*is (Tensor|Parameter)"):
                scaled_dot_product_attention(x, x, x, **{name: wrong})


def test_vmap(torch: ModuleType) -> None:
    case = same(2, 3, 9, 8, length_k=11, mask=(9, 11))
    tensors = [torch.stack([x.detach(), 2 * x.detach()]) for x in leaves(torch, case)]
    out = torch.vmap(lambda *x: ours(case, *x))(*tensors)
    for i in range(2):
        torch.testing.assert_close(out[i], ours(case, *[x[i] for x in tensors]))
