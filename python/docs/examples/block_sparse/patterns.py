"""Which blocks of scores are kept, and attention that does only those."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anyflash
import anyflash.torch

BLOCK = 64  # queries, and keys: the smallest blocks that a map may have
# Of the blocks' numbers, arrays that broadcast together.
Pattern = Callable[[Any, Any], Any]
# Of (batch, seqlen, heads, head_dim) tensors; no mask but the pattern's.
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def local_global(i: Any, j: Any) -> Any:
    """A block sees itself, its neighbours and the first block; the first one sees all."""
    return (abs(i - j) <= 1) | (i == 0) | (j == 0)


def butterfly(i: Any, j: Any) -> Any:
    """A block sees those whose numbers differ from its own in one bit at most. A layer changes a
    bit: after log2(blocks) layers all have reached all (Dao et al., arXiv 2112.00029)."""
    bits = i ^ j
    return bits & (bits - 1) == 0


PATTERNS: dict[str, Pattern] = {"local + global": local_global, "butterfly": butterfly}


def block_mask(pattern: Pattern, length: int, device: str) -> Tensor:
    """The map for `block_mask=`: (1, 1, blocks, blocks) bool."""
    like = torch.empty(0, device=device)

    def kept(b: Any, h: Any, i: Any, j: Any) -> Any:
        return pattern(i // BLOCK, j // BLOCK)

    return anyflash.create_block_mask(kept, None, None, length, length, (BLOCK, BLOCK), like=like)


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the formula says, with a matrix of scores for each head."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q * q.shape[-1] ** -0.5, k)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def attention(kind: str, length: int, device: str) -> tuple[Attention, float]:
    """Attention of a kind, and the share of the scores that it keeps."""
    if kind == "standard":
        return standard, 1.0
    if kind == "dense":
        return anyflash.torch.attention, 1.0
    mask = block_mask(PATTERNS[kind], length, device)

    def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyflash.torch.attention(q, k, v, block_mask=mask, block_size=(BLOCK, BLOCK))

    return sparse, mask.float().mean().item()


KINDS = ("standard", "dense", *PATTERNS)
