"""Reading the arguments that are no arrays. What is wrong with one is raised without its name."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable
from typing import Any, TypeVar

from anyflash._arrays.base import listed
from anyflash._arrays.registry import dtype_name

_T = TypeVar("_T")
_FAR = 1 << 62  # a window that is wider than any sequence
_WORDS = 1 << 64  # of a random state


def named(operation: str, argument: str, function: Callable[..., _T], *arguments: Any) -> _T:
    """function(*arguments), its errors with both names in front."""
    try:
        return function(*arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{operation}: {argument} {error}") from None


def to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # of an int
        raise ValueError("is beyond what a float64 holds; a finite number is allowed") from None


def number(value: Any) -> float:
    """A finite real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"is {type(value).__name__}; a finite number is allowed")
    result = to_float(value)
    if not abs(result) < math.inf:  # unlike isfinite, torch.compile can trace this
        raise ValueError(f"is {result}; a finite number is allowed")
    return result


def flags(operation: str, **values: Any) -> tuple[bool, ...]:
    """Each argument read as a bool; errors begin with the operation's and the argument's names."""
    return flag_values(operation, tuple(values), tuple(values.values()))


def flag_values(
    operation: str, names: tuple[str, ...], values: tuple[Any, ...]
) -> tuple[bool, ...]:
    """The same in half the time."""
    for value in values:
        if value is not True and value is not False:
            return tuple(
                _flag(f"{operation}: {name}", x) for name, x in zip(names, values, strict=True)
            )
    return values


def _flag(name: str, value: Any) -> bool:
    """A bool of NumPy's (known by its name: NumPy need not be there) or a symbol that torch traces,
    and 0 and 1. No array: to read one on a GPU would wait for it."""
    if type(value).__name__ in {"bool", "bool_", "SymBool"}:
        return bool(value)
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {type(value).__name__}; True or False is allowed")
    if value not in {0, 1}:
        raise ValueError(f"{name} is {value}; True, False, 1 or 0 is allowed")
    return bool(value)


def scale(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"is {type(value).__name__}; None or a finite number is allowed")
    return number(value)


def softcap(value: Any) -> float:
    result = number(value)
    if result < 0:
        raise ValueError(f"is {result}; 0 (none) or a positive number is allowed")
    return result


def probability(value: Any) -> float:
    result = number(value)
    if not 0 <= result < 1:
        raise ValueError(f"is {result}; 0 <= dropout_p < 1 is allowed")
    return result


def _integer(value: Any, what: str) -> int:
    if type(value) is int:  # the question to an abstract class takes 0.3 us
        return value
    # Arrays of one element have __index__ too; reading one on a GPU would wait for the device.
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return operator.index(value)
    raise TypeError(f"is {type(value).__name__}; {what} is allowed")


def _pair(value: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(value, (tuple, list)):
        raise TypeError(f"is {type(value).__name__}; {what} is allowed")
    if len(value) != 2:
        raise ValueError(f"has {len(value)} elements; {what} is allowed")
    return value[0], value[1]


def window(value: Any) -> tuple[int, int]:
    what = "a pair (left, right) of int, -1 or None for no bound,"
    bounds = []
    for bound in _pair(value, what):
        width = -1 if bound is None else _integer(bound, what)
        if width < -1:
            raise ValueError(f"is {tuple(value)}; -1 (no bound) or more is allowed")
        bounds.append(min(width, _FAR))
    return bounds[0], bounds[1]


def block_size(value: Any) -> tuple[int, int]:
    what = "a pair (queries, keys) of positive multiples of 64"
    first, second = (_integer(size, what) for size in _pair(value, what))
    if min(first, second) < 1 or first % 64 or second % 64 or max(first, second) >= 1 << 31:
        raise ValueError(f"is {tuple(value)}; {what} is allowed")
    return first, second


def length(value: Any) -> int:
    result = _integer(value, "an int")
    if not 0 <= result < 1 << 31:
        raise ValueError(f"is {result}; 0 to 2147483647 is allowed")
    return result


def check_room(
    filled: int,
    cache: tuple[int, ...],
    table: tuple[int, ...] | None,
    new: tuple[int, ...] | None,
) -> None:
    """Whether an int's rows, and k's, fit the cache: shapes of k_cache, block_table and k. Lengths
    in an array are known on its device alone, and an int of a GPU's call has become one there."""
    capacity = cache[1] * (1 if table is None else table[-1])
    seqlen_new = new[1] if new is not None and len(new) > 1 else 0
    if filled + seqlen_new > capacity:
        allowed = f"0 to {capacity - seqlen_new}" if seqlen_new <= capacity else "none"
        room = f"has room for {capacity} rows of a sequence"
        room = f"k_cache {room}" if table is None else f"block_table {room}, in pages of k_cache"
        raise ValueError(
            f"is {filled}; {allowed} is allowed: {room}, and {seqlen_new} are appended (k)"
        )


def columns(value: Any, most: int) -> int:
    """Of k_cache, which are the values."""
    result = _integer(value, "an int")
    if not 1 <= result <= most:
        raise ValueError(f"is {result}; 1 to {most}, the columns of k_cache, is allowed")
    return result


def integer(value: Any) -> int:
    """What the core checks the range of."""
    result = _integer(value, "an int")
    if not -_FAR <= result <= _FAR:
        raise ValueError(f"is {result}; at most 2**62 is allowed")
    return result


def _word(value: Any, what: str) -> int:
    result = _integer(value, what)
    if not 0 <= result < _WORDS:
        raise ValueError(f"is {result}; 0 to 2**64 - 1 is allowed")
    return result


def seed(value: Any) -> int:
    return _word(value, "an int")


def rng_pair(value: tuple[Any, ...] | list[Any]) -> tuple[int, int]:
    what = "a pair (seed, offset) of int"
    first, second = _pair(value, what)
    return _word(first, what), _word(second, what)


def stream(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(
            f"is {type(value).__name__}; None or the address of a cudaStream_t as an int is allowed"
        )
    if not 0 <= value < _WORDS:
        raise ValueError(f"is {value}; the address of a cudaStream_t is allowed")
    return value


def dtype(value: Any, allowed: tuple[str, ...]) -> str:
    name = dtype_name(value)
    if name not in allowed:
        raise TypeError(f"is {name}; None, {listed(allowed)}")
    return name
