"""Cases of attention with a cache whose sequences have different numbers of queries.

Each sequence is a CacheCase of its own, with its own answer; the call has their tensors one after
the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from backends.tensors import Tensor, empty, place
from cases.auxiliary import int32_tensor
from cases.cache_case import Append, CacheCall, CacheCase
from oracle.attention import Array
from oracle.kvcache import Answer, answer


class Row(NamedTuple):
    """A sequence: filled rows of the cache, queries, and new keys."""

    filled: int
    queries: int
    new: int = 0
    leftpad: int = 0


@dataclass(frozen=True)
class PackedCase:
    id: str
    rows: tuple[Row, ...]
    base: CacheCase  # whose lengths, sq and append.new do not count
    max_seqlen: int = 0  # 0: not given
    own_new: bool = False  # new keys are as many as queries, and cu_seqlens_k_new is not given
    smoke: bool = False

    @property
    def cases(self) -> list[CacheCase]:
        """One for each sequence."""
        base = self.base
        capacity = max([base.capacity, *(row.filled + row.new for row in self.rows)])
        found = []
        for i, row in enumerate(self.rows):
            append = None
            if base.append is not None:
                seqlens = base.append.seqlens[i : i + 1]
                append = base.append._replace(new=row.new, seqlens=seqlens)
            leftpad = (row.leftpad,) if base.leftpad else ()
            changes: dict[str, Any] = {"append": append, "leftpad": leftpad, "capacity": capacity}
            one = replace(base, id=f"{self.id}-{i}", lengths=(row.filled,), **changes)
            found.append(replace(one, sq=row.queries))
        return found

    def call(self) -> PackedCall:
        """Fresh tensors; out and lse are full of canaries."""
        return _pack(self)


class PackedCall(NamedTuple):
    call: CacheCall
    parts: list[CacheCall]  # of each sequence alone, with copies of what it reads
    answers: list[Answer]
    ends: Array  # cu_seqlens_q
    slots: Array  # the first slot of each sequence in the caches


def _joined(parts: list[CacheCall], name: str, axis: int = 0) -> Array:
    return np.concatenate([part.cache[name].view for part in parts], axis)


def _table(parts: list[CacheCall], slots: Array) -> Array:
    """Pages count in the joined cache; what is no page stays none."""
    tables = []
    for part, first in zip(parts, slots, strict=False):
        table = part.cache["block_table"].view
        is_page = (table >= 0) & (table < len(part.k_cache.view))
        tables.append(np.where(is_page, table + first, -1))
    return np.concatenate(tables).astype(np.int32)


def _tree(parts: list[CacheCall], columns: int) -> Array:
    """(total_q, columns): of each sequence's own keys, and nothing of those that it lacks."""
    rows = []
    for part in parts:
        tree = part.cache["tree_mask"].view[0]
        rows.append(np.pad(tree, ((0, 0), (0, columns - len(tree)))))
    return np.concatenate(rows)


def _share(parts: list[CacheCall]) -> list[CacheCall]:
    """What all sequences have in common is the first one's; the longest rotary tables are."""
    shared = {name: parts[0].options[name] for name in ("sinks",) if name in parts[0].options}
    tables: dict[str, Tensor] = {}
    for name in ("rotary_cos", "rotary_sin"):
        if name in parts[0].cache:
            tables[name] = max((part.cache[name] for part in parts), key=lambda x: len(x.view))
    return [
        part._replace(options=part.options | shared, cache=part.cache | tables) for part in parts
    ]


def _pack(packed: PackedCase) -> PackedCall:
    cases, base = packed.cases, packed.base
    parts = _share([case.call() for case in cases])
    first = parts[0]
    ends = np.cumsum([0, *(case.sq for case in cases)]).astype(np.int32)
    slots = np.cumsum([0, *(len(part.k_cache.view) for part in parts)])
    cache = {n: x for n, x in first.cache.items() if not isinstance(x, Tensor)}
    cache |= {n: first.cache[n] for n in ("rotary_cos", "rotary_sin") if n in first.cache}
    for name in ("cache_seqlens", "cache_leftpad", "rotary_seqlens"):
        if name in first.cache:
            cache[name] = int32_tensor(_joined(parts, name))
    for name in ("k_new", "v_new"):
        if name in first.cache:
            new = np.concatenate([part.cache[name].view[0] for part in parts])
            cache[name] = place(new, base.small_layout, "shd")
    if "k_new" in first.cache and not packed.own_new:
        cache["cu_seqlens_k_new"] = int32_tensor(np.cumsum([0, *(c.new for c in cases)]))
    if "block_table" in first.cache:
        cache["block_table"] = place(_table(parts, slots), axes="bs")
    if "cache_batch_idx" in first.cache:
        cache["cache_batch_idx"] = int32_tensor(_joined(parts, "cache_batch_idx") + slots[:-1])
    if "tree_mask" in first.cache:
        tree = _tree(parts, max(case.sq for case in cases))
        cache["tree_mask"] = place(tree, axes="sd")
    for name in ("k_scale", "v_scale"):
        if name in first.cache:
            scale = _joined(parts, name)
            cache[name] = place(scale, axes={2: "bh", 3: "bsh"}[scale.ndim])
    options = dict(first.options)
    if "alibi_slopes" in options:
        slopes = [part.options["alibi_slopes"].view for part in parts]
        options["alibi_slopes"] = place(np.concatenate(slopes), axes="bh")
    options["cu_seqlens_q"] = int32_tensor(ends)
    options["max_seqlen_q"] = packed.max_seqlen
    total, heads = int(ends[-1]), base.heads
    k_cache = np.concatenate([part.k_cache.view for part in parts])
    v_caches = [part.v_cache.view for part in parts if part.v_cache is not None]
    v_cache = place(np.concatenate(v_caches), base.layout) if v_caches else None
    out_dtype, layout = first.out.view.dtype, base.small_layout
    call = CacheCall(
        place(np.concatenate([part.q.view[0] for part in parts]), layout, "shd"),
        place(k_cache, base.layout),
        v_cache,
        empty((total, heads, base.head_dim_v), out_dtype, layout, "shd"),
        empty((heads, total), np.dtype(np.float32), layout, "hs"),
        cache,
        options,
    )
    return PackedCall(call, parts, [answer(part.problem()) for part in parts], ends, slots)


