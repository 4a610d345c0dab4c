"""PyTorch's own context_parallel, whose kernels are anyflash's: on GPUs through the registry, on
the CPU in the dispatcher, since scaled_dot_product_attention takes other operators there.

python -m calls.context_parallel_pytorch FOLDER RANK SIZE DEVICE
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel

import anyflash.torch
from anyflash.torch import _flash_impl
from calls.launches import launches
from run import ranks

CASES: dict[str, Callable[[], None]] = {}
DEVICE = ranks.device()
DTYPE = torch.float32 if DEVICE == "cpu" else torch.bfloat16
TOLERANCE = 1e-5 if DEVICE == "cpu" else 2e-2  # PyTorch joins 16-bit results of hops


@contextmanager
def our_kernels() -> Iterator[None]:
    if DEVICE == "cpu":
        activation = _flash_impl.activate("CPU")
        try:
            yield
        finally:
            activation.remove()
        return
    from torch.nn import attention

    anyflash.torch.register()
    attention.activate_flash_attention_impl("anyflash")
    try:
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        attention.restore_flash_attention_impl()


def attend(mesh: Any, tensors: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    """out, and the gradients of q, k and v, of this rank's rows."""
    if DEVICE == "cpu":
        q, k, v, dout = (DTensor.from_local(x, mesh, [Shard(2)]) for x in (*tensors, dout))
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        out = torch.ops.aten._scaled_dot_product_flash_attention(*given, 0.0, True)[0]
    else:
        given = [x.detach().requires_grad_() for x in tensors]
        out = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=True)
    found: list[Any] = [out.detach(), *torch.autograd.grad(out, given, dout)]
    return [x.to_local() if isinstance(x, DTensor) else x for x in found]


def check(rotation: str) -> None:
    """Its layout is head and tail, as is zigzag."""
    from torch.distributed.tensor.experimental._attention import (
        context_parallel_unshard,
        set_rotate_method,
    )

    size = dist.get_world_size()
    mesh = init_device_mesh(DEVICE, (size,))
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(2, 4, 32 * size, 16, generator=generator).to(DEVICE, DTYPE) for _ in range(4)
    )
    whole = [x.clone().float().requires_grad_() for x in (q, k, v)]
    math = torch.nn.functional.scaled_dot_product_attention(*whole, is_causal=True)
    right = [math.detach(), *torch.autograd.grad(math, whole, dout.float())]
    set_rotate_method(rotation)
    try:
        with (
            our_kernels(),
            context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4),
        ):
            mine = [x.clone() for x in (q, k, v, dout)]
            count, found = launches(lambda: attend(mesh, mine[:3], mine[3]))
            found = context_parallel_unshard(mesh, found, [2] * 4)
    finally:
        set_rotate_method("allgather")
    assert count >= 2 * size, f"{count} of our kernels were launched"
    for name, actual, wanted in zip(("out", "dq", "dk", "dv"), found, right, strict=True):
        error = (actual.float() - wanted).abs().max() / wanted.abs().max()
        assert error < TOLERANCE, f"{name}: {error}"


for _rotation in ("allgather", "alltoall"):
    CASES[f"PyTorch's context_parallel, {_rotation}"] = functools.partial(check, _rotation)


if __name__ == "__main__":
    ranks.begin()
    ranks.run_cases(CASES)
