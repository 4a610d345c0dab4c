"""context_parallel_attention: devices that share sequences compute what one device computes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import anyflash.jax

ROWS = PartitionSpec(None, "cp")
ALL = PartitionSpec()
BATCH, LENGTH, HEADS, HEADS_K, DIM = 2, 128, 4, 2, 8
LAYOUTS = ("contiguous", "zigzag")
shard_map: Any = getattr(jax, "shard_map", None)
if shard_map is None:
    from jax.experimental.shard_map import shard_map


def randn(*shape: int) -> Any:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


ARRAYS: dict[str, Callable[[], Any]] = {
    "alibi_slopes": lambda: np.abs(randn(HEADS)),
    "sinks": lambda: randn(HEADS),
    "bias": lambda: randn(1, HEADS, LENGTH, LENGTH),
    "seqused_k": lambda: np.array([50, LENGTH], np.int32),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (20, 9), "softcap": 2.0},
    "left": {"window_size": (17, 0), "arrays": ("alibi_slopes", "sinks")},
    "bias": {"causal": True, "arrays": ("bias", "sinks")},
    "dropout": {"causal": True, "dropout_p": 0.3, "seed": 11},
    "seqused": {"causal": True, "arrays": ("seqused_k", "alibi_slopes")},
}
# Compiling takes seconds each.
WAYS = [
    *zip(itertools.cycle(LAYOUTS), itertools.repeat(4), OPTIONS),
    *(("zigzag", size, "left") for size in (1, 2, 8)),
    ("zigzag", 4, "causal"),
]


def mesh_of(size: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:size]), ("cp",))


def inputs(names: tuple[str, ...]) -> dict[str, Any]:
    q = randn(BATCH, LENGTH, HEADS, DIM)
    k = randn(BATCH, LENGTH, HEADS_K, DIM) + 0.1
    v = randn(BATCH, LENGTH, HEADS_K, DIM + 4)
    return {"q": q, "k": k, "v": v} | {name: ARRAYS[name]() for name in names}


def order_of(layout: str, size: int) -> Any:
    return np.arange(LENGTH) if layout == "contiguous" else anyflash.jax.zigzag_order(LENGTH, size)


def shared(layout: str, size: int, names: tuple[str, ...], **options: Any) -> Any:
    """Attention of whole arrays in their own order."""
    order = order_of(layout, size)
    back = np.argsort(order)
    specs = {"q": ROWS, "k": ROWS, "v": ROWS, "bias": PartitionSpec(None, None, "cp")}

    def local(arrays: Any) -> Any:
        call = functools.partial(anyflash.jax.context_parallel_attention, context_axis="cp")
        return call(**arrays, **options, layout=layout, return_lse=True)

    in_specs = ({name: specs.get(name, ALL) for name in ("q", "k", "v", *names)},)
    out_specs = (ROWS, PartitionSpec(None, None, "cp"))
    mapped = shard_map(local, mesh=mesh_of(size), in_specs=in_specs, out_specs=out_specs)

    def whole(arrays: Any) -> Any:
        given = {name: x[:, order] if name in "qkv" else x for name, x in arrays.items()}
        if "bias" in given:
            given["bias"] = given["bias"][:, :, order]
        out, lse = mapped(given)
        return out[:, back], lse[..., back]

    return jax.jit(whole)


def gradients(attend: Any, arrays: dict[str, Any]) -> Any:
    floats = {name: x for name, x in arrays.items() if x.dtype == np.float32}
    rest = {name: x for name, x in arrays.items() if x.dtype != np.float32}

    def loss(floats: Any) -> Any:
        out, lse = attend(floats | rest)
        return (out * randn(*out.shape)).sum() + (lse * randn(*lse.shape)).sum()

    return jax.jit(jax.grad(loss))(floats)


@pytest.mark.parametrize(("layout", "size", "name"), WAYS)
def test_devices_compute_what_one_computes(layout: str, size: int, name: str) -> None:
    options = dict(OPTIONS[name])
    names = options.pop("arrays", ())
    arrays = inputs(names)

    def one(arrays: Any) -> Any:
        return anyflash.jax.attention(**arrays, **options, return_lse=True)

    several = shared(layout, size, names, **options)
    for actual, expected in zip(several(arrays), jax.jit(one)(arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=2e-5)
    found, expected_gradients = gradients(several, arrays), gradients(one, arrays)
    for key, expected in expected_gradients.items():
        scale = float(jnp.abs(expected).max())
        np.testing.assert_allclose(found[key], expected, rtol=0, atol=1e-5 * scale, err_msg=key)


def test_a_ring_has_one_message_less_than_devices() -> None:
    text = shared("contiguous", 8, (), causal=True).lower(inputs(())).as_text()
    assert text.count("collective_permute") == 7
    assert "all_gather" not in text


def local_error(size: int, layout: str, **options: Any) -> str:
    def attend(q: Any) -> Any:
        return anyflash.jax.context_parallel_attention(
            q, q, q, context_axis="cp", layout=layout, **options
        )

    mapped = shard_map(attend, mesh=mesh_of(size), in_specs=ROWS, out_specs=ROWS)
    with pytest.raises(ValueError, match=r"^anyflash\.jax\.context_parallel_attention: ") as error:
        mapped(randn(BATCH, 72, HEADS, DIM))
    return str(error.value)


def test_errors() -> None:
    assert "layout is 'striped'; contiguous, zigzag are allowed" in local_error(2, "striped")
    assert "q has 9 rows on each device; an even number is" in local_error(8, "zigzag")
    wrong = local_error(8, "contiguous", dropout_p=0.1, seed=1)
    assert "dropout_p is 0.1, and chunks have 9 keys; with dropout a multiple of 8" in wrong
    bias = local_error(2, "contiguous", bias=np.zeros((36, 36), np.float32))
    assert "bias has shape (1, 1, 36, 36); expected" in bias
    with pytest.raises(ValueError, match="length is 12; a multiple of 16, twice the number of"):
        anyflash.jax.zigzag_order(12, 8)
