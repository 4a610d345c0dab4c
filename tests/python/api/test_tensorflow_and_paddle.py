"""anyflash with tensors of TensorFlow and Paddle, where they are installed."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from calls.backward import NUMPY, OPTIONS, Case
from calls.frameworks import EVERY_DTYPE, MORE_KINDS, Kind, bits, inputs, where_installed

BOTH = pytest.mark.parametrize("kind", [*map(where_installed, MORE_KINDS)])
TENSORFLOW, PADDLE = MORE_KINDS


@pytest.fixture(params=[where_installed(TENSORFLOW)])
def tf(request: pytest.FixtureRequest) -> ModuleType:
    return request.param.module


@pytest.fixture(params=[where_installed(PADDLE)])
def paddle(request: pytest.FixtureRequest) -> ModuleType:
    return request.param.module


# Both ---------------------------------------------------------------------------------------------


@BOTH
@EVERY_DTYPE
def test_attention(kind: Kind, dtype: str) -> None:
    arrays = inputs(dtype)
    given = kind.give([*arrays])
    out, lse = anyflash.attention(*given, causal=True, return_lse=True)
    assert type(out) is type(lse) is type(given[0])
    assert (out.dtype, str(lse.dtype).count("float32")) == (given[0].dtype, 1)
    expected, expected_lse = anyflash.attention(*arrays, causal=True, return_lse=True)
    assert bits(kind.take(out)) == bits(expected)
    assert bits(kind.take(lse)) == bits(expected_lse)
    assert [bits(kind.take(x)) for x in given] == [*map(bits, arrays)], "an input was written to"


@BOTH
def test_options(kind: Kind) -> None:
    """bool masks, int32, dropout; every field of the result is of the framework."""
    q, k, v = inputs()
    options = {
        "bias": np.random.default_rng(1).random((30, 50)) > 0.3,
        "block_mask": np.ones((1, 1), bool),
        "seqused_k": np.array([40, 9], np.int32),
        "sinks": np.arange(4, dtype=np.float32),
        "dropout_p": 0.3,
        "seed": 5,
    }
    flags = {"return_max_logits": True, "return_dropout_mask": True}
    expected = anyflash.attention(q, k, v, **options, **flags)
    given = kind.give([q, k, v])
    result = anyflash.attention(*given, **kind.give(options), **flags)
    assert result.rng_state == (5, 0)
    for name in ("out", "lse", "max_logits", "dropout_mask"):
        actual = getattr(result, name)
        assert type(actual) is type(given[0])
        assert bits(kind.take(actual)) == bits(getattr(expected, name))


@BOTH
def test_varlen(kind: Kind) -> None:
    q, k, v = (x[0] for x in inputs())
    ends = np.array([0, 7, 7, 30], np.int32), np.array([0, 20, 30, 50], np.int32)
    expected = anyflash.attention_varlen(q, k, v, *ends, 23, 20, causal=True)
    out = anyflash.attention_varlen(*kind.give([q, k, v, *ends]), 23, 20, causal=True)
    assert bits(kind.take(out)) == bits(expected)


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_backward(kind: Kind, dtype: str) -> None:
    case = Case(OPTIONS["all"], dtype, dlse=True)
    expected = case.backward(NUMPY, **case.asked)
    given = case.forward(kind)
    grads = anyflash.attention_backward(**given, **case.asked)
    for actual, right in zip(grads, expected, strict=True):
        assert type(actual) is type(given["q"])
        assert bits(kind.take(actual)) == bits(right)


@BOTH
@pytest.mark.parametrize("cache_dtype", ["float32", "int8", "float8_e4m3fn"])
def test_read_cache(kind: Kind, cache_dtype: str) -> None:
    """Without new keys; pages, lengths as an int, 8 bits."""
    q = inputs()[0][:, :2, :, :16].copy()
    dtype = getattr(ml_dtypes, cache_dtype, cache_dtype)
    caches = np.random.default_rng(3).normal(0, 40, (2, 6, 16, 2, 16)).astype(dtype)
    table = np.array([[5, 0], [2, 4]], np.int32)
    options = {"cache_seqlens": 23, "causal": True, "return_lse": True}
    if cache_dtype != "float32":
        options["k_scale"] = options["v_scale"] = np.array([0.01, 0.02], np.float32)
    arguments = [q, *caches]
    expected = anyflash.attention_with_kvcache(*arguments, block_table=table, **options)
    given = {**kind.give(options), "block_table": kind.give(table)}
    actual = anyflash.attention_with_kvcache(*kind.give(arguments), **given)
    for one, right in zip(actual, expected, strict=True):
        assert bits(kind.take(one)) == bits(right)


@BOTH
def test_out_dtype_and_block_mask(kind: Kind) -> None:
    arrays = inputs("bfloat16")
    given = kind.give([*arrays])
    expected = anyflash.attention(*arrays, out_dtype="float32")
    for dtype in ("float32", kind.give(expected).dtype):
        assert bits(kind.take(anyflash.attention(*given, out_dtype=dtype))) == bits(expected)
    mask = anyflash.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 200, 200, like=given[0])
    assert type(mask) is type(given[0])
    right = anyflash.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, 200, 200)
    assert bits(kind.take(mask)) == bits(right)


@BOTH
def test_merge_states(kind: Kind) -> None:
    q, k, v = inputs()
    expected = anyflash.attention(q, k, v)
    q, k, v = kind.give([q, k, v])
    parts = [
        anyflash.attention(q, k[:, s], v[:, s], return_lse=True) for s in (slice(20), slice(20, 50))
    ]
    out, lse = anyflash.merge_states(*parts[0], *parts[1])
    assert type(out) is type(lse) is type(q)
    np.testing.assert_allclose(kind.take(out), expected, rtol=1e-5, atol=1e-6)


@BOTH
@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8)])
def test_empty(kind: Kind, shape: tuple[int, ...]) -> None:
    x = kind.give(np.zeros(shape, np.float32))
    assert tuple(anyflash.attention(x, x, x).shape) == shape


@BOTH
def test_frameworks_do_not_mix(kind: Kind) -> None:
    q, k, v = inputs()
    with pytest.raises(
        TypeError, match=r"anyflash\.attention: k is .*NumPy.*q is .*(Tensor|Paddle)"
    ):
        anyflash.attention(kind.give(q), k, v)
    with pytest.raises(TypeError, match=r"anyflash\.attention: q is int64; .* allowed"):
        anyflash.attention(*[kind.give(np.ones((1, 2, 1, 4), np.int64))] * 3)


@BOTH
def test_results_are_computed_with(kind: Kind) -> None:
    """They are tensors like any other, and outlive one another."""
    arrays = inputs()
    q, k, v = kind.give([*arrays])
    results = [anyflash.attention(q * i, k, v) * 2.0 for i in range(1, 6)]
    for i, result in enumerate(results, 1):
        expected = anyflash.attention(arrays[0] * np.float32(i), *arrays[1:]) * 2
        np.testing.assert_array_equal(kind.take(result), expected)


# TensorFlow ---------------------------------------------------------------------------------------


def test_tensorflow_tape(tf: ModuleType) -> None:
    """Gradients are not dropped silently."""
    q, k, v = map(tf.constant, inputs())
    with tf.GradientTape() as tape:
        anyflash.attention(q, k, v)
        tape.watch(v)
        with pytest.raises(
            NotImplementedError, match=r"attention: v is watched.*attention_backward"
        ):
            anyflash.attention(q, k, v)
        with pytest.raises(NotImplementedError, match=r"attention: q is watched"):
            anyflash.attention(q + v[:, :30, :1, :1], k, v)
        stopped = anyflash.attention(q, k, tf.stop_gradient(v))
        with tape.stop_recording():
            assert bits(anyflash.attention(q, k, v).numpy()) == bits(stopped.numpy())
    anyflash.attention(q, k, v)


def test_tensorflow_gradient_of_ones_own(tf: ModuleType) -> None:
    """attention_backward as a custom gradient, in eager mode."""
    case = Case()
    q, k, v = (tf.constant(case.arrays[name]) for name in "qkv")
    dout = tf.constant(case.dout)

    @tf.custom_gradient
    def attention(q: Any, k: Any, v: Any) -> Any:
        given = [tf.stop_gradient(x) for x in (q, k, v)]
        out, lse = anyflash.attention(*given, return_lse=True)
        return out, lambda dout: anyflash.attention_backward(dout, *given, out, lse)[:3]

    with tf.GradientTape() as tape:
        tape.watch([q, k, v])
        out = attention(q, k, v)
    grads = tape.gradient(out, [q, k, v], dout)
    for actual, right in zip(grads, case.backward()[:3], strict=True):
        assert bits(actual.numpy()) == bits(right)


def test_tensorflow_function(tf: ModuleType) -> None:
    q, k, v = map(tf.constant, inputs())
    expected = anyflash.attention(q, k, v).numpy()
    with pytest.raises(TypeError, match=r"attention: q is .*tf\.py_function"):
        tf.function(anyflash.attention, autograph=False)(q, k, v)
    function = tf.function(lambda *x: tf.py_function(anyflash.attention, x, q.dtype))
    assert bits(function(q, k, v).numpy()) == bits(expected)


def test_tensorflow_variable(tf: ModuleType) -> None:
    q, k, v = inputs()
    variable = tf.Variable(q)
    with pytest.raises(TypeError, match=r"attention: q is ResourceVariable; .*value\(\)"):
        anyflash.attention(variable, k, v)
    out = anyflash.attention(variable.value(), tf.constant(k), tf.constant(v))
    assert bits(out.numpy()) == bits(anyflash.attention(q, k, v))


def test_tensorflow_is_immutable(tf: ModuleType) -> None:
    q, k, v = map(tf.constant, inputs())
    out = tf.zeros((2, 30, 4, 12))
    with pytest.raises(TypeError, match=r"attention: out is a TensorFlow tensor.*immutable"):
        anyflash.attention(q, k, v, out=out)
    assert not out.numpy().any()
    before = bits(k.numpy())
    with pytest.raises(TypeError, match=r"kvcache: k_cache is a TensorFlow tensor.*immutable"):
        anyflash.attention_with_kvcache(q, k, v, k[:, :1], v[:, :1], cache_seqlens=9)
    assert bits(k.numpy()) == before


def test_tensorflow_seed(tf: ModuleType) -> None:
    """tf.random.set_seed makes dropout repeatable."""
    q, k, v = map(tf.constant, inputs())
    taken = []
    for seed in (1, 1, 2):
        tf.random.set_seed(seed)
        taken += [anyflash.attention(q, k, v, dropout_p=0.5).numpy() for _ in range(2)]
    assert (bits(taken[0]), bits(taken[1])) == (bits(taken[2]), bits(taken[3]))
    assert len({bits(x) for x in taken}) == 4


# Paddle -------------------------------------------------------------------------------------------


def test_paddle_gradients_are_not_dropped(paddle: ModuleType) -> None:
    tensors = dict(zip("qkv", map(paddle.to_tensor, inputs()), strict=True))
    expected = anyflash.attention(**tensors).numpy()
    for name, x in tensors.items():
        x.stop_gradient = False
        match = rf"attention: {name} wants a gradient.*attention_backward"
        with pytest.raises(NotImplementedError, match=match):
            anyflash.attention(**tensors)
        with paddle.no_grad():
            assert bits(anyflash.attention(**tensors).numpy()) == bits(expected)
        x.stop_gradient = True
    layer = paddle.nn.Layer()
    parameter = layer.create_parameter([2, 30, 4, 20])
    with pytest.raises(NotImplementedError, match="q wants a gradient"):
        anyflash.attention(parameter, tensors["k"], tensors["v"])
    assert anyflash.attention(parameter.detach(), tensors["k"], tensors["v"]).stop_gradient


def test_paddle_views(paddle: ModuleType) -> None:
    arrays = inputs()
    expected = bits(anyflash.attention(*arrays))
    q, k, v = map(paddle.to_tensor, arrays)
    swapped = [x.transpose([0, 2, 1, 3]).contiguous().transpose([0, 2, 1, 3]) for x in (q, k, v)]
    assert not swapped[0].is_contiguous()
    assert bits(anyflash.attention(*swapped).numpy()) == expected


def test_paddle_out_and_cache(paddle: ModuleType) -> None:
    """Tensors are written in place."""
    q, k, v = inputs()
    caches = [k.copy(), v.copy()]
    new = [x[:, 10:13].copy() for x in (k, v)]
    expected = anyflash.attention_with_kvcache(q, *caches, *new, cache_seqlens=20)
    given = [paddle.to_tensor(x) for x in (q, k, v, *new)]
    out = paddle.zeros([2, 30, 4, 12])
    lengths = paddle.to_tensor([20, 20], dtype="int32")
    assert anyflash.attention_with_kvcache(*given, cache_seqlens=lengths, out=out) is out
    assert bits(out.numpy()) == bits(expected)
    assert [bits(x.numpy()) for x in given[1:3]] == [*map(bits, caches)]


def test_paddle_static_mode(paddle: ModuleType) -> None:
    paddle.enable_static()
    try:
        with paddle.static.program_guard(paddle.static.Program()):
            q = paddle.static.data("q", [2, 30, 4, 20], "float32")
            with pytest.raises(
                TypeError, match=r"attention: q is Value; tensors of the dynamic mode"
            ):
                anyflash.attention(q, q, q)
    finally:
        paddle.disable_static()


def test_paddle_sparse(paddle: ModuleType) -> None:
    q, k, v = map(paddle.to_tensor, inputs())
    with pytest.raises(TypeError, match=r"attention: k is a sparse"):
        anyflash.attention(q, k.to_sparse_coo(4), v)


def test_paddle_seed(paddle: ModuleType) -> None:
    """paddle.seed makes dropout repeatable."""
    q, k, v = map(paddle.to_tensor, inputs())
    taken = []
    for seed in (1, 1, 2):
        paddle.seed(seed)
        taken += [anyflash.attention(q, k, v, dropout_p=0.5).numpy() for _ in range(2)]
    assert (bits(taken[0]), bits(taken[1])) == (bits(taken[2]), bits(taken[3]))
    assert len({bits(x) for x in taken}) == 4
