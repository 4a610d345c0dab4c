"""Cases of attention with a cache. `bug_...` in an id names the project and the thread where users
met that bug; a bare number is flash-attention's."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from backends.tensors import LAYOUTS, WRITABLE_LAYOUTS
from cases.cache_case import TOGETHER, Append, CacheCase, with_
from cases.case import FULL
from oracle.kvcache import EIGHT_BIT

PAGES = (0, 1, 16, 64, 256)
HEADS = ((1, 1), (4, 1), (8, 2), (6, 2), (32, 8))
QUERIES = (1, 2, 4, 7, 33, 130)
DIMS = (32, 40, 59, 64, 80, 128, 192, 256, 320, 512)
DIM_PAIRS = ((128, 64), (64, 128), (192, 128), (40, 96), (80, 256), (1, 8), (512, 300))
FLOATS = ("fp16", "bf16", "fp32")


def _lengths() -> Iterator[CacheCase]:
    """Nothing, one key, a page and one key less or more, and all of the cache."""
    for page, (sq, dtype) in itertools.product(PAGES, ((1, "fp16"), (1, "fp32"), (5, "bf16"))):
        near = page if page > 1 else 128
        lengths = (0, 1, near - 1, near, near + 1, 300)
        case = CacheCase("", dtype, lengths, sq, page=page, capacity=300, causal=sq > 1)
        yield with_(case, f"lengths-page{page}-sq{sq}-{dtype}", smoke=page == 16)
    for dtype, sq in itertools.product(FLOATS, (1, 3, 70)):
        yield CacheCase(f"all-filled-{dtype}-{sq}", dtype, (150, 150), sq, seqlens=False)
        name = f"more-queries-than-keys-{dtype}-{sq}"
        yield CacheCase(name, dtype, (1, 2, 30, 69), sq, causal=True, page=16)
    for dtype, n in itertools.product(FLOATS, (63, 64, 65, 127, 128, 129, 1000)):
        yield CacheCase(f"steps-{n}-{dtype}", dtype, (n, n + 1), heads_k=1, capacity=n + 9)
    yield CacheCase("batch0", lengths=(), capacity=64)
    yield CacheCase("sq0", lengths=(3, 64), sq=0)
    yield CacheCase("no-keys", lengths=(0, 0), sq=3, capacity=64, page=16)
    yield CacheCase("no-keys-sinks", lengths=(0, 0), sq=3, capacity=64, sinks=True)
    yield CacheCase("one-row", lengths=(1, 0), capacity=1)
    yield CacheCase("long-fp16", lengths=(5000, 17), heads=2, heads_k=2, page=64)
    yield CacheCase("long-fp32", "fp32", (5000, 17), heads=2, heads_k=2, page=64)
    yield CacheCase("many-fp16", "fp16", (1, 2, 0) * 30, heads=2, heads_k=1, d=8, page=4)


def _heads() -> Iterator[CacheCase]:
    """Rows of a group fill tiles of 16, 32 and 64, several of them, and no tile."""
    for number, ((heads, heads_k), sq) in enumerate(itertools.product(HEADS, QUERIES)):
        if heads == 32 and sq > 33:
            continue
        case = CacheCase("", "", (77, 140), sq, heads, heads_k, causal=number % 3 > 0)
        for dtype in (("fp16", "bf16")[number % 2], "fp32"):
            page = (0, 16)[number // 2 % 2]
            yield with_(case, f"heads{heads}-{heads_k}-sq{sq}-{dtype}", dtype=dtype, page=page)
    yield CacheCase("heads33-11", lengths=(40, 9, 1), heads=33, heads_k=11, d=32)
    for heads, dtype in itertools.product((16, 17, 32, 33, 64, 65), ("fp16", "bf16")):
        yield CacheCase(f"group{heads}-{dtype}", dtype, (90, 20), 1, heads, 1, page=16)


def _head_dims() -> Iterator[CacheCase]:
    for number, (d, dtype) in enumerate(itertools.product(DIMS, FLOATS)):
        page = (0, 16, 64)[number % 3 if number % 2 else 0]
        case = CacheCase(f"d{d}-{dtype}", dtype, (100, 65), 2, d=d, page=page, causal=True)
        yield case
        if d in (40, 59, 256, 512):
            yield with_(case, f"d{d}-{dtype}-one", sq=1, page=16, lengths=(70,))
    for (d, dv), dtype in itertools.product(DIM_PAIRS, FLOATS):
        name = f"d{d}-dv{dv}-{dtype}"
        yield CacheCase(name, dtype, (70, 130), 3, d=d, dv=dv, page=16, causal=True)
    for d, dv in ((300, 0), (64, 300), (20, 12)):
        yield CacheCase(f"d{d}-dv{dv}-fp64", "fp64", (50, 3), 3, d=d, dv=dv, causal=True)
    yield CacheCase("d300-bf16", "bf16", (50, 3), 2, d=300, page=16)


# One of each, as changes to a case. Pairs of them are joined: they must not touch the same field.
SINGLE: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "left": {"window": (40, None)},
    "both": {"window": (30, 20)},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi": "bh"},
    "sinks": {"sinks": True},
    "tree": {"tree": "b"},
    "tree1": {"tree": "1"},
    "scale": {"scale": -0.2},
    "leftpad": {"leftpad": (70, 3)},
    "idx": {"batch_idx": True},
    "paged": {"page": 16},
    "splits": {"splits": 3},
    "split_size": {"split_size": 64},
    "out32": {"out_dtype": "fp32"},
    "one": {"sq": 1},
    "append": {"append": Append(7)},
    "rotary": {"append": Append(5, rotary=32, neox=True)},
    "rotary_at": {"append": Append(5, rotary=32, seqlens=(9, 90))},
    "int8": {"cache_dtype": "int8", "scales": "head"},
    "e4m3": {"cache_dtype": "e4m3", "scales": "slot"},
    "e5m2": {"cache_dtype": "e5m2", "scales": "row"},
    "gqa": {"heads": 8, "heads_k": 2},
    "dv": {"d": 80, "dv": 96},
    "far": {"values": "rising"},
    "latent": {"latent": True, "dv": 40},
}
APART = ({"tree", "one"}, {"tree1", "one"}, {"idx", "paged"}, {"splits", "split_size"})


def _pairs() -> Iterator[CacheCase]:
    """Every two features together, on every backend."""
    base = CacheCase("", "fp16", (151, 66), 6, capacity=170)
    for number, (one, two) in enumerate(itertools.combinations(SINGLE, 2)):
        if SINGLE[one].keys() & SINGLE[two].keys() or {one, two} in APART:
            continue
        # Half of them without NaN, which would hide that a kernel takes a finite wrong value.
        changes = SINGLE[one] | SINGLE[two] | {"poison": number % 2 == 0}
        dtype = "bf16" if number % 5 == 0 else "fp16"
        yield with_(base, f"pair-{one}-{two}", dtype=dtype, **changes)
        if "out32" not in (one, two) and number % (2 if FULL else 6) == 1:
            yield with_(base, f"pair-{one}-{two}-fp32", dtype="fp32", **changes)
    for name, changes in SINGLE.items():
        for dtype in ("bf16", "fp64") if name != "out32" else ("bf16",):
            yield with_(base, f"single-{name}-{dtype}", dtype=dtype, **changes)


def _features() -> Iterator[CacheCase]:
    base = CacheCase("", "fp16", (200, 131, 5), 4, page=16, capacity=208)
    windows = ((0, 0), (0, None), (None, 0), (63, 0), (64, 0), (-1, -1), (5, 7), (1 << 62, 0))
    for window, dtype in itertools.product(windows, ("fp16", "fp32")):
        name = f"window-{window[0]}-{window[1]}-{dtype}"
        yield with_(base, name, dtype=dtype, window=window)
    # The window begins in the middle of a page and of a split, and ends within the last keys.
    for splits, dtype in itertools.product((1, 3), ("fp16", "fp32")):
        changes = {"window": (100, 2), "splits": splits, "dtype": dtype, "lengths": (700, 260)}
        yield with_(base, f"window-splits{splits}-{dtype}", sq=9, capacity=720, **changes)
    for pad, dtype in (((200, 131, 5), "fp16"), ((199, 0, 5), "fp32"), ((17, 16, 1), "bf16")):
        yield with_(base, f"leftpad-{pad[0]}-{dtype}", dtype=dtype, leftpad=pad, causal=True)
    for sq, dtype, tree in itertools.product((1, 2, 16, 64, 70), ("fp16", "fp32"), "1b"):
        yield with_(base, f"tree{tree}-{sq}-{dtype}", sq=sq, dtype=dtype, tree=tree)
    everything = {
        "window": (90, 60),
        "softcap": 5.0,
        "alibi": "h",
        "sinks": True,
        "tree": "b",
        "append": Append(9, rotary=64),
        "leftpad": (3, 40, 0),
        "lengths": (160, 131, 2),
    }
    for dtype, splits in itertools.product((*FLOATS, "fp64"), (0, 1, 5)):
        changes = everything | {"dtype": dtype, "splits": splits}
        yield with_(base, f"everything-{dtype}-{splits}", sq=9, **changes)
        changes |= {"cache_dtype": "int8", "scales": "slot"}
        yield with_(base, f"everything-int8-{dtype}-{splits}", sq=9, **changes)
    for values, dtype in itertools.product(("large", "negative", "falling", "zeros"), FLOATS):
        yield with_(base, f"{values}-{dtype}", dtype=dtype, values=values, splits=2)


def _splits() -> Iterator[CacheCase]:
    """One to more than there are blocks of keys, so that some hold none."""
    base = CacheCase("", "fp16", (0, 1, 64, 500, 777), page=16, capacity=800)
    for splits, dtype in itertools.product((1, 2, 3, 7, 64, 1000), FLOATS):
        yield with_(base, f"splits{splits}-{dtype}", dtype=dtype, splits=splits)
    for size, dtype in itertools.product((64, 128, 4096), FLOATS):
        yield with_(base, f"split-size{size}-{dtype}", dtype=dtype, split_size=size)
    for splits, (sq, heads_k) in itertools.product((2, 7), ((4, 2), (33, 1), (130, 4))):
        case = with_(base, f"splits{splits}-sq{sq}", sq=sq, heads_k=heads_k, splits=splits)
        yield with_(case, case.id, lengths=(90, 333), causal=True, sinks=splits == 2)
    # 26d7d92f, 31920dda: splits, all of which a row does not see.
    hidden = with_(base, "", sq=200, lengths=(150, 0), causal=True, heads=1, heads_k=1)
    for splits in (2, 5):
        yield with_(hidden, f"bug_26d7d92f-keyless-rows-splits{splits}", splits=splits)
        yield with_(hidden, f"keyless-sinks-splits{splits}-fp32", splits=splits, dtype="fp32")
    yield with_(base, "splits-alone", lengths=(2000,), heads=1, heads_k=1)
    yield with_(base, "splits-alone-fp32", lengths=(2000,), heads=1, heads_k=1, dtype="fp32")


def _layouts() -> Iterator[CacheCase]:
    base = CacheCase("", "fp16", (100, 37), 3, page=16, causal=True)
    writable = [name for name in WRITABLE_LAYOUTS if not name.startswith("fused")]
    for name, (dtype, d) in itertools.product(writable, (("fp16", 64), ("bf16", 40), ("fp32", 40))):
        case = with_(base, f"layout-{name}-{dtype}-d{d}", dtype=dtype, d=d, layout=name)
        yield case
        if name != "contiguous":
            small = with_(case, f"{case.id}-small", page=0, layout="contiguous")
            yield with_(small, small.id, small_layout=name, append=Append(2, 16), tree="b")
    for name, dtype in itertools.product(("offset_1", "step_d", "heads_odd"), ("int8", "e4m3")):
        changes = {"cache_dtype": dtype, "scales": "head", "append": Append(3)}
        yield with_(base, f"layout-{name}-{dtype}", layout=name, **changes)
    for how, page, d in itertools.product(TOGETHER, (0, 16), (64, 40)):
        name = f"together-{how}-page{page}-d{d}"
        case = with_(base, name, layout=how, page=page, d=d, append=Append(2))
        yield case
        yield with_(case, f"{name}-fp32", dtype="fp32")
        changes = {"cache_dtype": "int8", "scales": "slot"}
        yield with_(case, f"{name}-int8", **changes)


def _appends() -> Iterator[CacheCase]:
    base = CacheCase("", "fp16", (0, 15, 16, 17, 60), page=16, causal=True)
    for new, sq, dtype in itertools.product((1, 2, 16, 40), (1, 4), FLOATS):
        yield with_(base, f"append{new}-sq{sq}-{dtype}", dtype=dtype, sq=sq, append=Append(new))
    for page, dtype in itertools.product(PAGES, ("bf16", "fp32")):
        case = with_(base, f"append-page{page}-{dtype}", dtype=dtype, page=page)
        yield with_(case, case.id, sq=3, append=Append(3, 16), capacity=260)
    rotations = itertools.product((2, 32, 64), (False, True), (False, True), FLOATS)
    for dim, neox, causal, dtype in rotations:
        name = f"rotary{dim}-{'neox' if neox else 'gptj'}-{'steps' if causal else 'one'}-{dtype}"
        append = Append(5, dim, neox, table_dtype="fp32" if dim == 32 else "")
        yield with_(base, name, dtype=dtype, sq=5, append=append, causal=causal)
    for dtype in (*FLOATS, "fp64"):
        append = Append(3, 24, True, "fp32", spare=7)
        case = with_(base, f"rotary-leftpad-{dtype}", dtype=dtype, append=append, d=40, sq=4)
        yield with_(case, case.id, leftpad=(0, 15, 3, 2, 59), window=(20, 0), causal=False)
        yield with_(base, f"rotary-idx-{dtype}", dtype=dtype, page=0, batch_idx=True, append=append)
        # By other rows than the numbers of keys: by the rows in the cache, and by any.
        name, pads = f"rotary-seqlens-{dtype}", (0, 15, 3, 2, 59)
        in_cache = append._replace(seqlens=base.lengths, spare=0)
        yield with_(case, f"{name}-leftpad", leftpad=pads, causal=True, append=in_cache)
        yield with_(case, f"{name}-leftpad-one", leftpad=pads, causal=False, append=in_cache)
        anywhere = append._replace(seqlens=(100, 0, 7, 90, 3), neox=False)
        yield with_(case, f"{name}-any", causal=True, append=anywhere, smoke=dtype == "fp16")
    # All of the cache is filled in one go (prefill), with a rotary table that ends there.
    for dtype in ("fp16", "fp32"):
        prefill = with_(base, f"prefill-{dtype}", dtype=dtype, lengths=(0, 0), sq=100)
        yield with_(prefill, prefill.id, append=Append(100, 64, True), smoke=True)
        chunk = with_(base, f"chunk-{dtype}", dtype=dtype, lengths=(64, 150), sq=64)
        yield with_(chunk, chunk.id, append=Append(64, 64))
    yield with_(base, "append-dv", d=128, dv=64, sq=2, append=Append(2, 128))
    yield with_(base, "append-sq0", sq=0, append=Append(2))
    yield with_(base, "append0-rotary", sq=2, append=Append(0, 32))
    for page in (0, 16):
        rows_odd = with_(base, f"append-d59-{page}", page=page, d=59, append=Append(3, 58))
        yield with_(rows_odd, rows_odd.id, sq=2)


def _quantised() -> Iterator[CacheCase]:
    base = CacheCase("", "fp16", (129, 40, 0, 16), page=16, capacity=144)
    scales = ("", "head", "slot", "row")
    kinds = itertools.product(EIGHT_BIT, scales, (1, 6), (*FLOATS, "fp64"))
    for cache_dtype, scales, sq, dtype in kinds:
        changes = {"cache_dtype": cache_dtype, "scales": scales, "sq": sq, "causal": True}
        name = f"{cache_dtype}-{scales or 'bare'}-sq{sq}-{dtype}"
        yield with_(base, name, dtype=dtype, **changes)
        yield with_(base, f"{name}-append", dtype=dtype, append=Append(sq, 32, True), **changes)
    for cache_dtype, d in itertools.product(EIGHT_BIT, (40, 59, 128, 192, 256, 512)):
        scales = "row" if cache_dtype == "e5m2" else "slot"
        changes = {"cache_dtype": cache_dtype, "scales": scales, "append": Append(2, 32)}
        yield with_(base, f"{cache_dtype}-d{d}", d=d, sq=3, **changes)
        yield with_(base, f"{cache_dtype}-d{d}-fp32", d=d, dtype="fp32", sq=3, **changes)
    for cache_dtype, (heads, sq) in itertools.product(EIGHT_BIT, ((8, 4), (8, 7), (8, 20))):
        changes = {"cache_dtype": cache_dtype, "scales": "slot", "heads": heads, "heads_k": 1}
        name = f"{cache_dtype}-rows{heads * sq}"
        yield with_(base, name, sq=sq, dtype="bf16", splits=3, **changes)
        yield with_(base, f"{name}-idx", sq=sq, page=0, batch_idx=True, **changes)
    # Every query sees a single key, on a page of its own: its probability has no rounding error but
    # that of its scale, which counts in units of a power of two.
    for dtype, cache_dtype in itertools.product(FLOATS[:2], EIGHT_BIT):
        changes = {"cache_dtype": cache_dtype, "scales": "slot", "window": (0, 0), "page": 1}
        name = f"{cache_dtype}-one-key-{dtype}"
        yield with_(base, name, dtype=dtype, out_dtype="fp32", sq=6, lengths=(40,), **changes)
    # Elements beyond the largest number: they saturate.
    for cache_dtype in EIGHT_BIT:
        changes = {"cache_dtype": cache_dtype, "append": Append(4), "values": "large"}
        yield with_(base, f"{cache_dtype}-saturated", sq=4, scales="head", **changes)


def _latent() -> Iterator[CacheCase]:
    """MLA: one row for all heads, whose first columns are the values. DeepSeek's has 576 columns,
    512 of them values, and 16 to 128 heads."""
    mla = CacheCase("", "fp16", (140, 67, 1), heads=16, heads_k=1, d=576, dv=512, latent=True)
    for heads, page, dtype in itertools.product((16, 128), (0, 1, 64), FLOATS):
        name = f"latent-heads{heads}-page{page}-{dtype}"
        changes = {"heads": heads, "page": page, "lengths": (70, 33) if heads > 16 else mla.lengths}
        yield with_(mla, name, dtype=dtype, smoke=(page, dtype) == (64, "fp16"), **changes)
    for sq, dtype in itertools.product((2, 3, 4, 9), FLOATS):
        yield with_(mla, f"latent-sq{sq}-{dtype}", dtype=dtype, sq=sq, causal=True, page=64)
    for page, dtype in itertools.product((0, 1, 64), FLOATS):
        changes = {"dtype": dtype, "page": page, "causal": True}
        append = Append(3, rotary=64, neox=page == 1)
        yield with_(mla, f"latent-append-page{page}-{dtype}", sq=3, append=append, **changes)
        yield with_(mla, f"latent-append-one-page{page}-{dtype}", append=Append(1), **changes)
    for cache_dtype, scales, dtype in itertools.product(EIGHT_BIT, ("head", "slot", "row"), FLOATS):
        changes = {"cache_dtype": cache_dtype, "scales": scales, "dtype": dtype, "page": 64}
        name = f"latent-{cache_dtype}-{scales}-{dtype}"
        yield with_(mla, name, sq=2, **changes)
        append = Append(2, rotary=32)
        yield with_(mla, f"{name}-append", sq=2, append=append, causal=True, **changes)
    more: dict[str, dict[str, Any]] = {
        "sinks": {"sinks": True, "page": 64},
        "splits3": {"splits": 3, "page": 64},
        "split-size64": {"split_size": 64},
        "tree": {"tree": "b", "sq": 4, "append": Append(4), "page": 64},
        "leftpad": {"leftpad": (100, 0, 1), "sq": 2, "causal": True},
        "window": {"window": (40, 0), "sq": 2, "page": 1},
        "idx": {"batch_idx": True},
        "out32": {"out_dtype": "fp32"},
        "large": {"values": "large"},
        "finite": {"poison": False, "page": 64},
        "layout": {"layout": "offset_1", "append": Append(2)},
    }
    for (name, changes), dtype in itertools.product(more.items(), FLOATS):
        yield with_(mla, f"latent-{name}-{dtype}", dtype=dtype, **changes)
    # Other kernels' head dims, and key heads of which there are several.
    dims = ((40, 24), (64, 64), (64, 1), (59, 33), (128, 128), (192, 128), (320, 300), (512, 64))
    for (d, dv), dtype in itertools.product(dims, FLOATS):
        case = with_(mla, f"latent-d{d}-dv{dv}-{dtype}", dtype=dtype, d=d, dv=dv, heads=4, page=16)
        yield with_(case, case.id, sq=2, heads_k=2, append=Append(2, 16), causal=True)
        name = f"{case.id}-rows48-int8"
        yield with_(case, name, sq=3, heads=16, cache_dtype="int8", scales="slot", splits=2)
        yield with_(case, f"{case.id}-rows48", sq=3, heads=16, causal=True, splits=2)
    yield with_(mla, "latent-d20-dv12-fp64", dtype="fp64", d=20, dv=12, append=Append(1, 4))
    yield with_(mla, "latent-no-keys", lengths=(0, 0), capacity=64, page=64)


CACHE_CASES = (
    *_lengths(),
    *_heads(),
    *_head_dims(),
    *_pairs(),
    *_features(),
    *_splits(),
    *_layouts(),
    *_appends(),
    *_quantised(),
    *_latent(),
)
assert LAYOUTS.keys() >= {case.layout for case in CACHE_CASES} - set(TOGETHER)
