"""Cases of the backward with one feature of those that have kernels in the plain one's tiles."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from cases.case import Blocks, Packed
from cases.gradient_case import GradientCase, make


def one_feature() -> Iterator[GradientCase]:
    """Kernels of their own, with the plain one's tiles: up to 128 rows by 128 keys, of which one of
    ALiBi's knows on which side of the diagonal it lies."""
    features: dict[str, dict[str, Any]] = {
        "alibi": {"alibi": "h"},
        "softcap": {"softcap": 2.0},
        "dropout": {"dropout_p": 0.3, "seed": 5},
        "blocks": {"blocks": Blocks((128, 192))},
    }
    shapes: dict[str, dict[str, Any]] = {
        "full": {"sq": 400, "sk": 300, "heads": 1},
        "full-wide": {"sq": 200, "sk": 290, "heads": 1, "d": 128},
        "causal": {"sq": 300, "sk": 400, "heads": 1, "causal": True},
        "group": {"sq": 200, "sk": 150, "causal": True, "batch": 1},
        "parts": {"sq": 60, "sk": 140, "heads": 6, "heads_k": 1, "window": (70, 30)},
        "window": {"sq": 700, "sk": 190, "heads": 1, "window": (300, 100)},
        "keyless": {"sq": 290, "sk": 150, "heads": 1, "causal": True, "scale": -0.3},
    }
    for (feature, fields), (shape, sizes) in itertools.product(features.items(), shapes.items()):
        for deterministic, dtype in itertools.product((False, True), ("fp16", "bf16")):
            changes = fields | sizes | {"deterministic": deterministic, "dtype": dtype}
            yield make(f"one-{feature}-{shape}-{deterministic}-{dtype}", **changes)
        if shape in ("full", "window"):
            yield make(f"one-{feature}-{shape}-fp32", **fields, **sizes, dtype="fp32")
        for value, dout in (("nan_k", "normal"), ("nan_v", "normal"), ("normal", "nan_element")):
            changes = fields | sizes | {"values": value, "dout": dout, "poison": False}
            which = value if dout == "normal" else f"dout_{dout}"
            if (feature, value) != (
                "dropout",
                "nan_k",
            ):  # whether a dropped NaN is one, nobody says
                yield make(f"one-{feature}-{shape}-{which}", **changes)
    for feature, fields in features.items():
        for d, dtype in itertools.product((32, 96, 128, 192, 256, 512), ("fp16", "bf16")):
            sizes = {"sq": 150, "sk": 170, "heads": 1, "window": (90, 60), "d": d, "dtype": dtype}
            yield make(f"one-{feature}-d{d}-{dtype}", **fields, **sizes)
        sizes = {"sq": 150, "sk": 170, "heads": 1, "causal": True, "d": 190, "dv": 128}
        yield make(f"one-{feature}-d190-dv128", **fields, **sizes)
        packed = Packed((130, 0, 1, 70), (65, 60, 0, 200))
        for name, changes in {
            "packed": {"sinks": "normal"},
            "fp32": {"grad_dtype": "fp32"},
        }.items():
            sizes = {"packed": packed, "window": (100, 30), "heads": 1}
            yield make(f"one-{feature}-{name}", **fields, **sizes, **changes)
    for feature, deterministic in itertools.product(({"alibi": "h"}, {}), (False, True)):
        changes = {"sinks": "normal", "deterministic": deterministic, **feature}
        yield make(f"one-batch0-{len(changes)}-{deterministic}", batch=0, sq=5, sk=7, **changes)
    for softcap in (1e-3, 250.0, 256.5, 3000.0):
        yield make(f"one-softcap{softcap}", softcap=softcap, sq=150, sk=170, values="large")
        yield make(f"one-softcap{softcap}-row-pass", softcap=softcap, deterministic=True, d=128)
    for p in (0.002, 0.9, 0.9999):
        yield make(f"one-dropout{p}", dropout_p=p, sq=150, sk=170, dtype="bf16")
