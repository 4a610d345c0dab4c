"""A call on sharded arrays: every device computes its part, and nothing is gathered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding

from anyflash.jax import _partition
from anyflash.jax._ffi import Arrays
from anyflash.jax._partition import NOT_DIVIDED, Dims, Plan

# (operands, results that are to have the digits of float32) -> results
Run = Callable[[Arrays, frozenset[str]], Arrays]
_NONE: frozenset[str] = frozenset()


class Divided:
    """One call. ``results`` has their shapes, ``mapped`` is the number of jax.vmap's axes."""

    def __init__(
        self, operation: str, run: Run, operands: Arrays, results: Arrays, mapped: int
    ) -> None:
        self.operation = operation
        self.run = run
        self.operands = operands
        self.results = results
        self.dims = _partition.factors(operands, operands, mapped)
        self.result_dims = _partition.factors(operands, results, mapped)

    def __call__(self) -> Arrays:
        mesh, specs = self._explicit()
        if mesh is not None:
            return self._by_types(mesh, specs)
        call = custom_partitioning(self._whole)
        call.def_partition(
            self._on_mesh,
            infer_sharding_from_operands=self._infer,
            sharding_rule=self._rule(),
        )
        return dict(zip(self.results, call(*self.operands.values()), strict=True))

    def _whole(self, *operands: Any) -> tuple[Any, ...]:
        return tuple(self.run(self._named(operands), _NONE).values())

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
            ", ".join(words(one) for one in dims.values())
            for dims in (self.dims, self.result_dims)
        )
        return f"{operands} -> {results}"

    def _plan(self, mesh: Any, shardings: list[Any]) -> Plan:
        specs = {
            name: _partition.spec_axes(sharding.spec, len(self.dims[name]))
            for name, sharding in self._named(shardings).items()
        }
        devices = dict(mesh.shape)
        return _partition.plan(self.operation, self.dims, self.operands, specs, devices)

    def _shardings(self, mesh: Any, plan: Plan, dims: dict[str, Dims]) -> tuple[Any, ...]:
        return tuple(NamedSharding(mesh, plan.spec(one)) for one in dims.values())

    def _infer(self, mesh: Any, operands: Any, results: Any) -> tuple[Any, ...]:
        """For GSPMD, which also asks before it is done: only ``_on_mesh`` may refuse."""
        shardings = [x.sharding for x in operands]
        plan = Plan({}, {})
        if all(isinstance(x, NamedSharding) for x in shardings):
            try:
                plan = self._plan(mesh, shardings)
            except ValueError:
                pass
        elif all(x.is_fully_replicated for x in shardings):
            return (shardings[0],) * len(results)
        return self._shardings(mesh, plan, self.result_dims)

    def _on_mesh(self, mesh: Any, operands: Any, results: Any) -> tuple[Any, ...]:
        shardings = [x.sharding for x in operands]
        if not all(isinstance(x, NamedSharding) for x in shardings):
            # Within a jax.shard_map over some of the axes, JAX does not know the mesh.
            if not all(x.is_fully_replicated for x in shardings):
                raise ValueError(
                    f"{self.operation}: arrays are sharded over a mesh that JAX does not name "
                    "here; give jax.shard_map all axes of the mesh"
                )
            return mesh, self._whole, (shardings[0],) * len(results), tuple(shardings)
        plan = self._plan(mesh, shardings)

        def part(*operands: Any) -> tuple[Any, ...]:
            return tuple(self._part(plan, self._named(operands)).values())

        return (
            mesh,
            part,
            self._shardings(mesh, plan, self.result_dims),
            self._shardings(mesh, plan, self.dims),
        )

    # Where types have shardings -------------------------------------------------------------------

    def _explicit(self) -> tuple[Any, dict[str, Any]]:
        """The mesh, or None, and each operand's spec."""
        mesh, specs = None, {}
        for name, x in self.operands.items():
            sharding = getattr(jax.typeof(x), "sharding", None)
            spec = () if sharding is None else sharding.spec
            specs[name] = _partition.spec_axes(spec, x.ndim)
            if any(specs[name]):
                mesh = sharding.mesh
        return mesh, specs

    def _by_types(self, mesh: Any, specs: dict[str, Any]) -> Arrays:
        devices = dict(mesh.shape)
        plan = _partition.plan(self.operation, self.dims, self.operands, specs, devices)
        for name, dims in self.dims.items():
            wanted = plan.spec(dims)
            if _partition.spec_axes(wanted, len(dims)) != specs[name]:
                raise ValueError(
                    f"{self.operation}: {name} is sharded by its type as {specs[name]}, beside "
                    f"what others are; {wanted} is allowed: use jax.sharding.reshard"
                )
        explicit = {
            axis
            for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
            if kind == jax.sharding.AxisType.Explicit
        }
        result: Arrays = jax.shard_map(
            lambda operands: self._part(plan, operands),
            mesh=mesh,
            in_specs=({name: plan.spec(dims) for name, dims in self.dims.items()},),
            out_specs={name: plan.spec(dims) for name, dims in self.result_dims.items()},
            axis_names=explicit,
            check_vma=False,
        )(self.operands)
        return result

    # On one device --------------------------------------------------------------------------------

    def _part(self, plan: Plan, operands: Arrays) -> Arrays:
        """Gradients of what others have, too, are summed, in float32."""
        operands = dict(operands)
        shapes = {name: operands[name].shape for name in ("k", "v")}
        picked = self._key_heads(plan, operands)
        axis = self.dims["k"].index("g") if picked is not None else 0
        for name in ("k", "v"):
            if picked is not None:
                operands[name] = jnp.take(operands[name], picked, axis, mode="clip")
        summed = {
            name: axes
            for name, dims in self.result_dims.items()
            if name.startswith("d") and name[1:] in operands and (axes := plan.lacks(dims))
        }
        results = self.run(operands, frozenset(summed))
        for name, axes in summed.items():
            x = results[name]
            if picked is not None and name in ("dk", "dv"):
                whole = jnp.zeros(shapes[name[1:]], x.dtype)
                x = whole.at[(slice(None),) * axis + (picked,)].add(x)
            results[name] = jax.lax.psum(x, axes)
        return {name: x.astype(self.results[name].dtype) for name, x in results.items()}

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
