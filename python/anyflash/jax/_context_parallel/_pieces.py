"""The kernels' calls, a piece of a larger attention each, and the sums that these are joined in.
Every device has the same program: where its pieces lie is known when it runs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from anyflash.jax import _ffi
from anyflash.jax._context_parallel._layout import Run
from anyflash.jax._ffi import Arrays, Numbers
from anyflash.jax._operations import FLOAT32, struct

_cond: Any = jax.lax.cond
_switch: Any = jax.lax.switch


class Whole(NamedTuple):
    """Of a call: everything that is not an array."""

    operation: str
    numbers: Numbers
    lengths: tuple[int, int]  # rows and keys, of all devices
    out_dtype: str
    deterministic: bool
    packed: bool
    max_logits: bool  # whether they are asked for

    @property
    def window(self) -> tuple[int, int]:
        """With the causal mask in it."""
        numbers = dict(self.numbers)
        return numbers["window_left"], 0 if numbers["causal"] else numbers["window_right"]


class Heads(NamedTuple):
    """Those of q that a device computes, so many from ``device * each`` on."""

    device: Any
    devices: int
    each: int


class Keys(NamedTuple):
    """Some keys and their values; ``runs`` say which."""

    k: Any
    v: Any
    runs: Sequence[Run]


class Piece(NamedTuple):
    """Some of the rows and some of the keys that are at hand."""

    rows: slice
    keys: slice
    # Where they lie in the whole; None: it makes no difference, and `causal` counts from the ends
    # of these rows and keys.
    runs: tuple[Run, Run] | None = None
    causal: bool = False


class Step(NamedTuple):
    """One of the pieces is computed: the first where ``choice``, a traced bool, is false. None
    stands for no work. With one piece there is no choice."""

    pieces: Sequence[Piece | None]
    choice: Any = None


class _Place(NamedTuple):
    """Of a piece, within each sequence: arrays of a number for each."""

    first_row: Any
    rows: Any
    first_key: Any
    keys: Any  # as many as are used
    diagonal: Any


class Results(NamedTuple):
    """What a forward gave, and the gradients with respect to it."""

    out: Any
    lse: Any
    dout: Any
    dlse: Any


def wide(x: Any) -> Any:
    """The dtype in which results and gradients are summed."""
    return jnp.promote_types(x.dtype, jnp.float32)


class Pieces:
    """Attention of some rows, piece by piece. Packed sequences are a batch of one."""

    def __init__(
        self, whole: Whole, given: Arrays, q: Any, rows: Sequence[Run], heads: Heads | None = None
    ) -> None:
        """``given``: the optional arrays but for sinks, which are no part of any piece. ``heads``:
        q's, where others have more."""
        self.whole, self.given, self.q, self.rows, self.heads = whole, given, q, rows, heads

    def of(self, keys: Sequence[Run]) -> list[Step]:
        """One for each pair of runs. Nothing is launched where no row of it sees a key."""
        return [self._step(row, key) for row in self.rows for key in keys]

    def _step(self, rows: Run, keys: Run) -> Step:
        piece = Piece(rows.own, keys.own, (rows, keys))
        unbounded = self.whole.window == (-1, -1) and not self.whole.packed
        if unbounded or keys.rows == self.whole.lengths[1]:
            return Step([piece])
        place = self._place(rows, keys)
        seen = (place.rows > 0) & (place.keys > 0)
        # A window that is wider than the whole would overflow.
        left, right = (min(x, sum(self.whole.lengths)) for x in self.whole.window)
        if right >= 0:
            last = place.first_row + place.rows - 1
            seen &= place.first_key <= last + place.diagonal + right
        if left >= 0:
            seen &= place.first_key + place.keys > place.first_row + place.diagonal - left
        return Step([None, piece], seen.any())

    def _place(self, rows: Run, keys: Run) -> _Place:
        given = self.given
        begin_q = begin_k = jnp.zeros(self.q.shape[0], jnp.int32)
        lengths_q: Any
        lengths_k: Any
        lengths_q, lengths_k = self.whole.lengths
        if self.whole.packed:
            ends_q, ends_k = given["cu_seqlens_q"], given["cu_seqlens_k"]
            begin_q, begin_k = ends_q[:-1], ends_k[:-1]
            lengths_q, lengths_k = jnp.diff(ends_q), jnp.diff(ends_k)
        used = given.get("seqused_k", lengths_k)
        first_row, end_row = (
            jnp.clip(x - begin_q, 0, lengths_q) for x in (rows.start, rows.start + rows.rows)
        )
        first_key, end_key = (
            jnp.clip(x - begin_k, 0, lengths_k) for x in (keys.start, keys.start + keys.rows)
        )
        own_keys = jnp.clip(used - first_key, 0, end_key - first_key)
        return _Place(first_row, end_row - first_row, first_key, own_keys, used - lengths_q)

    def operands(self, piece: Piece, keys: Keys) -> tuple[Numbers, Arrays]:
        """Numbers and arrays of a piece's calls."""
        arrays: Arrays = {
            "q": self.batched(self.q[:, piece.rows]),
            "k": self.batched(keys.k[:, piece.keys]),
            "v": self.batched(keys.v[:, piece.keys]),
        }
        if piece.runs is None:
            unbounded = {"causal": piece.causal, "window_left": -1, "window_right": -1}
            return self._numbers(unbounded), _ffi.vary_alike(arrays)
        place = self._place(*piece.runs)
        starts = {
            "query_start": place.first_row,
            "key_start": place.first_key,
            "diagonal": place.diagonal,
        }
        arrays |= {
            name: jnp.broadcast_to(x, place.rows.shape).astype(jnp.int32)
            for name, x in starts.items()
        }
        if "seqused_k" in self.given:
            arrays["seqused_k"] = place.keys
        arrays |= self._of_piece(*piece.runs)
        limits = {}
        if self.whole.packed:
            numbers = dict(self.whole.numbers)
            for name, run in zip(("max_seqlen_q", "max_seqlen_k"), piece.runs, strict=True):
                limits[name] = min(numbers[name], run.rows)
        return self._numbers(limits), _ffi.vary_alike(arrays)

    def _numbers(self, changes: dict[str, Any]) -> Numbers:
        return tuple((dict(self.whole.numbers) | changes).items())

    def _of_piece(self, rows: Run, keys: Run) -> Arrays:
        """The optional arrays' parts."""
        parts = {}
        for name, x in self.given.items():
            if name in ("alibi_slopes", "rng_state"):
                parts[name] = x
            elif name == "bias":
                parts[name] = _part(x if x.shape[2] == 1 else x[:, :, rows.own], 3, keys)
            elif name == "block_mask":
                sizes = dict(self.whole.numbers)
                own = _part(x, 2, rows, sizes["block_size_q"])
                parts[name] = _part(own, 3, keys, sizes["block_size_k"])
            elif name == "key_ranges":
                parts[name] = self.batched(_part(x, 2, keys))
            elif name.startswith("cu_seqlens"):
                run = rows if name == "cu_seqlens_q" else keys
                parts[name] = jnp.clip(x - run.start, 0, run.rows)
        return parts

    def batched(self, x: Any) -> Any:
        """What a piece's calls take of an array with a batch axis."""
        return x[0] if self.whole.packed else x

    def unbatched(self, x: Any) -> Any:
        return x[None] if self.whole.packed else x

    def call(self, function: str, numbers: Numbers, operands: Arrays, results: Arrays) -> Arrays:
        """Dropout is told which heads are here. A call's numbers are constants, so that there is a
        branch for each device."""

        def branch(more: Numbers) -> Callable[[Arrays], Arrays]:
            name = self.whole.operation
            return lambda operands: _ffi.call(name, function, (*numbers, *more), operands, results)

        heads = self.heads
        if heads is None or "rng_state" not in operands:
            return branch(())(operands)
        total = ("total_heads", heads.devices * heads.each)
        starts = [("head_start", device * heads.each) for device in range(heads.devices)]
        found: Arrays = _switch(heads.device, [branch((x, total)) for x in starts], operands)
        return found


