"""How one call is divided among the devices of a mesh: along the batch and the heads.

Every axis of an operand or a result has a factor, a letter. ``b`` is the batch, ``h`` the query
heads, ``g`` the key heads, where there are fewer; ``m0``, ``m1`` ... are axes of jax.vmap. These
may be sharded; every other axis has the factor ``.``, and must not be.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import numpy as np

from anyflash.jax._ffi import Arrays

PartitionSpec: Any = jax.sharding.PartitionSpec  # JAX does not say its types
Axes = tuple[str, ...]  # of a mesh
Dims = tuple[str, ...]  # the factor of each axis of an array
NOT_DIVIDED = "."

_FACTORS = {
    "q": "b.h.",
    "k": "b.g.",
    "v": "b.g.",
    "out": "b.h.",
    "lse": "bh.",
    "bias": "bh..",
    "block_mask": "bh..",
    "key_ranges": "bg..",
    "alibi_slopes": "bh",
    "sinks": "h",
    "seqused_k": "b",
    "max_logits": "bh",
    "dropout_mask": "bh..",
    "rng_state": ".",
    "cu_seqlens_q": ".",
    "cu_seqlens_k": ".",
    "cu_seqlens_k_new": ".",
    "k_cache": "b.g.",
    "v_cache": "b.g.",
    "k_new": "b.g.",
    "v_new": "b.g.",
    "rotary_cos": "..",
    "rotary_sin": "..",
    "rotary_seqlens": "b",
    "cache_seqlens": "b",
    "cache_batch_idx": "b",
    "cache_leftpad": "b",
    "block_table": "b.",
    "tree_mask": "b..",
    "k_scale": "bg",
    "v_scale": "bg",
}
CACHES = ("k_cache", "v_cache")
_SCALES = ("k_scale", "v_scale")
# Their places count along the first axis, as the batch's entries do, if no other argument says so.
_OF_PLACES = (*CACHES, *_SCALES)
OF_RESULTS = ("dout", "out", "dlse", "lse")  # the backward's operands
_OF_TOKENS = ("q", "k", "v", "k_new", "v_new", "out", "lse")  # packed sequences share an axis


def factors(operands: Arrays, arrays: Arrays, mapped: int) -> dict[str, Dims]:
    """Of ``arrays``, operands or results, whose first ``mapped`` axes are jax.vmap's."""
    packed = "cu_seqlens_q" in operands
    q, k = operands["q"].shape[-2], _keys(operands).shape[-2]
    apart = _has_places(operands)
    result = {}
    for name, x in arrays.items():
        key = name if name in _FACTORS else name[1:]
        letters = _FACTORS[key]
        if packed and key == "key_ranges":
            letters = letters[1:]
        elif packed:
            letters = letters.replace("b", "" if key in _OF_TOKENS else NOT_DIVIDED)
        if apart and key in _OF_PLACES:
            letters = letters.replace("b", NOT_DIVIDED)
        if q == k:
            letters = letters.replace("g", "h")
        if key in _SCALES and len(x.shape) - mapped == 3:  # by row of the cache, too
            letters = letters[0] + NOT_DIVIDED + letters[1]
        letters = letters[len(letters) - (len(x.shape) - mapped) :]
        dims = (*(f"m{i}" for i in range(mapped)), *letters)
        # What is broadcast has one element there, which every device needs.
        result[name] = tuple(
            NOT_DIVIDED if extent == 1 and (factor != "g" or key == "key_ranges") else factor
            for factor, extent in zip(dims, x.shape, strict=True)
        )
    return result


def _keys(operands: Arrays) -> Any:
    return operands["k_cache" if "k_cache" in operands else "k"]


def _has_places(operands: Arrays) -> bool:
    """Whether a cache's first axis counts something else than the batch."""
    if "k_cache" not in operands:
        return False
    if "block_table" in operands or "cache_batch_idx" in operands:
        return True
    return bool(operands["k_cache"].shape[0] != operands["q"].shape[0])


class Plan(NamedTuple):
    """Which axes of the mesh each factor is divided along."""

    axes: dict[str, Axes]
    devices: dict[str, int]  # along each axis of the mesh

    def of(self, factor: str) -> Axes:
        return self.axes.get(factor, ())

    def spec(self, dims: Dims) -> Any:
        return PartitionSpec(*(self.of(factor) or None for factor in dims))

    def parts(self, factor: str) -> int:
        return prod(self.devices[axis] for axis in self.of(factor))

    def lacks(self, dims: Dims) -> Axes:
        """The axes along which the work is divided, and an array is not."""
        held = {axis for factor in dims for axis in self.of(factor)}
        every = dict.fromkeys(axis for axes in self.axes.values() for axis in axes)
        return tuple(axis for axis in every if axis not in held)


def spec_axes(spec: Sequence[Any], rank: int) -> tuple[Axes, ...]:
    """A PartitionSpec as one tuple of axes of the mesh for each axis of the array."""
    entries = [() if x is None else (x,) if isinstance(x, str) else tuple(x) for x in spec]
    return (*entries, *((),) * (rank - len(entries)))


