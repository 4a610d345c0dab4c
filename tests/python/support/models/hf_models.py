"""Tiny, randomly initialised models of transformers, and what their attention should give."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

import anyflash
from anyflash.integrations.transformers import register

VOCABULARY = 61
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
WIDE = {**SMALL, "hidden_size": 64, "intermediate_size": 64}  # with the head dims of real models
GEMMA4 = {
    **WIDE,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "num_global_key_value_heads": 1,
    "global_head_dim": 512,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "num_kv_shared_layers": 0,
    "tie_word_embeddings": False,  # or each token is followed by itself
}
ENCODER = {**SMALL, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
    "eos_token_id": 2,
}
# (class, class of its configuration, configuration); the window is shorter than all sequences.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 5}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {
            **GROUPED,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **GROUPED,
            "sliding_window": 5,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "bert": ("BertForMaskedLM", "BertConfig", ENCODER),
    "modernbert": (
        "ModernBertForMaskedLM",
        "ModernBertConfig",
        {
            **SMALL,
            "local_attention": 6,
            "layer_types": ["sliding_attention", "full_attention"],
            "cls_token_id": 1,
            "sep_token_id": 2,
        },
    ),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        {
            **GROUPED,
            "sliding_window": 5,
            "use_sliding_window": True,
            "layer_types": ["sliding_attention", "full_attention"],
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", GEMMA4),
    "gemma4_global": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        {
            **GEMMA4,
            "num_key_value_heads": 1,
            "head_dim": 512,
            "layer_types": ["full_attention", "full_attention"],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **WIDE,
            "num_key_value_heads": 4,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
}
VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
# Those that this version has; before 5.0 the experts of DeepSeek-V3 have no float64.
MODELS = {
    name: model
    for name, model in MODELS.items()
    if hasattr(transformers, model[0]) and (name != "deepseek_v3" or VERSION >= (5, 0))
}


def is_taken(name: str) -> bool:
    """Whether the model asks transformers' interface for its attention: from 5.15 on all do."""
    module = sys.modules[getattr(transformers, MODELS[name][0]).__module__]
    return VERSION >= (5, 15) or hasattr(module, "ALL_ATTENTION_FUNCTIONS")


DECODERS = [
    name
    for name in ("llama", "mistral", "gemma2", "gpt_oss", "gemma4", "deepseek_v3")
    if name in MODELS
]
TAKEN = [name for name in MODELS if name in DECODERS or is_taken(name)]
TRAINED = [name for name in (*DECODERS, "bert", "t5") if name in TAKEN]


@cache
def build(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A model with weights that make its attention choose."""
    model_class, config_class, config = MODELS[name]
    config = getattr(transformers, config_class)(**{**config, **changes})
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the others have no float64
    model = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(5)
    for parameter_name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = 1.5 * values / parameter.shape[-1] ** 0.5
        else:
            parameter.data = 0.3 * values + parameter_name.endswith("norm.weight")
        if parameter_name.endswith(("q_norm.weight", "k_norm.weight")):
            parameter.data *= 1.5 / parameter.numel() ** 0.25  # scores of Gemma 4 have no scale
    return model.to(dtype).eval()


def exact_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Straight from the definition, in the dtype of the query: unlike eager, also in float64."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = scaling * query @ key.mT
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if position_bias is not None:
        scores = scores + position_bias
    if attention_mask is not None:
        scores = scores.masked_fill(~attention_mask[..., : key.shape[2]], float("-inf"))
    sinks = torch.full((query.shape[1],), float("-inf")) if s_aux is None else s_aux
    sinks = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    top = torch.cat([scores, sinks], -1).amax(-1, keepdim=True).detach()
    top = top.clamp_min(torch.finfo(scores.dtype).min)
    weights = torch.exp(scores - top)
    total = weights.sum(-1, keepdim=True) + torch.exp(sinks - top)
    weights = weights / torch.where(total == 0, 1.0, total)
    return (weights @ value).transpose(1, 2), None


def exact_mask(**given: Any) -> Tensor | None:
    skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = masking_utils.sdpa_mask(**{**given, **skips})
    return mask


def nudged_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """Exact but for the rounding of the output, each number of which is then kept, or moved up or
    down by about one unit in the last place.
    """
    qkv = (x.double() for x in (query, key, value))
    out = exact_attention(module, *qkv, mask, **options)[0].to(query.dtype)
    return out * (1 + torch.finfo(out.dtype).eps * torch.randint(-1, 2, out.shape)), None


register()
for implementation, attention in {"exact": exact_attention, "nudged": nudged_attention}.items():
    AttentionInterface.register(implementation, attention)
    AttentionMaskInterface.register(implementation, exact_mask)

Run = tuple[Tensor, dict[str, Tensor]]  # logits, gradients of the parameters


def run(model: Any, implementation: str, keep: Tensor, inputs: dict[str, Any]) -> Run:
    """``keep`` (batch, seqlen): what of the logits counts, for the loss as well."""
    for part in model.modules():  # older versions of T5 keep theirs when the whole is told
        if isinstance(part, transformers.PreTrainedModel):
            part.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    model.zero_grad(set_to_none=True)
    logits = model(**inputs).logits
    loss = (logits.double().log_softmax(-1) * torch.linspace(-1, 1, VOCABULARY)).sum(-1)
    (loss * keep).sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach() * keep[..., None], gradients


def difference(a: Run, b: Run) -> tuple[float, float, float]:
    """Of the logits; the largest and the mean one of a gradient, relative to its largest number."""
    assert a[1].keys() == b[1].keys()
    logits = float((a[0].double() - b[0].double()).abs().max())
    scaled = [
        (a[1][name].double() - b[1][name].double()).abs().max() / b[1][name].abs().max()
        for name in b[1]
        if b[1][name].abs().max() > 1e-12
    ]
    relative = torch.stack(scaled)
    return logits, float(relative.max()), float(relative.mean())


def usual_difference(
    model: Any, keep: Tensor, inputs: dict[str, Any], exact: Run
) -> tuple[float, ...]:
    """What the model's precision costs with eager or, where that is more, with attentions that are
    off by no more than a rounding: a logit may hang on the last bit of an attention's output.
    """
    runs = [run(model, "eager", keep, inputs)]
    for seed in range(32):
        torch.manual_seed(seed)
        runs.append(run(model, "nudged", keep, inputs))
    return tuple(map(max, zip(*(difference(each, exact) for each in runs), strict=True)))


def launches() -> dict[str, int]:
    """By operation."""
    counts: dict[str, int] = {}
    for kernel in anyflash.build_info()["kernels"]:
        counts[kernel["op"]] = counts.get(kernel["op"], 0) + kernel["launches"]
    return counts


@contextmanager
def counted() -> Iterator[Callable[[], dict[str, int]]]:
    """Gives a function that says which operations have run since."""
    before = launches()
    yield lambda: {op: n - before.get(op, 0) for op, n in launches().items() if n > before[op]}


def padding(kind: str, batch: int = 3, seqlen: int = 9) -> Tensor:
    """(batch, seqlen) int64, 1 for tokens that count."""
    mask = torch.ones((batch, seqlen), dtype=torch.long)
    for row in range(batch):
        length = 2 * row + (row == 2)
        begin = {"none": seqlen, "left": 0, "right": seqlen - length, "holes": 2}[kind]
        mask[row, begin : begin + length] = 0
    return mask


def tokens(batch: int = 3, seqlen: int = 9) -> Tensor:
    generator = torch.Generator().manual_seed(batch * seqlen)
    return torch.randint(3, VOCABULARY, (batch, seqlen), generator=generator)
