"""torch.autograd.grad(is_grads_batched=True), and what uses it: PyTorch's older vmap."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyflash.flash_attn import flash_attn_kvpacked_func, flash_attn_varlen_qkvpacked_func
from anyflash.torch import attention, attention_varlen, scaled_dot_product_attention

SIZE = 3  # of the mapped axis
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)


def leaf(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape) + shape[0])
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


BATCH = {"q": leaf(2, 5, 2, 4), "k": leaf(2, 7, 1, 4), "v": leaf(2, 7, 1, 4)}
ONE = {"q": leaf(1, 5, 2, 4), "k": leaf(1, 7, 1, 4), "v": leaf(1, 7, 1, 4)}
PACKED = {"q": leaf(5, 2, 4), "k": leaf(5, 1, 4), "v": leaf(5, 1, 4)}
VARLEN = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 3, "max_seqlen_k": 3}
HEADS = {"query": leaf(2, 3, 5, 4), "key": leaf(2, 3, 5, 4), "value": leaf(2, 3, 5, 4)}
# The function, its tensors, and its options.
CASES: dict[str, tuple[Any, dict[str, torch.Tensor], dict[str, Any]]] = {
    "plain": (attention, BATCH, {"causal": True}),
    "one": (attention, ONE, {"return_lse": True}),
    "window": (attention, BATCH, {"window_size": (3, 1), "return_lse": True}),
    "bias": (attention, BATCH | {"bias": leaf(5, 7), "sinks": leaf(2)}, {}),
    "dropout": (attention, BATCH, {"dropout_p": 0.5, "seed": 3}),
    "packed": (attention_varlen, PACKED, VARLEN | {"return_lse": True}),
    "sdpa": (scaled_dot_product_attention, HEADS, {}),
    "flash-attn": (flash_attn_kvpacked_func, {"q": BATCH["q"], "kv": leaf(2, 7, 2, 1, 4)}, {}),
    "flash-attn-varlen": (
        flash_attn_varlen_qkvpacked_func,
        {"qkv": leaf(5, 3, 2, 4)},
        {"cu_seqlens": ENDS, "max_seqlen": 3, "return_attn_probs": True},
    ),
}


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_batched_gradients(name: str, create_graph: bool) -> None:
    """They are those of a loop, and have gradients with create_graph."""
    function, leaves, options = CASES[name]
    results = function(**leaves, **options)
    outputs = results[:2] if isinstance(results, tuple) else (results,)
    given = tuple(leaf(SIZE, *x.shape).detach().to(x.dtype) for x in outputs)
    keep: dict[str, Any] = {"retain_graph": True, "create_graph": create_graph}
    inputs = list(leaves.values())
    found = torch.autograd.grad(outputs, inputs, given, is_grads_batched=True, **keep)
    each = [
        torch.autograd.grad(outputs, inputs, [g[i] for g in given], **keep) for i in range(SIZE)
    ]
    for x, *right in zip(found, *each, strict=True):
        torch.testing.assert_close(x, torch.stack(right), rtol=1e-12, atol=1e-12)
    if create_graph:
        found, right = (
            torch.autograd.grad(sum(x.square().sum() for x in first), inputs, retain_graph=True)
            for first in (found, [x for one in each for x in one])
        )
        torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("strategy", ["jacobian", "hessian"])
def test_functional(strategy: str) -> None:
    inputs = tuple(x.detach() for x in BATCH.values())

    def function(*x: torch.Tensor) -> Any:
        out = attention(*x)
        return out if strategy == "jacobian" else out.square().sum()

    transform = getattr(torch.autograd.functional, strategy)
    found, right = (transform(function, inputs, vectorize=vectorize) for vectorize in (True, False))
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-10)