def sharding_axes(mesh: Any, sharding: Any, shape: tuple[int, ...]) -> tuple[Axes, ...] | None:
    """The same of the compiler's sharding. None: axes of the mesh cannot say it, as when a part of
    one is enough. JAX's own decoder then raises where nobody can catch it."""
    try:
        places = sharding.devices_indices_map(shape)
    except ValueError:  # parts of unequal size
        return None
    devices = mesh.devices
    starts = np.array([[x.start or 0 for x in places[device]] for device in devices.flat])
    coordinates = dict(zip(mesh.axis_names, np.indices(devices.shape), strict=True))
    return _axes_of_starts(starts.reshape(*devices.shape, len(shape)), coordinates, shape)


def _axes_of_starts(
    starts: Any, coordinates: dict[str, Any], shape: tuple[int, ...]
) -> tuple[Axes, ...] | None:
    """``starts``: where each device's part begins; its last axis are the array's axes."""
    result = []
    for i, extent in enumerate(shape):
        steps = {
            axis: starts[(*(int(other == axis) for other in coordinates), i)]
            for axis, x in coordinates.items()
            if x.max(initial=0) > 0
        }
        axes = tuple(sorted((axis for axis in steps if steps[axis]), key=lambda x: -steps[x]))
        index = np.zeros(starts.shape[:-1], int)
        parts = 1
        for axis in axes:
            size = coordinates[axis].max() + 1
            index, parts = index * size + coordinates[axis], parts * size
        if (starts[..., i] != index * (extent // parts)).any():
            return None
        result.append(axes)
    return tuple(result)


def plan(
    operation: str,
    dims: dict[str, Dims],
    operands: Arrays,
    specs: dict[str, tuple[Axes, ...]],
    devices: dict[str, int],
) -> Plan:
    """Raises ValueError where the operands cannot stay where they are."""
    axes: dict[str, Axes] = {}
    owner: dict[str, str] = {}
    for name in operands:
        if name in OF_RESULTS:
            continue
        for i, (factor, given) in enumerate(zip(dims[name], specs[name], strict=True)):
            if not given:
                continue
            if factor == NOT_DIVIDED:
                raise ValueError(_not_divided(operation, name, i, given, operands))
            if axes.setdefault(factor, given) != given:
                raise ValueError(
                    f"{operation}: {owner[factor]} and {name} are sharded differently, over "
                    f"{axes[factor]} and {given}; the same axes of the mesh are allowed, or none"
                )
            owner.setdefault(factor, name)
    _follow_results(axes, dims, operands, specs)
    result = Plan(axes, devices)
    _check(operation, result, operands)
    return result


def _follow_results(
    axes: dict[str, Axes],
    dims: dict[str, Dims],
    operands: Arrays,
    specs: dict[str, tuple[Axes, ...]],
) -> None:
    """Whoever reads the results may want them elsewhere; so come their cotangents, and are moved.
    Where the arguments are whole, the work is divided as these are."""
    for name in OF_RESULTS:
        for factor, given in zip(dims.get(name, ()), specs.get(name, ()), strict=True):
            used = [axis for one in axes.values() for axis in one]
            free = factor != NOT_DIVIDED and factor not in axes
            if given and free and not set(given) & set(used):
                axes[factor] = given


def _not_divided(operation: str, name: str, axis: int, given: Axes, operands: Arrays) -> str:
    divided = "its heads" if "cu_seqlens_q" in operands else "the batch and the heads"
    return (
        f"{operation}: axis {axis} of {name} is sharded over {given}; attention is divided along "
        f"{divided} alone, and a sequence stays on one device: shard those axes, or replicate "
        "this one, as by jax.lax.with_sharding_constraint"
    )


def _check(operation: str, made: Plan, operands: Arrays) -> None:
    heads, key_heads = made.of("h"), made.of("g")
    if key_heads != heads[: len(key_heads)]:
        raise ValueError(
            f"{operation}: the heads of k and v are sharded over {key_heads} and those of q over "
            f"{heads}; the same axes of the mesh are allowed, or the first of them, or none for k "
            "and v"
        )
    used = [axis for factor, axes in made.axes.items() if factor != "g" for axis in axes]
    if len(used) > len(set(used)):
        raise ValueError(
            f"{operation}: the batch and the heads are sharded over {used}; each axis of the mesh "
            "is allowed once"
        )
    if "k_cache" in operands:
        _check_caches(operation, made, operands)


def _check_caches(operation: str, made: Plan, operands: Arrays) -> None:
    """Key heads are not picked of caches, which are written, or large."""
    batch, heads, key_heads = made.of("b"), made.of("h"), made.of("g")
    q, k = operands["q"].shape[-2], operands["k_cache"].shape[-2]
    if k not in (1, q) and key_heads != heads:
        raise ValueError(
            f"{operation}: q's {q} heads are sharded over {heads}, and the {k} heads of the caches "
            f"over {key_heads}; the same axes of the mesh are allowed: shard the caches' heads, or "
            "replicate q's"
        )
    if not batch or not _has_places(operands):
        return
    named = [name for name in ("block_table", "cache_batch_idx") if name in operands]
    if named and "k_new" not in operands:
        return
    why = (
        f"{named[0]} is given, and so is k: devices would append to different places of a cache "
        "that all of them have"
        if named
        else f"the caches have {operands['k_cache'].shape[0]} places, and the batch is "
        f"{operands['q'].shape[0]}"
    )
    raise ValueError(
        f"{operation}: the batch is sharded over {batch}, and {why}; shard the heads alone, or use "
        "jax.shard_map with a cache of each device's own"
    )
