"""anyflash.jax.attention and attention_varlen: results and gradients."""

from __future__ import annotations

import doctest
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import anyflash
import anyflash.jax
from anyflash.jax import _ffi
from calls.backward import OPTIONS
from calls.frameworks import EVERY_DTYPE, LARGE, random
from calls.jax_calls import arrays, cotangents, floats_of, narrow, numpy_gradients, same, x64
from oracle.attention import check, reference_of
from oracle.gradients import Given, check_gradients, gradient_bounds
from oracle.problem import Problem

__all__ = ["narrow"]

FEATURES = {
    name: OPTIONS[name]
    for name in (
        *("plain", "scale", "window-causal", "alibi-batch", "bias", "bias-heads", "bias-1"),
        *("bias-rows", "bias-inf", "keep", "blocks", "seqused", "all"),
    )
}
EVERY_FEATURE = pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
ENDS = np.array([0, 4, 4, 30], np.int32), np.array([0, 9, 12, 50], np.int32)
PACKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {
        "bias": random(3, 4, 26, 40),
        "alibi_slopes": random(3, 4),
        "sinks": random(4),
        "seqused_k": np.array([9, 2, 20], np.int32),
        "softcap": 0.7,
        "causal": True,
        "window_size": (20, 0),
        "dropout_p": 0.25,
        "seed": 1 << 40,
    },
}
EVERY_PACKED = pytest.mark.parametrize("options", PACKED.values(), ids=PACKED)


def packed_arrays() -> dict[str, Any]:
    return {name: x[0] for name, x in arrays().items()}


def launches(op: str) -> int:
    return sum(row["launches"] for row in anyflash.build_info()["kernels"] if row["op"] == op)


# Results ------------------------------------------------------------------------------------------


@EVERY_FEATURE
def test_same_bits_as_numpy(options: dict[str, Any]) -> None:
    given = arrays() | options
    asked = {"return_max_logits": True, "return_dropout_mask": True}
    right = anyflash.attention(**given, **asked)
    before = launches("forward")
    result = anyflash.jax.attention(**given, **asked)
    for name in ("out", "lse", "max_logits", "dropout_mask"):
        same(getattr(result, name), getattr(right, name), name)
    assert launches("forward") == before + 1
    assert isinstance(result.out, jax.Array)


def verify(dtype: str, **sizes: Any) -> None:
    options = {"causal": True, "softcap": 0.7, "bias": random(2, 1, 30, 50), "sinks": random(4)}
    given = arrays(dtype, **sizes) | options
    problem = Problem(**given)
    out, lse = anyflash.jax.attention(**given, return_lse=True)
    check(np.asarray(out), np.asarray(lse), reference_of(problem))

    dout, dlse = cotangents(out, lse)
    attend = functools.partial(anyflash.jax.attention, causal=True, softcap=0.7, return_lse=True)
    floats = floats_of(given)
    gradients = jax.vjp(lambda x: attend(**x), floats)[1]((dout, dlse))[0]
    expected = gradient_bounds(Given(problem, dout, dlse, np.asarray(out), np.asarray(lse)))
    check_gradients({f"d{name}": np.asarray(x) for name, x in gradients.items()}, expected)


@EVERY_DTYPE
@x64(True)
def test_against_the_oracle(dtype: str) -> None:
    verify(dtype)


@LARGE
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_head_dims(dtype: str, head_dims: tuple[int, int]) -> None:
    verify(dtype, head_dims=head_dims)


@EVERY_PACKED
def test_packed_same_bits_as_numpy(options: dict[str, Any]) -> None:
    given = packed_arrays() | options
    lengths = {"max_seqlen_q": 26, "max_seqlen_k": 40}
    ends = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ENDS, strict=True))
    attend = jax.jit(
        lambda ends: anyflash.jax.attention_varlen(**given, **ends, **lengths, return_lse=True)
    )
    same(attend(ends), anyflash.attention_varlen(**given, **ends, **lengths, return_lse=True))


def test_out_dtype() -> None:
    given = arrays("bfloat16")
    for dtype in ("float32", jnp.float32):
        out = anyflash.jax.attention(**given, out_dtype=dtype)
        same(out, anyflash.attention(**given, out_dtype="float32"))


def test_masked_rows() -> None:
    given = arrays() | {"bias": np.arange(30)[:, None] >= np.arange(50) + 10}
    out, lse = anyflash.jax.attention(**given, return_lse=True)
    same((out, lse), anyflash.attention(**given, return_lse=True))
    assert np.isneginf(lse[:, :, :10]).all()
    assert not np.asarray(out[:, :10]).any()
    gradients = jax.grad(lambda x: anyflash.jax.attention(**x, bias=given["bias"]).sum())(
        floats_of(given)
    )
    assert all(np.isfinite(x).all() for x in gradients.values())


