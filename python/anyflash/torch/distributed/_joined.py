"""Which calls a rank's rows and some keys need: one for each run of rows and run of keys that see
each other, or fewer where runs can be joined."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from anyflash.torch.distributed._layout import Run
from anyflash.torch.distributed._problem import Whole


class Piece(NamedTuple):
    """Some of a rank's rows and some of the keys that it has."""

    rows: slice
    keys: slice
    # Where they lie in the whole; None: it makes no difference, and `causal` counts from the ends
    # of these rows and keys.
    runs: tuple[Run, Run] | None = None
    causal: bool = False


def piece_of(rows: Run, keys: Run) -> Piece:
    return Piece(rows.own, keys.own, (rows, keys))


def ascending(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups in the order of the whole. In such a group the parts of a packed sequence are
    neighbours; keys of several hops are not in that order."""
    groups: list[list[Run]] = []
    for run in runs:
        if not groups or run.start < groups[-1][-1].stop:
            groups.append([])
        groups[-1].append(run)
    return groups


def joined_pieces(whole: Whole, rows: Sequence[Run], keys: Sequence[Run]) -> list[Piece] | None:
    """Pieces of an attention that depends on where rows lie by its masks alone, in one sequence or
    in packed ones; None where runs cannot be joined. With zigzag and a causal mask one piece
    remains in every hop. Runs at the same places are like one sequence; in all other pairs of runs
    every row sees every key, or none."""
    if not rows or not keys:
        return []
    if whole.only_causal and [run[:2] for run in rows] == [run[:2] for run in keys]:
        return [Piece(_all(rows), _all(keys), causal=True)]
    readers: dict[tuple[Run, ...], list[Run]] = {}
    for r in rows:
        seen = tuple(k for k in keys if whole.sees(r, k, seqused=False))
        if not all(whole.shows_all(r, k) for k in seen):
            return None
        readers.setdefault(seen, []).append(r)
    readers.pop((), None)
    if not all(_are_neighbours(runs) for group in readers.items() for runs in group):
        return None
    return [Piece(_all(r), _all(k)) for k, r in readers.items()]


def _all(runs: Sequence[Run]) -> slice:
    return slice(runs[0].own.start, runs[-1].own.stop)


def _are_neighbours(runs: Sequence[Run]) -> bool:
    """In memory."""
    return all(a.own.stop == b.at for a, b in itertools.pairwise(runs))
