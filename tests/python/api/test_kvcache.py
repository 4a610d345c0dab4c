"""anyflash.attention_with_kvcache with each framework's arrays, against its formula."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from calls.frameworks import (
    EVERY_DTYPE,
    EVERY_KIND,
    Kind,
    Producer,
    bits,
    close,
    from_torch,
    random,
    to_torch,
)
from calls.kvcache import (
    CAPACITY,
    WRITABLE,
    Arguments,
    angles,
    attend,
    call,
    expected,
    same_caches,
    verify,
)

FLOAT8 = ml_dtypes.float8_e4m3fn
PAGED = pytest.mark.parametrize("page_size", [0, 1, 4])
EIGHT_BITS = pytest.mark.parametrize(
    "cache_dtype", [np.int8, FLOAT8, ml_dtypes.float8_e5m2], ids=["int8", "e4m3", "e5m2"]
)
TOLERANCE = {"float64": 1e-10, "float32": 1e-5, "float16": 4e-3, "bfloat16": 3e-2}


# Frameworks and dtypes ----------------------------------------------------------------------------


@WRITABLE
@PAGED
def test_append(kind: Kind, page_size: int) -> None:
    """The new rows lie in the framework's own memory."""
    verify({**call(page_size=page_size), "causal": True}, kind)


@EVERY_KIND
@PAGED
def test_without_new_keys(kind: Kind, page_size: int) -> None:
    verify(call(page_size=page_size, new=0), kind)


@EVERY_DTYPE
@PAGED
def test_numpy(dtype: str, page_size: int) -> None:
    arguments = call(dtype=dtype, page_size=page_size)
    right = expected(arguments)
    out = anyflash.attention_with_kvcache(**arguments)
    assert (type(out), out.dtype, out.shape) == (np.ndarray, arguments["q"].dtype, right.out.shape)
    np.testing.assert_allclose(
        out.astype(np.float64), right.out, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )
    same_caches(arguments, right)


@EVERY_DTYPE
def test_torch(torch: ModuleType, dtype: str) -> None:
    arguments = call(dtype=dtype, page_size=4)
    tensors = {name: to_torch(torch, x.copy()) for name, x in arguments.items()}
    out = anyflash.attention_with_kvcache(**tensors)
    assert out.dtype == tensors["q"].dtype
    assert bits(from_torch(torch, out)) == bits(anyflash.attention_with_kvcache(**arguments))
    for name in ("k_cache", "v_cache"):
        assert bits(from_torch(torch, tensors[name])) == bits(arguments[name])


@EVERY_DTYPE
def test_jax(jax: ModuleType, dtype: str) -> None:
    arguments = call(dtype=dtype, new=0)
    given = {name: jax.numpy.asarray(x) for name, x in arguments.items()}
    out = anyflash.attention_with_kvcache(**given)
    assert isinstance(out, jax.Array)
    assert bits(np.asarray(out)) == bits(anyflash.attention_with_kvcache(**arguments))


@EIGHT_BITS
@PAGED
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_eight_bits(cache_dtype: Any, page_size: int, dtype: str) -> None:
    arguments = call(dtype=dtype, page_size=page_size, cache_dtype=cache_dtype)
    arguments["k_scale"] = np.array([0.03, 0.001], np.float32)  # the second one: much is clamped
    slots = len(arguments["v_cache"])
    arguments["v_scale"] = abs(random(slots, 2)) + np.float32(0.01)
    right = expected(arguments)
    out, _ = attend(arguments, out_dtype="float32")
    np.testing.assert_allclose(out, right.out, rtol=1e-3, atol=1e-3)
    same_caches(arguments, right)


@EIGHT_BITS
def test_eight_bits_without_scales(cache_dtype: Any) -> None:
    arguments = call(cache_dtype=cache_dtype, page_size=4)
    arguments["q"] /= 30  # scores of order one also with int8
    verify(arguments)


