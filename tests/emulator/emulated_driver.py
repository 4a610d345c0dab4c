"""Lines for the emulated driver (library/driver.cpp)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Case(NamedTuple):
    dtype: str = "fp16"
    batch: int = 1
    seqlen_q: int = 131
    seqlen_k: int = 203
    heads: int = 2
    heads_k: int = 1
    head_dim: int = 64
    head_dim_v: int = 64
    causal: int = 0
    scale: float = 0.125
    seed: int = 0
    more: str = ""  # key=value words


# Few and telling: odd lengths on both sides of each other, masked rows, odd head dims, both copies.
BASIC_CASES = (
    Case(),
    Case(causal=1),
    Case(seqlen_q=203, seqlen_k=131, causal=1),
    Case(seqlen_q=1, seqlen_k=65, causal=1),
    Case(seqlen_q=200, seqlen_k=3, causal=1),
    Case(batch=2, seqlen_q=64, seqlen_k=128, heads=1),
    Case(seqlen_q=40, seqlen_k=70, head_dim=40, head_dim_v=24, causal=1),
    Case(seqlen_q=40, seqlen_k=70, head_dim=37, head_dim_v=51),
    Case(seqlen_q=130, seqlen_k=90, scale=-0.2, causal=1),
    Case(batch=8, seqlen_q=1, seqlen_k=1),  # some of the largest scores are negative
)

# Features of the plain kernels. The first has all zones of KRange.
PLAIN_CASES = (
    Case(seqlen_q=150, seqlen_k=430, heads=1, more="left=230 right=50 nan=hidden"),
    Case(seqlen_q=130, seqlen_k=300, heads=1, causal=1, more="left=0 out=fp32"),
    Case(seqlen_q=200, seqlen_k=60, heads=1, more="left=30 right=500 sink=1"),
    Case(seqlen_q=203, seqlen_k=131, causal=1, scale=1.0, more="nan=seen"),
    Case(seqlen_q=70, seqlen_k=140, heads=1, more="left=40 right=40 nan=seen out=fp32"),
    Case(
        seqlen_q=266,
        seqlen_k=410,
        causal=1,
        more="cu_q=0,70,70,71,136,266 cu_k=0,65,125,125,205,410 sink=1 nan=seen",
    ),
    Case(seqlen_q=40, seqlen_k=70, head_dim=40, head_dim_v=24, more="out=fp32"),
    Case(seqlen_q=150, seqlen_k=203, heads=1, causal=1, more="split=90 out=fp32 nan=hidden"),
    Case(seqlen_q=40, seqlen_k=70, head_dim=40, head_dim_v=24, more="split=30 out=fp32"),
    # The rows of one head are as far apart as four columns want, and there are fewer columns.
    Case(seqlen_q=40, seqlen_k=70, heads=4, head_dim=40, head_dim_v=51, more="split=30 out=fp32"),
    Case(batch=3, seqlen_q=65, seqlen_k=150, heads=1, more="used=150,0,70 nan=hidden left=100"),
)

# What the other kernels do, alone and together.
FEATURE_CASES = (
    Case(seqlen_q=100, seqlen_k=90, scale=1.0, more="softcap=5 alibi=0.05"),
    Case(seqlen_q=70, seqlen_k=330, heads=1, more="softcap=300 alibi=-0.05 left=200 right=50"),
    Case(seqlen_q=70, seqlen_k=200, heads=1, causal=1, scale=-0.2, more="alibi=0.1 nan=hidden"),
    Case(batch=2, seqlen_q=70, seqlen_k=150, more="bias=fp32 nan=hidden"),
    Case(batch=2, seqlen_q=70, seqlen_k=150, more="bias=bool nan=hidden dropout=0.4 left=100"),
    Case(seqlen_q=67, seqlen_k=130, causal=1, more="bias=fp16 bias_axes=1hq1 sink=1 nan=seen"),
    Case(seqlen_q=70, seqlen_k=140, more="bias=bf16 bias_axes=b1qk out=fp32 nan=seen"),
    Case(seqlen_q=200, seqlen_k=430, more="block=64,128 nan=hidden left=230 right=50"),
    Case(
        seqlen_q=140, seqlen_k=300, scale=-0.2, more="block=128,64 alibi=0.1 bias=fp32 dropout=0.1"
    ),
    Case(seqlen_q=200, seqlen_k=210, heads=4, heads_k=2, more="ranges=63,1 nan=hidden"),
    Case(seqlen_q=200, seqlen_k=210, causal=1, more="ranges=65,1 alibi=0.1 sink=1 nan=seen"),
    Case(seqlen_q=130, seqlen_k=70, heads=1, more="ranges=95,1"),
    Case(seqlen_q=270, seqlen_k=150, heads=1, more="ranges=20,2 bias=fp16 dropout=0.1 nan=hidden"),
    Case(
        seqlen_q=206,
        seqlen_k=350,
        more="cu_q=0,70,70,71,206 cu_k=0,65,125,125,350 used=60,3,0,200 ranges=24,2 nan=hidden",
    ),
    # Tiles that all rows see, some, and none.
    Case(seqlen_q=430, seqlen_k=450, heads=4, heads_k=2, more="ranges=129,1 nan=seen"),
    Case(seqlen_q=430, seqlen_k=450, heads=1, causal=1, more="ranges=255,1 nan=hidden out=fp32"),
    Case(batch=2, seqlen_q=330, seqlen_k=400, heads=1, more="ranges=130,2 used=300,0 left=200"),
    Case(seqlen_q=67, seqlen_k=140, causal=1, more="dropout=0.25 nan=seen"),
    Case(seqlen_q=150, seqlen_k=430, heads=1, more="dropout=0.5 left=230 right=50 nan=hidden"),
    Case(
        seqlen_q=206,
        seqlen_k=350,
        causal=1,
        more="cu_q=0,70,70,71,206 cu_k=0,65,125,125,350 used=60,3,0,200 softcap=20 alibi=0.02"
        " bias=fp16 block=64,64 sink=1 dropout=0.2 nan=hidden out=fp32",
    ),
)

# Of two calls, whose results are merged.
MERGE_CASES = (
    Case(seqlen_q=40, seqlen_k=70, more="merge=30 out=fp32"),
    Case(seqlen_q=70, seqlen_k=140, head_dim=40, head_dim_v=24, causal=1, more="merge=100"),
)

# Of head dim 128: maxima that grow by more than a few units from tile to tile.
GROWING_CASES = (
    Case(head_dim=128, head_dim_v=128, scale=2.0, seqlen_k=430),
    Case(head_dim=128, head_dim_v=120, scale=-1.0, seqlen_k=430, causal=1),
    Case(head_dim=128, head_dim_v=128, more="split=100 out=fp32"),
)

CASES = BASIC_CASES + PLAIN_CASES + MERGE_CASES + FEATURE_CASES


def backward(*cases: Case) -> tuple[Case, ...]:
    return tuple(case._replace(more=f"op=backward {case.more}") for case in cases)


# Tiles of the plain kernel are 128 rows and 128 keys, of the generic one 64. The first have several
# tiles a CTA, of several heads, with and without masks.
BACKWARD_PLAIN_CASES = backward(
    Case(seqlen_q=300, seqlen_k=290, causal=1, more="dlse=1"),
    Case(seqlen_q=300, seqlen_k=290, causal=1, seed=1, more="dlse=1 det=1"),
    # A row sees one key more than half of a tile has.
    Case(seqlen_q=128, seqlen_k=129, causal=1),
    # Keys that no row sees, though rows behind the last one would.
    Case(seqlen_q=150, seqlen_k=140, heads=1, causal=1, more="diagonal=-64 nan=hidden"),
    # All zones of MRange, and of KRange. (Below, left=29 leaves one row in a tile.)
    Case(seqlen_q=700, seqlen_k=260, heads=1, more="left=300 right=100 nan=hidden grad=fp32"),
    Case(seqlen_q=150, seqlen_k=430, heads=1, more="left=230 right=50 nan=hidden det=1"),
    Case(batch=2, seqlen_q=130, seqlen_k=70, heads=4, heads_k=2, more="dout=fp32 out=fp32"),
    Case(seqlen_q=203, seqlen_k=131, causal=1, more="nan=hidden sink=1 grad=fp32"),
    Case(seqlen_q=203, seqlen_k=131, more="keyless=1 sink=1 dlse=1 det=1 grad=fp32"),
    Case(seqlen_q=1, seqlen_k=65),
    Case(seqlen_q=200, seqlen_k=3, causal=1, more="dlse=1 dout=fp32"),
    Case(seqlen_q=40, seqlen_k=70, head_dim=40, head_dim_v=24, causal=1),
    Case(seqlen_q=40, seqlen_k=70, head_dim=37, head_dim_v=51, scale=-0.2, more="det=1"),
    Case(seqlen_q=40, seqlen_k=70, head_dim=37, head_dim_v=51, more="dout=fp32 grad=fp32"),
    Case(
        seqlen_q=266,
        seqlen_k=410,
        causal=1,
        more="cu_q=0,70,70,71,136,266 cu_k=0,65,125,125,205,410 sink=1 dlse=1 nan=hidden",
    ),
    Case(
        seqlen_q=266,
        seqlen_k=410,
        more="cu_q=0,70,70,71,136,266 cu_k=0,65,125,125,205,410 used=60,3,0,80,130 det=1"
        " nan=hidden left=40 dout=fp32",
    ),
    Case(batch=3, seqlen_q=65, seqlen_k=150, heads=1, more="used=150,0,70 nan=hidden left=100"),
    Case(seqlen_q=300, seqlen_k=200, more="left=29 right=10 nan=q"),
    Case(seqlen_q=300, seqlen_k=200, more="left=30 right=10 nan=k"),
    Case(seqlen_q=150, seqlen_k=200, more="left=30 right=10 nan=k det=1"),
    Case(seqlen_q=300, seqlen_k=200, causal=1, more="nan=dout"),
    # Scores of rows that do not exist are NaN.
    Case(seqlen_q=150, seqlen_k=200, heads=1, more="nan=hiding"),
    # Groups in two and three parts.
    Case(seqlen_q=40, seqlen_k=150, heads=12, heads_k=2, more="grad=fp32 dlse=1"),
    Case(
        seqlen_q=66,
        seqlen_k=210,
        heads=9,
        causal=1,
        more="cu_q=0,40,40,41,66 cu_k=0,65,125,125,210 used=60,0,0,80 nan=hidden",
    ),
    Case(seqlen_q=100, seqlen_k=40, heads=9, more="left=30 right=10 nan=dout"),
    Case(seqlen_q=300, seqlen_k=200, more="left=30 right=10 nan=dout grad=fp32"),
    Case(seqlen_q=150, seqlen_k=200, more="grad=fp32 accumulate=1"),
    Case(seqlen_q=150, seqlen_k=200, heads=9, causal=1, more="grad=fp32 accumulate=1 det=1"),
    Case(seqlen_q=150, seqlen_k=200, more="left=30 right=10 nan=v det=1"),
    # Tiles of rows that see no key: nothing waits for Q until dQ takes its place.
    Case(seqlen_q=200, seqlen_k=70, heads=1, causal=1, more="det=1"),
)

BACKWARD_FEATURE_CASES = backward(
    Case(seqlen_q=200, seqlen_k=190, scale=1.0, causal=1, more="softcap=5 alibi=0.05 dlse=1"),
    Case(seqlen_q=70, seqlen_k=330, more="softcap=300 alibi=-0.05 left=200 right=50 det=1"),
    Case(seqlen_q=430, seqlen_k=150, heads=1, more="alibi=0.1 left=150 right=50 nan=hidden"),
    Case(batch=2, seqlen_q=70, seqlen_k=150, more="bias=fp32 nan=hidden dlse=1 grad=fp32"),
    Case(batch=2, seqlen_q=70, seqlen_k=150, more="bias=fp16 bias_axes=1hq1 sink=1 det=1"),
    Case(
        batch=2,
        seqlen_q=70,
        seqlen_k=140,
        more="bias=bf16 bias_axes=b11k small=fp32 alibi=0.1 shared_slopes=1",
    ),
    Case(batch=2, seqlen_q=70, seqlen_k=90, more="bias=fp32 bias_axes=1111 small=none"),
    Case(batch=2, seqlen_q=70, seqlen_k=90, causal=1, more="bias=fp32 bias_axes=1111"),
    Case(batch=2, seqlen_q=130, seqlen_k=150, more="bias=bool nan=hidden dropout=0.4 left=100"),
    Case(seqlen_q=200, seqlen_k=430, more="block=64,128 nan=hidden left=230 right=50"),
    Case(
        seqlen_q=200,
        seqlen_k=300,
        scale=-0.2,
        more="block=128,64 alibi=0.1 bias=fp32 dropout=0.1 det=1 dout=fp32",
    ),
    Case(seqlen_q=200, seqlen_k=210, heads=4, heads_k=2, more="ranges=63,1 nan=hidden dlse=1"),
    Case(seqlen_q=200, seqlen_k=210, causal=1, more="ranges=65,1 alibi=0.1 det=1 nan=hidden"),
    Case(seqlen_q=270, seqlen_k=150, heads=1, more="ranges=20,2 bias=fp32 dropout=0.1 nan=hidden"),
    Case(
        seqlen_q=206,
        seqlen_k=350,
        more="cu_q=0,70,70,71,206 cu_k=0,65,125,125,350 used=60,3,0,200 ranges=24,2 nan=hidden",
    ),
    Case(seqlen_q=130, seqlen_k=70, heads=1, more="ranges=95,1"),
    Case(seqlen_q=150, seqlen_k=160, more="ranges=40,1 nan=dout"),
    Case(seqlen_q=430, seqlen_k=450, heads=4, heads_k=2, more="ranges=193,1 nan=hidden"),
    Case(seqlen_q=430, seqlen_k=450, heads=1, causal=1, more="ranges=255,1 nan=dout det=1"),
    Case(batch=2, seqlen_q=330, seqlen_k=400, heads=1, more="ranges=130,2 used=300,0 left=200"),
    Case(seqlen_q=300, seqlen_k=300, heads=1, more="ranges=140,2 nan=q dlse=1 grad=fp32"),
    Case(seqlen_q=140, seqlen_k=140, causal=1, more="dropout=0.25 dlse=1 keyless=1"),
    Case(seqlen_q=140, seqlen_k=140, more="dropout=0.25 left=20 right=10 nan=dout"),
    # Tiles on both sides of the diagonal, with both signs of slopes.
    Case(seqlen_q=300, seqlen_k=290, heads=1, more="alibi=0.05 dlse=1"),
    Case(seqlen_q=300, seqlen_k=200, more="alibi=-0.05 left=100 right=80 det=1 nan=hidden"),
    Case(seqlen_q=300, seqlen_k=200, heads=1, more="softcap=2 dlse=1"),
    Case(seqlen_q=200, seqlen_k=290, causal=1, more="softcap=0.5 nan=hidden"),
    Case(seqlen_q=150, seqlen_k=200, more="softcap=5 left=30 right=10 nan=v"),
    Case(seqlen_q=150, seqlen_k=200, more="softcap=5 left=30 right=10 nan=dout det=1"),
    Case(seqlen_q=300, seqlen_k=290, heads=1, more="dropout=0.4 dlse=1"),
    Case(seqlen_q=150, seqlen_k=200, more="dropout=0.25 left=30 right=10 nan=v"),
    Case(seqlen_q=140, seqlen_k=140, more="bias=fp32 left=20 right=10 nan=k"),
    Case(seqlen_q=140, seqlen_k=140, more="bias=fp32 left=20 right=10 nan=k det=1"),
    Case(
        seqlen_q=206,
        seqlen_k=350,
        causal=1,
        more="cu_q=0,70,70,71,206 cu_k=0,65,125,125,350 used=60,3,0,200 softcap=20 alibi=0.02"
        " bias=fp16 block=64,64 sink=1 dropout=0.2 nan=hidden out=fp32 dlse=1",
    ),
    Case(
        seqlen_q=206,
        seqlen_k=350,
        more="cu_q=0,70,70,71,206 cu_k=0,65,125,125,350 bias=fp32 bias_axes=11qk alibi=0.02"
        " det=1 grad=fp32",
    ),
)

BACKWARD_CASES = BACKWARD_PLAIN_CASES + BACKWARD_FEATURE_CASES

# For Thread Sanitizer, to which creating threads is what costs. There are few blocks, but several
# tiles a CTA, every barrier several times, all kernels beside the main ones, and rows that are
# copied.
FORWARD_RACES = (
    Case(seqlen_q=203, seqlen_k=131, causal=1, scale=-0.2, more="nan=seen sink=1"),
    Case(seqlen_q=150, seqlen_k=430, heads=1, more="left=230 right=50 nan=hidden"),
    Case(causal=1),
    Case(seqlen_q=106, seqlen_k=205, more="cu_q=0,70,70,71,106 cu_k=0,65,125,125,205 nan=seen"),
    Case(seqlen_q=40, seqlen_k=70, head_dim=40, head_dim_v=24, causal=1, more="out=fp32"),
    Case(seqlen_q=5, seqlen_k=9, heads=1, head_dim=37, head_dim_v=51),
    Case(batch=3, seqlen_q=65, seqlen_k=150, heads=1, more="used=150,0,70 nan=hidden left=100"),
    Case(seqlen_q=70, seqlen_k=330, heads=1, more="softcap=300 alibi=-0.05 left=200 right=50"),
    Case(seqlen_q=67, seqlen_k=136, causal=1, more="bias=fp32 sink=1 nan=seen dropout=0.25"),
    Case(seqlen_q=66, seqlen_k=17, heads=1, more="bias=bool nan=hidden dropout=0.25"),
    Case(seqlen_q=7, seqlen_k=130, heads=1, more="bias=fp16 dropout=0.25"),
    Case(seqlen_q=130, seqlen_k=300, more="block=64,128 nan=hidden left=230 right=50"),
    Case(
        seqlen_q=106,
        seqlen_k=205,
        heads=1,
        causal=1,
        more="cu_q=0,70,70,71,106 cu_k=0,65,125,125,205 used=60,3,0,80 softcap=20 alibi=0.02"
        " bias=fp16 bias_axes=1hq1 block=64,64 sink=1 dropout=0.2 nan=hidden out=fp32",
    ),
)

BACKWARD_RACES = backward(
    Case(seqlen_q=200, seqlen_k=140, causal=1, more="dlse=1"),
    Case(seqlen_q=130, seqlen_k=140, heads=1, causal=1, more="nan=hidden det=1"),
    Case(seqlen_q=140, seqlen_k=70, more="left=30 right=10 nan=k grad=fp32"),
    Case(seqlen_q=70, seqlen_k=140, heads=1, more="left=30 right=10 nan=k det=1"),
    Case(seqlen_q=20, seqlen_k=140, heads=5, more="left=30 right=10 nan=dout"),
    Case(seqlen_q=130, seqlen_k=140, heads=1, causal=1, more="nan=dout"),
    Case(seqlen_q=140, seqlen_k=136, heads=1, more="bias=fp32 left=20 right=10 nan=k"),
    Case(
        seqlen_q=70,
        seqlen_k=136,
        more="bias=fp32 bias_axes=11qk left=20 right=10 nan=k det=1 alibi=0.1",
    ),
    Case(
        batch=2, seqlen_q=70, seqlen_k=72, heads=1, more="bias=fp16 bias_axes=1hq1 sink=1 nan=dout"
    ),
    Case(seqlen_q=70, seqlen_k=139, heads=1, more="bias=fp16 dropout=0.2"),
    Case(seqlen_q=130, seqlen_k=140, heads=1, causal=1, more="dropout=0.2"),
    Case(seqlen_q=130, seqlen_k=140, heads=1, causal=1, more="softcap=2"),
    Case(seqlen_q=130, seqlen_k=140, heads=1, causal=1, more="alibi=0.1"),
    Case(
        seqlen_q=136,
        seqlen_k=205,
        heads=1,
        more="cu_q=0,70,70,136 cu_k=0,65,125,205 used=60,3,70 softcap=20 alibi=0.02"
        " bias=fp32 bias_axes=11qk block=64,64 sink=1 dropout=0.2 nan=hidden dout=fp32",
    ),
)


# Tiles of 128 rows and 128 keys.
def wide(cases: tuple[Case, ...], head_dim: int = 128) -> list[Case]:
    """For kernels of head dim 128, say, instead of 64."""
    return [case._replace(head_dim=case.head_dim + head_dim - 64) for case in cases]


# For the kernels by chunks of columns, of head dim 512: with one buffer, and with two where 227 KB
# are.
# The second chunk of V is not whole. In the last case K comes again, and then dK in its place.
CHUNK_CASES = tuple(
    case._replace(head_dim_v=300, scale=0.05, more=f"{case.more} {memory}")
    for memory, cases in (
        ("", BACKWARD_RACES[:6]),
        ("smem=232448", BACKWARD_RACES[:6]),
        ("", backward(Case(seqlen_q=70, seqlen_k=70, heads=1, more="left=30 right=10 nan=k"))),
        ("", backward(Case(seqlen_q=70, seqlen_k=70, heads=1, more="nan=hiding"))),
    )
    for case in wide(cases, 512)
)

# Tiles of 64 rows and 64 keys, in the kernels for wide heads.

# For the kernel of head dim 128 of which two groups of warps ping-pong, where 227 KB are. A group
# has several tiles, one, and none. Heads are in one part and in two. Either has a mask's edge.
PINGPONG_CASES = tuple(
    case._replace(head_dim_v=128, more=f"{case.more} smem=232448")
    for case in wide(
        backward(
            Case(seqlen_q=330, seqlen_k=140, heads=2, heads_k=1, causal=1, more="dlse=1"),
            Case(seqlen_q=200, seqlen_k=200, heads=1, causal=1, more="nan=k"),
            Case(seqlen_q=190, seqlen_k=190, heads=2, heads_k=1, causal=1),
            Case(seqlen_q=60, seqlen_k=70, heads=1, heads_k=1, more="nan=hidden left=20 right=10"),
            Case(seqlen_q=100, seqlen_k=40, heads=6, heads_k=1, more="left=30 right=10 nan=dout"),
            Case(seqlen_q=270, seqlen_k=129, heads=1, heads_k=1, more="grad=fp32"),
            Case(seqlen_q=270, seqlen_k=90, heads=1, heads_k=1, more="nan=hiding"),
            Case(
                seqlen_q=266,
                seqlen_k=205,
                heads=1,
                heads_k=1,
                causal=1,
                more="cu_q=0,70,70,266 cu_k=0,65,65,205 nan=hidden det=1",
            ),
        )
    )
)


def run(driver: Path, cases: list[Case], *flags: str, **environment: str) -> tuple[int, str]:
    """The driver's exit status and everything it printed."""
    lines = "".join(" ".join(map(str, case)) + "\n" for case in cases)
    result = subprocess.run(
        [driver, *flags],
        input=lines,
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    return result.returncode, result.stdout + result.stderr
