"""DTensors among the arguments: the part of each that this rank computes with, which part of the
whole that is, and how results are placed. The ranks that share a sequence are no ranks of the
DTensors' mesh: along its axes, batch entries or heads are divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash._call.options import AttentionOptions, Packing, Part
from anyflash.torch._sharding import is_distributed, part_of
from anyflash.torch.distributed._pieces import NAME
from anyflash.torch.distributed._transport import Group, names_of

_BATCH, _HEADS = "batch", "heads"
_TENSORS = ("bias", "sinks", "alibi_slopes", "block_mask", "key_ranges", "seqused_k", "rng_state")


class Arguments(NamedTuple):
    tensors: tuple[Any, Any, Any]
    options: AttentionOptions
    packing: Packing | None
    part: Part  # its last three numbers


class Placed(NamedTuple):
    """Where results lie: q, a DTensor, and along each axis of its mesh what is divided."""

    q: Any
    kinds: tuple[str | None, ...]
    packed: bool

    def out(self, x: Tensor) -> Tensor:
        return self._wrapped(x, self.q.placements, (*self.q.shape[:-1], x.shape[-1]))

    def lse(self, x: Tensor) -> Tensor:
        """(batch, heads, rows), packed: (heads, rows)"""
        heads, rows = self.q.shape[-2], x.shape[-1]
        if self.packed:
            return self._wrapped(x, self._placements({_HEADS: 0}), (heads, rows))
        placements = self._placements({_BATCH: 0, _HEADS: 1})
        return self._wrapped(x, placements, (self.q.shape[0], heads, rows))

    def max_logits(self, x: Tensor) -> Tensor:
        """(batch, heads), of packed sequences, too"""
        batch = x.shape[0] if self.packed else self.q.shape[0]
        placements = self._placements({_BATCH: 0, _HEADS: 1})
        return self._wrapped(x, placements, (batch, self.q.shape[-2]))

    def _placements(self, axes: dict[str, int]) -> list[Any]:
        from torch.distributed.tensor import Replicate, Shard

        return [Replicate() if kind is None else Shard(axes[kind]) for kind in self.kinds]

    def _wrapped(self, x: Tensor, placements: Any, shape: tuple[int, ...]) -> Tensor:
        return _wrapped(x, self.q.device_mesh, placements, shape)


def local_of(x: Any, placements: Any = None, gradients: Any = None) -> Tensor:
    """What this rank has of a DTensor, once it is there."""
    if placements is not None and tuple(placements) != tuple(x.placements):
        x = x.redistribute(placements=placements)
    local: Any = x.to_local(grad_placements=gradients)
    # What is still on its way is waited for by an operator that autograd sees; wait() is none.
    arrived: Tensor = local.clone() if hasattr(local, "trigger_wait") else local
    return arrived


def like(x: Any, local: Tensor) -> Tensor:
    """A DTensor that is placed as ``x``, of which only the length along an axis differs that is
    sharded over no mesh axis."""
    sizes = zip(local.shape, x.to_local().shape, x.shape, strict=True)
    shape = [whole if new == old else new for new, old, whole in sizes]
    return _wrapped(local, x.device_mesh, x.placements, shape)


def _wrapped(local: Tensor, mesh: Any, placements: Any, shape: Sequence[int]) -> Tensor:
    from torch.distributed.tensor import DTensor

    size, stride = torch.Size(shape), torch.empty(*shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=size, stride=stride)


def unwrapped(group: Group, given: Arguments) -> tuple[Arguments, Placed | None]:
    """The arguments without DTensors."""
    q = given.tensors[0]
    others = {name: getattr(given.options, name) for name in _TENSORS}
    if given.packing is not None:
        others |= given.packing._asdict()
    named = dict(zip("qkv", given.tensors, strict=True)) | others
    if not is_distributed(q):
        for name, x in named.items():
            if is_distributed(x):
                _refuse(f"{name} is a DTensor and q is not; both or none is allowed")
        return given, None
    placed = Placed(q, _kinds(given), given.packing is not None)
    _check(group, given, placed)
    named = {name: _local(name, x, placed) for name, x in named.items()}
    packing = given.packing
    if packing is not None:
        packing = packing._replace(**{name: named[name] for name in packing._fields})
    batch, first, total = part_of(q)
    local = Arguments(
        (named["q"], named["k"], named["v"]),
        given.options._replace(**{name: named[name] for name in _TENSORS}),
        packing,
        Part(batch_start=batch, head_start=first, total_heads=total),
    )
    return local, placed


def _refuse(problem: str) -> None:
    raise ValueError(f"{NAME}: {problem}")


def _kinds(given: Arguments) -> tuple[str | None, ...]:
    """What q, k and v divide along each axis of their mesh; other placements are refused."""
    from torch.distributed.tensor import Shard

    q: Any = given.tensors[0]
    kinds_of = {q.ndim - 2: _HEADS} | ({} if given.packing is not None else {0: _BATCH})
    kinds: list[str | None] = []
    for placement in q.placements:
        kind = kinds_of.get(placement.dim) if type(placement) is Shard else None
        if kind is None and not placement.is_replicate():
            allowed = " and ".join(f"Shard({axis}) ({name})" for axis, name in kinds_of.items())
            _refuse(
                f"q has the placements {tuple(q.placements)}; {allowed} and Replicate() are "
                "allowed, on a mesh without the ranks that share a sequence. To do: redistribute "
                "it; for its rows, call shard() instead"
            )
        kinds.append(kind)
    return tuple(kinds)


def _check(group: Group, given: Arguments, placed: Placed) -> None:
    q: Any = given.tensors[0]
    mesh = q.device_mesh
    for name, x in zip("kv", given.tensors[1:], strict=True):
        if not is_distributed(x):
            _refuse(f"q is a DTensor and {name} is not; both or none is allowed")
        if tuple(x.placements) != tuple(q.placements) or x.device_mesh != mesh:
            _refuse(
                f"the placements differ: q {tuple(q.placements)}, {name} {tuple(x.placements)}; "
                "they must be the same, on the same mesh"
            )
    shared = {group.global_rank(rank) for rank in range(group.size)}
    both = sorted(shared & set(mesh.mesh.flatten().tolist()))
    if len(both) > 1:
        _refuse(
            f"q is a DTensor on a mesh with {names_of(both)}, which share a sequence; a mesh "
            "without their axis is allowed, for example mesh['tp']"
        )
    heads, heads_k = q.shape[-2], given.tensors[1].shape[-2]
    n, batches = (
        math.prod(mesh.size(i) for i, kind in enumerate(placed.kinds) if kind == wanted)
        for wanted in (_HEADS, _BATCH)
    )
    if heads % n or heads_k % n:
        _refuse(
            f"q has {heads} heads, k and v have {heads_k}, and they are sharded over {n} ranks; "
            "multiples of that are allowed"
        )
    if not placed.packed and q.shape[0] < batches:
        _refuse(
            f"the batch of {q.shape[0]} is sharded over {batches} ranks; each needs an entry of it"
        )
    options = given.options
    if any(given.part[3:]):
        _refuse(
            "q is a DTensor, and batch_start, head_start or total_heads is given; they are "
            "allowed with other tensors"
        )
    if options.dropout_p != 0 and options.seed is None and options.rng_state is None:
        _refuse(
            f"dropout_p is {options.dropout_p} and q is a DTensor, but no seed is given; ranks "
            "would draw different ones. Pass seed, the same on every rank"
        )


def _axes(name: str, x: Tensor, packed: bool) -> dict[str, int]:
    """Which of a tensor's axes count the batch and the heads; one that is broadcast counts
    nothing."""
    last = x.ndim - 1
    axes: dict[str, int] = {
        "q": {_BATCH: 0, _HEADS: last - 1},
        "bias": {_BATCH: last - 3, _HEADS: last - 2},
        "key_ranges": {_BATCH: last - 3, _HEADS: last - 2},
        "sinks": {_HEADS: 0},
        "alibi_slopes": {_BATCH: last - 1, _HEADS: last},
        "seqused_k": {_BATCH: 0},
    }.get({"k": "q", "v": "q", "block_mask": "bias"}.get(name, name), {})
    if packed:  # no axis of a DTensor divides the batch
        axes.pop(_BATCH, None)
    broadcasts = name not in ("q", "k", "v", "sinks", "seqused_k")
    return {
        kind: axis
        for kind, axis in axes.items()
        if axis >= 0 and not (broadcasts and x.shape[axis] == 1)
    }


def _local(name: str, x: Any, placed: Placed) -> Any:
    """What this rank computes with. What all batch entries or heads share has a gradient that sums
    over them."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    if not isinstance(x, Tensor):
        return x
    axes = _axes(name, x, placed.packed)
    wanted = [Shard(axes[k]) if k in axes else Replicate() for k in placed.kinds]
    mesh = getattr(x, "device_mesh", None)
    if mesh is None:
        if x.requires_grad or any(placement.is_shard() for placement in wanted):
            _refuse(f"q is a DTensor and {name} is not; both or none is allowed")
        return x
    if mesh != placed.q.device_mesh:
        _refuse(f"q and {name} are DTensors on different meshes; the same mesh is allowed")
    gradients: list[Any] = [
        Partial() if kind is not None and placement.is_replicate() else placement
        for kind, placement in zip(placed.kinds, wanted, strict=True)
    ]
    return local_of(x, wanted, gradients)
