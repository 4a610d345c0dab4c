"""Times libraries built from forward.cu, cuDNN and FlashAttention-3, each in a process of its own.

times.py FOLDER RESULT.json [HEAD_DIM...]

FOLDER holds d<head dim>_<name>.so. timing.py says which sizes.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from library import Library, Problem
from timing import Launches, Operation, flash_attn_func, name_of, run_times
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def peers(p: Problem) -> Launches:
    q, k, v = (x.transpose(1, 2) for x in (p.q, p.k, p.v))
    causal = p.right == 0

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    result: Launches = {"cudnn": cudnn}
    if flash_attn_func is not None:
        result["fa3"] = lambda: flash_attn_func(p.q, p.k, p.v, causal=causal)
    return result


def ours(path: pathlib.Path, p: Problem) -> Launches:
    library = Library(str(path))
    out = torch.empty_like(p.q)
    lse = torch.empty(p.q.shape[0], p.q.shape[2], p.q.shape[1], device="cuda")
    return {name_of(path): library.call(p, out, lse)}


FORWARD = Operation(
    prefix="d",
    dims=(128, 64, 256),
    inputs=3,
    products=2,
    guess=600e12,
    most_repeats=20,
    skip_broken=True,
    ours=ours,
    peers=peers,
)

if __name__ == "__main__":
    run_times(FORWARD)
