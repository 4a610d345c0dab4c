"""anyflash.create_key_ranges, and what attention makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import anyflash
from anyflash._api import device_key_ranges
from calls.frameworks import EVERY_KIND, Kind, random
from oracle.attention import Array

LENGTH = 96
DOCUMENTS = np.repeat([7, 0, 3, -1, 5], [30, 1, 40, 9, 16])
# A prompt of 24 tokens, and eight answers of nine; the third one has two ends.
NODES = np.repeat([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [24, 9, 9, 3, 3, 3, 9, 9, 9, 18])
LEAVES = {0: 10, 3: 6, **{n: n + 1 for n in (1, 2, 4, 5, 6, 7, 8, 9)}}
EXITS = np.array([LEAVES[int(node)] for node in NODES])

ON_ANOTHER_DEVICE = torch.zeros(3, dtype=torch.int32, device="meta")  # NumPy cannot read it

i, j = np.arange(LENGTH)[:, None], np.arange(LENGTH)
MASKS: dict[str, tuple[dict[str, Any], Array, bool]] = {
    # The arguments, what rows see of keys, and whether a causal mask comes on top.
    "documents": (
        {"documents": DOCUMENTS},
        (DOCUMENTS[:, None] == DOCUMENTS) & (DOCUMENTS >= 0),
        True,
    ),
    "documents, both ways": (
        {"documents": [*DOCUMENTS.tolist()]},
        (DOCUMENTS[:, None] == DOCUMENTS) & (DOCUMENTS >= 0),
        False,
    ),
    "tree": (
        {"tree": (NODES, EXITS)},
        (NODES[:, None] >= NODES) & (NODES[:, None] < EXITS),
        True,
    ),
    "prefix": ({"prefix": 20, "seqlen_k": LENGTH}, (j < 20) | (j <= i), False),
    "no prefix": ({"prefix": 0, "seqlen_k": LENGTH}, j <= i, False),
    "all prefix": ({"prefix": 200, "seqlen_k": LENGTH}, j <= i + LENGTH, False),
}


@EVERY_KIND
@pytest.mark.parametrize("name", MASKS)
def test_means_the_mask(kind: Kind, name: str) -> None:
    """Bit for bit, as the same kernel runs; and the gradients."""
    arguments, keep, causal = MASKS[name]
    q, k, v = random(2, LENGTH, 4, 16), random(2, LENGTH, 2, 16), random(2, LENGTH, 2, 16)
    ranges = anyflash.create_key_ranges(**arguments)
    assert ranges.shape == (1, 1, LENGTH, 2) and ranges.dtype == np.int32
    results = []
    for mask in ({"key_ranges": ranges}, {"bias": keep}):
        given, options = kind.give([q, k, v]), kind.give(mask) | {"causal": causal}
        out, lse = anyflash.attention(*given, **options, return_lse=True)
        dout = kind.give(random(2, LENGTH, 4, 16))
        grads = anyflash.attention_backward(dout, *given, out, lse, **options)
        results.append([kind.take(x) for x in (out, lse, *grads[:3])])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_batch_and_cross_attention() -> None:
    documents = np.stack([DOCUMENTS, np.arange(LENGTH)])
    ranges = anyflash.create_key_ranges(documents=documents)
    assert ranges.shape == (2, 1, LENGTH, 2)
    np.testing.assert_array_equal(ranges[:1], anyflash.create_key_ranges(documents=DOCUMENTS))
    assert (ranges[1, 0] == np.arange(LENGTH)[:, None] + [0, 1]).all()
    of_tree = anyflash.create_key_ranges(tree=(np.stack([NODES] * 2), np.stack([EXITS] * 2)))
    np.testing.assert_array_equal(of_tree[1], anyflash.create_key_ranges(tree=(NODES, EXITS))[0])
    for seqlen_q, seqlen_k in ((5, 9), (9, 5)):
        lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
        ranges = anyflash.create_key_ranges(prefix=[3, 0], **lengths)
        row, key = np.arange(seqlen_q)[:, None], np.arange(seqlen_k)
        causal = key <= row + seqlen_k - seqlen_q
        seen = (ranges[:, 0, None, :, 0] <= row) & (row < ranges[:, 0, None, :, 1])
        np.testing.assert_array_equal(seen, [causal | (key < 3), causal])
    assert anyflash.create_key_ranges(documents=np.zeros(0, int)).shape == (1, 1, 0, 2)
    assert anyflash.create_key_ranges(prefix=3, seqlen_k=0).shape == (1, 1, 0, 2)


def test_packed_sequences_count_by_themselves() -> None:
    q, k = random(LENGTH + 40, 2, 16), random(LENGTH + 40, 1, 16)
    parts = [
        anyflash.create_key_ranges(documents=DOCUMENTS)[0],
        anyflash.create_key_ranges(prefix=9, seqlen_k=40)[0],
    ]
    ranges = np.concatenate(parts, axis=-2)
    ends = np.array([0, LENGTH, LENGTH + 40], np.int32)
    out = anyflash.attention_varlen(q, k, k, ends, ends, LENGTH, LENGTH, key_ranges=ranges)
    for part, first, end in zip(parts, ends, ends[1:], strict=False):
        alone = (x[None, first:end] for x in (q, k, k))
        right = anyflash.attention(*alone, key_ranges=part[None])
        np.testing.assert_array_equal(out[first:end], right[0])


@EVERY_KIND
def test_belongs_to_a_framework(kind: Kind) -> None:
    like = kind.give(np.zeros(3, np.float32))
    ranges = anyflash.create_key_ranges(documents=DOCUMENTS, like=like)
    np.testing.assert_array_equal(
        kind.take(ranges), anyflash.create_key_ranges(documents=DOCUMENTS)
    )


# Of two sequences, as batches and alone.
TRACED: dict[str, tuple[Callable[..., Any], tuple[Array, ...]]] = {
    "documents": (
        lambda x: anyflash.create_key_ranges(documents=x),
        (np.stack([DOCUMENTS, np.arange(LENGTH) // 7]).astype(np.int32),),
    ),
    "tree": (
        lambda *x: anyflash.create_key_ranges(tree=x),
        (np.stack([NODES, NODES + 3]), np.stack([EXITS, EXITS + 3])),
    ),
    "prefix": (
        lambda x: anyflash.create_key_ranges(prefix=x, seqlen_q=70, seqlen_k=LENGTH),
        (np.array([40, 0]),),
    ),
}


@pytest.mark.parametrize("name", TRACED)
def test_made_where_the_arrays_are(name: str) -> None:
    """Traced by JAX, and on a device that the host cannot read."""
    jax = pytest.importorskip("jax")
    create, arrays = TRACED[name]
    for given in (arrays, [x[0] for x in arrays]):
        right = create(*given)
        found = jax.jit(create)(*given)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, right)
        remote = create(*(torch.tensor(x, device="meta") for x in given))
        assert remote.device.type == "meta" and remote.dtype == torch.int32
        assert tuple(remote.shape) == right.shape


@pytest.mark.parametrize("name", TRACED)
def test_torch_makes_them_as_numpy_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs on a GPU, with tensors of the CPU."""
    create, arrays = TRACED[name]
    monkeypatch.setattr(device_key_ranges, "library_of", lambda *_: device_key_ranges._torch())
    found = create(*map(torch.tensor, arrays))
    monkeypatch.undo()
    np.testing.assert_array_equal(found, create(*arrays))