def test_inputs_are_not_changed() -> None:
    given = {name: jnp.asarray(x) for name, x in arrays().items()}
    copies = {name: np.array(x) for name, x in given.items()}
    jax.grad(lambda x: anyflash.jax.attention(**x).sum())(given)
    same(given, copies)


# Gradients ----------------------------------------------------------------------------------------


@EVERY_FEATURE
def test_gradients_same_bits_as_numpy(options: dict[str, Any]) -> None:
    given = arrays() | options
    floats = floats_of(given)
    others = {name: x for name, x in given.items() if name not in floats}
    results = anyflash.attention(**given, return_lse=True)
    dout, dlse = cotangents(*results)
    right = numpy_gradients(given, dout, dlse)

    def attend(floats: Any) -> Any:
        return anyflash.jax.attention(**floats, **others, return_lse=True)

    before = launches("backward")
    primals, pull = jax.vjp(attend, floats)
    same(primals, results)
    same(pull((dout, dlse))[0], right)
    assert launches("backward") == before + 1


@EVERY_PACKED
def test_packed_gradients_same_bits_as_numpy(options: dict[str, Any]) -> None:
    given = packed_arrays() | options
    packed = (*ENDS, 26, 40)
    floats = floats_of(given)
    others = {name: x for name, x in given.items() if name not in floats}
    lengths = {"max_seqlen_q": 26, "max_seqlen_k": 40, "return_lse": True}

    @jax.jit
    def attend(floats: Any, begin_q: Any, begin_k: Any) -> Any:
        ends = {"cu_seqlens_q": begin_q, "cu_seqlens_k": begin_k}
        return anyflash.jax.attention_varlen(**floats, **others, **ends, **lengths)

    results, pull = jax.vjp(lambda x: attend(x, *ENDS), floats)
    dout, dlse = cotangents(*results)
    same(pull((dout, dlse))[0], numpy_gradients(given, dout, dlse, packed))


@pytest.mark.parametrize("used", ["out", "lse"])
def test_one_result_is_used(used: str) -> None:
    given = arrays() | {"sinks": random(4)}
    results = anyflash.attention(**given, return_lse=True)
    cotangents_of = dict(zip(("out", "lse"), cotangents(*results), strict=True))
    zeros = {name: np.zeros_like(x) for name, x in cotangents_of.items() if name != used}
    right = numpy_gradients(given, **{f"d{name}": x for name, x in (cotangents_of | zeros).items()})

    def loss(given: Any) -> Any:
        result = anyflash.jax.attention(**given, return_result=True)
        return (getattr(result, used) * cotangents_of[used]).sum()

    same(jax.grad(loss)(given), right)


def test_only_what_is_wanted_is_computed() -> None:
    """The gradient of a bias may be as large as the matrix of scores."""
    given = arrays() | {"bias": random(2, 4, 30, 50), "sinks": random(4)}

    def loss(floats: Any, bias: Any) -> Any:
        return anyflash.jax.attention(**floats, bias=bias).sum()

    bias = given.pop("bias")
    for arguments, wanted in ((0, False), ((0, 1), True)):
        text = jax.jit(jax.grad(loss, argnums=arguments)).lower(given, bias).as_text()
        assert "dsinks" in text
        assert ("dbias" in text) == wanted


def test_one_function_differentiated_twice() -> None:
    """What is perturbed differs from call to call of one compiled function."""
    given = arrays() | {"bias": random(2, 4, 30, 50), "sinks": random(4)}
    attend = jax.jit(lambda x: anyflash.jax.attention(**x, causal=True).sum())
    every = jax.grad(attend)(given)
    for names in (("q",), ("sinks", "k")):
        part = {name: given[name] for name in names}
        gradients = jax.grad(lambda x: attend(given | x))(part)
        same(gradients, {name: every[name] for name in names})


def test_deterministic() -> None:
    given = arrays()
    text = jax.jit(jax.grad(lambda x: anyflash.jax.attention(**x, deterministic=True).sum())).lower(
        given
    )
    assert "deterministic = true" in text.as_text()


def test_no_forward_mode() -> None:
    given = arrays()
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: anyflash.jax.attention(q, given["k"], given["v"]), *[(given["q"],)] * 2)


EXAMPLES = ["_attention", "_varlen", "_kvcache", "_dot_product_attention", "_context_parallel"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"anyflash.jax.{name}")
    assert doctest.testmod(module).failed == 0


# Dropout ------------------------------------------------------------------------------------------

DROPOUT = {"dropout_p": 0.5}
SEED = (5 << 32) + 7


