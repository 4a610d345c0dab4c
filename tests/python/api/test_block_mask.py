"""anyflash.create_block_mask and anyflash.expand_block_mask."""

from __future__ import annotations

import tracemalloc
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from calls.frameworks import EVERY_KIND, Kind
from oracle.attention import Array


def brute_force(predicate: Any, shape: tuple[int, ...], block_size: tuple[int, int]) -> Array:
    elements = predicate(*np.ogrid[tuple(map(slice, shape))])
    elements = np.broadcast_to(elements, shape)
    rows, columns = (-(-n // size) for n, size in zip(shape[2:], block_size, strict=True))
    result = np.zeros((*shape[:2], rows, columns), bool)
    for row, column in np.ndindex(rows, columns):
        a, b = row * block_size[0], column * block_size[1]
        block = elements[:, :, a : a + block_size[0], b : b + block_size[1]]
        result[:, :, row, column] = block.any((2, 3))
    return result


OFFSETS = np.array([0, 200, 17])
PREDICATES = {
    "causal": lambda b, h, i, j: j <= i + 30,
    "diagonal": lambda b, h, i, j: i == j,
    "strided": lambda b, h, i, j: (i - j) % 190 == 0,
    "batch": lambda b, h, i, j: j >= OFFSETS[b] + i,
    "heads": lambda b, h, i, j: (j // 64) % (h + 1) == 0,
    "rows": lambda b, h, i, j: i < 100,
    "keys": lambda b, h, i, j: j == 385,
    "all": lambda b, h, i, j: True,
    "none": lambda b, h, i, j: np.bool_(False),
}


@pytest.mark.parametrize("block_size", [(128, 128), (64, 192), (640, 64), (64, 1024)])
@pytest.mark.parametrize("name", PREDICATES)
def test_create(monkeypatch: pytest.MonkeyPatch, name: str, block_size: tuple[int, int]) -> None:
    shape = (3, 2, 300, 400)
    expected = brute_force(PREDICATES[name], shape, block_size)
    for piece in (1 << 20, 1 << 14, 100):
        monkeypatch.setattr("anyflash._api.block_mask._PIECE", piece)
        mask = anyflash.create_block_mask(PREDICATES[name], *shape, block_size)
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, expected)


def test_create_for_all_sequences_and_heads() -> None:
    mask = anyflash.create_block_mask(PREDICATES["causal"], None, None, 256, 128)
    np.testing.assert_array_equal(mask, [[[[True], [True]]]])


@pytest.mark.parametrize("shape", [(1, 1, 0, 5), (1, 1, 5, 0), (0, 2, 5, 5), (1, 1, 0, 0)])
def test_create_empty(shape: tuple[int, ...]) -> None:
    mask = anyflash.create_block_mask(lambda b, h, i, j: i == j, *shape)
    assert mask.shape == (*shape[:2], -(-shape[2] // 128), -(-shape[3] // 128))


@pytest.mark.parametrize("size", [128, 16384])
def test_create_takes_little_memory(size: int) -> None:
    """The scores would take 256 MiB as bool, and 2 GiB as the predicate's integers."""
    tracemalloc.start()
    try:
        mask = anyflash.create_block_mask(
            lambda b, h, i, j: i - j == 0, 1, 1, 16384, 16384, (size, size)
        )
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()
    np.testing.assert_array_equal(mask[0, 0], np.eye(16384 // size, dtype=bool))


@EVERY_KIND
def test_create_like(kind: Kind) -> None:
    q = np.random.default_rng(0).standard_normal((1, 300, 2, 8)).astype(np.float32)
    given = kind.give(q)
    mask = anyflash.create_block_mask(PREDICATES["strided"], 1, 2, 300, 300, (64, 64), like=given)
    keep = anyflash.create_block_mask(PREDICATES["strided"], 1, 2, 300, 300, (64, 64))
    assert isinstance(mask, anyflash.Array if kind.name == "producer" else type(given))
    np.testing.assert_array_equal(kind.take(mask), keep)
    out = anyflash.attention(given, given, given, block_mask=mask, block_size=(64, 64))
    bias = anyflash.expand_block_mask(keep, 300, 300, (64, 64))
    expected = anyflash.attention(q, q, q, bias=bias)
    np.testing.assert_allclose(kind.take(out), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(256, 256), (129, 200), (128, 1)])
def test_expand(rows: int, columns: int) -> None:
    shape = (2, 3, -(-rows // 128), -(-columns // 64))
    mask = np.random.default_rng(0).random(shape) < 0.5
    elements = anyflash.expand_block_mask(mask, rows, columns, (128, 64))
    assert elements.shape == (2, 3, rows, columns)
    for i, j in ((0, 0), (rows - 1, columns - 1), (rows // 2, columns // 2), (rows - 1, 0)):
        np.testing.assert_array_equal(elements[..., i, j], mask[..., i // 128, j // 64])


def test_expand_takes_other_arrays(torch: ModuleType) -> None:
    mask = torch.tensor([[True, False]])
    assert anyflash.expand_block_mask(mask, 10, 200)[3].sum() == 128


RIGHT: dict[str, Any] = {
    "predicate": lambda b, h, i, j: i == j,
    "batch": 1,
    "heads": 1,
    "seqlen_q": 100,
    "seqlen_k": 100,
}
SIZES = r"a pair \(queries, keys\) of positive multiples of 64 is allowed"
WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "batch": ({"batch": 1.5}, TypeError, "batch is float; an int is allowed"),
    "heads": ({"heads": -1}, ValueError, "heads is -1; 0 to 2147483647 is allowed"),
    "length": ({"seqlen_q": None}, TypeError, "seqlen_q is NoneType; an int is allowed"),
    "sizes": ({"block_size": (64, 100)}, ValueError, rf"block_size is \(64, 100\); {SIZES}"),
    "zero": ({"block_size": (0, 64)}, ValueError, rf"block_size is \(0, 64\); {SIZES}"),
    "three": ({"block_size": (64,) * 3}, ValueError, f"block_size has 3 elements; {SIZES}"),
    "one": ({"block_size": 64}, TypeError, f"block_size is int; {SIZES}"),
    "int": (
        {"predicate": lambda b, h, i, j: i - j},
        TypeError,
        "predicate gave an array of int64; bool is allowed",
    ),
    "shape": (
        {"predicate": lambda b, h, i, j: np.ones((3, 100), bool)},
        ValueError,
        r"predicate gave an array of shape \(3, 100\) for 100 queries and 100 keys; one that "
        r"broadcasts to \(100, 100\) is allowed",
    ),
    "like": ({"like": "cuda"}, TypeError, "like is str; arrays of NumPy"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_create_refuses(wrong: str) -> None:
    changed, exception, message = WRONG[wrong]
    with pytest.raises(exception, match=rf"^anyflash\.create_block_mask: {message}"):
        anyflash.create_block_mask(**(RIGHT | changed))


@pytest.mark.parametrize(
    ("mask", "exception", "message"),
    [
        (np.ones((1, 1)), TypeError, "block_mask is float64; bool is allowed"),
        (
            np.ones((1, 3), bool),
            ValueError,
            r"block_mask has shape \(1, 3\); expected \(..., 1, 2\) for seqlen_q 100 and "
            "seqlen_k 200 in blocks of 128 x 128",
        ),
        (np.ones(2, bool), ValueError, r"block_mask has shape \(2,\); expected \(..., 1, 2\)"),
    ],
)
def test_expand_refuses(mask: Array, exception: type[Exception], message: str) -> None:
    with pytest.raises(exception, match=rf"^anyflash\.expand_block_mask: {message}"):
        anyflash.expand_block_mask(mask, 100, 200)
