"""Wrong calls of attention_with_kvcache: the message says what and what is allowed; no writing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from calls.frameworks import Producer
from calls.refusals import FLOATS, Wrong, ends, ones, refused
from oracle.attention import Array

HALF, INT8, FLOAT8 = np.float16, np.int8, ml_dtypes.float8_e4m3fn

# Two sequences, 8 heads on 4, 3 queries and new keys, a capacity of 16; or pages of 4 rows.
DENSE: dict[str, Any] = {
    **{"q": ones(2, 3, 8, 16), "k_cache": ones(2, 16, 4, 16), "v_cache": ones(2, 16, 4, 24)},
    **{"k": 2 * ones(2, 3, 4, 16), "v": 2 * ones(2, 3, 4, 24), "cache_seqlens": ends(5, 0)},
}
PAGED = DENSE | {
    **{"k_cache": ones(7, 4, 4, 16), "v_cache": ones(7, 4, 4, 24)},
    "block_table": np.arange(6, dtype=np.int32).reshape(2, 3),
}
READS = {name: x for name, x in DENSE.items() if name not in ("k", "v")}


def frozen(*shape: int) -> Array:
    x = ones(*shape)
    x.flags.writeable = False
    return x


CACHES = "float64, float32, float16, bfloat16, int8, float8_e4m3fn and float8_e5m2 are allowed"
WRONG: dict[str, Wrong] = {
    # frameworks, dtypes, ranks
    "q-list": ({"q": [1.0]}, TypeError, "q is list; arrays of NumPy"),
    "q-int": ({"q": ends(0)}, TypeError, f"q is int32; {FLOATS}"),
    "q-int8": ({"q": ones(2, 3, 8, 16, dtype=INT8)}, TypeError, f"q is int8; {FLOATS}"),
    "q-rank": ({"q": ones(2, 8, 16)}, ValueError, r"q has 3 dimensions, shape .*seqlen_q, heads"),
    "cache-none": ({"k_cache": None}, TypeError, "k_cache is NoneType; arrays"),
    "cache-int": ({"k_cache": ends(0)}, TypeError, f"k_cache is int32; {CACHES}"),
    "cache-uint8": (
        {"k_cache": ones(2, 16, 4, 16, dtype=np.uint8)},
        TypeError,
        f"k_cache is uint8; {CACHES}",
    ),
    "cache-e4m3": (
        {"v_cache": ones(2, 16, 4, 24, dtype=ml_dtypes.float8_e4m3)},
        TypeError,
        f"v_cache is float8_e4m3; {CACHES}",
    ),
    "cache-half": (
        {"k_cache": ones(2, 16, 4, 16, dtype=HALF)},
        TypeError,
        "k_cache is float16, but q is float32; .*int8",
    ),
    "caches-unlike": (
        {"k_cache": ones(2, 16, 4, 16, dtype=INT8)},
        TypeError,
        "v_cache is float32, but k_cache is int8",
    ),
    "cache-rank": (
        {"v_cache": ones(16, 4, 24)},
        ValueError,
        r"v_cache has 3 dimensions, .*expected 4: \(batch, capacity, heads_k, head_dim_v\), or",
    ),
    "heads": ({"k_cache": ones(2, 16, 3, 16)}, ValueError, "k_cache has 3 heads, .*divide q's 8"),
    "head-dim": ({"k_cache": ones(2, 16, 4, 8)}, ValueError, r"k_cache has shape \(2, 16, 4, 8\)"),
    "capacity": ({"v_cache": ones(2, 9, 4, 24)}, ValueError, r"v_cache has shape \(2, 9, 4, 24\)"),
    "batch": ({"q": ones(3, 3, 8, 16)}, ValueError, "k_cache has shape .*3.*cache_batch_idx"),
    # what is appended
    "k-alone": ({"v": None}, ValueError, "k is given without v"),
    "v-alone": ({"k": None}, ValueError, "v is given without k"),
    "k-half": ({"k": ones(2, 3, 4, 16, dtype=HALF)}, TypeError, "k is float16, but q is float32"),
    "k-list": ({"k": [1]}, TypeError, "k is list; arrays"),
    "v-shape": ({"v": ones(2, 3, 4, 16)}, ValueError, r"v has shape \(2, 3, 4, 16\); expected"),
    "v-length": ({"v": ones(2, 2, 4, 24)}, ValueError, r"v has shape \(2, 2, 4, 24\); .*: k's"),
    "k-long": ({"k": ones(2, 17, 4, 16), "v": ones(2, 17, 4, 24)}, ValueError, "k has .*17.*16"),
    "no-lengths": ({"cache_seqlens": None}, ValueError, "k is given without cache_seqlens"),
    "full": ({"cache_seqlens": ends(5, 14)}, ValueError, r"cache_seqlens\[1\] is 14; .*13"),
    "full-int": (
        {"cache_seqlens": 14},
        ValueError,
        "cache_seqlens is 14; 0 to 13 is allowed: k_cache has room for 16 rows .*, and 3 are",
    ),
    "frozen-k": ({"k_cache": frozen(2, 16, 4, 16)}, ValueError, "k_cache is read-only"),
    "frozen-v": ({"v_cache": frozen(2, 16, 4, 24)}, ValueError, "v_cache is read-only"),
    # integers
    "lengths-int64": (
        {"cache_seqlens": np.array([5, 0])},
        TypeError,
        r"cache_seqlens is int64; int32 is allowed: pass cache_seqlens\.astype\('int32'\)",
    ),
    "lengths-list": (
        {"cache_seqlens": [5, 0]},
        TypeError,
        "cache_seqlens is list; an int or an array of int32",
    ),
    "lengths-bool": ({"cache_seqlens": True}, TypeError, "cache_seqlens is bool; an int"),
    "lengths-negative": ({"cache_seqlens": -1}, ValueError, "cache_seqlens is -1; 0 to"),
    "lengths-float": (
        {"cache_seqlens": 1.0},
        TypeError,
        "cache_seqlens is float; an int or an array of int32",
    ),
    "lengths-shape": ({"cache_seqlens": ends(1)}, ValueError, r"cache_seqlens has shape \(1,\)"),
    "lengths-below": ({"cache_seqlens": ends(0, -3)}, ValueError, r"cache_seqlens\[1\] is -3"),
    "places-many": ({"cache_batch_idx": ends(0, 2)}, ValueError, r"cache_batch_idx\[1\] is 2"),
    "places-dtype": ({"cache_batch_idx": ones(2)}, TypeError, "cache_batch_idx is float32; int32"),
    "pad-many": ({"cache_leftpad": ends(6, 0)}, ValueError, r"cache_leftpad\[0\] is 6"),
    "pad-shape": ({"cache_leftpad": ends(0)}, ValueError, r"cache_leftpad has shape \(1,\)"),
    # rotary
    "cos-alone": (
        {"rotary_cos": ones(16, 8)},
        ValueError,
        "rotary_cos is given without rotary_sin",
    ),
    "cos-wide": (
        {"rotary_cos": ones(16, 9), "rotary_sin": ones(16, 9)},
        ValueError,
        r"rotary_cos has shape \(16, 9\)",
    ),
    "cos-few": (
        {"rotary_cos": ones(7, 8), "rotary_sin": ones(7, 8)},
        ValueError,
        "rotary_cos has .*7",
    ),
    "sin-shape": (
        {"rotary_cos": ones(16, 8), "rotary_sin": ones(16, 4)},
        ValueError,
        r"rotary_sin has shape \(16, 4\)",
    ),
    "cos-double": (
        {"rotary_cos": ones(16, 8, dtype=float), "rotary_sin": ones(16, 8, dtype=float)},
        TypeError,
        "rotary_cos is float64, but q is float32; .*or be float32",
    ),
    "rotation-alone": (
        {"rotary_seqlens": ends(0, 0)},
        ValueError,
        "rotary_seqlens is given without rotary_cos",
    ),
    "rotation-dtype": (
        {"rotary_cos": ones(16, 8), "rotary_sin": ones(16, 8), "rotary_seqlens": ones(2)},
        TypeError,
        "rotary_seqlens is float32; int32",
    ),
    "rotation-shape": (
        {"rotary_cos": ones(16, 8), "rotary_sin": ones(16, 8), "rotary_seqlens": ends(0)},
        ValueError,
        r"rotary_seqlens has shape \(1,\); expected \(2,\)",
    ),
    "rotation-below": (
        {"rotary_cos": ones(16, 8), "rotary_sin": ones(16, 8), "rotary_seqlens": ends(3, -1)},
        ValueError,
        r"rotary_seqlens\[1\] is -1; 0 to 13 is allowed: rotary_cos has 16 rows, 3 are appended",
    ),
    # scores
    "window": ({"window_size": 3}, TypeError, "window_size is int; a pair"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0; 0 "),
    "sinks": ({"sinks": ones(4)}, ValueError, r"sinks has shape \(4,\); .*8"),
    "scale": ({"softmax_scale": "1"}, TypeError, "softmax_scale is str; None or a finite"),
    "tree-float": ({"tree_mask": ones(1, 3, 3)}, TypeError, "tree_mask is float32; bool"),
    "tree-shape": (
        {"tree_mask": ones(1, 3, 4, dtype=bool)},
        ValueError,
        r"tree_mask has shape \(1, 3, 4\); expected \(2 or 1, 3, 3\)",
    ),
    "scales": (
        {"k_scale": ones(4)},
        ValueError,
        "k_scale is given, but k_cache is float32; int8",
    ),
    # splits
    "splits-float": ({"num_splits": 2.0}, TypeError, "num_splits is float; an int is allowed"),
    "splits-none": ({"num_splits": None}, TypeError, "num_splits is NoneType; an int is allowed"),
    "splits-negative": ({"num_splits": -1}, ValueError, "num_splits is -1; 0"),
    "splits-many": ({"num_splits": 65536}, ValueError, "num_splits is 65536; 0"),
    "splits-huge": ({"num_splits": 1 << 80}, ValueError, "num_splits is 1208925819614629174706176"),
    "size-odd": ({"split_size": 100}, ValueError, "split_size is 100; .*multiple of 64"),
    "size-and-number": (
        {"split_size": 64, "num_splits": 2},
        ValueError,
        "num_splits is 2 and split",
    ),
    # results and memory
    "out-shape": (
        {"out": ones(2, 3, 8, 16)},
        ValueError,
        r"out has shape \(2, 3, 8, 16\); expected",
    ),
    "out-half": ({"out": ones(2, 3, 8, 24, dtype=HALF)}, TypeError, "out is float16; float32 is"),
    "out-dtype": ({"out_dtype": "float16"}, TypeError, "out_dtype is float16; None, float32 is"),
    "out-frozen": ({"out": frozen(2, 3, 8, 24)}, ValueError, "out is read-only"),
    "stream": ({"stream": "0"}, TypeError, "stream is str; None or the address"),
    "memory-dtype": ({"workspace": ones(9)}, TypeError, "workspace is float32; uint8"),
    "memory-int": ({"workspace": 1 << 20}, TypeError, "workspace is int; arrays"),
    "memory-strided": (
        {"workspace": ones(1 << 17, dtype=np.uint8)[::2]},
        ValueError,
        "workspace is not contiguous",
    ),
    "memory-little": (
        {"workspace": ones(8, dtype=np.uint8), "num_splits": 4},
        ValueError,
        "workspace has [0-8] bytes; [0-9]+ are needed",
    ),
}
WRONG_PAGED: dict[str, Wrong] = {
    "full-table": (
        {"cache_seqlens": ends(10, 0)},
        ValueError,
        r"cache_seqlens\[0\] is 10; 0 to 9 is allowed: block_table has room for 12 rows",
    ),
    "full-table-int": (
        {"cache_seqlens": 10},
        ValueError,
        "cache_seqlens is 10; 0 to 9 is allowed: block_table has room for 12 rows",
    ),
    "table-int64": (
        {"block_table": np.arange(6).reshape(2, 3)},
        TypeError,
        r"block_table is int64; int32 is allowed: pass block_table\.astype\('int32'\)",
    ),
    "table-rank": ({"block_table": ends(0, 1)}, ValueError, "block_table has 1 dimension"),
    "table-batch": ({"block_table": ends(0, 1)[None]}, ValueError, r"block_table has shape \(1, 2"),
    "page-outside": (
        {"block_table": np.array([[0, 7, 2], [3, 4, 5]], np.int32)},
        ValueError,
        r"block_table\[0, 1\] is 7; .*7 pages",
    ),
    "page-negative": (
        {"block_table": np.array([[0, 1, 2], [-1, 4, 5]], np.int32)},
        ValueError,
        r"block_table\[1, 0\] is -1",
    ),
    "page-size": (
        {"k_cache": ones(7, 3, 4, 16), "v_cache": ones(7, 3, 4, 24)},
        ValueError,
        "k_cache has page_size 3; with block_table a power of two",
    ),
    "places": (
        {"cache_batch_idx": ends(0, 1)},
        ValueError,
        "cache_batch_idx is given with block_t",
    ),
    "full": ({"cache_seqlens": ends(10, 0)}, ValueError, r"cache_seqlens\[0\] is 10; .*9"),
}
WRONG_READS: dict[str, Wrong] = {
    "rotary": (
        {"rotary_cos": ones(16, 8), "rotary_sin": ones(16, 8)},
        ValueError,
        "rotary_cos is given without k;",
    ),
    "lengths": ({"cache_seqlens": ends(17, 0)}, ValueError, r"cache_seqlens\[0\] is 17; .*16"),
}
EIGHT_BITS = {name: x.astype(INT8) if name.endswith("cache") else x for name, x in PAGED.items()}
WRONG_SCALES: dict[str, Wrong] = {
    "half": ({"k_scale": ones(4, dtype=HALF)}, TypeError, "k_scale is float16; float32 is allowed"),
    "number": ({"k_scale": 0.5}, TypeError, "k_scale is float; arrays"),
    "heads": ({"v_scale": ones(8)}, ValueError, r"v_scale has shape \(8,\); expected"),
    "pages": ({"v_scale": ones(2, 4)}, ValueError, r"v_scale has shape \(2, 4\); expected \(7, 4"),
    "rows": (
        {"v_scale": ones(7, 9, 4)},
        ValueError,
        r"v_scale has shape \(7, 9, 4\); expected \(7, 4, 4\)",
    ),
    "rank": ({"v_scale": ones(7, 4, 4, 1)}, ValueError, "v_scale has 4 dimensions"),
}
LATENT = {name: x for name, x in DENSE.items() if name != "v"} | {
    "v_cache": None,
    "head_dim_v": 12,
}
WRONG_LATENT: dict[str, Wrong] = {
    "no-values": (
        {"head_dim_v": None},
        ValueError,
        "v_cache is missing; it, or head_dim_v, so many columns of k_cache .*, is needed",
    ),
    "two-values": (
        {"v_cache": ones(2, 16, 4, 24)},
        ValueError,
        "v_cache is given with head_dim_v, with which the values are k_cache's columns; only one",
    ),
    "v": ({"v": ones(2, 3, 4, 12)}, ValueError, "v is given with head_dim_v"),
    "v-scale": ({"v_scale": ones(4)}, ValueError, "v_scale is given with head_dim_v"),
    "none": ({"head_dim_v": 0}, ValueError, "head_dim_v is 0; 1 to 16, the columns of k_cache"),
    "negative": ({"head_dim_v": -1}, ValueError, "head_dim_v is -1; 1 to 16"),
    "many": ({"head_dim_v": 17}, ValueError, "head_dim_v is 17; 1 to 16"),
    "float": ({"head_dim_v": 12.0}, TypeError, "head_dim_v is float; an int is allowed"),
    "bool": ({"head_dim_v": True}, TypeError, "head_dim_v is bool; an int is allowed"),
    "array": ({"head_dim_v": ends(12)}, TypeError, "head_dim_v is ndarray; an int is allowed"),
    "rank": ({"k_cache": ones(2, 16, 16)}, ValueError, "k_cache has 3 dimensions"),
    "frozen": ({"k_cache": frozen(2, 16, 4, 16)}, ValueError, "k_cache is read-only"),
    "k-columns": ({"k": ones(2, 3, 4, 12)}, ValueError, r"k has shape \(2, 3, 4, 12\); expected"),
    "no-lengths": ({"cache_seqlens": None}, ValueError, "k is given without cache_seqlens"),
    "k-scale": ({"k_scale": ones(4)}, ValueError, "k_scale is given, but k_cache is float32"),
    "out": ({"out": ones(2, 3, 8, 16)}, ValueError, r"out has shape \(2, 3, 8, 16\); expected"),
}
OUT = {"out": np.full((2, 3, 8, 24), 7, np.float32)}


@pytest.mark.parametrize("wrong", WRONG)
def test_dense(wrong: str) -> None:
    refused(anyflash.attention_with_kvcache, DENSE | OUT, WRONG[wrong])


@pytest.mark.parametrize("wrong", WRONG_PAGED)
def test_paged(wrong: str) -> None:
    refused(anyflash.attention_with_kvcache, PAGED | OUT, WRONG_PAGED[wrong])


@pytest.mark.parametrize("wrong", WRONG_READS)
def test_without_new_keys(wrong: str) -> None:
    refused(anyflash.attention_with_kvcache, READS | OUT, WRONG_READS[wrong])


@pytest.mark.parametrize("wrong", WRONG_LATENT)
def test_latent(wrong: str) -> None:
    out = {"out": np.full((2, 3, 8, 12), 7, np.float32)}
    refused(anyflash.attention_with_kvcache, LATENT | out, WRONG_LATENT[wrong])


@pytest.mark.parametrize("wrong", ["no-values", "two-values", "v", "many", "float"])
def test_workspace_size_of_latent_rows(wrong: str) -> None:
    refused(anyflash.kvcache_workspace_size, LATENT, WRONG_LATENT[wrong])


@pytest.mark.parametrize("wrong", WRONG_SCALES)
def test_scales(wrong: str) -> None:
    refused(anyflash.attention_with_kvcache, EIGHT_BITS | OUT, WRONG_SCALES[wrong])


@pytest.mark.parametrize("wrong", ["q-list", "heads", "k-alone", "splits-many", "memory-dtype"])
def test_workspace_size(wrong: str) -> None:
    refused(anyflash.kvcache_workspace_size, DENSE | OUT, WRONG[wrong])


def test_read_only_caches_of_others() -> None:
    """What only speaks DLPack is found to be read-only when it is imported."""
    arguments = {name: Producer(x) for name, x in DENSE.items()}
    arguments["k_cache"] = Producer(frozen(2, 16, 4, 16))
    with pytest.raises(ValueError, match=r"anyflash\.attention_with_kvcache: k_cache .*read-only"):
        anyflash.attention_with_kvcache(**arguments)


def test_jax_caches_are_immutable(jax: ModuleType) -> None:
    arguments = {name: jax.numpy.asarray(x) for name, x in DENSE.items()}
    message = r"anyflash\.attention_with_kvcache: k_cache is a JAX array, which is immutable.*k and"
    with pytest.raises(TypeError, match=message):
        anyflash.attention_with_kvcache(**arguments)
    assert (np.asarray(arguments["k_cache"]) == 1).all()


def test_jax_tracer(jax: ModuleType) -> None:
    given = {name: jax.numpy.asarray(x) for name, x in READS.items()}
    q = given.pop("q")
    out = jax.jit(lambda x: anyflash.attention_with_kvcache(x, **given))(q)
    assert (out == anyflash.attention_with_kvcache(q, **given)).all()


def test_frameworks_do_not_mix(torch: ModuleType) -> None:
    for name in ("k_cache", "k", "cache_seqlens"):
        given = DENSE | {name: torch.from_numpy(DENSE[name])}
        message = rf"{name} is an array of PyTorch \(Tensor\), but q is one of NumPy \(ndarray\)"
        with pytest.raises(TypeError, match=rf"anyflash\.attention_with_kvcache: {message}"):
            anyflash.attention_with_kvcache(**given)
    assert (DENSE["k_cache"] == 1).all()


def test_expanded_torch_cache(torch: ModuleType) -> None:
    """Memory that is several elements at once is not written to."""
    given = {name: torch.from_numpy(x) for name, x in DENSE.items()}
    given["k_cache"] = given["k_cache"][:1].expand(2, -1, -1, -1)
    with pytest.raises(ValueError, match=r"anyflash\.attention_with_kvcache: k_cache has stride 0"):
        anyflash.attention_with_kvcache(**given)
