"""Cases of shapes, values and layouts, without further features."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from backends.tensors import LAYOUTS, WRITABLE_LAYOUTS
from cases.case import VALUES, Case, Layouts

DIMS = (1, 8, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256, 320, 512)
DIM_PAIRS = ((64, 32), (32, 64), (128, 64), (59, 111), (192, 128), (1, 256), (256, 1), (40, 80))
LARGE_DIM_PAIRS = ((512, 256), (576, 512), (512, 1), (64, 512))
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
    for dtype, d in itertools.product(("fp16", "bf16", "fp32"), (257, 300, 400, 520)):
        yield Case(f"d{d}-{dtype}", dtype, 1, 50, 70, 2, 1, d)
    for (d, dv), dtype in itertools.product(DIM_PAIRS + LARGE_DIM_PAIRS, ("fp16", "bf16", "fp32")):
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
    yield Case("bug_334-1x1x1x16", "fp16", 1, 1, 1, 1, 1, 16, causal=True)
    # More than a tile of rows without keys before the first row with one (flash-attn 26d7d92f,
    # pytorch 103963, 109517: NaN).
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
    """flash-attn db2f8069, 2470 and 2515: out must be written, and nothing divided by 0."""
    for dtype, mask in itertools.product(("fp16", "fp32", "fp64"), MASKS):
        common = {"dtype": dtype, "causal": MASKS[mask]}
        yield Case(f"batch0-{mask}-{dtype}", batch=0, **common)
        yield Case(f"sq0-{mask}-{dtype}", batch=2, sq=0, **common)
        yield Case(f"sk0-{mask}-{dtype}", batch=2, sk=0, sq=130, **common)
        yield Case(f"sq0-sk0-{mask}-{dtype}", sq=0, sk=0, **common)


def _many() -> Iterator[Case]:
    """Beyond the 65535 that the y and z axes of a CUDA grid can hold: flash-attn 1786."""
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
    # The maxima grow from tile to tile, which come from the last to the first.
    for d, dtype in itertools.product((64, 96, 128), ("fp16", "bf16")):
        yield Case(f"falling-d{d}-{dtype}", dtype, 1, 90, 400, d=d, values="falling")
        yield Case(f"grows-d{d}-{dtype}", dtype, 1, 90, 400, d=d, scale=2.0, causal=True)
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
    # One tensor unlike the others: strides of one must not be used for another (flash-attn 818,
    # 9ee0ff1d, 1562).
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
FORWARD_CASES = tuple(itertools.chain.from_iterable(group() for group in GROUPS))
