"""The kernels' calls, a piece of the attention each, and the sums that these are joined in."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyflash._call.backward import Backward
from anyflash._call.forward import Forward
from anyflash._call.options import GradientRequest, OutputRequest, Part
from anyflash.torch.distributed._dq_sums import KeptSums
from anyflash.torch.distributed._joined import Piece, ascending, joined_pieces, piece_of
from anyflash.torch.distributed._layout import Run
from anyflash.torch.distributed._problem import (
    Given,
    Packed,
    Whole,
    bias_of,
    placed_options,
    unplaced_options,
)

NAME = "anyflash.torch.distributed.ContextParallel.attention"


def sum_dtype(x: Tensor) -> torch.dtype:
    """In which results and gradients are summed."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class Keys(NamedTuple):
    """Some keys and their values; ``runs`` say which."""

    k: Tensor
    v: Tensor
    runs: Sequence[Run]


class Pieces:
    """Attention of a rank's rows, piece by piece. Packed sequences are a batch of one."""

    def __init__(
        self,
        whole: Whole,
        given: Given,
        packed: Packed | None,
        part: Part,
        rows: tuple[Tensor, Sequence[Run]],
    ) -> None:
        """``part``: which batch entries and heads; ``rows``: q, and which rows of the whole it
        has."""
        self.whole, self.given, self.packed, self.part = whole, given, packed, part
        self.q, self.rows = rows
        self.max_logits: Tensor | None = None  # where they are wanted: (batch, heads)

    def sees(self, rows: Run, keys: Run) -> bool:
        """Whether there is such a piece."""
        seqused = self.given.seqused_k is not None
        if self.packed is not None:
            return self.packed.see(self.whole, rows, keys, seqused)
        return self.whole.sees(rows, keys, seqused)

    def of(self, runs: Sequence[Run]) -> Sequence[Piece]:
        """The pieces of this rank's rows and of some keys."""
        if self.only_masked:
            groups = [runs] if self.packed is None else ascending(runs)
            joined = [joined_pieces(self.whole, self.rows, group) for group in groups]
            if None not in joined:
                return [piece for pieces in joined for piece in pieces or ()]
        pairs = itertools.product(self.rows, runs)
        return [piece_of(rows, keys) for rows, keys in pairs if self.sees(rows, keys)]

    @property
    def only_masked(self) -> bool:
        """Whether a causal mask and a window are all that depends on where rows and keys lie, in
        the whole."""
        others = self.given._replace(sinks=None)
        packed = self.packed
        in_whole = packed is None or packed.are_alike(self.whole) or not self.whole.has_masks
        return in_whole and self.whole.dropout_p == 0 and not any(x is not None for x in others)

    def arguments(self, keys: Keys, piece: Piece) -> Any:
        """Tensors, options and packing of a piece's calls."""
        tensors = self.q[:, piece.rows], keys.k[:, piece.keys], keys.v[:, piece.keys]
        whole, packed = self.whole, self.packed
        packing = None
        if piece.runs is None:
            options = unplaced_options(whole, piece.causal)
            if packed is not None:
                runs = _within(self.rows, piece.rows), _within(keys.runs, piece.keys)
                packing = packed.of_runs(*runs)
        else:
            options = placed_options(whole, self.given, packed, self.part, piece.runs)
            if packed is not None:
                packing = packed.of_piece(*piece.runs)
        return tuple(map(self.given_rows, tensors)), options, packing

    def given_rows(self, x: Tensor) -> Tensor:
        """What a piece's calls take of a tensor with a batch axis."""
        return x if self.packed is None else x[0]


def _is_within(part: slice, whole: slice) -> bool:
    return bool(whole.start <= part.start and part.stop <= whole.stop)


def _within(runs: Sequence[Run], whole: slice) -> tuple[Run, ...]:
    return tuple(run for run in runs if _is_within(run.own, whole))


