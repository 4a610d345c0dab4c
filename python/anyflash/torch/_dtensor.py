"""How the operators of _ops.py work on DTensors: each rank computes the batch entries or the heads
that it holds, and nothing is communicated.

Importing this module registers the rules. `register_rules` does so once there can be DTensors,
because an import of torch.distributed.tensor takes long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from anyflash.torch._problem import DIFFERENTIABLE, SIZE, Problem, is_packed, operation

# A DTensorSpec, which says how a tensor is placed, and stands for it.
Spec = Any
# Where an operator's results and arguments lie along one axis of the mesh; None: no tensor.
Rule = tuple[list[Any], list[Any]]

_BATCH, _HEADS = "batch", "heads"
_ADVICE = (
    "redistribute them, or call it on local tensors: "
    "torch.distributed.tensor.experimental.local_map"
)


class _Axes:
    """Of each tensor of a problem: which of its axes counts the batch and which the heads, if any.
    An axis of size 1 that is broadcast counts nothing."""

    def __init__(self, p: Problem) -> None:
        self.packed = is_packed(p)
        batch = {} if self.packed else {"q": 0, "k": 0, "v": 0, "seqused_k": 0}
        heads = {"q": p.q.ndim - 2, "k": p.k.ndim - 2, "v": p.v.ndim - 2, "sinks": 0}
        for name in ("bias", "block_mask"):  # (batch or 1, heads or 1, ...), axes may be missing
            x = getattr(p, name)
            for axes, behind in ((batch, 4), (heads, 3)):
                axis = -1 if x is None else x.ndim - behind
                if axis >= 0 and x.shape[axis] != 1:
                    axes[name] = axis
        x = p.key_ranges  # (batch or 1, heads_k or 1, ...); packed: (heads_k or 1, ...)
        if x is not None and x.shape[-3] != 1:
            heads["key_ranges"] = x.ndim - 3
        if x is not None and x.ndim == 4 and x.shape[0] != 1:
            batch["key_ranges"] = 0
        if p.alibi_slopes is not None:  # (heads,) or (batch, heads)
            heads["alibi_slopes"] = p.alibi_slopes.ndim - 1
            if p.alibi_slopes.ndim == 2 and p.alibi_slopes.shape[0] != 1:
                batch["alibi_slopes"] = 0
        self._of = {_BATCH: batch, _HEADS: heads}

    def place(self, name: str, kind: str | None) -> Any:
        """Along a mesh axis that divides the batch, the heads or nothing."""
        axis = None if kind is None else self._of[kind].get(name)
        return Replicate() if axis is None else Shard(axis)

    def sharded(self, axis: int) -> str | None:
        """What is divided where q is sharded on an axis."""
        kinds = [kind for kind in (_BATCH, _HEADS) if self._of[kind].get("q") == axis]
        return kinds[0] if kinds else None


def _refuse(p: Problem, problem: str) -> None:
    raise ValueError(f"{operation(p)}: {problem}")


def _divisions(p: Problem, axes: _Axes) -> list[str | None]:
    """Along each axis of the mesh: what q, k and v divide there; other placements are refused."""
    specs: tuple[Spec, ...] = (p.q, p.k, p.v)
    placements = [tuple(spec.placements) for spec in specs]
    heads = f"Shard({p.q.ndim - 2}) (heads)"
    allowed = f"{heads} and Replicate()"
    if not axes.packed:
        allowed = f"Shard(0) (batch), {allowed}"
    shown = ", ".join(f"{name} {given}" for name, given in zip("qkv", placements, strict=True))
    if len(set(placements)) != 1:
        _refuse(p, f"the placements differ: {shown}; they must be the same. To do: {_ADVICE}")
    kinds: list[str | None] = []
    for placement in placements[0]:
        kind = axes.sharded(placement.dim) if type(placement) is Shard else None
        if kind is None and not placement.is_replicate():
            _refuse(
                p, f"the placements are {shown}; along a mesh axis {allowed} work. To do: {_ADVICE}"
            )
        kinds.append(kind)
    _check_sizes(p, axes, kinds)
    return kinds


def _check_sizes(p: Problem, axes: _Axes, kinds: list[str | None]) -> None:
    q: Spec = p.q
    ranks = {
        wanted: math.prod(q.mesh.size(i) for i, kind in enumerate(kinds) if kind == wanted)
        for wanted in (_BATCH, _HEADS)
    }
    heads, heads_k, n = p.q.shape[-2], p.k.shape[-2], ranks[_HEADS]
    if heads % n or heads_k % n:
        _refuse(
            p,
            f"q has {heads} heads, k and v have {heads_k}, and they are sharded over {n} ranks; "
            "both numbers must be multiples of that. Fewer ranks, or Replicate(), work",
        )
    if not axes.packed and p.q.shape[0] < ranks[_BATCH]:
        _refuse(
            p,
            f"the batch of {p.q.shape[0]} is sharded over {ranks[_BATCH]} ranks; each needs an "
            "entry. Fewer ranks, or Replicate(), work",
        )
    if p.dropout_p > 0 and any(kinds) and p.total_heads != heads:
        _refuse(
            p,
            f"dropout_p is {p.dropout_p}, q is sharded, and total_heads is {p.total_heads}; "
            f"{heads} is allowed, with the batch_start and head_start of this rank. "
            f"{operation(p)} knows them, the operator does not",
        )


def _rules(arguments: tuple[Any, ...]) -> Iterator[tuple[Problem, _Axes, str | None, list[Any]]]:
    """What can be along one axis of the mesh: the problem, its axes, what is divided, and where the
    problem's arguments then lie."""
    p = Problem(*arguments[:SIZE])
    axes = _Axes(p)
    kinds = set(_divisions(p, axes))
    # In this order, because PyTorch may take the first of those that cost the same.
    for kind in (None, _BATCH, _HEADS):
        if kind in kinds:
            given = [
                axes.place(name, kind) if hasattr(x, "placements") else None
                for name, x in zip(Problem._fields, p, strict=True)
            ]
            yield p, axes, kind, given


