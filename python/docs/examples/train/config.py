"""Shapes of GPT, and what a model is made of."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    layers: int
    dim: int
    heads: int
    seqlen: int
    vocab_size: int = 50304  # GPT-2's, rounded up to a multiple of 64


@dataclass(frozen=True)
class Setup:
    """What a model is made of."""

    framework: str
    model: str  # the name of `config`
    config: Config
    attention: str  # a name of the framework's
    seed: int
    device: str  # cpu or cuda
    recompute: bool  # activations, in the backward pass
    compiled: bool


# Those of GPT-2 and GPT-3; the last two are in FlashAttention-2's table of training speeds. As in
# flash-attn's configs for training, 2.7B has 20 heads of 128. In GPT-3's paper it has 32 of 80.
CONFIGS = {
    "tiny": Config(layers=4, dim=128, heads=4, seqlen=128, vocab_size=1024),
    "125m": Config(layers=12, dim=768, heads=12, seqlen=1024),
    "1.3b": Config(layers=24, dim=2048, heads=16, seqlen=2048),
    "2.7b": Config(layers=32, dim=2560, heads=20, seqlen=2048),
}
INITIAL_STD = 0.02


def last_std(config: Config) -> float:
    """The initial standard deviation of what is added to the residual stream, as in GPT-2."""
    return INITIAL_STD / math.sqrt(2 * config.layers)