class ForwardSums:
    """The result and its LSE, which piece after piece continues; on the CPU the LSE is float64."""

    def __init__(self, pieces: Pieces, columns: int, rounded: torch.dtype | None = None) -> None:
        """``rounded``: the dtype of the result, where no row has a second piece."""
        q = pieces.q
        batch, rows, heads, _ = q.shape
        self.pieces = pieces
        self._continues = rounded is None
        # A row's sink is a part of its first piece: where there is no other, this is one call.
        self._without_sinks = list(pieces.rows) if pieces.given.sinks is not None else []
        dtype_of_out = sum_dtype(q) if self._continues else rounded
        self.out = q.new_empty((batch, rows, heads, columns), dtype=dtype_of_out)
        dtype = torch.float64 if q.device.type == "cpu" else torch.float32
        self.lse = q.new_empty((batch, heads, rows), dtype=dtype)
        self._is_begun = False
        # The result, and which rows it has, in order.
        self._rounded: tuple[Tensor, list[slice]] | None = None

    def add(self, keys: Keys, last: torch.dtype | None = None) -> None:
        """``last``: no more keys come, and the result is wanted in this dtype."""
        pieces = list(self._with_sinks(self.pieces.of(keys.runs)))
        rows = [piece.rows for piece, _ in pieces]
        apart = all(a.stop <= b.start for a, b in itertools.pairwise(rows))
        if apart and last not in {None, self.out.dtype}:
            self._rounded = torch.empty_like(self.out, dtype=last), rows
        for piece, sinks in pieces:
            if not self._is_begun and piece.rows != slice(0, self.out.shape[1]):
                self._begin()
            self._add_piece(keys, piece, sinks)
            self._is_begun = True

    def _add_piece(self, keys: Keys, piece: Piece, sinks: Tensor | None) -> None:
        given = self.pieces.given_rows
        state = given(self.out[:, piece.rows]), given(self.lse[..., piece.rows])
        out = state[0] if self._rounded is None else given(self._rounded[0][:, piece.rows])
        prior = state if self._is_begun and self._continues else None
        tensors, options, packing = self.pieces.arguments(keys, piece)
        call = Forward(NAME, tensors, options._replace(sinks=sinks), packing)
        maxima = self.pieces.max_logits
        request = OutputRequest(
            return_max_logits=maxima is not None, out=out, lse=state[1], prior=prior
        )
        found: Any = call.run(request)
        if maxima is not None:
            torch.maximum(maxima, found.max_logits, out=maxima)

    def _with_sinks(self, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Tensor | None]]:
        """Each piece with the sinks, or None where its rows have them; cut where some have."""
        sinks = self.pieces.given.sinks
        for piece in pieces:
            if sinks is None:
                yield piece, None
                continue
            rows = [run for run in self.pieces.rows if _is_within(run.own, piece.rows)]
            groups = itertools.groupby(rows, self._without_sinks.__contains__)
            for is_new, runs in [(is_new, list(group)) for is_new, group in groups]:
                part = slice(runs[0].own.start, runs[-1].own.stop)
                yield piece._replace(rows=part), sinks if is_new else None
            self._without_sinks = [run for run in self._without_sinks if run not in rows]

    def _begin(self) -> None:
        """No key has been seen."""
        self.out.zero_()
        self.lse.fill_(-torch.inf)
        self._is_begun = True

    def finish(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The result, rounded once, and its LSE in float32, with the sinks."""
        if not self._is_begun:
            self._begin()
        sinks = self.pieces.given.sinks
        if sinks is not None:
            for run in self._without_sinks:
                self.lse[..., run.own] = sinks.to(self.lse.dtype)[:, None]
        return self._rounded_to(dtype), self.lse.to(torch.float32)

    def _rounded_to(self, dtype: torch.dtype) -> Tensor:
        if self._rounded is None:
            return self.out.to(dtype)
        result, rows = self._rounded
        ends = [0, *(end for part in rows for end in (part.start, part.stop)), result.shape[1]]
        for begin, end in zip(ends[::2], ends[1::2], strict=True):
            result[:, begin:end] = self.out[:, begin:end]
        return result


class Results(NamedTuple):
    """What a forward gave, and the gradients with respect to it."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


class BackwardSums:
    """Gradients of a rank's rows, of bias and of slopes, which every piece adds to; what it adds to
    dk and dv, others sum up."""

    def __init__(
        self, pieces: Pieces, results: Results, wanted: Sequence[bool], *, several: bool = False
    ) -> None:
        """``wanted``: dbias, dsinks, dalibi_slopes; ``several``: add() is called more than once."""
        q, given = pieces.q, pieces.given
        self.dtype = dtype = sum_dtype(q)
        self.pieces, self.results = pieces, results
        self._kept = self._kept_sums() if several else None
        self.dq = self._kept.unwritten(q, dtype) if self._kept else torch.empty_like(q, dtype=dtype)
        self.dbias = self.dslopes = self.dsinks = None
        if wanted[0] and given.bias is not None:
            self.dbias = torch.zeros_like(given.bias, dtype=dtype)
        if wanted[2] and given.alibi_slopes is not None:
            self.dslopes = torch.zeros_like(given.alibi_slopes, dtype=dtype)
        if wanted[1] and given.sinks is not None:
            self.dsinks = self._of_sinks(given.sinks, dtype)
        self._is_begun = False

    def _kept_sums(self) -> KeptSums | None:
        """All pieces then have the same kernel."""
        pieces, (out, _, dout, _) = self.pieces, self.results
        q, packed = pieces.q, pieces.packed
        if packed is not None or not pieces.only_masked or not q.dtype == out.dtype == dout.dtype:
            return None
        return KeptSums.of(NAME, pieces.whole, q, out.shape[-1], pieces.rows)

    def add(self, keys: Keys, into: tuple[Tensor, Tensor] | None = None) -> tuple[Tensor, Tensor]:
        """The parts of dk and dv, which are written to ``into`` if it is given."""
        if into is None:
            dtype = self.dtype
            into = torch.empty_like(keys.k, dtype=dtype), torch.empty_like(keys.v, dtype=dtype)
        pieces = self.pieces.of(keys.runs)
        adds_dkv = False
        written = pieces[0].keys if pieces else slice(0, 0)
        for gradient in into:
            for others in (slice(written.start), slice(written.stop, None)):
                gradient[:, others].zero_()
        for piece in pieces:
            self._add_piece(keys, piece, into, adds_dkv)
            adds_dkv = True
        return into

    def _add_piece(
        self, keys: Keys, piece: Piece, into: tuple[Tensor, Tensor], adds_dkv: bool
    ) -> None:
        given, rows = self.pieces.given_rows, piece.rows
        if not self._is_begun and rows != slice(0, self.dq.shape[1]):
            self._begin()
        dk, dv = (given(gradient[:, piece.keys]) for gradient in into)
        request = self._request(
            rows,
            begin=not self._is_begun,
            dq=given(self.dq[:, rows]),
            dk=dk,
            dv=dv,
            accumulate_dkv=adds_dkv,
            return_dbias=self.dbias is not None,
            return_dalibi_slopes=self.dslopes is not None,
            grad_dtype=None if self.dtype == torch.float64 else "float32",
        )
        found = self._run(self.pieces.arguments(keys, piece), rows, request)
        self._is_begun = True
        if self.dbias is not None and piece.runs is not None:
            bias_of(self.dbias, *piece.runs).add_(found.dbias)
        if self.dslopes is not None:
            self.dslopes += found.dalibi_slopes

    def _request(self, rows: slice, *, begin: bool, **others: Any) -> GradientRequest:
        deterministic = self.pieces.whole.deterministic
        if self._kept is None:
            return GradientRequest(deterministic, accumulate_dq=not begin, **others)
        return GradientRequest(dq_sums=self._kept.of_rows(rows, begin=begin), **others)

    def _run(self, arguments: Any, rows: slice, request: GradientRequest) -> Any:
        given = self.pieces.given_rows
        out, lse, dout, dlse = self.results
        return Backward(f"{NAME} (backward)", *arguments).run(
            given(dout[:, rows]),
            given(out[:, rows]),
            given(lse[..., rows]),
            None if dlse is None else given(dlse[..., rows]),
            request,
        )

    def finish(self) -> Tensor:
        """dq"""
        if not self._is_begun:
            self._begin()
        if self._kept is None:
            return self.dq
        dq = torch.empty_like(self.pieces.q)
        self._run_without_keys(self._kept, dq, end=True)
        return dq

    def _begin(self) -> None:
        if self._kept is None:
            self.dq.zero_()
        else:
            self._run_without_keys(self._kept, self.dq, begin=True)
        self._is_begun = True

    def _run_without_keys(self, kept: KeptSums, dq: Tensor, **steps: bool) -> None:
        """Of all rows."""
        q = self.pieces.q
        rows = slice(0, q.shape[1])
        k, v = q[:, :0], self.results.out[:, :0]
        dk, dv = (torch.empty_like(x, dtype=dq.dtype) for x in (k, v))
        request = GradientRequest(dq=dq, dk=dk, dv=dv, dq_sums=kept.of_rows(rows, **steps))
        options = unplaced_options(self.pieces.whole, causal=False)
        self._run(((q, k, v), options, None), rows, request)

    def _of_sinks(self, sinks: Tensor, dtype: torch.dtype) -> Tensor:
        """A sink is a key whose value is 0: dsink = -sum over rows of exp(sink - lse) delta. The
        dout of a row that sees no key may be anything."""
        out, lse, dout, dlse = self.results
        terms = torch.where(out == 0, 0.0, out.to(dtype) * dout.to(dtype))
        delta = terms.sum(-1).transpose(1, 2)
        if dlse is not None:
            delta = delta - dlse
        share = torch.exp(sinks.to(dtype)[:, None] - lse.to(dtype))
        return -torch.where(torch.isinf(lse), 0.0, share * delta).sum((0, 2))
