"""The core's functions as calls that XLA makes. Operands and results go by name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anyflash import _core

Arrays = dict[str, Any]
Numbers = tuple[tuple[str, Any], ...]  # what the core's options are set to, by name


_HANDLERS = _core.xla_handlers()
for _target, _platform, _handler in _HANDLERS:
    jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


def check(operation: str, function: str, tensors: Arrays, numbers: Numbers) -> None:
    """Raises for shapes, dtypes and numbers what the call would raise when it runs."""
    if not _HANDLERS:
        raise NotImplementedError(
            f"{operation}: this build of anyflash has no XLA handlers; build it where XLA's "
            "headers can be downloaded, or with ANYFLASH_XLA_INCLUDE_DIR set to the folder "
            "jaxlib/include of the package jaxlib 0.6.2"
        )
    described = {
        name: ((2,), "int64") if name == "rng_state" else (tuple(x.shape), x.dtype.name)
        for name, x in tensors.items()
    }
    # An exported function's shapes may have names.
    if all(isinstance(extent, int) for shape, _ in described.values() for extent in shape):
        _core.check_call(operation, function, described, dict(numbers))


def call(  # noqa: PLR0917
    operation: str,
    function: str,
    numbers: Numbers,
    operands: Arrays,
    results: Arrays,
    aliases: dict[str, str] | None = None,
) -> Arrays:
    """``results``: a jax.ShapeDtypeStruct each. ``aliases``: operands that are updated in place,
    and the results that they become."""
    names, result_names = list(operands), list(results)
    attributes = {name: _attribute(value) for name, value in numbers}
    values = jax.ffi.ffi_call(
        f"anyflash_{function}",
        _varying_like(next(iter(operands.values())), tuple(results.values())),
        input_output_aliases={
            names.index(name): result_names.index(result)
            for name, result in (aliases or {}).items()
        },
    )(
        *operands.values(),
        operation=operation,
        operands=" ".join(names),
        results=" ".join(result_names),
        **attributes,
    )
    return dict(zip(result_names, values, strict=True))


def _attribute(value: Any) -> Any:
    if isinstance(value, bool):
        return value
    return np.int64(value) if isinstance(value, int) else np.float64(value)


def _varying_like(x: Any, results: tuple[Any, ...]) -> tuple[Any, ...]:
    """Within jax.shard_map a value's type says along which axes of the mesh it varies: all results
    vary as the operands do. How a type says so has changed from version to version, so that JAX is
    asked what it is."""
    if x.size == 0:
        return results

    def made_of(x: Any) -> tuple[Any, ...]:
        return tuple(
            jnp.broadcast_to(x.reshape(-1)[0].astype(result.dtype), result.shape)
            for result in results
        )

    return tuple(jax.eval_shape(made_of, x))


def vary_alike(arrays: Arrays) -> Arrays:
    """Within jax.shard_map, arrays that all vary along the same axes of the mesh. Gradients are
    summed over the axes that an array did not vary along."""
    axes = {name: _axes(x) for name, x in arrays.items()}
    every = frozenset[Any]().union(*axes.values())
    return {name: _vary(x, tuple(every - axes[name])) for name, x in arrays.items()}


def vary_as(x: Any, other: Any) -> Any:
    """The same along the axes of the mesh that another array varies along."""
    return _vary(x, tuple(_axes(other) - _axes(x)))


def _axes(x: Any) -> frozenset[Any]:
    kind: Any = jax.typeof(x)
    kind = getattr(kind, "mat", kind)
    return frozenset(getattr(kind, "varying", None) or getattr(kind, "vma", None) or ())


def _vary(x: Any, axes: tuple[Any, ...]) -> Any:
    if not axes:
        return x
    lax: Any = jax.lax
    return lax.pcast(x, axes, to="varying") if hasattr(lax, "pcast") else lax.pvary(x, axes)
