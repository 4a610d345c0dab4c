"""Which rows of a sequence each device of a mesh axis has, and how devices exchange them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from anyflash._call import parsing

LAYOUTS = ("contiguous", "zigzag")
_all_gather: Any = jax.lax.all_gather
_all_to_all: Any = jax.lax.all_to_all
_ppermute: Any = jax.lax.ppermute
_psum_scatter: Any = jax.lax.psum_scatter


class Run(NamedTuple):
    """So many rows of the whole from ``start`` on; the first of them is row ``at`` of those that
    are at hand."""

    start: Any
    at: int
    rows: int

    @property
    def own(self) -> slice:
        return slice(self.at, self.at + self.rows)


class Layout(NamedTuple):
    """A sequence is cut into chunks of equal length. Contiguous: device r has chunk r. Zigzag: of
    twice as many chunks, device r has chunk r and chunk 2 size - 1 - r."""

    axis: str
    size: int
    zigzag: bool

    def runs(self, device: Any, rows: int) -> tuple[Run, ...]:
        """Of a device that has so many rows; its number may be traced."""
        if not self.zigzag:
            return (Run(device * rows, 0, rows),)
        chunk = rows // 2
        last = 2 * self.size - 1
        return Run(device * chunk, 0, chunk), Run((last - device) * chunk, chunk, chunk)

    def next(self, x: Any) -> Any:
        """What the device before this one has."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return _ppermute(x, self.axis, pairs)

    def gathered(self, x: Any, axis: int) -> Any:
        """Every device's rows, in the order of the whole."""
        return self._in_order(_all_gather(x, self.axis, axis=axis, tiled=True), axis)

    def summed(self, x: Any, axis: int) -> Any:
        """This device's rows of the sum over the devices; each has all rows."""
        x = self._by_device(x, axis)
        return _psum_scatter(x, self.axis, scatter_dimension=axis, tiled=True)

    def to_heads(self, x: Any, rows: int = 1, heads: int = 2) -> Any:
        """Some heads of all rows, for all heads of this device's rows. The arguments say which axes
        count them."""
        x = _all_to_all(x, self.axis, split_axis=heads, concat_axis=rows, tiled=True)
        return self._in_order(x, rows)

    def to_rows(self, x: Any, rows: int = 1, heads: int = 2) -> Any:
        """The way back."""
        x = self._by_device(x, rows)
        return _all_to_all(x, self.axis, split_axis=rows, concat_axis=heads, tiled=True)

    def _in_order(self, x: Any, axis: int) -> Any:
        """Of rows that lie device by device."""
        if not self.zigzag:
            return x
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        chunk = x.shape[axis] // (2 * self.size)
        pairs = x.reshape(*before, self.size, 2, chunk, *after)
        front, back = (jnp.take(pairs, i, axis + 1) for i in (0, 1))
        return jnp.concatenate([front, jnp.flip(back, axis)], axis).reshape(x.shape)

    def _by_device(self, x: Any, axis: int) -> Any:
        """Of rows in the order of the whole."""
        if not self.zigzag:
            return x
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        chunk = x.shape[axis] // (2 * self.size)
        chunks = x.reshape(*before, 2 * self.size, chunk, *after)
        front, back = jnp.split(chunks, 2, axis)
        return jnp.stack([front, jnp.flip(back, axis)], axis + 1).reshape(x.shape)


def zigzag_order(length: int, devices: int) -> Any:
    """The order in which a sequence's rows are sharded, zigzag.

    The sequence is cut into twice as many chunks as there are devices. Device r gets chunk r and
    chunk ``2 devices - 1 - r``.

    Parameters
    ----------
    length : int
        A multiple of ``2 * devices``.
    devices : int

    Returns
    -------
    order : (length,), array of int64 of NumPy
        ``x[:, order]`` is to be sharded over the devices; ``numpy.argsort(order)`` is the way back.

    Raises
    ------
    TypeError, ValueError
        No integers; a length that is no such multiple.

    Examples
    --------
    >>> import anyflash.jax
    >>> anyflash.jax.zigzag_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    for name, value in (("length", length), ("devices", devices)):
        parsing.named("anyflash.jax.zigzag_order", name, parsing.length, value)
    if devices < 1 or length % (2 * devices):
        raise ValueError(
            f"anyflash.jax.zigzag_order: length is {length}; a multiple of {2 * devices}, twice "
            "the number of devices, is allowed"
        )
    chunks = np.arange(length).reshape(2 * devices, -1)
    pairs = [(rank, 2 * devices - 1 - rank) for rank in range(devices)]
    return np.concatenate([chunks[list(pair)] for pair in pairs]).reshape(-1)
