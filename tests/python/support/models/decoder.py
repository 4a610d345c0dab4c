"""A small decoder like Llama, with random weights, and an engine that generates with a paged cache.

RMSNorm, rotary embedding, grouped K/V heads, SwiGLU; optionally a sliding window, a softcap and
sinks. Attention is a function that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import anyflash
from calls.frameworks import Kind
from oracle.attention import Array

# (layer, q, k, v), each (batch, seqlen, heads, head_dim), not rotated -> as q
Attention = Callable[[int, Array, Array, Array], Array]
NOWHERE = 1 << 30  # in block tables, where nothing is to be read


@dataclass(frozen=True)
class Config:
    layers: int = 2
    heads: int = 4
    heads_k: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    interleaved: bool = False
    hidden: int = 48
    wide: int = 96
    vocabulary: int = 211
    window: int | None = None
    softcap: float = 0.0
    sinks: bool = False
    seed: int = 0  # of the weights

    @property
    def options(self) -> dict[str, Any]:
        """Of every attention, but for the sinks."""
        left = -1 if self.window is None else self.window
        return {"causal": True, "window_size": (left, -1), "softcap": self.softcap}


class Decoder:
    def __init__(self, config: Config) -> None:
        self.config = c = config
        random = np.random.default_rng(c.seed)
        heads, heads_k = c.heads * c.head_dim, c.heads_k * c.head_dim
        shapes = {"embedding": (c.vocabulary, c.hidden), "head": (c.hidden, c.vocabulary)}
        for layer in range(c.layers):
            shapes |= {
                f"{layer}.q": (c.hidden, heads),
                f"{layer}.k": (c.hidden, heads_k),
                f"{layer}.v": (c.hidden, heads_k),
                f"{layer}.o": (heads, c.hidden),
                f"{layer}.gate": (c.hidden, c.wide),
                f"{layer}.up": (c.hidden, c.wide),
                f"{layer}.down": (c.wide, c.hidden),
            }
        self.weights = {
            name: random.standard_normal(shape) * 2 / np.sqrt(shape[0])
            for name, shape in shapes.items()
        }
        self.weights["embedding"] *= np.sqrt(c.vocabulary) / 2
        sinks = random.standard_normal((c.layers, c.heads)) + 1
        self.sinks = sinks.astype(np.float32) if c.sinks else None
        self.dtype: Any = np.float64

    def astype(self, dtype: Any) -> Decoder:
        other = Decoder.__new__(Decoder)
        other.config, other.sinks, other.dtype = self.config, self.sinks, dtype
        other.weights = {name: x.astype(dtype) for name, x in self.weights.items()}
        return other

    def logits(self, ids: Array, attention: Attention) -> Array:
        """(batch, seqlen) -> (batch, seqlen, vocabulary)"""
        c, w = self.config, self.weights
        x = w["embedding"][ids]
        for layer in range(c.layers):
            h = _norm(x)
            q, k, v = (
                (h @ w[f"{layer}.{name}"]).reshape(*ids.shape, -1, c.head_dim) for name in "qkv"
            )
            x = x + attention(layer, q, k, v).reshape(*ids.shape, -1) @ w[f"{layer}.o"]
            h = _norm(x)
            gate = h @ w[f"{layer}.gate"]
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"{layer}.up"])) @ w[f"{layer}.down"]
        return np.asarray(_norm(x) @ w["head"])

    def rotary(self, rows: int) -> tuple[Array, Array]:
        """cos and sin of each position's angles."""
        pairs = self.config.rotary_dim // 2
        turns = np.arange(rows)[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)
        return np.cos(turns).astype(np.float32), np.sin(turns).astype(np.float32)

    def options(self, layer: int) -> dict[str, Any]:
        sinks = None if self.sinks is None else self.sinks[layer]
        return {**self.config.options, "sinks": sinks}


def _norm(x: Array) -> Array:
    return np.asarray(x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-5))


# Without a cache ----------------------------------------------------------------------------------


def rotate(x: Array, config: Config) -> Array:
    """Of a whole sequence, (batch, seqlen, heads, head_dim): pairs are complex numbers."""
    pairs = config.rotary_dim // 2
    turns = np.arange(x.shape[1])[:, None] * 10000.0 ** (-np.arange(pairs) / pairs)
    columns = np.arange(2 * pairs)
    if config.interleaved:
        real, imaginary = columns[::2], columns[1::2]
    else:
        real, imaginary = columns[:pairs], columns[pairs:]
    turned = (x[..., real] + 1j * x[..., imaginary]) * np.exp(1j * turns)[:, None]
    result = x.copy()
    result[..., real], result[..., imaginary] = turned.real, turned.imag
    return result


def whole(model: Decoder) -> Attention:
    """anyflash.attention over the whole sequence."""

    def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
        q, k = (rotate(x, model.config) for x in (q, k))
        return np.asarray(anyflash.attention(q, k, v, **model.options(layer)))

    return attention


