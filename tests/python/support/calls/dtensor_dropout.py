"""Dropout of DTensors on two or four ranks: what it drops, and all results, are those of the whole
tensors, bit for bit.

python -m calls.dtensor_dropout FOLDER RANK 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import anyflash.torch
from calls.dtensor_cases import Tensors, placed, randn, refused, tensors
from run import ranks

CASES: dict[str, Callable[[], None]] = {}
DROPOUT = {"dropout_p": 0.5, "seed": 2**63 + 3}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square() -> Any:
    """Two ranks each way; with two ranks, one of the ways."""
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2))


def eight_heads(batch: int = 4) -> Tensors:
    return tensors(batch, heads=8, heads_k=4)


def results(attend: Callable[..., Any], given: dict[str, Any], **options: Any) -> list[Any]:
    """Output, LSE, the mask, and the gradients of q, k and v."""
    given = {
        name: x.detach().requires_grad_(x.is_floating_point()) if name in ("q", "k", "v") else x
        for name, x in given.items()
    }
    found = attend(**given, **options, return_dropout_mask=True)
    grads = torch.autograd.grad(
        [found.out, found.lse],
        [given[name] for name in ("q", "k", "v")],
        [torch.cos(found.out.detach()), torch.sin(found.lse.detach())],
    )
    return [found.out, found.lse, found.dropout_mask, *grads]


def same(
    given: Tensors,
    mesh: Any,
    placements: Any,
    attend: Callable[..., Any] = anyflash.torch.attention,
    **options: Any,
) -> None:
    """`placements` are those of q, k and v; what else is given lies on every rank."""
    where = dict.fromkeys(("q", "k", "v"), placements)
    options |= DROPOUT
    right = results(attend, given, **options)
    assert 0.4 < right[2].float().mean() < 0.6
    spread = {
        name: placed(x, mesh, where.get(name, [Replicate()] * mesh.ndim))
        for name, x in given.items()
    }
    with CommDebugMode() as communication:
        found = results(attend, spread, **options)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    for x, wanted in zip(found, right, strict=True):
        assert torch.equal(x.full_tensor(), wanted)


@case
def batch() -> None:
    same(eight_heads(), line(), [Shard(0)])


@case
def uneven_batch() -> None:
    same(eight_heads(batch=7), line(), [Shard(0)], causal=True)


@case
def heads() -> None:
    same(eight_heads(), line(), [Shard(2)], causal=True)


@case
def replicated() -> None:
    same(eight_heads(), line(), [Replicate()])


@case
def two_mesh_axes() -> None:
    for placements in (
        [Shard(0), Shard(2)],
        [Shard(2), Shard(0)],
        [Replicate(), Shard(2)],
        [Shard(0), Replicate()],
        [Shard(0), Shard(0)],
        [Shard(2), Shard(2)],
    ):
        same(eight_heads(), square(), placements)
    same(eight_heads(batch=5), square(), [Shard(0), Shard(0)])


@case
def packed() -> None:
    given = {"q": randn(9, 8, 8), "k": randn(9, 4, 8), "v": randn(9, 4, 6)}
    ends = torch.tensor([0, 2, 2, 9], dtype=torch.int32)
    given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    attend = anyflash.torch.attention_varlen
    options = {"max_seqlen_q": 7, "max_seqlen_k": 7}
    right = attend(**given, **options, **DROPOUT, return_dropout_mask=True).dropout_mask
    mesh, whole = line(), [Replicate()]
    for placements in ([Shard(1)], whole):
        spread = {
            name: placed(x, mesh, placements if name in "qkv" else whole)
            for name, x in given.items()
        }
        found = attend(**spread, **options, **DROPOUT, return_dropout_mask=True).dropout_mask
        assert torch.equal(found.full_tensor(), right)
    same(given, mesh, [Shard(1)], attend, causal=True, **options)


@case
def a_state_that_is_a_tensor() -> None:
    state = torch.tensor([5, 2**40 + 1])
    given, mesh = eight_heads(), line()
    right = anyflash.torch.attention(**given, dropout_p=0.3, rng_state=state)
    spread = {name: placed(x, mesh, [Shard(2)]) for name, x in given.items()}
    drawn = placed(state, mesh, [Replicate()])
    found = anyflash.torch.attention(**spread, dropout_p=0.3, rng_state=drawn)
    assert torch.equal(found.full_tensor(), right)


@case
def compiled() -> None:
    attend = anyflash.torch.attention
    fast = torch.compile(attend, backend="aot_eager", fullgraph=True)
    given, mesh = eight_heads(), line()
    right = results(attend, given, **DROPOUT)
    for placements in ([Shard(0)], [Shard(2)]):
        spread = {name: placed(x, mesh, placements) for name, x in given.items()}
        for x, wanted in zip(results(fast, spread, **DROPOUT), right, strict=True):
            assert torch.equal(x.full_tensor(), wanted)


@case
def what_is_refused() -> None:
    spread = {name: placed(x, line(), [Shard(0)]) for name, x in eight_heads().items()}
    refused("but no seed is given", lambda: anyflash.torch.attention(**spread, dropout_p=0.5))
    options = (None, False, -1, -1, 0.0, 128, 128, 0.5, 3, 0)
    refused(
        "total_heads is 0; 8 is allowed",
        lambda: torch.ops.anyflash.forward(
            *(*spread.values(), *(None,) * 9, 0, 0, False, *options, 0, 0, 0, False),
            *(True, False, False, None),
        ),
    )


def main() -> None:
    ranks.begin()
    ranks.run_cases(CASES)


if __name__ == "__main__":
    main()
