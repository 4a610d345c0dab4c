"""A decoder generates with a paged cache what it generates without one, token by token."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from calls.frameworks import Kind
from calls.kvcache import WRITABLE
from models.decoder import Config, Decoder, Engine, Generated, by_hand, generate, no_guess, whole

COUNT = 24
PROMPTS = (1, 5, 30, 14, 8)  # tokens
CONFIGS = {
    "llama": Config(),
    "window": Config(layers=3, window=6),
    "softcap-sinks": Config(softcap=2.0, sinks=True, seed=3),
    "gptj-mqa": Config(heads_k=1, rotary_dim=8, interleaved=True, seed=1),
    "everything": Config(heads=6, window=9, softcap=3.0, sinks=True, interleaved=True),
}
EVERY_CONFIG = pytest.mark.parametrize("name", CONFIGS)


def prompts() -> list[list[int]]:
    random = np.random.default_rng(1)
    return [random.integers(211, size=length).tolist() for length in PROMPTS]


@functools.cache
def truth(name: str) -> list[Generated]:
    """In float64, without a cache and without anyflash."""
    model = Decoder(CONFIGS[name])
    return [generate(model, by_hand(model), prompt, COUNT) for prompt in prompts()]


def verify(generated: list[Generated], right: list[Generated]) -> None:
    for one, other in zip(generated, right, strict=True):
        assert one.tokens[:COUNT] == other.tokens
        np.testing.assert_allclose(one.logits[:COUNT], other.logits, rtol=0, atol=1e-4)


def guesses(name: str, number: int, generated: int) -> list[int]:
    """Three tokens, of which the first `number` are right."""
    tokens = truth(name)[number].tokens[generated : generated + 3]
    tokens += [0] * (3 - len(tokens))
    return [token if i < number else (token + 1) % 211 for i, token in enumerate(tokens)]


@EVERY_CONFIG
def test_tokens_are_no_accident(name: str) -> None:
    """They differ, and no two logits are so close that rounding could choose."""
    for sequence in truth(name):
        best = np.sort(sequence.logits, axis=-1)[:, -2:]
        assert np.diff(best).min() > 2e-3
    assert len({token for sequence in truth(name) for token in sequence.tokens}) > 20


@EVERY_CONFIG
def test_without_a_cache(name: str) -> None:
    model = Decoder(CONFIGS[name]).astype(np.float32)
    verify([generate(model, whole(model), prompt, COUNT) for prompt in prompts()], truth(name))


@WRITABLE
@EVERY_CONFIG
def test_with_a_cache(name: str, kind: Kind) -> None:
    """Three sequences at a time, five in all; pages are handed out anew, in any order."""
    engine = Engine(Decoder(CONFIGS[name]).astype(np.float32), kind)
    verify(engine.run(prompts(), COUNT, no_guess), truth(name))
    used = len(engine.k_cache[0]) - np.isnan(engine.k_cache[0, :, 0, 0, 0]).sum()
    assert used < sum(-(-(length + COUNT) // 4) for length in PROMPTS), "no page was used again"


@WRITABLE
@EVERY_CONFIG
def test_speculation(name: str, kind: Kind) -> None:
    """Every third step tries four tokens; what was guessed wrong is overwritten."""
    plain = Engine(Decoder(CONFIGS[name]).astype(np.float32), kind)
    plain.run(prompts(), COUNT, no_guess)
    engine = Engine(Decoder(CONFIGS[name]).astype(np.float32), kind)
    generated = engine.run(prompts(), COUNT, functools.partial(guesses, name))
    verify(generated, truth(name))
    assert engine.calls < plain.calls, "no guess was accepted"
