"""Cases of attention with a KV cache for the emulated driver (library/driver.cpp).

Kernels of head dim 64 have tiles of 16, 32 and 64 rows, which are queries times heads of a group,
by 128, 128 and 64 keys; of a 16-bit cache 2, 2 and 4 buffers, of an 8-bit one 4. Those of head dim
256 have 32 or 64 keys, 2 buffers, fewer warps, and read Q as they need it.
"""

from __future__ import annotations

from emulated_driver import Case


def decode(*cases: Case) -> tuple[Case, ...]:
    return tuple(case._replace(more=f"op=decode {case.more}") for case in cases)


def wide(cases: tuple[Case, ...]) -> list[Case]:
    """For kernels of head dim 256 instead of 64."""
    return [
        case._replace(head_dim=case.head_dim + 192, head_dim_v=case.head_dim_v + 192)
        for case in cases
    ]


def longer(cases: tuple[Case, ...]) -> list[Case]:
    """For kernels of head dim 128 instead of 64."""
    return [
        case._replace(head_dim=case.head_dim + 64, head_dim_v=case.head_dim_v + 64)
        for case in cases
    ]


def latent(cases: tuple[Case, ...]) -> list[Case]:
    """For kernels of latent attention, whose V is the first columns of K."""
    return [
        case._replace(
            head_dim=576, head_dim_v=512, scale=case.scale / 3, more=f"{case.more} latent=1"
        )
        for case in cases
    ]


# For Thread Sanitizer: few blocks, but several tiles a CTA, and every kernel.
RACES = decode(
    Case(
        seqlen_q=4,
        seqlen_k=560,
        heads=3,
        more="filled=549 new=4 page=16 rotary=64 tree=1 left=500 nan=seen",
    ),
    Case(
        seqlen_q=1,
        seqlen_k=1600,
        more="filled=1590 new=1 page=16 cache=e4m3 scales=slot nan=seen splits=2 sink=1",
    ),
    Case(seqlen_q=9, seqlen_k=400, causal=1, more="left=300 nan=seen out=fp32"),
    Case(seqlen_q=20, seqlen_k=320, causal=1, heads=3, more="left=300 nan=seen page=64"),
    Case(seqlen_q=9, seqlen_k=700, more="tree=1 cache=e4m3 scales=head nan=seen alibi=0.05"),
    Case(seqlen_q=2, seqlen_k=304, causal=1, more="cache=e5m2 scales=row page=16 nan=seen"),
    Case(seqlen_q=17, seqlen_k=400, causal=1, more="cache=int8 scales=slot page=16 leftpad=5"),
    Case(seqlen_q=1, seqlen_k=100, more="filled=0 sink=1"),
    Case(seqlen_q=1, seqlen_k=300, heads=1, more="splits=130"),
)

# On a GPU with clusters, which join the splits. What Hopper's own kernels lack keeps sm_80's there.
CLUSTERS = decode(
    Case(
        batch=2,
        seqlen_q=1,
        seqlen_k=704,
        heads=6,
        heads_k=2,
        more="gpu=90 filled=700,170 splits=4 sink=1 page=16 nan=seen left=600 alibi=0.05",
    ),
    Case(
        batch=3,
        seqlen_q=5,
        seqlen_k=320,
        heads=1,
        more="gpu=90 filled=300,0,129 split_size=128 softcap=20",
    ),
    Case(
        batch=2,
        seqlen_q=2,
        seqlen_k=900,
        heads=1,
        more="gpu=90 filled=900,60 splits=8 out=fp32 softcap=20",
    ),
    Case(
        seqlen_q=9,
        seqlen_k=300,
        head_dim=40,
        head_dim_v=37,
        causal=1,
        more="gpu=90 splits=3 tree=1 nan=seen",
    ),
    Case(
        seqlen_q=1,
        seqlen_k=704,
        more="gpu=90 filled=690 page=16 cache=e4m3 scales=head nan=seen splits=2",
    ),
    Case(seqlen_q=17, seqlen_k=400, causal=1, more="gpu=90 cache=e4m3 nan=seen splits=5"),
)

