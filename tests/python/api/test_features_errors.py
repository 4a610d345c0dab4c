"""Wrong options: the message names the operation and the argument, and nothing is written."""

from __future__ import annotations

import math
import re
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import anyflash
from backends import capi
from backends.capi import INVALID_TYPE, INVALID_VALUE, Backend, CallError
from backends.tensors import Tensor, empty, place
from calls.refusals import DENSE, FLOATS, PACKED, Wrong, ends, ones, refused
from oracle.attention import Array

MERGE = {
    **{"out_a": ones(2, 5, 8, 16), "lse_a": ones(2, 8, 5)},
    **{"out_b": ones(2, 5, 8, 16), "lse_b": ones(2, 8, 5)},
}
WINDOW = r"a pair \(left, right\) of int, -1 or None for no bound, is allowed"

# What is changed, the exception, and how the message goes on after the operation's name.
ATTENTION: dict[str, Wrong] = {
    "window-int": ({"window_size": 3}, TypeError, f"window_size is int; {WINDOW}"),
    "window-three": ({"window_size": (1, 2, 3)}, ValueError, "window_size has 3 elements; a pair"),
    "window-float": ({"window_size": (1.5, 0)}, TypeError, f"window_size is float; {WINDOW}"),
    "window-negative": ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\); -1"),
    "softcap-negative": ({"softcap": -1.0}, ValueError, "softcap is -1.0; 0 "),
    "softcap-nan": ({"softcap": math.nan}, ValueError, "softcap is nan; a finite number"),
    "softcap-none": ({"softcap": None}, TypeError, "softcap is NoneType; a finite number"),
    "softcap-tiny": ({"softcap": 1e-300}, ValueError, "softcap is 1e-300; .*float32"),
    "alibi-int": ({"alibi_slopes": ends(1) * 8}, TypeError, f"alibi_slopes is int32; {FLOATS}"),
    "alibi-shape": ({"alibi_slopes": ones(4)}, ValueError, r"alibi_slopes has shape \(4,\); .*8"),
    "alibi-rank": ({"alibi_slopes": ones(2, 8, 1)}, ValueError, "alibi_slopes has 3 dimensions"),
    "bias-int": ({"bias": ends(1)}, TypeError, "bias is int32; .*, bfloat16 and bool are allowed"),
    "bias-uint8": ({"bias": ends(1).astype(np.uint8)}, TypeError, "bias is uint8; .*bool"),
    "bias-list": ({"bias": [0.0]}, TypeError, "bias is list; arrays of NumPy"),
    "bias-rank": ({"bias": ones(1, 1, 1, 1, 1)}, ValueError, "bias has 5 dimensions; at most 4"),
    "bias-shape": ({"bias": ones(5, 71)}, ValueError, r"bias has shape \(1, 1, 5, 71\); expected"),
    "bias-heads": ({"bias": ones(4, 1, 1)}, ValueError, r"bias has shape \(1, 4, 1, 1\); expected"),
    "bias-order": (
        {"bias": ones(70).astype(ones(1).dtype.newbyteorder())},
        TypeError,
        "bias is .* foreign byte order",
    ),
    "blocks-float": ({"block_mask": ones(1, 1)}, TypeError, "block_mask is float32; bool"),
    "blocks-shape": (
        {"block_mask": ones(1, 2, dtype=bool)},
        ValueError,
        r"block_mask has shape \(1, 1, 1, 2\); expected .* blocks of 128 x 128",
    ),
    "blocks-size": (
        {"block_mask": ones(1, 1, dtype=bool), "block_size": (100, 64)},
        ValueError,
        r"block_size is \(100, 64\); a pair \(queries, keys\) of positive multiples of 64",
    ),
    "ranges-wide": (
        {"key_ranges": np.zeros((1, 1, 70, 2), int)},
        TypeError,
        "key_ranges is int64; int32",
    ),
    "ranges-shape": (
        {"key_ranges": np.zeros((1, 1, 69, 2), np.int32)},
        ValueError,
        r"key_ranges has shape \(1, 1, 69, 2\); expected .* 70, 2\)",
    ),
    "ranges-three": (
        {"key_ranges": np.zeros((1, 1, 70, 3), np.int32)},
        ValueError,
        r"key_ranges has shape .*seqlen_k, 2 or 4\)",
    ),
    "sinks-shape": ({"sinks": ones(4)}, ValueError, r"sinks has shape \(4,\); .*8"),
    "sinks-bool": ({"sinks": ones(8, dtype=bool)}, TypeError, f"sinks is bool; {FLOATS}"),
    "dropout-one": ({"dropout_p": 1}, ValueError, "dropout_p is 1.0; 0 <= dropout_p < 1 is"),
    "dropout-minus": ({"dropout_p": -0.1}, ValueError, "dropout_p is -0.1; 0 <= dropout_p < 1"),
    "dropout-array": ({"dropout_p": ones(2)}, TypeError, "dropout_p is ndarray; a finite number"),
    "seed-negative": ({"seed": -1}, ValueError, r"seed is -1; 0 to 2\*\*64 - 1 is allowed"),
    "seed-large": ({"seed": 1 << 64}, ValueError, r"seed is 18446744073709551616; 0 to"),
    "seed-float": ({"seed": 1.0}, TypeError, "seed is float; an int is allowed"),
    "seed-bool": ({"seed": True}, TypeError, "seed is bool; an int is allowed"),
    "seed-and-state": (
        {"seed": 1, "rng_state": (1, 0)},
        ValueError,
        "seed and rng_state are both given; one of them is allowed",
    ),
    "state-one": ({"rng_state": (1,)}, ValueError, r"rng_state has 1 elements; a pair \(seed, "),
    "state-negative": ({"rng_state": (1, -1)}, ValueError, "rng_state is -1; 0 to"),
    "state-float": ({"rng_state": ones(2)}, TypeError, "rng_state is float32; int64 and uint64"),
    "state-shape": (
        {"rng_state": np.arange(3)},
        ValueError,
        r"rng_state has shape \(3,\); expected \(2,\)",
    ),
    "used-int64": (
        {"seqused_k": np.array([1, 2])},
        TypeError,
        r"seqused_k is int64; int32 is allowed: pass seqused_k\.astype\('int32'\)",
    ),
    "used-shape": ({"seqused_k": ends(1)}, ValueError, r"seqused_k has shape \(1,\); .*\(2,\)"),
    "used-many": ({"seqused_k": ends(1, 71)}, ValueError, r"seqused_k\[1\] is 71; .*70"),
    "used-negative": ({"seqused_k": ends(-1, 0)}, ValueError, r"seqused_k\[0\] is -1"),
    "out-dtype": ({"out_dtype": "float16"}, TypeError, "out_dtype is float16; None, float32 is"),
    "out-dtype-type": ({"out_dtype": 32}, TypeError, "out_dtype is 32; None, float32 is allowed"),
    "stream": ({"stream": "0"}, TypeError, "stream is str; None or the address"),
    "stream-negative": ({"stream": -1}, ValueError, "stream is -1; the address"),
    "part-tuple": ({"part": (1, 2)}, TypeError, "part is tuple; an anyflash.Part is allowed"),
    "part-float": (
        {"part": anyflash.Part(query_start=1.0)},
        TypeError,
        r"part\.query_start is float; an int or an array of int32 is allowed",
    ),
    "part-negative": (
        {"part": anyflash.Part(query_start=-1)},
        ValueError,
        "query_start is -1; 0 to 1073741824 is allowed",
    ),
    "part-far": (
        {"part": anyflash.Part(diagonal=1 << 62)},
        ValueError,
        "diagonal is 4611686018427387904; -1073741824 to 1073741824 is allowed",
    ),
    "part-int64": (
        {"part": anyflash.Part(key_start=np.zeros(2, np.int64))},
        TypeError,
        r"part\.key_start is int64; int32 is allowed: pass part\.key_start\.astype\('int32'\)",
    ),
    "part-shape": (
        {"part": anyflash.Part(query_start=ends(1))},
        ValueError,
        r"query_starts has shape \(1,\); .*\(2,\)",
    ),
    "part-element": (
        {"part": anyflash.Part(query_start=ends(1, -1))},
        ValueError,
        r"query_starts\[1\] is -1; 0 to 1073741824 is allowed",
    ),
    "part-draws": (
        {"part": anyflash.Part(key_start=4), "dropout_p": 0.1, "seed": 1},
        ValueError,
        "key_start is 4; with dropout a multiple of 8 is allowed",
    ),
    "part-heads": (
        {"part": anyflash.Part(head_start=1, total_heads=8)},
        ValueError,
        "total_heads is 8; at least 9, head_start and q's heads, is expected",
    ),
    "part-batch": (
        {"part": anyflash.Part(batch_start=-2)},
        ValueError,
        "batch_start is -2; 0 to 1073741824 is allowed",
    ),
    "part-batch-array": (
        {"part": anyflash.Part(batch_start=ends(1, 2))},
        TypeError,
        r"part\.batch_start is ndarray; an int is allowed",
    ),
    "rank": ({"q": ones(5, 8, 16)}, ValueError, "q has 3 dimensions, shape .*; expected 4"),
}
VARLEN: dict[str, Wrong] = {
    "rank": ({"q": ones(1, 5, 8, 16)}, ValueError, "q has 4 dimensions, .*expected 3: .total_tok"),
    "int64": (
        {"cu_seqlens_q": np.array([0, 3, 5])},
        TypeError,
        r"cu_seqlens_q is int64; int32 is allowed: pass cu_seqlens_q\.astype\('int32'\)",
    ),
    "float": ({"cu_seqlens_k": ones(3)}, TypeError, "cu_seqlens_k is float32; int32 is allowed"),
    "list": ({"cu_seqlens_k": [0, 3, 7]}, TypeError, "cu_seqlens_k is list; arrays"),
    "empty": ({"cu_seqlens_q": ends()}, ValueError, r"cu_seqlens_q has shape \(0,\); .*batch \+ 1"),
    "two": ({"cu_seqlens_q": ends(0, 5)[None]}, ValueError, r"cu_seqlens_q has shape \(1, 2\); "),
    "unlike": ({"cu_seqlens_k": ends(0, 7)}, ValueError, r"cu_seqlens_k has shape \(2,\); .*3,"),
    "stride": ({"cu_seqlens_q": ends(0, 0, 3, 0, 5)[::2]}, ValueError, "cu_seqlens_q .*contiguous"),
    "first": ({"cu_seqlens_k": ends(1, 3, 7)}, ValueError, r"cu_seqlens_k\[0\] is 1; it must be 0"),
    "last": ({"cu_seqlens_k": ends(0, 3, 6)}, ValueError, r"cu_seqlens_k\[2\] is 6; .*7"),
    "falling": ({"cu_seqlens_q": ends(0, 3, 2)}, ValueError, r"cu_seqlens_q\[2\] is 2, less than"),
    "max-q": ({"max_seqlen_q": 2}, ValueError, "sequence 0 of cu_seqlens_q has length 3; .* is 2"),
    "max-type": ({"max_seqlen_k": 4.0}, TypeError, "max_seqlen_k is float; an int is allowed"),
    "max-range": ({"max_seqlen_q": -1}, ValueError, "max_seqlen_q is -1; 0 to"),
    "used": ({"seqused_k": ends(3, 5)}, ValueError, r"seqused_k\[1\] is 5; .*4"),
    "heads": ({"k": ones(7, 3, 16)}, ValueError, "k has 3 heads, which does not divide q's 8"),
    "bias": ({"bias": ones(3, 5)}, ValueError, r"bias has shape \(1, 1, 3, 5\); .*3.*4"),
    "out": ({"out": ones(2, 5, 8, 24)}, ValueError, "out has 4 dimensions"),
}
MERGE_STATES: dict[str, Wrong] = {
    "rank": ({"out_a": ones(5, 16)}, ValueError, "out_a has 2 dimensions"),
    "shape": (
        {"out_b": ones(2, 5, 8, 8)},
        ValueError,
        r"out_b has shape .*; expected \(2, 5, 8, 16",
    ),
    "dtype": (
        {"out_b": ones(2, 5, 8, 16, dtype=np.float16)},
        TypeError,
        "out_b is float16, but out_a is float32; both must have one dtype",
    ),
    "lse-shape": (
        {"lse_a": ones(2, 5, 8)},
        ValueError,
        r"lse_a has shape .*; expected \(2, 8, 5\)",
    ),
    "lse-dtype": ({"lse_b": ones(2, 8, 5, dtype=float)}, TypeError, "lse_b is float64; float32 is"),
    "lse-half": (
        {"lse_a": ones(2, 8, 5, dtype=np.float16)},
        TypeError,
        "lse_a is float16; float32 and float64 are allowed",
    ),
    "lse-list": ({"lse_b": []}, TypeError, "lse_b is list; arrays"),
    "int": ({"out_a": ends(0)}, TypeError, f"out_a is int32; {FLOATS}"),
    "out-shape": (
        {"out": ones(2, 5, 8, 8)},
        ValueError,
        r"out has shape .*; expected \(2, 5, 8, 16",
    ),
    "out-dtype": (
        {"out": ones(2, 5, 8, 16), "out_dtype": "float16"},
        TypeError,
        "out is float32; float16 is allowed",
    ),
    "lse-out": ({"lse": ones(2, 5, 8)}, ValueError, r"lse has shape .*; expected \(2, 8, 5\)"),
    "dtype-name": ({"out_dtype": np.int32}, TypeError, f"out_dtype is int32; None, {FLOATS}"),
    "stream": ({"stream": 1.0}, TypeError, "stream is float"),
}


