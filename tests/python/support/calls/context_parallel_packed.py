"""As context_parallel.py, of packed sequences."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

import anyflash.torch
from anyflash.torch.distributed import _arguments
from anyflash.torch.distributed._problem import Packed
from calls.context_parallel import (
    DEVICE,
    HEADS,
    MESH,
    TOLERANCES,
    Options,
    check_lse,
    compare,
    context_parallel,
    differentiate,
    on_device,
    randn,
    unrounded,
    ways,
)
from calls.ranges import key_ranges

LENGTHS = {
    "alike": ((5, 0, 61, 1, 83), (5, 0, 61, 1, 83)),
    "unlike": ((5, 0, 61, 1, 83), (9, 4, 33, 0, 120)),
    "one": ((150,), (150,)),
}
PACKED: dict[str, Options] = {
    "plain": {},
    "causal": {"causal": True},
    "window, ranges": {"window_size": (20, 9), "softcap": 2.0, "key_ranges": True},
    "seqused": {"causal": True, "seqused_k": True},
    "slopes, sinks": {"alibi_slopes": True, "sinks": True},
    "dropout": {"causal": True, "dropout_p": 0.3, "seed": 77},
    "all": {"window_size": (40, 0), "alibi_slopes": True, "sinks": True, "seqused_k": True},
}


class PackedCase(NamedTuple):
    method: str
    layout: str
    lengths: str
    options: str
    dtype: torch.dtype = torch.float64
    # Otherwise as on a GPU, with one tensor of both rows' and keys' ends.
    host_knows: bool = True

    @property
    def id(self) -> str:
        known = "" if self.host_knows else ", unknown to the host"
        name = f"packed, {self.method}, {self.layout}: {self.lengths}, {self.options}{known}"
        return f"{name}, {str(self.dtype)[6:]}"


def packed_cases() -> Iterator[PackedCase]:
    for way, lengths, options in itertools.product(ways(), LENGTHS, PACKED):
        if options != "dropout" or way[0] not in ("ring", MESH):
            case = PackedCase(*way, lengths, options)
            yield case
            if way[0] == "ring" and lengths == "alike":
                yield case._replace(host_knows=False)
                yield case._replace(dtype=torch.bfloat16)


def without_host(*args: Any) -> Packed:
    *tensors, _ = args
    return Packed(*tensors, None)


def check_packed(case: PackedCase) -> None:
    lengths_q, lengths_k = LENGTHS[case.lengths]
    batch, heads, heads_k = len(lengths_q), HEADS, HEADS // 2
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    options = dict(PACKED[case.options])
    if options.pop("seqused_k", False):
        used = [n // 2 if i % 2 else n for i, n in enumerate(lengths_k)]
        options["seqused_k"] = torch.tensor(used, dtype=torch.int32)
    if options.pop("key_ranges", False):
        options["key_ranges"] = key_ranges(heads_k, total_k, 40)
    whole = {
        "q": randn(total_q, heads, 8),
        "k": randn(total_k, heads_k, 8) + 0.1,
        "v": randn(total_k, heads_k, 12) - 0.2,
    }
    for name, shape in (("alibi_slopes", (batch, heads)), ("sinks", (heads,))):
        if options.pop(name, False):
            whole[name] = randn(*shape)
    whole = {name: x.to(case.dtype).requires_grad_() for name, x in whole.items()}
    ends = [torch.tensor([0, *itertools.accumulate(x)]).int() for x in (lengths_q, lengths_k)]
    if not case.host_knows:
        ends = [ends[0], ends[0]]
    packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    options |= packing | {"max_seqlen_q": max(lengths_q), "max_seqlen_k": max(lengths_k)}
    dout, dlse = randn(total_q, heads, 12), randn(heads, total_q)
    reference = unrounded(whole)
    out, lse = anyflash.torch.attention_varlen(**reference, **options, return_lse=True)
    grads = differentiate(reference, out, lse, dout, dlse)

    cp = context_parallel(case.method, case.layout, 8)
    local = {
        name: (cp.shard(x.detach(), 0) if name in "qkv" else x.detach())
        .to(DEVICE, copy=True)
        .requires_grad_()
        for name, x in whole.items()
    }
    options = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in options.items()}
    constructor = Packed if case.host_knows else without_host
    with mock.patch.object(_arguments, "Packed", constructor):
        mine, my_lse = cp.attention_varlen(**local, **options, return_lse=True)
    found = differentiate(local, mine, my_lse, *on_device(cp.shard(dout, 0), cp.shard(dlse, 1)))
    for name, grad in found.items():
        if name not in "qkv":
            dist.all_reduce(grad)
    tolerance, of_gradients = TOLERANCES[case.dtype]
    compare("out", mine, cp.shard(out.detach(), 0), tolerance)
    check_lse(my_lse, cp.shard(lse.detach(), 1), case.dtype)
    for name, grad in grads.items():
        rows = cp.shard(grad, 0) if name in "qkv" else grad
        compare(f"d{name}", found[name], rows, of_gradients)