def _like_lse(axes: _Axes, kind: str | None) -> Any:
    """(batch, heads, seqlen_q), (batch, heads, ...); of packed sequences (heads, total_q)."""
    if kind is None:
        return Replicate()
    return Shard(0 if axes.packed or kind == _BATCH else 1)


def _forward_rules(*arguments: Any) -> list[Rule]:
    rules: list[Rule] = []
    for _, axes, kind, given in _rules(arguments):
        _lse, return_max_logits, return_dropout_mask, _dtype = arguments[SIZE:]
        lse = _like_lse(axes, kind)
        # (batch, heads, ...) also of packed sequences; what was not asked for is empty.
        whole = Shard(1) if axes.packed and kind == _HEADS else lse
        results = [
            axes.place("q", kind),
            lse if _lse or return_max_logits or return_dropout_mask else Replicate(),
            whole if return_max_logits else Replicate(),
            whole if return_dropout_mask else Replicate(),
        ]
        rules.append((results, [*given, None, None, None, None]))
    return rules


def _backward_rules(*arguments: Any) -> list[Rule]:
    rules: list[Rule] = []
    for p, axes, kind, given in _rules(arguments):
        _out, _lse, dout, dlse, wanted = arguments[SIZE:]
        results = [axes.place(name, kind) for name in ("q", "k", "v")]
        names = Problem._fields[3:DIFFERENTIABLE]
        for name, is_wanted in zip(names, wanted[3:], strict=True):
            placed = axes.place(name, kind)
            sums = kind is not None and placed.is_replicate() and getattr(p, name) is not None
            # What all batch entries or heads share has a gradient that sums over them.
            results.append((Partial() if sums else placed) if is_wanted else Replicate())
        q, lse = axes.place("q", kind), _like_lse(axes, kind)
        cotangents = [None if dout is None else q, None if dlse is None else lse]
        rules.append((results, [*given, q, lse, *cotangents, None]))
    return rules


def _register(name: str, rules: Callable[..., list[Rule]]) -> None:
    operator = getattr(torch.ops.anyflash, name).default
    register_sharding(operator)(rules)


_register("forward", _forward_rules)
_register("backward", _backward_rules)