@EIGHT_BITS
def test_eight_bits_of_torch(torch: ModuleType, cache_dtype: Any) -> None:
    arguments = call(cache_dtype=cache_dtype, page_size=4)
    kind = getattr(torch, np.dtype(cache_dtype).name)
    tensors = {
        name: torch.from_numpy(x.view(np.int8).copy()).view(kind)
        if name.endswith("_cache")
        else torch.from_numpy(x)
        for name, x in arguments.items()
    }
    right = expected(arguments)
    close(anyflash.attention_with_kvcache(**tensors).numpy(), right.out)
    for name in ("k_cache", "v_cache"):
        written = tensors[name].view(torch.int8).numpy()
        assert bits(written) == bits(getattr(right, name)), name


@EIGHT_BITS
@pytest.mark.parametrize("alone", [False, True])
def test_eight_bits_through_dlpack(jax: ModuleType, cache_dtype: Any, alone: bool) -> None:
    """JAX's arrays, and objects that are only known to speak DLPack, export float8 themselves."""
    arguments = call(cache_dtype=cache_dtype, new=0)
    given = {name: jax.numpy.asarray(x) for name, x in arguments.items()}
    if alone:
        given = {name: Producer(x) for name, x in given.items()}
    out = anyflash.attention_with_kvcache(**given)
    close(np.from_dlpack(out), expected(arguments).out)


def test_eight_bits_append_through_dlpack(torch: ModuleType) -> None:
    arguments = call(cache_dtype=np.int8)
    for name in ("k_scale", "v_scale"):
        arguments[name] = np.full(2, 0.03, np.float32)
    right = expected(arguments)
    given = {name: Producer(torch.from_numpy(x)) for name, x in arguments.items()}
    close(np.from_dlpack(anyflash.attention_with_kvcache(**given)), right.out)
    same_caches(arguments, right)


# Where keys lie -----------------------------------------------------------------------------------


@EVERY_KIND
@pytest.mark.parametrize("length", [0, 5, CAPACITY, np.int64(3)])
def test_one_length_for_all(kind: Kind, length: int) -> None:
    arguments = call(new=0)
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = random(*arguments[name].shape)
    arguments["cache_seqlens"] = np.full(3, length, np.int32)
    array = attend(arguments, kind)
    number = attend({**arguments, "cache_seqlens": length}, kind)
    assert [*map(bits, number)] == [*map(bits, array)]
    close(number[0], expected(arguments).out)


def test_append_at_one_length() -> None:
    arguments = call()
    arguments["cache_seqlens"] = 4
    for name in ("k_cache", "v_cache"):
        arguments[name][:, :4] = 1
    verify(arguments)


def test_all_of_the_cache() -> None:
    arguments = call(new=0)
    del arguments["cache_seqlens"]
    for name in ("k_cache", "v_cache"):
        arguments[name][...] = random(*arguments[name].shape)
    verify(arguments)
    whole = [arguments[name] for name in ("q", "k_cache", "v_cache")]
    close(anyflash.attention_with_kvcache(**arguments), anyflash.attention(*whole))


@WRITABLE
def test_places(kind: Kind) -> None:
    """cache_batch_idx and cache_leftpad; a cache with room for more sequences."""
    arguments = call()
    order = [4, 0, 2]
    for name in ("k_cache", "v_cache"):
        cache = np.full((6, *arguments[name].shape[1:]), np.nan, np.float32)
        cache[order] = arguments[name]
        for b, unused in enumerate((2, 0, 8)):
            cache[order[b], :unused] = np.nan
        arguments[name] = cache
    arguments["cache_batch_idx"] = np.array(order, np.int32)
    arguments["cache_leftpad"] = np.array([2, 0, 8], np.int32)
    verify({**arguments, "causal": True}, kind)


@WRITABLE
def test_interleaved_pool(kind: Kind) -> None:
    """K and V of a page in one array, and heads before rows."""
    arguments = call(page_size=4)
    right = expected(arguments)
    pool = np.full((len(arguments["k_cache"]), 2, 2, 4, 20), 7, np.float32)
    views = {"k_cache": pool[:, 0].swapaxes(1, 2), "v_cache": pool[:, 1, ..., :12].swapaxes(1, 2)}
    for name, view in views.items():
        view[...] = arguments[name]
    out, lse = attend(arguments | views, kind)
    close(out, right.out)
    close(lse, right.lse)
    same_caches(views, right)
    assert (pool[:, 1, ..., 12:] == 7).all()


