"""anyflash.integrations.transformers: requests that come and go give the tokens of generate."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from anyflash.integrations._hf_attention import attention_forward
from anyflash.integrations.transformers import register
from models.hf_models import VERSION, build, counted, tokens

pytestmark = pytest.mark.skipif(VERSION < (5, 23), reason="there the cache is another one")

NEW = 6
IDS = tokens(1, 40)[0].tolist()
# Of unequal lengths; the last two begin as the first does.
PROMPTS = [IDS[:13], IDS[20:29], IDS[5:8], IDS[:9] + IDS[30:36], IDS[:13] + IDS[36:39]]


def generate(model: Any, prompt: list[int]) -> list[int]:
    """One alone, by transformers' own attention."""
    model.set_attn_implementation("eager")
    out: torch.Tensor = model.generate(
        torch.tensor([prompt]), max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def generate_batch(model: Any, implementation: str, **changes: Any) -> list[list[int]]:
    """Of so few tokens a step that prompts are cut, and wait for one another."""
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == "anyflash"
    sizes = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16} | changes
    answers = model.generate_batch(
        PROMPTS,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=transformers.ContinuousBatchingConfig(**sizes),
        progress_bar=False,
    )
    assert [answer.error for answer in answers.values()] == [None] * len(PROMPTS)
    return [answer.generated_tokens for answer in answers.values()]


# transformers' pages hold one head dim, so there is no "gemma4" and no "deepseek_v3".
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "gemma4_global"])
def test_tokens(name: str) -> None:
    model = build(name)
    expected = [generate(model, prompt) for prompt in PROMPTS]
    with counted() as ran:
        assert generate_batch(model, "anyflash") == expected
    print(name, ran(), expected)
    # Layers with a window keep no pages that a table could name, and all of Mistral's have one.
    assert ran().keys() == ({"forward"} if name == "mistral" else {"forward", "decode"})


@pytest.mark.parametrize(
    ("implementation", "changes", "operations"),
    [
        ("paged|anyflash", {}, {"forward", "decode"}),
        ("anyflash", {"page_size": 6}, {"forward"}),  # no power of two
        ("anyflash", {"max_blocks_per_request": 0}, {"forward", "decode"}),
        ("anyflash", {"allow_block_sharing": False}, {"forward", "decode"}),
    ],
)
def test_configurations(implementation: str, changes: dict[str, Any], operations: set[str]) -> None:
    model = build("llama")
    expected = [generate(model, prompt) for prompt in PROMPTS]
    with counted() as ran:
        assert generate_batch(model, implementation, **changes) == expected
    assert ran().keys() == operations


def test_pages_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there are keys in the cache, transformers gathers none: also beside prompts."""
    from transformers.generation.continuous_batching import cache_allocators

    gathered = []
    allocator = cache_allocators.full_attention.FullAttentionCacheAllocator
    update = allocator.update

    def recorded(self: Any, *states: Any) -> Any:
        gathered.append(states[-2].numel())  # the rows that are read
        return update(self, *states)

    monkeypatch.setattr(allocator, "update", recorded)
    model = build("llama")
    expected = [generate(model, prompt) for prompt in PROMPTS]
    assert generate_batch(model, "anyflash") == expected
    assert gathered == [0] * model.config.num_hidden_layers  # of the first step
    assert generate_batch(model, "anyflash", page_size=6) == expected
    assert max(gathered) > 0


def test_models_that_update_the_cache_themselves() -> None:
    """As those of transformers 5.24 do: attention gets the pages, or the gathered keys."""

    def updated(
        module: Any, query: Any, key: Any, value: Any, mask: Any, *, cache: Any = None, **given: Any
    ) -> Any:
        if cache is not None:
            key, value = cache.update(key, value, module.layer_idx, given)
        return attention_forward(module, query, key, value, mask, **given)

    model = build("llama")
    transformers.AttentionInterface.register("anyflash", updated)
    try:
        with counted() as ran:
            found = generate_batch(model, "anyflash")
    finally:
        register()
    assert found == [generate(model, prompt) for prompt in PROMPTS]
    assert ran().keys() == {"forward", "decode"}


def test_prefixes_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    shared = []
    search = PagedAttentionCache.search_prefix_match

    def recorded(self: Any, request_id: str, ids: list[int]) -> int:
        shared.append(search(self, request_id, ids))
        return int(shared[-1])

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", recorded)
    model = build("llama")
    assert generate_batch(model, "anyflash") == [generate(model, prompt) for prompt in PROMPTS]
    assert max(shared) >= 8  # two pages
