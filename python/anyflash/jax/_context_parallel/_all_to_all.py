"""Rows are exchanged for heads (Jacobs et al., "DeepSpeed Ulysses", arXiv 2309.14509): a device
computes some heads of the whole sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anyflash.jax import _ffi
from anyflash.jax._context_parallel._layout import Layout, Run
from anyflash.jax._context_parallel._pieces import (
    BackwardSums,
    ForwardSums,
    Heads,
    Keys,
    Pieces,
    Results,
)
from anyflash.jax._ffi import Arrays


def why_not(size: int, heads: int, heads_k: int) -> str | None:
    """What is wrong with these numbers of heads."""
    if heads % size:
        return f"q has {heads} heads, which {size} devices do not divide"
    each, group = heads // size, heads // heads_k
    if each % group and group % each:
        return f"{size} devices with {heads} heads of q cannot share {heads_k} heads of k"
    return None


class AllToAll:
    def __init__(self, layout: Layout, arrays: Arrays, pieces: Pieces) -> None:
        """``arrays``: a device's k and v, and all sinks. ``pieces``: of its rows."""
        self.layout, self.given = layout, pieces.given
        self.rows, heads = pieces.q.shape[1:3]
        self.heads_k, self.each = arrays["k"].shape[2], heads // layout.size
        self.device = jax.lax.axis_index(layout.axis)
        # Where there are fewer key heads than devices, several devices need the same.
        self.copies = max(layout.size // self.heads_k, 1)
        q = layout.to_heads(pieces.q)
        k, v = (layout.to_heads(self._copied(arrays[name])) for name in ("k", "v"))
        self.keys = Keys(k, v, (Run(0, 0, k.shape[1]),))
        given = {name: self._of_heads(name, x) for name, x in pieces.given.items()}
        own = Heads(self.device, layout.size, self.each)
        self.pieces = Pieces(pieces.whole, given, q, (Run(0, 0, q.shape[1]),), own)
        sinks = arrays.get("sinks")
        self.sinks = None if sinks is None else self._own(sinks, 0)

    def _copied(self, x: Any) -> Any:
        return x if self.copies == 1 else jnp.repeat(x, self.copies, 2)

    def _summed_copies(self, x: Any) -> Any:
        if self.copies == 1:
            return x
        return x.reshape(*x.shape[:2], self.heads_k, self.copies, x.shape[-1]).sum(3)

    def _own(self, x: Any, axis: int) -> Any:
        """The part of q's heads that this device computes."""
        if x.shape[axis] == 1:
            return x
        first = self.device * self.each
        return jax.lax.dynamic_slice_in_dim(x, first, self.each, axis)

    def _of_heads(self, name: str, x: Any) -> Any:
        """What belongs to this device's heads, and to all rows."""
        if name == "bias" and self._has_rows(x):
            return self.layout.gathered(x, 2) if x.shape[1] == 1 else self.layout.to_heads(x, 2, 1)
        if name in ("bias", "block_mask"):
            return self._own(x, 1)
        if name == "alibi_slopes":
            return self._own(x, x.ndim - 1)
        if name == "key_ranges" and x.shape[1] != 1:
            count = max(self.heads_k // self.layout.size, 1)
            first = self.device * self.heads_k // self.layout.size
            return jax.lax.dynamic_slice_in_dim(x, first, count, 1)
        return x

    def _has_rows(self, bias: Any) -> bool:
        """Not one row for all: where a device has one row, that is the same."""
        return bool(bias.shape[2] == self.rows)

    def forward(self) -> Arrays:
        sums = ForwardSums(self.pieces, self.keys.v.shape[-1], self.sinks, alone=True)
        sums.add(self.keys)
        found = sums.finish()
        results = {
            "out": self.layout.to_rows(found["out"]),
            "lse": self.layout.to_rows(found["lse"], 2, 1),
        }
        if "max_logits" in found:
            results["max_logits"] = self._among_all(found["max_logits"], 1, -jnp.inf)
        return results

    def backward(self, results: Results, wanted: Sequence[str]) -> Arrays:
        to_heads, to_rows = self.layout.to_heads, self.layout.to_rows
        by_heads = Results(
            to_heads(results.out),
            to_heads(results.lse, 2, 1),
            to_heads(results.dout),
            to_heads(results.dlse, 2, 1),
        )
        sums = BackwardSums(self.pieces, by_heads, wanted)
        dk, dv = sums.add(self.keys, sums.empty(self.keys))
        grads = {name: self._of_all(name, x) for name, x in sums.state.items() if name != "q"}
        return grads | {
            "q": to_rows(sums.state["q"]),
            "k": self._summed_copies(to_rows(dk)),
            "v": self._summed_copies(to_rows(dv)),
        }

    def _of_all(self, name: str, own: Any) -> Any:
        """A gradient of bias or slopes as the array was given."""
        given = self.given[name]
        if name == "bias" and self._has_rows(given):
            if given.shape[1] == 1:
                return self.layout.summed(own, 2)
            return self.layout.to_rows(own, 2, 1)
        axis = 1 if name == "bias" else given.ndim - 1
        if given.shape[axis] == 1:
            return own
        return self._among_all(own, axis, 0)

    def _among_all(self, own: Any, axis: int, other: float) -> Any:
        """What this device's heads have, and a number for the other heads."""
        shape = list(own.shape)
        shape[axis] *= self.layout.size
        total = _ffi.vary_as(jnp.full(shape, other, own.dtype), own)
        first = self.device * self.each
        return jax.lax.dynamic_update_slice_in_dim(total, own, first, axis)
