"""Attention over a mesh axis: arguments are read, and JAX differentiates a method as a whole."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from anyflash._arrays.base import FLOATS
from anyflash._call import parsing
from anyflash._call.options import OutputRequest
from anyflash._call.results import AttentionResult, Returned
from anyflash.jax import _ffi
from anyflash.jax._call import Call
from anyflash.jax._context_parallel._all_to_all import AllToAll
from anyflash.jax._context_parallel._arguments import (
    Context,
    read_layout,
    read_whole,
)
from anyflash.jax._context_parallel._gather import Gather
from anyflash.jax._context_parallel._layout import Layout
from anyflash.jax._context_parallel._pieces import Pieces, Results, Whole, wide
from anyflash.jax._context_parallel._ring import Ring
from anyflash.jax._ffi import Arrays

_pmax: Any = jax.lax.pmax
_METHODS: dict[str, Any] = {"ring": Ring, "gather": Gather, "all_to_all": AllToAll}
_DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "alibi_slopes")


def attend_shared(
    call: Call, context: Context, outputs: OutputRequest, deterministic: Any
) -> Returned[Array]:
    """``call`` has a device's arrays and all options."""
    layout = read_layout(call.operation, context)
    whole = read_whole(call, layout, context.method, outputs, deterministic)
    return_lse, _, _, return_result = parsing.flag_values(
        call.operation, OutputRequest._fields[:4], outputs[:4]
    )
    device = jax.lax.axis_index(layout.axis)  # differs from device to device, as results do
    arrays = _ffi.vary_alike(call.arrays | {"device": device})
    del arrays["device"]
    if whole.packed:  # a batch of one
        names = {"q", "k", "v", "key_ranges"}
        arrays = {name: x[None] if name in names else x for name, x in arrays.items()}
    floats = {
        name: arrays.pop(name)
        for name in _DIFFERENTIABLE
        if name in arrays and arrays[name].dtype.name in FLOATS
    }
    results = _compiled(_Plan(whole, layout, context.method), floats, arrays)
    out, lse = (results[name][0] if whole.packed else results[name] for name in ("out", "lse"))
    if not (return_result or whole.max_logits):
        return (out, lse) if return_lse else out
    maxima = None
    if whole.max_logits:
        maxima = _pmax(jax.lax.stop_gradient(results["max_logits"]), layout.axis)
    return AttentionResult(out, lse, maxima, call.arrays.get("rng_state"), None)


class _Plan(NamedTuple):
    whole: Whole
    layout: Layout
    method: str

    def made(self, arrays: Arrays) -> Any:
        """The method's object."""
        given = {name: x for name, x in arrays.items() if name not in ("q", "k", "v", "sinks")}
        q, layout = arrays["q"], self.layout
        rows = layout.runs(jax.lax.axis_index(layout.axis), q.shape[1])
        return _METHODS[self.method](layout, arrays, Pieces(self.whole, given, q, rows))

    def unmapped(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), which jax.vmap does not map."""

        def refuse(*_: Any) -> Any:
            raise NotImplementedError(
                f"{self.whole.operation}: jax.vmap maps a call with context_axis; an axis that is "
                "folded into the batch is allowed"
            )

        call: Any = jax.custom_batching.custom_vmap(function)
        call.def_vmap(refuse)
        return call(*arguments)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, floats: Arrays, others: Arrays) -> Arrays:
    """out and lse of a device's rows, and what it sees of max_logits. ``floats``: what has
    gradients."""
    result: Arrays = plan.unmapped(lambda x: plan.made(x).forward(), floats | others)
    return result


def _attend_forward(plan: _Plan, floats: Any, others: Any) -> tuple[Arrays, Any]:
    # JAX wants trees of one structure whatever is perturbed: an array's length says it.
    wanted = {name: jnp.zeros(int(x.perturbed)) for name, x in floats.items()}
    floats, others = ({name: x.value for name, x in arrays.items()} for arrays in (floats, others))
    results = _attend(plan, floats, others)
    return results, (wanted, floats, others, results["out"], results["lse"])


def _attend_backward(plan: _Plan, residuals: Any, cotangents: Any) -> tuple[Arrays, None]:
    wanted, floats, others, out, lse = residuals
    zero = jax.custom_derivatives.SymbolicZero
    dout, dlse = (
        jnp.zeros_like(x) if isinstance(dx, zero) else dx
        for x, dx in ((out, cotangents["out"]), (lse, cotangents["lse"]))
    )
    names = tuple(name for name in floats if name in ("q", "k", "v") or wanted[name].size)
    grads = _gradients(plan, names, floats | others, Results(out, lse, dout, dlse))
    # Nobody reads the zeros.
    return {
        name: grads[name].astype(x.dtype) if name in names else jnp.zeros_like(x)
        for name, x in floats.items()
    }, None


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
# Compiled as a whole also where the caller does not: shard_map knows no symbolic zeros outside.
_compiled = jax.jit(_attend, static_argnums=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gradients(plan: _Plan, names: tuple[str, ...], arrays: Arrays, results: Results) -> Arrays:
    """Exchanges anew what the forward did."""

    def compute(arrays: Arrays, results: Results) -> Arrays:
        wanted = [name for name in ("bias", "alibi_slopes") if name in names]
        grads: Arrays = plan.made(arrays).backward(results, wanted)
        if "sinks" in names:
            grads["sinks"] = _of_sinks(arrays["sinks"], results)
        return grads

    found: Arrays = plan.unmapped(compute, arrays, results)
    return found


def _gradients_forward(
    plan: _Plan, names: tuple[str, ...], arrays: Arrays, results: Results
) -> tuple[Arrays, None]:
    return _gradients(plan, names, arrays, results), None


def _gradients_backward(plan: _Plan, *_: Any) -> Any:
    raise NotImplementedError(
        f"{plan.whole.operation}: gradients of gradients are asked for; with context_axis those of "
        "first order are allowed"
    )


_gradients.defvjp(_gradients_forward, _gradients_backward)


def _of_sinks(sinks: Any, results: Results) -> Any:
    """A sink is a key whose value is 0: dsink = -sum over rows of exp(sink - lse) delta."""
    dtype = wide(results.out)
    delta = (results.out.astype(dtype) * results.dout.astype(dtype)).sum(-1).swapaxes(1, 2)
    delta -= results.dlse
    share = jnp.exp(sinks.astype(dtype)[:, None] - results.lse)
    return -jnp.where(jnp.isinf(results.lse), 0, share * delta).sum((0, 2))
