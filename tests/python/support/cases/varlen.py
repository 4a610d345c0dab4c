"""Cases of packed sequences and of lengths that a tensor holds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from backends.tensors import LAYOUTS, WRITABLE_LAYOUTS
from cases.case import Bias, Blocks, Case, Features, Layouts, Packed

FLOATS = ("fp16", "bf16", "fp32")

# (seqlen_q, seqlen_k) of each sequence. flash-attn 1155 wrote out of bounds where one is empty;
# 2470 and 2515 crash without keys and without queries; 443: many more queries than keys.
LENGTHS: dict[str, tuple[tuple[int, int], ...]] = {
    "one": ((113, 203),),
    "equal": ((64, 64), (64, 64), (64, 64)),
    "ragged": ((1, 7), (200, 30), (65, 64), (3, 129), (128, 128)),
    "bug_1155-first": ((0, 0), (70, 90), (5, 3)),
    "bug_1155-middle": ((70, 90), (0, 0), (0, 0), (5, 3)),
    "bug_1155-last": ((70, 90), (5, 3), (0, 0)),
    "bug_1155-all": ((0, 0), (0, 0), (0, 0)),
    "bug_2470-no-keys": ((70, 0), (5, 60), (130, 0)),
    "bug_2470-no-keys-at-all": ((70, 0), (5, 0)),
    "bug_2515-no-queries": ((0, 60), (33, 60), (0, 1)),
    "bug_2515-no-queries-at-all": ((0, 60), (0, 1)),
    "no-sequences": (),
    "bug_443-many-queries": ((300, 3), (200, 64), (1, 1), (150, 149)),
    "many-keys": ((3, 300), (1, 200), (2, 65)),
    # One query at most, and a head group that kernels may turn into rows (1537: a shape error).
    "bug_1537-single": ((1, 30), (0, 20), (1, 0), (1, 200), (0, 0), (1, 1)),
}


def packed(*lengths: tuple[int, int], spare: int = 0) -> Packed:
    return Packed(tuple(q for q, _ in lengths), tuple(k for _, k in lengths), spare)


def _lengths() -> Iterator[Case]:
    for (name, lengths), dtype in itertools.product(LENGTHS.items(), FLOATS):
        for causal, spare in ((False, 0), (True, 0), (True, 77)):
            features = Features(packed=packed(*lengths, spare=spare))
            case = Case("", dtype, heads=2, heads_k=1, causal=causal, features=features)
            mask = "causal" if causal else "full"
            yield replace(case, id=f"varlen-{name}-{mask}-spare{spare}-{dtype}")
    for (name, lengths), d in itertools.product(LENGTHS.items(), (40, 128)):
        features = Features(packed=packed(*lengths), window=(20, 10), sinks="normal", alibi="bh")
        case = Case("", "fp16", heads=2, heads_k=2, d=d, features=features)
        yield replace(case, id=f"varlen-{name}-features-d{d}")
    for name in ("ragged", "bug_1537-single"):
        features = Features(packed=packed(*LENGTHS[name]))
        yield Case(f"varlen-{name}-fp64", "fp64", heads=4, heads_k=2, d=20, features=features)


def _used() -> Iterator[Case]:
    """seqused_k, with NaN and infinity behind it."""
    useds = ((150, 0, 1), (0, 0, 0), (149, 64, 65), (150, 150, 150))
    for used, (sq, causal), dtype in itertools.product(
        useds, ((1, True), (70, True), (70, False), (200, True)), FLOATS
    ):
        features = Features(seqused_k=used)
        name = f"seqused{'_'.join(map(str, used))}-{sq}-{'causal' if causal else 'full'}-{dtype}"
        yield Case(name, dtype, 3, sq, 150, 2, 1, causal=causal, features=features)
    for used, dtype in itertools.product(((0, 0, 0), (10, 3, 60), (90, 0, 1)), FLOATS):
        features = Features(seqused_k=used, packed=packed((70, 90), (1, 3), (33, 60)))
        case = Case("", dtype, heads=4, heads_k=2, causal=True, features=features)
        yield replace(case, id=f"seqused{'_'.join(map(str, used))}-packed-{dtype}")
        features = replace(features, window=(30, 5), alibi="h", bias=Bias(axes="hqk"))
        yield replace(
            case, id=f"seqused{'_'.join(map(str, used))}-packed-features-{dtype}", features=features
        )
    features = Features(seqused_k=(77, 10), blocks=Blocks(), bias=Bias("bool", "k"))
    yield Case("seqused-maps", "fp16", 2, 130, 150, features=features)


def _tensors() -> Iterator[Case]:
    lengths = packed((70, 90), (0, 5), (3, 40))
    base = Case("", "fp16", heads=4, heads_k=2, causal=True, features=Features(packed=lengths))
    for name in LAYOUTS:
        if name.startswith("fused") or "b" in LAYOUTS[name].expand or name == "contiguous":
            continue
        out = name if name in WRITABLE_LAYOUTS else "contiguous"
        for dtype, d in (("fp16", 64), ("fp16", 40), ("bf16", 64), ("fp32", 40)):
            layouts = Layouts(name, name, name, out, out)
            features = replace(base.features, poison="expand" not in name)
            case = replace(base, dtype=dtype, d=d, layouts=layouts, features=features)
            yield replace(case, id=f"varlen-layout-{name}-{dtype}-d{d}")
    # The output's own strides, with one query and a group of heads: flash-attn 976.
    single = Features(packed=packed((1, 90), (1, 5), (1, 40)))
    for name in ("bhsd", "flip_s", "step_d", "heads_odd"):
        layouts = Layouts(out=name, lse=name)
        case = Case("", "fp16", 3, 1, 90, 8, 1, layouts=layouts)
        yield replace(case, id=f"bug_976-out-{name}")
        yield replace(case, id=f"bug_976-out-{name}-packed", features=single)
    for d, dtype in itertools.product((32, 59, 96, 128, 192, 256, 300, 512), ("fp16", "fp32")):
        yield replace(base, id=f"varlen-d{d}-{dtype}", dtype=dtype, d=d)
    yield replace(base, id="varlen-d192-dv128", d=192, dv=128)
    yield replace(base, id="varlen-out32", out_dtype="fp32")


def _many() -> Iterator[Case]:
    """1786: more sequences than the y and z axes of a CUDA grid can hold, in one launch."""
    count = 65537
    queries = tuple(0 if n % 7 == 3 else 1 + n % 2 for n in range(count))
    keys = tuple(n % 4 for n in range(count))
    for dtype, features in (
        ("fp16", Features(packed=Packed(queries, keys))),
        ("fp32", Features(packed=Packed(queries, keys), window=(1, 1), sinks="normal")),
        ("fp16", Features(packed=Packed((1,) * count, (2,) * count), alibi="h")),
    ):
        case = Case("", dtype, heads=1, heads_k=1, d=8, features=features)
        yield replace(case, id=f"bug_1786-{count}-{dtype}-{'alibi' if features.alibi else 'plain'}")


GROUPS = (_lengths, _used, _tensors, _many)
VARLEN_CASES = tuple(itertools.chain.from_iterable(group() for group in GROUPS))
