"""Whatever framework the arrays are of, results have the bits that NumPy's arrays give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anyflash
from anyflash import AttentionGrads
from backends.capsules import Handmade, read
from calls.backward import OPTIONS, Case
from calls.frameworks import KINDS, MORE_KINDS, Kind, bits, where_installed
from oracle.attention import Array


class ByHand(Kind):
    """Arrays that only capsules.py knows how to make and to read."""

    def give(self, x: Any) -> Any:
        if isinstance(x, dict):
            return {key: self.give(value) for key, value in x.items()}
        return Handmade(x) if isinstance(x, np.ndarray) else x

    def take(self, x: Any) -> Array:
        assert isinstance(x, anyflash.Array)
        return read(x)


EVERY = (*KINDS[1:3], ByHand("by hand"), *map(where_installed, MORE_KINDS))


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.name)
@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_same_bits(kind: Kind, options: str, dtype: str) -> None:
    """Forward and backward."""
    case = Case(OPTIONS[options], dtype, dlse=True)
    right = case.forward()
    mask = bits(case.mask)
    given = case.forward(kind)
    assert bits(case.mask) == mask
    for name in ("out", "lse"):
        assert bits(kind.take(given[name])) == bits(right[name])
    expected = anyflash.attention_backward(**right, **case.asked)
    actual = anyflash.attention_backward(**given, **case.asked)
    for name, one, other in zip(AttentionGrads._fields, actual, expected, strict=True):
        assert (one is None) == (other is None), name
        assert one is None or bits(kind.take(one)) == bits(other), name
