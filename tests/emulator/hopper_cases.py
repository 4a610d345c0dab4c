"""Cases of the Hopper kernels, for the emulated GPU."""

from __future__ import annotations

from emulated_driver import (
    BACKWARD_PLAIN_CASES,
    BACKWARD_RACES,
    BASIC_CASES,
    PLAIN_CASES,
    Case,
    backward,
    wide,
)


def hopper(*cases: Case, multiprocessors: int = 1) -> tuple[Case, ...]:
    """On an H100 of few multiprocessors, so that a CTA takes several blocks."""
    more = f"gpu=90 smem=232448 multiprocessors={multiprocessors}"
    return tuple(case._replace(more=f"{case.more} {more}") for case in cases)


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


# For Hopper's kernels of one feature. Of the last one's tiles, the first 27 are hidden.
HOPPER_RANGE_CASES = hopper(
    Case(seqlen_q=200, seqlen_k=210, heads=4, heads_k=2, more="ranges=63,1 nan=hidden"),
    Case(seqlen_q=430, seqlen_k=450, heads=1, causal=1, more="ranges=255,1 nan=hidden out=fp32"),
    Case(seqlen_q=430, seqlen_k=450, heads=4, heads_k=2, more="ranges=129,1 nan=seen"),
    Case(batch=2, seqlen_q=330, seqlen_k=400, heads=1, more="ranges=130,2 used=300,0 left=200"),
    Case(
        seqlen_q=206,
        seqlen_k=350,
        more="cu_q=0,70,70,71,206 cu_k=0,65,125,125,350 used=60,3,0,200 ranges=24,2 nan=hidden",
    ),
    Case(seqlen_q=20, seqlen_k=4400, heads=1, more="ranges=1000,1"),
)
HOPPER_SCORED = hopper(
    Case(seqlen_q=400, seqlen_k=300, causal=1, more="alibi=0.1 nan=hidden"),
    Case(seqlen_q=130, seqlen_k=430, heads=1, more="alibi=-0.05 left=200 right=50 nan=seen"),
    Case(seqlen_q=300, seqlen_k=290, scale=1.0, causal=1, more="softcap=5 nan=seen"),
    Case(seqlen_q=400, seqlen_k=300, causal=1, more="dropout=0.3 nan=hidden"),
    Case(batch=2, seqlen_q=130, seqlen_k=290, heads=4, heads_k=2, more="dropout=0.1 nan=seen"),
)

HOPPER_BACKWARD_RACES = hopper(*BACKWARD_RACES[:6])
HOPPER_BACKWARD_CASES = HOPPER_BACKWARD_RACES + hopper(
    *(case for case in BACKWARD_PLAIN_CASES if case.scale > 0)
)
HOPPER_BACKWARD_FEATURES = hopper(
    *backward(
        Case(seqlen_q=200, seqlen_k=210, heads=4, heads_k=2, more="ranges=63,1 nan=hidden dlse=1"),
        Case(seqlen_q=200, seqlen_k=210, causal=1, more="ranges=65,1 sink=1 det=1 nan=hidden"),
        # Rows that see no key, with a finite LSE.
        Case(seqlen_q=300, seqlen_k=130, heads=1, more="ranges=65,1 sink=1 nan=hidden"),
        Case(seqlen_q=300, seqlen_k=300, heads=1, more="ranges=140,2 nan=q dlse=1 grad=fp32"),
        Case(seqlen_q=150, seqlen_k=160, more="ranges=40,1 nan=dout"),
        Case(batch=2, seqlen_q=330, seqlen_k=400, heads=1, more="ranges=130,2 used=300,0 left=200"),
        Case(
            seqlen_q=206,
            seqlen_k=350,
            more="cu_q=0,70,70,71,206 cu_k=0,65,125,125,350 used=60,3,0,200 ranges=24,2 nan=hidden",
        ),
        Case(seqlen_q=20, seqlen_k=2200, heads=1, more="ranges=100,1 det=1"),
        Case(seqlen_q=206, seqlen_k=350, more="cu_q=0,70,70,206 cu_k=0,65,125,350 alibi=0.1"),
        Case(seqlen_q=430, seqlen_k=150, heads=1, more="alibi=0.1 left=150 right=50 nan=hidden"),
        Case(seqlen_q=200, seqlen_k=210, causal=1, more="alibi=-0.05 det=1 dlse=1"),
        Case(seqlen_q=130, seqlen_k=300, heads=9, more="alibi=0.02 small=none"),
        Case(seqlen_q=300, seqlen_k=290, scale=1.0, causal=1, more="softcap=5 dlse=1 nan=hidden"),
        Case(seqlen_q=130, seqlen_k=200, heads=9, more="softcap=20 left=60 det=1 nan=k"),
        Case(seqlen_q=300, seqlen_k=290, heads=2, causal=1, more="dropout=0.3 dlse=1 nan=hidden"),
        Case(seqlen_q=200, seqlen_k=210, heads=4, heads_k=2, more="dropout=0.1 det=1"),
        Case(seqlen_q=150, seqlen_k=160, heads=9, causal=1, more="dropout=0.2 nan=dout"),
    )
)
# Tiles of 64 rows: of the first one all rows see keys, but none of the second warpgroup's.
FIRST_KEYS = Case(seqlen_q=250, seqlen_k=140, heads=1, head_dim=128, head_dim_v=128, causal=1)
HOPPER_BACKWARD_128_CASES = hopper(
    *backward(*(FIRST_KEYS._replace(more=more) for more in ("diagonal=0", "diagonal=0 det=1")))
)
HOPPER_WIDE_CASES = wide(HOPPER_BACKWARD_CASES, 256)
