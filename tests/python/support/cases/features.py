"""Cases of what options.h adds to the softmax. `bug_...` in an id names the project and the thread
where users met that bug; a bare number is flash-attention's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from cases.case import Bias, Blocks, Case, Features, Layouts, Packed, Part, Ranges
from cases.ranges import ranges_forward

FLOATS = ("fp16", "bf16", "fp32")
FAR = 1 << 62
FAR_AWAY = 1 << 30  # the largest position

# One of each, as changes to a case. Pairs of them are joined: they must not touch the same field.
SINGLE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "left": {"window": (40, None)},
    "both": {"window": (30, 20)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": "bh"},
    "bias": {"bias": Bias(axes="hqk", values="some_inf")},
    "keep": {"bias": Bias("bool")},
    "blocks": {"blocks": Blocks()},
    "ranges": {"ranges": Ranges()},
    "sinks": {"sinks": "normal"},
    "dropout": {"dropout_p": 0.2, "seed": 1234567890123, "offset": 5},
    "seqused": {"seqused_k": (130, 51)},
    "packed": {"packed": Packed((30, 131), (151, 90))},
    "part": {"part": Part((200, 9), 16, -8, 3, 1, 2)},
    "out32": {"out_dtype": "fp32"},
    "thin": {"sq": 1, "packed": Packed((1, 1), (151, 90))},
    "gqa": {"heads": 4, "heads_k": 1},
    "dv": {"d": 128, "dv": 96},
    "wide": {"d": 192, "dv": 128},
    "step": {"layouts": Layouts(*["flip_all_step_d"] * 5)},
}
FIELDS_OF_CASE = frozenset(Case.__dataclass_fields__)


def _with(case: Case, changes: dict[str, Any]) -> Case:
    of_case = {name: x for name, x in changes.items() if name in FIELDS_OF_CASE}
    rest = {name: x for name, x in changes.items() if name not in FIELDS_OF_CASE}
    return replace(case, features=replace(case.features, **rest), **of_case)


def _pairs() -> Iterator[Case]:
    """Every two features together, on every backend."""
    base = Case("", "fp16", 2, 70, 151, features=Features())
    for number, (one, two) in enumerate(itertools.combinations(SINGLE, 2)):
        if SINGLE[one].keys() & SINGLE[two].keys():
            continue
        case = _with(base, SINGLE[one] | SINGLE[two])
        # Half of them without NaN, which would hide that a kernel takes a finite wrong value.
        case = _with(case, {"poison": number % 2 == 0})
        yield replace(case, id=f"pair-{one}-{two}-fp16")
        if "out32" not in (one, two):
            yield replace(case, id=f"pair-{one}-{two}-fp32", dtype="fp32")
    for name, changes in SINGLE.items():
        for dtype in ("bf16", "fp64"):
            yield replace(_with(base, changes), id=f"single-{name}-{dtype}", dtype=dtype)


EVERYTHING = Features(
    window=(90, 60),
    softcap=5.0,
    alibi="bh",
    bias=Bias(values="some_inf"),
    blocks=Blocks(keep=0.7),
    ranges=Ranges("normal", 2),
    sinks="none",
    dropout_p=0.17,
    seed=FAR + 1,
    offset=FAR + 7,
    rng_state=True,
    outputs="step_h",
    seqused_k=(140, 0, 77),
)
EVERYTHING_PACKED = replace(
    EVERYTHING, packed=Packed((70, 133, 0), (140, 9, 200), 3), seqused_k=(139, 5, 100)
)


def _everything() -> Iterator[Case]:
    base = Case("", "fp16", 3, 133, 200, 4, 2, features=EVERYTHING)
    packed = replace(base, features=EVERYTHING_PACKED)
    mixed = Layouts("bhsd", "rows_odd", "transposed", "flip_all_step_d", "step_s")
    for dtype, causal in itertools.product((*FLOATS, "fp64"), (False, True)):
        name = f"{dtype}-{'causal' if causal else 'full'}"
        changes: dict[str, Any] = {"dtype": dtype, "causal": causal}
        yield replace(base, id=f"everything-{name}", **changes)
        yield replace(packed, id=f"everything-packed-{name}", **changes)
        odd = replace(
            base, d=37, dv=51, layouts=mixed, out_dtype="fp64" if dtype == "fp64" else "fp32"
        )
        yield replace(odd, id=f"everything-odd-{name}", **changes)
    for d, dv in ((32, 32), (128, 128), (192, 128), (256, 256), (150, 20), (20, 150), (400, 512)):
        yield replace(base, id=f"everything-d{d}-dv{dv}-fp16", heads=2, heads_k=1, d=d, dv=dv)
    for dtype in FLOATS:
        case = _with(base, {"small_dtype": "fp32", "bias": Bias("fp32"), "dtype": dtype})
        yield replace(case, id=f"everything-small-fp32-{dtype}")
        case = _with(base, {"small_dtype": "bf16", "bias": Bias("fp16"), "dtype": dtype})
        yield replace(case, id=f"everything-small-bf16-{dtype}")
        case = _with(base, {"small_dtype": "fp64", "bias": Bias("fp64"), "dtype": dtype})
        yield replace(case, id=f"everything-small-fp64-{dtype}")


def _windows() -> Iterator[Case]:
    windows: tuple[tuple[int | None, int | None], ...] = (
        *((0, 0), (1, 0), (0, 1), (7, 5), (63, 64), (64, 63), (128, 0), (0, 128), (500, 500)),
        *((5, None), (None, 5), (64, None), (None, 64), (0, None), (None, 0)),
        *((-1, -1), (-1, 0), (30, -1), (FAR, FAR), (2 * FAR - 1, 2 * FAR - 1), (FAR, 3)),
    )
    shapes = ((113, 203), (203, 113), (128, 128), (1, 130), (300, 64))
    for (left, right), (sq, sk), dtype in itertools.product(windows, shapes, ("fp16", "fp32")):
        changes = {"window": (left, right)}
        for causal in (False, True) if (left, right) in ((7, 5), (0, 0), (FAR, FAR)) else (False,):
            name = f"window{left}_{right}-{sq}x{sk}-{'causal-' if causal else ''}{dtype}"
            case = Case(name, dtype, 2, sq, sk, 2, 1, 64, causal=causal, features=Features())
            yield _with(case, changes)
    # window_right beyond seqlen_k and more queries than keys: flash-attn drops keys.
    for window, dtype in itertools.product(((5, 120), (None, 90), (0, 101)), FLOATS):
        case = Case("", dtype, 1, 300, 100, features=Features(window=window))
        yield replace(case, id=f"bug_895-window{window[0]}_{window[1]}-{dtype}")
    # flashinfer 563, 714, 1661, 3682: tiles at either end of the window left out, or visited.
    for left, right, d in itertools.product((62, 63, 64, 65), (62, 63, 64, 65), (64, 128)):
        name = f"bug_flashinfer_563_714_3682-window{left}_{right}-d{d}"
        yield Case(name, "fp16", 1, 200, 330, 1, 1, d, features=Features(window=(left, right)))
    yield Case("window-bf16", "bf16", 2, 200, 200, features=Features(window=(50, 10)))
    yield Case("window-d128", "fp16", 1, 200, 200, d=128, features=Features(window=(50, 0)))
    yield Case("window-d256", "fp16", 1, 200, 200, d=256, features=Features(window=(50, 0)))
    yield Case("window-d512", "fp16", 1, 200, 200, d=512, features=Features(window=(50, 0)))
    yield Case("window-fp64", "fp64", 1, 200, 180, features=Features(window=(50, 10)))
    # No row sees a key at one end, or none does at all.
    for sq, sk, window in ((300, 40, (10, None)), (10, 300, (0, 0)), (400, 3, (None, 0))):
        case = Case("", "fp16", 1, sq, sk, features=Features(window=window, sinks="normal"))
        yield replace(case, id=f"window-keyless-{sq}x{sk}-sinks")


def _parts() -> Iterator[Case]:
    """The diagonal lies anywhere: rows at both ends may see nothing, or everything."""
    windows: tuple[tuple[int | None, int | None], ...] = (
        *((None, 0), (40, None), (30, 20), (0, 0), (64, 0), (130, 63)),
    )
    shifts = (-200, -129, -64, -1, 0, 1, 63, 64, 128, 190, 300, FAR_AWAY, -FAR_AWAY)
    for (left, right), shift, dtype in itertools.product(windows, shifts, ("bf16", "fp32")):
        query, diagonal = (shift, None) if shift >= 0 else (None, shift)
        features = Features(window=(left, right), part=Part(query, None, diagonal))
        case = Case("", dtype, 1, 150, 140, 2, 1, features=features)
        yield replace(case, id=f"part-window{left}_{right}-shift{shift}-{dtype}")
    for shift, dtype in itertools.product((-150, -3, 0, 70, 200), ("bf16", "fp32", "fp64")):
        part = Part(max(shift, 0), max(-shift, 0))
        case = Case("", dtype, 1, 150, 140, features=Features(alibi="h", part=part))
        yield replace(case, id=f"part-alibi-shift{shift}-{dtype}", causal=dtype == "fp32")
    for dtype, key in itertools.product((*FLOATS, "fp64"), (0, 8, 72, FAR_AWAY)):
        part = Part(1000, (key, 0), 0, 7, 2, 3)
        features = Features(dropout_p=0.3, seed=77, offset=FAR, part=part)
        case = Case("", dtype, 2, 90, 150, 4, 2, features=features)
        yield replace(case, id=f"part-dropout-key{key}-{dtype}")
    everything = replace(EVERYTHING, part=Part((50, 3, 100), (8, 0, 64), (-1, 60, 10), 2, 3, 1))
    packed = replace(EVERYTHING_PACKED, part=Part(30, (0, 80, 16), 40))
    for dtype, causal in itertools.product((*FLOATS, "fp64"), (False, True)):
        case = Case("", dtype, 3, 133, 200, 4, 2, causal=causal, features=everything)
        name = f"{dtype}-{'causal' if causal else 'full'}"
        yield replace(case, id=f"part-everything-{name}")
        yield replace(case, id=f"part-everything-packed-{name}", features=packed)


def _scores() -> Iterator[Case]:
    for dtype, values in itertools.product((*FLOATS, "fp64"), ("normal", "large", "positive")):
        case = Case("", dtype, 1, 70, 90, values=values, features=Features(softcap=2.5))
        yield replace(case, id=f"softcap-{values}-{dtype}")
    for softcap, scale in ((0.01, None), (1e4, None), (50.0, -0.5), (5.0, 0.0), (1e-30, None)):
        for dtype in ("fp16", "fp32"):
            name = f"bug_2402-softcap{softcap}-scale{scale}-{dtype}"
            features = Features(softcap=softcap)
            yield Case(name, dtype, 1, 70, 90, scale=scale, causal=True, features=features)
    # In units of this scale, as the scored kernels count, a softcap or a slope is infinite.
    for scale in (1e-40, -1e-40):
        features = Features(softcap=4.0, alibi="h")
        yield Case(f"softcap-alibi-scale{scale}", "fp16", 1, 70, 90, scale=scale, features=features)
    for alibi, dtype in itertools.product(("h", "1h", "bh"), (*FLOATS, "fp64")):
        for causal in (False, True):
            case = Case("", dtype, 2, 113, 203, 4, 2, causal=causal, features=Features(alibi=alibi))
            yield replace(case, id=f"alibi-{alibi}-{'causal' if causal else 'full'}-{dtype}")
    for sq, sk in ((203, 113), (1, 200), (2, 3000)):
        yield Case(f"alibi-{sq}x{sk}", "fp32", 1, sq, sk, features=Features(alibi="h"))
    yield Case("alibi-2x3000-fp16", "fp16", 1, 2, 3000, features=Features(alibi="h"))
    for sinks, dtype in itertools.product(("normal", "none", "large", "small"), (*FLOATS, "fp64")):
        case = Case("", dtype, 2, 113, 90, 4, 2, causal=True, features=Features(sinks=sinks))
        yield replace(case, id=f"bug_1797-sinks-{sinks}-{dtype}")
        yield replace(case, id=f"bug_1797-sinks-{sinks}-no-keys-{dtype}", sq=20, sk=0)
        yield replace(case, id=f"bug_1797-sinks-{sinks}-one-row-{dtype}", sq=1, sk=300)
    for values, dtype in itertools.product(("negative", "positive", "large"), ("fp16", "fp32")):
        case = Case("", dtype, 1, 70, 90, values=values, features=Features(sinks="normal"))
        yield replace(case, id=f"sinks-{values}-{dtype}")


def _biases() -> Iterator[Case]:
    base = Case("", "fp16", 2, 70, 150, 4, 2)
    for axes in ("bhqk", "bhk", "bqk", "hqk", "qk", "bk", "bh", "k", "q", "", "hk", "bhq"):
        for dtype, kind in itertools.product(("fp16", "fp32"), ("", "bool")):
            features = Features(bias=Bias(kind, axes))
            name = f"bug_2189_2209-bias-{axes or 'one'}-{kind or 'float'}-{dtype}"
            yield replace(base, id=name, dtype=dtype, features=features)
            if kind == "bool" or axes not in ("bhqk", "hqk", "bk", "k"):
                continue
            features = Features(bias=Bias(kind, axes, "some_inf"))
            yield replace(base, id=f"{name}-inf", dtype=dtype, features=features, causal=True)
    for layout in ("expand_b", "expand_h", "expand_s", "expand_bh", "flip_s", "flip_d", "flip_bh"):
        for kind in ("", "uint8"):
            features = Features(bias=Bias(kind, layout=layout))
            yield replace(base, id=f"bias-{layout}-{kind or 'float'}", features=features)
    for layout in ("offset_1", "byte_offset_3", "rows_odd", "batch_gap", "step_d", "transposed"):
        for kind, dtype in itertools.product(("fp32", "bool"), ("fp16", "fp32")):
            features = Features(bias=Bias(kind, layout=layout))
            yield replace(base, id=f"bias-{layout}-{kind}-{dtype}", dtype=dtype, features=features)
    for kind, dtype in itertools.product(("fp32", "fp16", "bf16", "fp64", "uint8"), FLOATS):
        values = "some_inf" if kind != "uint8" else "normal"
        features = Features(bias=Bias(kind, values=values))
        yield replace(base, id=f"bias-{kind}-{dtype}", dtype=dtype, features=features)
    for dtype, sq, sk in itertools.product(FLOATS, (70, 203, 1), (150, 1)):
        small = replace(base, batch=1, heads=2, heads_k=1, dtype=dtype, sq=sq, sk=sk)
        # NaN where causal hides: never read into the result. Rows of 0 and of -3.4e38.
        for values in ("nan_hidden", "lowest", "large", "nothing"):
            features = Features(bias=Bias("fp32", values=values))
            name = f"bug_flashinfer_1178_4401-bias-{values}-{sq}x{sk}-{dtype}"
            yield replace(small, id=name, causal=True, features=features)
        for values in ("all", "nothing"):
            features = Features(bias=Bias("bool", values=values))
            name = f"keep-{values}-{sq}x{sk}-{dtype}"
            yield replace(small, id=name, features=features)
    yield replace(base, id="bias-fp64", dtype="fp64", features=Features(bias=Bias()))
    yield replace(base, id="keep-fp64", dtype="fp64", features=Features(bias=Bias("bool")))


def _blocks() -> Iterator[Case]:
    base = Case("", "fp16", 2, 200, 330, 2, 1)
    sizes = ((64, 64), (128, 128), (64, 128), (128, 64), (192, 64), (64, 192), (1024, 64))
    for size, dtype in itertools.product(sizes, ("fp16", "fp32")):
        name = f"blocks{size[0]}x{size[1]}-{dtype}"
        yield replace(base, id=name, dtype=dtype, features=Features(blocks=Blocks(size)))
    for axes, layout in itertools.product(("bh", "b", "h", ""), ("contiguous", "flip_s")):
        blocks = Blocks(axes=axes, layout=layout)
        features = Features(blocks=blocks, bias=Bias("", "qk"))
        yield replace(base, id=f"blocks-{axes or 'one'}-{layout}", features=features, sq=130)
    for keep, causal, dtype in itertools.product((0.0, 0.1, 1.0), (False, True), FLOATS):
        name = f"blocks-keep{keep}-{'causal' if causal else 'full'}-{dtype}"
        features = Features(blocks=Blocks(keep=keep))
        yield replace(base, id=name, dtype=dtype, causal=causal, features=features)
    for d in (128, 192, 256, 512):
        yield replace(base, id=f"blocks-d{d}", d=d, batch=1, features=Features(blocks=Blocks()))
    features = Features(blocks=Blocks(layout="expand_bh"), sinks="large")
    yield replace(base, id="blocks-expand_bh-sinks", features=features)
    yield from _large_blocks(replace(base, batch=1, sq=430, sk=600))
    yield replace(base, id="blocks-fp64", dtype="fp64", features=features)


def _large_blocks(base: Case) -> Iterator[Case]:
    """Those for which Hopper has kernels of its own, with tiles of up to 192 rows and 128 keys."""
    sizes = ((128, 128), (192, 128), (128, 192), (320, 256), (1024, 128))
    for size, causal, dtype in itertools.product(sizes, (False, True), FLOATS):
        name = f"blocks-large{size[0]}x{size[1]}-{'causal' if causal else 'full'}-{dtype}"
        features = Features(blocks=Blocks(size))
        yield replace(base, id=name, dtype=dtype, causal=causal, features=features)
    wide = replace(base, heads=1, heads_k=1)
    for d, window in itertools.product((90, 128, 256), ((None, None), (200, 50))):
        features = Features(blocks=Blocks((128, 192)), window=window)
        yield replace(wide, id=f"blocks-large-d{d}-{window[0]}", d=d, features=features)
    changes: dict[str, dict[str, Any]] = {
        "none": {"blocks": Blocks((128, 128), keep=0.0), "sinks": "normal"},
        "all": {"blocks": Blocks((128, 128), keep=1.0)},
        "few": {"blocks": Blocks((128, 128), "h", keep=0.1)},
        "seqused": {"blocks": Blocks((128, 128)), "seqused_k": (301,)},
        "sinks": {"blocks": Blocks((128, 128), "q", keep=0.3), "sinks": "large"},
    }
    for name, fields in changes.items():
        yield replace(base, id=f"blocks-large-{name}", features=Features(**fields))
    lengths = Packed((70, 0, 431, 5), (90, 9, 340, 0), 3)
    features = Features(blocks=Blocks((128, 128)), packed=lengths)
    yield replace(base, id="blocks-large-packed", features=features)
    for values in ("nan_k", "nan_v", "inf_k", "inf_v", "nan_q", "nan_v_element"):
        features = Features(blocks=Blocks((128, 192)), poison=False)
        yield replace(base, id=f"blocks-large-{values}", values=values, features=features)


# What hides keys from some queries, so that NaN and infinity in them show in the others only.
HIDING: dict[str, dict[str, Any]] = {
    "keep": {"bias": Bias("bool")},
    "inf_bias": {"bias": Bias(values="some_inf")},
    "blocks": {"blocks": Blocks()},
    "ranges": {"ranges": Ranges()},
    "window": {"window": (20, 20)},
    "seqused": {"seqused_k": (141, 146)},
    "softcap": {"softcap": 4.0, "causal": True},
    "dropout": {"dropout_p": 0.5, "bias": Bias("bool", "k")},
    "dropout_causal": {"dropout_p": 0.5, "causal": True},
    "sinks": {"sinks": "normal", "causal": True},
    "packed": {"packed": Packed((70, 30), (90, 160)), "window": (50, 0)},
}


def _leaks() -> Iterator[Case]:
    """pytorch 101967, flashinfer 942, 945: NaN in masked keys and values."""
    base = Case("", "fp16", 2, 70, 150, 4, 2, features=Features(poison=False))
    values = ("nan_k", "nan_v", "inf_k", "inf_v", "nan_q", "nan_v_element")
    for (name, changes), value in itertools.product(HIDING.items(), values):
        for dtype in ("fp16", "fp32"):
            case = replace(_with(base, changes), dtype=dtype, values=value)
            yield replace(case, id=f"bug_pytorch_101967-{name}-{value}-{dtype}")
        case = replace(_with(base, changes), dtype="bf16", values=value, d=128, heads=2, batch=2)
        yield replace(case, id=f"bug_pytorch_101967-{name}-{value}-bf16-d128")


def _dropout() -> Iterator[Case]:
    base = Case("", "fp16", 2, 70, 150, 4, 2)
    seeds = ((0, 0), (1, 0), (0, 1), ((1 << 64) - 1, (1 << 64) - 1), (1 << 32, 0), (0, 1 << 32))
    for (seed, offset), state in itertools.product(seeds, (False, True)):
        features = Features(dropout_p=0.3, seed=seed, offset=offset, rng_state=state)
        name = f"bug_xformers_173-dropout-seed{seed}-offset{offset}-{'state' if state else 'host'}"
        yield replace(base, id=name, features=features)
    for p, dtype in itertools.product((1e-4, 0.1, 0.5, 0.9, 0.9999), (*FLOATS, "fp64")):
        features = Features(dropout_p=p, seed=42, outputs="flip_bh")
        yield replace(base, id=f"dropout{p}-{dtype}", dtype=dtype, features=features, causal=True)
    for sq, sk in ((1, 1), (1, 7), (3, 9), (200, 17), (1, 300)):
        for dtype in ("fp16", "fp32"):
            name = f"dropout-{sq}x{sk}-{dtype}"
            yield replace(
                base, id=name, dtype=dtype, sq=sq, sk=sk, features=Features(dropout_p=0.4)
            )
    for d in (32, 96, 128, 192, 256, 512):
        yield replace(base, id=f"dropout-d{d}", d=d, features=Features(dropout_p=0.4))
    shapes: dict[str, dict[str, Any]] = {
        "causal": {"sq": 300, "sk": 400, "causal": True},
        "keyless": {"sq": 290, "sk": 150, "causal": True, "scale": -0.3, "sinks": "normal"},
        "window": {"sq": 290, "sk": 430, "window": (230, 50), "values": "falling"},
        "packed": {"packed": Packed((130, 0, 70), (200, 5, 64)), "window": (30, 10)},
        "seqused": {"seqused_k": (141, 3), "out_dtype": "fp32"},
        "nan": {"causal": True, "values": "nan_v", "poison": False},
        "infinite": {"causal": True, "values": "inf_v", "poison": False},
        "group": {"heads": 6, "heads_k": 2, "sk": 300, "values": "nan_v_element"},
    }
    for (shape, changes), (d, dtype) in itertools.product(
        shapes.items(), ((64, "fp16"), (64, "bf16"), (100, "bf16"), (128, "fp16"), (256, "fp16"))
    ):
        case = replace(_with(base, {"dropout_p": 0.3, "seed": 9} | changes), d=d, dtype=dtype)
        yield replace(case, id=f"dropout-{shape}-d{d}-{dtype}")


def _dims() -> Iterator[Case]:
    """Which kernel takes a pair of head dims, plain and generic."""
    pairs = ((192, 128), (191, 127), (129, 128), (160, 1), (192, 129), (193, 128), (128, 192))
    for (d, dv), dtype in itertools.product(pairs, ("fp16", "bf16", "fp32")):
        case = Case("", dtype, 1, 70, 150, 2, 1, d, dv, causal=True, features=Features())
        yield replace(case, id=f"bug_753_952_1541-d{d}-dv{dv}-{dtype}")
        yield replace(_with(case, {"softcap": 4.0}), id=f"bug_753-d{d}-dv{dv}-softcap-{dtype}")
    for d, dtype in itertools.product((1, 32, 59, 96, 128, 192, 256, 300, 512), ("fp16", "fp32")):
        case = Case("", dtype, 1, 70, 150, 2, 1, d, features=Features(alibi="h", dropout_p=0.1))
        yield replace(case, id=f"generic-d{d}-{dtype}")


def _smoke() -> Iterator[Case]:
    common: dict[str, Any] = {"batch": 3, "sq": 133, "sk": 200, "heads": 2, "smoke": True}
    yield Case("smoke-everything", features=EVERYTHING, **common)
    yield Case("smoke-everything-packed", features=EVERYTHING_PACKED, **common)
    packed = Packed((70, 0, 1), (3, 90, 200))
    yield Case("smoke-packed", features=Features(packed=packed), causal=True, smoke=True)
    yield Case("smoke-window", sq=203, sk=131, features=Features(window=(40, 30)), smoke=True)
    yield Case("smoke-192-128", sq=70, sk=131, d=192, dv=128, smoke=True)


GROUPS = (
    _smoke,
    _pairs,
    _everything,
    _windows,
    _parts,
    _scores,
    _biases,
    _blocks,
    ranges_forward,
    _leaks,
    _dropout,
    _dims,
)
FEATURE_CASES = tuple(itertools.chain.from_iterable(group() for group in GROUPS))
