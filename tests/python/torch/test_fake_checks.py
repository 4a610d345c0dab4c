"""Wrong calls within torch.compile and torch.export are refused as they are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyflash.torch import attention, attention_varlen, attention_with_kvcache

ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)
VARLEN = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "max_seqlen_q": 3, "max_seqlen_k": 3}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"k": torch.ones(2, 7, 3, 8)}, "k has 3 heads, which does not divide q's 4"),
    "batch": ({"v": torch.ones(3, 7, 2, 8)}, "v has shape"),
    "rank": ({"q": torch.ones(5, 4, 8)}, "q has 3 dimensions"),
    "dtype": ({"k": torch.ones(2, 7, 2, 8).half()}, "k is float16"),
    "integers": (dict.fromkeys("qkv", torch.ones(2, 5, 4, 8).int()), "q is int32"),
    "bias": ({"bias": torch.ones(4, 5, 6)}, "bias has shape"),
    "sinks": ({"sinks": torch.ones(3)}, "sinks has shape"),
    "softcap": ({"softcap": -1.0}, "softcap is -1"),
    "block_size": (
        {"block_mask": torch.ones(1, 1, 1, 1) > 0, "block_size": (64, 65)},
        "block_size is",
    ),
    "ranges": ({"key_ranges": torch.ones(1, 1, 6, 2).int()}, "key_ranges has shape"),
    "out_dtype": ({"out_dtype": torch.float16}, "out is float16|out_dtype is float16"),
}


def traced(function: Any, given: dict[str, Any], how: str) -> Any:
    """What is traced, but not run."""
    tensors = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    fixed = {name: x for name, x in given.items() if name not in tensors}
    if how == "meta":
        moved = {name: x.to("meta") for name, x in tensors.items()}
        return function(**moved, **fixed)

    class Model(torch.nn.Module):
        def forward(self, tensors: Any) -> Any:
            return function(**tensors, **fixed)

    return torch.export.export(Model(), (tensors,))


def refused(function: Any, given: dict[str, Any], message: str, how: str) -> None:
    with pytest.raises(Exception, match=rf"anyflash\.torch\.\w+: ({message})"):
        traced(function, given, how)


@pytest.mark.parametrize("how", ["meta", "export"])
@pytest.mark.parametrize("name", WRONG)
def test_attention(name: str, how: str) -> None:
    changes, message = WRONG[name]
    right = {"q": torch.ones(2, 5, 4, 8), "k": torch.ones(2, 7, 2, 8), "v": torch.ones(2, 7, 2, 8)}
    traced(attention, right, how)
    refused(attention, right | changes, message, how)


@pytest.mark.parametrize("how", ["meta", "export"])
def test_packed(how: str) -> None:
    x = torch.ones(5, 2, 8)
    right = {"q": x, "k": x, "v": x, **VARLEN}
    traced(attention_varlen, right, how)
    refused(attention_varlen, right | {"k": x[:, :, :7]}, "k has shape", how)
    refused(attention_varlen, right | {"cu_seqlens_k": ENDS[1:]}, "cu_seqlens_k has shape", how)
    refused(attention_varlen, right | {"cu_seqlens_q": ENDS.long()}, "cu_seqlens_q is int64", how)


@pytest.mark.parametrize("how", ["meta", "export"])
@pytest.mark.parametrize("lengths", [3, torch.tensor([3, 4], dtype=torch.int32)], ids=["int", "x"])
def test_decoding(lengths: Any, how: str) -> None:
    q, cache, new = torch.ones(2, 1, 4, 8), torch.zeros(2, 16, 2, 8), torch.ones(2, 1, 2, 8)
    right = {"q": q, "k_cache": cache, "v_cache": cache, "cache_seqlens": lengths}
    traced(attention_with_kvcache, right, how)
    appended = right | {"k": new, "v": new.clone(), "v_cache": cache.clone()}
    refused(attention_with_kvcache, appended | {"k": new[:, :, :1].clone()}, "k has shape", how)
    refused(attention_with_kvcache, right | {"q": q[..., :7]}, "k_cache has shape", how)
    refused(attention_with_kvcache, right | {"sinks": torch.ones(3)}, "sinks has shape", how)


def test_symbols_are_not_looked_at() -> None:
    """What fits in one call, and not in the next, the call itself checks."""

    def attend(q: torch.Tensor, k: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return attention(q, k, k, bias=bias)

    compiled = torch.compile(attend, dynamic=True, fullgraph=True, backend="eager")
    for n in (5, 6):
        q, k = torch.ones(2, n, 4, 8), torch.ones(2, 2 * n, 2, 8)
        compiled(q, k, torch.zeros(n, 2 * n))
        with pytest.raises(Exception, match="bias has shape"):
            compiled(q, k, torch.zeros(n, 2 * n + 1))
