"""Checks of the functions around flash-attn's attention, which PyTorch's operations compute."""

from __future__ import annotations

from typing import Any

import torch

from anyflash._call.parsing import flags, length, named
from anyflash.flash_attn._options import check_tensors
from anyflash.torch._dispatch_state import is_compiling

_INTEGERS = (torch.int32, torch.int64)


class Checks:
    """Errors begin with the function's and the argument's names."""

    def __init__(self, function: str) -> None:
        self.function = f"anyflash.flash_attn.{function}"

    def tensors(self, **given: Any) -> None:
        """Of one device, the first one's."""
        check_tensors(self.function, **given)
        first, *others = given
        device = given[first].device
        for name in others:
            if given[name].device != device:
                raise ValueError(
                    f"{self.function}: {name} is on {given[name].device}, but {first} is on "
                    f"{device}; both must be on one device"
                )

    def shape(self, name: str, x: torch.Tensor, is_right: bool, expected: str) -> None:
        if not is_right:
            raise ValueError(
                f"{self.function}: {name} has shape {tuple(x.shape)}; expected {expected}"
            )

    def dtype(self, name: str, x: torch.Tensor, is_right: bool, allowed: str) -> None:
        if not is_right:
            raise TypeError(f"{self.function}: {name} is {x.dtype}; {allowed} is allowed")

    def integers(self, name: str, x: torch.Tensor, expected: str, count: int = -1) -> None:
        """``count`` int32 or int64; -1: any number of them."""
        self.dtype(name, x, x.dtype in _INTEGERS, "int32 or int64")
        self.shape(name, x, x.dim() == 1 and count in {-1, x.shape[0]}, expected)

    def size(self, name: str, value: Any) -> None:
        named(self.function, name, length, value)

    def below(self, name: str, x: torch.Tensor, end: int, limit: str, verb: str = "holds") -> None:
        """That 0 <= x < end, which is called ``limit``, where nobody has to wait to know it."""
        if is_compiling() or x.numel() == 0:
            return
        if x.device.type != "cpu":
            if end == 0 and verb == "holds":  # then no number is right
                raise ValueError(
                    f"{self.function}: {name} has {x.numel()} numbers; none is allowed, because "
                    f"they must be less than {limit}, 0"
                )
            return
        low, high = (int(bound) for bound in torch.aminmax(x))
        if low < 0 or high >= end:
            shown = low if low < 0 else high
            raise ValueError(
                f"{self.function}: {name} {verb} {shown}; at least 0 and less than {end}, {limit}, "
                "is allowed"
            )

    def flags(self, **given: Any) -> tuple[bool, ...]:
        return flags(self.function, **given)
