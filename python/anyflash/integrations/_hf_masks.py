"""What transformers' models pass around as their attention mask when anyflash attends.

transformers makes one mask for all layers of a kind, and hands it to each of them. It is one of

========================  ==================================================================
None                      nothing is hidden but by ``is_causal`` and the sliding window
(batch, seqlen_k) bool    likewise, and True keeps a key; later keys, of a cache that is not
                          full, are cut off
(batch, 1, 1, seqlen_k)   True keeps a key; all queries see the same ones
(sequences + 1,) int32    packed sequences: where each begins, in (batch * seqlen)
(batch or 1, 1, seqlen_k, all that hides: for each key the queries that see it, as two intervals
4) int32                  [a, b) and [c, d)
(batch, heads, seqlen_q,  all that hides or adds to a score: bool, True keeps, or numbers that are
seqlen_k)                 added
========================  ==================================================================
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from anyflash.integrations._hf_ranges import key_ranges
from anyflash.torch._dispatch_state import is_capturing, is_compiling, is_jit_tracing

# From one more on, a block of queries fills the processors without the keys being split.
MAX_DECODED = 16

_masking: Any = import_module("transformers.masking_utils")


def is_traced() -> bool:
    """No value of a tensor may be read now."""
    return is_compiling() or is_jit_tracing() or is_capturing()


def attention_mask(
    *,
    batch_size: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    q_length: int | None = None,
    q_offset: int | Tensor = 0,
    cache_position: Tensor | None = None,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    **others: Any,
) -> Tensor | None:
    """For transformers' AttentionMaskInterface; see the table above for what it gives.

    ``allow_is_causal_skip`` and ``allow_is_bidirectional_skip`` are how transformers says that a
    mask is nothing but causal or bidirectional, apart from padding and a local attention.
    """
    config = others.get("config")

    def rows_of(first: int, count: int) -> Tensor:
        where: dict[str, Any] = {"q_length": count, "q_offset": q_offset + first}
        if cache_position is not None:
            where = {"cache_position": cache_position[first : first + count]}
        mask: Tensor = _masking.sdpa_mask(
            batch_size=batch_size,
            kv_length=kv_length,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False,
            allow_torch_fix=False,
            use_vmap=use_vmap,
            **where,
            **others,
        )
        return mask

    def whole() -> Tensor:
        rows = q_length if cache_position is None else cache_position.shape[0]
        assert rows is not None
        ranges = None
        if rows > MAX_DECODED and not is_traced():
            ranges = key_ranges(rows_of, rows)
        return rows_of(0, rows) if ranges is None else ranges

    if use_vmap or (local_size is not None and local_size == _chunk_size(config)):
        return whole()
    traced = is_traced()
    if not allow_is_causal_skip and not allow_is_bidirectional_skip:
        numbers = None if traced else _packed_sequences(mask_function)
        if numbers is None:
            return whole()
        if bool((numbers != numbers[:, :1]).any()):
            return _sequence_ends(numbers)

    seen = kv_length
    if not allow_is_bidirectional_skip:
        # Queries stand at the last keys that the cache holds, which need not be full.
        if cache_position is not None:
            q_length, q_offset = cache_position.shape[0], cache_position[0]
        if traced and isinstance(q_offset, Tensor):
            return whole()
        assert q_length is not None
        seen = int(q_offset) + q_length - kv_offset
        if not 0 < seen <= kv_length:
            return whole()
    keys = None if attention_mask is None else _columns(attention_mask, kv_offset, seen)
    if keys is not None and not traced and bool(keys.all()):
        keys = None
    if keys is None:
        if seen == kv_length:
            return None
        device = others.get("device") if cache_position is None else cache_position.device
        keys = torch.ones((batch_size, seen), dtype=torch.bool, device=device)
    if allow_is_bidirectional_skip and local_size is None:
        return keys[:, None, None, :]
    return keys


def _chunk_size(config: Any) -> Any:
    return getattr(config, "attention_chunk_size", None)


def _columns(mask: Tensor, first: int, count: int) -> Tensor:
    """Of a (batch, keys) mask; keys that it does not name are hidden."""
    width = mask.shape[1]
    if width == count:  # of these keys alone: what was made here comes back in generate()
        return mask.bool()
    if width < first + count:
        mask = torch.nn.functional.pad(mask, (0, first + count - width))
    return mask[:, first : first + count].bool()


def _packed_sequences(mask_function: Callable[..., Any]) -> Tensor | None:
    """(batch, seqlen): the number of each token's sequence, if that is all that is special."""
    if getattr(mask_function, "__name__", "") != "and_mask":
        return None
    for part in inspect.getclosurevars(mask_function).nonlocals.get("mask_functions", ()):
        numbers = inspect.getclosurevars(part).nonlocals.get("packed_sequence_mask")
        if isinstance(numbers, Tensor):
            return numbers
    return None


