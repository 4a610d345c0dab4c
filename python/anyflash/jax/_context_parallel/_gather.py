"""Every device gets all keys and values, in the order of the whole, and computes its own rows. Each
row is one piece, as on a single device."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp

from anyflash.jax._context_parallel._layout import Layout, Run
from anyflash.jax._context_parallel._pieces import (
    BackwardSums,
    ForwardSums,
    Keys,
    Pieces,
    Results,
)
from anyflash.jax._ffi import Arrays


class Gather:
    def __init__(self, layout: Layout, arrays: Arrays, pieces: Pieces) -> None:
        """``arrays``: a device's k and v, and all sinks. ``pieces``: of its rows."""
        self.layout, self.pieces, self.sinks = layout, pieces, arrays.get("sinks")
        self.columns = arrays["k"].shape[-1]
        whole = layout.gathered(jnp.concatenate([arrays["k"], arrays["v"]], -1), 1)
        runs = (Run(0, 0, whole.shape[1]),)
        self.keys = Keys(whole[..., : self.columns], whole[..., self.columns :], runs)

    def forward(self) -> Arrays:
        sums = ForwardSums(self.pieces, self.keys.v.shape[-1], self.sinks, alone=True)
        sums.add(self.keys)
        return sums.finish()

    def backward(self, results: Results, wanted: Sequence[str]) -> Arrays:
        sums = BackwardSums(self.pieces, results, wanted)
        found = sums.add(self.keys, sums.empty(self.keys))
        own = self.layout.summed(jnp.concatenate(found, -1), 1)
        return sums.state | {"k": own[..., : self.columns], "v": own[..., self.columns :]}
