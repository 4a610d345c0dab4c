"""Batching: the mapped axis is folded into the batch; what cannot be folded is a loop."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from anyflash.jax._ffi import Arrays

_BROADCAST = ("bias", "block_mask", "key_ranges")  # their batch may be 1


def loop(
    function: Callable[[Arrays], Arrays], batched: dict[str, bool], operands: Arrays
) -> Arrays:
    """One part after the other."""
    fixed = {name: x for name, x in operands.items() if not batched[name]}
    mapped = {name: x for name, x in operands.items() if batched[name]}
    result: Arrays = jax.lax.map(lambda part: function(fixed | part), mapped)
    return result


def foldable(
    names: tuple[str, ...], mapped: int, batched: dict[str, bool], operands: Arrays
) -> bool:
    """Whether one call can give the results ``names`` for all parts of the operands that are
    batched. ``mapped``: the axes in front of the arguments that are folded already."""
    if "rng_state" in operands or "cu_seqlens_q" in operands:
        return False  # what is dropped depends on the place in the batch
    if batched.get("sinks") or "dsinks" in names or "dalibi_slopes" in names:
        return False  # they are shared by the whole batch, and so are their gradients
    if "dbias" not in names:
        return True
    bias, q = (operands[name].shape[mapped + batched[name]] for name in ("bias", "q"))
    return bool(bias == q)


def sizes(mapped: int, operands: Arrays) -> tuple[int, ...]:
    """Of the mapped axes, where what all parts share has one element."""
    every = ({x.shape[i] for x in operands.values()} for i in range(mapped))
    return tuple(0 if 0 in extents else max(extents) for extents in every)


def fold(names: tuple[str, ...], mapped: int, operands: Arrays) -> Arrays:
    """The operands without their mapped axes, which become parts of the batch."""
    every = sizes(mapped, operands)
    rows = operands["q"].shape[mapped]

    def fold_one(name: str, x: Any) -> Any:
        own = x.shape[mapped:]
        if math.prod(x.shape[:mapped]) == 1:
            if name == "sinks" or (name == "alibi_slopes" and len(own) == 1):
                return x.reshape(own)
            if name in _BROADCAST and own[0] == 1 and f"d{name}" not in names:
                return x.reshape(own)
        if name == "alibi_slopes" and len(own) == 1:
            own = (1, *own)
            x = x.reshape(*x.shape[:mapped], *own)
        x = jnp.broadcast_to(x, (*every, rows, *own[1:]))
        return x.reshape(math.prod(every) * rows, *own[1:])

    return {name: fold_one(name, x) for name, x in operands.items()} if mapped else operands
