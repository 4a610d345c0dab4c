"""What torch.compile and torch.export trace is checked as it is traced: by the core, which raises
what the call would raise when it runs. Where sizes are symbols, the call itself checks them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from anyflash import _core
from anyflash._call.call import LAYOUTS
from anyflash.torch import _problem
from anyflash.torch._problem import Problem

_FOUR_AXES = ("bias", "block_mask")  # leading ones may be missing
_TENSORS = Problem._fields[: Problem._fields.index("max_seqlen_q")]
_SCORES = ("softmax_scale", "causal", "window_left", "window_right", "softcap")


def check_ranks(p: Problem) -> None:
    rank = 3 if _problem.is_packed(p) else 4
    for name, x in zip("qkv", (p.q, p.k, p.v), strict=True):
        if x.dim() != rank:
            raise ValueError(
                f"{_problem.operation(p)}: {name} has {x.dim()} dimensions, shape "
                f"{tuple(x.shape)}; expected {rank}: {LAYOUTS[rank]}"
            )


def check_forward(p: Problem, results: dict[str, Tensor]) -> None:
    tensors = {name: getattr(p, name) for name in _TENSORS}
    if p.dropout_p == 0:
        tensors["rng_state"] = None
    numbers = {name: getattr(p, name) for name in (*_SCORES, "dropout_p")}
    if p.block_mask is not None:
        numbers |= {"block_size_q": p.block_m, "block_size_k": p.block_n}
    if _problem.is_packed(p):
        numbers |= {name: getattr(p, name) for name in ("max_seqlen_q", "max_seqlen_k")}
    check(_problem.operation(p), "forward", tensors | results, numbers)


def check(operation: str, function: str, tensors: dict[str, Any], numbers: dict[str, Any]) -> None:
    """By the core's names. None is not given."""
    described = {name: _described(name, x) for name, x in tensors.items() if x is not None}
    given = {name: x for name, x in numbers.items() if x is not None}
    sizes = (n for shape, _ in described.values() for n in shape)
    if all(isinstance(x, int | float) for x in (*sizes, *given.values())):
        _core.check_call(operation, function, described, given)


def _described(name: str, x: Tensor) -> tuple[tuple[Any, ...], str]:
    shape = tuple(x.shape)
    if name in _FOUR_AXES:
        shape = (1,) * (4 - len(shape)) + shape
    return shape, str(x.dtype).removeprefix("torch.")