def _sequence_ends(numbers: Tensor) -> Tensor:
    begins = torch.ones_like(numbers, dtype=torch.bool)
    begins[:, 1:] = numbers[:, 1:] != numbers[:, :-1]
    return _ends(begins)


def _ends(begins: Tensor) -> Tensor:
    starts = begins.flatten().nonzero().flatten()
    return torch.cat([starts, starts.new_tensor([begins.numel()])]).int()


def _once(function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """``function`` waits for a GPU; all layers that are given the same mask share one wait."""
    memo: Any = WeakTensorKeyDictionary()

    @wraps(function)
    def wrapped(mask: Tensor) -> Any:
        if mask.is_inference():  # it does not tell whether it was written meanwhile
            return function(mask)
        found = memo.get(mask)
        if found is None or found[0] != mask._version:
            found = memo[mask] = (mask._version, function(mask))
        return found[1]

    return wrapped


def packed_sequences(position_ids: Any, batch: int, seqlen: int) -> Tensor | None:
    """Where sequences end, if there are several in a row, of tokens whose mask does not tell.

    Some models (GPT-OSS) make their masks without position_ids. And programs that shard sequences
    (Ulysses) put a function of their own in place of anyflash's. It gathers the tokens of all
    ranks, and drops the mask, which was made for those of one.
    """
    if not isinstance(position_ids, Tensor) or is_traced():
        return None
    if position_ids.ndim != 2 or position_ids.shape[1] != seqlen:
        return None
    if position_ids.shape[0] != batch:
        position_ids = position_ids.expand(batch, seqlen)
    ends: Tensor | None = _begins_at_zero(position_ids)
    return ends


@_once
def _begins_at_zero(position_ids: Tensor) -> Tensor | None:
    begins = position_ids == 0
    if not bool(begins[:, 1:].any()):
        return None
    begins[:, 0] = True
    return _ends(begins)


class Keys(NamedTuple):
    """Where the True of a (batch, keys) mask are, which may have axes of 1 between."""

    first: Tensor  # (batch,) int32
    count: Tensor  # type: ignore[assignment]  # (batch,) int32
    longest: int
    all: bool  # nothing is False
    together: bool  # no False between two True, in no row
    at_begin: bool  # together, from the first column on
    at_end: bool  # together, up to the last column


@_once
def read_keys(mask: Tensor) -> Keys:
    keys = mask.flatten(0, -2)
    count = keys.sum(-1, dtype=torch.int32)
    first = keys.int().argmax(-1).int()
    last = keys.shape[1] - 1 - keys.flip(-1).int().argmax(-1).int()
    empty = count == 0
    together = empty | (last - first + 1 == count)
    at_end = together & (empty | (last == keys.shape[1] - 1))
    rows = (count == keys.shape[1], together, together & (first == 0), at_end)
    longest, *flags = torch.stack([count.max(), *(row.all() for row in rows)]).tolist()
    return Keys(first, count, longest, *map(bool, flags))


class Packing(NamedTuple):
    tokens: Tensor  # (total,) places in (batch * seqlen)
    ends: Tensor  # (batch + 1,) int32


@_once
def pack(mask: Tensor) -> Packing:
    """How to leave out what a (batch, seqlen) mask hides."""
    counts = mask.sum(-1, dtype=torch.int32)
    ends = torch.nn.functional.pad(counts.cumsum(0, dtype=torch.int32), (1, 0))
    return Packing(mask.flatten().nonzero().flatten(), ends)


@_once
def longest_sequence(ends: Tensor) -> int:
    return int(ends.diff().max())