CASES = CLUSTERS + decode(
    Case(batch=2, seqlen_q=1, seqlen_k=704, heads=4, heads_k=2, more="filled=700,170 page=1"),
    Case(batch=3, seqlen_q=5, seqlen_k=320, heads=6, heads_k=2, causal=1, more="filled=300,3,256"),
    Case(
        batch=2,
        seqlen_q=40,
        seqlen_k=320,
        causal=1,
        more="filled=300,20 leftpad=7,20 batch_idx=1 splits=5",
    ),
    Case(batch=2, seqlen_q=5, seqlen_k=320, more="filled=0,300 split_size=64 sink=1 left=20"),
    Case(batch=2, seqlen_q=3, seqlen_k=704, more="filled=700,70 page=64 splits=7 nan=seen tree=1"),
    Case(batch=2, seqlen_q=9, seqlen_k=192, heads=1, scale=-0.2, more="filled=5,190 right=3"),
    # The rows of heads cannot be copied in pieces of 16 bytes.
    Case(
        batch=2,
        seqlen_q=9,
        seqlen_k=320,
        heads=4,
        heads_k=2,
        head_dim=60,
        head_dim_v=44,
        causal=1,
        more="filled=300,20 new=9 rotary=60 halves=1 page=1 tree=1",
    ),
    Case(
        batch=2,
        seqlen_q=2,
        seqlen_k=256,
        head_dim=40,
        head_dim_v=37,
        more="filled=250,90 new=2 rotary=30 page=2 cache=int8 scales=slot splits=2",
    ),
    Case(seqlen_q=2, seqlen_k=192, head_dim=48, head_dim_v=32, more="filled=180 new=12 rotary=8"),
    Case(batch=2, seqlen_q=2, seqlen_k=200, more="filled=190,70 leftpad=3,0 cache=int8 scales=row"),
    Case(
        batch=2,
        seqlen_q=3,
        seqlen_k=256,
        heads=4,
        heads_k=2,
        more="filled=250,90 leftpad=3,17 new=3 rotary=64 page=16 hole=1 nan=seen",
    ),
    Case(
        batch=2,
        seqlen_q=3,
        seqlen_k=256,
        causal=1,
        more="filled=250,90 leftpad=3,17 new=3 rotary=32 rotary_seqlens=250,5",
    ),
    Case(
        batch=2,
        seqlen_q=1,
        seqlen_k=1600,
        heads=4,
        heads_k=2,
        more="filled=1500,40 batch_idx=1 cache=int8 scales=slot alibi=0.05",
    ),
    Case(
        batch=2,
        seqlen_q=1,
        seqlen_k=1408,
        heads=4,
        heads_k=2,
        more="filled=1400,40 page=64 cache=e4m3 scales=slot nan=seen split_size=640",
    ),
    Case(seqlen_q=9, seqlen_k=700, scale=0.003, causal=1, more="cache=int8 new=9 leftpad=3"),
    Case(
        batch=2,
        seqlen_q=10,
        seqlen_k=608,
        heads=4,
        heads_k=2,
        causal=1,
        more="filled=580,60 new=10 rotary=32 left=70 page=16 cache=e4m3 scales=slot nan=seen",
    ),
    Case(
        batch=2,
        seqlen_q=40,
        seqlen_k=512,
        causal=1,
        more="filled=450,20 new=40 cache=e4m3 scales=slot page=1 nan=seen softcap=20 out=fp32",
    ),
    Case(
        batch=2,
        seqlen_q=60,
        seqlen_k=320,
        heads_k=2,
        causal=1,
        more="filled=300,70 new=5 left=100 page=16 cache=e5m2 scales=row nan=seen splits=2",
    ),
    Case(seqlen_q=30, seqlen_k=300, causal=1, more="cache=int8 scales=row leftpad=5"),
    Case(seqlen_q=3, seqlen_k=256, more="tree=1"),
    # More rows than the largest tile has, of a group that does not divide it.
    Case(seqlen_q=25, seqlen_k=130, heads=3, causal=1),
    # Of the join, too, several warps have splits.
    Case(seqlen_q=1, seqlen_k=2300, heads=1, scale=1.0, more="split_size=64 sink=1 out=fp32"),
)

# Packed queries: 64 and more are prefilled, in tiles of 128 or 192. Keys are split where SMs would
# idle.
PREFILL = decode(
    Case(
        batch=2,
        seqlen_q=70,
        seqlen_k=320,
        heads_k=1,
        causal=1,
        more="ragged=1 filled=130,66 new=70 rotary=64 page=16 hole=1 nan=seen",
    ),
    Case(
        seqlen_q=130, seqlen_k=2112, causal=1, more="ragged=1 filled=2100 page=64 left=2080 sink=1"
    ),
    Case(batch=2, seqlen_q=64, seqlen_k=256, heads=1, more="ragged=1 filled=250,0 leftpad=9,0"),
    Case(
        batch=3,
        seqlen_q=5,
        seqlen_k=320,
        heads=6,
        heads_k=2,
        causal=1,
        more="ragged=1 filled=300,3,256",
    ),
    Case(
        batch=2, seqlen_q=9, seqlen_k=192, heads=4, heads_k=1, more="ragged=1 tree=1 new=9 splits=2"
    ),
)
