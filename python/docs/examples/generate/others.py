"""The same answers without a paged cache: a plain loop, and Hugging Face's generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from engine import Request
from gpt_torch import GPT
from torch import Tensor


@torch.inference_mode()
def plain(gpt: GPT, requests: Sequence[Request]) -> tuple[int, int]:
    """One request after another; the whole text goes through the model for every token."""
    device, fed = gpt.tokens.weight.device, 0
    for request in requests:
        length, allowed = len(request.prompt) + request.new, gpt.places.num_embeddings
        if length > allowed:
            raise ValueError(f"a prompt and its answer of {length} tokens; {allowed} are allowed")
        while request.missing:
            logits = gpt(torch.tensor([request.tokens], device=device))[0, -1]
            fed += len(request.tokens)
            request.tokens.append(int(logits.argmax()))
    return sum(request.new for request in requests), fed


def as_gpt2(gpt: GPT) -> Any:
    """Hugging Face's GPT-2 with the same weights: it is the same model."""
    from transformers import GPT2Config, GPT2LMHeadModel

    weight = gpt.tokens.weight
    config = GPT2Config(
        vocab_size=weight.shape[0],
        n_positions=gpt.places.num_embeddings,
        n_embd=weight.shape[1],
        n_layer=len(gpt.blocks),
        n_head=gpt.blocks[0].heads,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    model.load_state_dict(_named_as_gpt2(gpt.state_dict()), strict=True)
    return model.to(weight.device, weight.dtype).eval()


# Hugging Face's names of a block's parts; its linear layers hold the transposed weight.
NAMES = {
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp.0": "ln_2",
    "mlp.1": "mlp.c_fc",
    "mlp.3": "mlp.c_proj",
}


def _named_as_gpt2(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    named = {
        "transformer.wte.weight": weights["tokens.weight"],
        "transformer.wpe.weight": weights["places.weight"],
        "transformer.ln_f.weight": weights["norm.weight"],
        "transformer.ln_f.bias": weights["norm.bias"],
        "lm_head.weight": weights["tokens.weight"],
    }
    for name, x in weights.items():
        if name.startswith("blocks."):
            _, layer, rest = name.split(".", 2)
            part, _, kind = rest.rpartition(".")
            named[f"transformer.h.{layer}.{NAMES[part]}.{kind}"] = x.T if x.dim() == 2 else x
    return named


def hugging_face(gpt2: Any, requests: Sequence[Request], batch: int) -> tuple[int, int]:
    """Batches of requests that begin and end together: the longest says for how long."""
    passes = fed = 0
    for begin in range(0, len(requests), batch):
        group = requests[begin : begin + batch]
        longest = max(len(request.prompt) for request in group)
        pads = [longest - len(request.prompt) for request in group]
        padded = [[0] * pad + request.prompt for pad, request in zip(pads, group, strict=True)]
        mask = [[0] * pad + [1] * (longest - pad) for pad in pads]
        new = max(request.new for request in group)
        out = gpt2.generate(
            torch.tensor(padded, device=gpt2.device),
            attention_mask=torch.tensor(mask, device=gpt2.device),
            max_new_tokens=new,
            do_sample=False,
        )
        for request, row in zip(group, out.tolist(), strict=True):
            request.tokens += row[longest : longest + request.new]
        passes += new
        fed += len(group) * (longest + new - 1)
    return passes, fed
