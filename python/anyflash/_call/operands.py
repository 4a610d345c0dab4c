"""The arrays of a call. Every error begins with the operation's and the argument's names."""

from __future__ import annotations

import numbers
from collections.abc import Callable
from typing import Any, TypeVar

from anyflash._arrays.base import DLPACK_CODES, FLOATS, INT32, INT64, Instead, listed
from anyflash._arrays.registry import framework_of
from anyflash._call import overlap, parsing

_T = TypeVar("_T")
_REFUSALS = (TypeError, ValueError, NotImplementedError)
_INSTEAD = Instead()


class Operands:
    """The first array says to which framework and device all of a call's arrays must belong."""

    __slots__ = (
        "_described",
        "_type",
        "device",
        "first",
        "framework",
        "instead",
        "operation",
        "sample",
    )

    def __init__(self, operation: str, argument: str, x: Any, instead: Instead = _INSTEAD) -> None:
        self.operation = operation
        self.instead = instead
        self.first = argument
        self.sample = x
        self._type = type(x)
        try:
            self.framework = framework_of(x)
            shape, dtype, self.device = self.framework.read(x, instead)
            self._described = shape, dtype
        except _REFUSALS as error:
            raise self.about(argument, error) from None

    def about(self, argument: str, error: Exception) -> Exception:
        """The error with both names in front of its message."""
        kind = next(kind for kind in _REFUSALS if isinstance(error, kind))
        return kind(f"{self.operation}: {argument} {error}")

    def parse(self, argument: str, function: Callable[..., _T], *arguments: Any) -> _T:
        """function(*arguments), its errors with the names in front."""
        try:
            return function(*arguments)
        except _REFUSALS as error:
            raise self.about(argument, error) from None

    def stream(self, value: Any) -> int:
        """A stream that the user named."""
        stream = self.parse("stream", parsing.stream, value)
        if self.device.kind == "cuda":
            self.parse("stream", self.framework.check_stream, stream)
        return stream

    def read(
        self, argument: str, x: Any, allowed: tuple[str, ...] = FLOATS
    ) -> tuple[tuple[int, ...], str]:
        """Shape and dtype of an array that belongs here and has one of the dtypes allowed."""
        try:
            shape, dtype = self._described if x is self.sample else self._describe(x)
            if dtype not in allowed:
                raise TypeError(f"is {dtype}; {self._cure(argument, dtype, allowed)}")
        except _REFUSALS as error:
            raise self.about(argument, error) from None
        return shape, dtype

    def _describe(self, x: Any) -> tuple[tuple[int, ...], str]:
        framework = self.framework
        if type(x) is not self._type and (other := framework_of(x)) is not framework:
            raise TypeError(
                f"is an array of {other.name} ({type(x).__name__}), but {self.first} is one of "
                f"{framework.name} ({self._type.__name__}); pass arrays of one framework"
            )
        shape, dtype, device = framework.read(x, self.instead)
        if device is not self.device and device != self.device:
            raise ValueError(
                f"is on {device.kind}:{device.number}, but {self.first} is on "
                f"{self.device.kind}:{self.device.number}; all arrays must be on one device"
            )
        return shape, dtype

    def _cure(self, argument: str, dtype: str, allowed: tuple[str, ...]) -> str:
        if allowed is INT32 and dtype in INT64 and self.framework.to_int32:
            return f"int32 is allowed: pass {argument}{self.framework.to_int32}"
        return listed(allowed)

    def refuse_no_array(self, argument: str, x: Any) -> None:
        """Where an int or an array of int32 is allowed, and x is no int."""
        if isinstance(x, (numbers.Number, str, bytes, tuple, list)):
            raise TypeError(
                f"{self.operation}: {argument} is {type(x).__name__}; an int or an array of int32 "
                "is allowed"
            )

    def cache(self, argument: str, x: Any) -> None:
        """Refuses a cache that cannot be appended to."""
        self.parse(argument, self.framework.check_cache, x)

    def output(self, argument: str, x: Any, allowed: tuple[str, ...]) -> str:
        """Dtype of a user's array that will be written."""
        _, dtype = self.read(argument, x, allowed)
        self.parse(argument, self.framework.check_out, x)
        return dtype

    def check_apart(
        self, outputs: dict[str, Any], inputs: dict[str, Any], allowed: overlap.InPlace
    ) -> None:
        """That a user's arrays that are written share no memory with one another, nor with those
        that are read. Of an output, ``allowed`` names the inputs that it may be."""
        if self.framework.lie_apart(outputs.values(), inputs.values()):
            return
        memory = self.framework.memory
        written, read = (
            {name: m for name, x in arrays.items() if (m := memory(x)) is not None}
            for arrays in (outputs, inputs)
        )
        found = overlap.of_pairs(written, read, allowed)
        if found is not None:
            raise ValueError(
                f"{self.operation}: {found[0]} and {found[1]} overlap in memory; an array of its "
                "own is allowed"
            )

    def as_bits(self, dtype: str) -> int:
        """DLPack's code of this dtype, if an exported array of it shows unsigned integers; else
        0."""
        return DLPACK_CODES[dtype] if dtype in self.framework.as_bits else 0

    def empty(self, shape: tuple[int, ...], dtype: str | None) -> Any:
        """A new array of the framework, on the device; dtype None: that of the first array."""
        try:
            return self.framework.empty(shape, self.sample, dtype, self.device)
        except RuntimeError as error:
            name, _, message = str(error).partition(": ")
            if name != "anyflash":
                raise  # the framework's own
            raise type(error)(f"{self.operation}: {message}") from None


_LIKE = Instead(traced="an array outside of jax.jit, grad and vmap is allowed")


def as_like(operation: str, result: Any, like: Any) -> Any:
    """A NumPy array as one of like's framework, on its device. That like wants a gradient is no
    matter: none of its numbers is used."""
    detach = getattr(like, "detach", None)
    operands = Operands(operation, "like", detach() if callable(detach) else like, _LIKE)
    return operands.parse("like", operands.framework.from_numpy, result, like)
