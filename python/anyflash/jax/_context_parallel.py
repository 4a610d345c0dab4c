"""anyflash.jax.context_parallel_attention."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import Array

from anyflash._arrays.base import FLOATS
from anyflash._call import parsing
from anyflash._call.options import NO_DROPOUT, NO_SOFTCAP, UNBOUNDED, AttentionOptions
from anyflash.jax import _ffi
from anyflash.jax._call import Call
from anyflash.jax._operations import Settings, forward_results, struct
from anyflash.jax._ring import Ring, attend

_NAME = "anyflash.jax.context_parallel_attention"
_LAYOUTS = ("contiguous", "zigzag")
_psum: Any = jax.lax.psum


def zigzag_order(length: int, devices: int) -> Any:
    """The order of a sequence's rows in which each device's follow one another, zigzag: of twice as
    many chunks as devices, device r has chunk r and chunk ``2 devices - 1 - r``.

    Parameters
    ----------
    length : int
        A multiple of ``2 * devices``.
    devices : int

    Returns
    -------
    order : (length,), array of int64 of NumPy
        ``x[:, order]`` is to be sharded over the devices; ``numpy.argsort(order)`` is the way back.

    Raises
    ------
    TypeError, ValueError
        No integers; a length that is no such multiple.

    Examples
    --------
    >>> import anyflash.jax
    >>> anyflash.jax.zigzag_order(8, 2).tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]
    """
    for name, value in (("length", length), ("devices", devices)):
        try:
            parsing.length(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"anyflash.jax.zigzag_order: {name} {error}") from None
    if devices < 1 or length % (2 * devices):
        raise ValueError(
            f"anyflash.jax.zigzag_order: length is {length}; a multiple of {2 * devices}, twice "
            "the number of devices, is allowed"
        )
    chunks = np.arange(length).reshape(2 * devices, -1)
    pairs = [(rank, 2 * devices - 1 - rank) for rank in range(devices)]
    return np.concatenate([chunks[list(pair)] for pair in pairs]).reshape(-1)


def context_parallel_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    context_axis: str,
    layout: str = "contiguous",
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: Any = None,
    rng_state: Any = None,
    seqused_k: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
    out_dtype: Any = None,
) -> Array | tuple[Array, Array]:
    """:func:`attention` over sequences that the devices of a mesh axis share, within jax.shard_map.

    Keys and values travel in a ring, devices - 1 times; memory is linear in a device's rows.
    Partial results are float32 (float64 of float64 arrays) until the last one is joined. A device
    launches nothing for chunks that the causal mask or the window hides from its rows. Gradients
    flow to q, k, v, a bias of numbers, sinks and alibi_slopes; there are none of gradients, and no
    jax.vmap.

    Parameters that are not listed are those of :func:`attention`.

    Parameters
    ----------
    q : (batch, rows, heads, head_dim)
    k : (batch, keys, heads_k, head_dim)
    v : (batch, keys, heads_k, head_dim_v)
        A device's rows. All devices have as many.
    context_axis : str
        The mesh axis that shares the sequence.
    layout : "contiguous" or "zigzag"
        Which rows a device has: its part of the sequence, or of the sequence in the order of
        :func:`zigzag_order`, with which all have the same work under a causal mask.
    bias : (batch or 1, heads or 1, rows or 1, all keys or 1), optional
        A device's rows, and all keys in the sequence's own order.
    dropout_p : float
        A chunk's keys are then a multiple of 8. The seed is the same on every device.
    seqused_k : (batch,) int32, optional
        Of the whole.

    Returns
    -------
    out : (batch, rows, heads, head_dim_v)
    lse : (batch, heads, rows), float32, only with ``return_lse``

    Raises
    ------
    TypeError, ValueError
        As :func:`attention`; lengths that the layout does not allow.
    NameError
        ``context_axis`` is no axis of a jax.shard_map around the call.

    Examples
    --------
    >>> import functools
    >>> import jax
    >>> import anyflash.jax
    >>> from jax.sharding import AxisType, PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("cp",), axis_types=(AxisType.Auto,))
    >>> rows = PartitionSpec(None, "cp")
    >>> attention = functools.partial(
    ...     anyflash.jax.context_parallel_attention, context_axis="cp", causal=True
    ... )
    >>> q = jax.random.normal(jax.random.key(0), (2, 64, 4, 8))
    >>> shared = jax.shard_map(attention, mesh=mesh, in_specs=rows, out_specs=rows)
    >>> jax.jit(shared)(q, q, q).shape
    (2, 64, 4, 8)
    """
    call = Call(_NAME, q=q, k=k, v=v)
    call.check_rank(("q", "k", "v"), 4, "(batch, rows, heads, head_dim)")
    options = AttentionOptions(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        bias,
        None,
        (128, 128),
        None,
        sinks,
        dropout_p,
        seed,
        rng_state,
        seqused_k,
    )
    call.scores(options)
    call.dropout(options)
    ring = _ring(call, context_axis, layout, (out_dtype, deterministic))
    arrays = _ffi.vary_alike(call.arrays)
    floats = {
        name: arrays.pop(name)
        for name in ("q", "k", "v", "bias", "sinks", "alibi_slopes")
        if name in arrays and arrays[name].dtype.name in FLOATS
    }
    (return_lse,) = parsing.flags(_NAME, return_lse=return_lse)
    out, lse = attend(ring, floats, arrays)
    return (out, lse) if return_lse else out


def _ring(call: Call, axis: str, layout: str, others: tuple[Any, Any]) -> Ring:
    """``others``: out_dtype and deterministic."""
    if not isinstance(layout, str) or layout not in _LAYOUTS:
        raise ValueError(f"{_NAME}: layout is {layout!r}; {', '.join(_LAYOUTS)} are allowed")
    if not isinstance(axis, str):
        raise TypeError(f"{_NAME}: context_axis is {type(axis).__name__}; a str is allowed")
    try:
        size = _psum(1, axis)
    except NameError:
        raise NameError(
            f"{_NAME}: context_axis is {axis!r}; the name of an axis of the jax.shard_map around "
            "the call is allowed"
        ) from None
    out_dtype, deterministic = others
    rows, keys = (call.arrays[name].shape[1] for name in "qk")
    for name, n in (("q", rows), ("k", keys)):
        if layout == "zigzag" and n % 2:
            raise ValueError(
                f"{_NAME}: {name} has {n} rows on each device; an even number is allowed with "
                "layout zigzag"
            )
    chunk = keys // 2 if layout == "zigzag" else keys
    if "dropout_p" in call.numbers and size > 1 and chunk % 8:
        raise ValueError(
            f"{_NAME}: dropout_p is {call.numbers['dropout_p']}, and chunks have {chunk} keys; "
            "with dropout a multiple of 8 is allowed"
        )
    settings = call.settings(("out", "lse"), (rows, keys), out_dtype, deterministic)
    _check_part(call, settings, size)
    left, right = call.numbers["window_left"], call.numbers["window_right"]
    return Ring(
        _NAME,
        settings.numbers,
        (left, 0 if call.numbers["causal"] else right),
        settings.out_dtype,
        settings.deterministic,
        axis,
        size,
        layout == "zigzag",
    )


def _check_part(call: Call, settings: Settings, size: int) -> None:
    """A device's rows and keys, as a call of their own; a bias is of all keys."""
    arrays = dict(call.arrays)
    rows, keys = arrays["q"].shape[1], arrays["k"].shape[1]
    if "bias" in arrays:
        bias = arrays["bias"]
        shape = tuple(bias.shape)
        if len(shape) != 4 or shape[2] not in (1, rows) or shape[3] not in (1, keys * size):
            raise ValueError(
                f"{_NAME}: bias has shape {shape}; expected (batch or 1, heads or 1, {rows} or 1, "
                f"{keys * size} or 1): this device's rows, and all keys"
            )
        arrays["bias"] = struct((*shape[:3], min(shape[3], keys)), bias.dtype)
    shapes = forward_results(settings, settings.results, arrays)
    _ffi.check(_NAME, "forward", arrays | shapes, settings.numbers)
