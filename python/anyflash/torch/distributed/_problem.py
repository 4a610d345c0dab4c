"""One attention over ranks: what is known of the whole, and what a piece of it is told."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from anyflash._call.options import (
    NO_DROPOUT,
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    Packing,
    Part,
)
from anyflash.torch.distributed._layout import Run

_T = TypeVar("_T")


class Whole(NamedTuple):
    """Numbers of the whole attention, the same on every rank."""

    softmax_scale: float | None
    causal: bool
    window: tuple[int, int]
    softcap: float
    block_size: tuple[int, int]
    dropout_p: float
    deterministic: bool
    seqlen_q: int
    seqlen_k: int

    def sees(self, rows: Run, keys: Run, seqused: bool) -> bool:
        """Whether a row may see a key, by masks alone. With seqused_k, whose elements nobody waits
        for, the diagonal lies anywhere."""
        last = self.seqlen_k - self.seqlen_q
        first = -self.seqlen_q if seqused else last
        left, right = self.window
        if self.causal:
            right = 0
        if right >= 0 and keys.start > rows.stop - 1 + last + right:
            return False
        return left < 0 or keys.stop > rows.start + first - left

    @property
    def has_masks(self) -> bool:
        return self.causal or self.window != UNBOUNDED

    @property
    def only_causal(self) -> bool:
        """Whether the mask is a causal one, that ends at the last row and the last key alike."""
        return self.causal and self.window == UNBOUNDED and self.seqlen_q == self.seqlen_k

    def shows_all(self, rows: Run, keys: Run) -> bool:
        """Whether every row sees every key, as far as masks go."""
        last = self.seqlen_k - self.seqlen_q
        left, right = self.window
        if self.causal:
            right = 0
        if right >= 0 and keys.stop - 1 > rows.start + last + right:
            return False
        return left < 0 or keys.start >= rows.stop - 1 + last - left


class Given(NamedTuple):
    """A rank's optional tensors. bias, block_mask and key_ranges have four axes; bias those of the
    rank's rows and of all keys, the others those of the whole."""

    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    block_mask: Tensor | None = None
    key_ranges: Tensor | None = None
    seqused_k: Tensor | None = None
    rng_state: Any = None


@dataclass(frozen=True)
class Packed:
    """Packed sequences: where they begin in the whole rows and keys, the last end included."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    # The same numbers where the host has them.
    ends: tuple[list[int], list[int]] | None
    # By functions and arguments.
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def once(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """function(self, *arguments), for all pieces of a forward and its backward."""
        key = function, *arguments
        if key not in self._known:
            self._known[key] = function(self, *arguments)
        known: _T = self._known[key]
        return known

    def lengths(self) -> tuple[Tensor, Tensor]:
        """Of the sequences, by rows and by keys."""
        return self.once(_lengths)

    def are_alike(self, whole: Whole) -> bool:
        """Whether rows and keys are known to be packed alike. Then a row and a key of a sequence
        are as far apart in the whole as in the sequence."""
        if whole.seqlen_q != whole.seqlen_k:
            return False
        if self.ends is not None:
            return self.ends[0] == self.ends[1]
        return self.cu_seqlens_q is self.cu_seqlens_k

    def of_piece(self, rows: Run, keys: Run) -> Packing:
        """The sequences' parts in some rows and keys."""
        ends = self.once(_ends_in, False, rows), self.once(_ends_in, True, keys)
        return self._packing(ends, rows.rows, keys.rows)

    def starts_of(self, rows: Run, keys: Run) -> tuple[Tensor, Tensor]:
        """How many rows and keys of each sequence lie before these."""
        return self.once(_starts_in, False, rows), self.once(_starts_in, True, keys)

    def of_runs(self, rows: tuple[Run, ...], keys: tuple[Run, ...]) -> Packing:
        """The sequences' parts in some rows and keys, which are neighbours in memory, in the order
        of the whole. So the parts of a sequence are neighbours, too."""
        ends = self.once(_ends_in_all, False, rows), self.once(_ends_in_all, True, keys)
        return self._packing(ends, sum(run.rows for run in rows), sum(run.rows for run in keys))

    def _packing(self, ends: tuple[Tensor, Tensor], rows: int, keys: int) -> Packing:
        longest = min(self.max_seqlen_q, rows), min(self.max_seqlen_k, keys)
        return Packing(*ends, *longest, False)

    def see(self, whole: Whole, rows: Run, keys: Run, seqused: bool) -> bool:
        """As `Whole.sees`; where the host does not know the lengths, it may be."""
        if self.ends is None:
            return not self.are_alike(whole) or whole.sees(rows, keys, seqused)
        for (q0, q1), (k0, k1) in zip(*map(itertools.pairwise, self.ends), strict=True):
            own_rows = Run(max(rows.start, q0) - q0, min(rows.stop, q1) - q0, 0)
            own_keys = Run(max(keys.start, k0) - k0, min(keys.stop, k1) - k0, 0)
            if own_rows.rows > 0 and own_keys.rows > 0:
                sequence = whole._replace(seqlen_q=q1 - q0, seqlen_k=k1 - k0)
                if sequence.sees(own_rows, own_keys, seqused):
                    return True
        return False


