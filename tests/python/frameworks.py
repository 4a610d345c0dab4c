"""Inputs for anyflash.attention, their other forms, and producers that speak only DLPack."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracle import Array

DTYPES = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
}
EVERY_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


def inputs(dtype: str = "float32", seed: int = 0) -> tuple[Array, Array, Array]:
    """Two sequences, 30 queries, 50 keys, 4 heads on 2, head dims 20 and 12."""
    random = np.random.default_rng(seed)
    shapes = ((2, 30, 4, 20), (2, 50, 2, 20), (2, 50, 2, 12))
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