@pytest.mark.parametrize("wrong", ATTENTION)
def test_attention(wrong: str) -> None:
    out = np.full((2, 5, 8, 24), 7, np.float32)
    refused(anyflash.attention, DENSE | {"out": out}, ATTENTION[wrong])


@pytest.mark.parametrize("wrong", VARLEN)
def test_attention_varlen(wrong: str) -> None:
    out = np.full((5, 8, 24), 7, np.float32)
    refused(anyflash.attention_varlen, PACKED | {"out": out}, VARLEN[wrong])


@pytest.mark.parametrize("wrong", MERGE_STATES)
def test_merge_states(wrong: str) -> None:
    refused(anyflash.merge_states, MERGE, MERGE_STATES[wrong])


def test_read_only_outputs() -> None:
    lse = ones(2, 8, 5)
    lse.flags.writeable = False
    wrong = ({"lse": lse}, ValueError, "lse is read-only")
    refused(anyflash.merge_states, MERGE, wrong)


def test_options_belong_to_q(torch: ModuleType) -> None:
    for name, x in {"bias": ones(70), "sinks": ones(8), "seqused_k": ends(1, 2)}.items():
        message = rf"{name} is an array of PyTorch \(Tensor\), but q is one of NumPy \(ndarray\)"
        refused(anyflash.attention, DENSE, ({name: torch.from_numpy(x)}, TypeError, message))
    message = r"lse_a is an array of PyTorch \(Tensor\), but out_a is one of NumPy"
    wrong = ({"lse_a": torch.from_numpy(MERGE["lse_a"])}, TypeError, message)
    refused(anyflash.merge_states, MERGE, wrong)


