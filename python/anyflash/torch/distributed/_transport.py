"""What ranks tell one another, by torch.distributed alone. An error says which hop it was, and
which rank was awaited."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from anyflash.torch.distributed._layout import Layout

_NAME = "anyflash.torch.distributed.ContextParallel"


class Group(NamedTuple):
    """A process group, and this process's place in it. Where the ranks are those of a mesh of two
    axes, also the groups along either axis that it is in. ``doing``: what for, in errors."""

    handle: Any
    rank: int
    size: int
    axes: tuple[Any, Any] | None = None
    doing: str = ""

    @staticmethod
    def of(handle: Any) -> Group:
        return Group(handle, dist.get_rank(handle), dist.get_world_size(handle))

    def peer(self, distance: int) -> int:
        """The rank that lies so far behind this one."""
        return (self.rank + distance) % self.size

    def global_rank(self, rank: int) -> int:
        return rank if self.handle is None else dist.get_global_rank(self.handle, rank)

    @property
    def ranks(self) -> list[int]:
        """By their global numbers."""
        return [self.global_rank(rank) for rank in range(self.size)]


def names_of(ranks: Sequence[int]) -> str:
    """In words, of global ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


@contextlib.contextmanager
def named(group: Group, what: str) -> Iterator[None]:
    """An error of torch.distributed with the rank and ``what`` before it."""
    try:
        yield
    except RuntimeError as error:
        rank = group.global_rank(group.rank)
        raise RuntimeError(f"{_NAME}: rank {rank}: {group.doing}{what}: {error}") from error


@contextlib.contextmanager
def of_all(group: Group, what: str) -> Iterator[None]:
    """`named`, of what all ranks of a group do together."""
    try:
        yield
    except RuntimeError as error:
        with named(group, f"{what} of {names_of(group.ranks)}"):
            raise error from None


class Message(NamedTuple):
    data: tuple[Tensor, ...]  # contiguous
    rank: int  # of the group


_HEAD_START = 20_000  # cycles: about 10 us


class Exchange:
    """A message to a rank and one from a rank, either of which may be missing; begin() sends them
    on their way. Their tensors have ``tag`` and the numbers after it."""

    def __init__(
        self, group: Group, what: str, tag: int, send: Message | None, receive: Message | None
    ) -> None:
        names = [f"to rank {group.global_rank(send.rank)}"] if send else []
        names += [f"from rank {group.global_rank(receive.rank)}"] if receive else []
        self._what = f"{what} {' and '.join(names)}"
        self._group, self._send, self._receive = group, send, receive
        self._works: list[Any] = []
        self._operations = [
            dist.P2POp(operation, x, group.global_rank(message.rank), group.handle, tag=tag + i)
            for operation, message in ((dist.isend, send), (dist.irecv, receive))
            if message is not None
            for i, x in enumerate(message.data)
        ]

    @staticmethod
    def begin(exchanges: Sequence[Exchange], device: torch.device) -> None:
        """On a GPU one kernel sends and receives everything, and the current stream waits a moment:
        that kernel needs multiprocessors, which the attention behind it would not give back."""
        exchanges = [exchange for exchange in exchanges if exchange._operations]
        if device.type != "cuda":
            for exchange in exchanges:
                exchange._begin([exchange])
        elif exchanges:
            exchanges[0]._begin(exchanges)
            with torch.cuda.device(device):
                torch.cuda._sleep(_HEAD_START)  # type: ignore[no-untyped-call]

    def _begin(self, exchanges: Sequence[Exchange]) -> None:
        """Of this one, and of others together with it."""
        operations = [operation for x in exchanges for operation in x._operations]
        with named(self._group, "; ".join(x._what for x in exchanges)):
            works = dist.batch_isend_irecv(operations)
        for exchange in exchanges:
            exchange._works, exchange._operations = works, []

    def wait(self) -> tuple[Tensor, ...] | None:
        """What was received. On a GPU the current stream waits, not the host."""
        with named(self._group, self._what):
            for work in self._works:
                work.wait()
        self._send = None
        return None if self._receive is None else self._receive.data


def all_to_all(
    group: Group, what: str, parts: Sequence[Sequence[Tensor]], sizes: Sequence[int], like: Tensor
) -> list[Tensor]:
    """The tensors parts[i] go to rank i, one behind the other; what comes from rank i has sizes[i]
    elements, all flat. ``like`` has their dtype and device."""
    counts = [sum(x.numel() for x in to_rank) for to_rank in parts]
    given, received = like.new_empty(sum(counts)), like.new_empty(sum(sizes))
    at = 0
    for x in itertools.chain(*parts):
        given[at : at + x.numel()].view(x.shape).copy_(x)
        at += x.numel()
    with of_all(group, what):
        dist.all_to_all_single(received, given, list(sizes), counts, group=group.handle)
    return list(torch.split(received, list(sizes)))


def side_by_side(k: Tensor, v: Tensor) -> Tensor:
    """Two tensors (a, b, *shape) in one (a, b, columns)."""
    return torch.cat([k.flatten(2), v.flatten(2)], 2)


def apart(joined: Tensor, shapes: tuple[torch.Size, torch.Size]) -> tuple[Tensor, Tensor]:
    """The tensors (a, b, *shape) that lie side by side in one; views of it."""
    columns = shapes[0].numel()
    first, second = joined[..., :columns], joined[..., columns:]
    rows = joined.shape[:2]
    return first.view(*rows, *shapes[0]), second.view(*rows, *shapes[1])


class Axis(NamedTuple):
    """An axis that is shared among ranks, and its length in the whole."""

    layout: Layout
    length: int
    dim: int


def all_gather_rows(group: Group, what: str, axis: Axis, x: Tensor) -> Tensor:
    """The whole of an axis of which each rank has its rows, in the order of the whole."""
    layout, length, dim = axis
    most = max(layout.all_rows(length), default=0)
    own = x.movedim(dim, 0)
    padded = own.contiguous()
    if own.shape[0] < most:
        padded = own.new_zeros((most, *own.shape[1:]))
        padded[: own.shape[0]] = own
    parts = [torch.empty_like(padded) for _ in range(group.size)]
    with of_all(group, what):
        dist.all_gather(parts, padded, group=group.handle)
    whole = own.new_empty((length, *own.shape[1:]))
    for rank, part in enumerate(parts):
        for run in layout.runs(rank, length):
            whole[run.start : run.stop] = part[run.own]
    return whole.movedim(0, dim)


def largest_of_ranks(group: Group, what: str, x: Tensor) -> None:
    """In place."""
    with of_all(group, what):
        dist.all_reduce(x, dist.ReduceOp.MAX, group=group.handle)


def sum_of_rows(group: Group, what: str, axis: Axis, x: Tensor) -> Tensor:
    """The rank's rows of the sum over ranks, added up in the order of the ranks."""
    layout, length, dim = axis
    whole = x.movedim(dim, 0)
    parts = [
        [whole[run.start : run.stop] for run in layout.runs(rank, length)]
        for rank in range(group.size)
    ]
    own = torch.Size((layout.rows(group.rank, length), *whole.shape[1:]))
    received = all_to_all(group, what, parts, [own.numel()] * group.size, whole)
    total = received[0].clone()
    for part in received[1:]:
        total += part
    return total.view(own).movedim(0, dim)
