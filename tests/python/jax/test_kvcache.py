"""anyflash.jax.attention_with_kvcache."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import anyflash
import anyflash.jax
from calls.jax_calls import narrow, same
from calls.kvcache import caches_of, call, every_option, latent

__all__ = ["narrow"]

CACHES = ("k_cache", "v_cache")


def right_of(given: dict[str, Any], **options: Any) -> tuple[Any, ...]:
    """(out, lse, k_cache, v_cache) with NumPy; without v_cache where it is None."""
    names = caches_of(given)
    copies = {name: x.copy() if name in names else x for name, x in given.items()}
    out, lse = anyflash.attention_with_kvcache(**copies, return_lse=True, **options)
    return out, lse, *(copies[name] for name in names)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("page_size", [0, 4])
def test_append(dtype: str, page_size: int) -> None:
    """The same bits as with NumPy, and nothing that was given is changed."""
    given = call(dtype=dtype, page_size=page_size)
    right = right_of(given, causal=True)
    arrays = {name: jnp.asarray(x) for name, x in given.items()}
    attend = functools.partial(anyflash.jax.attention_with_kvcache, causal=True, return_lse=True)
    for f in (attend, jax.jit(attend)):
        same(f(**arrays), right)
        same(arrays, given)
    same(anyflash.jax.attention_with_kvcache(**given, causal=True), (right[0], *right[2:]))


EVERY = every_option()


@pytest.mark.parametrize("name", EVERY)
def test_every_option(name: str) -> None:
    right = right_of(EVERY[name])
    results = anyflash.jax.attention_with_kvcache(**EVERY[name], return_lse=True)
    same(results, right if "k" in EVERY[name] else right[:2])


def test_donated_caches_are_updated_in_place() -> None:
    given = call()
    right = right_of(given, causal=True)
    arrays = {name: jnp.asarray(x) for name, x in given.items()}
    # Memory of its own: NumPy's may be shared, which cannot be donated.
    arrays |= {name: arrays[name] + 0 for name in CACHES}
    addresses = [arrays[name].unsafe_buffer_pointer() for name in CACHES]

    @functools.partial(jax.jit, donate_argnames=CACHES)
    def attend(k_cache: Any, v_cache: Any, others: Any) -> Any:
        return anyflash.jax.attention_with_kvcache(
            k_cache=k_cache, v_cache=v_cache, **others, causal=True, return_lse=True
        )

    others = {name: x for name, x in arrays.items() if name not in CACHES}
    result = attend(*(arrays[name] for name in CACHES), others)
    same(result, right)
    assert all(arrays[name].is_deleted() for name in CACHES)
    assert [x.unsafe_buffer_pointer() for x in result[2:]] == addresses


def test_donated_latent_rows_are_updated_in_place() -> None:
    given = latent(page_size=4)
    right = right_of(given, causal=True)
    static = {"v_cache": given.pop("v_cache"), "head_dim_v": given.pop("head_dim_v")}
    arrays = {name: jnp.asarray(x) for name, x in given.items()}
    k_cache = arrays.pop("k_cache") + 0
    address = k_cache.unsafe_buffer_pointer()

    @functools.partial(jax.jit, donate_argnames="k_cache")
    def attend(k_cache: Any, others: Any) -> Any:
        return anyflash.jax.attention_with_kvcache(
            k_cache=k_cache, **others, **static, causal=True, return_lse=True
        )

    result = attend(k_cache, arrays)
    same(result, right)
    assert len(result) == 3
    assert k_cache.is_deleted()
    assert result[2].unsafe_buffer_pointer() == address
    without = anyflash.jax.attention_with_kvcache(**given, **static, causal=True)
    same(without, (right[0], right[2]))


def test_vmap_of_latent_rows() -> None:
    given = latent()
    mapped = {"k_cache": np.stack([given.pop("k_cache")] * 2)}
    mapped["k_cache"][1] *= 3

    def attend(mapped: Any) -> Any:
        return anyflash.jax.attention_with_kvcache(**given, **mapped, return_lse=True)

    results = jax.vmap(attend)(mapped)
    for i in range(2):
        right = right_of(given | {"k_cache": mapped["k_cache"][i]})
        same(jax.tree.map(lambda x: x[i], results), right)  # noqa: B023


def test_errors_of_latent_rows() -> None:
    given = latent()
    attend = anyflash.jax.attention_with_kvcache
    name = r"anyflash\.jax\.attention_with_kvcache: "
    for changes, error, message in (
        ({"head_dim_v": None}, ValueError, "v_cache is missing; it, or head_dim_v"),
        ({"v_cache": given["k_cache"]}, ValueError, "v_cache is given with head_dim_v"),
        ({"v": given["k"]}, ValueError, "v is given with head_dim_v"),
        ({"head_dim_v": 21}, ValueError, "head_dim_v is 21; 1 to 20, the columns of k_cache"),
        ({"head_dim_v": 1.0}, TypeError, "head_dim_v is float; an int is allowed"),
        ({"k_cache": given["k_cache"][0]}, ValueError, "k_cache has 3 dimensions"),
    ):
        with pytest.raises(error, match=name + message):
            jax.jit(lambda q: attend(**given | changes | {"q": q}))(given["q"])  # noqa: B023


def test_generation_in_a_scan() -> None:
    given = call()
    step = {name: given[name][:, :1] for name in ("q", "k", "v")}
    copies = {name: given[name].copy() for name in CACHES}
    lengths = given["cache_seqlens"]
    right = []
    for i in range(2):
        right.append(
            anyflash.attention_with_kvcache(
                **step, **copies, cache_seqlens=lengths + i, causal=True
            )
        )

    def one(caches: Any, i: Any) -> Any:
        out, *caches = anyflash.jax.attention_with_kvcache(
            **step, k_cache=caches[0], v_cache=caches[1], cache_seqlens=lengths + i, causal=True
        )
        return tuple(caches), out

    caches = tuple(given[name] for name in CACHES)
    last, out = jax.jit(lambda caches: jax.lax.scan(one, caches, jnp.arange(2)))(caches)
    same(out, np.stack(right))
    same(last, tuple(copies.values()))


def test_without_new_keys() -> None:
    given = {name: x for name, x in call(new=0).items() if name not in ("k", "v")}
    right = right_of(given)
    same(anyflash.jax.attention_with_kvcache(**given), right[0])
    same(anyflash.jax.attention_with_kvcache(**given, return_lse=True), right[:2])
    given["cache_seqlens"] = 5
    copies = given | {"cache_seqlens": np.full(len(given["q"]), 5, np.int32)}
    same(anyflash.jax.attention_with_kvcache(**given), right_of(copies)[0])


@pytest.mark.parametrize("axes", [(2,), (0, 2), (0, 1, 2)], ids=["head", "place", "row"])
@pytest.mark.parametrize("dtype", [np.int8, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2])
def test_eight_bits(dtype: Any, axes: tuple[int, ...]) -> None:
    given = call()
    for name, of in (("k_cache", "k_scale"), ("v_cache", "v_scale")):
        given[name] = (given[name] * 10).astype(dtype)
        shape = tuple(given[name].shape[axis] for axis in axes)
        given[of] = np.linspace(0.05, 0.15, math.prod(shape), dtype=np.float32).reshape(shape)
    same(
        anyflash.jax.attention_with_kvcache(**given, causal=True, return_lse=True),
        right_of(given, causal=True),
    )


def test_vmap() -> None:
    given = call()
    mapped = {name: np.stack([given.pop(name)] * 2) for name in ("q", "k_cache")}
    mapped["q"][1] *= 2
    mapped["k_cache"][1] *= 3

    def attend(mapped: Any) -> Any:
        return anyflash.jax.attention_with_kvcache(**given, **mapped, return_lse=True)

    results = jax.vmap(attend)(mapped)
    for i in range(2):
        part = {name: x[i] for name, x in mapped.items()}
        same(jax.tree.map(lambda x: x[i], results), right_of(given | part))  # noqa: B023


def test_errors() -> None:
    given = call()
    attend = anyflash.jax.attention_with_kvcache
    name = r"anyflash\.jax\.attention_with_kvcache: "
    with pytest.raises(NotImplementedError, match=name + ".*no derivative"):
        jax.grad(lambda q: attend(**given | {"q": q})[0].sum())(given["q"])
    with pytest.raises(ValueError, match=name + "k has shape"):
        attend(**given | {"k": given["k"][..., :3]})
    with pytest.raises(ValueError, match=name + "k_cache has 3 dimensions"):
        attend(**given | {"k_cache": given["k_cache"][0]})
    with pytest.raises(TypeError, match=name + "cache_seqlens is float32"):
        attend(**given | {"cache_seqlens": given["cache_seqlens"].astype(np.float32)})
    with pytest.raises(ValueError, match=name + "cache_seqlens is -1"):
        attend(**given | {"cache_seqlens": -1})
    with pytest.raises(ValueError, match=name + "cache_seqlens is 14; 0 to 13 is .*k_cache has"):
        attend(**given | {"cache_seqlens": 14})
    with pytest.raises(ValueError, match=name + "cache_seqlens is 14; .*block_table has room for"):
        attend(**call(page_size=4) | {"cache_seqlens": 14})
    with pytest.raises(RuntimeError, match=name + "cache_seqlens"):
        jax.block_until_ready(attend(**given | {"cache_seqlens": given["cache_seqlens"] + 999}))