@pytest.mark.parametrize(
    ("arguments", "exception", "message"),
    [
        ({}, ValueError, "nothing is given; one of documents, tree and prefix is expected"),
        ({"documents": [0], "prefix": 1}, ValueError, "documents and prefix is given"),
        ({"documents": [0.5]}, TypeError, "documents is float64; integers are allowed"),
        ({"documents": [[1], [1, 2]]}, ValueError, "documents cannot be read as an array"),
        ({"tree": (ON_ANOTHER_DEVICE, [1])}, TypeError, r"tree\[1\] is list; an array of torch"),
        (
            {"tree": (ON_ANOTHER_DEVICE, ON_ANOTHER_DEVICE[1:])},
            ValueError,
            "tree has arrays of sha",
        ),
        ({"documents": ON_ANOTHER_DEVICE.float()}, TypeError, "documents is torch.float32; integ"),
        ({"documents": ON_ANOTHER_DEVICE[0]}, ValueError, r"documents has shape \(\); \(seqlen,\)"),
        ({"prefix": ON_ANOTHER_DEVICE}, ValueError, "prefix is given without seqlen_k"),
        ({"documents": ON_ANOTHER_DEVICE, "like": np.ones(3)}, TypeError, "like is ndarray; the r"),
        ({"documents": 3}, ValueError, r"documents has shape \(\); \(seqlen,\) or"),
        ({"documents": [4, 5, 4]}, ValueError, "documents has 4 in two places"),
        ({"documents": [4], "seqlen_k": 1}, ValueError, "seqlen_k is given with documents"),
        ({"tree": [1, 2, 3]}, TypeError, r"tree is list; \(entry, exit\) is allowed"),
        ({"tree": ([0, 1], [2])}, ValueError, r"tree has arrays of shapes \(1, 2\) and \(1, 1\)"),
        ({"tree": ([1, 0], [2, 2])}, ValueError, r"tree\[0\] decreases"),
        ({"tree": ([0.0], [1])}, TypeError, r"tree\[0\] is float64"),
        ({"prefix": 3}, ValueError, "prefix is given without seqlen_k"),
        ({"prefix": 1.5, "seqlen_k": 3}, TypeError, "prefix is float64; integers"),
        ({"prefix": [[1]], "seqlen_k": 3}, ValueError, r"prefix has shape \(1, 1\)"),
        ({"prefix": 1, "seqlen_k": -3}, ValueError, "seqlen_k"),
        ({"prefix": 1, "seqlen_q": 2.5, "seqlen_k": 3}, TypeError, "seqlen_q"),
    ],
)
def test_refusals(arguments: dict[str, Any], exception: type[Exception], message: str) -> None:
    with pytest.raises(exception, match=f"anyflash.create_key_ranges: {message}"):
        anyflash.create_key_ranges(**arguments)
