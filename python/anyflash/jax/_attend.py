"""Attention of JAX's arrays, as the public functions ask for it."""

from __future__ import annotations

from typing import Any

from jax import Array

from anyflash._call.options import AttentionOptions, OutputRequest, Packing
from anyflash._call.results import Returned
from anyflash.jax._call import Call
from anyflash.jax._context_parallel import NO_CONTEXT, Context, attend_shared, check_unused


def attend(
    tensors: tuple[Any, Any, Any],
    options: AttentionOptions,
    packing: Packing | None,
    outputs: OutputRequest,
    deterministic: Any = False,
    *,
    context: Context = NO_CONTEXT,
) -> Returned[Array]:
    name = "anyflash.jax.attention" if packing is None else "anyflash.jax.attention_varlen"
    call = Call(name, **dict(zip(("q", "k", "v"), tensors, strict=True)))
    if packing is not None:
        call.pack(packing)
    call.scores(options)
    call.dropout(options)
    if context.axis is not None:
        return attend_shared(call, context, outputs, deterministic)
    check_unused(name, context)
    return call.run(outputs, deterministic)
