"""The GPT of examples/train, which reads and writes a paged KV cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import checkpoint
import numpy as np
import numpy.typing as npt
import torch
from config import CONFIGS, Config
from gpt_torch import GPT, Attention
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

import anyflash.torch


def config_of(file: Path) -> Config:
    """The shape of a checkpoint of examples/train, which must be PyTorch's."""
    checkpoint.check(file, framework="torch")
    origin, _ = checkpoint.metadata(file)
    return dataclasses.replace(CONFIGS[origin.model], seqlen=origin.seqlen)


def load(file: Path, attention: Attention, device: str) -> GPT:
    """The model of a checkpoint of examples/train; on a GPU in bfloat16."""
    with safe_open(file, framework="pt") as saved:
        names = [name for name in saved.keys() if name.startswith("model.")]  # noqa: SIM118
        weights = {name.removeprefix("model."): saved.get_tensor(name) for name in names}
    gpt = GPT(config_of(file), attention)
    gpt.load_state_dict(weights)
    return gpt.to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


@dataclass
class Feed:
    """What a step gives the model of one request: tokens that are sure, then a tree of guesses."""

    tokens: list[int]
    parents: list[int]  # the number of the token before each; -1: the cache's last
    sure: int
    filled: int  # rows of the cache
    pages: list[int]
    complete: bool  # the sure tokens are the request's last ones: what follows them is wanted

    def sees(self) -> npt.NDArray[np.bool_]:
        """Which of these tokens each one sees, itself and its ancestors: (tokens, tokens)."""
        sees = np.eye(len(self.tokens), dtype=bool)
        for i, parent in enumerate(self.parents):
            if parent >= 0:
                sees[i] |= sees[parent]
        return sees

    def kept(self, chosen: Sequence[int]) -> list[int]:
        """The numbers of the right tokens: the sure ones, and the guesses that the model chose."""
        path = list(range(self.sure))
        guesses = range(self.sure, len(self.tokens))
        children = {(self.parents[i], self.tokens[i]): i for i in guesses}
        while (child := children.get((path[-1], chosen[path[-1]]))) is not None:
            path.append(child)
        return path


class Batch:
    """The feeds of a step, packed one after the other, as tensors on the model's device."""

    def __init__(self, feeds: Sequence[Feed], device: torch.device) -> None:
        self.sizes = [len(feed.tokens) for feed in feeds]
        ends = np.cumsum([0, *self.sizes], dtype=np.int32)
        table = np.full((len(feeds), max(len(feed.pages) for feed in feeds)), -1, np.int32)
        sees = np.zeros((ends[-1], max(self.sizes)), bool)
        wanted = np.zeros(ends[-1], bool)
        for row, feed in enumerate(feeds):
            begin, end = ends[row : row + 2]
            table[row, : len(feed.pages)] = feed.pages
            sees[begin:end, : end - begin] = feed.sees()
            wanted[begin + feed.sure - 1 : end] = feed.complete
        filled = np.array([feed.filled for feed in feeds], np.int32)
        places = np.repeat(filled, self.sizes) + sees.sum(-1) - 1  # by the number of ancestors
        is_tree = any(feed.sure < len(feed.tokens) for feed in feeds)  # else `causal` says all

        def tensor(x: Any) -> Tensor:
            return torch.from_numpy(np.asarray(x)).to(device)

        self.tokens = tensor([token for feed in feeds for token in feed.tokens])
        self.places = tensor(places)
        self.wanted = tensor(wanted)
        self.options = {
            "cu_seqlens_q": tensor(ends),
            "max_seqlen_q": max(self.sizes),
            "cache_seqlens": tensor(filled),
            "block_table": tensor(table),
            "tree_mask": tensor(sees) if is_tree else None,
        }


class PagedGPT:
    """Takes any number of tokens of each request in one pass."""

    def __init__(self, gpt: GPT, pages: int, page_size: int) -> None:
        weight = gpt.tokens.weight
        heads = gpt.blocks[0].heads
        shape = (len(gpt.blocks), 2, pages, page_size, heads, weight.shape[1] // heads)
        self.gpt = gpt
        self.pool = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.options: dict[str, Any] = {}  # of this step's attention
        for layer, block in enumerate(gpt.blocks):
            block.attention = partial(self._attention, *self.pool[layer])

    def _attention(
        self, k_pages: Tensor, v_pages: Tensor, q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Of a layer, over (tokens, heads, head_dim); the pages get k and v."""
        return anyflash.torch.attention_varlen_with_kvcache(
            q, k_pages, v_pages, k=k, v=v, causal=True, **self.options
        )

    @torch.inference_mode()
    def step(self, feeds: Sequence[Feed]) -> list[list[int]]:
        """The most probable token behind each token of each feed; -1 where it is not wanted."""
        batch = Batch(feeds, self.pool.device)
        self.options = batch.options
        x = self.gpt.tokens(batch.tokens) + self.gpt.places(batch.places)
        for block in self.gpt.blocks:
            x = block(x)
        logits = linear(self.gpt.norm(x[batch.wanted]), self.gpt.tokens.weight)
        chosen = torch.full_like(batch.tokens, -1)
        chosen[batch.wanted] = logits.argmax(-1)
        return [part.tolist() for part in chosen.cpu().split(batch.sizes)]

    def keep(self, feed: Feed, path: Sequence[int]) -> None:
        """Moves the rows of the tokens that are right to where the cache ends: into one row."""
        moved = [(i, number) for i, number in enumerate(path) if i != number]
        if not moved:
            return
        page_size = self.pool.shape[3]
        to, number = torch.tensor(moved, device=self.pool.device).T + feed.filled
        pages = torch.tensor(feed.pages, device=self.pool.device)
        rows = self.pool.flatten(2, 3)  # a view
        to, number = (pages[x // page_size] * page_size + x % page_size for x in (to, number))
        rows[:, :, to] = rows[:, :, number]