def _part(x: Any, axis: int, run: Run, size: int = 1) -> Any:
    """The part of an array of the whole that belongs to a run; ``size`` rows have one element."""
    count = -(-run.rows // size)
    if x.shape[axis] in (1, count):
        return x
    return jax.lax.dynamic_slice_in_dim(x, run.start // size, count, axis)


def _take(step: Step, compute: Callable[[Piece, Any], Any], state: Any) -> Any:
    """What the piece makes of the state."""

    def branch(piece: Piece | None) -> Callable[[Any], Any]:
        return (lambda state: state) if piece is None else functools.partial(compute, piece)

    if step.choice is None:
        (piece,) = step.pieces
        return branch(piece)(state)
    otherwise, chosen = step.pieces
    return _cond(step.choice, branch(chosen), branch(otherwise), state)


class ForwardSums:
    """out, lse and max_logits, which piece after piece continues."""

    def __init__(self, pieces: Pieces, columns: int, sinks: Any, alone: bool = False) -> None:
        """``alone``: each row has one piece, which gives the result as one call does. Else sinks
        come first: keys whose values are 0."""
        q = pieces.q
        batch, rows, heads, _ = q.shape
        self.pieces, self._alone = pieces, alone
        self._sinks = sinks if alone else None
        out = jnp.zeros((batch, rows, heads, columns), pieces.whole.out_dtype if alone else wide(q))
        lse = jnp.full((batch, heads, rows), -jnp.inf, wide(q))
        if sinks is not None and not alone:
            lse = jnp.broadcast_to(sinks.astype(lse.dtype)[:, None], lse.shape)
        state = {"out": out, "lse": lse}
        if pieces.whole.max_logits:
            sequences = pieces.given["cu_seqlens_q"].shape[0] - 1 if pieces.whole.packed else batch
            state["max_logits"] = jnp.full((sequences, heads), -jnp.inf, FLOAT32)
        self.state = {name: _ffi.vary_as(x, q) for name, x in state.items()}

    def add(self, keys: Keys, steps: Sequence[Step] | None = None) -> None:
        for step in self.pieces.of(keys.runs) if steps is None else steps:
            self.state = _take(step, functools.partial(self._continue, keys), self.state)

    def _continue(self, keys: Keys, piece: Piece, state: Arrays) -> Arrays:
        pieces, (out, lse) = self.pieces, (state["out"], state["lse"])
        numbers, operands = pieces.operands(piece, keys)
        own = {
            "out": pieces.batched(out[:, piece.rows]),
            "lse": pieces.batched(lse[..., piece.rows]),
        }
        if not self._alone:
            operands |= {f"prior_{name}": x for name, x in own.items()}
        elif self._sinks is not None:
            operands["sinks"] = self._sinks
        if "max_logits" in state:
            own["max_logits"] = state["max_logits"]
        results = {name: struct(x.shape, x.dtype) for name, x in own.items()}
        found = pieces.call("forward", numbers, _ffi.vary_alike(operands), results)
        state = {
            "out": _with_part(out, pieces.unbatched(found["out"]), 1, piece.rows),
            "lse": _with_part(lse, pieces.unbatched(found["lse"]), 2, piece.rows),
        }
        if "max_logits" in found:
            state["max_logits"] = jnp.maximum(own["max_logits"], found["max_logits"])
        return state

    def finish(self) -> Arrays:
        """The result, rounded once, and its LSE in float32."""
        dtypes = {"out": self.pieces.whole.out_dtype}
        return {name: x.astype(dtypes.get(name, FLOAT32)) for name, x in self.state.items()}


class BackwardSums:
    """Gradients of a device's rows, of bias and of slopes, which every piece adds to; what it adds
    to dk and dv, others sum up."""

    def __init__(self, pieces: Pieces, results: Results, wanted: Sequence[str]) -> None:
        """``wanted``: of bias and alibi_slopes, those that have gradients."""
        self.pieces, self.results, self.wanted = pieces, results, wanted
        arrays = {"q": pieces.q} | {name: pieces.given[name] for name in wanted}
        self.state = {
            name: _ffi.vary_as(
                jnp.zeros(x.shape, jnp.promote_types(wide(pieces.q), x.dtype)), pieces.q
            )
            for name, x in arrays.items()
        }

    def add(
        self, keys: Keys, into: tuple[Any, Any], steps: Sequence[Step] | None = None
    ) -> tuple[Any, Any]:
        """``into``, dk and dv, with this device's parts."""
        for step in self.pieces.of(keys.runs) if steps is None else steps:
            compute = functools.partial(self._add_piece, keys)
            self.state, into = _take(step, compute, (self.state, into))
        return into

    def empty(self, keys: Keys) -> tuple[Any, Any]:
        """dk and dv that nothing was added to."""
        dk, dv = (
            _ffi.vary_as(jnp.zeros(x.shape, wide(x)), self.pieces.q) for x in (keys.k, keys.v)
        )
        return dk, dv

    def _add_piece(self, keys: Keys, piece: Piece, state: Any) -> Any:
        pieces, (sums, (dk, dv)), results = self.pieces, state, self.results
        numbers, operands = pieces.operands(piece, keys)
        given = {
            "dout": results.dout[:, piece.rows],
            "out": results.out[:, piece.rows],
            "lse": results.lse[..., piece.rows],
            "dlse": results.dlse[..., piece.rows],
        }
        operands |= {name: pieces.batched(x) for name, x in given.items()}
        names = ("q", "k", "v", *self.wanted)
        shapes = {f"d{name}": struct(operands[name].shape, wide(operands[name])) for name in names}
        numbers = (*numbers, ("deterministic", pieces.whole.deterministic))
        found = pieces.call("backward", numbers, _ffi.vary_alike(operands), shapes)
        dk = _with_sum(dk, pieces.unbatched(found["dk"]), piece.keys)
        dv = _with_sum(dv, pieces.unbatched(found["dv"]), piece.keys)
        sums = dict(sums)
        sums["q"] = _with_sum(sums["q"], pieces.unbatched(found["dq"]), piece.rows)
        if "alibi_slopes" in sums:
            sums["alibi_slopes"] += found["dalibi_slopes"]
        if "bias" in sums and piece.runs is not None:
            sums["bias"] = _with_dbias(sums["bias"], found["dbias"], *piece.runs)
        return sums, (dk, dv)


def _with_part(x: Any, part: Any, axis: int, own: slice) -> Any:
    """x with something else in some of its rows."""
    if x.shape == part.shape:
        return part
    return jax.lax.dynamic_update_slice_in_dim(x, part, own.start, axis)


def _with_sum(x: Any, part: Any, own: slice) -> Any:
    return _with_part(x, x[:, own] + part, 1, own)


def _with_dbias(total: Any, part: Any, rows: Run, keys: Run) -> Any:
    own = slice(0, 1) if total.shape[2] == 1 else rows.own
    dbias = total[:, :, own]
    if total.shape[3] in (1, keys.rows):
        return _with_part(total, dbias + part, 2, own)
    before = jax.lax.dynamic_slice_in_dim(dbias, keys.start, keys.rows, 3)
    dbias = jax.lax.dynamic_update_slice_in_dim(dbias, before + part, keys.start, 3)
    return _with_part(total, dbias, 2, own)
