"""torch.compile around attention over ranks: the graph breaks, and results are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend

from anyflash.torch.distributed import ContextParallel
from calls.context_parallel import METHODS, randn

CASES: dict[str, Callable[[], None]] = {}
ROWS = 70


def results(step: Any, x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """The loss, and the gradients."""
    given = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    loss = step(*given)
    return [loss.detach(), *torch.autograd.grad(loss, given)]


def check(method: str, backend: str) -> None:
    cp = ContextParallel(method=method, multiple=8)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        q, k, v = (x @ weight).unflatten(-1, (3, 2, 8)).unbind(2)
        out = cp.attention(q, k, v, causal=True, dropout_p=0.2, seed=3, seqlen=ROWS)
        return (out * torch.cos(out)).sum()

    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    x, weight = cp.shard(randn(2, ROWS, 16)), randn(16, 48)
    right = results(step, x, weight)
    compiled = torch.compile(step, backend=counter)
    for _ in range(2):
        for actual, wanted in zip(results(compiled, x, weight), right, strict=True):
            assert torch.equal(actual, wanted)
    assert counter.frame_count == 2, "what is before the call, and what is behind it"


for _method in METHODS:
    for _backend in ("eager", "aot_eager"):
        CASES[f"compiled: {_method}, {_backend}"] = functools.partial(check, _method, _backend)