def _cases() -> Iterator[PackedCase]:
    base = CacheCase("", "fp16", causal=True, page=16, heads=4, heads_k=2)
    mixed = (Row(40, 40), Row(70, 1), Row(0, 0), Row(1, 1), Row(129, 5), Row(0, 1), Row(33, 70))
    appended = (Row(0, 40, 40), Row(70, 1, 1), Row(9, 0, 0), Row(128, 5, 5), Row(20, 70, 70))
    other = (Row(0, 3, 40), Row(70, 1, 0), Row(9, 0, 7), Row(128, 5, 2), Row(20, 70, 1))
    chunks = (Row(500, 70), Row(64, 1), Row(330, 129))  # whose keys are split
    singles = tuple(Row(n, 1) for n in (5, 64, 0, 200, 63))
    trees = (Row(40, 7, 7), Row(3, 1, 1), Row(90, 20, 20), Row(17, 0, 0))
    padded = (Row(40, 7, 7, 31), Row(3, 1, 1, 3), Row(90, 20, 20, 1), Row(17, 0, 0, 4))
    quantised = {"cache_dtype": "int8", "scales": "slot"}
    kinds: dict[str, tuple[tuple[Row, ...], dict[str, Any]]] = {
        "mixed": (mixed, {}),
        "mixed-full": (mixed, {"causal": False}),
        "mixed-window": (mixed, {"causal": False, "window": (20, 3)}),
        "mixed-unpaged": (mixed, {"page": 0}),
        "mixed-idx": (mixed, {"page": 0, "batch_idx": True}),
        "mixed-page1": (mixed, {"page": 1}),
        "mixed-splits3": (mixed, {"splits": 3}),
        "mixed-split-size": (mixed, {"split_size": 64}),
        "between-split-size": ((Row(200, 33), Row(90, 1)), {"split_size": 64}),
        "mixed-features": (mixed, {"softcap": 8.0, "alibi": "bh", "sinks": True}),
        "mixed-out32": (mixed, {"out_dtype": "fp32"}),
        "mixed-layout": (mixed, {"layout": "flip_s", "small_layout": "rows_odd"}),
        "mixed-d128": (mixed, {"d": 128}),
        "mixed-dv": (mixed, {"d": 40, "dv": 96}),
        "mixed-group1": (mixed, {"heads": 2}),
        "mixed-group40": (mixed[:5], {"heads": 40, "heads_k": 1}),
        "mixed-group70": (mixed[1:5], {"heads": 70, "heads_k": 1}),
        "singles": (singles, {}),
        "singles-splits": (singles, {"splits": 4}),
        "one-prompt": ((Row(0, 100, 100),), {"append": Append()}),
        "chunks": (chunks, {}),
        "chunks-full": (chunks, {"causal": False, "sinks": True}),
        "chunks-window": (chunks, {"causal": False, "window": (150, 10), "page": 64}),
        "chunks-features": (chunks, {"softcap": 8.0, "alibi": "bh", "sinks": True, "page": 0}),
        "chunks-out32": (chunks, {"out_dtype": "fp32", "page": 128}),
        "nothing": ((Row(5, 0), Row(0, 0)), {}),
        "append": (appended, {"append": Append(rotary=32, neox=True)}),
        "append-one": (appended, {"append": Append(rotary=32), "causal": False}),
        "append-other": (other, {"append": Append(rotary=16)}),
        "append-unpaged": (appended, {"append": Append(), "page": 0}),
        "append-seqlens": (other, {"append": Append(rotary=16, seqlens=(9, 3, 7, 300, 40))}),
        "leftpad": (padded, {"append": Append(rotary=64), "leftpad": (1,)}),
        "tree": (trees, {"append": Append(), "tree": "b"}),
        "tree-splits": (trees, {"append": Append(), "tree": "b", "splits": 2}),
        "int8": (mixed, quantised),
        "int8-append": (appended, {**quantised, "append": Append(rotary=32)}),
        "e4m3-append": (appended, {**quantised, "cache_dtype": "e4m3", "append": Append()}),
        "e5m2-append": (appended, {"cache_dtype": "e5m2", "scales": "row", "append": Append()}),
        "latent": (
            mixed[1:5],
            {"d": 576, "dv": 512, "latent": True, "heads": 16, "heads_k": 1, "page": 64},
        ),
        "d512": (mixed[1:5], {"d": 512}),
    }
    for name, (rows, changes) in kinds.items():
        own_new = name.startswith(("append", "one", "leftpad", "tree", "int8", "e4m3", "e5m2"))
        own_new &= all(row.queries == row.new for row in rows) and name != "append-one"
        for dtype in ("fp16", "bf16", "fp32"):
            case = replace(base, dtype=dtype, **changes)
            longest = 1 if name == "singles" else 0
            smoke = dtype == "fp16" and name in {"mixed", "append", "int8-append", "latent"}
            yield PackedCase(f"packed-{name}-{dtype}", rows, case, longest, own_new, smoke)


PACKED_CASES = tuple(_cases())
