"""Times libraries built from backward.cu, cuDNN and FlashAttention-3, each in a process of its own.

times_backward.py FOLDER RESULT.json [HEAD_DIM...]

FOLDER holds bwd<head dim>_<name>.so, which are timed as <name> and, deterministic, as <name>+.
timing.py says which sizes.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import torch
from backward_library import BackwardLibrary, Gradients
from library import Problem
from timing import Launches, Operation, flash_attn_func, name_of, run_times
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def peers(p: Problem, dout: torch.Tensor) -> Launches:
    """Their backward alone, by autograd."""
    causal = p.right == 0
    q, k, v = inputs = tuple(x.clone().requires_grad_() for x in (p.q, p.k, p.v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        by_head = (x.transpose(1, 2) for x in inputs)
        cudnn_out = scaled_dot_product_attention(*by_head, is_causal=causal)

    def gradients_of(out: torch.Tensor, gradient: torch.Tensor) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)

    result = {"cudnn": gradients_of(cudnn_out, dout.transpose(1, 2))}
    if flash_attn_func is not None:
        out = flash_attn_func(q, k, v, causal=causal)
        result["fa3"] = gradients_of(out[0] if isinstance(out, tuple) else out, dout)
    return result


def ours(path: pathlib.Path, p: Problem, dout: torch.Tensor) -> Launches:
    library = BackwardLibrary(str(path))
    by_head = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    forward = torch.ops.aten._scaled_dot_product_flash_attention(*by_head, 0.0, p.right == 0)
    out, lse = forward[0].transpose(1, 2).contiguous(), forward[1].contiguous()
    gradients = Gradients(out, lse, dout, *(torch.empty_like(x) for x in (p.q, p.k, p.v)))
    name = name_of(path)
    return {
        name: library.call(p, gradients),
        f"{name}+": library.call(p, gradients, deterministic=True),
    }


BACKWARD = Operation(
    prefix="bwd",
    dims=(128, 64),
    inputs=4,
    products=5,
    guess=500e12,
    most_repeats=30,
    skip_broken=False,
    ours=ours,
    peers=peers,
)

if __name__ == "__main__":
    run_times(BACKWARD)
