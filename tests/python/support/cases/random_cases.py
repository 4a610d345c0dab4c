"""Random cases for Hypothesis."""

from __future__ import annotations

import zlib
from dataclasses import replace

from hypothesis import strategies as st

from backends.tensors import LAYOUTS, WRITABLE_LAYOUTS
from cases.auxiliary import CHANGES, RANGES, SINKS
from cases.case import Bias, Blocks, Case, Features, Layouts, Packed, Ranges
from cases.gradient_case import GradientCase, GradientLayouts

AUXILIARY_DTYPES = ("", "fp32", "fp16", "bf16")


def _layout(names: tuple[str, ...]) -> st.SearchStrategy[str]:
    return st.sampled_from(sorted(names))


def _writable() -> st.SearchStrategy[str]:
    return _layout(WRITABLE_LAYOUTS)


def _lengths(most: int) -> st.SearchStrategy[int]:
    return st.integers(0, most) | st.sampled_from((0, 1, 63, 64, 65, 128))


def width() -> st.SearchStrategy[int | None]:
    return st.none() | st.sampled_from((-1, 0, 1, 63, 64, 1 << 62)) | st.integers(0, 300)


@st.composite
def _packed(draw: st.DrawFn) -> Packed:
    pairs = draw(st.lists(st.tuples(_lengths(150), _lengths(200)), max_size=4))
    if draw(st.booleans()):
        pairs = [(min(q, 1), k) for q, k in pairs]
    spare = draw(st.sampled_from((0, 0, 1, 100)))
    return Packed(tuple(q for q, _ in pairs), tuple(k for _, k in pairs), spare)


@st.composite
def _bias(draw: st.DrawFn) -> Bias:
    axes = "".join(axis for axis in "bhqk" if draw(st.booleans()))
    layout = draw(_layout(tuple(LAYOUTS)))
    if draw(st.booleans()):
        values = draw(st.sampled_from(("normal", "normal", "all", "nothing")))
        return Bias(draw(st.sampled_from(("bool", "uint8"))), axes, values, layout)
    values = draw(st.sampled_from(sorted(CHANGES.keys() - {"nan_hidden", "lowest", "large"})))
    return Bias(draw(st.sampled_from(AUXILIARY_DTYPES)), axes, values, layout)


@st.composite
def _blocks(draw: st.DrawFn) -> Blocks:
    size = draw(st.sampled_from((64, 128, 192))), draw(st.sampled_from((64, 128, 192)))
    axes = "".join(axis for axis in "bh" if draw(st.booleans()))
    keep = draw(st.sampled_from((0.2, 0.5, 0.9)))
    return Blocks(size, axes, keep, draw(_layout(tuple(LAYOUTS))))


@st.composite
def _ranges(draw: st.DrawFn) -> Ranges:
    axes = "".join(axis for axis in "bh" if draw(st.booleans()))
    intervals = draw(st.integers(1, 2))
    values = draw(st.sampled_from(sorted(RANGES)))
    return Ranges(values, intervals, axes, draw(_layout(tuple(LAYOUTS))))


@st.composite
def _features(draw: st.DrawFn, lengths_k: list[int], packed: Packed | None) -> Features:
    word = st.integers(0, (1 << 64) - 1)
    used = tuple(draw(st.integers(0, n)) for n in lengths_k) if draw(st.booleans()) else ()
    return Features(
        window=(draw(width()), draw(width())),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0, 30.0))),
        alibi=draw(st.sampled_from(("", "", "h", "1h", "bh"))),
        bias=draw(st.none() | _bias()),
        blocks=draw(st.none() | _blocks()),
        ranges=draw(st.none() | _ranges()),
        sinks=draw(st.sampled_from(("", "", *sorted(SINKS)))),
        dropout_p=draw(st.sampled_from((0.0, 0.0, 0.1, 0.5))),
        seed=draw(word),
        offset=draw(word),
        rng_state=draw(st.booleans()),
        small_dtype=draw(st.sampled_from(AUXILIARY_DTYPES)),
        max_logits=draw(st.booleans()),
        outputs=draw(_writable()),
        packed=packed,
        seqused_k=used,
    )


@st.composite
def random_cases(draw: st.DrawFn, dtypes: list[str]) -> Case:
    """Dense and packed, half of them without features."""
    heads_k = draw(st.integers(1, 3))
    case = Case(
        id="random",
        dtype=draw(st.sampled_from(dtypes)),
        batch=draw(st.integers(0, 3)),
        sq=draw(_lengths(200)),
        sk=draw(_lengths(300)),
        heads=heads_k * draw(st.integers(1, 3)),
        heads_k=heads_k,
        d=draw(st.integers(1, 200)),
        dv=draw(st.integers(0, 200)),
        causal=draw(st.booleans()),
        scale=draw(st.none() | st.floats(-1, 1, width=16)),
        values=draw(st.sampled_from(("normal", "positive", "rising"))),
        out_dtype=draw(st.sampled_from(("", "fp32"))),
        layouts=Layouts(
            *(draw(_layout(tuple(LAYOUTS))) for _ in "qkv"),
            out=draw(_writable()),
            lse=draw(_writable()),
        ),
    )
    if draw(st.booleans()):
        packed = draw(st.none() | _packed())
        lengths_k = list(packed.k) if packed else [case.sk] * case.batch
        features = draw(_features(lengths_k, packed))
        # An expanded axis repeats the first row, which may be poison.
        expanded = any(LAYOUTS[name].expand for name in case.layouts[1:3])
        case = replace(case, features=replace(features, poison=not expanded))
    return replace(case, id=f"random-{zlib.crc32(repr(case).encode())}")


@st.composite
def random_gradient_cases(draw: st.DrawFn, dtypes: list[str]) -> GradientCase:
    case = draw(random_cases(dtypes))
    dout = draw(_layout(tuple(LAYOUTS)))
    # float64 gradients and out have no float32 counterpart.
    wide = st.just("") if case.dtype == "fp64" else st.sampled_from(("", "fp32"))
    bias = case.features.bias
    if LAYOUTS[dout].expand or (bias and LAYOUTS[bias.layout].expand):
        case = replace(case, features=replace(case.features, poison=False))
    case = replace(case, out_dtype=draw(wide), id="random")
    case = replace(case, id=f"random-{zlib.crc32(repr(case).encode())}")
    return GradientCase(
        case,
        GradientLayouts(dout, *(draw(_writable()) for _ in range(5))),
        dlse=draw(st.booleans()),
        small=draw(st.sampled_from((True, True, False))),
        dout_dtype=draw(wide),
        grad_dtype=draw(wide),
        small_gradients=draw(wide),
        deterministic=draw(st.booleans()),
        keyless_lse=draw(st.sampled_from((-float("inf"), float("inf")))),
    )
