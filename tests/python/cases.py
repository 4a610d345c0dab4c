"""The cases that every backend runs: one table.

A case is cheap to name and to repeat; its values follow from its id. What it costs the emulator is
counted in tiles of 128 queries x 64 keys x 64 columns, about 3 ms each.
"""

from __future__ import annotations

import functools
import itertools
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from oracle import DTYPES, Array, Reference, reference
from tensors import LAYOUTS, WRITABLE_LAYOUTS, Tensor, empty, place

FULL = os.environ.get("ANYFLASH_TEST_FULL") == "1"
EMULATED_TILES = 4000 if FULL else 200


class Layouts(NamedTuple):
    q: str = "contiguous"
    k: str = "contiguous"
    v: str = "contiguous"
    out: str = "contiguous"
    lse: str = "contiguous"


class Tensors(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True)
class Case:
    id: str
    dtype: str = "fp16"
    batch: int = 1
    sq: int = 64
    sk: int = 64
    heads: int = 2
    heads_k: int = 2
    d: int = 64
    dv: int = 0  # 0: d
    causal: bool = False
    scale: float | None = None
    layouts: Layouts = field(default_factory=Layouts)
    values: str = "normal"
    smoke: bool = False  # run under compute-sanitizer
    gpu_only: bool = False  # about a limit that only GPUs have

    @property
    def head_dim_v(self) -> int:
        return self.dv or self.d

    @property
    def empty(self) -> bool:
        return 0 in (self.batch, self.sq, self.heads)

    @property
    def tiles(self) -> float:
        blocks = -(-self.sq // 128) * -(-self.sk // 64)
        return self.batch * self.heads * blocks * max(self.d, self.head_dim_v, 64) / 64

    @property
    def scores(self) -> int:
        return self.batch * self.heads * self.sq * max(self.sk, 1)

    def values_of_inputs(self) -> tuple[Array, Array, Array]:
        random = np.random.default_rng(zlib.crc32(self.id.encode()))
        shapes = (
            (self.batch, self.sq, self.heads, self.d),
            (self.batch, self.sk, self.heads_k, self.d),
            (self.batch, self.sk, self.heads_k, self.head_dim_v),
        )
        q, k, v = (random.standard_normal(shape).astype(np.float32) for shape in shapes)
        VALUES[self.values](q, k, v)
        dtype = DTYPES[self.dtype]
        return q.astype(dtype), k.astype(dtype), v.astype(dtype)

    def tensors(self) -> Tensors:
        """Fresh ones; out and lse are full of NaN canaries."""
        q, k, v = map(place, self.values_of_inputs(), self.layouts[:3])
        out_shape = (self.batch, self.sq, self.heads, self.head_dim_v)
        out = empty(out_shape, DTYPES[self.dtype], self.layouts.out)
        lse_shape = (self.batch, self.heads, self.sq)
        lse = empty(lse_shape, DTYPES["fp32"], self.layouts.lse, "bhs")
        return Tensors(q, k, v, out, lse)

    def expected(self) -> Reference:
        return _expected(self)


@functools.lru_cache(maxsize=64)
def _expected(case: Case) -> Reference:
    q, k, v, *_ = case.tensors()
    return reference(q.view, k.view, v.view, case.scale, case.causal)


# Changes to standard normal float32 values, in place. Rows are (batch, seqlen, heads, head_dim).
VALUES: dict[str, Callable[[Array, Array, Array], object]] = {
    "normal": lambda q, k, v: None,
    # Scores of some hundreds: the softmax is a choice, and exp() of most is 0.
    "large": lambda q, k, v: np.multiply(q, 30, out=q),
    # Every score is near -2000, then +2000: sums must not begin at 0.
    "negative": lambda q, k, v: (np.subtract(q, 16, out=q), np.add(k, 16, out=k)),
    "positive": lambda q, k, v: (np.add(q, 16, out=q), np.add(k, 16, out=k)),
    "rising": lambda q, k, v: _ramp(q, k, np.linspace(-8, 8, k.shape[1])),
    "falling": lambda q, k, v: _ramp(q, k, np.linspace(8, -8, k.shape[1])),
    "same_keys": lambda q, k, v: k.fill(0.5),
    "zeros": lambda q, k, v: (q.fill(0), k.fill(0)),
    # The last keys: seen by few rows if causal.
    "nan_k": lambda q, k, v: k[:, -10:, -1].fill(np.nan),
    "nan_v": lambda q, k, v: v[:, -10:, -1].fill(np.nan),
    "nan_v_element": lambda q, k, v: v[0, 3, 0, 1:2].fill(np.nan),
    "nan_q": lambda q, k, v: q[:, 5].fill(np.nan),
    # +-inf scores, as the sign of q says: rows of NaN, and keys that weigh nothing.
    "inf_k": lambda q, k, v: k[:, 7, 0, :1].fill(np.inf),
    "inf_v": lambda q, k, v: (v[:, 7, 0, 0].fill(np.inf), v[:, 9, 0, 1].fill(-np.inf)),
}


def _ramp(q: Array, k: Array, ramp: Array) -> None:
    """The row maximum moves with every tile."""
    q[..., 0] = 8
    k[..., 0] = ramp[:, None]


DIMS = (1, 8, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256)
DIM_PAIRS = ((64, 32), (32, 64), (128, 64), (59, 111), (192, 128), (1, 256), (256, 1), (40, 80))
LENGTHS = (
    *((113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256)),
    *((1024, 1024), (1023, 1024), (1024, 1023), (2048, 2048)),
)
SMALL_LENGTHS = (
    *((1, 1), (1, 2), (2, 1), (3, 5), (7, 64), (64, 65), (65, 64), (127, 129), (129, 127)),
    *((97, 97), (128, 128), (200, 200), (257, 257), (300, 17), (17, 300)),
)
HEADS = ((4, 4), (4, 1), (4, 2), (6, 3), (7, 1))
MASKS = {"full": False, "causal": True}


def _head_dims() -> Iterator[Case]:
    """Rows that fill no tile, keys that fill no step, and (causal) 90 rows without keys."""
    for d, dtype, mask in itertools.product(DIMS, ("fp16", "bf16", "fp32"), MASKS):
        sq, sk = (113, 203) if mask == "full" else (203, 113)
        yield Case(f"d{d}-{dtype}-{mask}", dtype, 1, sq, sk, 2, 1, d, causal=MASKS[mask])
    for d, dtype in itertools.product((1, 59, 64, 128, 300), ("fp64",)):
        yield Case(f"d{d}-{dtype}", dtype, 1, 50, 70, 2, 1, d, causal=True)
    for dtype, d in itertools.product(("fp16", "bf16", "fp32"), (257, 300, 520)):
        yield Case(f"d{d}-{dtype}", dtype, 1, 50, 70, 2, 1, d)
    for (d, dv), dtype in itertools.product(DIM_PAIRS, ("fp16", "bf16", "fp32")):
        yield Case(f"d{d}-dv{dv}-{dtype}", dtype, 1, 70, 90, 2, 1, d, dv, causal=True)
    yield Case("d64-dv300-fp32", "fp32", 2, 30, 40, d=64, dv=300)
    yield Case("d20-dv12-fp64", "fp64", 2, 30, 40, d=20, dv=12)


def _lengths() -> Iterator[Case]:
    for (sq, sk), mask, dtype in itertools.product(LENGTHS, MASKS, ("fp16", "bf16", "fp32")):
        heads, heads_k = (1, 1) if sq * sk > 1 << 18 else (2, 1)
        name = f"{sq}x{sk}-{mask}-{dtype}"
        yield Case(name, dtype, 1, sq, sk, heads, heads_k, causal=MASKS[mask])
    for (sq, sk), mask, dtype in itertools.product(SMALL_LENGTHS, MASKS, ("fp16", "fp32")):
        yield Case(f"{sq}x{sk}-{mask}-{dtype}", dtype, 2, sq, sk, causal=MASKS[mask])
    for sk, dtype in itertools.product((1, 63, 128, 129, 500, 1000), ("fp16", "bf16", "fp32")):
        yield Case(f"decode-{sk}-{dtype}", dtype, 3, 1, sk, 4, 1, causal=True)
    # More than a tile of rows without keys before the first row with one.
    for sq, sk, dtype in ((300, 64, "fp16"), (700, 3, "fp16"), (129, 1, "bf16"), (700, 3, "fp32")):
        yield Case(f"keyless-{sq}x{sk}-{dtype}", dtype, 2, sq, sk, causal=True)
    yield Case("10000-keys", "fp32", 1, 2, 10000, 1, 1, causal=True)
    yield Case("5000x5000", "fp32", 1, 5000, 5000, 1, 1, 8, causal=True)


def _heads() -> Iterator[Case]:
    for (heads, heads_k), mask in itertools.product(HEADS, MASKS):
        for dtype in ("fp16", "fp32"):
            name = f"heads{heads}-{heads_k}-{mask}-{dtype}"
            yield Case(name, dtype, 3, 70, 100, heads, heads_k, causal=MASKS[mask])
    yield Case("heads33-batch5", "fp16", 5, 3, 5, 33, 11, 32)


def _empty() -> Iterator[Case]:
    for dtype, mask in itertools.product(("fp16", "fp32", "fp64"), MASKS):
        common = {"dtype": dtype, "causal": MASKS[mask]}
        yield Case(f"batch0-{mask}-{dtype}", batch=0, **common)
        yield Case(f"sq0-{mask}-{dtype}", batch=2, sq=0, **common)
        yield Case(f"sk0-{mask}-{dtype}", batch=2, sk=0, sq=130, **common)
        yield Case(f"sq0-sk0-{mask}-{dtype}", sq=0, sk=0, **common)


def _many() -> Iterator[Case]:
    """Beyond the 65535 that the y and z axes of a CUDA grid can hold."""
    for dtype in ("fp16", "fp32"):
        yield Case(f"batch65537-{dtype}", dtype, 65537, 1, 2, 1, 1, 8)
        yield Case(f"heads65537-{dtype}", dtype, 1, 1, 2, 65537, 1, 8)
        yield Case(f"batch-heads-66000-{dtype}", dtype, 33000, 1, 1, 2, 1, 8)
    yield Case("row-blocks-66000", "fp16", 1, 66000 * 128, 1, 1, 1, 8, gpu_only=True)


def _scales() -> Iterator[Case]:
    for scale, dtype in itertools.product((0.0, -0.5, 1.0, 3.0), ("fp16", "bf16", "fp32", "fp64")):
        yield Case(f"scale{scale}-{dtype}", dtype, 1, 70, 90, scale=scale, causal=True)
    for scale, dtype in ((1e20, "fp32"), (-1e20, "fp32"), (1e30, "fp64"), (1e-30, "fp32")):
        yield Case(f"scale{scale}-{dtype}", dtype, 1, 70, 90, scale=scale)
    yield Case("scale1e-30-fp16", "fp16", 1, 70, 90, scale=1e-30)
    yield Case("scale20-fp16", "fp16", 1, 70, 90, scale=20.0)


def _values() -> Iterator[Case]:
    for values, dtype, mask in itertools.product(VALUES, ("fp16", "fp32"), MASKS):
        name = f"{values}-{mask}-{dtype}"
        sq, sk = (90, 150) if values != "nan_v" else (400, 400)
        yield Case(name, dtype, 2, sq, sk, values=values, causal=MASKS[mask])
    yield Case("large-bf16", "bf16", 1, 90, 150, values="large", causal=True)
    yield Case("rising-bf16", "bf16", 1, 90, 150, values="rising")
    yield Case("nan_v-wide-fp16", "fp16", 1, 200, 200, d=128, dv=40, values="nan_v", causal=True)
    yield Case("nan_v-bf16", "bf16", 2, 300, 333, 4, 2, values="nan_v", causal=True)
    yield Case("nan_k-wide-fp16", "fp16", 1, 200, 200, d=128, values="nan_k", causal=True)


def _layouts() -> Iterator[Case]:
    base = Case("", "fp16", 2, 70, 100, 4, 2, causal=True)
    for name in LAYOUTS:
        if name.startswith("fused") or name == "contiguous":
            continue
        out = name if name in WRITABLE_LAYOUTS else "contiguous"
        for dtype, d in (("fp16", 64), ("fp16", 40), ("bf16", 64), ("fp32", 40)):
            layouts = Layouts(name, name, name, out, out)
            case = replace(base, dtype=dtype, d=d, layouts=layouts)
            yield replace(case, id=f"layout-{name}-{dtype}-d{d}")
    # One tensor unlike the others: strides of one must not be used for another.
    for position, dtype in itertools.product(Layouts._fields, ("fp16", "fp32")):
        for name in ("hsbd", "flip_s", "step_d", "heads_odd"):
            layouts = Layouts(**{position: name})
            case_id = f"layout-{position}-{name}-{dtype}"
            yield replace(base, id=case_id, dtype=dtype, layouts=layouts)
    mixed = Layouts("bhsd", "rows_odd", "transposed", "flip_all_step_d", "step_s")
    fused = Layouts("fused_q", "fused_k", "fused_v", "sbhd", "sbhd")
    for dtype in ("fp16", "bf16", "fp32", "fp64"):
        yield replace(base, id=f"layout-mixed-{dtype}", dtype=dtype, layouts=mixed)
        yield replace(base, id=f"layout-fused-{dtype}", dtype=dtype, layouts=fused, sk=70)
        yield replace(
            base,
            id=f"layout-mixed-odd-{dtype}",
            dtype=dtype,
            layouts=mixed,
            d=37,
            dv=51,
            values="large",
        )


def _smoke() -> Iterator[Case]:
    """A few that reach every part of a kernel: edges, masks, copies, empty rows."""
    common = {"dtype": "fp16", "smoke": True}
    yield Case("smoke-tile", sq=128, sk=128, **common)
    yield Case("smoke-ragged", sq=131, sk=203, heads_k=1, **common)
    yield Case("smoke-causal", sq=203, sk=131, d=128, causal=True, **common)
    yield Case("smoke-odd-dim", sq=70, sk=70, d=40, causal=True, **common)
    yield Case("smoke-wide", sq=65, sk=129, d=256, **common)
    yield Case("smoke-copy", sq=33, sk=65, layouts=Layouts(*["transposed"] * 5), **common)
    yield Case("smoke-unaligned", sq=33, sk=65, d=59, layouts=Layouts(*["offset_1"] * 5), **common)
    yield Case("smoke-no-keys", sq=130, sk=0, **common)
    yield Case("smoke-bf16", "bf16", sq=131, sk=203, causal=True, smoke=True)


GROUPS = (_smoke, _head_dims, _lengths, _heads, _empty, _many, _scales, _values, _layouts)
CASES = tuple(itertools.chain.from_iterable(group() for group in GROUPS))
assert len({case.id for case in CASES}) == len(CASES), "two cases have one id"
