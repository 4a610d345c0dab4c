"""What says that attention to pages has no gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class ForwardOnly(torch.autograd.Function):
    """Results that depend on q, k and v, and say so when a gradient is asked for."""

    @staticmethod
    def forward(
        ctx: Any,
        attend: Callable[..., tuple[torch.Tensor, ...]],
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        return attend(q, k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise NotImplementedError(
            "anyflash.flash_attn.flash_attn_varlen_func: block_table is given, and attention to "
            "pages has no backward; pass packed k and v"
        )
