"""Attention over an axis of a mesh that shares sequences, within jax.shard_map: keys and values
travel from device to device (Liu et al., "Ring attention", arXiv 2310.01889), and gradients of them
with them, back to where they came from. Sums are float32 (float64 of float64 arrays)."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anyflash.jax import _ffi
from anyflash.jax._ffi import Arrays, Numbers
from anyflash.jax._operations import struct

_cond: Any = jax.lax.cond
_ppermute: Any = jax.lax.ppermute


class Ring(NamedTuple):
    """Of a call: everything that is not an array."""

    operation: str
    numbers: Numbers
    window: tuple[int, int]  # with the causal mask in it
    out_dtype: str
    deterministic: bool
    axis: str
    size: int
    zigzag: bool

    def chunks(self, rows: int) -> Iterator[tuple[int, Any]]:
        """Of a device's rows: the first one, and where the chunk begins, which is a function of the
        device's number."""
        count = 2 if self.zigzag else 1
        chunk = rows // count
        yield 0, lambda rank: rank * chunk
        if self.zigzag:
            yield chunk, lambda rank: (2 * self.size - 1 - rank) * chunk

    def chunk(self, rows: int) -> int:
        return rows // (2 if self.zigzag else 1)

    def next(self, x: Any) -> Any:
        """What the device before this one has."""
        pairs = [(i, (i + 1) % self.size) for i in range(self.size)]
        return _ppermute(x, self.axis, pairs)


class _Piece(NamedTuple):
    """A chunk of rows and a chunk of keys."""

    rows: slice  # of the device's
    keys: slice
    query_start: Any
    key_start: Any


class _Attention:
    """The pieces of one device's attention."""

    def __init__(self, ring: Ring, floats: Arrays, others: Arrays) -> None:
        self.ring = ring
        self.q = floats["q"]
        self.rows, self.keys = self.q.shape[1], floats["k"].shape[1]
        self.columns = floats["k"].shape[-1]
        self.bias = floats.get("bias", others.get("bias"))
        self.slopes = floats.get("alibi_slopes")
        self.seqused, self.rng_state = others.get("seqused_k"), others.get("rng_state")
        self.rank = jax.lax.axis_index(ring.axis)
        self.dtype = jnp.promote_types(self.q.dtype, jnp.float32)
        self.diagonal = (self.keys - self.rows) * ring.size

    def packed(self, k: Any, v: Any) -> Any:
        """One array, which travels in one message."""
        return jnp.concatenate([k, v], -1)

    def apart(self, packed: Any) -> tuple[Any, Any]:
        return packed[..., : self.columns], packed[..., self.columns :]

    def pieces(self, hop: int) -> Iterator[_Piece]:
        """Of the keys that this device has in a hop."""
        ring = self.ring
        owner = (self.rank - hop) % ring.size
        n, m = ring.chunk(self.rows), ring.chunk(self.keys)
        for row, query_start in ring.chunks(self.rows):
            for key, key_start in ring.chunks(self.keys):
                yield _Piece(
                    slice(row, row + n),
                    slice(key, key + m),
                    query_start(self.rank),
                    key_start(owner),
                )

    def where_seen(self, piece: _Piece, compute: Any) -> Any:
        """compute(), or zeros where no row of the piece sees a key; then nothing is launched. Its
        results are gradients, and LSEs that are -inf if there are none."""
        left, right = self.ring.window
        if left < 0 and right < 0:
            return compute()
        last = self.diagonal
        first = -self.rows * self.ring.size if self.seqused is not None else last
        n, m = (x.stop - x.start for x in piece[:2])
        seen = jnp.array(True)
        if right >= 0:
            seen &= piece.key_start <= piece.query_start + (n - 1 + last + right)
        if left >= 0:
            seen &= piece.key_start + m > piece.query_start + (first - left)
        shapes = jax.eval_shape(compute)

        def nothing() -> Any:
            return {
                name: _ffi.vary_as(
                    jnp.full(x.shape, -jnp.inf if name == "lse" else 0, x.dtype), self.q
                )
                for name, x in shapes.items()
            }

        return _cond(seen, compute, nothing)

    def operands(self, piece: _Piece, k: Any, v: Any) -> Arrays:
        batch = self.q.shape[0]

        def each(number: Any) -> Any:
            return jnp.broadcast_to(jnp.asarray(number, jnp.int32), (batch,))

        diagonal: Any = self.diagonal
        arrays: Arrays = {"q": self.q[:, piece.rows], "k": k[:, piece.keys], "v": v[:, piece.keys]}
        if self.seqused is not None:
            diagonal = self.seqused - self.rows * self.ring.size
            m = piece.keys.stop - piece.keys.start
            arrays["seqused_k"] = jnp.clip(self.seqused - piece.key_start, 0, m)
        arrays["query_start"], arrays["key_start"] = each(piece.query_start), each(piece.key_start)
        arrays["diagonal"] = each(diagonal)
        for name, x in (("alibi_slopes", self.slopes), ("rng_state", self.rng_state)):
            if x is not None:
                arrays[name] = x
        if self.bias is not None:
            arrays["bias"] = self._bias(self.bias, piece)
        return _ffi.vary_alike(arrays)

    def _bias(self, bias: Any, piece: _Piece) -> Any:
        if bias.shape[2] != 1:
            bias = bias[:, :, piece.rows]
        if bias.shape[3] == 1:
            return bias
        m = piece.keys.stop - piece.keys.start
        return jax.lax.dynamic_slice_in_dim(bias, piece.key_start, m, 3)

    def add_dbias(self, total: Any, part: Any, piece: _Piece) -> Any:
        rows = piece.rows if total.shape[2] != 1 else slice(None)
        own = total[:, :, rows]
        if total.shape[3] == 1:
            own = own + part
        else:
            m = piece.keys.stop - piece.keys.start
            before = jax.lax.dynamic_slice_in_dim(own, piece.key_start, m, 3)
            own = jax.lax.dynamic_update_slice_in_dim(own, before + part, piece.key_start, 3)
        return total.at[:, :, rows].set(own)


