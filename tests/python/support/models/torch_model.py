"""A model that learns: a transformer's block, whose attention is anyflash's."""

from __future__ import annotations

from typing import Any

import torch

from anyflash.torch import attention


class Block(torch.nn.Module):
    """With a bias and sinks to learn."""

    def __init__(self, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.norm = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.bias = torch.nn.Parameter(torch.zeros(heads, 1, 1))
        self.sinks = torch.nn.Parameter(torch.zeros(heads))
        self.attend = attention

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        p = 0.1 if self.training else 0.0
        y = self.attend(q, k, v, causal=True, bias=self.bias, sinks=self.sinks, dropout_p=p)
        return x + self.out(y.flatten(2))


def train(model: Any, steps: int = 5) -> list[float]:
    """The losses."""
    torch.manual_seed(1)
    x = torch.randn(2, 9, 16)
    target = x.roll(1, 1).tanh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
