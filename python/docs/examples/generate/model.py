"""The GPT of examples/train, which reads and writes a paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from config import Config
from gpt_torch import GPT, Attention
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import linear

import anyflash.torch


def load(file: Path, config: Config, attention: Attention, device: str) -> GPT:
    """The model of a checkpoint of examples/train; on a GPU in bfloat16."""
    with safe_open(file, framework="pt") as saved:
        names = [name for name in saved.keys() if name.startswith("model.")]  # noqa: SIM118
        weights = {name.removeprefix("model."): saved.get_tensor(name) for name in names}
    if not weights:
        raise SystemExit(f"{file} is not of train.py --framework torch")
    gpt = GPT(config, attention)
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


class Group:
    """Feeds of equally many tokens: one call of attention. As tensors on the model's device."""

    def __init__(self, feeds: Sequence[Feed], device: torch.device) -> None:
        sees = np.stack([feed.sees() for feed in feeds])
        filled = np.array([feed.filled for feed in feeds], np.int32)
        table = np.full((len(feeds), max(len(feed.pages) for feed in feeds)), -1, np.int32)
        wanted = np.zeros(sees.shape[:2], bool)
        for row, feed in enumerate(feeds):
            table[row, : len(feed.pages)] = feed.pages
            wanted[row, feed.sure - 1 :] = feed.complete
        places = filled[:, None] + sees.sum(-1) - 1  # by the number of ancestors
        is_tree = (sees != np.tri(sees.shape[1], dtype=bool)).any()  # else `causal` says all

        def tensor(x: Any) -> Tensor:
            return torch.from_numpy(np.asarray(x)).to(device)

        self.shape = wanted.shape
        self.tokens = tensor([feed.tokens for feed in feeds]).flatten()
        self.places = tensor(places).flatten()
        self.wanted = tensor(wanted).flatten()
        self.options = {
            "cache_seqlens": tensor(filled),
            "block_table": tensor(table),
            "tree_mask": tensor(sees) if is_tree else None,
        }


class PagedGPT:
    """Takes any number of tokens of each request in one pass.

    All but attention is done with the tokens of all requests in one row. Attention's queries are a
    rectangle, so that requests are grouped by their numbers of tokens.
    """

    def __init__(self, gpt: GPT, pages: int, page_size: int) -> None:
        weight = gpt.tokens.weight
        heads = gpt.blocks[0].heads
        shape = (len(gpt.blocks), 2, pages, page_size, heads, weight.shape[1] // heads)
        self.gpt = gpt
        self.pool = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
        self.groups: list[Group] = []
        for layer, block in enumerate(gpt.blocks):
            block.attention = partial(self._attention, self.pool[layer])

    def _attention(self, pool: Tensor, *qkv: Tensor) -> Tensor:
        """Of a layer, over (tokens, heads, head_dim); the pages get k and v."""
        sizes = [group.tokens.numel() for group in self.groups]
        parts = zip(self.groups, *(x.split(sizes) for x in qkv), strict=True)
        return torch.cat([self._attend(pool, *part) for part in parts])

    def _attend(self, pool: Tensor, group: Group, *qkv: Tensor) -> Tensor:
        q, k, v = (x.unflatten(0, group.shape) for x in qkv)
        out = anyflash.torch.attention_with_kvcache(
            q, pool[0], pool[1], k, v, causal=True, **group.options
        )
        return out.flatten(0, 1)

    @torch.inference_mode()
    def step(self, feeds: Sequence[Feed]) -> list[list[int]]:
        """The most probable token behind each token of each feed; -1 where it is not wanted."""
        order = sorted(range(len(feeds)), key=lambda i: len(feeds[i].tokens))
        by_size = groupby((feeds[i] for i in order), key=lambda feed: len(feed.tokens))
        self.groups = [Group(list(same), self.pool.device) for _, same in by_size]
        tokens, places, wanted = (
            torch.cat([getattr(group, name) for group in self.groups])
            for name in ("tokens", "places", "wanted")
        )
        x = self.gpt.tokens(tokens) + self.gpt.places(places)
        for block in self.gpt.blocks:
            x = block(x)
        logits = linear(self.gpt.norm(x[wanted]), self.gpt.tokens.weight)
        chosen = torch.full_like(tokens, -1)
        chosen[wanted] = logits.argmax(-1)
        parts = chosen.cpu().split([len(feeds[i].tokens) for i in order])
        return [part.tolist() for _, part in sorted(zip(order, parts, strict=True))]

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
