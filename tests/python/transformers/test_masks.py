"""anyflash.integrations.transformers: packed sequences, windows, and masks of other shapes."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.cache_utils import DynamicCache, StaticCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from anyflash.integrations import _hf_attention, _hf_masks
from models.hf_models import (
    DECODERS,
    TAKEN,
    VERSION,
    build,
    counted,
    difference,
    padding,
    run,
    tokens,
)

BOUND = 1e-6  # in float64, for the LSE is float32


def only(name: str) -> pytest.MarkDecorator:
    """A test of a model that transformers before 5.15 may have with an attention of its own."""
    return pytest.mark.skipif(name not in TAKEN, reason=f"{name} takes no other attention here")


def compare(model: Any, keep: Tensor, inputs: dict[str, Any], calls: int = 2) -> None:
    exact = run(model, "exact", keep, inputs)
    with counted() as ran:
        ours = run(model, "anyflash", keep, inputs)
    assert ran() == {"forward": calls, "backward": calls}
    assert max(difference(ours, exact)) < BOUND


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("name", DECODERS)
def test_packed_by_position_ids(name: str) -> None:
    ids = tokens(2, 14)
    rows = torch.stack([positions(6, 1, 7), positions(9, 5)])
    inputs = {"input_ids": ids, "position_ids": rows, "use_cache": False}
    compare(build(name, torch.float64), torch.ones_like(ids), inputs)


@only("gpt_oss")
def test_packed_where_the_mask_does_not_tell() -> None:
    """GPT-OSS makes its masks without position_ids."""
    model = build("gpt_oss", torch.float64).eval()
    model.set_attn_implementation("anyflash")
    ids = tokens(1, 14)
    with torch.no_grad():
        rows = positions(6, 1, 7)[None]
        packed = model(ids, position_ids=rows, use_cache=False).logits
        parts = [model(part, use_cache=False).logits for part in ids.split((6, 1, 7), 1)]
    assert torch.allclose(packed, torch.cat(parts, 1), rtol=0, atol=BOUND)


@pytest.mark.skipif(not hasattr(transformers, "Llama4ForCausalLM"), reason="an older transformers")
@pytest.mark.parametrize("seqlen", [5, 14, 23])
def test_chunks(seqlen: int) -> None:
    """Texts longer than a chunk of Llama 4's."""
    config = transformers.Llama4TextConfig(
        hidden_size=32,
        intermediate_size=48,
        intermediate_size_mlp=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=120,
        num_local_experts=2,
        attention_chunk_size=6,
        pad_token_id=0,
    )
    torch.manual_seed(1)
    model = transformers.Llama4ForCausalLM(config).eval()
    ids = torch.randint(3, 120, (2, seqlen))
    keep = torch.ones_like(ids)
    keep[1, :2] = 0
    logits = {}
    for name in ("sdpa", "anyflash"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            logits[name] = model(ids, attention_mask=keep).logits[keep.bool()]
    assert torch.allclose(logits["anyflash"], logits["sdpa"], rtol=0, atol=1e-5)


def test_packed_by_cu_seq_lens(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (6, 1, 7)
    ids = tokens(1, 14)
    model = build("gemma2", torch.float64)
    inputs = {"input_ids": ids, "position_ids": positions(*lengths)[None], "use_cache": False}
    exact = run(model, "exact", torch.ones_like(ids), inputs)
    ends = torch.tensor([0, 6, 7, 14])
    inputs |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
    inputs |= {"max_length_q": 7, "max_length_k": 7}
    monkeypatch.setattr(_hf_attention, "longest_sequence", None)  # what is given is not sought
    assert max(difference(run(model, "anyflash", torch.ones_like(ids), inputs), exact)) < BOUND


def test_a_mask_of_all_scores() -> None:
    ids = tokens(2, 8)
    mask = torch.rand((2, 1, 8, 8), generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, 0, 3] = False  # a query that sees nothing
    model = build("llama", torch.float64)
    keep = torch.ones_like(ids)
    inputs = {"input_ids": ids, "attention_mask": mask}
    compare(model, keep, inputs)
    exact = run(model, "exact", keep, inputs)
    added = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, float("-inf"))
    ours = run(model, "anyflash", keep, {"input_ids": ids, "attention_mask": added})
    assert max(difference(ours, exact)) < BOUND


def make_mask(make: Any, config: Any, length: int, **special: Any) -> Any:
    known = inspect.signature(make).parameters
    named = {"attention_mask": None, "past_key_values": None} | special
    if "cache_position" in known:  # before 5.23, at the latest
        named["cache_position"] = torch.arange(length)
    return make(config, torch.empty(1, length, 0), **named)


def test_prefix_and_blocks() -> None:
    """Masks that are more than causal: or_mask_function, block_sequence_ids."""
    config = build("llama").config
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1, -1]])
    given: dict[str, Any] = {
        "or_mask_function": lambda batch, head, row, column: column < 3,
        "block_sequence_ids": blocks,
    }
    make = masking_utils.create_causal_mask
    known = inspect.signature(make).parameters
    assert VERSION < (5, 23) or known.keys() > given.keys()
    for name in known.keys() & given.keys():
        masks = []
        for implementation in ("exact", "anyflash"):
            config._attn_implementation = implementation
            masks.append(make_mask(make, config, 8, **{name: given[name]}))
        assert masks[1].shape == (1, 1, 8, 8)
        assert torch.equal(*masks)


