"""Cases of the backward. `bug_...` in an id names where users met that bug, as in features.py.

Those below are small, for the emulator; the forward's cases follow, for the CPU and for GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from backends.tensors import LAYOUTS, WRITABLE_LAYOUTS
from cases import varlen as varlen_cases
from cases.auxiliary import CHANGES
from cases.case import FULL, Bias, Blocks, Layouts, Packed, Ranges
from cases.features import FEATURE_CASES, HIDING, SINGLE
from cases.forward import FORWARD_CASES
from cases.gradient_case import GradientCase, GradientLayouts, make
from cases.one_feature import one_feature
from cases.positions import positions
from cases.ranges import ranges_backward


def _lengths() -> Iterator[GradientCase]:
    squares = ((1, 1), (64, 64), (128, 128), (200, 200))
    lengths = (*squares, (1, 70), (70, 1), (65, 129), (129, 65), (192, 193))
    for (sq, sk), causal in itertools.product(lengths, (False, True)):
        for dtype in ("fp16", "bf16", "fp32"):
            name = f"{sq}x{sk}-{'causal' if causal else 'full'}-{dtype}"
            yield make(name, dtype=dtype, sq=sq, sk=sk, causal=causal)
    for dtype, deterministic in itertools.product(("fp16", "bf16", "fp32"), (False, True)):
        common: dict[str, Any] = {"dtype": dtype, "deterministic": deterministic, "causal": True}
        order = f"{dtype}-{deterministic}"
        one = {"sq": 1, "sk": 1, "heads": 1, "d": 16}
        yield make(f"bug_334-1x1x1x16-{order}", **common, **one)
        # More queries than keys, by more than a tile: rows without keys, then a ragged tail.
        for sq, sk in ((200, 3), (330, 70), (257, 1)):
            yield make(f"bug_443-{sq}x{sk}-{order}", **common, sq=sq, sk=sk)
            yield make(
                f"bug_443-{sq}x{sk}-inf-{order}", **common, sq=sq, sk=sk, keyless_lse=float("inf")
            )
        # An LSE far below 0 beside rows that do not exist (upstream's bwd_overflow): exp overflows.
        for sq, sk, d in ((113, 70, 64), (70, 113, 128)):
            far = {"sq": sq, "sk": sk, "d": d, "values": "negative"}
            yield make(f"bug_a4f148b6-{sq}x{sk}-{order}", **common, **far)
    for dtype, small in itertools.product(("fp16", "fp32", "fp64"), (False, True)):
        for batch, sq, sk in ((0, 70, 90), (2, 0, 90), (2, 70, 0), (2, 0, 0)):
            name = f"bug_db2f8069_2470_2515-{batch}-{sq}x{sk}-{'small' if small else 'plain'}"
            shape = {"batch": batch, "sq": sq, "sk": sk}
            features = {"alibi": "h", "sinks": "normal", "bias": Bias(axes="hk")} if small else {}
            yield make(f"{name}-{dtype}", dtype=dtype, **shape, **features)


def _dims() -> Iterator[GradientCase]:
    dims = (16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 256, 320, 512)
    for d, dtype in itertools.product(dims, ("fp16", "bf16", "fp32")):
        yield make(f"d{d}-{dtype}", d=d, dtype=dtype, causal=True)
    for d, deterministic in itertools.product((128, 192, 256, 512), (False, True)):
        changes: dict[str, Any] = {"d": d, "deterministic": deterministic, "sq": 130, "sk": 70}
        yield make(f"d{d}-alibi-{deterministic}", **changes, alibi="h", heads=1)
        yield make(f"d{d}-dropout-{deterministic}", **changes, dropout_p=0.3, heads=1)
    pairs = ((64, 32), (32, 64), (128, 64), (59, 111), (192, 128), (191, 127), (256, 1), (1, 256))
    pairs += ((512, 512), (512, 128), (100, 300))
    for (d, dv), dtype in itertools.product(pairs, ("fp16", "bf16", "fp32")):
        yield make(f"bug_1487-d{d}-dv{dv}-{dtype}", d=d, dv=dv, dtype=dtype, causal=True)
    for d, dtype in itertools.product((1, 300, 520), ("fp16", "fp32", "fp64")):
        yield make(f"d{d}-{dtype}", d=d, dtype=dtype, causal=True)


def _heads() -> Iterator[GradientCase]:
    for (heads, heads_k), dtype in itertools.product(
        ((4, 4), (4, 1), (4, 2), (6, 3), (5, 1)), ("fp16", "bf16", "fp32")
    ):
        shape = {"heads": heads, "heads_k": heads_k, "batch": 2, "sq": 33, "sk": 50}
        yield make(f"heads{heads}-{heads_k}-{dtype}", dtype=dtype, causal=True, **shape)
        features = {"softcap": 2.0, "bias": Bias(axes="hk"), "grad_dtype": "fp32"}
        yield make(f"heads{heads}-{heads_k}-bias-{dtype}", dtype=dtype, **shape, **features)


def _parts() -> Iterator[GradientCase]:
    """Groups of more heads than a CTA of a GPU takes."""
    for (heads, heads_k), dtype in itertools.product(((6, 1), (18, 2)), ("fp16", "bf16", "fp32")):
        shape = {"heads": heads, "heads_k": heads_k, "dtype": dtype, "sq": 33}
        hiding = {"dout": "nan", "window": (9, 0), "poison": False}
        yield make(f"parts{heads}-{heads_k}-{dtype}", **shape, sk=70, causal=True)
        yield make(f"parts{heads}-{heads_k}-nan-{dtype}", **shape, **hiding)
        packed = {"packed": Packed((33, 0, 20), (70, 9, 66), 3), "grad_dtype": "fp32"}
        yield make(f"parts{heads}-{heads_k}-packed-{dtype}", **shape, **packed)
    more: dict[str, dict[str, Any]] = {
        "no-queries": {"sq": 0},
        "no-keys": {"sk": 0},
        "packed-no-queries": {"packed": Packed((0, 0), (70, 9), 3)},
        "seqused": {"sq": 9, "batch": 3, "seqused_k": (33, 0, 90)},
        "features": {"sq": 33, "bias": Bias(values="some_inf"), "dropout_p": 0.2, "alibi": "h"},
        "most": {"heads": 270, "heads_k": 2, "sq": 3, "sk": 9, "everywhere": False},
    }
    more |= {f"d{d}": {"d": d, "dv": 128, "sq": 20} for d in (128, 192, 256, 512)}
    for (name, changes), dtype in itertools.product(more.items(), ("fp16", "fp32")):
        yield make(f"parts-{name}-{dtype}", **{"heads": 5, "dtype": dtype} | changes)


def _features() -> Iterator[GradientCase]:
    """One by one; of several together, those of every two are below."""
    for (name, changes), dtype in itertools.product(
        SINGLE.items(), ("fp16", "bf16", "fp32", "fp64")
    ):
        shape = {"batch": 2, "sq": 70, "sk": 151, "heads": 2, "heads_k": 2}
        if dtype == "fp64" and name in ("out32", "wide", "dv"):
            continue
        one = shape | changes | {"dtype": dtype}
        yield make(f"single-{name}-{dtype}", **one)
        if dtype in ("fp16", "fp32") and name not in ("gqa", "out32"):
            one |= {"grad_dtype": "fp32", "small_gradients": "fp32", "heads_k": 1}
            yield make(f"single-{name}-{dtype}-gqa-fp32-gradients", **one)
    windows = ((0, 0), (7, 5), (63, 64), (0, None), (None, 5), (5, 120), (None, 90), (-1, 0))
    for (left, right), (sq, sk) in itertools.product(windows, ((70, 150), (200, 70))):
        dtype = ("fp16", "bf16")[sq % 3 == 1]
        name = f"bug_895_563_1661-window{left}_{right}-{sq}x{sk}"
        yield make(name, window=(left, right), sq=sq, sk=sk, heads=1, dtype=dtype)
        yield make(f"{name}-fp32", window=(left, right), sq=sq, sk=sk, heads=1, dtype="fp32")
    for axes, dtype in itertools.product(("h", "1h", "bh"), ("fp16", "bf16", "fp32")):
        changes = {"alibi": axes, "batch": 2, "dtype": dtype}
        yield make(f"alibi-{axes}-{dtype}", **changes)
        yield make(f"alibi-{axes}-causal-{dtype}", **changes, causal=True, small_gradients="fp32")
        yield make(f"alibi-{axes}-small-{dtype}", **changes, small_dtype="bf16", sq=5, sk=33)
    for sinks, dtype in itertools.product(("normal", "none", "large", "small"), ("fp16", "fp32")):
        changes = {"sinks": sinks, "dtype": dtype, "causal": True, "batch": 2}
        yield make(f"bug_1797-sinks-{sinks}-{dtype}", **changes)
        yield make(f"bug_1797-sinks-{sinks}-no-keys-{dtype}", **changes, sk=0, sq=20)
        yield make(f"bug_1797-sinks-{sinks}-keyless-{dtype}", **changes, sk=20, sq=150)
        yield make(f"bug_1797-sinks-{sinks}-fp32-{dtype}", **changes, small_dtype="fp32")
    for values, dtype in itertools.product(("normal", "large"), ("fp16", "bf16", "fp32")):
        for softcap in (0.5, 30.0):
            changes = {"softcap": softcap, "values": values, "dtype": dtype}
            yield make(f"bug_2402-softcap{softcap}-{values}-{dtype}", **changes)
            yield make(f"softcap{softcap}-{values}-causal-{dtype}", **changes, causal=True, d=128)


def _biases() -> Iterator[GradientCase]:
    shape = {"batch": 2, "sq": 70, "sk": 90, "heads": 2, "heads_k": 1}
    every = ["".join(x) for n in range(5) for x in itertools.combinations("bhqk", n)]
    for axes, dtype in itertools.product(every, ("fp16", "fp32")):
        name = f"bug_xformers_636-dbias-{axes or 'one'}-{dtype}"
        causal = axes in ("hk", "bq", "bhqk", "")
        yield make(name, bias=Bias(axes=axes), dtype=dtype, causal=causal, **shape)
        bias = Bias("fp32", axes, "some_inf" if axes in ("bhqk", "hqk", "qk") else "normal")
        yield make(f"{name}-fp32", bias=bias, dtype=dtype, softcap=2.0, sq=5, sk=70)
    for kind, small, dtype in itertools.product(
        ("fp16", "bf16", "fp32", "fp64"), ("", "fp32"), ("fp16", "bf16", "fp32")
    ):
        bias = Bias(kind, "hqk", "some_inf")
        name = f"dbias-of-{kind}-{small or 'alike'}-{dtype}"
        yield make(name, bias=bias, small_gradients=small, dtype=dtype, sq=40, sk=33)
    for layout in WRITABLE_LAYOUTS:
        if layout.startswith("fused"):
            continue
        gradient_layouts = GradientLayouts(dbias=layout)
        for dtype in ("fp16", "fp32"):
            changes = {"bias": Bias(axes="bhqk"), "gradient_layouts": gradient_layouts}
            yield make(f"dbias-{layout}-{dtype}", **changes, dtype=dtype, sq=20, sk=70)
    for layout in ("expand_b", "expand_h", "expand_s", "expand_bh", "step_d", "offset_1"):
        bias = Bias(layout=layout)
        yield make(f"bug_2189-bias-{layout}", bias=bias, batch=2, sq=20, sk=70)
    for values, dtype in itertools.product(sorted(CHANGES), ("fp16", "bf16", "fp32")):
        bias = Bias("fp32", values=values)
        name = f"bug_flashinfer_1178_jax_32242-bias-{values}-{dtype}"
        yield make(name, bias=bias, causal=True, dtype=dtype, heads=1)
    for kind, values in itertools.product(("bool", "uint8"), ("normal", "all", "nothing")):
        yield make(f"keep-{kind}-{values}", bias=Bias(kind, values=values))
    used = {"bias": Bias(), "seqused_k": (50, 0), "alibi": "h", "batch": 2}
    packed = {"packed": Packed((30, 0, 70), (70, 9, 0), 3), "bias": Bias(axes="hqk")}
    for dtype in ("fp16", "fp32"):
        yield make(f"dbias-seqused-{dtype}", dtype=dtype, **used)
        yield make(f"dbias-packed-{dtype}", dtype=dtype, **packed)
        full = packed | {"bias": Bias(), "alibi": "bh", "sinks": "normal"}
        yield make(f"dbias-packed-each-{dtype}", dtype=dtype, **full)


def _varlen() -> Iterator[GradientCase]:
    for (name, lengths), causal in itertools.product(varlen_cases.LENGTHS.items(), (False, True)):
        changes = {"packed": varlen_cases.packed(*lengths), "causal": causal}
        mask = "causal" if causal else "full"
        for dtype in ("fp16", "fp32"):
            # Rows without queries: bug_1155, bug_2421 (NaN), bug_2562 and bug_2568 (d 256).
            yield make(f"varlen-{name}-{mask}-{dtype}", **changes, dtype=dtype)
        changes["packed"] = varlen_cases.packed(*lengths, spare=77)
        changes |= {"alibi": "h", "sinks": "normal", "bias": Bias(axes="h")}
        yield make(f"varlen-{name}-{mask}-features", **changes, dtype="bf16")
    for lengths in ("bug_1155-middle", "bug_2515-no-queries"):
        packed = varlen_cases.packed(*varlen_cases.LENGTHS[lengths])
        for d, deterministic in itertools.product((128, 256, 512), (False, True)):
            changes = {"packed": packed, "d": d, "deterministic": deterministic, "heads": 1}
            yield make(f"varlen-{lengths}-d{d}-{deterministic}", **changes)
    for used, causal in itertools.product(((90, 0, 1), (0, 0, 0), (33, 64, 65)), (False, True)):
        changes = {
            "seqused_k": used,
            "batch": 3,
            "causal": causal,
            "heads": 1,
            "window": (40, None),
        }
        for dtype in ("fp16", "fp32"):
            name = f"seqused{'_'.join(map(str, used))}-{'causal' if causal else 'full'}-{dtype}"
            yield make(name, **changes, dtype=dtype)


# Whether a probability of NaN that is dropped is a NaN in dV, nobody says.
UNSETTLED = (
    "dropout-nan_q",
    "dropout_causal-nan_q",
    "dropout_causal-nan_k",
    "dropout_causal-inf_k",
)


def _leaks() -> Iterator[GradientCase]:
    """pytorch 101967: NaN in keys, values, queries and dout reaches only what sees it."""
    values = (("nan_k", "normal"), ("nan_v", "normal"), ("nan_q", "normal"), ("normal", "nan"))
    values += (("nan_v_element", "normal"), ("normal", "nan_element"))
    shape = {"batch": 2, "sq": 70, "sk": 150, "heads": 2, "heads_k": 1, "poison": False}
    for (name, changes), (value, dout) in itertools.product(HIDING.items(), values):
        if f"{name}-{value}" in UNSETTLED:
            continue
        for dtype in ("fp16", "fp32"):
            changed = shape | changes | {"values": value, "dout": dout, "dtype": dtype}
            which = value if dout == "normal" else f"dout_{dout}"
            yield make(f"bug_pytorch_101967-{name}-{which}-{dtype}", **changed)


def _blocks_and_dropout() -> Iterator[GradientCase]:
    for size, axes in itertools.product(((64, 64), (128, 64), (64, 128)), ("bh", "")):
        blocks = Blocks(size, axes)
        name = f"blocks{size[0]}x{size[1]}-{axes or 'one'}"
        for dtype in ("fp16", "fp32"):
            yield make(f"{name}-{dtype}", blocks=blocks, sq=200, sk=200, dtype=dtype)
    for keep, causal in itertools.product((0.0, 0.1, 1.0), (False, True)):
        name = f"blocks-keep{keep}-{'causal' if causal else 'full'}"
        yield make(name, blocks=Blocks(keep=keep), sq=130, sk=200, causal=causal, heads=1)
    for p, dtype in itertools.product((1e-4, 0.1, 0.5, 0.99), ("fp16", "bf16", "fp32")):
        changes = {"dropout_p": p, "seed": 42, "offset": 1 << 40, "dtype": dtype}
        yield make(f"bug_xformers_173-dropout{p}-{dtype}", **changes)
        yield make(f"dropout{p}-state-causal-{dtype}", **changes, rng_state=True, causal=True)
    for sq, sk in ((1, 1), (3, 9), (130, 17)):
        yield make(f"dropout-{sq}x{sk}", dropout_p=0.4, sq=sq, sk=sk, batch=3)


def _dtypes() -> Iterator[GradientCase]:
    names = ("dout_dtype", "out_dtype", "grad_dtype")
    for dtype, chosen in itertools.product(
        ("fp16", "bf16"), itertools.product(("", "fp32"), repeat=3)
    ):
        changes = dict(zip(names, chosen, strict=True))
        name = "-".join(x or "alike" for x in chosen)
        yield make(f"dtypes-{name}-{dtype}", **changes, dtype=dtype)
        yield make(f"dtypes-{name}-{dtype}-d40", **changes, dtype=dtype, d=40, dlse=False)
    for scale, dtype in itertools.product((0.0, -0.5, 3.0), ("fp16", "bf16", "fp32", "fp64")):
        yield make(f"scale{scale}-{dtype}", scale=scale, dtype=dtype, causal=True)
    values = ("large", "positive", "rising", "same_keys", "zeros")
    for value, dtype in itertools.product(values, ("fp16", "bf16", "fp32")):
        yield make(f"values-{value}-{dtype}", values=value, dtype=dtype, causal=True)
    for dout, dtype in itertools.product(("large", "zeros"), ("fp16", "bf16", "fp32")):
        yield make(f"dout-{dout}-{dtype}", dout=dout, dtype=dtype)
        yield make(f"dout-{dout}-no-dlse-{dtype}", dout=dout, dtype=dtype, dlse=False)
    every = {"alibi": "h", "sinks": "normal", "bias": Bias()}
    for dtype in ("fp16", "fp32"):
        yield make(f"small-unwanted-{dtype}", dtype=dtype, small=False, **every)


def _layouts() -> Iterator[GradientCase]:
    """88c4e5db, 355, 91: dout transposed; 9ee0ff1d: strides of one tensor used for another."""
    shape = {"batch": 2, "sq": 33, "sk": 40, "heads": 2, "heads_k": 2, "causal": True}
    for name in LAYOUTS:
        if name.startswith("fused") or name == "contiguous":
            continue
        own = name if name in WRITABLE_LAYOUTS else "contiguous"
        gradient_layouts = GradientLayouts(name, own, own, own, name)
        changes = {"layouts": Layouts(*[name] * 3, own, own)}
        changes |= {"gradient_layouts": gradient_layouts, "poison": own == name}
        for dtype, d in (("fp16", 64), ("bf16", 40), ("fp32", 40), ("fp16", 59)):
            yield make(f"layout-{name}-{dtype}-d{d}", dtype=dtype, d=d, **changes, **shape)
    for position, dtype in itertools.product(GradientLayouts._fields[:5], ("fp16", "fp32")):
        for name in ("hsbd", "flip_s", "step_d", "heads_odd", "offset_1", "transposed"):
            changes = {"gradient_layouts": GradientLayouts(**{position: name})}
            yield make(f"layout-{position}-{name}-{dtype}", dtype=dtype, **changes, **shape)
    for position, dtype in itertools.product(Layouts._fields, ("fp16", "fp32")):
        for name in ("hsbd", "expand_bh", "heads_odd"):  # 818: q and k of different contiguity
            if name == "expand_bh" and position in ("out", "lse"):
                continue
            changes = {"layouts": Layouts(**{position: name}), "poison": False}
            yield make(f"bug_818-{position}-{name}-{dtype}", dtype=dtype, **changes, **shape)
    for name in ("expand_bh", "expand_s", "expand_h"):  # as the gradient of a sum is
        for dtype in ("fp16", "fp32"):
            changes = {"gradient_layouts": GradientLayouts(name), "poison": False}
            yield make(f"bug_8-dout-{name}-{dtype}", dtype=dtype, **changes, **shape)
    mixed = Layouts("bhsd", "rows_odd", "transposed", "flip_all_step_d", "step_s")
    own = GradientLayouts("rows_odd", "transposed", "hsbd", "flip_s", "step_s", "step_d")
    for dtype, grad_dtype in itertools.product(("fp16", "bf16", "fp32"), ("", "fp32")):
        changes = {"layouts": mixed, "gradient_layouts": own, "d": 37, "dv": 51}
        changes |= {"dtype": dtype, "grad_dtype": grad_dtype, "dout_dtype": grad_dtype}
        yield make(f"layout-mixed-{dtype}-{grad_dtype or 'alike'}", **changes, **shape)
        packed = {"packed": Packed((30, 0, 7), (20, 9, 40)), "heads": 2}
        yield make(f"layout-mixed-packed-{dtype}-{grad_dtype or 'alike'}", **changes, **packed)


def _everything() -> Iterator[GradientCase]:
    common: dict[str, Any] = {
        "window": (50, 30),
        "softcap": 5.0,
        "alibi": "bh",
        "bias": Bias(values="some_inf"),
        "blocks": Blocks(keep=0.7),
        "ranges": Ranges("normal", 2),
        "sinks": "none",
        "dropout_p": 0.17,
        "seed": (1 << 63) + 1,
        "offset": (1 << 63) + 7,
        "rng_state": True,
        "heads": 4,
        "heads_k": 2,
    }
    dense = common | {"batch": 3, "sq": 70, "sk": 90, "seqused_k": (80, 0, 33)}
    packed = common | {"packed": Packed((40, 70, 0), (70, 9, 90), 3), "seqused_k": (69, 5, 50)}
    for dtype, deterministic in itertools.product(("fp16", "bf16", "fp32", "fp64"), (False, True)):
        changes: dict[str, Any] = {"dtype": dtype, "deterministic": deterministic}
        for name, shape in (("dense", dense), ("packed", packed)):
            yield make(f"everything-{name}-{dtype}-{deterministic}", **changes | shape)
            odd = {"d": 37, "dv": 51, "grad_dtype": "" if dtype == "fp64" else "fp32"}
            yield make(f"everything-{name}-odd-{dtype}-{deterministic}", **changes | shape | odd)
    for d, dv in ((32, 32), (128, 128), (192, 128), (256, 256), (400, 512)):
        yield make(f"everything-d{d}-dv{dv}", **dense | {"heads": 2, "heads_k": 1}, d=d, dv=dv)


def _smoke() -> Iterator[GradientCase]:
    """A few that reach every part of a kernel."""
    for deterministic in (False, True):
        common: dict[str, Any] = {"deterministic": deterministic, "smoke": True}
        order = "deterministic" if deterministic else "atomic"
        yield make(f"smoke-ragged-{order}", **common, sq=131, sk=203)
        yield make(f"smoke-causal-{order}", **common, sq=203, sk=131, d=128, causal=True)
        yield make(f"smoke-wide-{order}", **common, sq=65, sk=129, d=256)
        yield make(f"smoke-chunks-{order}", **common, sq=65, sk=70, d=512, causal=True)
        yield make(f"smoke-copy-{order}", **common, layouts=Layouts(*["offset_1"] * 5), d=59)
        yield make(f"smoke-no-keys-{order}", **common, sk=0)
        packed = Packed((70, 0, 1), (3, 90, 100))
        yield make(f"smoke-packed-{order}", **common, packed=packed, causal=True, alibi="h")
        features = {"bias": Bias(axes="hk"), "dropout_p": 0.2, "sinks": "normal", "softcap": 4.0}
        yield make(f"smoke-features-{order}", **common, **features, grad_dtype="fp32")
        yield make(f"smoke-parts-{order}", **common, sq=33, sk=150, heads=6, heads_k=1)


def _many() -> Iterator[GradientCase]:
    """1786: more than the y and z axes of a CUDA grid can hold."""
    common: dict[str, Any] = {"sk": 2, "heads": 1, "heads_k": 1, "d": 8, "everywhere": False}
    for deterministic in (False, True):
        changes = common | {"deterministic": deterministic, "sq": 1}
        name = f"bug_1786-{'deterministic' if deterministic else 'atomic'}"
        yield make(f"{name}-batch", **changes, batch=65537)
        yield make(f"{name}-heads", **changes | {"heads": 65537, "heads_k": 65537})
        yield make(f"{name}-group", **changes | {"heads": 65537})
        yield make(f"{name}-alibi", **changes, batch=65537, alibi="bh")
        packed = Packed(tuple(n % 3 for n in range(65537)), tuple(n % 4 for n in range(65537)))
        yield make(f"{name}-packed", **changes, packed=packed)


def _of_the_forward() -> Iterator[GradientCase]:
    """The forward's own cases, with what only the backward has changing from one to the next."""
    cases = (*FORWARD_CASES, *FEATURE_CASES, *varlen_cases.VARLEN_CASES)
    most = {"fp64": 1 << 13}
    kept = [case for case in cases if case.scores <= most.get(case.dtype, 1 << 16)]
    kept = [case for case in kept if not any(name in case.id for name in UNSETTLED)]
    # GPU kernels take a key as hidden where its score is -inf, and 0 * inf as 0.
    kept = [case for case in kept if "inf_k" not in case.id or case.dtype in ("fp32", "fp64")]
    # An LSE that is rounded to float32 then tells nothing about probabilities.
    kept = [case for case in kept if abs(case.scale or 1) < 1000]
    for number, case in enumerate(kept):
        if number % 4 and not FULL:
            continue
        wide = "fp32" if number % 3 == 0 and case.dtype != "fp64" else ""
        layouts = case.layouts
        own = GradientLayouts(layouts.q, *[layouts.out] * 3, layouts.lse)
        yield GradientCase(
            replace(case, id=f"forward-{case.id}"),
            own,
            dlse=number % 8 != 0,
            grad_dtype=wide,
            small_gradients=wide,
            deterministic=number % 16 == 0,
            everywhere=False,
        )


GROUPS = (
    *(_smoke, _lengths, _dims, _heads, _parts, _features, _biases, _varlen, _leaks, positions),
    ranges_backward,
    *(_blocks_and_dropout, one_feature, _dtypes, _layouts, _everything, _many, _of_the_forward),
)
BACKWARD_CASES = tuple(itertools.chain.from_iterable(group() for group in GROUPS))
