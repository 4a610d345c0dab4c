"""anyflash.integrations.transformers: generation with each kind of cache gives eager's tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from models.hf_models import TRAINED, build, counted, padding, tokens

NEW = 7


def generate(model: Any, implementation: str, **options: Any) -> list[list[int]]:
    model.set_attn_implementation(implementation)
    out: torch.Tensor = model.generate(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, disable_compile=True, **options
    )
    return out.tolist()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("kind", ["none", "left"])
@pytest.mark.parametrize("name", [name for name in TRAINED if name != "bert"])
def test_greedy_tokens(name: str, kind: str, cache: str) -> None:
    model = build(name)
    options = {
        "inputs": tokens(),
        "attention_mask": padding("right" if name == "t5" and kind == "left" else kind),
        "cache_implementation": None if cache == "dynamic" else cache,
    }
    expected = generate(model, "eager", **options)
    with counted() as ran:
        assert generate(model, "anyflash", **options) == expected
    print(name, kind, cache, ran(), expected[0])
    assert set(ran()) <= {"forward", "decode"}
    layers = model.config.num_hidden_layers
    if name != "t5":  # all tokens but the first come from one pass each
        assert ran() == {"forward": layers, "decode": layers * (NEW - 1)}
