"""The paged cache of transformers' continuous batching.

In a step in which each sequence has one query, transformers hands over tables of pages. In any
other step it says where each row of the keys is, and would gather these rows. Layers that see the
whole sequence keep them in pages, in order, so that a table follows from each page's first row.
"""

from __future__ import annotations

import inspect
from functools import wraps
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

import anyflash.torch

_NAME = "anyflash.integrations.transformers"
_attention_with_kvcache: Any = anyflash.torch.attention_with_kvcache
_attention_varlen_with_kvcache: Any = anyflash.torch.attention_varlen_with_kvcache


def update_cache(
    cache: Any, module: torch.nn.Module, key: Tensor, value: Tensor, given: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Gives all keys and values that the batch's queries see, packed, and writes the new ones.

    key, value (1, heads_k, tokens, head_dim). What the cache knows of this layer is written into
    ``given``: where sequences begin in the keys, the length of the longest. Where there is a
    block_table, it is the pages instead, and nothing else is done.
    """
    update: Any = getattr(cache, "update", None)
    known: Any = {} if update is None else inspect.signature(update).parameters
    # Earlier caches were told each argument by itself, and took any other as **kwargs.
    if "kwargs" not in known or known["kwargs"].kind == inspect.Parameter.VAR_KEYWORD:
        raise NotImplementedError(
            f"{_NAME}: cache is a {type(cache).__name__}; allowed: None, and the paged cache of "
            "transformers 5.23 or newer"
        )
    layer = module.layer_idx
    if given.get("block_table") is None:
        pages = _find_pages(cache, layer, given)
        if pages:
            given |= pages
            return key, value
    found: tuple[Tensor, Tensor] = update(
        key_states=key, value_states=value, layer_idx=layer, kwargs=given
    )
    return found


def _find_pages(cache: Any, layer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """What the cache's ``update`` writes into ``given`` where there are tables; {} if this layer
    has no pages, or nothing was in them before this step."""
    try:
        allocator = cache.layer_to_allocator[layer]
        size: int = allocator.tokens_per_page
        rows: Tensor = given["read_index"][allocator.index]
        ends = given["cu_seq_lens_k"][allocator.layer_type].to(torch.int32)
        longest: int = given["max_length_k"][allocator.layer_type]
        if not allocator.supports_block_table or size & (size - 1) or not rows.numel():
            return {}
        k_cache, v_cache = allocator.get_cache_for_block_table(layer)
    except (AttributeError, KeyError, IndexError):  # of another version
        return {}
    first = torch.arange(0, longest, size, dtype=torch.int32, device=ends.device)
    # What is behind a sequence's last page is not read.
    at = torch.minimum(ends[:-1, None] + first, ends[1:, None] - 1).clamp(min=0)
    table = (rows[at] // size).to(torch.int32)
    return {"k_cache": k_cache, "v_cache": v_cache, "block_table": table, "cu_seq_lens_k": ends}


class Pages(NamedTuple):
    """Of one layer."""

    k_cache: Tensor  # (pages, page_size, heads_k, head_dim)
    v_cache: Tensor  # (pages, page_size, heads_k, head_dim_v)
    block_table: Tensor  # (batch, pages_per_sequence) int32
    ends: Tensor  # (batch + 1,) int32: where each sequence begins, as if packed, new keys included
    ends_q: Tensor  # (batch + 1,) int32: where its queries begin, and its new keys
    longest_q: int

    @classmethod
    def of(cls, given: dict[str, Any]) -> Pages | None:
        if given.get("block_table") is None or given.get("k_cache") is None:
            return None
        return cls(
            k_cache=given["k_cache"],
            v_cache=given["v_cache"],
            block_table=given["block_table"],
            ends=given["cu_seq_lens_k"],
            ends_q=given["cu_seq_lens_q"].to(torch.int32),
            longest_q=int(given["max_length_q"]),
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, numbers: dict[str, Any]) -> Tensor:
        """q, k, v (1, tokens, heads or heads_k, head_dim); k and v are appended to the pages."""
        lengths = self.ends.diff()
        # Sequences of no keys fill a batch up to a length that a CUDA graph was captured for.
        filled = (lengths - self.ends_q.diff()).clamp(min=0)
        options = numbers | {"block_table": self.block_table, "cache_seqlens": filled}
        out: Tensor
        if self.longest_q == 1 and q.shape[1] == lengths.shape[0]:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
            out = _attention_with_kvcache(q, self.k_cache, self.v_cache, k, v, **options)
            return out.transpose(0, 1)
        q, k, v = (x.squeeze(0) for x in (q, k, v))
        out = _attention_varlen_with_kvcache(
            *(q, self.k_cache, self.v_cache, self.ends_q, k, v),
            max_seqlen_q=self.longest_q,
            **options,
        )
        return out.unsqueeze(0)


def admit_pages(name: str) -> None:
    """Models with the implementation ``name`` are given pages in a step of decoding.

    transformers gives them to FlashAttention-2 and -3 on GPUs alone, which it knows by their names.
    """
    try:
        module: Any = import_module("transformers.generation.continuous_batching.initialization")
        ensure = module.ensure_decode_fast_path_is_available
        allocators, kinds_of = module.ATTN_TYPE_TO_ALLOCATOR, module.group_layers_by_attn_type
    except (ImportError, AttributeError):  # of another version, which then gathers keys
        return
    if hasattr(ensure, "anyflash"):
        return

    @wraps(ensure)
    def ensured(config: Any, cb_config: Any, user_requested: bool) -> None:
        size = cb_config.page_size
        has_tables = all(allocators[kind].supports_block_table for kind in kinds_of(config))
        if config._attn_implementation == name and has_tables and size & (size - 1) == 0:
            return
        ensure(config, cb_config, user_requested)

    ensured.anyflash = True  # type: ignore[attr-defined]
    module.ensure_decode_fast_path_is_available = ensured
