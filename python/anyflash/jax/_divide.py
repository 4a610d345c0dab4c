"""A call on sharded arrays: every device computes its part, and nothing is gathered."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding

from anyflash.jax import _partition
from anyflash.jax._ffi import Arrays, Numbers
from anyflash.jax._partition import NOT_DIVIDED, OF_RESULTS, Dims, PartitionSpec, Plan

# (operands, results that are to have the digits of float32, more numbers) -> results
Run = Callable[[Arrays, frozenset[str], Numbers], Arrays]
_NONE: frozenset[str] = frozenset()
# JAX does not say their types.
_custom_partitioning: Any = custom_partitioning
_psum: Any = jax.lax.psum


class Divided:
    """One call. ``results`` has their shapes, ``mapped`` is the number of jax.vmap's axes."""

    def __init__(
        self, operation: str, run: Run, operands: Arrays, results: Arrays, mapped: int
    ) -> None:
        self.operation = operation
        self.run = run
        self.operands = operands
        self.results = results
        self.context: Any = jax.sharding.get_abstract_mesh()
        self.dims = _partition.factors(operands, operands, mapped)
        self.result_dims = _partition.factors(operands, results, mapped)

    def __call__(self) -> Arrays:
        mesh, specs = _types(self.operands)
        if mesh is not None:
            return self._by_types(mesh, specs)
        if is_within_shard_map(self.operation, self.context):
            return self.run(self.operands, _NONE, ())
        call: Any = _custom_partitioning(self._whole)
        call.def_partition(
            self._on_mesh,
            infer_sharding_from_operands=self._infer,
            decode_shardings=False,
            sharding_rule=self._rule(),
        )
        return dict(zip(self.results, call(*self.operands.values()), strict=True))

    def _whole(self, *operands: Any) -> tuple[Any, ...]:
        return tuple(self.run(self._named(operands), _NONE, ()).values())

    def _named(self, operands: Any) -> Arrays:
        return dict(zip(self.operands, operands, strict=True))

    # Where the compiler propagates shardings ------------------------------------------------------

    def _rule(self) -> str:
        """For Shardy. An axis that is not divided has a factor of its own, so that none is moved
        there from elsewhere, and one that is there is seen."""
        count = 0

        def words(dims: Dims) -> str:
            nonlocal count
            found = []
            for factor in dims:
                count += 1
                found.append(f"own{count}" if factor == NOT_DIVIDED else factor)
            return " ".join(found)

        operands, results = (
            ", ".join(words(one) for one in dims.values()) for dims in (self.dims, self.result_dims)
        )
        return f"{operands} -> {results}"

    def _plan(self, mesh: Any, operands: Any) -> tuple[Any, Plan]:
        """The mesh, which JAX leaves out where the context has it and no argument, and the plan."""
        known = [x for x in operands if x.sharding is not None]
        if mesh.empty and known and not self.context.empty:
            devices = np.array(list(known[0].sharding.devices_indices_map(known[0].shape)))
            shape = self.context.axis_sizes
            mesh = jax.sharding.Mesh(devices.reshape(shape), self.context.axis_names)
        specs = {
            name: self._axes_of(mesh, name, x.sharding) for name, x in self._named(operands).items()
        }
        sizes = dict(mesh.shape)
        return mesh, _partition.plan(self.operation, self.dims, self.operands, specs, sizes)

    def _axes_of(self, mesh: Any, name: str, sharding: Any) -> Any:
        shape = self.operands[name].shape
        if sharding is None or sharding.is_fully_replicated:
            return _partition.spec_axes((), len(shape))
        if mesh.empty:
            raise ValueError(
                f"{self.operation}: {name} is sharded over devices without a mesh; a "
                "jax.sharding.NamedSharding is allowed"
            )
        axes = _partition.sharding_axes(mesh, sharding, shape)
        if axes is None and name in OF_RESULTS:
            return _partition.spec_axes((), len(shape))
        if axes is None:
            raise ValueError(
                f"{self.operation}: {name} of shape {shape} is sharded over parts of an axis of "
                "the mesh, or into unequal parts; whole axes and equal parts are allowed: say "
                "which, or replicate it, by jax.lax.with_sharding_constraint"
            )
        return axes

    def _shardings(self, mesh: Any, plan: Plan, dims: dict[str, Dims]) -> tuple[Any, ...]:
        return tuple(NamedSharding(mesh, plan.spec(one)) for one in dims.values())

    def _infer(self, mesh: Any, operands: Any, _: Any) -> tuple[Any, ...]:
        """For GSPMD, which asks before all is known, and ends the process where this raises: only
        ``_on_mesh`` refuses."""
        try:
            mesh, plan = self._plan(mesh, operands)
        except ValueError:
            plan = Plan({}, {})
        return self._shardings(mesh, plan, self.result_dims)

    def _on_mesh(self, mesh: Any, operands: Any, _: Any) -> tuple[Any, ...]:
        mesh, plan = self._plan(mesh, operands)

        def part(*operands: Any) -> tuple[Any, ...]:
            return tuple(self._part(plan, self._named(operands)).values())

        return (
            mesh,
            part,
            self._shardings(mesh, plan, self.result_dims),
            self._shardings(mesh, plan, self.dims),
        )

    # Where types have shardings -------------------------------------------------------------------

    def _by_types(self, mesh: Any, specs: dict[str, Any]) -> Arrays:
        devices = dict(mesh.shape)
        plan = _partition.plan(self.operation, self.dims, self.operands, specs, devices)
        automatic = _axes(mesh, AxisType.Auto)
        if automatic:
            raise NotImplementedError(
                f"{self.operation}: an array's type is sharded, and the compiler shards along "
                f"{automatic}; a mesh whose axes are all explicit, or all automatic, is allowed"
            )
        cut = [name for name in self.operands if self._is_cut(name, plan, specs[name])]
        # No name is all of them, but for those that jax.vmap hides while it traces.
        names = _axes(mesh, AxisType.Explicit) if _axes(mesh, AxisType.Manual) else ()
        part = functools.partial(self._part, plan)
        result: Arrays = jax.shard_map(
            lambda operands: part(
                {
                    name: self._cut(plan, name, x) if name in cut else x
                    for name, x in operands.items()
                }
            ),
            mesh=mesh,
            in_specs=({name: PartitionSpec(*specs[name]) for name in self.operands},),
            out_specs={name: plan.spec(dims) for name, dims in self.result_dims.items()},
            axis_names=set(names),
            check_vma=False,
        )(self.operands)
        return result

    def _is_cut(self, name: str, plan: Plan, given: Any) -> bool:
        """Whether every device takes its part of an array that is whole. A gradient has the type of
        its argument, so that only what has none may be cut."""
        x, wanted = self.operands[name], plan.spec(self.dims[name])
        if _partition.spec_axes(wanted, x.ndim) == given:
            return False
        if not any(given) and not jnp.issubdtype(x.dtype, jnp.floating):
            return True
        raise ValueError(
            f"{self.operation}: {name} is sharded by its type as {PartitionSpec(*given)}; beside "
            f"what others are, {wanted} is allowed: reshard it"
        )

    def _cut(self, plan: Plan, name: str, x: Any) -> Any:
        for i, factor in enumerate(self.dims[name]):
            if axes := plan.of(factor):
                size = x.shape[i] // plan.parts(factor)
                first = jax.lax.axis_index(axes) * size
                x = jax.lax.dynamic_slice_in_dim(x, first, size, i)
        return x

    # On one device --------------------------------------------------------------------------------

    def _part(self, plan: Plan, operands: Arrays) -> Arrays:
        """Gradients of what others have, too, are summed, in float32."""
        if "k_cache" in operands:
            return self.run(operands, _NONE, ())
        operands = dict(operands)
        shapes = {name: operands[name].shape for name in ("k", "v")}
        picked = self._key_heads(plan, operands)
        axis = self.dims["k"].index("g") if picked is not None else 0
        for name in ("k", "v", "key_ranges"):
            dims = self.dims.get(name, ())
            if picked is not None and "g" in dims:
                operands[name] = jnp.take(operands[name], picked, dims.index("g"), mode="clip")
        summed = {
            name: axes
            for name, dims in self.result_dims.items()
            if name.startswith("d") and name[1:] in operands and (axes := plan.lacks(dims))
        }
        results = self._run_part(plan, operands, frozenset(summed))
        for name, axes in summed.items():
            x = results[name]
            if picked is not None and name in ("dk", "dv"):
                whole = jnp.zeros(shapes[name[1:]], x.dtype)
                x = whole.at[(slice(None),) * axis + (picked,)].add(x)
            results[name] = _psum(x, axes)
        # In this order: a branch sorts them.
        return {name: results[name].astype(x.dtype) for name, x in self.results.items()}

    def _run_part(self, plan: Plan, operands: Arrays, wide: frozenset[str]) -> Arrays:
        """Dropout is told which batch entries and heads are here. A call's numbers are constants,
        so that there is a branch for each device's."""
        parts = self._parts(plan) if "rng_state" in operands else [()]
        if len(parts) == 1:
            return self.run(operands, wide, parts[0])

        def branch(numbers: Numbers) -> Callable[[Arrays], Arrays]:
            return lambda operands: self.run(operands, wide, numbers)

        index = jax.lax.axis_index((*plan.of("b"), *plan.of("h")))
        result: Arrays = jax.lax.switch(index, [branch(numbers) for numbers in parts], operands)
        return result

    def _parts(self, plan: Plan) -> list[Numbers]:
        """From where every device's dropout counts, in the order of the batch's axes, then of the
        heads'."""
        q, batches, heads = self.operands["q"], plan.parts("b"), plan.parts("h")
        if batches * heads == 1:
            return [()]
        entries = q.shape[0] // batches if batches > 1 else 0  # packed sequences stay together
        return [
            (
                ("batch_start", batch * entries),
                ("head_start", head * (q.shape[-2] // heads)),
                ("total_heads", q.shape[-2]),
            )
            for batch in range(batches)
            for head in range(heads)
        ]

    def _key_heads(self, plan: Plan, operands: Arrays) -> Any:
        """Which of the key heads that are here the query heads that are here need: None where it is
        all of them, in order."""
        heads, key_heads = plan.of("h"), plan.of("g")
        if heads == key_heads or "g" not in self.dims["k"]:
            return None
        group = self.operands["q"].shape[-2] // self.operands["k"].shape[-2]
        here = operands["q"].shape[-2]
        # A key head serves so many of the query heads that are here.
        shared = group if here % group == 0 else here if group % here == 0 else 1
        first = jax.lax.axis_index(heads) * here
        picked = (first + jnp.arange(0, here, shared)) // group
        if key_heads:
            picked -= jax.lax.axis_index(key_heads) * operands["k"].shape[-2]
        return picked


def is_within_shard_map(operation: str, mesh: Any) -> bool:
    """``mesh``: of the context. Raises where only some of its axes are jax.shard_map's."""
    manual, automatic = (_axes(mesh, kind) for kind in (AxisType.Manual, AxisType.Auto))
    if manual and automatic:
        raise NotImplementedError(
            f"{operation}: it is called within a jax.shard_map over {manual}, and {automatic} is "
            "left to the compiler; a jax.shard_map over all axes of the mesh is allowed"
        )
    return bool(manual)


def _axes(mesh: Any, kind: Any) -> tuple[str, ...]:
    """Those of a mesh that are of a kind and have more than one device."""
    return tuple(
        axis
        for (axis, size), other in zip(mesh.shape.items(), mesh.axis_types or (), strict=False)
        if other == kind and size > 1
    )


def _types(operands: Arrays) -> tuple[Any, dict[str, Any]]:
    """The mesh over which types say that arrays are sharded, or None; and each operand's spec."""
    mesh, specs = None, {}
    for name, x in operands.items():
        sharding: Any = getattr(jax.typeof(x), "sharding", None)
        specs[name] = _partition.spec_axes(() if sharding is None else sharding.spec, x.ndim)
        if any(specs[name]):
            mesh = sharding.mesh
    return mesh, specs
