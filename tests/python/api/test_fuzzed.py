"""Random calls of the public functions, and what such calls have found (tests/fuzz)."""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")
python_api = importlib.import_module("python_api")
python_calls = importlib.import_module("python_calls")
right_calls = importlib.import_module("right_calls")
CALLS = {call.name: call for call in right_calls.calls()}
OTHERS = tuple(kind for kind in right_calls.MODULES if kind != "jax")
needs_jax = pytest.mark.skipif(not right_calls.HAS_JAX, reason="JAX is not installed")


@pytest.mark.parametrize(
    ("modules", "count"), [(OTHERS, 600), pytest.param(("jax",), 200, marks=needs_jax)]
)
def test_random_calls(modules: tuple[str, ...], count: int) -> None:
    """The same in every run; `python tests/fuzz/python_api.py` makes others. JAX compiles each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = python_api.run(count, seed=1, modules=modules)
    assert min(counts["returned"], counts["refused"]) > 10


# No functions of arrays: names of types and files, and what switches PyTorch's own functions.
WITHOUT_CALLS = {
    "numpy": {"Array", "AttentionGrads", "AttentionResult", "Part", "build_info"}
    | {"get_cmake_dir", "get_include", "get_tvm_ffi_library"},
    "torch": {"register", "sdpa_routing"},
    "flash_attn": {"install"},
    "flash_attn_3": {"install"},
    "jax": set(),
}


def test_calls_are_right() -> None:
    """And every public function has one."""
    for kind, others in WITHOUT_CALLS.items():
        if kind in right_calls.MODULES:
            module = importlib.import_module(right_calls.MODULES[kind][0])
            names = {name for name in module.__all__ if not name.startswith("__")} - others
            assert names == {name for name in names if f"{kind}.{name}" in CALLS}
    for call in CALLS.values():
        assert python_calls.check(call, {}), call.name


PAGES = torch.zeros(1, 1, dtype=torch.int32)
# The call, what is changed, and the message.
FOUND: dict[str, tuple[str, dict[str, Any], str]] = {
    "flash_attn-window": (
        "flash_attn.flash_attn_func",
        {"window_size": 3},
        "window_size is 3; a pair",
    ),
    "flash_attn-window-3": (
        "flash_attn.flash_attn_with_kvcache",
        {"window_size": (1, 2, 3)},
        "window_size is (1, 2, 3); a pair (left, right) of int is allowed",
    ),
    "flash_attn-window-none": (
        "flash_attn.flash_attn_func",
        {"window_size": (None, 0)},
        "window_size is NoneType; an int, or a tensor of one, is allowed",
    ),
    "flash_attn-softcap": (
        "flash_attn.flash_attn_func",
        {"softcap": "x"},
        "softcap is str; a finite number is allowed",
    ),
    "flash_attn-longest": (
        "flash_attn.flash_attn_varlen_func",
        {"max_seqlen_k": np.float16("inf")},
        "max_seqlen_k is float16; an int, or a tensor of one, is allowed",
    ),
    "flash_attn-longest-of-pages": (
        "flash_attn.flash_attn_varlen_func",
        {"max_seqlen_q": 2**64, "block_table": PAGES},
        "max_seqlen_q is 18446744073709551616; 0 to 2147483647 is allowed",
    ),
    "flash_attn-no-tensor": (
        "flash_attn.flash_attn_varlen_func",
        {"k": (1, 2), "block_table": PAGES},
        "k is tuple; a torch.Tensor is allowed",
    ),
    "flash_attn-pages": (
        "flash_attn.flash_attn_varlen_func",
        {"block_table": 0},
        "block_table is int; a torch.Tensor is allowed",
    ),
    "flash_attn-dropout-of-pages": (
        "flash_attn.flash_attn_varlen_func",
        {"dropout_p": None, "block_table": PAGES},
        "dropout_p is NoneType; a finite number is allowed",
    ),
    "flash_attn-dropout": (
        "flash_attn.flash_attn_func",
        {"dropout_p": np.zeros(8), "return_attn_probs": True},
        "dropout_p is ndarray; a finite number is allowed",
    ),
    "flash_attn-cache": (
        "flash_attn.flash_attn_with_kvcache",
        {"k_cache": [1, 2]},
        "k_cache is list",
    ),
    "flash_attn-cache-rank": (
        "flash_attn.flash_attn_with_kvcache",
        {"k_cache": torch.zeros(0)},
        "k_cache has 1 dimensions",
    ),
    "flash_attn-rotary": (
        "flash_attn.flash_attn_with_kvcache",
        {"q": 5, "rotary_cos": torch.zeros(4, 4), "rotary_sin": torch.zeros(4, 4)},
        "q is int",
    ),
    "flash_attn-filled": (
        "flash_attn.flash_attn_with_kvcache",
        {"cache_seqlens": 2**31, "cache_leftpad": 0, "rotary_cos": 0},
        "cache_seqlens is 2147483648",
    ),
    "torch-dropout": (
        "torch.attention",
        {"dropout_p": np.zeros(8)},
        "dropout_p is ndarray; a finite number is allowed",
    ),
    "torch-block-size": (
        "torch.attention",
        {"block_size": True, "dropout_p": 0.5, "seed": 1},
        "block_size is bool; a pair (queries, keys) of positive multiples of 64 is allowed",
    ),
    "sdpa-dropout": (
        "torch.scaled_dot_product_attention",
        {"dropout_p": torch.device("cpu")},
        "dropout_p is device; a number is allowed",
    ),
    "sdpa-scale": (
        "torch.scaled_dot_product_attention",
        {"scale": np.zeros(())},
        "scaled_dot_product_attention: scale is ndarray; None or a finite number is allowed",
    ),
    "sdpa-scale-nan": (
        "torch.scaled_dot_product_attention",
        {"scale": float("nan")},
        "scaled_dot_product_attention: scale is nan; a finite number is allowed",
    ),
    "sdpa-scale-large": (
        "torch.scaled_dot_product_attention",
        {"scale": 1e300},
        "scaled_dot_product_attention: scale is 1e+300; at most half of float32's range",
    ),
    "torch-no-starts": (
        "torch.attention_varlen",
        {"cu_seqlens_q": None},
        "attention_varlen: cu_seqlens_q is None; a tensor of int32 is allowed",
    ),
    "predicate": (
        "numpy.create_block_mask",
        {"predicate": 2},
        "predicate is int; a function of b, h, i, j is allowed",
    ),
    "expand": (
        "numpy.expand_block_mask",
        {"seqlen_q": 0},
        "expected (..., 0, 1) for seqlen_q 0 and seqlen_k 4 in blocks of 128 x 128",
    ),
    "merge": (
        "numpy.merge_states",
        {"out_a": np.zeros((1, 4, 2), np.float32)},
        "out_b has 4 dimensions, shape (1, 4, 2, 8); expected 3: as out_a",
    ),
}

FOUND_3: dict[str, tuple[str, dict[str, Any], str]] = {
    "kvpacked-no-tensor": (
        "flash_attn.flash_attn_kvpacked_func",
        {"q": np.zeros((1, 4, 2, 8), np.float32)},
        "q is ndarray; a torch.Tensor is allowed",
    ),
    "qkvpacked-slopes": (
        "flash_attn.flash_attn_qkvpacked_func",
        {"alibi_slopes": 1},
        "alibi_slopes is int; a torch.Tensor is allowed",
    ),
    "3-chunk": (
        "flash_attn_3.flash_attn_func",
        {"attention_chunk": np.zeros(2)},
        "attention_chunk is given; only 0 is allowed",
    ),
    "3-flag": (
        "flash_attn_3.flash_attn_func",
        {"return_attn_probs": 10**400},
        "return_attn_probs is 1000",
    ),
    "3-heads": (
        "flash_attn_3.flash_attn_qkvpacked_func",
        {"qkv": torch.zeros(1, 4, 4, 8), "num_heads_q": -2},
        "num_heads_q is -2",
    ),
    "3-out": (
        "flash_attn_3.flash_attn_combine",
        {"out": torch.zeros(())},
        "out has shape (); expected (1, 4, 2, 8)",
    ),
    "3-dtype": (
        "flash_attn_3.flash_attn_combine",
        {"out_dtype": 2},
        "out_dtype is int; a torch.dtype is allowed",
    ),
    "3-lengths": (
        "flash_attn_3.get_scheduler_metadata",
        {"cache_seqlens": 1},
        "cache_seqlens is int; a torch.Tensor is allowed",
    ),
    "3-cache": (
        "flash_attn_3.flash_attn_with_kvcache",
        {"k_cache": 1},
        "k_cache is int; a torch.Tensor is allowed",
    ),
}
FOUND_JAX: dict[str, tuple[str, dict[str, Any], str]] = {
    "jax-masked": (
        "jax.attention",
        {"alibi_slopes": np.ma.masked_array([1.0, 2.0])},
        "alibi_slopes is MaskedArray of float64; what jax.numpy.asarray takes is allowed",
    ),
    "jax-bytes": (
        "jax.attention_varlen",
        {"q": np.zeros((4, 2, 8), ">f4")},
        "q is ndarray of >f4; what jax.numpy.asarray takes",
    ),
    "jax-type": ("jax.attention", {"seqused_k": np.float16}, "seqused_k is type; an array"),
    "jax-none": ("jax.attention", {"k": None}, "k is None; expected (batch, seqlen, heads"),
    "jax-starts": (
        "jax.attention_varlen",
        {"cu_seqlens_q": None},
        "cu_seqlens_q is None; an array of int32 is allowed",
    ),
    "jax-new-keys": ("jax.attention_with_kvcache", {"k": 3}, "kvcache: k is int; an array"),
    "jax-ring-values": (
        "jax.shared_attention",
        {"v": np.zeros((1, 3, 2, 8), np.float32)},
        "v has shape (1, 3, 2, 8)",
    ),
    "jax-ring-axis": (
        "jax.shared_attention",
        {"context_axis": 1},
        "context_axis is int; a str is allowed",
    ),
    "jax-zigzag": ("jax.zigzag_order", {"length": b"x"}, "length is bytes; an int is allowed"),
    "jax-nn-window": (
        "jax.dot_product_attention",
        {"local_window_size": (1, 2, 3)},
        "local_window_size is (1, 2, 3); None, an int or a pair of int is allowed",
    ),
    "jax-nn-lengths": (
        "jax.dot_product_attention",
        {"key_value_seq_lengths": 2**70},
        "key_value_seq_lengths is int; what jax.numpy.asarray takes is allowed",
    ),
    "jax-nn-rank": (
        "jax.dot_product_attention",
        {"key": np.zeros(3, np.float32)},
        "key has 1 dimensions, shape (3,); expected 3 or 4",
    ),
    "jax-nn-mask": (
        "jax.dot_product_attention",
        {"mask": np.zeros((3, 4), np.bool_)},
        "mask has shape (1, 1, 3, 4); expected what broadcasts to (1, 2, 4, 4)",
    ),
    "jax-nn-scale": ("jax.dot_product_attention", {"scale": np.nan}, ": scale is nan; a finite"),
    "jax-nn-implementation": (
        "jax.dot_product_attention",
        {"implementation": np.zeros(2)},
        "implementation is array",
    ),
}
FOUND |= FOUND_3 | (FOUND_JAX if right_calls.HAS_JAX else {})


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    call, changes, message = FOUND[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError)) as error:
        CALLS[call].function(**CALLS[call].arguments | changes)
    assert message in str(error.value)
