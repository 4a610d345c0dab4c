"""Attention of DTensors with a KV cache on two or four ranks, beside that of the whole tensors.

python -m calls.dtensor_kvcache FOLDER RANK 2
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from anyflash.torch import attention_varlen_with_kvcache, attention_with_kvcache
from calls.dtensor_cases import placed, refused
from calls.kvcache import angles, call, latent
from run import ranks

CASES: dict[str, Callable[[], None]] = {}
CACHES = ("k_cache", "v_cache")
BATCHED = ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "block_table", "rotary_seqlens")
WHOLE = Replicate()


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def line() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def square() -> Any:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2))


def of(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(x) for name, x in arguments.items() if isinstance(x, np.ndarray)}


def tensors(**options: Any) -> dict[str, Any]:
    """Of 8 heads, 4 of keys, and three sequences."""
    return of(call(heads=(8, 4), **options))


def spread(given: dict[str, Any], mesh: Any, kinds: str) -> dict[str, Any]:
    """`kinds`: what each axis of the mesh divides, b the batch, h the heads, . nothing."""
    shared = "block_table" in given or "cache_batch_idx" in given
    axes: dict[str, dict[str, int]] = {name: {"b": 0} for name in BATCHED}
    axes |= {name: {"b": 0, "h": 2} for name in ("q", "k", "v", *CACHES)}
    if shared:
        axes |= {name: {"h": 2} for name in CACHES}
    if given["k_cache"].shape[2] == 1:  # for all of q's heads
        axes |= {name: {"b": 0} for name in ("k", "v")}
        axes |= {name: {} if shared else {"b": 0} for name in CACHES}
    axes |= {"sinks": {"h": 0}, "alibi_slopes": {"b": 0, "h": 1}, "k_scale": {"h": 0}}

    def placements(name: str) -> list[Any]:
        of = axes.get(name, {})
        return [Shard(of[kind]) if kind in of else WHOLE for kind in kinds]

    return {name: placed(x, mesh, placements(name)) for name, x in given.items()}


def same(given: dict[str, Any], mesh: Any, kinds: str, **options: Any) -> None:
    """Results, and what becomes of the caches, bit for bit."""
    options |= {"split_size": 64, "return_lse": True}
    sharded = spread(given, mesh, kinds)
    names = [name for name in CACHES if name in given]
    caches = [sharded[name].to_local().data_ptr() for name in names]
    whole = {name: x.clone() for name, x in given.items()}
    right = attention_with_kvcache(**whole, **options)
    with CommDebugMode() as communication:
        found = attention_with_kvcache(**sharded, **options)
    assert communication.get_total_counts() == 0, communication.get_comm_counts()
    assert found[0].placements == sharded["q"].placements
    assert caches == [sharded[name].to_local().data_ptr() for name in names]
    pairs = [*zip(found, right, strict=True), *((sharded[x], whole[x]) for x in names)]
    # A CPU computes the few rows that a rank has of a group in another order.
    digits = 1e-5 if given["k_cache"].shape[2] == 1 else 0
    for i, (x, wanted) in enumerate(pairs):
        assert x.shape == wanted.shape
        torch.testing.assert_close(
            x.full_tensor(), wanted, rtol=digits * (i < 2), atol=digits * (i < 2), equal_nan=True
        )


@case
def batch() -> None:
    if dist.get_world_size() == 2:
        same(tensors(), line(), "b", causal=True)
    else:
        same(tensors(), square(), "b.", causal=True)


@case
def heads() -> None:
    same(tensors(), line(), "h", causal=True)
    same(tensors(), line(), "h", window_size=(3, 0))


@case
def packed() -> None:
    """Sequences of 2, 0 and 4 queries; the heads alone may be sharded."""
    given = tensors(page_size=4)
    ends = torch.tensor([0, 2, 2, 6], dtype=torch.int32)
    rows = {name: given[name].flatten(0, 1) for name in ("q", "k", "v")}
    shards = {name: [Shard(1 if name in rows else 2)] for name in (*rows, *CACHES)}
    new = torch.arange(4, dtype=torch.int32) * (len(rows["k"]) // 3)
    given |= rows | {"cu_seqlens_q": ends, "cu_seqlens_k_new": new}
    mesh = line()
    sharded = {name: placed(x, mesh, shards.get(name, [WHOLE])) for name, x in given.items()}
    right, right_lse = attention_varlen_with_kvcache(**given, causal=True, return_lse=True)
    with CommDebugMode() as communication:
        out, lse = attention_varlen_with_kvcache(**sharded, causal=True, return_lse=True)
    assert communication.get_total_counts() == 0
    assert (out.placements, lse.placements) == ((Shard(1),), (Shard(0),))
    for x, wanted in ((out, right), (lse, right_lse), *((sharded[n], given[n]) for n in CACHES)):
        torch.testing.assert_close(x.full_tensor(), wanted, equal_nan=True)
    sharded["q"] = placed(given["q"], mesh, [Shard(0)])
    refused("along a mesh axis Shard(1) (heads)", lambda: attention_varlen_with_kvcache(**sharded))


@case
def replicated() -> None:
    same(tensors(), line(), ".")


@case
def both() -> None:
    for kinds in ("bh", "hb", ".h", "b.", "hh"):
        same(tensors(), square(), kinds, causal=True)


@case
def pages() -> None:
    same(tensors(page_size=4), line(), "h", causal=True)
    read = {name: x for name, x in tensors(page_size=4).items() if name not in ("k", "v")}
    same(read, square(), "bh")
    same(read, square(), "hb", causal=True)


@case
def options() -> None:
    given = tensors()
    cos, sin = (torch.from_numpy(x) for x in angles(16, 5))
    rotary = {"rotary_cos": cos, "rotary_sin": sin}
    others = {
        "rotary_seqlens": torch.tensor([2, 0, 4], dtype=torch.int32),
        "cache_leftpad": torch.tensor([2, 0, 5], dtype=torch.int32),
        "sinks": torch.linspace(-1, 1, 8),
        "alibi_slopes": torch.linspace(0.1, 1, 24).reshape(3, 8),
    }
    same(given | rotary | others, square(), "bh", causal=True)
    tree = torch.ones(3, 2, 2, dtype=torch.bool)
    tree[1, 0, 0] = False
    same(given | {"tree_mask": tree}, square(), "bh")
    same(given | {"tree_mask": tree[1]}, line(), "h")
    places = {"cache_batch_idx": torch.tensor([2, 0, 1], dtype=torch.int32)}
    same(given | places, line(), "h")
    read = {name: x for name, x in given.items() if name not in ("k", "v")}
    same(read | places, square(), "bh")


@case
def eight_bits() -> None:
    given = tensors(cache_dtype=np.int8)
    scale = torch.linspace(0.01, 0.04, 4)
    same(given | {"k_scale": scale}, line(), "h", causal=True)
    same(given | {"k_scale": scale, "v_scale": scale.expand(3, 4)}, square(), "bh")
    rows = given["k_cache"].shape[1]
    by_row = torch.linspace(0.01, 0.04, 12 * rows).reshape(3, rows, 4)
    same(given | {"k_scale": scale, "v_scale": by_row}, square(), "bh")


@case
def latent_rows() -> None:
    """One row for all heads, which every rank of them has."""
    options = {"v_cache": None, "head_dim_v": 12, "causal": True}
    whole = of(latent(heads=(8, 1)))
    same(whole, line(), "h", **options)
    same(whole, square(), "bh", **options)
    same(whole, square(), "b." if dist.get_world_size() == 4 else "..", **options)
    same(of(latent(heads=(8, 1), page_size=4)), line(), "h", **options)
    sharded = spread(whole, line(), "h")
    sharded["k_cache"] = placed(whole["k_cache"], line(), [Shard(1)])
    refused(
        "the placements of k_cache are",
        lambda: attention_with_kvcache(**sharded, v_cache=None, head_dim_v=12),
    )


@case
def one_length_and_no_lse() -> None:
    given = {name: x.nan_to_num() for name, x in tensors(new=0).items() if name != "cache_seqlens"}
    found = attention_with_kvcache(**spread(given, line(), "h"), cache_seqlens=5, split_size=64)
    right = attention_with_kvcache(**given, cache_seqlens=5, split_size=64)
    assert torch.equal(found.full_tensor(), right)


@case
def what_is_refused() -> None:
    mesh = line()

    def attempt(message: str, given: dict[str, Any], **others: Any) -> None:
        refused(message, lambda: attention_with_kvcache(**(given | others)))

    given = spread(tensors(), mesh, "h")
    whole = tensors()
    attempt("k is a Tensor, and q is a DTensor; a DTensor is allowed", given, k=whole["k"])
    attempt("the placements of q are", given, q=placed(whole["q"], mesh, [Shard(1)]))
    attempt("the placements of q are", given, q=placed(whole["q"], mesh, [Shard(3)]))
    partial = given["q"].from_local(whole["q"], mesh, [Partial()])
    attempt("along a mesh axis Shard(0) (batch), Shard(2) (heads)", given, q=partial)
    attempt(
        "the placements of k_cache are (Replicate(),); beside q's",
        given,
        k_cache=placed(whole["k_cache"], mesh, [WHOLE]),
    )
    attempt("on different meshes", given, v=spread(whole, square(), "hh")["v"])
    five = torch.zeros(3, 16, 5, 20), torch.zeros(3, 16, 5, 12)
    attempt(
        "q has 8 heads, the caches have 5",
        {name: x for name, x in given.items() if name not in ("k", "v")},
        **{name: placed(x, mesh, [WHOLE]) for name, x in zip(CACHES, five, strict=True)},
    )
    one = {name: x[:1] for name, x in whole.items()}
    attempt("the batch of 1 is sharded over", spread(one, mesh, "b"))

    batch = spread(tensors(), square(), "bb" if dist.get_world_size() == 2 else "b.")
    four = {name: torch.cat([whole[name], whole[name][:1]]) for name in CACHES}
    places = spread(whole | four, square(), "bb" if dist.get_world_size() == 2 else "b.")
    attempt("q has a batch of 3, sharded, and the caches have 4 places", batch | places)
    for name, x in (("block_table", tensors(page_size=4)), ("cache_batch_idx", whole)):
        if name not in x:
            x |= {name: torch.arange(3, dtype=torch.int32)}
        appends = spread(x, square(), "bb" if dist.get_world_size() == 2 else "b.")
        attempt(f"{name} is given, and so is k; ranks would append to different", appends)


@case
def compiled() -> None:
    given, mesh = tensors(), line()
    right = {name: x.clone() for name, x in given.items()}
    wanted = attention_with_kvcache(**right, causal=True, split_size=64)
    sharded = spread(given, mesh, "h")
    fast = torch.compile(attention_with_kvcache, backend="aot_eager", fullgraph=True)
    found = fast(**sharded, causal=True, split_size=64)
    assert torch.equal(found.full_tensor(), wanted)
    for name in CACHES:
        assert torch.equal(sharded[name].full_tensor().nan_to_num(), right[name].nan_to_num())


def main() -> None:
    ranks.begin()
    ranks.run_cases(CASES)


if __name__ == "__main__":
    main()
