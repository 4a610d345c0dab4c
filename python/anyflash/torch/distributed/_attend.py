"""Attention over ranks: the arguments are read, a method is chosen, and autograd sees it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from anyflash._call import parsing
from anyflash._call.options import AttentionOptions, OutputRequest, Part
from anyflash._call.results import AttentionResult
from anyflash.torch._attend import as_dtype, autocast
from anyflash.torch._random import draw
from anyflash.torch.distributed import _ulysses
from anyflash.torch.distributed._arguments import (
    check,
    check_tensors,
    four_axes,
    parse,
    read_part,
    read_whole,
    refuse_outputs,
)
from anyflash.torch.distributed._autograd import Attention, Call
from anyflash.torch.distributed._dtensors import Placed
from anyflash.torch.distributed._gather import Gather
from anyflash.torch.distributed._layout import Layout, Run
from anyflash.torch.distributed._pieces import NAME
from anyflash.torch.distributed._problem import Given, Packed, Whole
from anyflash.torch.distributed._ring import Ring
from anyflash.torch.distributed._transport import Group, of_all
from anyflash.torch.distributed._ulysses import Ulysses

METHODS: dict[str, Any] = {"ring": Ring, "gather": Gather, "ulysses": Ulysses}
_SMALL = 64 << 20  # bytes of all keys and values that "auto" gathers


class Ranks(NamedTuple):
    """Who shares sequences, and how."""

    group: Group
    layout: Layout
    method: str

    def runs(self, length: int) -> tuple[Run, ...]:
        """This rank's rows."""
        return self.layout.runs(self.group.rank, length)


class Others(NamedTuple):
    seqlen: Any
    packed: Packed | None  # where packed sequences lie; the tensors are then a batch of one
    deterministic: bool | None
    part: Part  # its last three numbers
    placed: Placed | None  # where results lie, if they are DTensors


def attend(
    ranks: Ranks,
    tensors: tuple[Tensor, Tensor, Tensor],
    options: AttentionOptions,
    outputs: OutputRequest,
    others: Others,
) -> Any:
    seqlen, packed, deterministic, part, placed = others
    refuse_outputs(outputs)
    tensors = autocast(tensors)
    check_tensors(*tensors)
    q, k, _ = tensors
    lengths = _whole_lengths(ranks, (q.shape[1], k.shape[1]), seqlen, q.device)
    whole = read_whole(options, lengths, deterministic)
    return_lse, return_max_logits, return_result = parsing.flags(
        NAME,
        return_lse=outputs.return_lse,
        return_max_logits=outputs.return_max_logits,
        return_result=outputs.return_result,
    )
    given = Given(
        four_axes("bias", options.bias),
        options.sinks,
        options.alibi_slopes,
        four_axes("block_mask", options.block_mask),
        four_axes("key_ranges", options.key_ranges),
        options.seqused_k,
        _random_state(ranks.group, whole.dropout_p, options, q.device),
    )
    check(ranks.layout, whole, given, q.shape[1])
    call = Call(
        ranks.group,
        ranks.layout,
        _method(ranks, tensors, whole, packed),
        whole,
        given._replace(bias=None, sinks=None, alibi_slopes=None),
        packed,
        q.dtype if outputs.out_dtype is None else as_dtype(outputs.out_dtype),
        read_part(part, q.shape[2]),
        return_max_logits,
    )
    optional = given.bias, given.sinks, given.alibi_slopes
    out, lse, maxima = Attention.apply(call, *tensors, *optional)  # type: ignore[no-untyped-call]
    if packed is not None:
        out, lse = out[0], lse[0]
    if placed is not None:
        out, lse = placed.out(out), placed.lse(lse)
        maxima = None if maxima is None else placed.max_logits(maxima)
    if return_max_logits or return_result:
        return AttentionResult(out, lse, maxima, given.rng_state, None)
    return (out, lse) if return_lse else out


def _method(ranks: Ranks, tensors: tuple[Tensor, ...], whole: Whole, packed: Packed | None) -> Any:
    """The class of the method that is asked for, or fits."""
    q, k, v = tensors
    heads, heads_k, size = q.shape[2], k.shape[2], ranks.group.size
    drops = packed is not None and whole.dropout_p > 0
    if drops and (ranks.method == "ring" or ranks.group.axes is not None):
        raise NotImplementedError(
            f"{NAME}_varlen: dropout_p is {whole.dropout_p}; with packed sequences method "
            '"gather" or "ulysses" is allowed, on a mesh of one axis'
        )
    if ranks.method == "ulysses":
        ulysses = ranks.group.axes[1].size if ranks.group.axes else size
        problem = _ulysses.why_not(ulysses, heads, heads_k)
        if problem:
            raise ValueError(f'{NAME}: {problem}; method "ring" or "gather" is allowed')
    if ranks.method != "auto":
        return METHODS[ranks.method]
    if heads % size == 0 and heads_k % size == 0:
        return Ulysses
    row = k.shape[0] * heads_k * (k.shape[3] + v.shape[3]) * k.element_size()
    return Gather if drops or row * whole.seqlen_k <= _SMALL else Ring


def _whole_lengths(
    ranks: Ranks, own: tuple[int, int], seqlen: Any, device: torch.device
) -> tuple[int, int]:
    if seqlen is None:
        lengths = summed(ranks.group, own, device)
    else:
        pair = seqlen if isinstance(seqlen, (tuple, list)) else (seqlen, seqlen)
        if len(pair) != 2:
            raise ValueError(f"{NAME}: seqlen is {seqlen}; an int or a pair of int is allowed")
        lengths = tuple(parse("seqlen", parsing.length, n) for n in pair)
    for name, rows, length in zip("qk", own, lengths, strict=True):
        check_rows(ranks, name, rows, length)
    return lengths[0], lengths[1]


def summed(group: Group, own: tuple[int, ...], device: torch.device) -> tuple[int, ...]:
    """Lengths of the whole, from what every rank has. The host waits."""
    total = torch.tensor(own, dtype=torch.int64, device=device)
    with of_all(group, "summing lengths"):
        dist.all_reduce(total, group=group.handle)
    return tuple(total.tolist())


def check_rows(ranks: Ranks, name: str, rows: int, length: int) -> None:
    group, layout, _ = ranks
    expected = layout.rows(group.rank, length)
    if rows != expected:
        raise ValueError(
            f"{NAME}: {name} has {rows} rows on rank {group.rank}; of {length} the layout "
            f"{layout.name} gives it {expected}, which shard() returns"
        )


def _random_state(group: Group, p: float, options: AttentionOptions, device: torch.device) -> Any:
    seed, state = options.seed, options.rng_state
    if seed is not None and state is not None:
        raise ValueError(f"{NAME}: seed and rng_state are both given; one of them is allowed")
    if p == 0:
        return None
    if isinstance(state, Tensor):
        return state
    if state is not None:
        return parse("rng_state", parsing.rng_pair, state)
    if seed is not None:
        return parse("seed", parsing.seed, seed), 0
    drawn = draw(device)
    with of_all(group, "sharing the random state"):
        dist.broadcast(drawn, group.global_rank(0), group=group.handle)
    return drawn
