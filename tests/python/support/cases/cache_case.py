"""What a case of attention with a cache is. The tables that every backend runs: kvcache.py.

Its values follow from its id. Every row of the cache that no query sees is NaN or infinity (in an
int8 cache the largest numbers), so are the scales of unused pages; entries of the block table that
belong to no row of a sequence are no pages.
"""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from backends.tensors import GUARD, Tensor, aligned_bytes, empty, place
from cases.auxiliary import int32_tensor
from cases.case import FULL, GPU_HEAD_DIM, VALUES
from oracle.attention import DTYPES, Array, unseen_keys
from oracle.kvcache import (
    CACHE_DTYPES,
    E4M3,
    EIGHT_BIT,
    INT8,
    LARGEST,
    Answer,
    CacheProblem,
    all_places,
    answer,
    dense,
    quantised,
)

EMULATED_TILES = 400 if FULL else 60
LATENT_HEAD_DIM = 576  # of keys whose first columns are the values
NO_PAGE = (-1, 1 << 30, -(1 << 31), (1 << 31) - 1)
# Keys and values in one storage: by turns after a page, a row, a head.
TOGETHER = ("pages_k_v", "rows_k_v", "heads_k_v")


class Append(NamedTuple):
    new: int = 1  # rows
    rotary: int = 0  # columns that are rotated
    neox: bool = False
    table_dtype: str = ""  # of cos and sin; q's
    spare: int = 0  # further rows of the tables
    seqlens: tuple[int, ...] = ()  # rotary_seqlens