def by_hand(model: Decoder) -> Attention:
    """Row by row and head by head, in float64."""
    config = model.config

    def row(scores: Array, values: Array, sink: float | None) -> Array:
        if config.softcap:
            scores = config.softcap * np.tanh(scores / config.softcap)
        weights = np.exp(scores)
        total = weights.sum() + (0.0 if sink is None else np.exp(sink))
        return np.asarray(weights @ values / total)

    def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
        q, k = (rotate(x.astype(np.float64), config) for x in (q, k))
        out = np.zeros(q.shape)
        for b, i, h in np.ndindex(q.shape[:3]):
            first = 0 if config.window is None else max(i - config.window, 0)
            seen, shared = slice(first, i + 1), h * config.heads_k // config.heads
            scores = k[b, seen, shared] @ q[b, i, h] / np.sqrt(config.head_dim)
            sink = None if model.sinks is None else float(model.sinks[layer, h])
            out[b, i, h] = row(scores, v[b, seen, shared].astype(np.float64), sink)
        return out

    return attention


def generate(model: Decoder, attention: Attention, prompt: list[int], count: int) -> Generated:
    """The most likely tokens, one after the other, from the whole sequence each time."""
    result = Generated()
    for _ in range(count):
        logits = model.logits(np.array([prompt + result.tokens]), attention)[0, -1]
        result.take(logits)
    return result


@dataclass
class Generated:
    tokens: list[int] = field(default_factory=list)
    logits: list[Array] = field(default_factory=list)  # that each one was chosen by

    def take(self, logits: Array) -> None:
        self.logits.append(logits)
        self.tokens.append(int(logits.argmax()))


# With one -----------------------------------------------------------------------------------------


@dataclass
class Sequence:
    number: int
    prompt: list[int]
    pages: list[int] = field(default_factory=list)
    length: int = 0  # tokens whose keys and values count
    result: Generated = field(default_factory=Generated)


@dataclass
class Engine:
    """Serves sequences, some at a time: prefill in chunks, then steps of the whole batch."""

    model: Decoder
    kind: Kind
    pages: int = 40
    page_size: int = 4
    slots: int = 3
    chunk: int = 7
    tokens: int = 64  # of a sequence, at most
    calls: int = 0

    def __post_init__(self) -> None:
        config = self.model.config
        shape = (config.layers, self.pages, self.page_size, config.heads_k, config.head_dim)
        self.k_cache, self.v_cache = np.full((2, *shape), np.nan, np.float32)
        free = np.random.default_rng(0).permutation(self.pages)
        self.free: list[int] = [int(page) for page in free]
        self.rotary = dict(
            zip(("rotary_cos", "rotary_sin"), self.model.rotary(self.tokens), strict=True)
        )

    def logits(self, sequences: list[Sequence], fed: list[list[int]]) -> Array:
        """Of tokens that follow what counts in the cache; they are written, but do not count."""
        ids = np.array(fed)
        table = np.full((len(sequences), self.tokens // self.page_size), NOWHERE, np.int32)
        for row, sequence in zip(table, sequences, strict=True):
            needed = -(-(sequence.length + ids.shape[1]) // self.page_size)
            while len(sequence.pages) < needed:
                sequence.pages.append(self.free.pop())
            row[: len(sequence.pages)] = sequence.pages
        places = {
            "cache_seqlens": np.array([sequence.length for sequence in sequences], np.int32),
            "block_table": table,
        }

        def attention(layer: int, q: Array, k: Array, v: Array) -> Array:
            self.calls += 1
            arguments = {
                **{"q": q, "k_cache": self.k_cache[layer], "v_cache": self.v_cache[layer]},
                **{"k": k, "v": v, "rotary_interleaved": self.model.config.interleaved},
                **{**self.rotary, **places, **self.model.options(layer)},
            }
            return self.kind.take(anyflash.attention_with_kvcache(**self.kind.give(arguments)))

        return self.model.logits(ids, attention)

    def run(self, prompts: list[list[int]], count: int, guess: Guess) -> list[Generated]:
        waiting = [Sequence(number, prompt) for number, prompt in enumerate(prompts)]
        everything, active = list(waiting), list[Sequence]()
        step = 0
        while waiting or active:
            while waiting and len(active) < self.slots:
                active.append(waiting.pop(0))
                self.prefill(active[-1])
            self.step(active, guess if step % 3 == 2 else no_guess)
            step += 1
            for sequence in [s for s in active if len(s.result.tokens) >= count]:
                active.remove(sequence)
                self.free = sequence.pages + self.free
        return [sequence.result for sequence in everything]

    def prefill(self, sequence: Sequence) -> None:
        for start in range(0, len(sequence.prompt), self.chunk):
            fed = sequence.prompt[start : start + self.chunk]
            logits = self.logits([sequence], [fed])
            sequence.length += len(fed)
        sequence.result.take(logits[0, -1])

    def step(self, sequences: list[Sequence], guess: Guess) -> None:
        """Each one's last token, and guesses at those that follow; the right ones are kept."""
        guesses = [guess(s.number, len(s.result.tokens)) for s in sequences]
        fed = [[s.result.tokens[-1], *more] for s, more in zip(sequences, guesses, strict=True)]
        logits = self.logits(sequences, fed)
        for sequence, row, more in zip(sequences, logits, guesses, strict=True):
            for i in range(len(more) + 1):
                sequence.result.take(row[i])
                sequence.length += 1
                if i < len(more) and more[i] != sequence.result.tokens[-1]:
                    break


# (number of the sequence, tokens that it has generated) -> the next ones
Guess = Callable[[int, int], list[int]]


def no_guess(number: int, generated: int) -> list[int]:
    return []
