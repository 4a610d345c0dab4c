"""The cases of each preset."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from anyflash.bench._cases import CACHE_DTYPES, ITEM_SIZES, KEY_RANGES, Case

MASKS = (False, True)
GROUPED = ((32, 8, 64), (32, 8, 128), (64, 8, 128), (16, 1, 128))
FEATURES = (
    "plain", "causal", "window 512", "packed", "sinks", "max_logits", "softcap", "alibi", "bias",
    "keep-mask", "block mask, half", "dropout", "everything, window 512",
)  # fmt: skip
# Heads and head dims of FlashAttention-2's last table (arXiv 2307.08691).
MODELS = {"GPT 1.3B": (16, 128), "GPT 2.7B": (32, 80)}
DECODE_SHAPES = ((32, 8, 128), (64, 8, 128), (32, 32, 128), (8, 1, 128), (16, 16, 256))
RANKS = (2, 4, 8)
METHODS = ("ring", "gather", "ulysses")
LONGEST_SEQUENCE = 2**20
LONGEST_ALONE = 2**18
LARGEST_CACHE = 24 * 2**30
FRAMEWORK_CALLS = ("numpy", "torch", "torch recorded", "torch with backward", "jax jit")
GPU_CALLS = ("torch GPU", "torch GPU flash", "torch GPU registry", "cupy GPU", "jax jit GPU")


@dataclass(frozen=True)
class Wanted:
    """What the command line asks of a preset, and how many GPUs there are."""

    backend: str
    dtypes: tuple[str, ...]
    quick: bool
    gpus: int = 0

    @property
    def tokens(self) -> int:
        """Of a batch, whatever the length of its sequences: the paper's, or an eighth."""
        return 16384 if self.backend == "cuda" else 2048

    @property
    def hidden(self) -> int:
        """heads * d: the paper's, or a quarter."""
        return 2048 if self.backend == "cuda" else 512

    def up_to_tokens(self, *seqlens: int) -> list[int]:
        return [seqlen for seqlen in seqlens if seqlen <= self.tokens]


@dataclass(frozen=True)
class Preset:
    """Cases; the labels that make figures, their rows, columns and x axes ("": no plot); rooflines
    to measure. The peers are those to run if none are asked for; (): all that are found. In cases
    that several devices share, only those of _torch_context_parallel.py have a part."""

    about: str
    cases: Callable[[Wanted], Iterable[Case]]
    figure: tuple[str, ...] = ("op",)
    row: str = "mask"
    column: str = "d"
    x: str = "seqlen"
    rooflines: tuple[str, ...] = ("gemm", "mma")
    peers: tuple[str, ...] = ()
    shared: bool = False


