"""create_key_ranges of arrays that are not on the host: made where they are, without waiting."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Library(NamedTuple):
    """A library of arrays: its functions, which are named alike, and what differs."""

    name: str
    xp: Any
    row_searchsorted: Callable[[Any, Any, str], Any]  # (rows of sorted numbers, values, side)
    on_device_of: Callable[[Any], dict[str, Any]]  # arguments of arange()

    def owns(self, array: Any) -> bool:
        return _framework(array) == self.name


def library_of(*arrays: Any) -> Library | None:
    """Of arrays on a GPU and of JAX's traced ones; None where the host can read them all."""
    for array in arrays:
        name = _framework(array)
        if name == "torch" and array.device.type != "cpu":
            return _torch()
        if name == "jax" and _is_remote_jax(array):
            return _jax()
        if name == "cupy":
            return _cupy()
    return None


def _framework(array: Any) -> str:
    name = type(array).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def _is_remote_jax(array: Any) -> bool:
    jax = sys.modules["jax"]
    if isinstance(array, jax.core.Tracer):
        return True
    return any(device.platform != "cpu" for device in array.devices())


def _torch() -> Library:
    torch: Any = sys.modules["torch"]

    def row_searchsorted(rows: Any, values: Any, side: str) -> Any:
        return torch.searchsorted(rows.contiguous(), values.contiguous(), side=side)

    return Library("torch", torch, row_searchsorted, lambda array: {"device": array.device})


def _jax() -> Library:
    jax: Any = sys.modules["jax"]
    jnp: Any = importlib.import_module("jax.numpy")

    def row_searchsorted(rows: Any, values: Any, side: str) -> Any:
        return jax.vmap(lambda row, of_row: jnp.searchsorted(row, of_row, side=side))(rows, values)

    return Library("jax", jnp, row_searchsorted, lambda _: {})


def _cupy() -> Library:
    cupy: Any = sys.modules["cupy"]

    def row_searchsorted(rows: Any, values: Any, side: str) -> Any:
        found = [cupy.searchsorted(*pair, side=side) for pair in zip(rows, values, strict=True)]
        return cupy.stack(found)

    return Library("cupy", cupy, row_searchsorted, lambda _: {})


def of_documents(library: Library, numbers: Any) -> tuple[Any, Any]:
    """(batch, seqlen) each: where the run of equal numbers that a token is in begins and ends."""
    xp = library.xp
    differs = numbers[:, 1:] != numbers[:, :-1]
    runs = xp.cumsum(xp.concatenate([xp.zeros_like(differs[:, :1]), differs], 1), 1)
    begin = library.row_searchsorted(runs, runs, "left")
    end = library.row_searchsorted(runs, runs, "right")
    return begin, xp.where(numbers < 0, begin, end)


def of_tree(library: Library, entry: Any, leave: Any) -> tuple[Any, Any]:
    """(batch, seqlen) each."""
    return (
        library.row_searchsorted(entry, entry, "left"),
        library.row_searchsorted(entry, leave, "left"),
    )


def of_prefix(library: Library, lengths: Any, rows: int, keys: int) -> tuple[Any, Any]:
    """(batch or 1, seqlen_k) each, for lengths (batch or 1,)."""
    xp = library.xp
    key = xp.arange(keys, **library.on_device_of(lengths))[None]
    causal = xp.clip(key - (keys - rows), 0, rows)
    begin = xp.where(key < lengths[:, None], 0, causal)
    return begin, xp.full_like(begin, rows)


def stacked(library: Library, begin: Any, end: Any) -> Any:
    """(batch or 1, 1, seqlen_k, 2) int32"""
    xp = library.xp
    ranges = xp.stack([begin, end], -1)[:, None]
    return ranges.to(xp.int32) if hasattr(ranges, "to") else ranges.astype(xp.int32)
