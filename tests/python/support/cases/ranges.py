"""Cases of key_ranges, of the forward and of the backward."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cases.case import Bias, Case, Features, Packed, Part, Ranges
from cases.gradient_case import GradientCase, make

FLOATS = ("fp16", "bf16", "fp32")
FAR_AWAY = 1 << 30  # the largest position
KINDS = ("normal", "full", "nothing", "documents", "prefix", "tree", "far")


def ranges_forward() -> Iterator[Case]:
    base = Case("", "fp16", 2, 150, 150, 4, 2)
    for values, intervals, causal in itertools.product(KINDS, (1, 2), (False, True)):
        features = Features(ranges=Ranges(values, intervals))
        name = f"ranges-{values}{intervals}-{'causal' if causal else 'full'}"
        for dtype in ("fp16", "fp32"):
            yield replace(base, id=f"{name}-{dtype}", dtype=dtype, causal=causal, features=features)
    for sq, sk, intervals in itertools.product((1, 7, 300), (1, 129, 200), (1, 2)):
        features = Features(ranges=Ranges("normal", intervals))
        for dtype in FLOATS:
            yield replace(
                base,
                id=f"ranges-{sq}x{sk}-{intervals}-{dtype}",
                dtype=dtype,
                sq=sq,
                sk=sk,
                batch=1,
                features=features,
            )
    for axes, layout in itertools.product(
        ("bh", "b", "h", ""), ("contiguous", "expand_bh", "flip_s", "flip_d", "step_d", "offset_1")
    ):
        features = Features(ranges=Ranges("normal", 2, axes, layout))
        yield replace(base, id=f"ranges-{axes or 'one'}-{layout}", features=features, sq=70)
    lengths = Packed((70, 0, 131, 5), (90, 9, 140, 0), 3)
    for values, intervals, dtype in itertools.product(KINDS, (1, 2), ("fp16", "fp32")):
        features = Features(ranges=Ranges(values, intervals), packed=lengths)
        yield replace(
            base, id=f"ranges-packed-{values}{intervals}-{dtype}", dtype=dtype, features=features
        )
    for start, dtype in itertools.product((0, 3, FAR_AWAY), ("fp16", "fp32")):
        for values in ("normal", "full"):
            features = Features(ranges=Ranges(values, 2), part=Part((start, 1), 0, 0))
            yield replace(
                base, id=f"ranges-part{start}-{values}-{dtype}", dtype=dtype, features=features
            )
    for d in (32, 96, 128, 192, 256):
        features = Features(ranges=Ranges("tree"))
        yield replace(
            base,
            id=f"ranges-d{d}",
            d=d,
            batch=1,
            heads=2,
            heads_k=1,
            causal=True,
            features=features,
        )
    features = Features(ranges=Ranges("tree"), sinks="large")
    yield replace(base, id="ranges-fp64", dtype="fp64", features=features)


def ranges_backward() -> Iterator[GradientCase]:
    for values, intervals, dtype in itertools.product(KINDS, (1, 2), ("fp16", "fp32")):
        ranges = Ranges(values, intervals)
        causal = values in ("documents", "tree")
        name = f"ranges-{values}{intervals}-{dtype}"
        yield make(name, ranges=ranges, sq=150, sk=150, dtype=dtype, causal=causal, heads=1)
        grouped = {"heads": 4, "heads_k": 2, "sq": 70, "sk": 70}
        yield make(f"{name}-gqa", ranges=ranges, dtype=dtype, causal=causal, **grouped)
        packed = Packed((70, 0, 33, 5), (40, 9, 66, 0), 3)
        yield make(f"{name}-packed", ranges=ranges, packed=packed, dtype=dtype)
    for d, deterministic in itertools.product((32, 128, 256), (False, True)):
        changes: dict[str, Any] = {"d": d, "deterministic": deterministic, "heads": 1}
        yield make(f"ranges-d{d}-{deterministic}", ranges=Ranges(), sq=130, sk=70, **changes)
    # NaN in q of rows that see no key, amid others, and whose LSE is finite.
    for deterministic, dtype in itertools.product((False, True), ("fp16", "fp32")):
        changes = {"sinks": "normal", "dtype": dtype, "deterministic": deterministic, "sk": 3}
        yield make(f"ranges-sinks-{deterministic}-{dtype}", ranges=Ranges(), sq=150, **changes)
    for bias, dtype in itertools.product((Bias(), Bias(axes="k"), Bias("bool")), ("fp16", "fp32")):
        name = f"ranges-bias-{bias.axes}-{bias.dtype or 'float'}-{dtype}"
        yield make(name, ranges=Ranges("far", 2), bias=bias, sq=130, sk=70, dtype=dtype, alibi="h")
