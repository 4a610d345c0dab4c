"""A case's tensors, made when they are first asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import anyflash
from anyflash.bench._array_libraries import ArrayLibrary
from anyflash.bench._cases import KEY_RANGES, Case, tree_lengths

SOFTCAP = 50.0
DROPOUT = 0.1
WINDOW = 512
BLOCK = 128
CACHE_UNIT = 1 / 16  # what 1 stands for in a cache of 8 bits
COLD_BYTES = 512 * 2**20  # caches of a decoding case take turns over so much, beyond every L2


class Problem:
    """Tensors of a case: (batch, seqlen, heads, d), packed (tokens, heads, d), and for decoding
    `turns` caches that take turns, so that none is found in the L2 cache."""

    def __init__(self, case: Case, arrays: ArrayLibrary) -> None:
        self.case, self.arrays = case, arrays
        arrays.seed()

    def _tokens(self, heads: int, seqlen: int, d: int) -> Any:
        case = self.case
        lead = (sum(case.lengths),) if case.lengths else (case.batch, seqlen)
        return self.arrays.normal((*lead, heads, d), case.dtype)

    @cached_property
    def q(self) -> Any:
        return self._tokens(self.case.heads, self.case.seqlen, self.case.d)

    @cached_property
    def k(self) -> Any:
        return self._tokens(self.case.kv_heads, self.case.keys, self.case.d)

    @cached_property
    def v(self) -> Any:
        return self._tokens(self.case.kv_heads, self.case.keys, self.case.value_dim)

    @cached_property
    def dout(self) -> Any:
        return self._tokens(self.case.heads, self.case.seqlen, self.case.value_dim)

    @cached_property
    def starts(self) -> Any:
        """cu_seqlens of a packed problem."""
        return self.arrays.integers([0, *itertools.accumulate(self.case.lengths)])

    @property
    def packing(self) -> tuple[Any, Any, int, int]:
        return self.starts, self.starts, self.case.seqlen, self.case.seqlen

    # -- features
    @cached_property
    def slopes(self) -> Any:
        heads = self.case.heads
        return self.arrays.floats([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])

    @cached_property
    def bias(self) -> Any:
        shape = (1, self.case.heads, self.case.seqlen, self.case.keys)
        return self.arrays.normal(shape, self.case.dtype)

    @cached_property
    def keep(self) -> Any:
        return self.arrays.coins((1, 1, self.case.seqlen, self.case.keys))

    @cached_property
    def blocks(self) -> Any:
        """Half of the blocks, and those of the diagonal."""
        count = self.case.seqlen // BLOCK
        blocks = self.arrays.coins((1, 1, count, count))
        for i in range(count):
            blocks[0, 0, i, i] = True
        return blocks

    @cached_property
    def key_ranges(self) -> Any:
        """Beside a causal mask, but for a prefix, which has its own."""
        feature, seqlen = self.case.feature, self.case.seqlen
        if feature == "prefix of a quarter":
            return anyflash.create_key_ranges(prefix=seqlen // 4, seqlen_k=seqlen, like=self.q)
        if feature == "tree of 8 answers":
            prompt, answer = tree_lengths(seqlen)
            entry = [0] * prompt + [1 + i // answer for i in range(8 * answer)]
            leave = [9] * prompt + [2 + i // answer for i in range(8 * answer)]
            return anyflash.create_key_ranges(tree=(entry, leave), like=self.q)
        documents = 8 if feature == "8 documents" else 1
        numbers = [i * documents // seqlen for i in range(seqlen)]
        return anyflash.create_key_ranges(documents=numbers, like=self.q)

    @cached_property
    def options(self) -> dict[str, Any]:
        """The case's feature, in anyflash's arguments."""
        sinks = [i / self.case.heads for i in range(self.case.heads)]
        made: dict[str, Callable[[], dict[str, Any]]] = {
            "": dict,
            "plain": dict,
            "causal": dict,
            "packed": dict,
            "window 512": lambda: {"window_size": (WINDOW, 0)},
            "sinks": lambda: {"sinks": self.arrays.floats(sinks)},
            "max_logits": lambda: {"return_max_logits": True},
            "softcap": lambda: {"softcap": SOFTCAP},
            "alibi": lambda: {"alibi_slopes": self.slopes},
            "bias": lambda: {"bias": self.bias},
            "keep-mask": lambda: {"bias": self.keep},
            **{name: lambda: {"key_ranges": self.key_ranges} for name in KEY_RANGES},
            "block mask, half": lambda: {"block_mask": self.blocks, "block_size": (BLOCK, BLOCK)},
            "dropout": lambda: {"dropout_p": DROPOUT, "seed": 1},
            "everything, window 512": lambda: {
                "window_size": (WINDOW, WINDOW),
                "softcap": SOFTCAP,
                "alibi_slopes": self.slopes,
                "bias": self.bias,
                "sinks": self.arrays.floats(sinks),
                "dropout_p": DROPOUT,
                "seed": 1,
            },
        }
        return made[self.case.feature]()

    # -- decoding
    @cached_property
    def turns(self) -> int:
        """Caches that take turns: enough to fill COLD_BYTES, on a GPU."""
        if self.arrays.device == "cpu":
            return 1
        return max(1, min(64, -(-COLD_BYTES // self.case.bytes)))

    @cached_property
    def caches(self) -> tuple[Any, Any]:
        """K and V: (turns, batch, context, heads_k, d); latent: V is columns of K."""
        case = self.case
        if case.latent:
            latents = self._cache()
            return latents, latents[..., : case.d_v]
        return self._cache(), self._cache()

    def _cache(self) -> Any:
        case = self.case
        x = self.arrays.normal(
            (self.turns, case.batch, case.keys, case.kv_heads, case.d), case.dtype
        )
        return self.arrays.converted(x / CACHE_UNIT, case.cache_dtype) if case.cache_dtype else x

    @cached_property
    def scales(self) -> dict[str, Any]:
        """Of a cache of 8 bits, by head."""
        case = self.case
        names = ("k_scale",) if case.latent else ("k_scale", "v_scale")
        return {
            name: self.arrays.floats([CACHE_UNIT] * case.kv_heads)
            for name in names
            if case.cache_dtype
        }

    @cached_property
    def filled(self) -> Any:
        return self.arrays.integers([self.case.keys] * self.case.batch)

    @cached_property
    def page_table(self) -> Any:
        """Pages in random order: (batch, pages of a sequence)."""
        pages = self.case.batch * self.case.keys // self.case.page_size
        return self.arrays.shuffled(pages).reshape(self.case.batch, -1)

    @cached_property
    def pages(self) -> tuple[Any, Any]:
        """The caches as pages: (turns, pages, page_size, heads_k, d)."""
        case = self.case
        shape = (self.turns, -1, case.page_size, case.kv_heads, case.d)
        k, v = self.caches
        pages = k.reshape(shape)
        return pages, pages[..., : case.d_v] if case.latent else v.reshape(shape)

    # -- the forward's results, for backwards
    @cached_property
    def forward_results(self) -> tuple[Any, Any]:
        """anyflash's output and LSE."""
        options = {n: x for n, x in self.options.items() if n != "return_max_logits"}
        options |= {"causal": self.case.causal, "return_lse": True}
        if self.case.lengths:
            return tuple(
                anyflash.attention_varlen(self.q, self.k, self.v, *self.packing, **options)
            )
        return tuple(anyflash.attention(self.q, self.k, self.v, **options))
