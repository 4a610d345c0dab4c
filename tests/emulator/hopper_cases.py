"""Cases of the Hopper kernels, for the emulated GPU."""

from __future__ import annotations

from decode_cases import PREFILL, decode, latent
from emulated_driver import (
    BACKWARD_FEATURE_CASES,
    BACKWARD_PLAIN_CASES,
    BACKWARD_RACES,
    BASIC_CASES,
    FEATURE_CASES,
    PLAIN_CASES,
    Case,
    backward,
    wide,
)


def hopper(*cases: Case, multiprocessors: int = 1) -> tuple[Case, ...]:
    """On an H100 of few multiprocessors, so that a CTA takes several blocks."""
    more = f"gpu=90 smem=232448 multiprocessors={multiprocessors}"
    return tuple(case._replace(more=f"{case.more} {more}") for case in cases)


def alone(feature: str, cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases with this feature and no other."""
    names = ("softcap=", "alibi=", "bias=", "block=", "ranges=", "dropout=")
    found = ([name for name in names if name in case.more] for case in cases)
    return tuple(
        case
        for case, features in zip(cases, found, strict=True)
        if features == [f"{feature}="] and case.scale > 0
    )


# Tiles of 192 rows and 128 keys. Several tiles a CTA, and several CTAs' work for one, with and
# without hidden keys; NaN in tiles that are masked, and in others.
HOPPER_RACES = hopper(
    Case(seqlen_q=200, seqlen_k=300, causal=1, more="nan=seen"),
    Case(seqlen_q=400, seqlen_k=270, more="nan=hidden"),
    Case(
        seqlen_q=266,
        seqlen_k=410,
        causal=1,
        more="cu_q=0,70,70,71,136,266 cu_k=0,65,125,125,205,410 nan=seen sink=1",
    ),
    Case(batch=3, seqlen_q=65, seqlen_k=300, heads=1, more="used=300,0,140 nan=hidden"),
    # No tile is masked: all that the guard does is to read blocks, more than are known at a time.
    Case(seqlen_q=400, seqlen_k=256),
)
HOPPER_CASES = hopper(
    *(case for case in BASIC_CASES + PLAIN_CASES if case.scale > 0),
    Case(seqlen_q=300, seqlen_k=700, scale=2.0),
    Case(seqlen_q=130, seqlen_k=700, scale=2.0, causal=1, more="left=400"),
    Case(seqlen_q=500, seqlen_k=600, heads=1, more="left=230 right=50 nan=seen"),
) + hopper(
    Case(batch=2, seqlen_q=400, seqlen_k=140, heads=4, heads_k=2),
    Case(seqlen_q=500, seqlen_k=400, causal=1, more="nan=seen out=fp32"),
    # A CTA that begins late takes a first block whose next sequence has been written.
    Case(seqlen_q=266, seqlen_k=410, more="cu_q=0,70,70,71,136,266 cu_k=0,65,125,125,205,410"),
    multiprocessors=3,
)


def by_passes(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """Of head dim 512: K comes in two parts, and the second pass makes 44 columns."""
    return tuple(case._replace(head_dim_v=300, scale=0.05) for case in wide(cases, 512))


# Thread Sanitizer takes half a minute for the first one, minutes for others.
HOPPER_512_CASES = by_passes(
    hopper(
        Case(seqlen_q=70, seqlen_k=200, heads=1, causal=1, more="nan=seen"),
    )
    + HOPPER_RACES
    + hopper(
        *(case for case in PLAIN_CASES if "split" in case.more or "left" in case.more),
        Case(seqlen_q=300, seqlen_k=200, heads=1, causal=1, more="nan=seen out=fp32 sink=1"),
    )
)

# Of the last one's tiles, the first 27 are hidden.
HOPPER_RANGE_CASES = hopper(
    *alone("ranges", FEATURE_CASES),
    Case(seqlen_q=20, seqlen_k=4400, heads=1, more="ranges=1000,1"),
)
# Tiles that are hidden, that are seen, and that have parts of several blocks.
HOPPER_BLOCK_CASES = hopper(
    Case(seqlen_q=430, seqlen_k=600, more="block=128,192 nan=hidden"),
    Case(seqlen_q=300, seqlen_k=450, causal=1, more="block=192,128 nan=seen out=fp32"),
    Case(batch=2, seqlen_q=430, seqlen_k=500, heads=1, more="block=128,128 used=400,0 left=300"),
    Case(seqlen_q=20, seqlen_k=4400, heads=1, more="block=128,128"),
)
HOPPER_SCORED = hopper(
    *alone("dropout", FEATURE_CASES),
    Case(seqlen_q=400, seqlen_k=300, causal=1, more="alibi=0.1 nan=hidden"),
    Case(seqlen_q=130, seqlen_k=430, heads=1, more="alibi=-0.05 left=200 right=50 nan=seen"),
    Case(seqlen_q=300, seqlen_k=290, scale=1.0, causal=1, more="softcap=5 nan=seen"),
    Case(seqlen_q=200, seqlen_k=300, causal=1, more="softcap=50 nan=hidden"),
    Case(seqlen_q=400, seqlen_k=300, causal=1, more="dropout=0.7 nan=hidden"),
    Case(batch=2, seqlen_q=130, seqlen_k=290, heads=4, heads_k=2, more="dropout=0.1 nan=seen"),
)

# The last ones' keys are split.
HOPPER_PREFILL_CASES = hopper(*PREFILL) + hopper(
    *decode(
        Case(seqlen_q=130, seqlen_k=4224, heads=1, causal=1, more="ragged=1 filled=4200"),
        Case(seqlen_q=130, seqlen_k=4224, heads=1, causal=1, more="ragged=1 filled=4224 page=16"),
    ),
    multiprocessors=132,
)

# Tiles of 16, 32 and 64 rows. The first five are joined by clusters.
HOPPER_DECODE_RACES = hopper(
    *decode(
        Case(
            batch=2,
            seqlen_q=1,
            seqlen_k=704,
            heads=6,
            heads_k=2,
            more="filled=700,170 splits=4 sink=1 page=16 nan=seen left=600",
        ),
        Case(batch=3, seqlen_q=5, seqlen_k=320, heads=1, more="filled=300,0,129 split_size=128"),
        Case(seqlen_q=9, seqlen_k=300, head_dim=40, head_dim_v=32, causal=1,
             more="splits=3 tree=1 nan=seen"),
        Case(batch=2, seqlen_q=2, seqlen_k=900, heads=1, more="filled=900,60 splits=8 out=fp32"),
        Case(batch=2, seqlen_q=1, seqlen_k=130, heads=1, more="filled=130,0 splits=2 nan=seen"),
        Case(seqlen_q=17, seqlen_k=400, causal=1, more="splits=5 nan=seen"),
        # More tiles than the ring has buffers.
        Case(seqlen_q=40, seqlen_k=704, heads=1, causal=1,
             more="filled=690 splits=1 nan=seen page=8 left=650"),
        Case(seqlen_q=1, seqlen_k=704, heads=1, more="filled=690 splits=1"),
        # The result takes the place of the only tile of V.
        Case(seqlen_q=50, seqlen_k=64, heads=1),
        Case(seqlen_q=1, seqlen_k=100, more="filled=0 sink=1"),
    ),
    multiprocessors=132,
)  # fmt: skip
HOPPER_QUANTIZED_CASES = hopper(
    *decode(
        Case(batch=2, seqlen_q=1, seqlen_k=704, heads=6, heads_k=2,
             more="filled=700,170 splits=4 sink=1 page=16 nan=seen left=600 cache=e4m3 "
             "scales=slot"),
        Case(seqlen_q=9, seqlen_k=300, causal=1,
             more="splits=3 tree=1 nan=seen cache=e5m2 scales=row"),
        # More tiles than the ring has buffers.
        Case(seqlen_q=1, seqlen_k=704, heads=1,
             more="filled=690 splits=1 cache=e4m3 scales=row nan=seen"),
        Case(seqlen_q=40, seqlen_k=704, heads=1, causal=1,
             more="filled=690 splits=1 page=8 left=650 cache=int8 scales=head"),
        Case(seqlen_q=17, seqlen_k=400, head_dim=48, head_dim_v=32, causal=1,
             more="splits=5 nan=seen cache=e5m2 scales=head out=fp32"),
        Case(batch=3, seqlen_q=5, seqlen_k=320, heads=6, heads_k=2, causal=1,
             more="ragged=1 filled=300,3,256 cache=int8 scales=slot"),
        Case(batch=2, seqlen_q=10, seqlen_k=608, heads=4, heads_k=2, causal=1,
             more="filled=580,60 new=10 rotary=32 left=70 page=16 cache=e4m3 scales=slot nan=seen"),
        Case(seqlen_q=60, seqlen_k=320, heads_k=2, causal=1,
             more="filled=300 new=5 left=100 page=16 cache=e5m2 scales=row nan=seen splits=2"),
    ),
    multiprocessors=132,
)  # fmt: skip
HOPPER_DECODE_CASES = HOPPER_DECODE_RACES + HOPPER_QUANTIZED_CASES + hopper(
    *decode(
        Case(batch=2, seqlen_q=40, seqlen_k=320, causal=1,
             more="filled=300,20 leftpad=7,20 batch_idx=1 splits=5"),
        Case(batch=2, seqlen_q=5, seqlen_k=320, more="filled=0,300 split_size=64 sink=1 left=20"),
        Case(batch=2, seqlen_q=3, seqlen_k=704, heads=4, heads_k=1,
             more="filled=700,70 page=64 splits=7 nan=seen tree=1"),
        Case(batch=2, seqlen_q=3, seqlen_k=256, heads=4, heads_k=2,
             more="filled=250,90 new=3 rotary=64 page=16 hole=1 nan=seen"),
        Case(seqlen_q=25, seqlen_k=130, heads=3, heads_k=1, causal=1, more="sink=1 out=fp32"),
        Case(seqlen_q=1, seqlen_k=2300, heads=1, scale=1.0, more="split_size=64 sink=1 out=fp32"),
        Case(batch=3, seqlen_q=5, seqlen_k=320, heads=6, heads_k=2, causal=1,
             more="ragged=1 filled=300,3,256"),
        Case(batch=2, seqlen_q=9, seqlen_k=192, heads=4, heads_k=1,
             more="ragged=1 tree=1 new=9 splits=2"),
    ),
    multiprocessors=132,
)  # fmt: skip
# Of more than 32 rows, two warpgroups share tiles and rows.
HOPPER_LATENT_CASES = hopper(
    *latent(
        decode(
            Case(batch=2, seqlen_q=1, seqlen_k=200, heads=12, heads_k=1,
                 more="filled=197,70 splits=3 nan=seen sink=1"),
            Case(seqlen_q=2, seqlen_k=272, heads=10, heads_k=1, causal=1, more="splits=2 page=16"),
            Case(batch=2, seqlen_q=1, seqlen_k=384, heads=40, heads_k=1,
                 more="filled=300,60 page=64 nan=seen left=290"),
            # Keys that rows of one warpgroup alone see are not finite.
            Case(seqlen_q=40, seqlen_k=64, heads=1, heads_k=1, causal=1, more="nan=seen"),
            Case(seqlen_q=64, seqlen_k=64, heads=1, heads_k=1, causal=1, more="nan=seen"),
            Case(batch=2, seqlen_q=1, seqlen_k=704, heads=64, heads_k=1,
                 more="filled=690,70 splits=1 sink=1"),
            Case(batch=3, seqlen_q=1, seqlen_k=320, heads=50, heads_k=1,
                 more="filled=300,0,70 splits=4 sink=1"),
            Case(seqlen_q=4, seqlen_k=448, heads=16, heads_k=1, causal=1,
                 more="splits=3 page=8 tree=1 nan=seen"),
            Case(seqlen_q=3, seqlen_k=650, heads=20, heads_k=1, causal=1,
                 more="splits=2 left=300 nan=seen out=fp32"),
            Case(batch=2, seqlen_q=1, seqlen_k=384, heads=12, heads_k=1,
                 more="filled=380,60 page=16 nan=seen cache=e4m3 scales=slot splits=2"),
            Case(seqlen_q=64, seqlen_k=200, heads=1, heads_k=1, causal=1,
                 more="nan=seen cache=e5m2 scales=row"),
            # Rows that see few keys of their first tile, whose scales may be small.
            Case(seqlen_q=60, seqlen_k=300, heads=1, heads_k=1, causal=1,
                 more="splits=1 left=120 out=fp32 cache=e4m3 scales=row"),
            Case(batch=2, seqlen_q=1, seqlen_k=448, heads=64, heads_k=1,
                 more="filled=440,70 splits=1 page=16 sink=1 cache=int8 scales=head"),
        )
    ),
    multiprocessors=132,
)  # fmt: skip

HOPPER_BACKWARD_RACES = hopper(*BACKWARD_RACES[:6])
HOPPER_BACKWARD_CASES = HOPPER_BACKWARD_RACES + hopper(
    *(case for case in BACKWARD_PLAIN_CASES if case.scale > 0)
)
# The first two have rows that see no key, with a finite LSE.
HOPPER_BACKWARD_RANGES = hopper(
    *backward(
        Case(seqlen_q=300, seqlen_k=130, heads=1, more="ranges=65,1 sink=1 nan=hidden"),
        Case(seqlen_q=300, seqlen_k=130, heads=1, more="ranges=65,1 sink=1 nan=q"),
        Case(seqlen_q=200, seqlen_k=210, causal=1, more="ranges=65,1 sink=1 det=1 nan=hidden"),
        Case(seqlen_q=20, seqlen_k=2200, heads=1, more="ranges=100,1 det=1"),
        Case(batch=2, seqlen_q=330, seqlen_k=400, heads=1, more="ranges=130,2 used=0,300 left=200"),
    ),
    *alone("ranges", BACKWARD_FEATURE_CASES),
)
HOPPER_BACKWARD_BLOCKS = hopper(
    *backward(
        Case(seqlen_q=430, seqlen_k=400, heads=2, more="block=192,128 nan=hidden dlse=1"),
        Case(seqlen_q=430, seqlen_k=300, heads=1, causal=1, more="block=192,128 nan=dout det=1"),
        Case(seqlen_q=300, seqlen_k=300, causal=1, more="block=128,192 nan=dout det=1"),
        Case(batch=2, seqlen_q=330, seqlen_k=400, heads=1, more="block=128,128 used=300,0 nan=k"),
        Case(seqlen_q=430, seqlen_k=200, heads=1, more="block=128,128 sink=1 nan=q"),
        Case(seqlen_q=150, seqlen_k=430, more="block=128,128 left=230 right=50 nan=hidden det=1"),
    )
)
HOPPER_BACKWARD_SCORED = hopper(
    *alone("alibi", BACKWARD_FEATURE_CASES),
    *alone("softcap", BACKWARD_FEATURE_CASES),
    *alone("dropout", BACKWARD_FEATURE_CASES),
    *backward(
        Case(seqlen_q=206, seqlen_k=350, more="cu_q=0,70,70,206 cu_k=0,65,125,350 alibi=0.1"),
        Case(seqlen_q=200, seqlen_k=210, causal=1, more="alibi=-0.05 det=1 dlse=1"),
        Case(seqlen_q=130, seqlen_k=300, heads=9, more="alibi=0.02 small=none"),
        Case(seqlen_q=300, seqlen_k=290, scale=1.0, causal=1, more="softcap=5 dlse=1 nan=hidden"),
        Case(seqlen_q=130, seqlen_k=200, heads=9, more="softcap=20 left=60 det=1 nan=k"),
        Case(seqlen_q=300, seqlen_k=290, heads=2, causal=1, more="dropout=0.7 dlse=1 nan=hidden"),
        Case(seqlen_q=200, seqlen_k=210, heads=4, heads_k=2, more="dropout=0.1 det=1"),
        Case(seqlen_q=150, seqlen_k=160, heads=9, causal=1, more="dropout=0.2 nan=dout"),
    ),
)
HOPPER_BACKWARD_FEATURES = HOPPER_BACKWARD_RANGES + HOPPER_BACKWARD_BLOCKS + HOPPER_BACKWARD_SCORED
# Tiles of 64 rows: of the first one all rows see keys, but none of the second warpgroup's.
FIRST_KEYS = Case(seqlen_q=250, seqlen_k=140, heads=1, head_dim=128, head_dim_v=128, causal=1)
HOPPER_BACKWARD_128_CASES = hopper(
    *backward(*(FIRST_KEYS._replace(more=more) for more in ("diagonal=0", "diagonal=0 det=1")))
)
HOPPER_WIDE_CASES = wide(HOPPER_BACKWARD_CASES, 256)
# Head dim 512: by pairs of CTAs. Of V, the second one has 44 columns. Thread Sanitizer takes half a
# minute for the first one.
HOPPER_PAIR_CASES = tuple(
    case._replace(head_dim_v=300, scale=0.05)
    for case in wide(
        hopper(*backward(Case(seqlen_q=140, seqlen_k=70, heads=1, causal=1, more="nan=k")))
        + HOPPER_BACKWARD_CASES,
        512,
    )
) + tuple(
    # The second CTA has few columns, or none of V, or none of K.
    case._replace(head_dim=d, head_dim_v=dv, scale=0.05)
    for d, dv in ((264, 264), (512, 64), (64, 512))
    for case in hopper(*backward(Case(seqlen_q=140, seqlen_k=70, heads=2, more="nan=dout")))
)
# Head dim 192, V's too: with K and V in registers.
HOPPER_192_CASES = tuple(
    case._replace(head_dim_v=case.head_dim_v + 128) for case in wide(HOPPER_BACKWARD_CASES, 192)
)
