"""Cases of the backward of a part of a larger attention."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from cases.case import Part
from cases.gradient_case import GradientCase, make


def positions() -> Iterator[GradientCase]:
    """The diagonal lies anywhere: rows and keys at both ends may see, and be seen by, nothing."""
    windows = ((None, 0), (40, None), (30, 20), (0, 0), (64, 0))
    shifts = (-200, -129, -64, -1, 0, 63, 65, 128, 190, 300)
    for number, ((left, right), shift) in enumerate(itertools.product(windows, shifts)):
        part = Part(max(shift, 0), max(-shift, 0))
        changes = {"window": (left, right), "part": part, "sq": 150, "sk": 140, "heads": 1}
        for dtype in (("bf16", "fp16")[number % 2], "fp32"):
            yield make(f"part-window{left}_{right}-shift{shift}-{dtype}", dtype=dtype, **changes)
    for shift, dtype in itertools.product((-150, -3, 70, 200), ("bf16", "fp32")):
        part = Part(max(shift, 0), max(-shift, 0))
        changes = {"alibi": "h", "part": part, "sq": 150, "sk": 140, "causal": dtype == "fp32"}
        yield make(f"part-alibi-shift{shift}-{dtype}", dtype=dtype, **changes)
    for dtype in ("bf16", "fp16", "fp32"):
        # NaN is in keys that only rows behind the last one would see.
        changes = {"alibi": "h", "part": Part(0, 12), "sq": 150, "sk": 140, "causal": True}
        yield make(f"part-alibi-unseen-{dtype}", dtype=dtype, **changes)
    for dtype, key in itertools.product(("bf16", "fp32"), (0, 8, 72)):
        changes = {"part": Part(1000, (key, 0), 0, 7, 2, 3), "dropout_p": 0.3, "seed": 77}
        shape = {"batch": 2, "sq": 90, "sk": 150, "heads": 4, "heads_k": 2}
        yield make(f"part-dropout-key{key}-{dtype}", dtype=dtype, **shape, **changes)