def _lengths(packed: Packed) -> tuple[Tensor, Tensor]:
    return packed.cu_seqlens_q.diff(), packed.cu_seqlens_k.diff()


def _ends(packed: Packed, are_keys: bool) -> Tensor:
    return packed.cu_seqlens_k if are_keys else packed.cu_seqlens_q


def _ends_in(packed: Packed, are_keys: bool, run: Run) -> Tensor:
    return (_ends(packed, are_keys) - run.start).clamp_(0, run.rows)


def _starts_in(packed: Packed, are_keys: bool, run: Run) -> Tensor:
    return (run.start - _ends(packed, are_keys)[:-1]).clamp_(0)


def _ends_in_all(packed: Packed, are_keys: bool, runs: tuple[Run, ...]) -> Tensor:
    own, *others = (packed.once(_ends_in, are_keys, run) for run in runs)
    return sum(others, own)


def bias_of(bias: Tensor, rows: Run, keys: Run) -> Tensor:
    """The part of a bias, or of its gradient, that belongs to a piece; axes of 1 are broadcast."""
    if bias.shape[2] != 1:
        bias = bias[:, :, rows.own]
    return bias if bias.shape[3] == 1 else bias[..., keys.start : keys.stop]


def _block_mask_of(mask: Tensor, size: tuple[int, int], rows: Run, keys: Run) -> Tensor:
    (m, n), ends = size, (rows.stop, keys.stop)
    last_m, last_n = (-(-end // step) for end, step in zip(ends, size, strict=True))
    return mask[:, :, rows.start // m : last_m, keys.start // n : last_n]


class _Place(NamedTuple):
    """Where a piece lies, for the kernels; numbers, or arrays of a number for each sequence."""

    query_start: Any
    key_start: Any
    diagonal: Any
    seqused_k: Tensor | None


def _place(whole: Whole, given: Given, packed: Packed | None, rows: Run, keys: Run) -> _Place:
    used = given.seqused_k
    if packed is None:
        diagonal: Any = whole.seqlen_k - whole.seqlen_q
        if used is not None:
            diagonal = used - whole.seqlen_q
            used = (used - keys.start).clamp(0, keys.rows)
        return _Place(rows.start, keys.start, diagonal, used)
    starts = packed.starts_of(rows, keys)
    lengths_q, lengths_k = packed.lengths()
    if used is not None:
        lengths_k = used
        own = packed.of_piece(rows, keys).cu_seqlens_k.diff()
        used = torch.minimum((used - starts[1]).clamp(0), own)
    return _Place(*starts, lengths_k - lengths_q, used)


def unplaced_options(whole: Whole, causal: bool) -> AttentionOptions:
    """Of a piece whose place in the whole makes no difference."""
    return AttentionOptions(whole.softmax_scale, causal, softcap=whole.softcap or NO_SOFTCAP)


def placed_options(
    whole: Whole, given: Given, packed: Packed | None, part: Part, runs: tuple[Run, Run]
) -> AttentionOptions:
    """Of the piece that some rows and keys are, without sinks; ``part`` says which batch entries
    and heads of the whole these are."""
    rows, keys = runs
    bias, mask, ranges = given.bias, given.block_mask, given.key_ranges
    if ranges is not None:
        ranges = ranges[:, :, keys.start : keys.stop]
        ranges = ranges if packed is None else ranges[0]
    place = _place(whole, given, packed, rows, keys)
    return AttentionOptions(
        whole.softmax_scale,
        whole.causal,
        UNBOUNDED if whole.window == UNBOUNDED else whole.window,
        whole.softcap or NO_SOFTCAP,
        given.alibi_slopes,
        None if bias is None else bias_of(bias, rows, keys),
        None if mask is None else _block_mask_of(mask, whole.block_size, rows, keys),
        whole.block_size,
        ranges,
        None,
        whole.dropout_p or NO_DROPOUT,
        None,
        given.rng_state if whole.dropout_p else None,
        place.seqused_k,
        Part(*place[:3], *part[3:]),
    )
