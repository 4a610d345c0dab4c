"""Random cases of attention with a cache for Hypothesis."""

from __future__ import annotations

import zlib
from dataclasses import replace

from hypothesis import strategies as st

from backends.tensors import LAYOUTS, WRITABLE_LAYOUTS
from cases.cache_case import TOGETHER, Append, CacheCase
from cases.random_cases import width
from oracle.kvcache import EIGHT_BIT


@st.composite
def _append(draw: st.DrawFn, d: int, batch: int) -> Append | None:
    if not draw(st.booleans()):
        return None
    rotary = draw(st.sampled_from((0, 2, 16, 64)))
    seqlens = st.lists(st.integers(0, 400), min_size=batch, max_size=batch)
    return Append(
        new=draw(st.integers(0, 40) | st.sampled_from((1, 16))),
        rotary=rotary if rotary <= d else 0,
        neox=draw(st.booleans()),
        table_dtype=draw(st.sampled_from(("", "fp32"))),
        spare=draw(st.integers(0, 3)),
        seqlens=tuple(draw(st.just([]) | seqlens)),
    )


@st.composite
def random_cache_cases(draw: st.DrawFn, dtypes: list[str]) -> CacheCase:
    lengths = draw(
        st.lists(st.integers(0, 300) | st.sampled_from((0, 1, 63, 64, 65, 128)), max_size=4)
    )
    heads_k = draw(st.integers(1, 3))
    page = draw(st.sampled_from((0, 0, 1, 4, 16, 64, 256)))
    cache_dtype = draw(st.sampled_from(("", "", *EIGHT_BIT)))
    d = draw(st.integers(1, 200))
    sq = draw(st.integers(0, 20) | st.sampled_from((1, 1, 1, 70)))
    splits = draw(st.sampled_from((0, 0, 1, 2, 5, 300)))
    layouts = sorted(name for name in WRITABLE_LAYOUTS if not name.startswith("fused"))
    latent = draw(st.sampled_from((False, False, True)))
    case = CacheCase(
        id="random",
        dtype=draw(st.sampled_from(dtypes)),
        lengths=tuple(lengths),
        sq=sq,
        heads=heads_k * draw(st.integers(1, 9)),
        heads_k=heads_k,
        d=d,
        dv=draw(st.just(0) | st.integers(1, d if latent else 200)),
        latent=latent,
        capacity=draw(st.integers(0, 400)),
        page=page,
        cache_dtype=cache_dtype,
        scales=draw(st.sampled_from(("", "head", "slot", "row"))) if cache_dtype else "",
        leftpad=tuple(draw(st.integers(0, n)) for n in lengths) if draw(st.booleans()) else (),
        batch_idx=not page and draw(st.booleans()),
        append=draw(_append(d, len(lengths))),
        tree=draw(st.sampled_from(("", "", "1", "b"))) if sq else "",
        causal=draw(st.booleans()),
        window=(draw(width()), draw(width())),
        softcap=draw(st.sampled_from((0.0, 0.0, 3.0, 30.0))),
        alibi=draw(st.sampled_from(("", "", "h", "1h", "bh"))),
        sinks=draw(st.booleans()),
        out_dtype=draw(st.sampled_from(("", "fp32"))),
        splits=splits,
        split_size=0 if splits else draw(st.sampled_from((0, 0, 64, 192))),
        layout=draw(st.sampled_from(layouts)),
        small_layout=draw(st.sampled_from(layouts)),
        values=draw(st.sampled_from(("normal", "positive", "rising"))),
        poison=draw(st.booleans()),
    )
    if case.dv == 0 and not latent and draw(st.integers(0, 3)) == 0:
        case = replace(case, layout=draw(st.sampled_from(TOGETHER)))
    if case.dtype == "fp64":
        case = replace(case, out_dtype="")
    if case.eight_bit and not case.scales and case.values == "positive":
        case = replace(case, values="normal")  # scores of 8-bit integers would exceed float16
    return replace(case, id=f"random-{zlib.crc32(repr(case).encode())}")


def for_hopper(case: CacheCase) -> CacheCase:
    """The same but for what Hopper's kernels do not take."""
    d, dv = -(-case.d // 8) * 8, -(-case.dv // 8) * 8
    layout = case.layout
    if layout not in TOGETHER and not LAYOUTS[layout].is_aligned:
        layout = "rows_padded"
    page = 8 if 0 < case.page < 8 else case.page
    return replace(
        case,
        d=d,
        dv=min(dv, d) if case.latent else dv,
        cache_dtype="",
        scales="",
        softcap=0.0,
        alibi="",
        page=page,
        leftpad=() if page else case.leftpad,
        layout=layout,
        id=f"{case.id}-hopper",
    )
