"""torch.vmap: the mapped axis becomes part of the batch; where it cannot, it is looped over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from anyflash.torch._dispatch_state import is_mapped
from anyflash.torch._problem import SIZE, Problem

Rule = Callable[..., tuple[Any, Any]]
Mapped = Sequence[int | None]
_MASKS = ("bias", "block_mask")  # (batch or 1, ...), axes may be missing
_BROADCAST = (*_MASKS, "key_ranges", "alibi_slopes")  # by the kernels
_LEVEL = 1  # of PyTorch's older vmap, which autograd does not nest


def rule(apply: Callable[..., Any]) -> Rule:
    """For an operator whose arguments begin with those of a Problem.

    Its outputs, and its tensors that follow the Problem, have a batch axis where it is dense.
    """

    def batched(info: Any, in_dims: Mapped, *arguments: Any) -> tuple[Any, Any]:
        size = info.batch_size
        mapped = [isinstance(dim, int) for dim in in_dims]  # a list of numbers has one of None
        arguments = tuple(
            x.movedim(dim, 0) if isinstance(dim, int) else x
            for x, dim in zip(arguments, in_dims, strict=True)
        )
        if _folds(arguments, mapped):
            results = apply(*_folded(size, arguments, mapped))
            results = [
                x.reshape(size, -1, *x.shape[1:]) if isinstance(x, Tensor) else x for x in results
            ]
        else:
            each = [
                apply(
                    *[
                        x[i] if is_mapped else x
                        for x, is_mapped in zip(arguments, mapped, strict=True)
                    ]
                )
                for i in range(size)
            ]
            results = [
                torch.stack(xs) if isinstance(xs[0], Tensor) else xs[0]
                for xs in zip(*each, strict=True)
            ]
        dims = tuple(0 if isinstance(x, Tensor) else None for x in results)
        return tuple(results), dims

    return batched


def apply_mapped(apply: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
    """What apply(*arguments) gives in a backward that autograd maps (is_grads_batched=True), by the
    same rule."""
    mapped = [is_mapped(x) for x in arguments]
    given = [
        torch._remove_batch_dim(x, _LEVEL, 1, 0) if is_one else x
        for x, is_one in zip(arguments, mapped, strict=True)
    ]
    info = SimpleNamespace(batch_size=given[mapped.index(True)].shape[0])
    results, _ = rule(apply)(info, [0 if is_one else None for is_one in mapped], *given)
    return tuple(
        torch._add_batch_dim(x, 0, _LEVEL) if isinstance(x, Tensor) else x for x in results
    )


def _folds(arguments: tuple[Any, ...], mapped: list[bool]) -> bool:
    """Whether the mapped axis can be a part of the batch axis."""
    names = {name for name, is_mapped in zip(Problem._fields, mapped, strict=False) if is_mapped}
    wanted = arguments[-1]  # of a backward: gradients that sum over the batch
    sums = isinstance(wanted, list) and any(wanted[3:])
    p = Problem(*arguments[:SIZE])
    # The number of a sequence in its batch is part of what dropout draws.
    alone = p.cu_seqlens_q is not None or p.dropout_p > 0 or sums
    return not (alone or names & {"sinks"})


def _folded(size: int, arguments: tuple[Any, ...], mapped: list[bool]) -> list[Any]:
    p = Problem(*arguments[:SIZE])
    batch = p.q.shape[1] if mapped[0] else p.q.shape[0]

    def fold(name: str, x: Any, is_mapped: bool) -> Any:
        if not isinstance(x, Tensor) or name in ("sinks", "rng_state"):
            return x
        if not is_mapped:
            x = x[None]
        rank = 4 if name in _MASKS else 2 if name == "alibi_slopes" else x.dim() - 1
        x = x[(slice(None), *(None,) * (rank + 1 - x.dim()))]
        if name in _BROADCAST and x.shape[:2] == (1, 1):
            return x[0]
        x = x.expand(size, batch, *x.shape[2:]).flatten(0, 1)
        # Lengths have no strides; of a batch of 1 the axes are joined without a copy.
        return x.contiguous() if name == "seqused_k" else x

    names = (*Problem._fields, *("",) * (len(arguments) - SIZE))
    return [fold(*item) for item in zip(names, arguments, mapped, strict=True)]
