"""Inputs for anyflash.attention, their other forms, and producers that speak only DLPack."""

from __future__ import annotations

import functools
import importlib.util
import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from oracle.attention import Array

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


LARGE = pytest.mark.parametrize("head_dims", [(320, 320), (512, 512), (512, 320)], ids=str)


def inputs(
    dtype: str = "float32", seed: int = 0, head_dims: tuple[int, int] = (20, 12)
) -> tuple[Array, Array, Array]:
    """Two sequences, 30 queries, 50 keys, 4 heads on 2."""
    random = np.random.default_rng(seed)
    d, d_v = head_dims
    shapes = ((2, 30, 4, d), (2, 50, 2, d), (2, 50, 2, d_v))
    q, k, v = (random.standard_normal(shape).astype(DTYPES[dtype]) for shape in shapes)
    return q, k, v


def bits(x: Array) -> bytes:
    return np.ascontiguousarray(x).tobytes()


def views(x: Array) -> dict[str, Array]:
    """The same values, in memory in other ways."""
    column = np.empty((*x.shape, 2), x.dtype)
    column[..., 0] = x
    shifted = np.empty(x.nbytes + 64, np.uint8)[x.itemsize :][: x.nbytes]
    shifted = shifted.view(x.dtype).reshape(x.shape)
    shifted[...] = x
    frozen = x.copy()
    frozen.flags.writeable = False
    return {
        "fortran": np.asfortranarray(x),
        "bhsd": np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
        "reversed": np.ascontiguousarray(x[:, ::-1])[:, ::-1],
        "columns": column[..., 0],
        "shifted": shifted,
        "read-only": frozen,
    }


def to_torch(torch: ModuleType, x: Array) -> Any:
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def from_torch(torch: ModuleType, x: Any) -> Array:
    if x.dtype == torch.bfloat16:
        return x.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


def to_paddle(paddle: ModuleType, x: Array) -> Any:
    """The same memory."""
    of_bits = {"bfloat16": np.int16, "float8_e4m3fn": np.int8, "float8_e5m2": np.int8}.get(
        x.dtype.name
    )
    x = x if x.flags.writeable else x.copy()
    return (
        paddle.from_dlpack(x)
        if of_bits is None
        else paddle.from_dlpack(x.view(of_bits)).view(x.dtype.name)
    )


def from_paddle(x: Any) -> Array:
    result = x.numpy()  # bfloat16 comes as uint16
    return result.view(ml_dtypes.bfloat16) if x.dtype.name == "BFLOAT16" else result


class Producer:
    """An array that speaks nothing but today's DLPack."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __dlpack__(self, **keywords: Any) -> Any:
        return self.x.__dlpack__(**keywords)

    def __dlpack_device__(self) -> tuple[int, int]:
        return tuple(map(int, self.x.__dlpack_device__()))


class OldProducer(Producer):
    """An array that speaks DLPack as it was before versions: no keyword but `stream`."""

    def __dlpack__(self, stream: int | None = None) -> Any:
        return self.x.__dlpack__(stream=stream)


@dataclass(frozen=True)
class Kind:
    """How NumPy arrays become a framework's, and back."""

    name: str

    @functools.cached_property
    def module(self) -> Any:
        if self.name == "tensorflow" and importlib.util.find_spec("paddle"):
            importlib.import_module("paddle")  # which crashes where TensorFlow was imported first
        module = importlib.import_module(self.name)
        if self.name == "jax":
            module.config.update("jax_enable_x64", True)
        return module

    def give(self, x: Any) -> Any:
        """Arrays, at any depth of dict, list or tuple; other things as they are."""
        if isinstance(x, dict):
            return {key: self.give(value) for key, value in x.items()}
        if isinstance(x, list):
            return [self.give(value) for value in x]
        if not isinstance(x, np.ndarray):
            return x
        if self.name == "torch":
            # Without the copy that a read-only array would cost, or a warning.
            return to_torch(self.module, x if x.flags.writeable else x.copy())
        if self.name == "jax":
            return self.module.numpy.asarray(x)
        if self.name == "tensorflow":
            return self.module.constant(x)
        if self.name == "paddle":
            return to_paddle(self.module, x)
        return Producer(x) if self.name == "producer" else x

    def take(self, x: Any) -> Array:
        if self.name == "torch":
            return from_torch(self.module, x)
        if self.name == "producer":
            assert isinstance(x, anyflash.Array)
            return np.from_dlpack(x)
        if self.name == "paddle":
            return from_paddle(x)
        return np.asarray(x)


KINDS = tuple(map(Kind, ("numpy", "torch", "jax", "producer")))
MORE_KINDS = tuple(map(Kind, ("tensorflow", "paddle")))
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def where_installed(kind: Kind) -> Any:
    missing = importlib.util.find_spec(kind.name) is None
    skip = pytest.mark.skipif(missing, reason=f"{kind.name} is not installed")
    return pytest.param(kind, id=kind.name, marks=skip)


@dataclass
class Formula:
    """softmax(scale q k^T) v in float64; q, k, v (batch, seqlen, heads, head_dim)."""

    q: Array
    k: Array
    v: Array

    def __post_init__(self) -> None:
        groups = self.q.shape[2] // self.k.shape[2]
        q, k, v = (x.astype(np.float64).transpose(0, 2, 1, 3) for x in (self.q, self.k, self.v))
        k, self.values = k.repeat(groups, 1), v.repeat(groups, 1)
        self.scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
        self.sinks: Array | None = None
        self.factors: Array | float = 1.0

    @property
    def distance(self) -> Array:
        """i + seqlen_k - seqlen_q - j: how far key j lies behind the last one of row i."""
        rows, columns = self.scores.shape[-2:]
        return np.arange(rows)[:, None] + columns - rows - np.arange(columns)

    def hide(self, hidden: Array) -> None:
        self.scores = np.where(hidden, -np.inf, self.scores)

    def result(self) -> tuple[Array, Array, Array]:
        """out, lse, max_logits"""
        top = self.scores.max(-1)
        total = np.exp(self.scores).sum(-1)
        if self.sinks is not None:
            total = total + np.exp(self.sinks.astype(np.float64))[:, None]
        with np.errstate(invalid="ignore", divide="ignore"):
            p = np.nan_to_num(np.exp(self.scores) / total[..., None]) * self.factors
            return (p @ self.values).transpose(0, 2, 1, 3), np.log(total), top.max(-1)


def random(*shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(dtype)


def close(actual: Array, right: Array, v: Array | None = None) -> None:
    """`v`: the values, where they are bfloat16. AMX rounds the probabilities to it, too."""
    assert actual.dtype == np.float32
    rounds = v is not None and anyflash.build_info()["cpu"]["isa"] == "amx"
    rounded = 2.0**-9 * np.abs(v.astype(np.float64)).max() if rounds else 0.0
    np.testing.assert_allclose(actual, right, rtol=1e-5, atol=1e-5 + rounded)
