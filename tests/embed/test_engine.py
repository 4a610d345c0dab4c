"""cpp/examples/engine: a transformer of two layers, its weights from a safetensors file, with a
cache of keys and values; its logits against the same formula in float64."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from programs import EXAMPLES, output_of
from random_model import (
    HEAD_DIM,
    HEADS,
    HEADS_K,
    LAYERS,
    NUMBERS,
    VOCABULARY,
    Array,
    weights,
    write_safetensors,
)

import anyflash

TOKENS = [int(token) for token in np.random.default_rng(5).integers(0, VOCABULARY, 75)]


def normalized(weight: Array, x: Array) -> Array:
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + 1e-5) * weight


def rotated(x: Array, cos: Array, sin: Array) -> Array:
    """Pairs half a head dim apart; x (tokens, heads, head_dim)."""
    first, second = np.split(x, 2, -1)
    cos, sin = cos[: len(x), None], sin[: len(x), None]
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1)


def logits(tensors: dict[str, Array], dtype: Any) -> Array:
    w = {name: tensor.astype(dtype) for name, tensor in tensors.items()}
    x = w["embedding"][TOKENS]
    hidden = np.triu(np.full((len(TOKENS), len(TOKENS)), -np.inf, dtype), 1)
    for i in range(LAYERS):
        y = normalized(w[f"{i}.norm_attention"], x)
        q, k, v = (
            (y @ w[f"{i}.{name}"].T).reshape(len(TOKENS), -1, HEAD_DIM) for name in ("q", "k", "v")
        )
        q, k = (rotated(t, w["rotary_cos"], w["rotary_sin"]) for t in (q, k))
        k, v = (np.repeat(t, HEADS // HEADS_K, 1) for t in (k, v))
        scores = np.einsum("ihd,jhd->hij", q, k) / dtype(HEAD_DIM**0.5) + hidden
        weight = np.exp(scores - scores.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        x = x + np.einsum("hij,jhd->ihd", weight, v).reshape(x.shape) @ w[f"{i}.o"].T
        y = normalized(w[f"{i}.norm_mlp"], x)
        gate = y @ w[f"{i}.gate"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
    return normalized(w["norm"], x) @ w["embedding"].T


@pytest.fixture(scope="module", params=["shared", "static"])
def engine(request: pytest.FixtureRequest, build: Callable[..., Path], library: Path) -> Path:
    """With the Python package's shared library, and with the installation's static one."""
    if request.param == "shared":
        return build(EXAMPLES / "engine", f"-Danyflash_DIR={anyflash.get_cmake_dir()}") / "engine"
    options = f"-DCMAKE_PREFIX_PATH={library.parent}", "-Danyflash_SHARED_LIBS=OFF"
    program = build(EXAMPLES / "engine", *options) / "engine"
    assert "libanyflash" not in output_of(["ldd", program])
    return program


def test_engine(engine: Path, tmp_path: Path) -> None:
    """The prompt at once, in chunks, and token by token. Sums of products have other orders than
    NumPy's: twice the error of NumPy's own float32."""
    tensors = weights()
    model = tmp_path / "model.safetensors"
    output_of([sys.executable, EXAMPLES / "engine" / "random_model.py", model])
    expected = logits(tensors, np.float64)
    allowed = 2 * np.abs(logits(tensors, np.float32) - expected).max()
    found = []
    for chunk in (len(TOKENS), 32, 1):
        printed = output_of([engine, model, tmp_path / "logits", chunk, *TOKENS])
        assert f": {len(TOKENS)} tokens" in printed
        result = np.fromfile(tmp_path / "logits", np.float32).reshape(expected.shape)
        assert np.abs(result - expected).max() <= allowed, chunk
        found.append(result)
    assert np.abs(found[2] - found[0]).max() <= allowed
    for text in ("the text is too long", "there is no such token"):
        wrong = [*TOKENS, *TOKENS] if "long" in text else [VOCABULARY]
        with pytest.raises(AssertionError, match=text):
            output_of([engine, model, tmp_path / "logits", 1, *wrong])
    # An exception of the library's, which may have a C++ runtime of its own.
    shape = 3 * HEAD_DIM, HEADS * HEAD_DIM
    tensors |= {f"{i}.{n}": np.ones(shape, np.float32) for i in range(LAYERS) for n in "kv"}
    write_safetensors(model, tensors, NUMBERS | {"heads_k": 3})
    with pytest.raises(AssertionError, match=r"engine: .*3 heads, which does not divide q's 4"):
        output_of([engine, model, tmp_path / "logits", 1, *TOKENS])


def empty(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


# Changed tensors, changed numbers, and the message.
HOSTILE: dict[str, tuple[dict[str, Array], dict[str, Any], str]] = {
    "no-width": ({"embedding": empty(VOCABULARY, 0)}, {}, "embedding is empty"),
    "no-vocabulary": ({"embedding": empty(0, 64)}, {}, "embedding is empty"),
    "no-hidden": (
        {"0.gate": empty(0, 64), "0.up": empty(0, 64), "0.down": empty(64, 0)},
        {},
        "0.gate is empty",
    ),
    "no-positions": (
        {f"rotary_{name}": empty(0, HEAD_DIM // 2) for name in ("cos", "sin")},
        {},
        "rotary_cos is empty",
    ),
    "many-positions": (
        {f"rotary_{name}": empty(1 << 55, 0) for name in ("cos", "sin")},
        {"heads": 64},
        "rotary_cos is larger than the file",
    ),
    "rank": ({"norm": empty(8, 8)}, {}, "norm: wrong rank"),
    "no-heads": ({}, {"heads": 0}, 'heads is "0"; 1 to 64 is allowed'),
    "heads": ({}, {"heads": 3}, "heads do not divide the width"),
    "many-heads": ({}, {"heads": 1 << 60}, f'heads is "{1 << 60}"; 1 to 64'),
    "many-heads-k": ({}, {"heads_k": 1 << 60}, f'heads_k is "{1 << 60}"; 1 to 4 is allowed'),
    "no-heads-k": ({}, {"heads_k": -1}, 'heads_k is "-1"; 1 to 4 is allowed'),
    "not-a-number": ({}, {"heads": "4x"}, 'heads is "4x"; 1 to 64 is allowed'),
    "far-too-large": ({}, {"heads_k": 10**30}, f'heads_k is "{10**30}"; 1 to 4 is allowed'),
    "nothing": ({}, {"layers": ""}, 'layers is ""; 1 to '),
    "many-layers": ({}, {"layers": 1 << 62}, f'layers is "{1 << 62}"; 1 to '),
    "one-layer-more": ({}, {"layers": LAYERS + 1}, f"has no {LAYERS}.norm_attention"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_models(engine: Path, tmp_path: Path, case: str) -> None:
    tensors, numbers, message = HOSTILE[case]
    model = tmp_path / "model.safetensors"
    write_safetensors(model, weights() | tensors, NUMBERS | numbers)
    with pytest.raises(AssertionError, match=rf"engine: .*{re.escape(message)}"):
        output_of([engine, model, tmp_path / "logits", 1, 0])


def with_header(whole: bytes, old: bytes, new: bytes) -> bytes:
    end = 8 + int.from_bytes(whole[:8], "little")
    header = whole[8:end].replace(old, new)
    return len(header).to_bytes(8, "little") + header + whole[end:]


def test_safetensors_that_are_damaged(engine: Path, tmp_path: Path) -> None:
    model = tmp_path / "model.safetensors"
    write_safetensors(model, {"embedding": np.zeros((2, 4), np.float32)}, {})
    whole = model.read_bytes()
    write_safetensors(model, {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}, {})
    two = model.read_bytes()
    damaged = {
        "too short": whole[:4],
        "too short for its header": b"\xff" * 8 + whole[8:],
        "larger than the file": whole[:-4],
        "do not fit": whole.replace(b"[0, 32]", b"[1, 32]"),
        "expected": whole[:8] + b"[" + whole[9:],
        "F32 is read here": whole.replace(b"F32", b"F64"),
        "b overlaps another tensor": two.replace(b"[8, 16]", b"[4, 12]"),
        "b overlaps": two.replace(b"[8, 16]", b"[0, 8] "),
        "number in the header is too large": with_header(
            whole, b"[0, 32]", b"[0, %d]" % (2**64 - 1)
        ),
        "is larger than the file": with_header(whole, b"[2, 4]", b"[%d, 4]" % 2**55),
    }
    for message, data in damaged.items():
        model.write_bytes(data)
        with pytest.raises(AssertionError, match=message):
            output_of([engine, model, tmp_path / "logits", 1, 0])
