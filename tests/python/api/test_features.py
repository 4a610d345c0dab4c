"""Every option of anyflash.attention, with each framework's arrays, against its formula."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from calls.frameworks import EVERY_KIND, KINDS, Formula, Kind, bits, close, inputs, random
from oracle.attention import Array


@dataclass
class Feature:
    """Arguments of a call, and what they change in the formula."""

    change: Callable[[Formula], Any]
    arguments: dict[str, Any] = field(default_factory=dict)


def hidden_outside(left: float, right: float) -> Callable[[Formula], None]:
    return lambda f: f.hide((f.distance > left) | (f.distance < -right))


def added(bias: Array, scale: float = 1.0) -> Callable[[Formula], None]:
    def change(f: Formula) -> None:
        f.scores = f.scores + scale * bias.astype(np.float64)

    return change


def capped(f: Formula) -> None:
    f.scores = 0.7 * np.tanh(f.scores / 0.7)


def sloped(slopes: Array) -> Callable[[Formula], None]:
    def change(f: Formula) -> None:
        f.scores = f.scores - slopes.astype(np.float64)[..., None, None] * abs(f.distance)

    return change


def sunk(sinks: Array) -> Callable[[Formula], None]:
    return lambda f: setattr(f, "sinks", sinks)


def biased(bias: Array) -> Feature:
    change = (lambda f: f.hide(~bias)) if bias.dtype == bool else added(bias)
    return Feature(change, {"bias": bias})


def shorter(f: Formula) -> None:
    """seqused_k = 37, 0, causal: masks are aligned with the last key that is used."""
    for b, used in enumerate((37, 0)):
        rows, columns = f.scores.shape[-2:]
        last = np.arange(rows)[:, None] + used - rows
        seen = (np.arange(columns) <= last) & (np.arange(columns) < used)
        f.scores[b] = np.where(seen, f.scores[b], -np.inf)


# q is (2, 30, 4, 20), k (2, 50, 2, 20), v (2, 50, 2, 12).
SLOPES, SINKS, BIAS = random(4), random(4), random(2, 4, 30, 50)
KEEP = BIAS > 0
FEATURES = {
    "window": Feature(hidden_outside(3, 2), {"window_size": (3, 2)}),
    "window-left": Feature(hidden_outside(3, np.inf), {"window_size": (3, -1)}),
    "window-right": Feature(hidden_outside(np.inf, 2), {"window_size": [None, np.int64(2)]}),
    "window-wide": Feature(hidden_outside(np.inf, 0), {"window_size": (1 << 70, 0)}),
    "window-causal": Feature(hidden_outside(9, 0), {"window_size": (9, 40), "causal": True}),
    "softcap": Feature(capped, {"softcap": 0.7}),
    "alibi": Feature(sloped(SLOPES), {"alibi_slopes": SLOPES}),
    "alibi-batch": Feature(sloped(random(2, 4)), {"alibi_slopes": random(2, 4)}),
    "alibi-fp16": Feature(
        sloped(SLOPES.astype(np.float16)), {"alibi_slopes": SLOPES.astype(np.float16)}
    ),
    "bias": biased(BIAS),
    "bias-fp64": biased(BIAS.astype(np.float64)),
    "bias-fp16": biased(BIAS.astype(np.float16)),
    "bias-heads": biased(BIAS[:1]),
    "bias-batch": biased(BIAS[:, :1]),
    "bias-3": biased(BIAS[0]),
    "bias-2": biased(BIAS[0, 0]),
    "bias-1": biased(BIAS[0, 0, 0]),
    "bias-0": biased(np.full((), 3, np.float32)),
    "bias-rows": biased(BIAS[:, :, :, :1]),
    "bias-strided": biased(random(50, 4, 30, 4)[..., ::2].transpose(3, 1, 2, 0)),
    "bias-stride-0": biased(np.broadcast_to(BIAS[0, 0, 0], (2, 4, 30, 50))),
    "bias-inf": biased(np.where(KEEP, np.float32(0), np.float32(-np.inf))),
    "keep": biased(KEEP),
    "keep-1": biased(KEEP[0, 0, 0]),
    "keep-strided": biased(np.stack([KEEP, KEEP], -1)[..., 1]),
    "sinks": Feature(sunk(SINKS), {"sinks": SINKS}),
    "sinks-strided": Feature(sunk(random(4, 2)[:, 1]), {"sinks": random(4, 2)[:, 1]}),
    "seqused": Feature(
        shorter, {"seqused_k": np.array([37, 0], np.int32), "causal": True, "sinks": None}
    ),
}


def expected(feature: Feature, arrays: tuple[Array, ...]) -> tuple[Array, Array, Array]:
    formula = Formula(*arrays)
    feature.change(formula)
    return formula.result()


@EVERY_KIND
@pytest.mark.parametrize("name", FEATURES)
def test_feature(kind: Kind, name: str) -> None:
    feature = FEATURES[name]
    arrays = inputs()
    result = anyflash.attention(
        *kind.give(list(arrays)), return_max_logits=True, **kind.give(feature.arguments)
    )
    out, lse, max_logits = map(kind.take, result[:3])
    right = expected(feature, arrays)
    close(out, right[0])
    close(lse, right[1])
    close(max_logits, right[2])
    assert result.rng_state is None
    assert result.dropout_mask is None


def test_features_together() -> None:
    arrays = inputs()
    feature = Feature(
        lambda f: [
            change(f)
            for change in (capped, added(BIAS), sloped(SLOPES), hidden_outside(9, 2), sunk(SINKS))
        ],
        {
            "softcap": 0.7,
            "bias": BIAS,
            "alibi_slopes": SLOPES,
            "window_size": (9, 2),
            "sinks": SINKS,
        },
    )
    out, lse = anyflash.attention(*arrays, **feature.arguments, return_lse=True)
    close(out, expected(feature, arrays)[0])
    close(lse, expected(feature, arrays)[1])


def test_dtypes_of_options_are_their_own() -> None:
    """A bfloat16 bias with float32 queries, and the other way round."""
    q, k, v = inputs()
    bias, sinks = BIAS.astype(ml_dtypes.bfloat16), SINKS.astype(np.float64)
    feature = Feature(lambda f: [added(bias)(f), sunk(sinks)(f)])
    out, lse = anyflash.attention(q, k, v, bias=bias, sinks=sinks, return_lse=True)
    close(out, expected(feature, (q, k, v))[0])
    close(lse, expected(feature, (q, k, v))[1])
    low = [x.astype(ml_dtypes.bfloat16) for x in (q, k, v)]
    out = anyflash.attention(*low, bias=BIAS, out_dtype="float32")
    close(out, expected(Feature(added(BIAS)), tuple(low))[0], v=low[2])


@EVERY_KIND
@pytest.mark.parametrize("axes", [2, 3, 4])
def test_block_mask(kind: Kind, axes: int) -> None:
    q, k, v = random(2, 130, 2, 16), random(2, 200, 2, 16), random(2, 200, 2, 16)
    shape = (2, 2, 3, 2)[4 - axes :]
    mask = np.random.default_rng(0).random(shape) < 0.6
    keep = mask.repeat(64, -2).repeat(128, -1)[..., :130, :200]
    assert 0 < keep.mean() < 1
    given = kind.give([q, k, v])
    out, lse = anyflash.attention(
        *given, block_mask=kind.give(mask), block_size=(64, 128), return_lse=True
    )
    right = expected(biased(keep), (q, k, v))
    close(kind.take(out), right[0])
    close(kind.take(lse), right[1])


# Dropout ------------------------------------------------------------------------------------------


def dropped(arrays: tuple[Array, ...], mask: Array, p: float) -> Array:
    formula = Formula(*arrays)
    formula.factors = mask / (1 - p)
    return formula.result()[0]


@EVERY_KIND
@pytest.mark.parametrize("how", ["seed", "pair", "int64", "uint64"])
def test_dropout(kind: Kind, how: str) -> None:
    arrays = inputs()
    given = kind.give(list(arrays))
    state: Any = {
        "pair": (7, 3),
        "int64": kind.give(np.array([7, 3])),
        "uint64": kind.give(np.array([7, 3], np.uint64)),
    }.get(how)
    arguments = {"seed": 7} if state is None else {"rng_state": state}
    result = anyflash.attention(*given, dropout_p=0.25, return_dropout_mask=True, **arguments)
    mask = kind.take(result.dropout_mask)
    assert (mask.dtype, mask.shape) == (np.bool_, (2, 4, 30, 50))
    assert 0.7 < mask.mean() < 0.8
    close(kind.take(result.out), dropped(arrays, mask, 0.25))
    close(kind.take(result.lse), Formula(*arrays).result()[1])
    assert result.max_logits is None
    if how in ("seed", "pair"):
        assert result.rng_state == ((7, 0) if how == "seed" else (7, 3))
    else:
        assert result.rng_state is state
    again = anyflash.attention(*given, dropout_p=0.25, rng_state=result.rng_state)
    assert bits(kind.take(again)) == bits(kind.take(result.out))


def test_all_of_a_seed_counts() -> None:
    masks = [
        anyflash.attention(*inputs(), dropout_p=0.5, rng_state=pair, return_dropout_mask=True)[4]
        for pair in ((1, 0), (1 << 62, 0), (0, 1), (0, 1 << 63), ((1 << 64) - 1, 5))
    ]
    assert len({bits(mask) for mask in masks}) == len(masks)


def drawn(*arrays: Any) -> tuple[int, int]:
    state: tuple[int, int] = anyflash.attention(*arrays, dropout_p=0.5, return_result=True)[3]
    assert state[1] == 0
    return state


def test_seed_comes_from_numpy() -> None:
    np.random.seed(0)
    first = [drawn(*inputs()) for _ in range(3)]
    np.random.seed(0)
    assert [drawn(*inputs()) for _ in range(3)] == first
    assert len(set(first)) == 3


def test_seed_comes_from_torch(torch: ModuleType) -> None:
    given = [*map(torch.from_numpy, inputs())]
    torch.manual_seed(0)
    first = [drawn(*given) for _ in range(3)]
    torch.manual_seed(0)
    assert [drawn(*given) for _ in range(3)] == first
    assert len(set(first)) == 3


def test_seed_of_other_producers_is_random() -> None:
    kind = Kind("producer")
    assert drawn(*kind.give([*inputs()])) != drawn(*kind.give([*inputs()]))


def test_seed_is_needed_for_jax(jax: ModuleType) -> None:
    given = [*map(jax.numpy.asarray, inputs())]
    with pytest.raises(ValueError, match=r"anyflash\.attention: dropout_p needs a seed: JAX"):
        anyflash.attention(*given, dropout_p=0.5)


@pytest.mark.parametrize("state", [{}, {"seed": 3}, {"rng_state": (3, 0)}])
def test_no_dropout(state: dict[str, Any]) -> None:
    """No random number is drawn."""
    np.random.seed(0)
    before = bits(np.random.get_state()[1])
    result = anyflash.attention(*inputs(), dropout_p=0, return_dropout_mask=True, **state)
    assert result.rng_state is None
    assert result.dropout_mask.all()
    assert bits(result.out) == bits(anyflash.attention(*inputs()))
    assert bits(np.random.get_state()[1]) == before


# Results ------------------------------------------------------------------------------------------


def test_result() -> None:
    q, k, v = inputs()
    out, lse = anyflash.attention(q, k, v, return_lse=True)
    result = anyflash.attention(q, k, v, return_result=True)
    assert isinstance(result, anyflash.AttentionResult)
    assert result._fields == ("out", "lse", "max_logits", "rng_state", "dropout_mask")
    assert (bits(result.out), bits(result.lse)) == (bits(out), bits(lse))
    assert result[2:] == (None, None, None)
    for name in ("return_max_logits", "return_dropout_mask"):
        implied = anyflash.attention(q, k, v, **{name: True})
        assert isinstance(implied, anyflash.AttentionResult)
        filled = getattr(implied, name.removeprefix("return_"))
        assert [x is None for x in implied[2:]] == [x is not filled for x in implied[2:]]


def check_out_dtype(kind: Kind, dtype: str) -> None:
    arrays = inputs(dtype)
    given = kind.give(list(arrays))
    rounded = kind.take(anyflash.attention(*given))
    out = kind.take(anyflash.attention(*given, out_dtype="float32"))
    close(out, Formula(*arrays).result()[0], arrays[2] if dtype == "bfloat16" else None)
    assert bits(out.astype(arrays[0].dtype)) == bits(rounded)
    same = anyflash.attention(*given, out_dtype=dtype)
    assert bits(kind.take(same)) == bits(rounded)


@EVERY_KIND
def test_out_dtype(kind: Kind) -> None:
    check_out_dtype(kind, "float16")


@pytest.mark.parametrize("kind", KINDS[:3], ids=lambda kind: kind.name)  # NumPy exports no bfloat16
def test_out_dtype_for_bfloat16(kind: Kind) -> None:
    check_out_dtype(kind, "bfloat16")


def test_out_dtype_is_any_framework_s(torch: ModuleType, jax: ModuleType) -> None:
    for dtype in (np.float32, np.dtype("float32"), torch.float32, jax.numpy.float32):
        assert anyflash.attention(*inputs("float16"), out_dtype=dtype).dtype == np.float32


def test_out_of_float32() -> None:
    arrays = inputs("float16")
    out = np.empty((2, 30, 4, 12), np.float32)
    for arguments in ({}, {"out_dtype": "float32"}):
        out[...] = 7
        assert anyflash.attention(*arrays, out=out, **arguments) is out
        assert bits(out) == bits(anyflash.attention(*arrays, out_dtype="float32"))


@pytest.mark.parametrize("name", ["bias", "alibi_slopes", "sinks"])
def test_torch_gradients_are_not_dropped(torch: ModuleType, name: str) -> None:
    given = [*map(torch.from_numpy, inputs())]
    x = torch.ones(4 if name != "bias" else 50, requires_grad=True)
    recorded = anyflash.attention(*given, **{name: x})
    recorded.square().sum().backward()
    assert x.grad.any()
    with torch.no_grad():
        out = anyflash.attention(*given, **{name: x})
    assert torch.equal(out, anyflash.attention(*given, **{name: x.detach()}))
    assert torch.equal(out, recorded)


def test_jax_tracer_as_bias(jax: ModuleType) -> None:
    given = [*map(jax.numpy.asarray, inputs())]
    out = jax.jit(lambda bias: anyflash.attention(*given, bias=bias))(BIAS)
    assert (out == anyflash.attention(*given, bias=jax.numpy.asarray(BIAS))).all()


def test_reference_counts() -> None:
    given = {"bias": BIAS, "sinks": SINKS, "alibi_slopes": SLOPES, "rng_state": np.array([1, 2])}
    before = [sys.getrefcount(x) for x in given.values()]
    for _ in range(10):
        anyflash.attention(*inputs(), **given, dropout_p=0.5)
        with pytest.raises(ValueError, match="seqused_k"):
            anyflash.attention(*inputs(), **given, seqused_k=np.zeros(9, np.int32))
    assert [sys.getrefcount(x) for x in given.values()] == before
