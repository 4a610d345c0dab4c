"""The arguments of attention over a mesh axis that shares sequences, read and checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from anyflash._call import parsing
from anyflash._call.options import OutputRequest
from anyflash.jax import _ffi
from anyflash.jax._call import Call
from anyflash.jax._context_parallel import _all_to_all
from anyflash.jax._context_parallel._layout import LAYOUTS, Layout
from anyflash.jax._context_parallel._pieces import Whole
from anyflash.jax._divide import is_within_shard_map
from anyflash.jax._ffi import Arrays
from anyflash.jax._operations import Settings, forward_results, struct

METHODS = ("ring", "gather", "all_to_all")
_psum: Any = jax.lax.psum


class Context(NamedTuple):
    """The public functions' own arguments."""

    axis: Any = None
    method: Any = METHODS[0]
    layout: Any = LAYOUTS[0]


NO_CONTEXT = Context()


def check_unused(operation: str, context: Context) -> None:
    """Without an axis."""
    for name in ("method", "layout"):
        value = getattr(context, name)
        if not isinstance(value, str) or value != getattr(NO_CONTEXT, name):
            raise ValueError(
                f"{operation}: {name} is {value!r}, and context_axis is not given; a mesh axis "
                "that shares the sequence is expected"
            )


def read_layout(operation: str, context: Context) -> Layout:
    for name, value, allowed in (
        ("method", context.method, METHODS),
        ("layout", context.layout, LAYOUTS),
    ):
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"{operation}: {name} is {value!r}; {', '.join(allowed)} are allowed")
    axis = context.axis
    if not isinstance(axis, str):
        raise TypeError(f"{operation}: context_axis is {type(axis).__name__}; a str is allowed")
    try:
        size = _psum(1, axis)
    except NameError:
        raise NameError(
            f"{operation}: context_axis is {axis!r}; the name of an axis of the jax.shard_map "
            "around the call is allowed"
        ) from None
    is_within_shard_map(operation, jax.sharding.get_abstract_mesh())
    return Layout(axis, size, context.layout == "zigzag")


def read_whole(
    call: Call, layout: Layout, method: str, outputs: OutputRequest, deterministic: Any
) -> Whole:
    """Checks what a device gives, then what all give together."""
    operation, arrays = call.operation, call.arrays
    max_logits, dropout_mask = parsing.flag_values(
        operation, OutputRequest._fields[1:3], outputs[1:3]
    )
    if dropout_mask:
        raise NotImplementedError(
            f"{operation}: return_dropout_mask is set, which is not supported with context_axis"
        )
    packed = "cu_seqlens_q" in arrays
    if packed:
        _refuse_packed(call)
        call.check_rank(("q", "k", "v"), 3, "(rows, heads, head_dim)")
    else:
        call.check_rank(("q", "k", "v"), 4, "(batch, rows, heads, head_dim)")
    axis = 0 if packed else 1
    own = arrays["q"].shape[axis], arrays["k"].shape[axis]
    lengths = own[0] * layout.size, own[1] * layout.size
    limits = tuple(call.numbers[f"max_seqlen_{x}"] for x in "qk") if packed else lengths
    settings = call.settings(("out", "lse"), limits, outputs.out_dtype, deterministic)
    names = {name for name in arrays if name in ("q", "k", "v") or name.startswith("cu_seqlens")}
    numbers = tuple((name, x) for name, x in settings.numbers if name.startswith("max_seqlen"))
    _check(settings._replace(numbers=numbers), {name: arrays[name] for name in names})
    _check_layout(call, layout, method, own)
    whole = dict(arrays)
    for name in ("q", "k", "v"):
        shape = list(arrays[name].shape)
        shape[axis] *= layout.size
        whole[name] = struct(tuple(shape), arrays[name].dtype)
    if "bias" in arrays:
        whole["bias"] = _whole_bias(operation, arrays["bias"], own[0], lengths)
    _check(settings, whole)
    return Whole(
        operation=operation,
        numbers=settings.numbers,
        lengths=lengths,
        out_dtype=settings.out_dtype,
        deterministic=settings.deterministic,
        packed=packed,
        max_logits=max_logits,
    )


def _refuse_packed(call: Call) -> None:
    for name in ("bias", "block_mask"):
        if name in call.arrays:
            raise NotImplementedError(
                f"{call.operation}: {name} is given, which is not supported with packed "
                "sequences and context_axis"
            )


def _check(settings: Settings, arrays: Arrays) -> None:
    results = forward_results(settings, settings.results, arrays)
    _ffi.check(settings.operation, "forward", arrays | results, settings.numbers)


def _whole_bias(operation: str, bias: Any, rows: int, lengths: tuple[int, int]) -> Any:
    shape = tuple(bias.shape)
    if len(shape) != 4 or shape[2] not in (1, rows) or shape[3] not in (1, lengths[1]):
        raise ValueError(
            f"{operation}: bias has shape {shape}; expected (batch or 1, heads or 1, {rows} or 1, "
            f"{lengths[1]} or 1): this device's rows, and all keys"
        )
    count = 1 if shape[2] == 1 else lengths[0]
    return struct((*shape[:2], count, shape[3]), bias.dtype)


def _check_layout(call: Call, layout: Layout, method: str, own: tuple[int, int]) -> None:
    """Whether rows and heads can be shared as the layout and the method say."""
    operation, numbers = call.operation, call.numbers
    for name, n in zip("qk", own, strict=True):
        if call.arrays[name].size == 0:
            raise ValueError(
                f"{operation}: {name} has shape {tuple(call.arrays[name].shape)}; with "
                "context_axis each device has at least one row"
            )
        if layout.zigzag and n % 2:
            raise ValueError(
                f"{operation}: {name} has {n} rows on each device; an even number is allowed with "
                "layout zigzag"
            )
    if layout.size == 1 and not layout.zigzag:
        return
    heads, heads_k = (call.arrays[name].shape[-2] for name in "qk")
    if method == "all_to_all":
        problem = _all_to_all.why_not(layout.size, heads, heads_k)
        if problem:
            raise ValueError(f"{operation}: {problem}; method ring or gather is allowed")
        return
    rows, keys = (n // 2 if layout.zigzag else n for n in own)
    if "dropout_p" in numbers and method == "ring":
        if "cu_seqlens_q" in call.arrays:
            raise NotImplementedError(
                f"{operation}: dropout_p is {numbers['dropout_p']}, and sequences are packed; "
                "method gather or all_to_all is allowed"
            )
        if keys % 8:
            raise ValueError(
                f"{operation}: dropout_p is {numbers['dropout_p']}, and chunks have {keys} keys; "
                "with dropout a multiple of 8 is allowed with method ring"
            )
    if "block_mask" in call.arrays:
        size = numbers["block_size_q"], numbers["block_size_k"]
        if rows % size[0] or (method == "ring" and keys % size[1]):
            raise ValueError(
                f"{operation}: block_size is {size}, and chunks have {rows} rows and {keys} keys; "
                "whole blocks are allowed"
            )
