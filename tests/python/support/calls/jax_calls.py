"""Calls of anyflash.jax beside calls of anyflash with NumPy arrays, bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest

import anyflash
from calls.frameworks import bits, inputs
from oracle.attention import Array

DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "alibi_slopes")


@contextlib.contextmanager
def x64(enabled: bool) -> Iterator[None]:
    """With or without dtypes of 64 bits: without is JAX's default."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", enabled)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


@pytest.fixture(autouse=True)
def narrow() -> Iterator[None]:
    """For every test of a module that imports it: so, and on the CPU, if nothing else is said."""
    with x64(False), jax.default_device(jax.devices("cpu")[0]):
        yield


def arrays(
    dtype: str = "float32", seed: int = 0, head_dims: tuple[int, int] = (20, 12)
) -> dict[str, Array]:
    return dict(zip("qkv", inputs(dtype, seed, head_dims), strict=True))


def same(actual: Any, right: Any, name: str = "") -> None:
    """The same bits, dtype and shape, in trees of one structure."""
    if isinstance(right, dict):
        assert actual.keys() == right.keys()
        for key in right:
            same(actual[key], right[key], f"{name} {key}")
    elif isinstance(right, tuple):
        assert len(actual) == len(right)
        for i, (x, y) in enumerate(zip(actual, right, strict=True)):
            same(x, y, f"{name} {i}")
    else:
        x, y = np.asarray(actual), np.asarray(right)
        assert (x.dtype, x.shape) == (y.dtype, y.shape), name
        assert bits(x) == bits(y), f"{name}: {(x != y).sum()} of {x.size} elements differ"


def floats_of(given: dict[str, Any]) -> dict[str, Array]:
    """What has gradients."""
    return {
        name: given[name] for name in DIFFERENTIABLE if name in given and given[name].dtype != bool
    }


def numpy_gradients(
    given: dict[str, Any], dout: Array, dlse: Array | None, packed: tuple[Any, ...] = ()
) -> dict[str, Array]:
    """Of all that has gradients, by anyflash.attention_backward."""
    if packed:
        forward, backward = anyflash.attention_varlen, anyflash.attention_varlen_backward
    else:
        forward, backward = anyflash.attention, anyflash.attention_backward
    options = {name: x for name, x in given.items() if name not in ("q", "k", "v")}
    q, k, v = (given[name] for name in "qkv")
    out, lse = forward(q, k, v, *packed, return_lse=True, **options)
    wanted = floats_of(given)
    asked = {f"return_d{name}": True for name in wanted if name not in ("q", "k", "v")}
    grads = backward(dout, q, k, v, out, lse, *packed, dlse=dlse, **asked, **options)
    return {name: getattr(grads, f"d{name}") for name in wanted}


def cotangents(out: Any, lse: Any) -> tuple[Array, Array]:
    random = np.random.default_rng(9)
    dout = random.standard_normal(out.shape).astype(out.dtype)
    return dout, random.standard_normal(lse.shape).astype(np.float32)