@dataclass(frozen=True)
class CacheCase:
    id: str
    dtype: str = "fp16"
    lengths: tuple[int, ...] = (200,)  # filled rows, before an append
    sq: int = 1
    heads: int = 4
    heads_k: int = 2
    d: int = 64
    dv: int = 0  # 0: d
    latent: bool = False  # values are the first dv columns of the keys
    capacity: int = 0  # 0: as much as need be
    page: int = 0  # rows of a page; 0: not paged
    cache_dtype: str = ""  # q's, or a name of EIGHT_BIT
    scales: str = ""  # of an 8-bit cache: "head", "slot" or "row"
    leftpad: tuple[int, ...] = ()
    batch_idx: bool = False
    seqlens: bool = True  # False: no cache_seqlens, all rows are filled
    append: Append | None = None
    tree: str = ""  # "1" or "b": one tree, or one for each sequence
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    softcap: float = 0.0
    alibi: str = ""
    sinks: bool = False
    scale: float | None = None
    out_dtype: str = ""
    splits: int = 0
    split_size: int = 0
    layout: str = "contiguous"  # of the cache; or one of TOGETHER
    small_layout: str = "contiguous"  # of q, out, new rows, tables
    values: str = "normal"
    poison: bool = True
    smoke: bool = False

    @property
    def head_dim_v(self) -> int:
        return self.dv or self.d

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def new(self) -> int:
        return self.append.new if self.append else 0

    @property
    def rows(self) -> int:
        """Rows that a sequence has at most, in whole pages."""
        rows = max(self.capacity, max(self.lengths, default=0) + self.new, 1)
        return -(-rows // self.page) * self.page if self.page else rows

    @property
    def eight_bit(self) -> bool:
        return self.cache_dtype in EIGHT_BIT

    @property
    def cpu_only(self) -> bool:
        of_latent = LATENT_HEAD_DIM if self.latent else GPU_HEAD_DIM
        too_large = self.d > of_latent or self.head_dim_v > GPU_HEAD_DIM
        return self.dtype in ("fp32", "fp64") or too_large

    @property
    def empty(self) -> bool:
        return self.batch == 0 or self.sq == 0

    @property
    def tiles(self) -> float:
        """What it costs the emulator, in tiles of 128 rows x 64 keys x 64 columns."""
        rows = self.heads // self.heads_k * self.sq
        step = next((m for m in (16, 32) if rows <= m), 64)
        keys = sum(-(-(n + self.new) // 64) for n in self.lengths)
        columns = max(self.d, self.head_dim_v, 64) / 64
        return self.heads_k * -(-rows // step) * step / 128 * keys * columns

    @property
    def scores(self) -> int:
        return self.heads * self.sq * sum(n + self.new for n in self.lengths)

    def call(self) -> CacheCall:
        """Fresh tensors; out and lse are full of canaries."""
        return _Builder(self).call()

    def problem(self) -> CacheProblem:
        return self.call().problem()

    def expected(self) -> Answer:
        return _expected(self)


class CacheCall(NamedTuple):
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor | None  # None: latent
    out: Tensor
    lse: Tensor
    cache: dict[str, Any]  # fields of KvCacheOptions
    options: dict[str, Any]

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self[:5]

    @property
    def values(self) -> Array:
        """What the cache holds of them."""
        if self.v_cache is not None:
            return self.v_cache.view
        return self.k_cache.view[..., : self.cache["head_dim_v"]]

    def inputs(self) -> dict[str, Tensor]:
        """Tensors that no call writes to."""
        named = {"q": self.q, **self.cache, **self.options}
        return {name: x for name, x in named.items() if isinstance(x, Tensor)}

    def problem(self) -> CacheProblem:
        fields = {"k_cache": self.k_cache, **self.cache, **self.options}
        fields = {n: x.view if isinstance(x, Tensor) else x for n, x in fields.items()}
        fields["v_cache"] = self.values
        if self.v_cache is None:
            fields["v_scale"] = fields.get("k_scale")
        known = CacheProblem.__dataclass_fields__
        fields = {n: x for n, x in fields.items() if n in known and x is not None}
        return CacheProblem(self.q.view, **fields, out_dtype=self.out.view.dtype)


@functools.lru_cache(maxsize=64)
def _expected(case: CacheCase) -> Answer:
    return answer(case.problem())


def random_tree(random: np.random.Generator, nodes: int) -> Array:
    """[i, j]: whether node j is i or an ancestor of it; parents come before their children."""
    tree = np.eye(nodes, dtype=bool)
    for node in range(1, nodes):
        tree[node] |= tree[random.integers(node)]
    return tree


def together(k: Array, v: Array, how: str) -> tuple[Tensor, Tensor]:
    """k and v in one storage: page by page, row by row or head by head."""
    axis = TOGETHER.index(how) + 1
    shape = (*k.shape[:axis], 2, *k.shape[axis:])
    storage = aligned_bytes((2 * GUARD + 2 * k.size) * k.itemsize).view(k.dtype)
    strides = np.cumprod([1, *shape[:0:-1]])[::-1].tolist()
    step = strides.pop(axis)
    pair = tuple(Tensor(storage, k.shape, tuple(strides), GUARD + i * step) for i in range(2))
    pair[0].view[...], pair[1].view[...] = k, v
    return pair[0], pair[1]


class _Builder:
    def __init__(self, case: CacheCase) -> None:
        self.case = case
        self.random = np.random.default_rng(zlib.crc32(case.id.encode()))
        self.dtype = DTYPES[case.dtype]
        self.cache_dtype = CACHE_DTYPES[case.cache_dtype or case.dtype]
        self.columns = case.rows // case.page if case.page else 1
        if case.page:
            self.slots = case.batch * self.columns + 3
        else:
            self.slots = case.batch + (3 if case.batch_idx else 0)

    def normal(self, *shape: int) -> Array:
        return self.random.standard_normal(shape).astype(np.float32)

    def call(self) -> CacheCall:
        case = self.case
        heads = case.heads_k
        q = self.normal(case.batch, case.sq, case.heads, case.d)
        k = self.normal(case.batch, case.rows, heads, case.d)
        v = self.normal(case.batch, case.rows, heads, case.head_dim_v)
        VALUES[case.values](q, k, v)
        out_shape = (case.batch, case.sq, case.heads, case.head_dim_v)
        out_dtype = DTYPES[case.out_dtype or case.dtype]
        layout = case.small_layout
        bare = CacheCall(
            place(q.astype(self.dtype), layout),
            place(self.empty_cache(case.d), "contiguous"),
            None if case.latent else place(self.empty_cache(case.head_dim_v), "contiguous"),
            empty(out_shape, out_dtype, layout),
            empty((case.batch, case.heads, case.sq), DTYPES["fp32"], layout, "bhs"),
            self.cache_options(),
            self.options(),
        )
        self.fill(bare, k, v)
        if bare.v_cache is None:
            return bare._replace(k_cache=place(bare.k_cache.view, case.layout))
        if case.layout in TOGETHER:
            caches = together(bare.k_cache.view, bare.v_cache.view, case.layout)
        else:
            caches = place(bare.k_cache.view, case.layout), place(bare.v_cache.view, case.layout)
        return bare._replace(k_cache=caches[0], v_cache=caches[1])

    def empty_cache(self, columns: int) -> Array:
        case = self.case
        return np.zeros(
            (self.slots, case.page or case.rows, case.heads_k, columns), self.cache_dtype
        )

    def fill(self, call: CacheCall, k: Array, v: Array) -> None:
        """The caches' rows, and poison where nobody looks."""
        p = call.problem()
        used = all_places(p, p.first_row, p.lengths)
        unseen = (np.zeros(0, np.int64),) * 3
        if self.case.poison:
            hides = unseen_keys(dense(p, p.k_cache, p.v_cache))
            key, head = np.nonzero(hides)
            unseen = (used[0][key], used[1][key], head)
            seen = np.nonzero(~hides)
        for name, x in (("k", k),) if self.case.latent else (("k", k), ("v", v)):
            cache, scale = getattr(p, f"{name}_cache"), getattr(p, f"{name}_scale")
            self.hide(name, cache)
            for b, (pad, filled) in enumerate(zip(p.first_row, p.filled, strict=True)):
                rows = np.arange(pad, filled)
                where = p.places(b, rows)
                cache[where] = self.elements(x[b, rows], scale, where)
            nowhere = cache[unseen]
            self.hide(name, nowhere)
            cache[unseen] = nowhere
            if self.case.poison and scale is not None and scale.ndim > 1:
                places = scale.ndim - 1  # the axes that say where: slot, and row
                hidden = np.ones(scale.shape, bool)
                hidden[(*(at[seen[0]] for at in used[:places]), seen[1])] = False
                hidden[all_places(p, p.filled, np.full(len(p.q), p.seqlen_new))[:places]] = False
                # One that is largest would be a unit of the others.
                scale[hidden] = np.resize(np.float32([np.nan, 1e38, np.inf]), hidden.sum())

    def hide(self, name: str, x: Array) -> None:
        if not self.case.poison:
            x[...] = self.normal(*x.shape).astype(self.cache_dtype)
        elif self.cache_dtype == INT8:
            x[...] = 127 if name == "k" else -128
        else:
            x[...] = np.nan if name == "k" or self.cache_dtype == E4M3 else np.inf

    def elements(self, x: Array, scale: Array | None, where: tuple[Array, Array]) -> Array:
        if self.cache_dtype not in LARGEST:
            return x.astype(self.cache_dtype)
        if scale is None:
            x = x * (8 if self.cache_dtype == INT8 else 1)
        else:
            x = x / scale[where[: scale.ndim - 1]][..., None]
        return quantised(x, self.cache_dtype)

    def new_rows(self, columns: int) -> Tensor:
        case = self.case
        x = self.normal(case.batch, case.new, case.heads_k, columns)
        if case.eight_bit and not case.scales:
            x *= 8
        return place(x.astype(self.dtype), case.small_layout)

    def cache_options(self) -> dict[str, Any]:
        case = self.case
        cache: dict[str, Any] = {"num_splits": case.splits, "split_size": case.split_size}
        if case.latent:
            cache["head_dim_v"] = case.head_dim_v
        if case.seqlens:
            cache["cache_seqlens"] = int32_tensor(case.lengths)
        if case.batch_idx:
            cache["cache_batch_idx"] = int32_tensor(
                self.random.permutation(self.slots)[: case.batch]
            )
        if case.leftpad:
            cache["cache_leftpad"] = int32_tensor(case.leftpad)
        if case.page:
            cache["block_table"] = place(self.table(), case.small_layout, "bs")
        if case.tree:
            count = 1 if case.tree == "1" else case.batch
            trees = [random_tree(self.random, case.sq) for _ in range(count)]
            tree = np.array(trees, bool).reshape(count, case.sq, case.sq)
            cache["tree_mask"] = place(tree, case.small_layout, "bsd")
        if case.scales:
            count = ("head", "slot", "row").index(case.scales)
            shape = (*(self.slots, case.page or case.rows)[:count], case.heads_k)
            for name in ("k_scale",) if case.latent else ("k_scale", "v_scale"):
                unit = 1 / 32 if self.cache_dtype == INT8 else 1 / 64
                scale = unit * self.random.uniform(0.8, 1.6, shape).astype(np.float32)
                cache[name] = place(scale, axes=("h", "bh", "bsh")[count])
        if case.append:
            cache["k_new"] = self.new_rows(case.d)
            if not case.latent:
                cache["v_new"] = self.new_rows(case.head_dim_v)
            cache |= self.rotary(case.append)
        return cache

    def table(self) -> Array:
        case = self.case
        pages = self.random.permutation(self.slots)[: case.batch * self.columns]
        table = pages.reshape(case.batch, self.columns).astype(np.int32)
        for b, length in enumerate(case.lengths):
            used = -(-(length + case.new) // case.page)
            rest = self.columns - used
            table[b, used:] = self.random.choice([*NO_PAGE, self.slots], rest)
        return table

    def rotary(self, append: Append) -> dict[str, Any]:
        if not append.rotary:
            return {}
        case = self.case
        rows = case.rows + max(case.sq - case.new, 0) + append.spare
        seqlens = {}
        if append.seqlens:
            rows = max(append.seqlens) + max(case.sq, case.new) + append.spare
            seqlens["rotary_seqlens"] = int32_tensor(append.seqlens)
        frequency = 10000.0 ** (-np.arange(append.rotary // 2) / max(append.rotary // 2, 1))
        angle = np.arange(rows)[:, None] * frequency
        dtype = DTYPES[append.table_dtype or case.dtype]
        tables = {"rotary_cos": np.cos(angle), "rotary_sin": np.sin(angle)}
        placed = {n: place(x.astype(dtype), case.small_layout, "sd") for n, x in tables.items()}
        return placed | seqlens | {"rotary_neox": append.neox}

    def options(self) -> dict[str, Any]:
        case = self.case
        options: dict[str, Any] = {"softmax_scale": case.scale, "causal": case.causal}
        options["window_left"], options["window_right"] = case.window
        options["softcap"] = case.softcap
        if case.alibi:
            slopes = np.abs(0.3 * self.normal(max(case.batch, 1), case.heads))
            slopes[:, 1::2] *= -0.1  # what is far may also gain
            slopes = {"h": slopes[0], "1h": slopes[:1], "bh": slopes[: case.batch]}[case.alibi]
            options["alibi_slopes"] = place(slopes.astype(self.dtype), axes="bh"[-slopes.ndim :])
        if case.sinks:
            options["sinks"] = place(self.normal(case.heads).astype(self.dtype), axes="h")
        if case.eight_bit and not case.scales and case.scale is None:
            options["softmax_scale"] = 1 / (64 if case.cache_dtype == "int8" else 8)
        return options


def with_(case: CacheCase, name: str, **changes: Any) -> CacheCase:
    return replace(case, id=name, **changes)