@EVERY_KIND
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
def test_heads(kind: Kind, heads: tuple[int, int]) -> None:
    verify(call(heads=heads, new=0), kind)


def test_read_only_cache() -> None:
    arguments = call(new=0)
    for name in ("k_cache", "v_cache"):
        arguments[name].flags.writeable = False
    verify(arguments)


def test_table_with_strides() -> None:
    arguments = call(page_size=4)
    arguments["block_table"] = np.asfortranarray(arguments["block_table"])
    verify(arguments)


# Options ------------------------------------------------------------------------------------------

TREE = np.array([[True, False], [True, True]])
OPTIONS: dict[str, Arguments] = {
    "causal": {"causal": True},
    "window": {"window_size": (2, 0)},
    "window-right": {"window_size": (-1, 1)},
    "softcap": {"softcap": 0.7},
    "alibi": {"alibi_slopes": random(4)},
    "sinks": {"sinks": random(4)},
    "scale": {},
    "tree": {"tree_mask": TREE[None]},
    "tree-2": {"tree_mask": TREE},
    "tree-batch": {"tree_mask": random(3, 2, 2) > 0},
    "together": {
        **{"causal": True, "window_size": (4, -1), "softcap": 0.7, "alibi_slopes": random(4)},
        **{"sinks": random(4), "tree_mask": TREE[None]},
    },
}
for pairs, interleaved in ((10, True), (10, False), (3, True), (3, False)):
    cos, sin = angles(CAPACITY, pairs)
    rotary: Arguments = {
        **{"rotary_cos": cos, "rotary_sin": sin},
        **{"rotary_interleaved": interleaved},
    }
    name = f"rotary-{pairs}-{'interleaved' if interleaved else 'neox'}"
    OPTIONS[name] = rotary
    OPTIONS[f"{name}-causal"] = {**rotary, "causal": True}


@WRITABLE
@pytest.mark.parametrize("name", OPTIONS)
def test_option(kind: Kind, name: str) -> None:
    arguments = {**call(page_size=4), **OPTIONS[name]}
    right = arguments | {"tree_mask": TREE[None]} if name == "tree-2" else arguments
    found = expected(right)
    out, lse = attend(arguments, kind)
    close(out, found.out)
    close(lse, found.lse)
    if name.startswith("rotary"):
        for cache in ("k_cache", "v_cache"):
            np.testing.assert_allclose(arguments[cache], getattr(found, cache), rtol=0, atol=1e-6)
    else:
        same_caches(arguments, found)


def test_scale() -> None:
    arguments = call()
    doubled = arguments | {"q": 2 * arguments["q"]}
    half = attend(doubled, softmax_scale=0.5 / np.sqrt(20))
    close(half[0], attend(arguments)[0])


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"num_splits": 3}, {"split_size": 64}])
def test_splits(splits: dict[str, int]) -> None:
    q, k_cache, v_cache = random(2, 1, 4, 16), random(2, 300, 2, 16), random(2, 300, 2, 16) + 1
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache}
    arguments["cache_seqlens"] = np.array([1, 290], np.int32)
    out, lse = attend(arguments, **splits)
    right = expected(arguments)
    close(out, right.out)
    close(lse, right.lse)


@pytest.mark.parametrize("splits", [{"num_splits": 1}, {"split_size": 128}])
def test_a_batch_does_not_change_a_sequence(splits: dict[str, int]) -> None:
    q, k_cache, v_cache = random(5, 1, 4, 16), random(5, 300, 2, 16), random(5, 300, 2, 16) + 1
    lengths = np.array([300, 1, 130, 0, 257], np.int32)
    together, lse = attend(
        {"q": q, "k_cache": k_cache, "v_cache": v_cache, "cache_seqlens": lengths}, **splits
    )
    for b, length in enumerate(lengths):
        one = slice(b, b + 1)
        alone = {"q": q[one], "k_cache": k_cache[one], "v_cache": v_cache[one]}
        out, alone_lse = attend(alone, cache_seqlens=int(length), **splits)
        assert bits(out) == bits(together[one])
        assert bits(alone_lse) == bits(lse[one])
