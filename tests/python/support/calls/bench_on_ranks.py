"""What the benchmark finds on ranks of gloo, with PyTorch's context_parallel beside ours.

PyTorch does not share the CPU's operator. So a stand-in calls the GPU's, whose kernels are
anyflash's here. Some stand-ins fail.

python -m calls.bench_on_ranks FOLDER RANK SIZE cpu
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, experimental
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.nn import functional

import anyflash.torch
from anyflash.bench import _ranks, _torch_context_parallel
from anyflash.bench._cases import Case
from anyflash.bench._timing import Budget
from anyflash.torch import _flash_impl
from anyflash.torch.distributed import ContextParallel
from run import ranks

CPU = torch.device("cpu")
CASE = Case(
    "forward", 1, 256, 4, 16, "float32", heads_k=2, causal=True, method="ring", ranks=2,
    transport="gloo",
)  # fmt: skip
PACKED = replace(CASE, batch=3, seqlen=150, lengths=(90, 16, 150))
PEER = "torch-cp"
OF_THE_CPU = functional.scaled_dot_product_attention
ROTATIONS: set[str] = set()
Attention = Callable[..., Any]


def shared(q: Any, k: Any, v: Any, is_causal: bool = False, enable_gqa: bool = False) -> Any:
    assert isinstance(q, DTensor)
    ROTATIONS.add(_attention._cp_options.rotate_method.name)
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]


def ungrouped(q: Any, k: Any, v: Any, is_causal: bool = False, enable_gqa: bool = False) -> Any:
    if k.shape[1] != q.shape[1]:
        raise ValueError("no grouped heads")
    return shared(q, k, v, is_causal)


def wrong(q: Any, k: Any, v: Any, is_causal: bool = False, enable_gqa: bool = False) -> Any:
    return 2 * shared(q, k, v, is_causal)


def fails_on_one(*tensors: Any, **options: Any) -> Any:
    out = shared(*tensors, **options)
    if dist.get_rank() == 1:
        raise ValueError("rank 1 alone fails")
    return out


def failing_later() -> Attention:
    """Its first call agrees with ours; a later one, while it is timed, fails on rank 1."""
    calls = []

    def attention(q: Any, k: Any, v: Any, is_causal: bool = False, enable_gqa: bool = False) -> Any:
        calls.append(q)
        if len(calls) == 1:
            return shared(q, k, v, is_causal)
        if dist.get_rank() == 1:
            raise ValueError("a later call fails")
        return q

    return attention


def as_in_2_11(*given: Any, **options: Any) -> Iterator[None]:
    """PyTorch 2.11's context_parallel, which does not undo what it did where something failed."""
    inside = context_parallel(*given, **options)
    inside.__enter__()
    yield
    inside.__exit__(None, None, None)


def results(case: Case, attention: Attention) -> dict[str, Any]:
    if attention is not OF_THE_CPU:
        attention.__name__ = OF_THE_CPU.__name__  # PyTorch replaces it by its name
    functional.scaled_dot_product_attention = attention
    ROTATIONS.clear()
    found = _ranks.rank_results(case, dist.get_rank(), CPU, [PEER])
    assert functional.scaled_dot_product_attention is attention, "PyTorch's is still there"
    return {**found, "rotations": sorted(ROTATIONS)}


def of_other_rows() -> dict[str, Any]:
    positions = ContextParallel(layout="contiguous").positions(CASE.rows)
    tensors = _ranks._tensors(CASE, len(positions), CPU)
    given = _torch_context_parallel.Shared(CASE, tensors, positions, (), CPU)
    return _torch_context_parallel.result(PEER, given, lambda call: {"seconds": 1.0})


def largest_error(case: Case) -> float:
    """Of what is timed on ranks, beside what is timed on one device."""
    torch.manual_seed(0)
    whole = _ranks._tensors(case, case.rows, CPU)[:3]
    cp = ContextParallel(method=case.method)
    dim = 0 if case.lengths else 1
    mine = _ranks._attention(case, cp, CPU, seqlen=case.rows)(*(cp.shard(x, dim) for x in whole))
    one = _ranks._attention(case, anyflash.torch, CPU)(*whole)
    return float((cp.unshard(mine, dim) - one).abs().max())


if __name__ == "__main__":
    ranks.begin()
    found: dict[str, Any] = {
        "errors": {name: largest_error(c) for name, c in (("dense", CASE), ("packed", PACKED))}
    }
    _ranks._BUDGET = Budget(contender_seconds=0.0, round_seconds=1e-4, fewest=2, most=2)
    experimental.context_parallel = contextmanager(as_in_2_11)
    activation = _flash_impl.activate("CPU")
    both = replace(CASE, op="both")
    found["other rows"] = of_other_rows()
    found["results"] = {
        "of the CPU": results(CASE, OF_THE_CPU),
        "forward": results(CASE, shared),
        "both": results(both, shared),
        "gather": results(replace(both, method="gather"), shared),
        "ungrouped": results(CASE, ungrouped),
        "wrong": results(CASE, wrong),
        "fails on one": results(CASE, fails_on_one),
        "fails later": results(replace(CASE, heads_k=4), failing_later()),
        "after failures": results(CASE, shared),
    }
    activation.remove()
    ranks.finish(found)
