"""Attention with a KV cache on DTensors: each rank has the caches of its batch entries and heads,
appends to them, and nothing is communicated.

There is no gradient, so that no operator's rule is needed: local tensors are computed, and results
become DTensors.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from anyflash.torch._ops import lse_shape

_BATCH, _HEADS = "batch", "heads"
_ADVICE = (
    "redistribute them, or call it on local tensors: "
    "torch.distributed.tensor.experimental.local_map"
)
_CACHES = ("k_cache", "v_cache")
# Of each argument, the axis that counts the batch, and the one that counts the heads. Packed
# sequences are not sharded on the batch.
_AXES: dict[str, tuple[int | None, int | None]] = {
    "k_cache": (0, 2),
    "v_cache": (0, 2),
    "cu_seqlens_q": (None, None),
    "cu_seqlens_k_new": (None, None),
    "rotary_cos": (None, None),
    "rotary_sin": (None, None),
    "rotary_seqlens": (0, None),
    "cache_seqlens": (0, None),
    "cache_batch_idx": (0, None),
    "cache_leftpad": (0, None),
    "block_table": (0, None),
    "sinks": (None, 0),
}


class _Placed:
    """One call's arguments, by name; those that are DTensors have one mesh."""

    def __init__(self, operation: str, given: dict[str, Any]) -> None:
        self.operation = operation
        self.given = given
        self.q = given["q"]
        self.shared = given.get("cache_batch_idx") is not None or (
            given.get("block_table") is not None
        )
        self.writes = given.get("k") is not None
        self.packed = given.get("cu_seqlens_q") is not None
        self.heads = 1 if self.packed else 2  # which axis of q, k and v they are
        for name, x in given.items():
            if hasattr(x, "shape") and not isinstance(x, DTensor):
                self.refuse(
                    f"{name} is a {type(x).__name__}, and q is a DTensor; a DTensor is allowed: "
                    "torch.distributed.tensor.distribute_tensor makes one, Replicate() always fits "
                    "beside q and the caches"
                )
            if isinstance(x, DTensor) and x.device_mesh != self.q.device_mesh:
                self.refuse(f"{name} and q are on different meshes; one mesh is allowed")
        self.kinds = self._kinds()
        # Of latent attention, or of MQA: every rank has it.
        self.one_head = given["k_cache"].shape[2] == 1 and self._ranks(_HEADS) > 1
        self._check()

    def refuse(self, problem: str) -> NoReturn:
        raise ValueError(f"{self.operation}: {problem}")

    def _kinds(self) -> list[str | None]:
        """What q divides along each axis of the mesh."""
        kinds: list[str | None] = []
        for placement in self.q.placements:
            axes = {self.heads: _HEADS} if self.packed else {0: _BATCH, self.heads: _HEADS}
            kind = axes.get(placement.dim) if type(placement) is Shard else None
            if kind is None and not placement.is_replicate():
                allowed = "" if self.packed else "Shard(0) (batch), "
                self.refuse(
                    f"the placements of q are {self.q.placements}; along a mesh axis {allowed}"
                    f"Shard({self.heads}) (heads) and Replicate() work. To do: {_ADVICE}"
                )
            kinds.append(kind)
        return kinds

    def _ranks(self, wanted: str) -> int:
        mesh = self.q.device_mesh
        # Lists, since torch.compile follows no generators there.
        return math.prod([mesh.size(i) for i, kind in enumerate(self.kinds) if kind == wanted])

    def _check(self) -> None:
        ranks, given = self._ranks(_HEADS), self.given
        heads, heads_k = self.q.shape[self.heads], given["k_cache"].shape[2]
        if heads % ranks or (heads_k % ranks and heads_k != 1):
            self.refuse(
                f"q has {heads} heads, the caches have {heads_k}, and they are sharded over "
                f"{ranks} ranks; both numbers must be multiples of that, or the caches have one "
                "head, replicated. Fewer ranks, or Replicate(), work"
            )
        if _BATCH not in self.kinds:
            return
        batch, ranks = self.q.shape[0], self._ranks(_BATCH)
        if batch < ranks:
            self.refuse(
                f"the batch of {batch} is sharded over {ranks} ranks; each needs an entry. Fewer "
                "ranks, or Replicate(), work"
            )
        places = given["k_cache"].shape[0]
        if not self.shared and places != batch:
            self.refuse(
                f"q has a batch of {batch}, sharded, and the caches have {places} places; as many "
                "as the batch are allowed, or cache_batch_idx"
            )
        if self.shared and self.writes:
            name = "block_table" if given.get("block_table") is not None else "cache_batch_idx"
            self.refuse(
                f"q is sharded on the batch, {name} is given, and so is k; ranks would append to "
                "different places of a cache that all of them have. Shard the heads, or call it on "
                f"local tensors with a cache and a {name} of each rank's own"
            )

    def local(self, name: str, x: Any) -> Any:
        """What this rank computes with. Only what is small is cut, without communication."""
        if not isinstance(x, DTensor):
            return x
        wanted = self._placements(name, x)
        if tuple(x.placements) == wanted:
            return x.to_local()
        cut = all(
            old == new or old.is_replicate() for old, new in zip(x.placements, wanted, strict=True)
        )
        if not cut or name in (*_CACHES, "k", "v"):
            self.refuse(
                f"the placements of {name} are {x.placements}; beside q's, {self.q.placements}, "
                f"{wanted} are allowed. To do: {_ADVICE}"
            )
        return x.redistribute(placements=wanted).to_local()

    def _placements(self, name: str, x: Any) -> tuple[Any, ...]:
        if name in {"q", "k", "v"}:
            axes: tuple[int | None, int | None] = (0, self.heads)
        elif name in _AXES:
            axes = _AXES[name]
        elif name == "tree_mask":  # (batch or 1, seqlen_q, seqlen_q), the first may be missing
            axes = (0, None) if x.ndim == 3 and x.shape[0] != 1 else (None, None)
        else:  # alibi_slopes, k_scale, v_scale: (heads,) or (batch or place, ..., heads)
            axes = (0 if x.ndim > 1 and x.shape[0] != 1 else None, x.ndim - 1)
        of = dict(zip((_BATCH, _HEADS), axes, strict=True))
        if self.shared and name in (*_CACHES, "k_scale", "v_scale"):
            of[_BATCH] = None  # places, which all of the batch may use
        if self.one_head and name in (*_CACHES, "k", "v", "k_scale", "v_scale"):
            of[_HEADS] = None  # which all of q's heads see
        found = (None if kind is None else of[kind] for kind in self.kinds)
        return tuple(Replicate() if axis is None else Shard(axis) for axis in found)

    def result(self, x: Any, shape: tuple[int, ...], heads: int) -> Any:
        """The whole of what every rank has a part of; its heads are axis ``heads``."""
        axes = {None: Replicate(), _BATCH: Shard(0), _HEADS: Shard(heads)}
        stride = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        placements = [axes[kind] for kind in self.kinds]
        mesh = self.q.device_mesh
        return DTensor.from_local(
            x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=tuple(stride)
        )


def attend(
    operation: str, tensors: dict[str, Any], options: dict[str, Any], operator: Any
) -> tuple[Any, Any]:
    """``operator(*tensors, **options)`` of the local arguments: out, and the LSE or an empty
    tensor."""
    placed = _Placed(operation, {**tensors, **options})
    q, v_cache = placed.q, tensors["v_cache"]
    columns = options["head_dim_v"] if v_cache is None else v_cache.shape[-1]
    local = [placed.local(name, x) for name, x in tensors.items()]
    out, lse = operator(*local, **{name: placed.local(name, x) for name, x in options.items()})
    whole = placed.result(out, (*q.shape[:-1], columns), placed.heads)
    if not options["return_lse"]:
        return whole, lse
    return whole, placed.result(lse, lse_shape(q), placed.heads - 1)
