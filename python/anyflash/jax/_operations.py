"""Forward and backward as operations of JAX: compiled, batched, and differentiated."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anyflash.jax import _ffi, _formula, _vmap
from anyflash.jax._divide import Divided
from anyflash.jax._ffi import Arrays, Numbers

FLOAT32 = "float32"
_TOGETHER = frozenset(("dq", "dk", "dv"))  # have one dtype


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


class _Work(NamedTuple):
    """One call of the core, for every part along the ``mapped`` axes that jax.vmap put in front."""

    function: str  # forward or backward
    settings: Settings
    names: tuple[str, ...]  # of the results
    mapped: int = 0

    def shapes(self, operands: Arrays, wide: frozenset[str] = frozenset()) -> Arrays:
        """Of the results; the gradients ``wide`` have at least the digits of float32."""
        sizes = _vmap.sizes(self.mapped, operands)
        own = {name: struct(x.shape[self.mapped :], x.dtype) for name, x in operands.items()}
        if self.function == "forward":
            kinds = forward_results(self.settings, self.names, own)
        else:
            kinds = {name: own[name[1:]] for name in self.names}
        if wide & _TOGETHER:
            wide |= _TOGETHER
        dtypes = {
            name: jnp.promote_types(x.dtype, FLOAT32) if name in wide else x.dtype
            for name, x in kinds.items()
        }
        return {name: struct((*sizes, *x.shape), dtypes[name]) for name, x in kinds.items()}

    def run(self, operands: Arrays, wide: frozenset[str], more: Numbers) -> Arrays:
        numbers = (*self.settings.numbers, *more)
        if self.function == "backward":
            numbers = (*numbers, ("deterministic", self.settings.deterministic))
        folded = _vmap.fold(self.names, self.mapped, operands)
        shapes = self._replace(mapped=0).shapes(folded, wide)
        results = _ffi.call(self.settings.operation, self.function, numbers, folded, shapes)
        if not self.mapped:
            return results
        whole = self.shapes(operands, wide)
        return {name: x.reshape(whole[name].shape) for name, x in results.items()}


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(work: _Work, operands: Arrays) -> Arrays:
    @jax.custom_batching.custom_vmap
    def call(operands: Arrays) -> Arrays:
        operation, shapes = work.settings.operation, work.shapes(operands)
        return Divided(operation, work.run, operands, shapes, work.mapped)()

    @call.def_vmap
    def _(size: int, batched: Any, operands: Arrays) -> tuple[Arrays, Any]:
        (batched,) = batched
        if _vmap.foldable(work.names, work.mapped, batched, operands):
            parts = {name: x if batched[name] else x[None] for name, x in operands.items()}
            results = _run(work._replace(mapped=work.mapped + 1), parts)
        else:
            results = _vmap.loop(functools.partial(_run, work), batched, operands)
        return results, dict.fromkeys(work.names, True)

    result: Arrays = call(operands)
    return result


def run_forward(settings: Settings, names: tuple[str, ...], operands: Arrays) -> Arrays:
    result: Arrays = _run(_Work("forward", settings, names), operands)
    return result


def run_backward(settings: Settings, names: tuple[str, ...], operands: Arrays) -> Arrays:
    """``names``: of the gradients, dq, dk, dv and others."""
    result: Arrays = _run(_Work("backward", settings, names), operands)
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