def paper(wanted: Wanted) -> Iterator[Case]:
    tokens, hidden = wanted.tokens, wanted.hidden
    seqlens = (1024, 4096, 16384) if wanted.quick else (512, 1024, 2048, 4096, 8192, 16384)
    head_dims = (64, 128) if wanted.quick else (64, 128, 256)
    ops = ("forward", "backward") if wanted.quick else ("forward", "backward", "both")
    axes = itertools.product(ops, wanted.dtypes, head_dims, MASKS, wanted.up_to_tokens(*seqlens))
    for op, dtype, d, causal, seqlen in axes:
        yield Case(op, tokens // seqlen, seqlen, hidden // d, d, dtype, causal=causal)


def training(wanted: Wanted) -> Iterator[Case]:
    part = 1 if wanted.backend == "cuda" else 4  # of the heads
    seqlens = wanted.up_to_tokens(2048) if wanted.quick else wanted.up_to_tokens(2048, 8192)
    for dtype, (model, (heads, d)), seqlen in itertools.product(
        wanted.dtypes, MODELS.items(), seqlens
    ):
        batch = wanted.tokens // seqlen
        yield Case("both", batch, seqlen, heads // part, d, dtype, causal=True, model=model)


def gqa(wanted: Wanted) -> Iterator[Case]:
    seqlens = wanted.up_to_tokens(*((1024, 4096) if wanted.quick else (1024, 4096, 16384)))
    axes = itertools.product(("forward", "backward"), wanted.dtypes, GROUPED, MASKS, seqlens)
    for op, dtype, (heads, heads_k, d), causal, seqlen in axes:
        batch = wanted.tokens // seqlen
        yield Case(op, batch, seqlen, heads, d, dtype, heads_k=heads_k, causal=causal)


def packings(tokens: int, mean: int) -> dict[str, tuple[int, ...]]:
    """Lengths of so many tokens: equal; cut at random places; half of all in one sequence."""
    count = tokens // mean
    draw = random.Random(mean)
    marks = sorted(draw.sample(range(1, tokens), count - 1))
    cut = tuple(b - a for a, b in itertools.pairwise((0, *marks, tokens)))
    each, longer = divmod(tokens // 2, count - 1)
    others = [each + (i < longer) for i in range(count - 1)]
    return {"equal": (mean,) * count, "random": cut, "one long": (tokens // 2, *others)}


def varlen(wanted: Wanted) -> Iterator[Case]:
    if wanted.backend == "cuda":
        means = [2048] if wanted.quick else [512, 2048, 4096]
    else:
        means = [256, 512]
    axes = itertools.product(("forward", "backward"), wanted.dtypes, MASKS, means)
    for op, dtype, causal, mean in axes:
        for name, lengths in packings(wanted.tokens, mean).items():
            yield Case(
                op, len(lengths), max(lengths), wanted.hidden // 128, 128, dtype, causal=causal,
                lengths=lengths, packing=f"{name}, mean {mean}",
            )  # fmt: skip


def features(wanted: Wanted) -> Iterator[Case]:
    ops = ("forward",) if wanted.quick else ("forward", "backward")
    tokens, hidden = wanted.tokens, wanted.hidden
    seqlen = tokens // 4
    for op, dtype, d, feature in itertools.product(ops, wanted.dtypes, (64, 128), FEATURES):
        if op == "backward" and feature == "max_logits":  # an output of the forward only
            continue
        lengths = (seqlen,) * (tokens // seqlen) if feature == "packed" else ()
        yield Case(
            op, tokens // seqlen, seqlen, hidden // d, d, dtype, causal=feature == "causal",
            feature=feature, lengths=lengths, unit="ms",
        )  # fmt: skip


def decode(wanted: Wanted) -> Iterator[Case]:
    small = wanted.quick or wanted.backend == "cpu"
    shapes = DECODE_SHAPES[:1] if small else DECODE_SHAPES
    contexts = (1024, 16384) if small else (1024, 4096, 16384, 131072)
    batches = (1, 16) if small else (1, 16, 128)
    axes = itertools.product(wanted.dtypes, shapes, contexts, batches, (1, 4), (0, 16))
    for dtype, (heads, heads_k, d), context, batch, queries, page_size in axes:
        if 2 * batch * context * heads_k * d * ITEM_SIZES[dtype] > LARGEST_CACHE:
            continue
        cache_dtypes = ("", *CACHE_DTYPES) if batch > 1 and queries == 1 else ("",)
        for cache_dtype in cache_dtypes:
            yield Case(
                "decode", batch, queries, heads, d, dtype, heads_k=heads_k, seqlen_k=context,
                causal=True, page_size=page_size, cache_dtype=cache_dtype, unit="us",
                timing="graph" if wanted.backend == "cuda" else "events",
            )  # fmt: skip


def masks(wanted: Wanted) -> Iterator[Case]:
    ops = ("forward",) if wanted.quick else ("forward", "backward")
    axes = itertools.product(ops, wanted.dtypes, (64, 128), wanted.up_to_tokens(2048, 16384))
    for op, dtype, d, seqlen in axes:
        for feature in ("plain", *KEY_RANGES):
            yield Case(
                op, wanted.tokens // seqlen, seqlen, wanted.hidden // d, d, dtype, feature=feature,
                causal=feature != "prefix of a quarter",
            )  # fmt: skip


def large(wanted: Wanted) -> Iterator[Case]:
    on_gpu = wanted.backend == "cuda"
    shapes = ((8, 8), (16, 2)) if on_gpu else ((2, 1),)
    seqlens = wanted.up_to_tokens(*((1024,) if wanted.quick else (1024, 4096, 16384)))
    axes = itertools.product(("forward", "backward"), wanted.dtypes, shapes, MASKS, seqlens)
    for op, dtype, (heads, heads_k), causal, seqlen in axes:
        batch = wanted.tokens // seqlen
        yield Case(op, batch, seqlen, heads, 512, dtype, heads_k=heads_k, causal=causal)
    decoding = ((16, 2, 512, 0), (16, 1, 576, 512), (128, 1, 576, 512))
    contexts = (4096, 16384) if on_gpu else (1024,)
    batches = (1, 16) if on_gpu else (1,)
    steps = itertools.product(wanted.dtypes, decoding, contexts, batches)
    for dtype, (heads, heads_k, d, d_v), context, batch in steps:
        yield Case(
            "decode", batch, 1, heads, d, dtype, heads_k=heads_k, seqlen_k=context, causal=True,
            page_size=64, unit="us", timing="graph" if on_gpu else "events", d_v=d_v,
        )  # fmt: skip


def memory(wanted: Wanted) -> Iterator[Case]:
    heads, longest = (16, 65536) if wanted.backend == "cuda" else (4, 4096)
    seqlens = [seqlen for seqlen in (2**i for i in range(9, 17)) if seqlen <= longest]
    seqlens = seqlens[:-1] if wanted.quick else seqlens
    for op, dtype, seqlen in itertools.product(("forward", "both"), wanted.dtypes, seqlens):
        yield Case(op, 1, seqlen, heads, 64, dtype, timing="memory", unit="MiB")


def cpu(wanted: Wanted) -> Iterator[Case]:
    seqlens = (512, 1024) if wanted.quick else (512, 1024, 2048, 4096, 8192)
    axes = itertools.product(("forward", "backward"), wanted.dtypes, (64, 128), MASKS, seqlens)
    for op, dtype, d, causal, seqlen in axes:
        yield Case(op, 1 if seqlen == 8192 else 2, seqlen, 8, d, dtype, causal=causal)


def overhead(wanted: Wanted) -> Iterator[Case]:
    if wanted.backend == "cuda":
        ops = ("forward",) if wanted.quick else ("forward", "backward")
        axes = itertools.product(ops, wanted.dtypes, (64, 128), MASKS, (128, 256, 512))
        for op, dtype, d, causal, seqlen in axes:
            for timing in ("events", "graph"):
                yield Case(
                    op,
                    1,
                    seqlen,
                    wanted.hidden // d,
                    d,
                    dtype,
                    causal=causal,
                    timing=timing,
                    unit="us",
                )
    calls = (*FRAMEWORK_CALLS, *(GPU_CALLS if wanted.backend == "cuda" else ()))
    # JAX last: its threads go on for seconds, and slow down what follows.
    for framework in sorted(calls, key=lambda name: name.startswith("jax")):
        dtype = "float16" if framework in GPU_CALLS else "float32"
        if framework == "jax jit GPU":  # XLA refuses float16: "Unsupported dot precision algorithm"
            dtype = "bfloat16"
        yield Case("call", 1, 1, 1, 8, dtype, framework=framework, unit="us")


def documents(rows: int) -> tuple[int, ...]:
    """Lengths of four that share so many rows: 5, 1, 7 and 3 sixteenths. None of their ends but the
    last is a multiple of a tile's rows."""
    ends = [rows * sixteenths // 16 + 13 for sixteenths in (5, 6, 13)]
    return tuple(b - a for a, b in itertools.pairwise((0, *ends, rows)))


def context_parallel(wanted: Wanted) -> Iterator[Case]:
    """Ranks on GPUs of their own as far as there are any; on the CPU two, to try the command.
    Packed documents are measured with the ring."""
    on_gpu = wanted.backend == "cuda"
    heads, heads_k, d = (32, 8, 128) if on_gpu else (4, 2, 64)
    lengths = (8192, 32768, 131072) if on_gpu else (512, 1024)
    together = [n for n in RANKS if n <= (wanted.gpus if on_gpu else 2)]
    ways = [(n, "nccl" if on_gpu else "gloo", method) for n in together for method in METHODS]
    ways += [(n, "alone", "ring") for n in RANKS]
    axes = itertools.product(
        ways, ("forward", "both"), wanted.dtypes, lengths[:1] if wanted.quick else lengths
    )
    for (ranks, transport, method), op, dtype, rows in axes:
        if ranks * rows > (LONGEST_ALONE if transport == "alone" else LONGEST_SEQUENCE):
            continue
        case = Case(
            op, 1, ranks * rows, heads, d, dtype, heads_k=heads_k, causal=True, method=method,
            ranks=ranks, transport=transport,
        )  # fmt: skip
        yield case
        if method == "ring" and transport != "alone" and rows in lengths[:2]:
            packed = documents(ranks * rows)
            yield replace(
                case, batch=len(packed), seqlen=max(packed), lengths=packed,
                packing=f"{len(packed)} documents",
            )  # fmt: skip


PRESETS = {
    "paper": Preset(
        "FlashAttention-2's grid: 16k tokens, hidden size 2048, 512 to 16k long", paper
    ),
    "training": Preset(
        "attention of a GPT's block, forward and backward through autograd, 2k and 8k long",
        training,
        row="model",
        column="heads",
    ),
    "gqa": Preset("grouped and multi-query heads", gqa, column="heads"),
    "varlen": Preset("packed sequences of equal, random and uneven lengths", varlen, x=""),
    "features": Preset("each feature beside the kernel without it", features, rooflines=(), x=""),
    "decode": Preset(
        "one step with a KV cache, of 16 and of 8 bits, beside the memory's bandwidth",
        decode,
        figure=("cache", "queries"),
        row="batch",
        column="heads",
        x="context",
        rooflines=("read",),
        peers=("plain", "flash", "cudnn", "fa2", "fa3", "fa4", "flashinfer"),
    ),
    "masks": Preset(
        "documents, a prefix and a tree by key_ranges: TFLOP/s of what they leave",
        masks,
        row="feature",
        peers=("plain",),
    ),
    "large": Preset(
        "head dim 512, and decoding of latent attention (576 and 512)",
        large,
        column="heads",
        rooflines=("gemm", "mma", "read"),
        peers=("efficient", "math"),
    ),
    "memory": Preset(
        "peak memory beside standard attention's",
        memory,
        row="mask",
        rooflines=(),
        peers=("standard", "flash"),
    ),
    "cpu": Preset("512 to 8192 tokens, 8 heads", cpu, peers=("flash",)),
    "context-parallel": Preset(
        "a sequence shared by several GPUs, or by ranks that one GPU computes in turn",
        context_parallel,
        figure=("op", "transport", "packing"),
        row="method",
        column="ranks",
        rooflines=(),
        peers=("torch-cp", "torch-cp-cudnn"),
        shared=True,
    ),
    "overhead": Preset(
        "what a call costs: 128 to 512 tokens on a GPU, and the host's time for one token",
        overhead,
        rooflines=(),
        x="",
    ),
}


def cases_of(preset: str, wanted: Wanted, only: dict[str, frozenset[str]]) -> list[Case]:
    """A preset's cases with these labels; a label that no case has is an error."""
    cases = list(PRESETS[preset].cases(wanted))
    for name, values in only.items():
        known = sorted({case.labels[name] for case in cases if name in case.labels})
        if not values <= set(known):
            raise ValueError(
                f"--only {name}={','.join(sorted(values))}: these cases have "
                + (f"{name}={','.join(known)}" if known else f"no {name}")
            )
        cases = [case for case in cases if case.labels.get(name) in values]
    if not cases:
        raise ValueError("--only: no case has all of these labels")
    if wanted.backend == "cuda":
        return cases
    return [replace(c, unit="GFLOP/s") if c.unit == "TFLOP/s" else c for c in cases]
