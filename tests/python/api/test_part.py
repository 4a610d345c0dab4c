"""anyflash.Part: parts of an attention, joined, are the whole, on arrays of NumPy and PyTorch."""

from __future__ import annotations

import itertools
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from oracle.attention import Array

HEADS, ROWS, KEYS = 4, 90, 70
OPTIONS: dict[str, Any] = {
    **{"causal": True, "window_size": (40, 0), "softcap": 3.0, "dropout_p": 0.3, "seed": 9},
    "alibi_slopes": np.array([0.1, 0.2, -0.05, 0.3]),
}


def tensors() -> list[Array]:
    random = np.random.default_rng(3)
    shapes = ((2, ROWS, HEADS, 8), (2, KEYS, HEADS, 8), (2, KEYS, HEADS, 8))
    return [random.standard_normal(shape) for shape in shapes]


def of_heads(options: dict[str, Any], heads: slice) -> dict[str, Any]:
    return options | {"alibi_slopes": options["alibi_slopes"][heads]}


def test_parts_make_the_whole() -> None:
    q, k, v = tensors()
    whole, whole_lse = anyflash.attention(q, k, v, **OPTIONS, return_lse=True)
    for rows, heads in itertools.product(
        (slice(0, 33), slice(33, ROWS)), (slice(0, 1), slice(1, 4))
    ):
        out = lse = None
        for keys in (slice(40, KEYS), slice(0, 16), slice(16, 40)):
            part = anyflash.Part(rows.start, keys.start, KEYS - ROWS, 0, heads.start, HEADS)
            given = q[:, rows, heads], k[:, keys, heads], v[:, keys, heads]
            options = of_heads(OPTIONS, heads)
            more = anyflash.attention(*given, **options, part=part, return_lse=True)
            if out is None:
                out, lse = more
            else:
                out, lse = anyflash.merge_states(out, lse, *more)
        np.testing.assert_allclose(out, whole[:, rows, heads], rtol=0, atol=3e-6)
        np.testing.assert_allclose(lse, whole_lse[:, heads, rows], rtol=0, atol=1e-6)


def test_gradients_of_parts_make_those_of_the_whole() -> None:
    q, k, v = tensors()
    out, lse = anyflash.attention(q, k, v, **OPTIONS, return_lse=True)
    dout = np.cos(out)
    whole = anyflash.attention_backward(dout, q, k, v, out, lse, **OPTIONS)
    dq, dk, dv = (np.zeros_like(x) for x in (q, k, v))
    for rows, keys in itertools.product(
        (slice(0, 33), slice(33, ROWS)), (slice(0, 16), slice(16, KEYS))
    ):
        part = anyflash.Part(rows.start, keys.start, KEYS - ROWS)
        given = dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out[:, rows], lse[..., rows]
        grads = anyflash.attention_backward(*given, **OPTIONS, part=part)
        dq[:, rows] += grads.dq
        dk[:, keys] += grads.dk
        dv[:, keys] += grads.dv
    for found, expected in zip((dq, dk, dv), whole, strict=False):
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("heads", [slice(0, 2), slice(3, 4)])
def test_dropout_is_that_of_the_whole(heads: slice) -> None:
    q, k, v = tensors()
    whole = anyflash.attention(q, k, v, dropout_p=0.4, seed=5, return_dropout_mask=True)
    part = anyflash.Part(17, 24, batch_start=1, head_start=heads.start, total_heads=HEADS)
    given = q[1:, 17:, heads], k[1:, 24:, heads], v[1:, 24:, heads]
    found = anyflash.attention(*given, dropout_p=0.4, seed=5, part=part, return_dropout_mask=True)
    assert whole.dropout_mask is not None
    np.testing.assert_array_equal(found.dropout_mask, whole.dropout_mask[1:, heads, 17:, 24:])


def test_packed_sequences_have_places_of_their_own() -> None:
    """Each sequence is the end of a longer one."""
    q, k, v = (x[0] for x in tensors())
    starts, ends = np.array([5, 40], np.int32), np.array([0, 10, 40], np.int32)
    packing = ends, ends, 30, 30
    part = anyflash.Part(starts, np.zeros(2, np.int32))
    found = anyflash.attention_varlen(q[:40], k[:40], v[:40], *packing, causal=True, part=part)
    for i, start in enumerate(starts):
        own = slice(ends[i], ends[i + 1])
        one = anyflash.Part(int(start))
        expected = anyflash.attention(
            q[None, own], k[None, own], v[None, own], causal=True, part=one
        )
        np.testing.assert_array_equal(found[own], expected[0])


def test_wide_lses_are_merged_in_float64() -> None:
    q, k, v = tensors()
    out, lse = anyflash.attention(q, k, v, return_lse=True)
    rest = np.full_like(lse, -1.0, np.float64)
    joined, total = anyflash.merge_states(out, lse.astype(np.float64), np.zeros_like(out), rest)
    assert total.dtype == np.float64
    exact = np.logaddexp(lse.astype(np.float64), -1.0)
    np.testing.assert_allclose(total, exact, rtol=1e-15)
    weight = np.exp(lse - exact).swapaxes(1, 2)[..., None]
    np.testing.assert_allclose(joined, weight * out, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_start": 2.0}, "query_start is float; an int or an array of int32 is allowed"),
        ({"diagonal": [1]}, "diagonal is list; an int or an array of int32 is allowed"),
        ({"key_start": np.zeros(1)}, "key_start is float64; int32 is allowed"),
        ({"key_start": True}, "key_start is bool; an int is allowed"),
        ({"head_start": 1.5}, "head_start is float; an int is allowed"),
    ],
)
def test_wrong_numbers(changes: dict[str, Any], message: str) -> None:
    q = np.ones((1, 4, 2, 8), np.float32)
    with pytest.raises(TypeError, match=rf"^anyflash\.attention: part\.{message}"):
        anyflash.attention(q, q, q, part=anyflash.Part(**changes))


def test_recorded_tensors_are_refused(torch: ModuleType) -> None:
    q = torch.randn(1, 4, 2, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match=r"anyflash.attention: part is given, but grad"):
        anyflash.attention(q, q, q, part=anyflash.Part(1))
