"""What this machine gives at best: matrix products, mma.sync alone, reading memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from anyflash.bench._anyflash_calls import Call
from anyflash.bench._array_libraries import ArrayLibrary, Unsupported
from anyflash.bench._cases import ITEM_SIZES
from anyflash.bench._mma import PTX_TYPES, Peak
from anyflash.bench._timing import Budget, Timer, take_turns

GEMM_SIZES = {"cuda": 8192, "cpu": 2048}
READ_BYTES = 8 * 2**30
TITLES = {
    "gemm": "matrix product of the framework (cuBLAS on a GPU)",
    "mma": "mma.sync alone",
    "read": "reading memory: the best of sums and maxima",
}


def _gemm(arrays: ArrayLibrary, dtype: str) -> tuple[Call, float]:
    if arrays.name == "numpy" and dtype == "bfloat16":
        raise Unsupported("NumPy multiplies no bfloat16 matrices by BLAS")
    n = GEMM_SIZES[arrays.device]
    a, b = (arrays.normal((n, n), dtype) for _ in range(2))
    return Call(lambda turn: a @ b), 2.0 * n**3


def _mma(arrays: ArrayLibrary, dtype: str) -> tuple[Call, float]:
    if arrays.device != "cuda" or dtype not in PTX_TYPES:
        raise Unsupported("only on a GPU, for float16 and bfloat16")
    peak = Peak(dtype)
    return Call(peak.launch), peak.flop


def _reduction(function: Callable[[], Any]) -> Call:
    return Call(lambda turn: function())


def _reads(arrays: ArrayLibrary) -> dict[str, tuple[Call, float]]:
    """Reductions over more than any cache holds."""
    size = min(READ_BYTES, arrays.free_bytes() // 4) if arrays.device == "cuda" else 2**28
    made = {}
    for dtype in ("float32", "bfloat16") if arrays.device == "cuda" else ("float32",):
        x = arrays.normal((size // ITEM_SIZES[dtype],), dtype)
        made[f"sum {dtype}"] = _reduction(x.sum), float(size)
        made[f"max {dtype}"] = _reduction(x.max), float(size)
    return made


def measure_rooflines(
    names: Sequence[str],
    dtypes: tuple[str, ...],
    arrays: ArrayLibrary,
    timer: Timer,
    budget: Budget,
) -> list[dict[str, Any]]:
    """One entry for each roofline: name, dtype, unit, value of the median, or why there is none."""
    found: list[dict[str, Any]] = []
    made: dict[str, tuple[Call, float]] = {}
    for name in names:
        for dtype in ("",) if name == "read" else dtypes:
            try:
                if name == "read":
                    made |= _reads(arrays)
                else:
                    made[f"{name} {dtype}"] = {"gemm": _gemm, "mma": _mma}[name](arrays, dtype)
            except Exception as error:  # a driver or framework without it: the run goes on
                text = str(error).partition("\n")[0][:200]
                found.append({"name": name, "dtype": dtype, "error": text})
    samples = take_turns({name: call for name, (call, _) in made.items()}, timer, budget)
    best_read = 0.0
    for key, (_, work) in made.items():
        name, _, dtype = key.partition(" ")
        seconds = sorted(samples.seconds.get(key, ()))
        if name in {"sum", "max"}:
            best_read = max(best_read, work / seconds[0] if seconds else 0.0)
        elif seconds:
            value = work / seconds[len(seconds) // 2]
            found.append({"name": name, "dtype": dtype, "unit": "FLOP/s", "value": value})
        else:
            found.append({"name": name, "dtype": dtype, "error": str(samples.errors[key])[:200]})
    if best_read:
        found.append({"name": "read", "unit": "B/s", "value": best_read})
    return found
