"""The paged cache of transformers' continuous batching."""

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
    found: tuple[Tensor, Tensor] = update(
        key_states=key, value_states=value, layer_idx=layer, kwargs=given
    )
    return found


class Pages(NamedTuple):
    """Of one layer, for a step in which each sequence has one query."""

    k_cache: Tensor  # (pages, page_size, heads_k, head_dim)
    v_cache: Tensor  # (pages, page_size, heads_k, head_dim_v)
    block_table: Tensor  # (batch, pages_per_sequence) int32
    ends: Tensor  # (batch + 1,) int32: where each sequence begins, as if packed, new key included

    @classmethod
    def of(cls, given: dict[str, Any]) -> Pages | None:
        if given.get("block_table") is None:
            return None
        names = ("k_cache", "v_cache", "block_table", "cu_seq_lens_k")
        return cls(*(given[name] for name in names))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, numbers: dict[str, Any]) -> Tensor:
        """q, k, v (1, batch, heads or heads_k, head_dim); k and v are appended to the pages."""
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        # Sequences of no keys fill a batch up to a length that a CUDA graph was captured for.
        filled = (self.ends.diff() - 1).clamp(min=0)
        out: Tensor = _attention_with_kvcache(
            *(q, self.k_cache, self.v_cache, k, v),
            cache_seqlens=filled,
            block_table=self.block_table,
            **numbers,
        )
        return out.transpose(0, 1)


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