def test_int64_lengths_of_torch(torch: ModuleType) -> None:
    given = {n: torch.from_numpy(x) if isinstance(x, np.ndarray) else x for n, x in PACKED.items()}
    given["cu_seqlens_k"] = given["cu_seqlens_k"].long()
    message = r"cu_seqlens_k is int64; int32 is allowed: pass cu_seqlens_k\.to\(torch\.int32\)"
    with pytest.raises(TypeError, match=rf"anyflash\.attention_varlen: {message}"):
        anyflash.attention_varlen(**given)


# The C ABI ----------------------------------------------------------------------------------------

# Tensors that the option must not be, the status, and parts of the message after its name.
C_OPTIONS: dict[str, tuple[str, Array, int, str]] = {
    "alibi-dtype": ("alibi_slopes", ends(0), INVALID_TYPE, "int32.*float16"),
    "alibi-shape": ("alibi_slopes", ones(9), INVALID_VALUE, "9.*8"),
    "bias-dtype": ("bias", ends(0), INVALID_TYPE, "int32.*bool"),
    "bias-shape": ("bias", ones(2, 8, 5, 9), INVALID_VALUE, "2, 8, 5, 9.*70 or 1"),
    "block_mask-dtype": ("block_mask", ones(1, 1, 1, 1), INVALID_TYPE, "float32.*bool"),
    "block_size": (
        "block_mask",
        ones(1, 1, 1, 1, dtype=bool),
        INVALID_VALUE,
        r"block_size\[0\] is 96",
    ),
    "key_ranges-dtype": ("key_ranges", ones(1, 1, 70, 2), INVALID_TYPE, "float32.*int32"),
    "key_ranges-shape": ("key_ranges", ends(1, 2), INVALID_VALUE, "1 dimensions.*4"),
    "sinks-dtype": ("sinks", ones(8, dtype=bool), INVALID_TYPE, "bool.*float16"),
    "sinks-rank": ("sinks", ones(1, 8), INVALID_VALUE, "2 dimensions.*1"),
    "rng_state-dtype": ("rng_state", ends(1, 2), INVALID_TYPE, "int32.*int64"),
    "rng_state-shape": ("rng_state", np.arange(3), INVALID_VALUE, "3.*2"),
    "dropout_mask-dtype": ("dropout_mask", ones(2, 8, 5, 70), INVALID_TYPE, "float32.*bool"),
    "dropout_mask-shape": ("dropout_mask", ones(2, 8, 70, 5, dtype=bool), INVALID_VALUE, "70, 5"),
    "max_logits-dtype": ("max_logits", ends(0), INVALID_TYPE, "int32.*float32"),
    "max_logits-shape": ("max_logits", ones(8, 2), INVALID_VALUE, "8, 2.*2, 8"),
    "seqused_k-dtype": ("seqused_k", np.arange(2), INVALID_TYPE, "int64.*int32"),
    "seqused_k-shape": ("seqused_k", ends(1, 2, 3), INVALID_VALUE, "3.*2"),
    "cu_seqlens_q": ("cu_seqlens_q", ends(0, 5), INVALID_VALUE, "cu_seqlens|q has 4 dimensions"),
    "cu_seqlens_k": ("cu_seqlens_k", ends(0, 5), INVALID_VALUE, "cu_seqlens|q has 4 dimensions"),
}
AXES = "bshd"


