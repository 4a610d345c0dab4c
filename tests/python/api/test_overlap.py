"""Outputs that are given and share memory with one another or with inputs are refused, and nothing
is written."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from anyflash._call.overlap import Memory, overlap


def memory(x: Any) -> Memory:
    return Memory(x.__array_interface__["data"][0], x.shape, x.strides, x.itemsize)


def random_view(random: Any, x: Any, steps: Any) -> Any:
    """With the steps along its axes, which may be permuted."""
    index = []
    for n, step in zip(x.shape, steps, strict=True):
        first, last = sorted(random.integers(0, n + 1, 2))
        index.append(slice(None, None, -1) if step < 0 else slice(first, last, step))
    view = x[tuple(index)]
    return view if random.random() < 0.7 else view.transpose(random.permutation(view.ndim))


def test_only_what_is_certain() -> None:
    """What is said to overlap does, and of views with the same strides nothing is missed."""
    random = np.random.default_rng(0)
    x, counts = np.zeros((3, 4, 3, 5), np.float32), [0, 0]
    for i in range(4000):
        steps = random.choice([1, 1, 2, -1], (2, x.ndim))
        a = random_view(random, x, steps[0])
        b = random_view(random, x, steps[i % 2])
        found, right = overlap(memory(a), memory(b)), np.shares_memory(a, b)
        assert not found or right
        if a.strides == b.strides and a.size and b.size:
            assert found == right
            counts[int(right)] += 1
    assert min(counts) > 50, counts


def qkv() -> Any:
    return np.random.default_rng(1).standard_normal((2, 9, 5, 4, 8)).astype(np.float32)


def one() -> Any:
    return qkv()[:, :, 0].copy()


def new() -> Any:
    return one()[:, 5:8]


# What is done with a new array; the names of the two.
WRONG: dict[str, tuple[Any, str]] = {
    "out-is-q": (lambda x: anyflash.attention(x, x.copy(), x.copy(), out=x), "out and q"),
    "out-is-k": (lambda x: anyflash.attention(x.copy(), x, x.copy(), out=x), "out and k"),
    "out-by-a-row": (
        lambda x: anyflash.attention(one()[:, :8], one(), x[:, 1:], out=x[:, :8]),
        "out and v",
    ),
    "out-reversed": (
        lambda x: anyflash.attention(one(), x, one(), out=x[:, ::-1]),
        "out and k",
    ),
    "lse": (
        lambda x: anyflash.attention(one(), one(), x, lse=first_of(x)),
        "lse and v",
    ),
    "prior": (
        lambda x: anyflash.attention(
            one(), one(), one(), out=x, prior=(x[:, ::-1], np.zeros((2, 4, 9), np.float32))
        ),
        "out and prior_out",
    ),
    "bias": (
        lambda x: anyflash.attention(
            one(), one(), one(), out=x, bias=x.reshape(-1)[:9], return_lse=True
        ),
        "out and bias",
    ),
    "cache": (
        lambda x: anyflash.attention_with_kvcache(x[:, :1], one(), x, out=x[:, 3:4]),
        "out and v_cache",
    ),
    "appended": (
        lambda x: anyflash.attention_with_kvcache(
            one()[:, :1], one(), one(), x[:, :1], one()[:, :1], cache_seqlens=2, out=x[:, :1]
        ),
        "out and k",
    ),
    "workspace": (
        lambda x: anyflash.attention_with_kvcache(
            new(), one(), one(), out=x[:, :3], workspace=x.reshape(-1).view(np.uint8)
        ),
        "out and workspace",
    ),
    "dq-is-dout": (
        lambda x: anyflash.attention_backward(x, one(), one(), one(), one(), lse(), dq=x),
        "dq and dout",
    ),
    "dv-is-v": (
        lambda x: anyflash.attention_backward(one(), one(), one(), x, one(), lse(), dv=x),
        "dv and v",
    ),
    "dk-is-out": (
        lambda x: anyflash.attention_backward(one(), one(), one(), one(), x, lse(), dk=x),
        "dk and out",
    ),
    "dq-is-dk": (
        lambda x: anyflash.attention_backward(one(), one(), one(), one(), one(), lse(), dq=x, dk=x),
        "dq and dk",
    ),
    "dk-by-a-row": (
        lambda x: anyflash.attention_backward(
            one(), one(), one()[:, :8], one()[:, :8], one(), lse(), dk=x[:, 1:], dv=x[:, :8]
        ),
        "dk and dv",
    ),
    "lse-in-out": (
        lambda x: anyflash.attention(one(), one(), one(), out=x, lse=first_of(x)),
        "out and lse",
    ),
    "merged-reversed": (
        lambda x: anyflash.merge_states(x, lse(), one(), lse(), out=x[:, ::-1]),
        "out and out_a",
    ),
    "merged-other-dtype": (
        lambda x: anyflash.merge_states(
            x.view(np.float64), lse(), one().view(np.float64), lse(), out=x[..., :4]
        ),
        "out and out_a",
    ),
    "merged-lse": (
        lambda x: anyflash.merge_states(
            one(), first_of(x), one(), lse(), out=one(), lse=first_of(x)[..., ::-1]
        ),
        "lse and lse_a",
    ),
}


def first_of(x: Any) -> Any:
    """As many numbers as an LSE has."""
    return x.reshape(-1)[:72].reshape(2, 4, 9)


def lse() -> Any:
    return anyflash.attention(one(), one(), one(), return_lse=True)[1]


@pytest.mark.parametrize("name", WRONG)
def test_refused(name: str) -> None:
    call, names = WRONG[name]
    x = one()
    with pytest.raises(ValueError, match=f"anyflash.*: {names} overlap in memory; an array"):
        call(x)
    assert np.array_equal(x, one())


def test_views_between_one_another() -> None:
    """Slices of one array that share no element are allowed, as inputs and as outputs."""
    x = qkv()
    q, k, v, out, dq = (x[:, :, i] for i in range(5))
    right, lse = anyflash.attention(*(y.copy() for y in (q, k, v)), return_lse=True)
    anyflash.attention(q, k, v, out=out)
    assert np.array_equal(out, right)
    dkv = np.empty((2, 9, 2, 4, 8), np.float32)
    targets = {"dq": dq, "dk": dkv[:, :, 0], "dv": dkv[:, :, 1]}
    found = anyflash.attention_backward(right, q, k, v, out, lse, **targets)
    exact = anyflash.attention_backward(right, *(y.copy() for y in (q, k, v, out)), lse)
    for name in targets:
        assert np.array_equal(getattr(found, name), getattr(exact, name))


def test_pages_of_one_pool() -> None:
    """Keys and values are appended to pages of one array, where the table lets them lie apart."""
    pool = np.zeros((4, 4, 4, 8), np.float32)
    options = {"cache_seqlens": 2, "block_table": np.array([[0, 2]], np.int32)}
    q, k, v = new()[:1], new()[:1], 2 * new()[:1]
    found = anyflash.attention_with_kvcache(q, pool[:3], pool[1:], k, v, **options)
    caches = np.zeros((2, 3, 4, 4, 8), np.float32)
    assert np.array_equal(found, anyflash.attention_with_kvcache(q, *caches, k, v, **options))


def test_in_place_where_it_is_allowed() -> None:
    q, k = one(), one()
    out, lse = anyflash.attention(q, k[:, :4], k[:, :4], return_lse=True)
    right = anyflash.attention(q, k[:, 4:], k[:, 4:], prior=(out.copy(), lse.copy()))
    anyflash.attention(q, k[:, 4:], k[:, 4:], prior=(out, lse), out=out, lse=lse)
    assert np.array_equal(out, right)


def test_merged_in_place() -> None:
    q, k = one(), one()
    halves = [anyflash.attention(q, x, x, return_lse=True) for x in (k[:, :4], k[:, 4:])]
    right = anyflash.merge_states(*halves[0], *halves[1])
    for out, lse in ((0, 1), (1, 0)):
        parts = [(x.copy(), y.copy()) for x, y in halves]
        found = anyflash.merge_states(*parts[0], *parts[1], out=parts[out][0], lse=parts[lse][1])
        assert found[0] is parts[out][0] and found[1] is parts[lse][1]
        for x, wanted in zip(found, right, strict=True):
            assert np.array_equal(x, wanted)


def test_strides_of_an_axis_of_one_mean_nothing() -> None:
    x, part = one()[:1], (one()[:1], lse()[:1])
    same = x[0][None]
    assert same.strides != x.strides
    right, _ = anyflash.merge_states(x, lse()[:1], *part)
    anyflash.merge_states(x, lse()[:1], *part, out=same)
    assert np.array_equal(x, right)


def test_odd_strides() -> None:
    """Elements that lie no whole number of elements apart cannot be passed on."""
    memory = np.zeros(2 * 9 * 4 * 40, np.uint8)
    x = np.ndarray((2, 9, 4, 8), np.float32, memory, strides=(9 * 4 * 37, 4 * 37, 37, 4))
    merged = (one(), lse(), one(), lse())
    for name, call in {
        "attention: out": lambda: anyflash.attention(one(), one(), one(), out=x),
        "attention_backward: dk": lambda: anyflash.attention_backward(
            one(), one(), one(), one(), one(), lse(), dk=x
        ),
        "merge_states: out": lambda: anyflash.merge_states(*merged, out=x),
    }.items():
        with pytest.raises(ValueError, match=rf"{name} has strides of \(1332, 148, 37, 4\) bytes"):
            call()
    assert not memory.any()


def test_torch(torch: ModuleType) -> None:
    x = torch.randn(2, 9, 4, 8)
    for out in (x, x.view(2, 4, 9, 8).transpose(1, 2)):
        with pytest.raises(ValueError, match="out and k overlap"):
            anyflash.attention(x.clone(), x, x.clone(), out=out)
    both = torch.zeros(2, 9, 2, 4, 8)
    anyflash.attention(both[:, :, 0], x, x, out=both[:, :, 1])
