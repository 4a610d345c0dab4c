"""Context parallelism beside tensor parallelism, two ranks each way: a rank has some rows, and some
heads or batch entries. Beside attention of the whole, which each rank makes alone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import anyflash.torch
from anyflash.torch.distributed import ContextParallel
from calls.context_parallel import METHODS, check_lse, compare, randn
from calls.dtensor_cases import refused

CASES: dict[str, Callable[[], None]] = {}
ROWS, HEADS, HEADS_K = 150, 8, 4
HEADWISE, BATCHES = [Shard(2)], [Shard(0)]
DROPOUT = {"dropout_p": 0.3, "seed": 12345}
Named = dict[str, Any]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[f"dtensors: {function.__name__}"] = function
    return function


@functools.cache
def mesh() -> Any:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))


def shared(method: str = "ring", layout: str = "zigzag", multiple: int = 8) -> ContextParallel:
    return ContextParallel(mesh()["cp"], method=method, layout=layout, multiple=multiple)


def tensors(batch: int = 2) -> Named:
    return {
        "q": randn(batch, ROWS, HEADS, 8),
        "k": randn(batch, ROWS, HEADS_K, 8) + 0.1,
        "v": randn(batch, ROWS, HEADS_K, 12) - 0.2,
    }


def placed(x: torch.Tensor, placements: Any) -> Any:
    """Of a tensor that all ranks of tensor parallelism have, without communication."""
    whole = DTensor.from_local(x, mesh()["tp"], [Replicate()], run_check=False)
    return whole.redistribute(placements=placements).detach()


def rows_of(cp: ContextParallel, name: str, x: torch.Tensor, axis: int = 1) -> torch.Tensor:
    """This rank's of the whole."""
    if name == "bias" and x.shape[2] != 1:
        return cp.shard(x, 2)
    return cp.shard(x, axis) if name in "qkv" else x


def gradients(given: Named, out: Any, lse: Any, dout: Any, dlse: Any) -> Named:
    wanted = {name: x for name, x in given.items() if x.requires_grad}
    found = torch.autograd.grad([out, lse], list(wanted.values()), [dout, dlse])
    return dict(zip(wanted, found, strict=True))


def leaves(given: Named) -> Named:
    return {
        name: x.detach().requires_grad_() if x.is_floating_point() else x
        for name, x in given.items()
    }


def same(cp: ContextParallel, given: Named, where: Named, axis: int = 1, **options: Any) -> None:
    """``where`` has the placements of tensors, those of q, k and v by "qkv". ``axis`` counts
    rows: with 0 they are packed."""
    packed = axis == 0
    attend = anyflash.torch.attention_varlen if packed else anyflash.torch.attention
    whole = leaves(given)
    out, lse = attend(**whole, **options, return_lse=True)
    dout = torch.cos(out.detach())
    dlse = torch.where(torch.isinf(lse), 0.0, torch.sin(lse)).detach()
    grads = gradients(whole, out, lse, dout, dlse)

    headwise = where["qkv"]
    spread = leaves(
        {
            name: placed(
                rows_of(cp, name, x, axis),
                headwise if name in "qkv" else where.get(name, [Replicate()]),
            )
            for name, x in given.items()
        }
    )
    call = cp.attention_varlen if packed else cp.attention
    found, found_lse = call(**spread, **options, seqlen=ROWS, return_lse=True)
    lse_placements = [
        p if p.is_replicate() else Shard(0 if packed or p.dim == 0 else 1) for p in headwise
    ]
    assert found.placements == tuple(headwise)
    assert found_lse.placements == tuple(lse_placements)
    my_dout = placed(cp.shard(dout, axis), headwise)
    my_dlse = placed(cp.shard(dlse, axis + 1), lse_placements)
    mine = gradients(spread, found, found_lse, my_dout, my_dlse)
    full = {name: x.full_tensor() for name, x in mine.items()}
    for name, grad in full.items():
        if rows_of(cp, name, given[name], axis) is given[name]:  # a rank has its share
            torch.distributed.all_reduce(grad, group=mesh()["cp"].get_group())
    compare("out", found.full_tensor(), cp.shard(out.detach(), axis), 1e-12)
    check_lse(found_lse.full_tensor(), cp.shard(lse.detach(), axis + 1), torch.float64)
    for name, grad in grads.items():
        compare(f"d{name}", full[name], rows_of(cp, name, grad, axis), 1e-6)


@case
def heads() -> None:
    for method in METHODS:
        same(shared(method), tensors(), {"qkv": HEADWISE}, causal=True, **DROPOUT)


@case
def batch() -> None:
    for method in METHODS:
        same(shared(method), tensors(3), {"qkv": BATCHES}, causal=True, **DROPOUT)


