"""Keys and values travel from device to device (Liu et al., "Ring attention", arXiv 2310.01889),
and gradients of them with them, back to where they came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from anyflash.jax._context_parallel._layout import Layout
from anyflash.jax._context_parallel._pieces import (
    BackwardSums,
    ForwardSums,
    Keys,
    Piece,
    Pieces,
    Results,
    Step,
)
from anyflash.jax._ffi import Arrays


class Ring:
    def __init__(self, layout: Layout, arrays: Arrays, pieces: Pieces) -> None:
        """``arrays``: a device's k and v, and all sinks. ``pieces``: of its rows."""
        self.layout, self.arrays, self.pieces = layout, arrays, pieces
        self.device = jax.lax.axis_index(layout.axis)
        self.columns = arrays["k"].shape[-1]

    def _packed(self, k: Any, v: Any) -> Any:
        """One array, which travels in one message."""
        return jnp.concatenate([k, v], -1)

    def _apart(self, packed: Any) -> tuple[Any, Any]:
        return packed[..., : self.columns], packed[..., self.columns :]

    def _keys(self, packed: Any, hop: int) -> Keys:
        owner = (self.device - hop) % self.layout.size
        return Keys(*self._apart(packed), self.layout.runs(owner, packed.shape[1]))

    def _steps(self, hop: int) -> Sequence[Step] | None:
        """With zigzag, one launch a hop instead of four, where a causal mask is all that depends on
        where rows lie. Chunks at the same places are like one sequence. Of others every row sees
        every key, or none."""
        whole = self.pieces.whole
        is_causal = whole.window == (-1, 0) and whole.lengths[0] == whole.lengths[1]
        if not (self.layout.zigzag and is_causal) or self.pieces.given or whole.packed:
            return None
        rows = self.pieces.q.shape[1]
        every, front, back = slice(0, rows), slice(0, rows // 2), slice(rows // 2, rows)
        if hop == 0:
            return [Step([Piece(every, every, causal=True)])]
        owner_is_before = self.device >= hop
        return [Step([Piece(back, every), Piece(every, front)], owner_is_before)]

    def forward(self) -> Arrays:
        k, v = self.arrays["k"], self.arrays["v"]
        size = self.layout.size
        sums = ForwardSums(self.pieces, v.shape[-1], self.arrays.get("sinks"))
        packed = self._packed(k, v)
        for hop in range(size):
            following = self.layout.next(packed) if hop + 1 < size else packed
            sums.add(self._keys(packed, hop), self._steps(hop))
            packed = following
        return sums.finish()

    def backward(self, results: Results, wanted: Sequence[str]) -> Arrays:
        k, v = self.arrays["k"], self.arrays["v"]
        size = self.layout.size
        sums = BackwardSums(self.pieces, results, wanted)
        packed = self._packed(k, v)
        gathered = self._packed(*sums.empty(Keys(k, v, ())))
        for hop in range(size):
            following = self.layout.next(packed) if hop + 1 < size else packed
            into = self._apart(gathered)
            found = sums.add(self._keys(packed, hop), into, self._steps(hop))
            # After the last hop, to where the keys came from.
            gathered = self.layout.next(self._packed(*found))
            packed = following
        dk, dv = self._apart(gathered)
        return sums.state | {"k": dk, "v": dv}
