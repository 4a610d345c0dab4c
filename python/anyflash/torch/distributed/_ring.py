"""Keys and values travel, hop after hop (Liu et al., "Ring attention", arXiv 2310.01889). In hop h
a rank gets those of the rank h before it, while it computes with those of earlier hops.

They come from their owner directly, not through the ranks between. So what no row of a rank sees is
not sent to it. Windows send and compute no more than they need. With zigzag and a causal mask, an
earlier rank sends its first chunk alone. Results and gradients are joined in the order of the hops,
whatever arrives when.

To continue the sums of rows costs as much for few keys as for many, so later hops are joined. The
keys of one hop are computed while those of the next two arrive, and these while those of four more
do; in a backward the other way round. A step has a fixed number of bytes at most.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from anyflash.torch.distributed._layout import Layout, Run
from anyflash.torch.distributed._pieces import (
    BackwardSums,
    ForwardSums,
    Keys,
    Pieces,
    Results,
)
from anyflash.torch.distributed._transport import Exchange, Group, Message

# Keys and values, or their gradients, (rows, batch, heads, columns): some rows are one piece.
Pair = tuple[Tensor, Tensor]
# Of q, k, v, bias, sinks and slopes.
Grads = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

_MOST_BYTES = 128 << 20  # of keys and values that are computed together


class _Arrival(NamedTuple):
    """Keys and values of some hops' owners, which are computed together."""

    hops: range
    exchanges: list[Exchange]
    places: list[slice]  # rows of each hop among `keys`
    keys: Keys


class _Return(NamedTuple):
    """Gradients of some of this rank's keys on their way to it."""

    exchange: Exchange
    rows: slice