@case
def nothing() -> None:
    same(shared(), tensors(), {"qkv": [Replicate()]}, **DROPOUT)


@case
def other_tensors() -> None:
    given = tensors() | {
        "bias": randn(2, HEADS, ROWS, ROWS),
        "sinks": randn(HEADS),
        "alibi_slopes": randn(2, HEADS).abs(),
        "seqused_k": torch.tensor([100, 150]).int(),
    }
    headwise = {"bias": [Shard(1)], "sinks": [Shard(0)], "alibi_slopes": [Shard(1)]}
    for method in METHODS:
        same(shared(method), given, {"qkv": HEADWISE, **headwise}, causal=True, **DROPOUT)
    # What is whole is cut.
    same(shared(), given, {"qkv": HEADWISE})
    same(shared(), given, {"qkv": BATCHES, "bias": BATCHES, "seqused_k": BATCHES})


@case
def broadcast_tensors() -> None:
    """Their gradients are sums over the ranks."""
    given = tensors() | {"bias": randn(1, 1, ROWS, ROWS), "sinks": randn(HEADS)}
    for where in (HEADWISE, BATCHES):
        for method in METHODS:
            same(shared(method), given, {"qkv": where}, causal=True)


@case
def masks() -> None:
    given = tensors() | {
        "block_mask": randn(1, HEADS, 3, 3) > -0.7,
        "key_ranges": torch.arange(2 * HEADS_K * ROWS * 2).reshape(2, HEADS_K, ROWS, 2) % 149,
    }
    given["key_ranges"] = given["key_ranges"].int()
    for where in (HEADWISE, BATCHES):
        same(shared(multiple=64), given, {"qkv": where}, block_size=(64, 64), softcap=3.0)


@case
def packed() -> None:
    ends = torch.tensor([0, 5, 5, 90, ROWS], dtype=torch.int32)
    given = {name: x[0] for name, x in tensors(1).items()}
    given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "sinks": randn(HEADS)}
    options = {"max_seqlen_q": 85, "max_seqlen_k": 85, "causal": True}
    same(shared("ring"), given, {"qkv": [Shard(1)]}, 0, **options)
    for method in ("gather", "ulysses"):
        same(shared(method), given, {"qkv": [Shard(1)]}, 0, **options, **DROPOUT)


