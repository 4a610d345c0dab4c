"""A model of transformers whose sequences are sharded, as DeepSpeed-Ulysses shards them: heads are
exchanged for tokens around the attention function.

python -m calls.ulysses FOLDER RANK 2
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from models.hf_models import VOCABULARY, build, tokens
from run import ranks

ENDS = torch.tensor([0, 6, 7, 16])
PACKED = torch.cat([torch.arange(n) for n in ENDS.diff().tolist()])[None]
PLAIN = torch.arange(16)[None]
GIVEN = {"cu_seq_lens_q": ENDS, "cu_seq_lens_k": ENDS, "max_length_q": 9, "max_length_k": 9}
# (model, position_ids, what else is given to it: of all tokens, on each rank)
CASES: dict[str, tuple[str, Tensor, dict[str, Any]]] = {
    "plain": ("llama", PLAIN, {}),
    "window, softcap": ("gemma2", PLAIN, {}),
    "packed": ("llama", PACKED, {}),
    "packed, window, softcap": ("gemma2", PACKED, {}),
    "packed, by cu_seq_lens": ("llama", PACKED, GIVEN),
}


class Exchange(torch.autograd.Function):
    """The i-th of the equal parts goes to rank i; so do the parts of a gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return Exchange.forward(ctx, gradients[0].contiguous())


def trade(x: Tensor, given: int, wanted: int) -> Tensor:
    """All of the axis ``wanted`` for a part of the axis ``given``."""
    parts = torch.stack(x.chunk(dist.get_world_size(), given))
    exchanged: Tensor = Exchange.apply(parts)  # type: ignore[no-untyped-call]
    return torch.cat(list(exchanged.unbind()), wanted)


def shard(attention: Any, full_positions: Tensor) -> Any:
    """The mask, which is of this rank's tokens alone, is dropped."""

    def sharded(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
        options["position_ids"] = full_positions
        qkv = (trade(x, 1, 2) for x in (q, k, v))  # (batch, heads, seqlen, head_dim)
        out = attention(module, *qkv, None, **options)[0]
        return trade(out, 1, 2), None  # (batch, seqlen, heads, head_dim)

    return sharded


def train(name: str, rank: int, world_size: int) -> list[list[float]]:
    """The logits, and a gradient, of all tokens."""
    model_name, positions, given = CASES[name]
    model = build(model_name, torch.float64)
    model.set_attn_implementation("anyflash")
    model.zero_grad(set_to_none=True)
    ids = tokens(1, positions.shape[1])
    mine = slice(rank * ids.shape[1] // world_size, (rank + 1) * ids.shape[1] // world_size)
    own = ALL_ATTENTION_FUNCTIONS["anyflash"]
    if world_size > 1:
        ALL_ATTENTION_FUNCTIONS["anyflash"] = shard(own, positions)
    try:
        logits = model(
            ids[:, mine], position_ids=positions[:, mine], use_cache=False, **given
        ).logits
        (logits.log_softmax(-1) * torch.linspace(-1, 1, VOCABULARY)).sum().backward()
    finally:
        if world_size > 1:
            del ALL_ATTENTION_FUNCTIONS["anyflash"]
    gradient = model.model.layers[0].self_attn.k_proj.weight.grad
    parts = [logits.detach()]
    if world_size > 1:
        parts = [torch.empty_like(logits) for _ in range(world_size)]
        dist.all_gather(parts, logits.detach())
        dist.all_reduce(gradient)
    return [torch.cat(parts, 1).flatten().tolist(), gradient.flatten().tolist()]


if __name__ == "__main__":
    numbers = ranks.begin()
    ranks.finish({name: train(name, *numbers) for name in CASES})
