"""Wrong calls, and what must come of them: an exception, and nothing written."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from oracle.attention import Array

Wrong = tuple[dict[str, Any], type[Exception], str]
FLOATS = "float64, float32, float16 and bfloat16 are allowed"


def ones(*shape: int, dtype: Any = np.float32) -> Array:
    return np.ones(shape, dtype)


def ends(*values: int) -> Array:
    return np.array(values, np.int32)


DENSE = {"q": ones(2, 5, 8, 16), "k": ones(2, 70, 4, 16), "v": ones(2, 70, 4, 24)}
PACKED = {
    **{"q": ones(5, 8, 16), "k": ones(7, 4, 16), "v": ones(7, 4, 24)},
    **{"cu_seqlens_q": ends(0, 3, 5), "cu_seqlens_k": ends(0, 3, 7)},
    **{"max_seqlen_q": 3, "max_seqlen_k": 4},
}


def refused(function: Callable[..., Any], arguments: dict[str, Any], wrong: Wrong) -> None:
    changed, exception, message = wrong
    arguments = arguments | changed
    before = {name: x.copy() for name, x in arguments.items() if isinstance(x, np.ndarray)}
    with pytest.raises(exception) as error:
        function(**arguments)
    assert type(error.value) is exception
    assert re.match(rf"anyflash\.{function.__name__}: {message}", str(error.value)), error.value
    for name, x in before.items():
        np.testing.assert_array_equal(arguments[name], x)