@case
def plain_tensors() -> None:
    """Local heads, or batch entries, of which the caller says which they are."""
    whole = leaves(tensors(3))
    for axis, sizes in (
        (2, {"q": HEADS, "k": HEADS_K, "v": HEADS_K}),
        (0, dict.fromkeys("qkv", 3)),
    ):
        for method in METHODS:
            cp = shared(method)
            out = anyflash.torch.attention(**whole, **DROPOUT, causal=True)
            dout = torch.cos(out.detach())
            grads = torch.autograd.grad(out, whole.values(), dout)
            rank = mesh()["tp"].get_local_rank()

            def part(name: str, x: Any, axis: int = axis, sizes: Any = sizes, r: int = rank) -> Any:
                return x.tensor_split([-(-sizes[name] // 2)], axis)[r].detach()

            mine = leaves({name: part(name, cp.shard(x)) for name, x in whole.items()})
            first = part("q", torch.arange(sizes["q"]).view(*(1,) * axis, -1)).flatten()[0].item()
            offsets = (
                {"head_start": first, "total_heads": HEADS} if axis else {"batch_start": first}
            )
            found = cp.attention(**mine, **DROPOUT, **offsets, causal=True, seqlen=ROWS)
            mine_grads = torch.autograd.grad(found, mine.values(), part("q", cp.shard(dout)))
            compare("out", found, part("q", cp.shard(out)), 1e-12)
            for name, grad, right in zip("qkv", mine_grads, grads, strict=True):
                compare(f"d{name}", grad, part(name, cp.shard(right)), 1e-6)


@case
def largest_scores() -> None:
    given, options = tensors(), {"causal": True, "window_size": (30, 0), "return_max_logits": True}
    right = anyflash.torch.attention(**given, **options).max_logits
    for method in METHODS:
        cp = shared(method)
        for where, wanted in ((HEADWISE, Shard(1)), (BATCHES, Shard(0))):
            mine = {name: placed(cp.shard(x), where) for name, x in given.items()}
            found = cp.attention(**mine, **options).max_logits
            assert found.placements == (wanted,)
            assert torch.equal(found.full_tensor(), right)


@case
def shards_of_them() -> None:
    x = randn(3, ROWS, HEADS, 8)
    for where in (HEADWISE, BATCHES):
        spread = placed(x, where).requires_grad_()
        cp = shared()
        mine = cp.shard(spread)
        assert mine.placements == tuple(where)
        assert torch.equal(mine.full_tensor(), cp.shard(x))
        whole = cp.unshard(mine, length=ROWS)
        assert whole.placements == tuple(where)
        assert torch.equal(whole.full_tensor(), x)
        (grad,) = torch.autograd.grad(whole, spread, placed(x, where))
        assert grad.placements == tuple(where)
        mask = torch.zeros(ROWS)
        mask[cp.positions(ROWS)] = 2  # what both ranks have for its rows
        compare("dx", grad.full_tensor(), x * mask[:, None, None], 1e-15)


@case
def the_gradient_comes_in_another_placement() -> None:
    whole = leaves(tensors())
    out = anyflash.torch.attention(**whole, causal=True)
    dout = torch.cos(out.detach())
    grads = torch.autograd.grad(out, whole.values(), dout)
    cp = shared()
    partial = DTensor.from_local(cp.shard(dout) / 2, mesh()["tp"], [Partial()])
    for given in (*(placed(cp.shard(dout), [p]) for p in (Replicate(), Shard(1))), partial):
        spread = leaves({name: placed(cp.shard(x), HEADWISE) for name, x in whole.items()})
        found = cp.attention(**spread, causal=True)
        mine = torch.autograd.grad(found, spread.values(), given)
        for name, grad, right in zip("qkv", mine, grads, strict=True):
            assert grad.placements == tuple(HEADWISE)
            compare(f"d{name}", grad.full_tensor(), cp.shard(right), 1e-6)


@case
def tensors_on_their_way() -> None:
    """They come from an exchange that nobody has waited for; its gradients go back."""
    whole = leaves(tensors())
    out = anyflash.torch.attention(**whole, causal=True)
    dout = torch.cos(out.detach())
    grads = torch.autograd.grad(out, whole.values(), dout)
    cp, whole_tensor = shared(), [Replicate()]
    spread = leaves({name: placed(cp.shard(x), BATCHES) for name, x in whole.items()})
    moving = {n: x.redistribute(placements=whole_tensor, async_op=True) for n, x in spread.items()}
    assert hasattr(moving["q"].to_local(), "trigger_wait")
    found = cp.attention(**moving, causal=True)
    compare("out", found.full_tensor(), cp.shard(out.detach()), 1e-12)
    mine = torch.autograd.grad(found, spread.values(), placed(cp.shard(dout), whole_tensor))
    for name, grad, right in zip("qkv", mine, grads, strict=True):
        compare(f"d{name}", grad.full_tensor(), cp.shard(right), 1e-6)


@case
def what_is_refused() -> None:
    cp, given = shared(), tensors()

    def call(where: Named, batch: int = 2, **options: Any) -> Callable[[], Any]:
        mine = {name: cp.shard(x) for name, x in tensors(batch).items()}
        mine |= {name: placed(x, where[name]) for name, x in mine.items() if where.get(name)}
        return lambda: cp.attention(**mine, **options, seqlen=ROWS)

    def alike(placement: Any) -> Named:
        return {name: [placement] for name in "qkv"}

    headwise = alike(Shard(2))
    for placement in (Shard(1), Shard(3)):
        refused("Shard(2) (heads) and Shard(0) (batch) and Replicate() are", call(alike(placement)))
        refused("for its rows, call shard() instead", call(alike(placement)))
    refused("the placements differ", call(headwise | {"k": [Replicate()]}))
    refused("q is a DTensor and v is not", call(headwise | {"v": None}))
    refused("k is a DTensor and q is not", call({"k": [Replicate()]}))
    refused("q is a DTensor and sinks is not", call(headwise, sinks=randn(HEADS)))
    refused("each needs an entry", call(alike(Shard(0)), batch=1))
    refused("Pass seed, the same on every rank", call(headwise, dropout_p=0.5))
    refused("q is a DTensor, and batch_start, head_start", call(headwise, head_start=4))
    refused("total_heads is 8, and q has heads 4 to 11", call({}, head_start=4, total_heads=8))
    refused("head_start is 4, and total_heads is not given", call({}, head_start=4))
    partial = [DTensor.from_local(x, mesh()["tp"], [Partial()]) for x in given.values()]
    refused("To do: redistribute it", lambda: cp.attention(*partial, seqlen=ROWS))
    square = [
        DTensor.from_local(cp.shard(x), mesh(), [Replicate(), Shard(2)], run_check=False)
        for x in given.values()
    ]
    rank = torch.distributed.get_rank() % 2
    refused(
        f"q is a DTensor on a mesh with ranks {rank} and {rank + 2}, which share a sequence",
        lambda: cp.attention(*square, seqlen=ROWS),
    )
