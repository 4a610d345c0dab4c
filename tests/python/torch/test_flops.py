"""torch.utils.flop_counter counts anyflash's attention as PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from anyflash.torch import attention_varlen, sdpa_routing


def counted(function: Callable[[], Any]) -> int:
    """Operations of a forward and a backward."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        function().sum().backward()
    count: int = counter.get_total_flops()
    return count


def leaves(torch: ModuleType, *shapes: tuple[int, ...]) -> Any:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("heads_k", [4, 2])
def test_as_pytorch(torch: ModuleType, heads_k: int) -> None:
    q, k, v = leaves(torch, (2, 4, 9, 16), (2, heads_k, 9, 16), (2, heads_k, 9, 16))
    attend = torch.nn.functional.scaled_dot_product_attention
    options = {"is_causal": True, "enable_gqa": heads_k != 4}
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        right = counted(lambda: attend(q, k, v, **options))
    with sdpa_routing():
        attend = torch.nn.functional.scaled_dot_product_attention
        found = counted(lambda: attend(q, k, v, **options))
    recomputed = 2 * 2 * 4 * 9 * 9 * 16
    assert found == right + recomputed


@pytest.mark.parametrize("head_dim_v", [16, 8])
def test_packed_sequences(torch: ModuleType, head_dim_v: int) -> None:
    lengths, lengths_k = torch.tensor([3, 0, 5]), torch.tensor([4, 2, 6])
    bounds = [
        torch.nn.functional.pad(x.cumsum(0), (1, 0)).to(torch.int32) for x in (lengths, lengths_k)
    ]
    q, k, v = leaves(torch, (8, 4, 16), (12, 2, 16), (12, 2, head_dim_v))
    pairs = int((lengths * lengths_k).sum())
    found = counted(lambda: attention_varlen(q, k, v, *bounds, 5, 6))
    assert found == 2 * 4 * pairs * (4 * 16 + 3 * head_dim_v)
    with torch.device("meta"):
        bounds = [torch.empty(4, dtype=torch.int32) for _ in range(2)]
        q, k, v = leaves(torch, (8, 4, 16), (12, 2, 16), (12, 2, head_dim_v))
    found = counted(lambda: attention_varlen(q, k, v, *bounds, 5, 6))
    assert found == 2 * 4 * 3 * 5 * 6 * (4 * 16 + 3 * head_dim_v)
