"""prior, lse and accumulate_*: keys of an attention in several calls, on arrays of NumPy."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import anyflash
from calls.launches import launches
from oracle.attention import Array

ROWS, KEYS = 60, 90
CUTS = (0, 17, 64, KEYS)


def tensors(dtype: type = np.float32) -> list[Array]:
    random = np.random.default_rng(1)
    shapes = ((2, ROWS, 4, 16), (2, KEYS, 2, 16), (2, KEYS, 2, 16))
    return [random.standard_normal(shape).astype(dtype) for shape in shapes]


def test_a_state_goes_from_call_to_call() -> None:
    q, k, v = tensors()
    state: Any = None
    for first, end in itertools.pairwise(CUTS):
        given = q, k[:, first:end], v[:, first:end]
        if state is None:
            state = anyflash.attention(*given, return_lse=True)
            continue
        targets = {"out": state[0], "lse": state[1]}
        found = anyflash.attention(*given, prior=state, **targets, return_lse=True)
        assert found[0] is state[0]
        assert found[1] is state[1]
    out, lse = anyflash.attention(q, k, v, return_lse=True)
    np.testing.assert_allclose(state[0], out, rtol=0, atol=1e-6)
    np.testing.assert_allclose(state[1], lse, rtol=0, atol=1e-6)


def test_another_array_for_the_result() -> None:
    """The state is left alone, and rounded only then."""
    q, k, v = (x.astype(np.float16) for x in tensors())
    wanted = {"out_dtype": "float32", "return_lse": True}
    state = anyflash.attention(q, k[:, :40], v[:, :40], **wanted)
    before = [x.copy() for x in state]
    out = anyflash.attention(q, k[:, 40:], v[:, 40:], prior=state)
    assert out.dtype == np.float16
    np.testing.assert_allclose(out, anyflash.attention(q, k, v), rtol=2e-3, atol=1e-3)
    for x, old in zip(state, before, strict=True):
        np.testing.assert_array_equal(x, old)


def test_packed() -> None:
    q, k, v = (x[0] for x in tensors())
    ends_q, ends_k = np.array([0, 20, ROWS], np.int32), np.array([0, 30, KEYS], np.int32)
    kept = [slice(0, 10), slice(30, 50)]
    first = [np.concatenate([x[part] for part in kept]) for x in (k, v)]
    rest = [np.concatenate([x[10:30], x[50:]]) for x in (k, v)]
    state = anyflash.attention_varlen(
        q, *first, ends_q, np.array([0, 10, 30], np.int32), 40, 20, return_lse=True
    )
    found = anyflash.attention_varlen(
        q, *rest, ends_q, np.array([0, 20, 60], np.int32), 40, 40, prior=state, return_lse=True
    )
    whole = anyflash.attention_varlen(q, k, v, ends_q, ends_k, 40, 60, return_lse=True)
    for x, expected in zip(found, whole, strict=True):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-6)


def test_gradients_add_up() -> None:
    q, k, v = tensors(np.float64)
    out, lse = anyflash.attention(q, k, v, return_lse=True)
    dout = np.cos(out)
    whole = anyflash.attention_backward(dout, q, k, v, out, lse)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for first, end in itertools.pairwise(CUTS):
        for rows in (slice(0, 25), slice(25, ROWS)):
            given = q[:, rows], k[:, first:end], v[:, first:end]
            anyflash.attention_backward(
                *(dout[:, rows], *given, out[:, rows], lse[..., rows]),
                **{"dq": dq[:, rows], "dk": dk[:, first:end], "dv": dv[:, first:end]},
                **{"accumulate_dq": True, "accumulate_dkv": True},
            )
    for x, expected in zip((dq, dk, dv), whole, strict=False):
        np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "launched"),
    [
        ({"causal": True, "part": anyflash.Part(0, ROWS)}, 0),
        ({"causal": True, "part": anyflash.Part(0, ROWS - 1)}, 1),  # the last row sees a key
        ({"window_size": (20, -1), "part": anyflash.Part(KEYS + 20, 0)}, 0),
        ({"window_size": (20, -1), "part": anyflash.Part(KEYS + 19, 0)}, 1),
        ({"causal": True, "part": anyflash.Part(0, ROWS), "sinks": np.ones(4, np.float32)}, 1),
        ({"causal": True, "part": anyflash.Part(np.zeros(2, np.int32), ROWS)}, 1),
    ],
)
def test_keys_that_nobody_sees_cost_no_launch(options: Any, launched: int) -> None:
    q, k, v = tensors()
    state = anyflash.attention(q, k, v, return_lse=True)
    before = [x.copy() for x in state]
    targets = {"out": state[0], "lse": state[1], "prior": state}
    assert launches(lambda: anyflash.attention(q, k, v, **targets, **options))[0] == launched
    if launched == 0:
        for x, expected in zip(state, before, strict=True):
            np.testing.assert_array_equal(x, expected)
    dq, dk, dv = (np.ones_like(x) for x in (q, k, v))
    added = {"dq": dq, "dk": dk, "dv": dv, "accumulate_dq": True, "accumulate_dkv": True}
    given = (before[0], q, k, v, *before)
    assert launches(lambda: anyflash.attention_backward(*given, **added, **options))[0] == (
        launched if "sinks" not in options else 0
    )
    if launched == 0:
        assert (dq == 1).all()
        assert (dk == 1).all()
    parts = {name: options[name] for name in options if name != "sinks"}
    assert launches(lambda: anyflash.attention(q, k, v, prior=state, **parts))[0] == 1


def state_of(shape: tuple[int, ...] = (2, ROWS, 4, 16), dtype: Any = np.float32) -> Any:
    return np.zeros(shape, dtype), np.zeros((2, 4, ROWS), np.float32)


out32, lse32 = state_of()
REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "array": (out32, TypeError, r"prior is .*ndarray.*; \(out, lse\) of other keys is allowed"),
    "three": ((out32, lse32, lse32), TypeError, "prior is 3 values; "),
    "dtype": ((out32.astype(np.float16), lse32), TypeError, "prior_out is float16; float32"),
    "wide": ((out32.astype(float), lse32), TypeError, "prior_out is float64; it must be float32"),
    "lse": ((out32, lse32.astype(np.float16)), TypeError, "prior_lse is float16; float32"),
    "shape": (
        (out32[:, 1:], lse32),
        ValueError,
        r"prior_out has shape \(2, 59, 4, 16\); expected \(2, 60, 4, 16\), as out",
    ),
    "lse-shape": ((out32, lse32[:, :, 1:]), ValueError, r"prior_lse has shape \(2, 4, 59\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_state_is_refused(name: str) -> None:
    prior, kind, message = REFUSED[name]
    out = np.full_like(out32, 7)
    with pytest.raises(kind, match=rf"^anyflash\.attention: {message}"):
        anyflash.attention(*tensors(), prior=prior, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("option", ["accumulate_dq", "accumulate_dkv"])
def test_what_is_added_to_is_float32_and_given(option: str) -> None:
    q, k, v = (x.astype(np.float16) for x in tensors())
    out, lse = anyflash.attention(q, k, v, return_lse=True)
    missing = "dq" if option == "accumulate_dq" else "dk"
    with pytest.raises(ValueError, match=f"{option} is set, but {missing} is not given; pass the"):
        anyflash.attention_backward(out, q, k, v, out, lse, **{option: True})
    grads = {"dq": np.zeros_like(q), "dk": np.zeros_like(k), "dv": np.zeros_like(v)}
    with pytest.raises(TypeError, match=f"{option} is set, but dq, dk and dv are float16; float32"):
        anyflash.attention_backward(out, q, k, v, out, lse, **grads, **{option: True})
    assert not any(x.any() for x in grads.values())