def test_seeds() -> None:
    """All forms of one seed drop what NumPy's drops, traced or not."""
    given = {name: x[:1, :4] for name, x in arrays().items()} | DROPOUT
    words = np.array([7, 5, 9, 0], np.uint32)
    attend = functools.partial(anyflash.jax.attention, **given)
    right = anyflash.attention(**given, seed=SEED)
    for seed in (SEED, jax.random.wrap_key_data(jnp.array([5, 7], jnp.uint32))):
        same(attend(seed=seed), right)
        if seed is not SEED:
            same(jax.jit(lambda seed: attend(seed=seed))(seed), right)
    small = anyflash.attention(**given, seed=7)
    for seed in (jnp.int32(7), jax.random.key(7), jax.random.PRNGKey(7), np.uint32(7)):
        same(attend(seed=seed), small)
    right = anyflash.attention(**given, rng_state=(SEED, 9))
    for state in ((SEED, 9), words, words.view(np.int64), words.view(np.uint64)):
        same(attend(rng_state=state), right)
    result = attend(rng_state=jnp.asarray(words), return_result=True)
    same(result.rng_state, words)
    same(attend(rng_state=result.rng_state), right)


@x64(True)
def test_seeds_of_64_bits() -> None:
    given = arrays() | DROPOUT
    right = anyflash.attention(**given, seed=SEED)
    attend = jax.jit(lambda **more: anyflash.jax.attention(**given, **more))
    same(attend(seed=jnp.asarray(SEED)), right)
    for dtype in (jnp.int64, jnp.uint64):
        same(attend(rng_state=jnp.array([SEED, 0], dtype)), right)


# Errors -------------------------------------------------------------------------------------------

Q, K, V = arrays().values()


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"k": K[..., :3]}, ValueError, r"k has shape \(2, 50, 2, 3\); expected"),
        ({"k": K[0]}, ValueError, "k has 3 dimensions.*expected 4"),
        ({"q": Q[:, :, :3]}, ValueError, "k has 2 heads"),
        ({"q": Q.astype(np.int32)}, TypeError, "q is int32"),
        ({"q": Q.astype(np.complex64)}, TypeError, "q is complex64"),
        ({"v": V.astype(np.float16)}, TypeError, "v is float16"),
        ({"q": [1.0]}, TypeError, "q is list; an array of JAX or NumPy is allowed"),
        ({"bias": random(2, 3, 30, 50)}, ValueError, "bias has shape"),
        ({"bias": random(1, 2, 4, 30, 50)}, ValueError, "bias has 5 dimensions"),
        ({"sinks": random(3)}, ValueError, "sinks has shape"),
        ({"seqused_k": np.ones(2, np.float32)}, TypeError, "seqused_k is float32"),
        ({"softcap": -1}, ValueError, "softcap is -1.0"),
        ({"window_size": 3}, TypeError, "window_size is int"),
        ({"block_mask": np.ones((1, 1, 1, 2), bool)}, ValueError, "block_mask has shape"),
        ({"dropout_p": 0.5}, ValueError, "dropout_p needs a seed: JAX has no global"),
        ({"dropout_p": 0.5, "seed": -1}, ValueError, "seed is -1"),
        ({"dropout_p": 0.5, "seed": np.ones(3)}, TypeError, r"seed is float64 of shape \(3,\)"),
        ({"dropout_p": 0.5, "seed": 1, "rng_state": (1, 2)}, ValueError, "seed and rng_state"),
        ({"dropout_p": 0.5, "rng_state": np.ones(2)}, TypeError, "rng_state is float64"),
        ({"out_dtype": "float16"}, TypeError, "out_dtype is float16"),
        ({"softmax_scale": "1"}, TypeError, "softmax_scale is str"),
    ],
)
def test_errors(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    """When the call is traced."""
    given = {"q": Q, "k": K, "v": V} | change
    with pytest.raises(kind, match=r"anyflash\.jax\.attention: " + message):
        jax.eval_shape(lambda: anyflash.jax.attention(**given))


def test_errors_when_it_runs() -> None:
    given = packed_arrays()
    ends = np.array([0, 4, 4, 29], np.int32), ENDS[1]
    message = r"anyflash\.jax\.attention_varlen: cu_seqlens_q\[3\] is 29"
    with pytest.raises(RuntimeError, match=message):
        jax.block_until_ready(anyflash.jax.attention_varlen(*given.values(), *ends, 26, 40))


def test_without_handlers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "_HANDLERS", [])
    message = (
        r"anyflash\.jax\.attention: this build of anyflash has no XLA handlers; build it where"
    )
    with pytest.raises(NotImplementedError, match=message):
        anyflash.jax.attention(Q, K, V)


def test_the_neutral_function_comes_here() -> None:
    """Where arrays are traced."""
    given = arrays()
    same(jax.jit(lambda x: anyflash.attention(**x))(given), anyflash.attention(**given))
    gradients = jax.grad(lambda x: anyflash.attention(**x).sum())(given)
    same(gradients, jax.grad(lambda x: anyflash.jax.attention(**x).sum())(given))
