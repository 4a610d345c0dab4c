"""anyflash.integrations.transformers with what PyTorch does around a model."""

from __future__ import annotations

import doctest
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers import CompileConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import anyflash.integrations.transformers
import anyflash.torch
from anyflash.integrations.transformers import register
from models.hf_models import MODELS, TAKEN, build, counted, difference, padding, run, tokens


@pytest.mark.parametrize(("name", "kind"), [("llama", "left"), ("mistral", "none")])
def test_compiled_training_in_one_graph(name: str, kind: str) -> None:
    model = build(name)
    keep = padding(kind)
    inputs = {"input_ids": tokens(), "use_cache": False}
    if kind != "none":
        inputs["attention_mask"] = keep
    expected = run(model, "anyflash", keep, inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with counted() as ran:
        logits = compiled(**inputs).logits
    assert ran() == {"forward": 2}
    assert (logits * keep[..., None] - expected[0]).abs().max() < 1e-5
    again = run(compiled, "anyflash", keep, inputs)
    named = {n.removeprefix("_orig_mod."): gradient for n, gradient in again[1].items()}
    assert max(difference((again[0], named), expected)) < 1e-5


def test_compiled_decoding_with_a_static_cache() -> None:
    model = build("llama")
    options: dict[str, Any] = {
        "inputs": tokens(),
        "attention_mask": padding("left"),
        "cache_implementation": "static",
        "max_new_tokens": 4,
        "min_new_tokens": 4,
        "do_sample": False,
    }
    model.set_attn_implementation("eager")
    expected = model.generate(**options, disable_compile=True)
    model.set_attn_implementation("anyflash")
    config = CompileConfig(backend="aot_eager", mode=None)
    config._compile_all_devices = True
    torch._dynamo.reset()
    with counted() as ran:
        assert torch.equal(model.generate(**options, compile_config=config), expected)
    assert sum(ran().values()) == 4 * 2


def test_export_with_lengths_left_open() -> None:
    model = build("llama")
    model.set_attn_implementation("anyflash")
    inputs = {"input_ids": tokens(), "attention_mask": padding("left"), "use_cache": False}
    length = {1: torch.export.Dim("length", min=2, max=64)}
    shapes = {"input_ids": length, "attention_mask": length, "use_cache": None}
    with torch.no_grad():
        program = torch.export.export(model, (), inputs, dynamic_shapes=shapes, strict=False)
        mask = padding("left", seqlen=14)
        inputs = {"input_ids": tokens(3, 14), "attention_mask": mask, "use_cache": False}
        expected = model(**inputs).logits
        with counted() as ran:
            logits = program.module()(**inputs).logits
    assert ran() == {"forward": 2}
    assert ((logits - expected) * mask[..., None]).abs().max() < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", [name for name in ("gemma2", "t5") if name in TAKEN])
def test_gradient_checkpointing(name: str, reentrant: bool) -> None:
    model = build(name, attention_dropout=0.0)
    mask = padding("right", seqlen=7)
    inputs = {"input_ids": tokens(3, 7), "attention_mask": mask, "use_cache": False}
    if name == "t5":
        inputs["decoder_input_ids"] = tokens(3, 7)
    model.train()
    try:
        expected = run(model, "anyflash", mask, inputs)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        with counted() as ran:
            assert max(difference(run(model, "anyflash", mask, inputs), expected)) < 1e-6
    finally:
        model.gradient_checkpointing_disable()
        model.eval()
    assert ran()["forward"] == 2 * ran()["backward"]


@pytest.mark.parametrize("rows", [6, 1])
def test_dropout(rows: int) -> None:
    q, k, v = torch.randn((3, 2, 4, 6, 8), generator=torch.Generator().manual_seed(0))
    q = q[:, :, :rows]
    torch.manual_seed(3)
    expected = anyflash.torch.attention(
        *(x.transpose(1, 2) for x in (q, k, v)), causal=True, dropout_p=0.4
    )
    torch.manual_seed(3)
    function = ALL_ATTENTION_FUNCTIONS["anyflash"]
    module = SimpleNamespace(is_causal=True, config=None)
    assert torch.equal(function(module, q, k, v, None, dropout=0.4)[0], expected)


def test_dropout_of_a_model_in_training() -> None:
    model = build("bert", attention_probs_dropout_prob=0.3)
    model.set_attn_implementation("anyflash")
    inputs = {"input_ids": tokens(), "attention_mask": padding("right")}
    with torch.no_grad():
        quiet = model(**inputs).logits
        model.train()
        torch.manual_seed(1)
        noisy, other = model(**inputs).logits, model(**inputs).logits
        torch.manual_seed(1)
        assert torch.equal(model(**inputs).logits, noisy)
    assert (noisy - other).abs().max() > 1e-3
    assert (noisy - quiet).abs().max() > 1e-3


def test_autocast() -> None:
    model = build("llama")
    mask = padding("left")
    inputs = {"input_ids": tokens(), "attention_mask": mask}
    exact = run(build("llama", torch.float64), "exact", mask, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        eager = difference(run(model, "eager", mask, inputs), exact)
        ours = difference(run(model, "anyflash", mask, inputs), exact)
    assert ours[0] <= 2 * eager[0]
    assert ours[2] <= 3 * eager[2]


def test_name_is_taken_as_it_is() -> None:
    """Also where a model lists builds of flash-attn, and from the configuration."""
    register()
    model_class, config_class, config = MODELS["gpt_oss"]
    made = getattr(transformers, model_class)._from_config(
        getattr(transformers, config_class)(**config), attn_implementation="anyflash"
    )
    assert made.config._attn_implementation == "anyflash"
    made.set_attn_implementation("eager")
    assert made.config._attn_implementation == "eager"


@pytest.mark.parametrize("version", ["4.54.1", "4.56.2"])
def test_older_versions_are_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = import_module("transformers")  # 4.57 replaces the one that was imported first
    monkeypatch.setattr(module, "__version__", version)
    message = f"expected transformers 4.57 or newer, found {version}"
    with pytest.raises(ImportError, match=message):
        register()


def test_models_with_an_attention_of_their_own_are_refused() -> None:
    config = transformers.GPTJConfig(n_embd=32, n_layer=1, n_head=4, vocab_size=8, rotary_dim=4)
    refused = [(transformers.GPTJModel, config)]
    for name in MODELS.keys() - set(TAKEN):
        model_class, config_class, options = MODELS[name]
        config = getattr(transformers, config_class)(**options)
        refused.append((getattr(transformers, model_class), config))
    for model, config in refused:
        message = f"{model.__name__} of this version of transformers has an attention of its own"
        with pytest.raises(ValueError, match=message):
            model._from_config(config, attn_implementation="anyflash")


def test_example_of_the_documentation() -> None:
    assert doctest.testmod(anyflash.integrations.transformers).failed == 0
