"""anyflash.jax.dot_product_attention against jax.nn's."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anyflash.jax
from calls.jax_calls import narrow

__all__ = ["narrow"]

HAS_RESIDUAL = "return_residual" in inspect.signature(jax.nn.dot_product_attention).parameters
LENGTHS = ((6, 6), (5, 9), (9, 5))  # of queries and keys
WINDOWS = (None, 2, (3, 0), (0, 1))


def combinations() -> list[tuple[Any, ...]]:
    """Every fourth of all, so that all pairs of values are there."""
    every = itertools.product(LENGTHS, (False, True), WINDOWS, range(8))
    return [case for i, case in enumerate(every) if (i + i // 8) % 4 == 0]


def random(*shape: int) -> Any:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def case_of(lengths: tuple[int, int], is_causal: bool, window: Any, bits: int) -> Any:
    """Arrays and options: bit by bit a bias, a mask, lengths."""
    rows, columns = lengths
    given = {
        "query": random(2, rows, 4, 8),
        "key": random(2, columns, 2, 8),
        "value": random(2, columns, 2, 8) + 1,
    }
    if bits & 1:
        given["bias"] = random(1, 4, rows, columns)
    options: dict[str, Any] = {"is_causal": is_causal, "local_window_size": window}
    options["mask"] = np.random.default_rng(0).random((2, 1, rows, columns)) < 0.8
    if not bits & 2:
        # A version of jax.nn forgets the window where nothing else hides keys.
        options["mask"] = np.ones((1, 1, 1, columns), bool)
    if bits & 4:
        options["query_seq_lengths"] = np.array([rows, 3], np.int32)
        options["key_value_seq_lengths"] = np.array([columns, 4], np.int32)
    return given, options


def seen_of(rows: int, columns: int, options: dict[str, Any]) -> Any:
    """(batch, rows) bool: the query sees a key and is not padding."""
    i, j = np.arange(rows)[:, None], np.arange(columns)
    seen = np.broadcast_to(options["mask"][:, 0], (2, rows, columns)).copy()
    if options["is_causal"]:
        seen &= j <= i
    window = options["local_window_size"]
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        seen &= (j >= i - left) & (j <= i + right)
    if "query_seq_lengths" in options:
        seen &= i < options["query_seq_lengths"][:, None, None]
        seen &= j < options["key_value_seq_lengths"][:, None, None]
    return seen.any(-1)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_same_as_jax(lengths: tuple[int, int]) -> None:
    """Results, residuals and gradients, and 0 where no key is seen."""
    residual = {"return_residual": True} if HAS_RESIDUAL else {}
    for case in combinations():
        if case[0] != lengths:
            continue
        given, options = case_of(*case)
        seen = seen_of(*lengths, options)[:, :, None]
        out, lse = anyflash.jax.dot_product_attention(**given, **options, return_residual=True)
        expected = jax.jit(
            lambda given: jax.nn.dot_product_attention(**given, **options, **residual)  # noqa: B023
        )(given)
        if HAS_RESIDUAL:
            expected, right = expected
            assert (lse.shape, lse.dtype) == (right.shape, right.dtype)
            np.testing.assert_allclose(np.where(seen, lse, 0), np.where(seen, right, 0), atol=1e-5)
        seen = seen[..., None]
        assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(np.where(seen, out, 0), np.where(seen, expected, 0), atol=1e-5)
        assert not np.where(seen, 0, out).any(), case
        assert np.isneginf(lse[~np.broadcast_to(seen[..., 0], lse.shape)]).all()


@pytest.mark.parametrize("index", [1, 13, 30, 45])
def test_gradients_same_as_jax(index: int) -> None:
    case = combinations()[index]
    given, options = case_of(*case)
    given["bias"] = random(1, 4, *case[0])
    seen = seen_of(*case[0], options)[:, :, None, None]

    def gradients(function: Any) -> Any:
        def loss(given: Any) -> Any:
            return (jnp.where(seen, function(**given, **options), 0) ** 2).sum()

        return jax.jit(jax.grad(loss))(given)

    actual, expected = (
        gradients(f) for f in (anyflash.jax.dot_product_attention, jax.nn.dot_product_attention)
    )
    for name, x in expected.items():
        np.testing.assert_allclose(actual[name], x, atol=2e-5, err_msg=name)


def test_three_dimensions() -> None:
    given = [x[0] for x in case_of((5, 9), False, None, 0)[0].values()]
    options = {"bias": random(4, 5, 9), "mask": random(5, 9) > -1, "scale": 0.3}
    out, lse = anyflash.jax.dot_product_attention(*given, **options, return_residual=True)
    expected = jax.nn.dot_product_attention(*given, **options)
    assert (out.shape, lse.shape) == (expected.shape, (5, 4))
    np.testing.assert_allclose(out, expected, atol=1e-5)


def test_bfloat16() -> None:
    given, options = case_of((6, 6), True, None, 0)
    given = {name: jnp.asarray(x, jnp.bfloat16) for name, x in given.items()}
    out, lse = anyflash.jax.dot_product_attention(**given, **options, return_residual=True)
    expected = jax.nn.dot_product_attention(**given, **options)
    assert out.dtype == lse.dtype == expected.dtype
    np.testing.assert_allclose(out.astype("f"), expected.astype("f"), atol=0.05)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_traced_scale(shape: tuple[int, ...], compiled: bool) -> None:
    """It has jax.nn's gradient, and may be mapped."""
    given, options = case_of((5, 9), True, None, 1)

    def gradient(function: Any, scale: Any) -> Any:
        def loss(scale: Any) -> Any:
            return (function(**given, **options, scale=scale)[:, 1:] ** 2).sum()

        found = jax.value_and_grad(loss)
        return (jax.jit(found) if compiled else found)(scale)

    ours, theirs = anyflash.jax.dot_product_attention, jax.nn.dot_product_attention
    for scale in (0.3, -0.7):
        expected = gradient(theirs, jnp.float32(scale))
        actual = gradient(ours, jnp.full(shape, scale, jnp.float32))
        for x, right in zip(actual, expected, strict=True):
            np.testing.assert_allclose(x.reshape(()), right, rtol=1e-4)
    scales = jnp.array([0.3, 1.5])
    mapped = jax.vmap(lambda scale: ours(**given, **options, scale=scale))(scales)
    for out, scale in zip(mapped, scales, strict=True):
        right = ours(**given, **options, scale=float(scale))
        np.testing.assert_allclose(out, right, atol=1e-5)


