"""attention(context_axis=...): devices that share sequences compute what one device computes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import anyflash
import anyflash.jax
from calls.jax_calls import cotangents, numpy_gradients, x64
from calls.jax_context_parallel import (
    BATCH,
    DIM,
    ENDS,
    HEADS,
    LENGTH,
    METHODS,
    OPTIONS,
    ROWS,
    inputs,
    mesh_of,
    results_and_gradients,
    shard_map,
    shared,
    two_axes,
)
from calls.sharded import random

PACKED: dict[str, dict[str, Any]] = {
    "causal": {"causal": True, "arrays": ("sinks", "alibi_slopes")},
    "window": {"window_size": (9, 4), "arrays": ("key_ranges",)},
    "dropout": {"causal": True, "dropout_p": 0.3, "seed": 11},
}
# Compiling takes seconds each.
DENSE_CASES = [
    ("ring", "contiguous", 4, "causal"),
    ("ring", "zigzag", 8, "causal"),
    ("ring", "zigzag", 1, "left"),
    ("ring", "zigzag", 2, "left"),
    ("ring", "contiguous", 4, "window"),
    ("ring", "contiguous", 4, "bias"),
    ("ring", "contiguous", 2, "one-row"),
    ("ring", "zigzag", 2, "one-key"),
    ("ring", "zigzag", 2, "seqused"),
    ("ring", "zigzag", 2, "all"),
    ("ring", "zigzag", 2, "more-keys"),
    ("gather", "contiguous", 4, "plain"),
    ("gather", "zigzag", 8, "bias"),
    ("gather", "zigzag", 2, "dropout"),
    ("gather", "zigzag", 2, "blocks"),
    ("gather", "zigzag", 2, "ranges"),
    ("gather", "contiguous", 4, "all"),
    ("all_to_all", "zigzag", 4, "window"),
    ("all_to_all", "contiguous", 4, "bias"),
    ("all_to_all", "zigzag", 2, "one-head"),
    ("all_to_all", "contiguous", 2, "one-row"),
    ("all_to_all", "contiguous", 4, "ranges"),
    ("all_to_all", "zigzag", 4, "all"),
]
PACKED_CASES = [
    ("ring", "contiguous", 4, "causal"),
    ("ring", "zigzag", 2, "window"),
    ("gather", "zigzag", 4, "dropout"),
    ("gather", "contiguous", 2, "window"),
    ("all_to_all", "zigzag", 4, "causal"),
    ("all_to_all", "contiguous", 2, "dropout"),
]


def check(
    attend: Any, arrays: Any, options: Any, packed: bool, bounds: Any = (2e-6, 2e-6, 1e-5)
) -> None:
    """Against one call on NumPy's arrays. ``bounds``: of out, lse and gradients."""
    function, ends = anyflash.attention, ()
    if packed:
        function, ends = anyflash.attention_varlen, (ENDS, ENDS, LENGTH, LENGTH)
    q, k, v = (arrays[name] for name in "qkv")
    others = {name: x for name, x in arrays.items() if name not in ("q", "k", "v")}
    expected = function(q, k, v, *ends, **others, **options, return_lse=True)
    given = cotangents(*expected)
    gradients = numpy_gradients(arrays | options, *given, ends)
    results, found = results_and_gradients(attend, arrays, given)
    for actual, right, bound in zip(results, expected, bounds[:2], strict=True):
        assert actual.dtype == right.dtype
        np.testing.assert_allclose(actual, right, rtol=bound, atol=bound)
    assert found.keys() == gradients.keys()
    for name, right in gradients.items():
        assert found[name].dtype == right.dtype
        bound = bounds[2] * np.abs(right).max()
        np.testing.assert_allclose(found[name], right, rtol=0, atol=bound, err_msg=name)


