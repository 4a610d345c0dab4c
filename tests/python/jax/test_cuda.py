"""anyflash.jax on a GPU, against the same calls on the CPU in float32."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anyflash
import anyflash.jax
from backends import capi
from calls.backward import OPTIONS
from calls.frameworks import LARGE, random
from calls.jax_calls import arrays, floats_of, narrow, same

__all__ = ["narrow"]


def _has_gpu() -> bool:
    try:
        return capi.cuda_driver() is not None and bool(jax.devices("cuda"))
    except RuntimeError:
        return False


pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not _has_gpu(), reason="no CUDA device that JAX can use"),
]

FEATURES = {
    name: OPTIONS[name]
    for name in (
        *("plain", "window-causal", "softcap", "alibi", "alibi-batch", "bias", "bias-1", "keep"),
        *("bias-inf", "blocks", "sinks", "seqused", "dropout", "all"),
    )
}
EVERY_FEATURE = pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}
EVERY_DTYPE = pytest.mark.parametrize("dtype", TOLERANCE)


def on_gpu(tree: Any) -> Any:
    return jax.tree.map(functools.partial(jax.device_put, device=jax.devices("cuda")[0]), tree)


def near(actual: Any, right: Any, dtype: str, name: str = "") -> None:
    actual, right = np.asarray(actual, np.float64), np.asarray(right, np.float64)
    assert actual.shape == right.shape
    finite = np.isfinite(right)
    assert (np.isfinite(actual) == finite).all(), name
    error = np.abs(actual[finite] - right[finite]).max(initial=0)
    assert error <= TOLERANCE[dtype] * np.abs(right[finite]).max(initial=1), (name, error)


def widened(given: Any) -> Any:
    """The same numbers as float32."""
    narrow_floats = ("float16", "bfloat16")
    return jax.tree.map(
        lambda x: np.asarray(x, np.float32) if x.dtype.name in narrow_floats else x, given
    )


def launches(op: str) -> int:
    rows = anyflash.build_info()["kernels"]
    return sum(r["launches"] for r in rows if r["op"] == op and r["arch"].startswith("sm"))


def verify(options: dict[str, Any], dtype: str, **sizes: Any) -> None:
    """Compiled; also through the LSE, and with a bias whose gradient nobody wants."""
    tensors = {k: x for k, x in options.items() if isinstance(x, np.ndarray)}
    given = arrays(dtype, **sizes) | tensors
    numbers = {k: x for k, x in options.items() if not isinstance(x, np.ndarray)}
    others = {name: x for name, x in given.items() if name not in floats_of(given)}

    def attend(floats: Any, others: Any) -> Any:
        return anyflash.jax.attention(**floats, **others, **numbers, return_lse=True)

    def loss(floats: Any, others: Any) -> Any:
        out, lse = attend(floats, others)
        return (out.astype(jnp.float32) ** 2).sum() + jnp.where(jnp.isfinite(lse), lse, 0).sum()

    floats = floats_of(given)
    right = anyflash.attention(**widened(given), **numbers, return_lse=True)
    before = launches("forward"), launches("backward")
    results = jax.jit(attend)(on_gpu(floats), on_gpu(others))
    gradients = jax.jit(jax.grad(loss))(on_gpu(floats), on_gpu(others))
    assert (launches("forward"), launches("backward")) == (before[0] + 2, before[1] + 1)
    for actual, expected in zip(results, right, strict=True):
        near(actual, expected, dtype)
    expected = jax.grad(loss)(widened(floats), others)
    for name, x in gradients.items():
        assert x.dtype == floats[name].dtype
        near(x, expected[name], dtype, name)


@EVERY_DTYPE
@EVERY_FEATURE
def test_results_and_gradients(options: dict[str, Any], dtype: str) -> None:
    verify(options, dtype)


@LARGE
@EVERY_DTYPE
@pytest.mark.parametrize("name", ["window-causal", "all"])
def test_large_head_dims(name: str, dtype: str, head_dims: tuple[int, int]) -> None:
    verify(FEATURES[name], dtype, head_dims=head_dims)


def test_dropout_is_the_same_as_on_the_cpu() -> None:
    given = arrays("float16") | {"dropout_p": 0.3}
    right = anyflash.attention(**given, seed=(5 << 32) + 7, return_dropout_mask=True)
    words = on_gpu(np.array([7, 5, 0, 0], np.uint32))
    gpu = on_gpu(arrays("float16"))
    attend = jax.jit(
        lambda gpu, state: (
            anyflash.jax.attention(
                **gpu, dropout_p=0.3, rng_state=state, return_dropout_mask=True
            ).dropout_mask
        )
    )
    same(attend(gpu, words), right.dropout_mask)


def test_packed() -> None:
    given = {name: x[0] for name, x in arrays("float16").items()}
    ends = np.array([0, 4, 4, 30], np.int32), np.array([0, 9, 12, 50], np.int32)
    ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    options = {"max_seqlen_q": 26, "max_seqlen_k": 40, "causal": True}
    right = anyflash.attention_varlen(**widened(given), **ends, **options)
    attend = jax.jit(lambda given, ends: anyflash.jax.attention_varlen(**given, **ends, **options))
    near(attend(on_gpu(given), on_gpu(ends)), right, "float16")


def test_vmap_and_scan() -> None:
    given = arrays("float16")
    q = np.stack([given["q"], given["q"] * 2])
    k, v = widened(given["k"]), widened(given["v"])
    right = [anyflash.attention(x, k, v) for x in widened(q)]
    gpu = on_gpu(given | {"q": q})
    attend = jax.jit(jax.vmap(anyflash.jax.attention, in_axes=(0, None, None)))
    near(attend(gpu["q"], gpu["k"], gpu["v"]), np.stack(right), "float16")

    def one(carry: Any, q: Any) -> Any:
        return carry, anyflash.jax.attention(q, gpu["k"], gpu["v"])

    near(jax.jit(lambda q: jax.lax.scan(one, 0, q)[1])(gpu["q"]), np.stack(right), "float16")


def test_deterministic_gradients() -> None:
    gpu = on_gpu({name: np.tile(x, (2, 8, 1, 1)) for name, x in arrays("float16").items()})

    @jax.jit
    def gradients(gpu: Any) -> Any:
        def loss(gpu: Any) -> Any:
            out = anyflash.jax.attention(**gpu, deterministic=True)
            return (out.astype(jnp.float32) ** 2).sum()

        return jax.grad(loss)(gpu)

    first = gradients(gpu)
    for _ in range(3):
        same(gradients(gpu), first)


def test_nothing_else_is_written() -> None:
    """Neither inputs nor what XLA keeps beside them, whatever workspace the core needs."""
    gpu = on_gpu({name: x[..., :11] for name, x in arrays("float16").items()})  # rows of 22 bytes
    copies = jax.tree.map(np.array, gpu)
    beside = [on_gpu(random(64, 1024)) for _ in range(8)]
    right = [np.array(x) for x in beside]
    for _ in range(3):
        jax.block_until_ready(jax.grad(lambda x: anyflash.jax.attention(**x).sum())(gpu))
    same(gpu, copies)
    same(tuple(beside), tuple(right))


def test_caches_in_place() -> None:
    make = np.random.default_rng(0).standard_normal
    cache = (2, 64, 2, 64)
    given = {
        **{"q": make((2, 1, 8, 64)), "k_cache": make(cache), "v_cache": make(cache)},
        **{"k": make((2, 1, 2, 64)), "v": make((2, 1, 2, 64))},
    }
    given = {name: x.astype(np.float16) for name, x in given.items()}
    lengths = np.array([3, 40], np.int32)
    copies = widened(given)
    right = anyflash.attention_with_kvcache(**copies, cache_seqlens=lengths, causal=True)
    gpu = on_gpu(given)
    addresses = [gpu[name].unsafe_buffer_pointer() for name in ("k_cache", "v_cache")]

    @functools.partial(jax.jit, donate_argnames=("k_cache", "v_cache"))
    def step(k_cache: Any, v_cache: Any, others: Any, lengths: Any) -> Any:
        return anyflash.jax.attention_with_kvcache(
            k_cache=k_cache, v_cache=v_cache, **others, cache_seqlens=lengths, causal=True
        )

    caches = [gpu.pop(name) for name in ("k_cache", "v_cache")]
    out, *caches = step(*caches, gpu, on_gpu(lengths))
    near(out, right, "float16")
    same(caches[0], copies["k_cache"].astype(np.float16))
    same(caches[1], copies["v_cache"].astype(np.float16))
    assert [x.unsafe_buffer_pointer() for x in caches] == addresses


def test_the_neutral_function_comes_here() -> None:
    gpu = on_gpu(arrays("float16"))
    same(anyflash.attention(**gpu), anyflash.jax.attention(**gpu))


def test_errors() -> None:
    with pytest.raises(RuntimeError, match=r"anyflash\.jax\.attention: .*float32"):
        jax.block_until_ready(anyflash.jax.attention(**on_gpu(arrays("float32"))))
