"""How wrong a result over an 8-bit cache may be, whose values have scales."""

from __future__ import annotations

import numpy as np
import pytest

from cases.cache_case import CacheCase
from oracle.attention import check

UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8}  # half a unit in the last place, of 1


@pytest.mark.parametrize("dtype", UNIT)
@pytest.mark.parametrize("cache_dtype", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize("length", [1, 40])
def test_one_rounding_of_a_probability(dtype: str, cache_dtype: str, length: int) -> None:
    """Of a single key a kernel may round the probability times the scale, and no more than that."""
    case = CacheCase("scales", dtype, (length,), cache_dtype=cache_dtype, scales="slot")
    expected = CacheCase(**{**vars(case), "out_dtype": "fp32"}).expected().reference
    lse = expected.lse.astype(np.float32)
    out = expected.out
    check((out * (1 + UNIT[dtype])).astype(np.float32), lse, expected)
    if length == 1:
        with pytest.raises(AssertionError, match="out: error"):
            check((out * (1 + 2 * UNIT[dtype])).astype(np.float32), lse, expected)
    with pytest.raises(AssertionError, match="out: "):
        check((out * (1 + 8 * UNIT[dtype])).astype(np.float32), lse, expected)