def test_chunked_attention_has_a_mask_of_all_scores() -> None:
    config = build("llama", sliding_window=None).config
    config.attention_chunk_size = 4
    config._attn_implementation = "exact"
    make = masking_utils.create_chunked_causal_mask
    expected = make_mask(make, config, 4)
    config._attn_implementation = "anyflash"
    assert torch.equal(make_mask(make, config, 4), expected)


@only("modernbert")
@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
def test_bidirectional_windows(kind: str) -> None:
    mask = padding(kind, seqlen=16)
    inputs = {"input_ids": tokens(*mask.shape), "attention_mask": mask}
    compare(build("modernbert", torch.float64), mask, inputs)


@only("qwen2_moe")
def test_windows_that_layers_do_not_pass_on() -> None:
    ids = tokens(2, 12)
    compare(build("qwen2_moe", torch.float64), torch.ones_like(ids), {"input_ids": ids})


@only("t5")
def test_cross_attention_with_as_many_queries_as_keys() -> None:
    """Padding of the keys says nothing about the queries."""
    mask = padding("right", seqlen=7)
    inputs = {"input_ids": tokens(3, 7), "attention_mask": mask}
    inputs["decoder_input_ids"] = tokens(3, 7)
    compare(build("t5", torch.float64), torch.ones_like(mask), inputs, 6)


@pytest.mark.parametrize("kind", ["none", "left", "right", "holes"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
def test_several_queries_at_a_cache(name: str, cache: str, kind: str) -> None:
    """A prompt in pieces; with and without gradients."""
    model = build(name, torch.float64).eval()
    mask = padding(kind, seqlen=15)
    ids = tokens(*mask.shape)
    model.set_attn_implementation("exact")
    with torch.no_grad():
        expected = model(ids, attention_mask=mask, use_cache=False).logits * mask[..., None]
    model.set_attn_implementation("anyflash")
    for grad in (False, True):
        config = model.config
        kept = DynamicCache(config=config) if cache == "dynamic" else StaticCache(config, 20)
        got = []
        with torch.set_grad_enabled(grad and cache == "dynamic"):
            for begin, end in ((0, 4), (4, 9), (9, 14), (14, 15)):
                step = {"attention_mask": mask[:, :end], "past_key_values": kept}
                got.append(model(ids[:, begin:end], **step).logits.detach())
        assert (torch.cat(got, 1) * mask[..., None] - expected).abs().max() < BOUND


def call(module: Any, **options: Any) -> Tensor:
    function = ALL_ATTENTION_FUNCTIONS["anyflash"]
    x = torch.ones((1, 2, 3, 8))
    out: Tensor = function(module, x, x, x, None, **options)[0]
    return out


def test_what_cannot_be_had_is_refused() -> None:
    module = SimpleNamespace(is_causal=True, config=None)
    assert call(module).shape == (1, 3, 2, 8)
    with pytest.raises(NotImplementedError, match="transformers: head_mask is given"):
        call(module, head_mask=torch.ones(2))
    with pytest.raises(NotImplementedError, match="transformers: cache is a SimpleNamespace"):
        call(module, cache=SimpleNamespace(update=lambda key_states, **kwargs: None))
    with pytest.raises(NotImplementedError, match="transformers: cache is a Tensor; allowed: None"):
        call(module, cache=torch.ones(2))
    packed = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 3]))
    packed |= dict.fromkeys(("max_length_q", "max_length_k"), 3)
    with pytest.raises(NotImplementedError, match="position_bias is given with packed"):
        call(module, position_bias=torch.zeros(1, 2, 3, 3), **packed)
    with pytest.raises(NotImplementedError, match="SimpleNamespace does not say whether"):
        call(SimpleNamespace(config=None))


@pytest.mark.parametrize("window", [2, 5])  # of 6 keys
def test_own_windows_are_those_of_causal_layers(window: int) -> None:
    """What a layer's configuration says of others does not hide what a bidirectional one sees."""
    function = ALL_ATTENTION_FUNCTIONS["anyflash"]
    x = torch.randn((1, 2, 6, 8), generator=torch.Generator().manual_seed(1))
    config = SimpleNamespace(sliding_window=window)
    for causal in (False, True):
        kinds = [SimpleNamespace(is_causal=causal, config=c) for c in (config, None)]
        one, other = (function(module, x, x, x, None)[0] for module in kinds)
        assert torch.equal(one, other) != causal


def test_output_attentions_gives_none() -> None:
    function = ALL_ATTENTION_FUNCTIONS["anyflash"]
    x = torch.ones((1, 2, 3, 8))
    module = SimpleNamespace(is_causal=True, config=None)
    assert function(module, x, x, x, None, output_attentions=True)[1] is None


def test_a_mask_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By all layers together: on a GPU each reading waits for it."""
    mask = padding("left").bool()
    assert _hf_masks.read_keys(mask) is _hf_masks.read_keys(mask)
    before = _hf_masks.read_keys(mask)
    mask[2] = False
    after = _hf_masks.read_keys(mask)
    assert before.count.tolist() == [9, 7, 4]
    assert after.count.tolist() == [9, 7, 0]
    assert (after.longest, after.at_end, after.at_begin) == (9, True, False)