def _join(out: Any, lse: Any, part: Arrays) -> tuple[Any, Any]:
    """Two results of disjoint keys; an LSE of -inf says that there was none."""
    more = part["lse"].astype(lse.dtype)
    total = jnp.logaddexp(lse, more)
    finite = jnp.where(jnp.isinf(total), 0, total)
    weights = (jnp.exp(x - finite).swapaxes(1, 2)[..., None] for x in (lse, more))
    first, second = weights
    return first * out + jnp.where(second == 0, 0, second * part["out"]), total


def _forward(ring: Ring, floats: Arrays, others: Arrays) -> tuple[Any, Any]:
    attention = _Attention(ring, floats, others)
    q, v, sinks = floats["q"], floats["v"], floats.get("sinks")
    batch, rows, heads, _ = q.shape
    dtype = attention.dtype
    out = _ffi.vary_as(jnp.zeros((batch, rows, heads, v.shape[-1]), dtype), q)
    lse = _ffi.vary_as(jnp.full((batch, heads, rows), -jnp.inf, dtype), q)
    packed = attention.packed(floats["k"], v)
    for hop in range(ring.size):
        following = ring.next(packed) if hop + 1 < ring.size else packed
        k, v = attention.apart(packed)
        for piece in attention.pieces(hop):
            part = attention.where_seen(piece, functools.partial(_result, attention, piece, k, v))
            own_out, own_lse = _join(out[:, piece.rows], lse[..., piece.rows], part)
            out = out.at[:, piece.rows].set(own_out)
            lse = lse.at[..., piece.rows].set(own_lse)
        packed = following
    if sinks is not None:
        nothing = jnp.broadcast_to(sinks.astype(dtype)[:, None], lse.shape)
        out, lse = _join(out, lse, {"out": jnp.zeros_like(out), "lse": nothing})
    return out.astype(ring.out_dtype), lse.astype(jnp.float32)


