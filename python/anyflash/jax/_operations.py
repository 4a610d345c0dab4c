"""Forward and backward as operations of JAX: compiled, batched, and differentiated."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anyflash.jax import _ffi, _formula, _vmap
from anyflash.jax._ffi import Arrays, Numbers

FLOAT32 = "float32"


class Settings(NamedTuple):
    """Of a call: everything that is not an array."""

    operation: str
    numbers: Numbers
    results: tuple[str, ...]  # of the forward: out and what was asked for besides
    out_dtype: str
    lengths: tuple[Any, Any]  # the largest, of queries and keys
    deterministic: bool


def struct(shape: tuple[Any, ...], dtype: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, jnp.dtype(dtype))


def forward_results(settings: Settings, names: tuple[str, ...], operands: Arrays) -> Arrays:
    """Shapes and dtypes."""
    q, v = operands["q"], operands["v"]
    *batch, rows, heads, _ = q.shape
    sequences = batch[0] if batch else operands["cu_seqlens_q"].shape[0] - 1
    kinds = {
        "out": ((*q.shape[:-1], v.shape[-1]), settings.out_dtype),
        "lse": ((*batch, heads, rows), FLOAT32),
        "max_logits": ((sequences, heads), FLOAT32),
        "dropout_mask": ((sequences, heads, *settings.lengths), "bool"),
    }
    return {name: struct(*kinds[name]) for name in names}


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def run_forward(settings: Settings, names: tuple[str, ...], operands: Arrays) -> Arrays:
    @jax.custom_batching.custom_vmap
    def call(operands: Arrays) -> Arrays:
        results = forward_results(settings, names, operands)
        return _ffi.call(settings.operation, "forward", settings.numbers, operands, results)

    @call.def_vmap
    def _(size: int, batched: Any, operands: Arrays) -> tuple[Arrays, Any]:
        again = functools.partial(run_forward, settings, names)
        return _vmap.batch(again, names, size, batched[0], operands), dict.fromkeys(names, True)

    result: Arrays = call(operands)
    return result


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def run_backward(settings: Settings, names: tuple[str, ...], operands: Arrays) -> Arrays:
    """``names``: of the gradients, dq, dk, dv and others."""

    @jax.custom_batching.custom_vmap
    def call(operands: Arrays) -> Arrays:
        results = {
            name: struct(operands[name[1:]].shape, operands[name[1:]].dtype) for name in names
        }
        numbers = (*settings.numbers, ("deterministic", settings.deterministic))
        return _ffi.call(settings.operation, "backward", numbers, operands, results)

    @call.def_vmap
    def _(size: int, batched: Any, operands: Arrays) -> tuple[Arrays, Any]:
        again = functools.partial(run_backward, settings, names)
        return _vmap.batch(again, names, size, batched[0], operands), dict.fromkeys(names, True)

    result: Arrays = call(operands)
    return result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(
    settings: Settings, names: tuple[str, ...], floats: Arrays, given: Arrays, others: Arrays
) -> Arrays:
    """``given``: dout, and dlse if there is one. ``others`` has the forward's out and lse."""
    result: Arrays = run_backward(settings, names, floats | given | others)
    return result


def _gradients_forward(
    settings: Settings, names: tuple[str, ...], floats: Arrays, given: Arrays, others: Arrays
) -> tuple[Arrays, Any]:
    return _gradients(settings, names, floats, given, others), (floats, given, others)


def _gradients_backward(
    settings: Settings, names: tuple[str, ...], residuals: Any, cotangents: Arrays
) -> tuple[Arrays, Arrays, None]:
    """Out and lse follow from the floats, through which all of the derivative goes."""
    floats, given, others = residuals
    kept = None
    if "rng_state" in others:
        inputs = {name: x for name, x in others.items() if name not in ("out", "lse")}
        inputs |= jax.lax.stop_gradient(floats)
        kept = run_forward(settings, ("out", "dropout_mask"), inputs)["dropout_mask"]

    def attend(floats: Arrays) -> Arrays:
        numbers = dict(settings.numbers)
        return _formula.attention(numbers, floats | others, settings.out_dtype, kept)

    def gradients(floats: Arrays, given: Arrays) -> Arrays:
        results, pull = jax.vjp(attend, floats)
        dlse = given.get("dlse", jnp.zeros_like(results["lse"]))
        (found,) = pull({"out": given["dout"], "lse": dlse})
        return {name: found[name[1:]] for name in names}

    return (*jax.vjp(gradients, floats, given)[1](cotangents), None)


_gradients.defvjp(_gradients_forward, _gradients_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(settings: Settings, floats: Arrays, others: Arrays) -> Arrays:
    """``floats``: what has gradients. Of the results, out and lse have them."""
    result: Arrays = run_forward(settings, settings.results, floats | others)
    return result


def _attend_forward(settings: Settings, floats: Any, others: Any) -> tuple[Arrays, Any]:
    # JAX wants trees of one structure whatever is perturbed: an array's length says it.
    wanted = {name: jnp.zeros(int(x.perturbed)) for name, x in floats.items()}
    floats, others = ({name: x.value for name, x in arrays.items()} for arrays in (floats, others))
    names = tuple(dict.fromkeys((*settings.results, "lse")))
    # Not run_forward: it is differentiated where a gradient is.
    results = _attend(settings._replace(results=names), floats, others)
    residuals = (wanted, floats, others, results["out"], results["lse"])
    return {name: results[name] for name in settings.results}, residuals


def _attend_backward(settings: Settings, residuals: Any, cotangents: Any) -> tuple[Arrays, None]:
    wanted, floats, others, out, lse = residuals
    dout, dlse = cotangents["out"], cotangents.get("lse")
    zero = jax.custom_derivatives.SymbolicZero
    given = {"dout": jnp.zeros_like(out) if isinstance(dout, zero) else dout}
    if dlse is not None and not isinstance(dlse, zero):
        given["dlse"] = dlse
    names = tuple(f"d{name}" for name in floats if name in ("q", "k", "v") or wanted[name].size)
    gradients = _gradients(settings, names, floats, given, others | {"out": out, "lse": lse})
    # Nobody reads the zeros.
    return {
        name: gradients[f"d{name}"] if f"d{name}" in names else jnp.zeros_like(x)
        for name, x in floats.items()
    }, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
# Compiled as a whole also where the caller does not: shard_map knows no symbolic zeros outside.
attend = jax.jit(_attend, static_argnums=0)
