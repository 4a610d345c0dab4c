"""A cell's tensors, made when they are first asked for."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cached_property
from typing import Any

import anyflash
from anyflash.bench._array_libraries import ArrayLibrary
from anyflash.bench._cells import KEY_RANGES, Cell, tree_lengths

SOFTCAP = 50.0
DROPOUT = 0.1
WINDOW = 512
BLOCK = 128
COLD_BYTES = 512 * 2**20  # caches of a decoding cell take turns over so much, beyond every L2


class Problem:
    """Tensors of a cell: (batch, seqlen, heads, d), packed (tokens, heads, d), and for decoding
    `turns` caches that take turns, so that none is found in the L2 cache."""

    def __init__(self, cell: Cell, arrays: ArrayLibrary) -> None:
        self.cell, self.arrays = cell, arrays
        arrays.seed()

    def _tokens(self, heads: int, seqlen: int, d: int) -> Any:
        cell = self.cell
        lead = (sum(cell.lengths),) if cell.lengths else (cell.batch, seqlen)
        return self.arrays.normal((*lead, heads, d), cell.dtype)

    @cached_property
    def q(self) -> Any:
        return self._tokens(self.cell.heads, self.cell.seqlen, self.cell.d)

    @cached_property
    def k(self) -> Any:
        return self._tokens(self.cell.kv_heads, self.cell.keys, self.cell.d)

    @cached_property
    def v(self) -> Any:
        return self._tokens(self.cell.kv_heads, self.cell.keys, self.cell.value_dim)

    @cached_property
    def dout(self) -> Any:
        return self._tokens(self.cell.heads, self.cell.seqlen, self.cell.value_dim)

    @cached_property
    def starts(self) -> Any:
        """cu_seqlens of a packed problem."""
        return self.arrays.integers([0, *itertools.accumulate(self.cell.lengths)])

    @property
    def packing(self) -> tuple[Any, Any, int, int]:
        return self.starts, self.starts, self.cell.seqlen, self.cell.seqlen

    # -- features
    @cached_property
    def slopes(self) -> Any:
        heads = self.cell.heads
        return self.arrays.floats([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])

    @cached_property
    def bias(self) -> Any:
        shape = (1, self.cell.heads, self.cell.seqlen, self.cell.keys)
        return self.arrays.normal(shape, self.cell.dtype)

    @cached_property
    def keep(self) -> Any:
        return self.arrays.coins((1, 1, self.cell.seqlen, self.cell.keys))

    @cached_property
    def blocks(self) -> Any:
        """Half of the blocks, and those of the diagonal."""
        count = self.cell.seqlen // BLOCK
        blocks = self.arrays.coins((1, 1, count, count))
        for i in range(count):
            blocks[0, 0, i, i] = True
        return blocks

    @cached_property
    def key_ranges(self) -> Any:
        """Beside a causal mask, but for a prefix, which has its own."""
        feature, seqlen = self.cell.feature, self.cell.seqlen
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
        """The cell's feature, in anyflash's arguments."""
        sinks = [i / self.cell.heads for i in range(self.cell.heads)]
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
        return made[self.cell.feature]()

    # -- decoding
    @cached_property
    def turns(self) -> int:
        """Caches that take turns: enough to fill COLD_BYTES, on a GPU."""
        if self.arrays.device == "cpu":
            return 1
        return max(1, min(64, -(-COLD_BYTES // self.cell.bytes)))

    @cached_property
    def caches(self) -> tuple[Any, Any]:
        """K and V: (turns, batch, context, heads_k, d); latent: V is columns of K."""
        cell = self.cell
        shape = (self.turns, cell.batch, cell.keys, cell.kv_heads, cell.d)
        if cell.latent:
            latents = self.arrays.normal(shape, cell.dtype)
            return latents, latents[..., : cell.d_v]
        return self.arrays.normal(shape, cell.dtype), self.arrays.normal(shape, cell.dtype)

    @cached_property
    def filled(self) -> Any:
        return self.arrays.integers([self.cell.keys] * self.cell.batch)

    @cached_property
    def page_table(self) -> Any:
        """Pages in random order: (batch, pages of a sequence)."""
        pages = self.cell.batch * self.cell.keys // self.cell.page_size
        return self.arrays.shuffled(pages).reshape(self.cell.batch, -1)

    @cached_property
    def pages(self) -> tuple[Any, Any]:
        """The caches as pages: (turns, pages, page_size, heads_k, d)."""
        cell = self.cell
        shape = (self.turns, -1, cell.page_size, cell.kv_heads, cell.d)
        k, v = self.caches
        pages = k.reshape(shape)
        return pages, pages[..., : cell.d_v] if cell.latent else v.reshape(shape)

    # -- the forward's results, for backwards
    @cached_property
    def forward_results(self) -> tuple[Any, Any]:
        """anyflash's output and LSE."""
        options = {n: x for n, x in self.options.items() if n != "return_max_logits"}
        options |= {"causal": self.cell.causal, "return_lse": True}
        if self.cell.lengths:
            return tuple(
                anyflash.attention_varlen(self.q, self.k, self.v, *self.packing, **options)
            )
        return tuple(anyflash.attention(self.q, self.k, self.v, **options))