def test_a_traced_scale_of_16_bits() -> None:
    """What the product's one rounding costs is a part of what query's cost."""
    given, options = case_of((6, 6), False, None, 0)
    given = {name: jnp.asarray(x, jnp.bfloat16) for name, x in given.items()}
    exact = anyflash.jax.dot_product_attention(
        **{name: x.astype("f") for name, x in given.items()}, **options, scale=0.3
    )
    function = jax.jit(lambda scale: anyflash.jax.dot_product_attention(**given, scale=scale))
    out = function(jnp.float32(0.3))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(out.astype("f"), exact, atol=0.02)


@pytest.mark.parametrize("scale", [np.ones(2, np.float32), np.bool_(True), np.complex64(1)])
def test_a_traced_scale_that_is_none(scale: Any) -> None:
    given, _ = case_of((6, 6), False, None, 0)
    with pytest.raises(TypeError, match=f"scale is {scale.dtype.name} of shape"):
        jax.jit(lambda x: anyflash.jax.dot_product_attention(**given, scale=x))(scale)


def test_the_residual_has_no_gradient() -> None:
    given, _ = case_of((6, 6), True, None, 0)
    attend = anyflash.jax.dot_product_attention
    gradient = jax.grad(lambda x: attend(**x, return_residual=True)[1].sum())(given)
    assert not any(x.any() for x in gradient.values())


def test_one_signature() -> None:
    theirs = inspect.signature(jax.nn.dot_product_attention).parameters
    ours = inspect.signature(anyflash.jax.dot_product_attention).parameters
    names = [*theirs, *(() if HAS_RESIDUAL else ("return_residual",))]
    assert sorted(ours) == sorted(names)
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"implementation": "flash"}, ValueError, "implementation is 'flash'"),
        ({"mask": np.ones((1, 1, 6, 6), np.float32)}, ValueError, "mask is float32"),
        ({"local_window_size": -1}, ValueError, "local_window_size is -1"),
        ({"key": random(2, 6, 3, 8)}, ValueError, "k has 3 heads"),
        ({"bias": random(2, 3, 6, 6)}, ValueError, "bias has shape"),
        ({"key": random(2, 6, 2, 8).astype(np.float16)}, TypeError, "k is float16"),
    ],
)
def test_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    given, _ = case_of((6, 6), False, None, 0)
    with pytest.raises(kind, match=r"anyflash\.jax\.dot_product_attention: .*" + message):
        anyflash.jax.dot_product_attention(**given | change)