class Ring:
    def __init__(self, group: Group, layout: Layout, pieces: Pieces, k: Tensor, v: Tensor) -> None:
        self.group, self.pieces = group, pieces
        self.k, self.v = k, v
        whole = pieces.whole
        self.rows = [layout.runs(rank, whole.seqlen_q) for rank in range(group.size)]
        self.keys = [layout.runs(rank, whole.seqlen_k) for rank in range(group.size)]
        # By hops: which of its owner's keys this rank's rows see, and which of this rank's keys
        # are seen by the rank that gets them.
        peers = [(group.peer(-hop), group.peer(hop)) for hop in range(group.size)]
        self.wanted = [self._seen(group.rank, owner) for owner, _ in peers]
        self.given = [self._seen(reader, group.rank) for _, reader in peers]
        self.steps = list(self._hops_of_steps(max(layout.all_rows(whole.seqlen_k))))

    def _hops_of_steps(self, rows: int) -> Iterator[int]:
        """The same on all ranks, which have at most so many rows."""
        row = sum(x.element_size() * x.shape[0] * x.shape[2:].numel() for x in (self.k, self.v))
        most = max(1, _MOST_BYTES // max(rows * row, 1))
        rest, hops = self.group.size - 1, 1
        while rest > 0:
            yield min(hops, rest)
            rest -= hops
            hops = min(2 * hops, most)

    def _seen(self, reader: int, owner: int) -> slice:
        """Of a rank's keys, from the first to the last run that another's rows see."""
        seen = [
            keys.own
            for keys in self.keys[owner]
            if any(self.pieces.sees(rows, keys) for rows in self.rows[reader])
        ]
        return slice(seen[0].start, seen[-1].stop) if seen else slice(0, 0)

    def _exchange(
        self, hop: int, what: str, tag: int, send: Message | None, receive: Message | None
    ) -> Exchange:
        what = f"hop {hop} of {self.group.size - 1}: {what}"
        return Exchange(self.group, what, tag, send, receive)

    def _start(self, exchanges: Sequence[Exchange]) -> None:
        Exchange.begin(exchanges, self.k.device)

    def _begin(self, hops: range, own: Pair) -> _Arrival:
        """Begins to exchange what is wanted in some hops. ``own``: this rank's."""
        group = self.group
        places: list[slice] = []
        runs: list[Run] = []
        end = 0
        for hop in hops:
            wanted = self.wanted[hop]
            keys = self.keys[group.peer(-hop)]
            of_hop = [run for run in keys if wanted.start <= run.at < wanted.stop]
            runs += [run._replace(at=run.at - wanted.start + end) for run in of_hop]
            places.append(slice(end, end + wanted.stop - wanted.start))
            end = places[-1].stop
        arriving = _of_rows(own, end)
        exchanges = []
        for hop, place in zip(hops, places, strict=True):
            send = _message(own, self.given[hop], group.peer(hop))
            receive = _message(arriving, place, group.peer(-hop))
            exchanges.append(self._exchange(hop, "k and v", 4 * hop, send, receive))
        self._start(exchanges)
        return _Arrival(hops, exchanges, places, Keys(*_batch_first(arriving), runs))

    def _arrivals(self, numbers: Sequence[int]) -> Iterator[_Arrival]:
        """This rank's own keys, as hop 0, and those of each step, which has such a number of hops,
        while the next one's travel."""
        of_this_rank = _Arrival(range(1), [], [], Keys(self.k, self.v, self.keys[self.group.rank]))
        if not numbers:
            yield of_this_rank
            return
        ends = itertools.accumulate(numbers, initial=1)
        first, *others = itertools.starmap(range, itertools.pairwise(ends))
        own = self.k.transpose(0, 1).contiguous(), self.v.transpose(0, 1).contiguous()
        coming = self._begin(first, own)
        yield of_this_rank
        for hops in (*others, None):
            arrival = coming
            if hops is not None:
                coming = self._begin(hops, own)
            for exchange in arrival.exchanges:
                exchange.wait()
            yield arrival

    def forward(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        alone = self.group.size == 1  # no row gets a second piece
        sums = ForwardSums(self.pieces, self.v.shape[-1], dtype if alone else None)
        last = self._last_hop()
        for arrival in self._arrivals(self.steps):
            sums.add(arrival.keys, dtype if last in arrival.hops else None)
        return sums.finish(dtype)

    def _last_hop(self) -> int:
        """That brings keys which this rank's rows see; 0: there is none."""
        return max(
            hop for hop, rows in enumerate(self.wanted) if hop == 0 or rows.stop > rows.start
        )

    def backward(self, results: Results, wanted: Sequence[bool]) -> Grads:
        """Parts of dk and dv go back to the keys' owner. Behind the last step nothing hides that:
        it is the one of the fewest hops."""
        sums = BackwardSums(self.pieces, results, wanted, several=self._last_hop() > 0)
        arrivals = self._arrivals(self.steps[::-1])
        dk, dv = sums.add(next(arrivals).keys)
        returning: list[_Return] = []
        for arrival in arrivals:
            found = _of_rows(_batch_first((dk, dv)), arrival.keys.k.shape[1])
            sums.add(arrival.keys, _batch_first(found))
            self._add(returning, dk, dv)
            returning = self._return(arrival, found)
        dq = sums.finish()  # while the last ones are under way
        self._add(returning, dk, dv)
        return dq, dk, dv, sums.dbias, sums.dsinks, sums.dslopes

    def _return(self, arrival: _Arrival, found: Pair) -> list[_Return]:
        """Begins to send gradients to the owners of keys, and to get those of this rank's."""
        group = self.group
        returns = []
        for hop, place in zip(arrival.hops, arrival.places, strict=True):
            rows = self.given[hop]
            wanted = slice(0, rows.stop - rows.start)
            send = _message(found, place, group.peer(-hop))
            receive = _message(_of_rows(found, wanted.stop), wanted, group.peer(hop))
            exchange = self._exchange(hop, "dk and dv", 4 * hop + 2, send, receive)
            returns.append(_Return(exchange, rows))
        self._start([exchange for exchange, _ in returns])
        return returns

    def _add(self, returning: Sequence[_Return], dk: Tensor, dv: Tensor) -> None:
        for exchange, rows in returning:
            arrived = exchange.wait()
            if arrived is not None:
                more_dk, more_dv = arrived
                dk[:, rows] += more_dk.transpose(0, 1)
                dv[:, rows] += more_dv.transpose(0, 1)


def _of_rows(like: Pair, rows: int) -> Pair:
    """Room for so many rows."""
    keys, values = (x.new_empty((rows, *x.shape[1:])) for x in like)
    return keys, values


def _batch_first(pair: Pair) -> Pair:
    return pair[0].transpose(0, 1), pair[1].transpose(0, 1)


def _message(pair: Pair, rows: slice, rank: int) -> Message | None:
    keys, values = pair[0][rows], pair[1][rows]
    return Message((keys, values), rank) if keys.shape[0] > 0 else None
