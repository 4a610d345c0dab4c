"""Batching: the mapped axis is folded into the batch; what cannot be folded is a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anyflash.jax._ffi import Arrays

_BROADCAST = ("bias", "block_mask")  # their batch may be 1


def batch(
    function: Callable[[Arrays], Arrays],
    names: tuple[str, ...],
    size: int,
    batched: dict[str, bool],
    operands: Arrays,
) -> Arrays:
    """``function``, which gives the results ``names``, for each of ``size`` parts of the operands
    that are batched, along their first axis."""
    if _foldable(names, batched, operands):
        return _fold(function, names, size, batched, operands)
    return loop(function, batched, operands)


def loop(
    function: Callable[[Arrays], Arrays], batched: dict[str, bool], operands: Arrays
) -> Arrays:
    """One part after the other."""
    fixed = {name: x for name, x in operands.items() if not batched[name]}
    mapped = {name: x for name, x in operands.items() if batched[name]}
    result: Arrays = jax.lax.map(lambda part: function(fixed | part), mapped)
    return result


def _foldable(names: tuple[str, ...], batched: dict[str, bool], operands: Arrays) -> bool:
    if "rng_state" in operands or "cu_seqlens_q" in operands:
        return False  # what is dropped depends on the place in the batch
    if batched.get("sinks") or "dsinks" in names or "dalibi_slopes" in names:
        return False  # they are shared by the whole batch, and so are their gradients
    if "dbias" not in names:
        return True
    return _rows(operands["bias"], batched["bias"]) == _rows(operands["q"], batched["q"])


def _rows(x: Any, batched: bool) -> int:
    rows: int = x.shape[1 if batched else 0]
    return rows


def _fold(
    function: Callable[[Arrays], Arrays],
    names: tuple[str, ...],
    size: int,
    batched: dict[str, bool],
    operands: Arrays,
) -> Arrays:
    rows = _rows(operands["q"], batched["q"])

    def fold(name: str, x: Any) -> Any:
        if not batched[name]:
            if name == "sinks" or (name == "alibi_slopes" and x.ndim == 1):
                return x
            if name in _BROADCAST and x.shape[0] == 1 and f"d{name}" not in names:
                return x
            x = jnp.broadcast_to(x, (size, *x.shape))
        if name == "alibi_slopes" and x.ndim == 2:
            x = x[:, None]
        x = jnp.broadcast_to(x, (size, rows, *x.shape[2:]))
        return x.reshape(size * rows, *x.shape[2:])

    results = function({name: fold(name, x) for name, x in operands.items()})
    return {name: x.reshape(size, rows, *x.shape[1:]) for name, x in results.items()}
