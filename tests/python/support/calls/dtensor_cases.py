"""Attention of DTensors on two ranks, beside attention of the whole tensors, which each rank makes.

python -m calls.dtensor_cases FOLDER RANK 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

import anyflash.torch
from run import ranks

CASES: dict[str, Callable[[], None]] = {}
Tensors = dict[str, torch.Tensor]
Placements = dict[str, Any]


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def placed(x: torch.Tensor, mesh: Any, placements: Any) -> Any:
    """Of a tensor that all ranks have, without communication."""
    whole = DTensor.from_local(x, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, placements).detach()


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def tensors(batch: int = 2, heads: int = 4, heads_k: int = 2) -> Tensors:
    return {
        "q": randn(batch, 5, heads, 8),
        "k": randn(batch, 7, heads_k, 8),
        "v": randn(batch, 7, heads_k, 6),
    }


def losses(out: Any, lse: Any) -> tuple[list[Any], list[Any]]:
    """What a backward begins with: outputs, and their gradients."""
    return [out, lse], [torch.cos(out.detach()), torch.sin(lse.detach())]


def compare(
    given: Tensors,
    mesh: Any,
    placements: Any,
    others: Placements | None = None,
    attend: Callable[..., Any] = anyflash.torch.attention,
    **options: Any,
) -> None:
    """Output, LSE and gradients of DTensors are those of whole tensors; nothing is communicated.

    `others` says where tensors lie besides q, k and v.
    """
    plain = {
        name: x.clone().requires_grad_() if x.is_floating_point() else x
        for name, x in given.items()
    }
    where = {"q": placements, "k": placements, "v": placements, **(others or {})}
    sharded = {name: placed(x, mesh, where[name]) for name, x in given.items()}
    for x in sharded.values():
        x.requires_grad_(x.is_floating_point())

    def run(given: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        out, lse = attend(**given, return_lse=True, **options)
        wanted = [name for name, x in given.items() if x.requires_grad]
        outputs, cotangents = losses(out, lse)
        grads = torch.autograd.grad(outputs, [given[name] for name in wanted], cotangents)
        return [out, lse], dict(zip(wanted, grads, strict=True))

    right, right_grads = run(plain)
    with CommDebugMode() as communication:
        found, grads = run(sharded)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    q = sharded["q"].placements
    assert found[0].placements == q
    for name, x in grads.items():
        kept = [
            old == new or (new.is_partial() and old.is_replicate())
            for old, new in zip(sharded[name].placements, x.placements, strict=True)
        ]
        assert all(kept), (name, x.placements)
        if name in ("q", "k", "v"):
            assert x.placements == q
    pairs = [*zip(found, right, strict=True), *((grads[n], right_grads[n]) for n in grads)]
    for x, wanted in pairs:
        size = placed(
            wanted.detach(), mesh, [p if p.is_shard() else Replicate() for p in x.placements]
        )
        if not any(p.is_partial() for p in x.placements):
            assert x.to_local().shape == size.to_local().shape
        torch.testing.assert_close(x.full_tensor(), wanted, rtol=1e-4, atol=1e-5)


def refused(message: str, function: Callable[[], Any]) -> None:
    try:
        function()
    except (RuntimeError, ValueError) as error:
        assert message in str(error), error
    else:
        raise AssertionError(f"not refused: {message}")


LINE: Any = None  # the mesh of both ranks
BATCH, HEADS, WHOLE = [Shard(0)], [Shard(2)], [Replicate()]


@case
def batch() -> None:
    compare(tensors(), LINE, BATCH, causal=True)


@case
def uneven_batch() -> None:
    compare(tensors(batch=3), LINE, BATCH, causal=True)


@case
def heads() -> None:
    compare(tensors(), LINE, HEADS, window_size=(3, 1), softmax_scale=0.3)


@case
def replicated() -> None:
    compare(tensors(heads=3, heads_k=1), LINE, WHOLE, softcap=5.0)


@case
def two_mesh_axes() -> None:
    for shape in ((1, 2), (2, 1)):
        mesh = init_device_mesh("cpu", shape)
        for placements in (
            [Shard(0), Shard(2)],
            [Shard(2), Shard(0)],
            [Replicate(), Shard(2)],
            [Shard(0), Replicate()],
            [Shard(0), Shard(0)],
        ):
            compare(tensors(), mesh, placements, causal=True)


@case
def packed() -> None:
    ends = torch.tensor([0, 2, 5], dtype=torch.int32)
    ends_k = torch.tensor([0, 4, 7], dtype=torch.int32)
    given = {name: x[0] for name, x in tensors().items()}
    given |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends_k}
    others = {"cu_seqlens_q": WHOLE, "cu_seqlens_k": WHOLE}
    options = {"max_seqlen_q": 3, "max_seqlen_k": 4}
    attend = anyflash.torch.attention_varlen
    compare(given, LINE, [Shard(1)], others, attend, **options)
    compare(given, LINE, WHOLE, others, attend, **options)
    arguments = {name: placed(x, LINE, others.get(name, BATCH)) for name, x in given.items()}
    refused(
        "along a mesh axis Shard(1) (heads) and Replicate() work",
        lambda: attend(**arguments, **options),
    )


@case
def bias_and_its_gradient() -> None:
    for shape, by_batch, by_heads in (
        ((4, 5, 7), Replicate(), Shard(0)),
        ((5, 7), Replicate(), Replicate()),
        ((1, 4, 5, 7), Replicate(), Shard(1)),
        ((2, 1, 5, 7), Shard(0), Replicate()),
        ((2, 4, 5, 7), Shard(0), Shard(1)),
    ):
        given = tensors() | {"bias": randn(*shape)}
        compare(given, LINE, BATCH, {"bias": [by_batch]})
        compare(given, LINE, HEADS, {"bias": [by_heads]})
        # What is whole is cut, which needs no communication.
        for placements in (BATCH, HEADS):
            attend_only(given, placements, {"bias": WHOLE})


def attend_only(given: Tensors, placements: Any, others: Placements) -> None:
    where = {"q": placements, "k": placements, "v": placements, **others}
    sharded = {name: placed(x, LINE, where[name]) for name, x in given.items()}
    with CommDebugMode() as communication:
        out = anyflash.torch.attention(**sharded)
    assert communication.get_total_counts() == 0
    torch.testing.assert_close(out.full_tensor(), anyflash.torch.attention(**given))


@case
def sinks_and_slopes() -> None:
    for slopes, by_batch, by_heads in (
        ((4,), Replicate(), Shard(0)),
        ((2, 4), Shard(0), Shard(1)),
    ):
        given = tensors() | {"sinks": randn(4), "alibi_slopes": randn(*slopes).abs()}
        compare(given, LINE, BATCH, {"sinks": WHOLE, "alibi_slopes": [by_batch]})
        compare(given, LINE, HEADS, {"sinks": [Shard(0)], "alibi_slopes": [by_heads]})
        compare(given, LINE, WHOLE, {"sinks": WHOLE, "alibi_slopes": WHOLE})


@case
def masks() -> None:
    blocks = torch.arange(2 * 4 * 3).reshape(2, 4, 1, 3) % 5 != 0
    blocks[..., 0] = True
    given = tensors() | {
        "k": randn(2, 130, 2, 8),
        "v": randn(2, 130, 2, 6),
        "block_mask": blocks,
        "seqused_k": torch.tensor([130, 70], dtype=torch.int32),
        "key_ranges": torch.arange(2 * 2 * 130 * 2).reshape(2, 2, 130, 2).remainder(90).int(),
    }
    options = {"block_size": (64, 64)}
    of_batch = {"block_mask": BATCH, "seqused_k": BATCH, "key_ranges": BATCH}
    compare(given, LINE, BATCH, of_batch, **options)
    of_heads = {"block_mask": [Shard(1)], "seqused_k": WHOLE, "key_ranges": [Shard(1)]}
    compare(given, LINE, HEADS, of_heads, **options)


@case
def largest_scores() -> None:
    given = tensors()
    right = anyflash.torch.attention(**given, return_max_logits=True).max_logits
    for placements, wanted in ((BATCH, (Shard(0),)), (HEADS, (Shard(1),)), (WHOLE, (Replicate(),))):
        sharded = {name: placed(x, LINE, placements) for name, x in given.items()}
        found = anyflash.torch.attention(**sharded, return_max_logits=True).max_logits
        assert found.placements == wanted
        torch.testing.assert_close(found.full_tensor(), right)


@case
def the_gradient_comes_in_another_placement() -> None:
    """It is redistributed: nobody could do that in the midst of a backward."""
    given = tensors()
    plain = [x.clone().requires_grad_() for x in given.values()]
    out = anyflash.torch.attention(*plain)
    dout = randn(*out.shape)
    right = torch.autograd.grad(out, plain, dout)
    two = init_device_mesh("cpu", (1, 2))
    for mesh, where, placements in (
        (LINE, HEADS, WHOLE),
        (LINE, HEADS, [Shard(1)]),
        (LINE, HEADS, [Partial()]),
        (two, [Replicate(), Shard(2)], [Replicate()] * 2),
    ):
        sharded = [placed(x, mesh, where).requires_grad_() for x in given.values()]
        if placements[0].is_partial():
            whole = DTensor.from_local(dout / 2, mesh, placements)
        else:
            whole = placed(dout, mesh, placements)
        found = torch.autograd.grad(anyflash.torch.attention(*sharded), sharded, whole)
        for x, wanted in zip(found, right, strict=True):
            assert x.placements == tuple(where)
            torch.testing.assert_close(x.full_tensor(), wanted, rtol=1e-4, atol=1e-5)


@case
def as_pytorch_has_it() -> None:
    query, key, value = (x.transpose(1, 2).contiguous() for x in tensors().values())
    right = anyflash.torch.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    with CommDebugMode() as communication:
        found = anyflash.torch.scaled_dot_product_attention(
            *[placed(x, LINE, [Shard(1)]) for x in (query, key, value)], enable_gqa=True
        )
    assert communication.get_total_counts() == 0
    assert found.placements == (Shard(1),)
    torch.testing.assert_close(found.full_tensor(), right)


@case
def compiled() -> None:
    attend = anyflash.torch.attention
    sharded = [placed(x, LINE, HEADS).requires_grad_() for x in tensors().values()]
    results = []
    for function in (attend, torch.compile(attend, backend="aot_eager", fullgraph=True)):
        out = function(*sharded, causal=True)
        results.append([out, *torch.autograd.grad(out, sharded, torch.cos(out.detach()))])
    for x, wanted in zip(*results, strict=True):
        assert x.placements == wanted.placements == tuple(HEADS)
        assert torch.equal(x.to_local(), wanted.to_local())


@case
def what_is_refused() -> None:
    attend = anyflash.torch.attention

    def call(*placements: Any, **shape: int) -> Callable[[], Any]:
        where = placements if len(placements) == 3 else placements * 3
        given = [
            placed(x, LINE, [p]) for x, p in zip(tensors(**shape).values(), where, strict=True)
        ]
        return lambda: attend(*given)

    advice = "To do: redistribute them, or call it on local tensors"
    for placement in (Shard(1), Shard(3)):
        refused("along a mesh axis Shard(0) (batch), Shard(2) (heads)", call(placement))
        refused(advice, call(placement))
    partial = [DTensor.from_local(x, LINE, [Partial()]) for x in tensors().values()]
    refused(advice, lambda: attend(*partial))
    refused("the placements differ", call(Shard(2), Replicate(), Replicate()))
    refused(advice, call(Shard(2), Replicate(), Replicate()))
    refused("q has 4 heads, k and v have 1, and", call(Shard(2), heads_k=1))
    refused("the batch of 1 is sharded over 2 ranks", call(Shard(0), batch=1))


def main() -> None:
    global LINE  # noqa: PLW0603
    _, world_size = ranks.begin()
    LINE = init_device_mesh("cpu", (world_size,))
    ranks.run_cases(CASES)


if __name__ == "__main__":
    main()