@pytest.mark.parametrize(("method", "layout", "size", "name"), DENSE_CASES)
def test_devices_compute_what_one_computes(method: str, layout: str, size: int, name: str) -> None:
    arrays, options = inputs(False, OPTIONS[name])
    # One call has all keys of a head; XLA's threads flush what is smaller to 0.
    bound = 1e-37 if method == "all_to_all" else 2e-6
    attend = shared(method, layout, size, **options)
    check(attend, arrays, options, False, (bound, bound, 1e-5))


@pytest.mark.parametrize(("method", "layout", "size", "name"), PACKED_CASES)
def test_packed_sequences(method: str, layout: str, size: int, name: str) -> None:
    arrays, options = inputs(True, PACKED[name])
    check(shared(method, layout, size, True, **options), arrays, options, True)


@pytest.mark.parametrize("method", METHODS)
def test_float64(method: str) -> None:
    """The backward is given the LSE in float32, as on one device."""
    with x64(True):
        arrays, options = inputs(False, OPTIONS["left"])
        arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
        arrays["alibi_slopes"] = arrays["alibi_slopes"].astype(np.float32)
        arrays["sinks"] = arrays["sinks"].astype(np.float32)
        bounds = (1e-12, 1e-6, 1e-6)
        check(shared(method, "zigzag", 2, **options), arrays, options, False, bounds)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("packed", [False, True])
def test_maxima(method: str, packed: bool) -> None:
    rows, shape = (P("cp"), (LENGTH, HEADS, DIM)) if packed else (ROWS, (BATCH, LENGTH, HEADS, DIM))
    ends = (ENDS, ENDS, LENGTH, LENGTH) if packed else ()
    name = "attention_varlen" if packed else "attention"
    options = {"window_size": (30, 0), "dropout_p": 0.1, "rng_state": (3, 4)} if not packed else {}
    q, sinks = random(*shape), random(HEADS) + 9

    def attend(module: Any, q: Any, sinks: Any, **others: Any) -> Any:
        others |= options | {"return_max_logits": True, "sinks": sinks}
        return getattr(module, name)(q, q, q, *ends, **others)

    def f(q: Any, sinks: Any) -> Any:
        own = {"context_axis": "cp", "method": method, "layout": "zigzag"}
        result = attend(anyflash.jax, q, sinks, **own)
        assert result.dropout_mask is None
        return result.max_logits, result.rng_state

    mapped = shard_map(f, mesh=mesh_of(4), in_specs=(rows, P()), out_specs=P())
    order = anyflash.jax.zigzag_order(LENGTH, 4)
    maxima, state = jax.jit(mapped)(jnp.take(q, order, 0 if packed else 1), sinks)
    right = attend(anyflash, q, sinks)
    np.testing.assert_allclose(maxima, right.max_logits, rtol=1e-6)
    assert (state is None) == packed


@pytest.mark.parametrize("method", METHODS)
def test_bfloat16_is_rounded_once(method: str) -> None:
    arrays, options = inputs(False, OPTIONS["causal"])
    arrays = {name: x.astype(jnp.bfloat16) for name, x in arrays.items()}
    attend = shared(method, "contiguous", 4, **options)
    wide = {name: x.astype(np.float32) for name, x in arrays.items()}
    out, lse = anyflash.attention(*(wide[name] for name in "qkv"), causal=True, return_lse=True)
    dout, dlse = cotangents(out, lse)
    dout = dout.astype(jnp.bfloat16)
    right = numpy_gradients(wide | options, dout.astype(np.float32), dlse)
    _, found = results_and_gradients(attend, arrays, (dout, dlse))
    for name, x in right.items():
        error = np.abs(found[name].astype(np.float32) - x)
        assert (error <= np.abs(x) * 2**-8 + 3e-3 * np.abs(x).max()).all(), name


@pytest.mark.parametrize("method", METHODS)
def test_beside_an_axis_of_batches(method: str) -> None:
    """Gradients of what all devices have are sums over both axes."""
    options = {"causal": True, "arrays": ("sinks", "alibi_slopes")}
    arrays, options = inputs(False, options)
    check(shared(method, "zigzag", 4, mesh=two_axes(), **options), arrays, options, False)
