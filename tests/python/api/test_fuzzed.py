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
CALLS = {call.name: call for call in python_calls.calls()}


def test_random_calls() -> None:
    """The same in every run; `python tests/fuzz/python_api.py` makes others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        counts = python_api.run(600, seed=1)
    assert min(counts["returned"], counts["refused"]) > 10


def test_calls_are_right() -> None:
    assert len(CALLS) > 20
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


@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    call, changes, message = FOUND[name]
    with pytest.raises((TypeError, ValueError)) as error:
        CALLS[call].function(**CALLS[call].arguments | changes)
    assert message in str(error.value)
