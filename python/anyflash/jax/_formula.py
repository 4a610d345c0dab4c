"""Attention as JAX's own operations, with a matrix of scores in memory: of it, derivatives of
gradients are made."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anyflash.jax._ffi import Arrays


class _Places(NamedTuple):
    """Of the queries and keys of each matrix of scores."""

    sequence: Any  # (n, rows)
    row: Any  # (n, rows), within its sequence
    column: Any  # (n, columns)
    shift: Any  # (n, rows): query i is aligned with key i + shift
    seen: Any  # (n, rows, columns) bool: the key belongs to the query's sequence

    def pick(self, x: Any, rows: int = 1, columns: int = 1) -> Any:
        """(n, heads or 1, rows, columns) of x, (batch or 1, heads or 1, rows or 1, columns or 1).

        An element of x stands for so many rows and columns.
        """
        batch, _, height, width = x.shape
        picked = x[
            jnp.minimum(self.sequence, batch - 1)[:, :, None],
            :,
            jnp.minimum(self.row // rows, height - 1)[:, :, None],
            jnp.minimum(self.column // columns, width - 1)[:, None, :],
        ]
        return jnp.moveaxis(picked, 3, 1)


def _padded_places(q: Any, k: Any, used: Any) -> _Places:
    batch, rows, columns = q.shape[0], q.shape[1], k.shape[1]
    length = jnp.full(batch, columns) if used is None else used
    row, column = (jnp.broadcast_to(jnp.arange(n), (batch, n)) for n in (rows, columns))
    sequence = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, rows))
    shift = jnp.broadcast_to((length - rows)[:, None], (batch, rows))
    seen = jnp.broadcast_to((column < length[:, None])[:, None], (batch, rows, columns))
    return _Places(sequence, row, column, shift, seen)


def _packed_places(q: Any, k: Any, begin_q: Any, begin_k: Any, used: Any) -> _Places:
    rows, columns = jnp.arange(q.shape[1]), jnp.arange(k.shape[1])
    of_row = jnp.searchsorted(begin_q, rows, side="right") - 1
    of_column = jnp.searchsorted(begin_k, columns, side="right") - 1
    last = begin_q.shape[0] - 2
    sequence = jnp.minimum(of_row, last)
    length_k = jnp.diff(begin_k) if used is None else used
    row, column = rows - begin_q[of_row], columns - begin_k[of_column]
    shift = (length_k - jnp.diff(begin_q))[sequence]
    inside = (of_column <= last) & (column < length_k[jnp.minimum(of_column, last)])
    seen = (of_row[:, None] == of_column) & inside
    places = (sequence, row, column, shift, seen)
    return _Places(*(x[None] for x in places))


def attention(numbers: dict[str, Any], operands: Arrays, out_dtype: str, kept: Any) -> Arrays:
    """out and lse. ``kept``: the mask of dropout, or None."""
    q, k, v = (operands[name] for name in ("q", "k", "v"))
    packed = q.ndim == 3
    used = operands.get("seqused_k")
    if packed:
        q, k, v = q[None], k[None], v[None]
        places = _packed_places(q, k, operands["cu_seqlens_q"], operands["cu_seqlens_k"], used)
    else:
        places = _padded_places(q, k, used)
    dtype = jnp.promote_types(q.dtype, jnp.float32)
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))

    scores = jnp.einsum("brhd,bchd->bhrc", q, k, precision="highest")
    scores = scores * numbers.get("softmax_scale", q.shape[-1] ** -0.5)
    softcap = numbers.get("softcap", 0.0)
    if softcap > 0:
        scores = softcap * jnp.tanh(scores / softcap)
    seen = _seen(numbers, operands, places)
    bias = operands.get("bias")
    if bias is not None and bias.dtype != jnp.bool_:
        bias = places.pick(bias).astype(dtype)
        seen = seen & (bias > -jnp.inf)
        scores = scores + jnp.where(bias > -jnp.inf, bias, 0)
    if "alibi_slopes" in operands:
        slopes = jnp.atleast_2d(operands["alibi_slopes"]).astype(dtype)
        distance = jnp.abs((places.row + places.shift)[:, :, None] - places.column[:, None])
        slopes = jnp.moveaxis(slopes[jnp.minimum(places.sequence, len(slopes) - 1)], 2, 1)
        scores = scores - slopes[..., None] * distance[:, None]

    p, lse = _softmax(scores, seen, operands.get("sinks"))
    if kept is not None:
        # The rounding of the core.
        dropped = round(numbers["dropout_p"] * 65536) / 65536
        p = jnp.where(places.pick(kept), p / (1 - dropped), 0)
    out = jnp.einsum("bhrc,bchd->brhd", p, v, precision="highest").astype(out_dtype)
    lse = lse.astype(jnp.float32)
    return {"out": out[0], "lse": lse[0]} if packed else {"out": out, "lse": lse}


def _seen(numbers: dict[str, Any], operands: Arrays, places: _Places) -> Any:
    """(n, heads or 1, rows, columns) bool: no mask hides the key. A bias of -inf does, too."""
    seen = places.seen
    centre = (places.row + places.shift)[:, :, None]
    column = places.column[:, None]
    left, right = numbers["window_left"], numbers["window_right"]
    if numbers["causal"]:
        right = 0
    if left >= 0:
        seen = seen & (column >= centre - min(left, 1 << 30))
    if right >= 0:
        seen = seen & (column <= centre + min(right, 1 << 30))
    seen = seen[:, None]
    bias, block_mask = operands.get("bias"), operands.get("block_mask")
    if bias is not None and bias.dtype == jnp.bool_:
        seen = seen & places.pick(bias)
    if block_mask is not None:
        seen = seen & places.pick(block_mask, numbers["block_size_q"], numbers["block_size_k"])
    if "key_ranges" in operands:
        seen = seen & _in_ranges(operands["key_ranges"], operands, places)
    return seen


def _in_ranges(ranges: Any, operands: Arrays, places: _Places) -> Any:
    """(n, heads or 1, rows, columns) bool: the key's ranges hold the row."""
    if ranges.ndim == 3:  # packed
        ranges = ranges[None]
    if ranges.shape[1] > 1:
        group = operands["q"].shape[-2] // operands["k"].shape[-2]
        ranges = jnp.repeat(ranges, group, axis=1)
    begin, end = ranges[:, :, None, :, 0::2], ranges[:, :, None, :, 1::2]
    row = places.row[:, None, :, None, None]
    return ((begin <= row) & (row < end)).any(-1)


def _softmax(scores: Any, seen: Any, sinks: Any) -> tuple[Any, Any]:
    """Probabilities and LSE. Where nothing is seen the former are 0."""
    hidden = jnp.where(seen, scores, -jnp.inf)
    top = hidden.max(-1, keepdims=True, initial=-jnp.inf)
    if sinks is not None:
        sinks = sinks.astype(scores.dtype)[:, None, None]
        top = jnp.maximum(top, sinks)
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))
    p = jnp.where(seen, jnp.exp(jnp.where(seen, scores - top, 0)), 0)
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(sinks - top)
    empty = total == 0
    total = jnp.where(empty, 1, total)
    lse = jnp.where(empty, -jnp.inf, top + jnp.log(total))
    return p / total, lse[..., 0]
