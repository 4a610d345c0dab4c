"""Whether an array that is written shares memory with another one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple


class Memory(NamedTuple):
    """Where an array's elements lie; numbers of bytes."""

    address: int  # of the element with index 0
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int

    def ends(self) -> tuple[int, int]:
        """Of the first byte, and of that behind the last one."""
        steps = [(n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True)]
        first = self.address + sum(step for step in steps if step < 0)
        return first, self.address + sum(step for step in steps if step > 0) + self.itemsize

    def is_same(self, other: Memory) -> bool:
        """Whether every element lies where the other's does; along an axis of one element, strides
        mean nothing."""
        if self._replace(strides=()) != other._replace(strides=()):
            return False
        axes = zip(self.shape, self.strides, other.strides, strict=True)
        return all(n < 2 or of_self == of_other for n, of_self, of_other in axes)

    def is_dense(self) -> bool:
        """Whether the elements lie one behind the other, in any order of the axes."""
        expected = self.itemsize
        for stride, n in sorted(zip(map(abs, self.strides), self.shape, strict=True)):
            if n > 1 and stride != expected:
                return False
            expected *= n
        return True


def overlap(a: Memory, b: Memory) -> bool:
    """Whether the two certainly share an element. Views of one array may lie between one another
    without sharing any: those with the same strides are told apart."""
    if math.prod(a.shape) == 0 or math.prod(b.shape) == 0:
        return False
    (first_a, end_a), (first_b, end_b) = a.ends(), b.ends()
    if end_a <= first_b or end_b <= first_a:
        return False
    axes = _common_axes(a, b)
    if axes is not None:
        return any(
            -b.itemsize < apart < a.itemsize for apart in _distances(b.address - a.address, axes)
        )
    # Where one lies, no gaps are; the other's first byte and last one are of elements.
    if a.is_dense() and (first_a <= first_b or end_b <= end_a):
        return True
    if b.is_dense() and (first_b <= first_a or end_a <= end_b):
        return True
    return a.address == b.address


Axis = tuple[int, int, int]  # a stride, and how many elements of either array are along it


def _common_axes(a: Memory, b: Memory) -> list[Axis] | None:
    """From the widest stride to the narrowest; None where the strides differ."""
    if len(a.shape) != len(b.shape):
        return None
    axes: list[Axis] = []
    for of_a, of_b, n, m in zip(a.strides, b.strides, a.shape, b.shape, strict=True):
        if n > 1 and m > 1 and of_a != of_b:
            return None
        if n > 1 or m > 1:
            axes.append((of_a if n > 1 else of_b, n, m))
    return sorted(axes, key=lambda axis: -abs(axis[0]))


def _distances(apart: int, axes: list[Axis]) -> Iterator[int]:
    """How far elements of b lie behind elements of a, of those pairs that may be the nearest: along
    an axis, the others reach less far than a step."""
    if not axes:
        yield apart
        return
    (stride, n, m), *others = axes
    near = -apart // stride if stride else 0
    for steps in (near, near + 1):
        if -n < steps < m:
            yield from _distances(apart + steps * stride, others)


InPlace = Mapping[str, tuple[str, ...]]  # of an output the inputs that it may be


def of_pairs(
    outputs: dict[str, Memory], inputs: dict[str, Memory], allowed: InPlace
) -> tuple[str, str] | None:
    """The names of an output and of another output or an input that overlap."""
    arrays = [*outputs.items(), *inputs.items()]
    ends = [x.ends() for _, x in arrays]  # most lie apart as a whole
    for i, (output, written) in enumerate(arrays[: len(outputs)]):
        for j in range(i + 1, len(arrays)):
            if ends[i][1] <= ends[j][0] or ends[j][1] <= ends[i][0]:
                continue
            name, other = arrays[j]
            in_place = name in allowed.get(output, ()) and written.is_same(other)
            if not in_place and overlap(written, other):
                return output, name
    return None