def c_call(backend: Backend, option: str, tensor: Tensor, **others: Any) -> CallError:
    half = np.dtype(np.float16)
    tensors = [place(x.astype(half)) for x in DENSE.values()]
    tensors += [empty((2, 5, 8, 24), half), empty((2, 8, 5), np.dtype(np.float32), axes="bhs")]
    before = [x.storage.tobytes() for x in (*tensors, tensor)]
    with pytest.raises(CallError) as error:
        backend.forward(*tensors, **{option: tensor}, **others)
    assert before == [x.storage.tobytes() for x in (*tensors, tensor)]
    return error.value


@pytest.mark.parametrize("wrong", C_OPTIONS)
def test_options_of_the_c_abi(backend: Backend, wrong: str) -> None:
    option, values, status, message = C_OPTIONS[wrong]
    size = (96, 128) if wrong == "block_size" else (128, 128)
    tensor = place(values, axes=AXES[: values.ndim])
    error = c_call(backend, option, tensor, block_size=size)
    assert error.status == status, error
    name = "" if wrong.startswith(("block_size", "cu_")) else f"{option} .*"
    assert re.match(rf"anyflash_forward(_workspace_size)?: {name}({message})", error.message), error


def test_lengths_are_validated(backend: Backend) -> None:
    """On a GPU only where it is asked for; on the CPU always."""
    error = c_call(backend, "seqused_k", place(ends(3, 71), axes="b"), validate=1)
    assert error.status == INVALID_VALUE
    assert re.match(r"anyflash_forward: seqused_k\[1\] is 71; .*70", error.message), error


def test_unknown_fields_of_options() -> None:
    """A caller that is newer than the library may not set what the library does not know."""
    backend = capi.backend("cpu")
    tensors = [place(x) for x in DENSE.values()] + [empty((2, 5, 8, 24), np.dtype(np.float32))]
    with pytest.raises(CallError, match="does not know") as error:
        backend.forward(*tensors, reserved=1)
    assert error.value.status == capi.UNSUPPORTED
