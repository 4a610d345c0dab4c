"""Tensors with any memory layout, in a storage whose every other byte is a canary.

The canary is a NaN in each data type, so that reading a wrong element shows as well as writing one.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from oracle.attention import Array

CANARY = 0xFF
ALIGNMENT = 256
# Elements before and after a tensor. 0 leaves blocks of the exact size to a memory checker.
GUARD = int(os.environ.get("ANYFLASH_TEST_GUARD", "128"))


@dataclass(frozen=True)
class Layout:
    """How the axes b, s, h, d lie in memory."""

    order: str = ""  # outermost axis first; empty: as in the shape
    pad: Mapping[str, int] = field(default_factory=dict)  # unused places at an axis' end
    step: Mapping[str, int] = field(default_factory=dict)  # every n-th place of an axis is used
    flip: str = ""  # axes with a negative stride
    expand: str = ""  # axes with stride 0
    lead: int = 0  # elements between an aligned address and the first place
    byte_offset: bool = False  # the offset is DLTensor.byte_offset, not part of the address

    @property
    def is_aligned(self) -> bool:
        """Whether TMA can read it, if rows have whole pieces of 16 bytes of 16-bit elements."""
        moves = self.flip or self.expand or "d" in self.step or self.order[3:] not in ("", "d")
        return not moves and self.lead % 8 == 0 and self.pad.get("d", 0) % 8 == 0


LAYOUTS = {
    "contiguous": Layout(),
    "bhsd": Layout(order="bhsd"),
    "sbhd": Layout(order="sbhd"),
    "hsbd": Layout(order="hsbd"),
    "expand_h": Layout(expand="h"),
    "expand_b": Layout(expand="b"),
    "expand_s": Layout(expand="s"),
    "expand_bh": Layout(expand="bh"),
    "flip_s": Layout(flip="s"),
    "flip_bh": Layout(flip="bh"),
    "flip_d": Layout(flip="d"),
    "offset_1": Layout(lead=1),
    "offset_4": Layout(lead=4),
    "byte_offset_8": Layout(lead=8, byte_offset=True),
    "byte_offset_3": Layout(lead=3, byte_offset=True),
    "rows_odd": Layout(order="bhsd", pad={"d": 1}),
    "rows_padded": Layout(pad={"d": 8}),
    "heads_odd": Layout(pad={"d": 3}),
    "batch_gap": Layout(pad={"s": 5}),
    "step_d": Layout(step={"d": 2}),
    "step_s": Layout(step={"s": 3}),
    "step_h": Layout(step={"h": 2}),
    "transposed": Layout(order="bhds"),
    "flip_all_step_d": Layout(order="sbhd", flip="bshd", step={"d": 2}, lead=5),
    # Slices of one (b, s, 4 + 2 + 2, 64) projection.
    "fused_q": Layout(pad={"h": 4}),
    "fused_k": Layout(pad={"h": 6}, lead=4 * 64),
    "fused_v": Layout(pad={"h": 6}, lead=6 * 64),
}
WRITABLE_LAYOUTS = tuple(name for name, layout in LAYOUTS.items() if not layout.expand)


@dataclass
class Tensor:
    """Element (0, ..., 0) is storage[offset]; strides count elements."""

    storage: Array
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    byte_offset: bool = False

    def strided(self, storage: Array) -> Array:
        steps = tuple(stride * storage.itemsize for stride in self.strides)
        # As integers: NumPy does not know ml_dtypes' names for all of its types.
        numbers = storage[self.offset :].view(f"u{storage.itemsize}")
        return np.lib.stride_tricks.as_strided(numbers, self.shape, steps).view(storage.dtype)

    @property
    def view(self) -> Array:
        return self.strided(self.storage)

    def check_canaries(self, name: str) -> None:
        """Raise AssertionError if anything but the tensor's elements has changed."""
        rest = np.ones(len(self.storage), bool)
        self.strided(rest)[...] = False
        per_element = self.storage.view(np.uint8).reshape(-1, self.storage.itemsize)
        changed = np.nonzero(rest & (per_element != CANARY).any(-1))[0]
        assert not changed.size, (
            f"{name}: {changed.size} elements outside of it were written, "
            f"the first {changed[0] - self.offset} after element 0"
        )


def aligned_bytes(count: int) -> Array:
    """`count` canary bytes that begin at a multiple of ALIGNMENT."""
    block = np.full(count + ALIGNMENT, CANARY, np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return block[start : start + count]


def _strides(shape: tuple[int, ...], layout: Layout, axes: str) -> tuple[tuple[int, ...], int, int]:
    """(strides, places, index of element 0)"""
    extent = dict(zip(axes, shape, strict=True))
    stride: dict[str, int] = {}
    places = 1
    first = 0
    for axis in reversed(layout.order or axes):
        if axis not in axes:
            continue
        if axis in layout.expand:
            stride[axis] = 0
            continue
        step = layout.step.get(axis, 1)
        stride[axis] = places * step
        if axis in layout.flip:
            first += max(extent[axis] - 1, 0) * stride[axis]
            stride[axis] = -stride[axis]
        places *= extent[axis] * step + layout.pad.get(axis, 0)
    return tuple(stride[axis] for axis in axes), places, first


def empty(
    shape: tuple[int, ...], dtype: np.dtype, layout: str = "contiguous", axes: str = "bshd"
) -> Tensor:
    """A tensor full of canaries."""
    how = LAYOUTS[layout]
    strides, places, first = _strides(shape, how, axes)
    count = GUARD + how.lead + places + GUARD
    storage = aligned_bytes(count * dtype.itemsize).view(dtype)
    return Tensor(storage, shape, strides, GUARD + how.lead + first, how.byte_offset)


def place(values: Array, layout: str = "contiguous", axes: str = "bshd") -> Tensor:
    """A tensor with these values; along an expanded axis the first one counts."""
    tensor = empty(values.shape, values.dtype, layout, axes)
    first = tuple(slice(0, 1) if axis in LAYOUTS[layout].expand else slice(None) for axis in axes)
    tensor.view[first] = values[first]
    return tensor


def sparse(values: Array, strides: tuple[int, ...]) -> Tensor:
    """A tensor whose strides span more memory than the machine has; only touched pages exist."""
    reach = sum((n - 1) * stride for n, stride in zip(values.shape, strides, strict=True))
    size = math.ceil((reach + 1) * values.itemsize / mmap.PAGESIZE) * mmap.PAGESIZE
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    tensor = Tensor(np.frombuffer(pages, values.dtype), values.shape, strides, 0)
    tensor.view[...] = values
    return tensor