def _result(attention: _Attention, piece: _Piece, k: Any, v: Any) -> Arrays:
    ring, operands = attention.ring, attention.operands(piece, k, v)
    batch, rows, heads, _ = operands["q"].shape
    shapes = {
        "out": struct((batch, rows, heads, v.shape[-1]), attention.dtype),
        "lse": struct((batch, heads, rows), jnp.float32),
    }
    return _ffi.call(ring.operation, "forward", ring.numbers, operands, shapes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(ring: Ring, floats: Arrays, others: Arrays) -> tuple[Any, Any]:
    """(out, lse) of a device's rows. ``floats``: what has gradients."""
    return _forward(ring, floats, others)


def _attend_forward(ring: Ring, floats: Arrays, others: Arrays) -> tuple[Any, Any]:
    out, lse = _forward(ring, floats, others)
    return (out, lse), (floats, others, out, lse)


class _Given(NamedTuple):
    out: Any
    lse: Any
    dout: Any
    dlse: Any


def _attend_backward(ring: Ring, residuals: Any, cotangents: Any) -> tuple[Arrays, None]:
    floats, others, out, lse = residuals
    given = _Given(out, lse, *cotangents)
    attention = _Attention(ring, floats, others)
    dtype = attention.dtype
    small = [name for name in ("bias", "alibi_slopes") if name in floats]
    grads = {
        name: _ffi.vary_as(jnp.zeros(floats[name].shape, dtype), floats["q"])
        for name in ("q", *small)
    }
    packed = attention.packed(floats["k"], floats["v"])
    gathered = _ffi.vary_as(jnp.zeros(packed.shape, dtype), packed)
    for hop in range(ring.size):
        following = ring.next(packed) if hop + 1 < ring.size else packed
        k, v = attention.apart(packed)
        for piece in attention.pieces(hop):
            found = attention.where_seen(
                piece, functools.partial(_gradients, attention, piece, (k, v), given, small)
            )
            grads["q"] = grads["q"].at[:, piece.rows].add(found["dq"])
            keys = attention.packed(found["dk"], found["dv"])
            gathered = gathered.at[:, piece.keys].add(keys)
            if "bias" in small:
                grads["bias"] = attention.add_dbias(grads["bias"], found["dbias"], piece)
            if "alibi_slopes" in small:
                grads["alibi_slopes"] += found["dalibi_slopes"]
        packed = following
        gathered = ring.next(gathered)  # after the last hop, to where the keys came from
    grads["k"], grads["v"] = attention.apart(gathered)
    if "sinks" in floats:
        grads["sinks"] = _of_sinks(floats["sinks"], given, dtype)
    return {name: grads[name].astype(x.dtype) for name, x in floats.items()}, None


def _gradients(
    attention: _Attention, piece: _Piece, keys: tuple[Any, Any], given: _Given, small: list[str]
) -> Arrays:
    ring, operands = attention.ring, attention.operands(piece, *keys)
    own = {
        "dout": given.dout[:, piece.rows],
        "out": given.out[:, piece.rows],
        "lse": given.lse[..., piece.rows],
        "dlse": given.dlse[..., piece.rows],
    }
    numbers = (*ring.numbers, ("deterministic", ring.deterministic))
    names = ("q", "k", "v", *small)
    shapes = {f"d{name}": struct(operands[name].shape, attention.dtype) for name in names}
    operands = _ffi.vary_alike(operands | own)
    return _ffi.call(ring.operation, "backward", numbers, operands, shapes)


def _of_sinks(sinks: Any, given: _Given, dtype: Any) -> Any:
    """A sink is a key whose value is 0: dsink = -sum over rows of exp(sink - lse) delta."""
    delta = (given.out.astype(dtype) * given.dout.astype(dtype)).sum(-1).swapaxes(1, 2)
    delta -= given.dlse
    share = jnp.exp(sinks.astype(dtype)[:, None] - given.lse)
    return -jnp.where(jnp.isinf(given.lse), 0, share * delta).sum((0, 2))


attend.defvjp(_attend_forward, _attend_backward)
