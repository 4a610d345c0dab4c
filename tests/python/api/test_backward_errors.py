"""Wrong calls of the backward: the message says what is wrong and what is allowed; no writing."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import anyflash
from calls.refusals import DENSE, FLOATS, PACKED, Wrong, ends, ones, refused

BACKWARD = {
    **DENSE,
    **{"dout": ones(2, 5, 8, 24), "out": ones(2, 5, 8, 24), "lse": ones(2, 8, 5)},
    **{f"d{name}": 7 * x for name, x in DENSE.items()},
}
VARLEN = {
    **PACKED,
    **{"dout": ones(5, 8, 24), "out": ones(5, 8, 24), "lse": ones(8, 5)},
    **{f"d{name}": 7 * PACKED[name] for name in "qkv"},
}
HALF, BF16 = np.float16, ml_dtypes.bfloat16
FILLED = ("dq", "dk", "dv")
FROZEN = ones(2, 70, 4, 24)
FROZEN.flags.writeable = False
GIVE = "is set, but {0} is not given; pass the {0} that the forward was given"


def missing(name: str) -> str:
    return f"return_d{name} {GIVE.format(name)}"


WRONG: dict[str, Wrong] = {
    # frameworks and dtypes
    "dout-list": ({"dout": [1.0]}, TypeError, "dout is list; arrays of NumPy"),
    "dout-none": ({"dout": None}, TypeError, "dout is NoneType; arrays"),
    "dout-half": ({"dout": ones(2, 5, 8, 24, dtype=HALF)}, TypeError, "dout is float16; float32"),
    "out-none": ({"out": None}, TypeError, "out is NoneType; arrays"),
    "out-bf16": ({"out": ones(2, 5, 8, 24, dtype=BF16)}, TypeError, "out is bfloat16; float32 is"),
    "lse-none": ({"lse": None}, TypeError, "lse is NoneType; arrays"),
    "lse-double": ({"lse": ones(2, 8, 5, dtype=float)}, TypeError, "lse is float64; float32 is"),
    "dlse-double": ({"dlse": ones(2, 8, 5, dtype=float)}, TypeError, "dlse is float64; float32 is"),
    "q-int": ({"q": ends(0)}, TypeError, f"q is int32; {FLOATS}"),
    "k-dtype": (
        {"k": ones(2, 70, 4, 16, dtype=HALF)},
        TypeError,
        "k is float16, but q is float32; q, k and v must have one dtype",
    ),
    # shapes
    "q-rank": ({"q": ones(5, 8, 16)}, ValueError, "q has 3 dimensions, shape .*; expected 4"),
    "heads": ({"k": ones(2, 70, 3, 16)}, ValueError, "k has 3 heads, which does not divide q's 8"),
    "v-shape": ({"v": ones(2, 71, 4, 24)}, ValueError, r"v has shape \(2, 71, 4, 24\); expected"),
    "dout-rank": ({"dout": ones(5, 8, 24)}, ValueError, "dout has 3 dimensions"),
    "dout-shape": (
        {"dout": ones(2, 5, 8, 16)},
        ValueError,
        r"dout has shape \(2, 5, 8, 16\); expected \(2, 5, 8, 24\)",
    ),
    "out-shape": (
        {"out": ones(2, 6, 8, 24)},
        ValueError,
        r"out has shape \(2, 6, 8, 24\); expected \(2, 5, 8, 24\)",
    ),
    "lse-shape": ({"lse": ones(2, 5, 8)}, ValueError, r"lse has shape .*; expected \(2, 8, 5\)"),
    "dlse-shape": ({"dlse": ones(8, 5)}, ValueError, "dlse has 2 dimensions"),
    "dlse-axes": ({"dlse": ones(2, 5, 8)}, ValueError, r"dlse has shape .*; expected \(2, 8, 5\)"),
    "dq-shape": (
        {"dq": ones(2, 5, 4, 16)},
        ValueError,
        r"dq has shape \(2, 5, 4, 16\); expected \(2, 5, 8, 16\)",
    ),
    "dk-shape": (
        {"dk": ones(2, 70, 8, 16)},
        ValueError,
        r"dk has shape \(2, 70, 8, 16\); expected \(2, 70, 4, 16\)",
    ),
    "dv-rank": ({"dv": ones(70, 4, 24)}, ValueError, "dv has 3 dimensions"),
    # where gradients go
    "dq-half": ({"dq": ones(2, 5, 8, 16, dtype=HALF)}, TypeError, "dq is float16; float32 is"),
    "dk-list": ({"dk": []}, TypeError, "dk is list; arrays"),
    "dv-read-only": ({"dv": FROZEN}, ValueError, "dv is read-only"),
    "dv-stride": (
        {"dv": np.broadcast_to(ones(1), (2, 70, 4, 24))},
        ValueError,
        "dv (is read-only|has stride 0)",
    ),
    "grad-half": ({"grad_dtype": "float16"}, TypeError, "grad_dtype is float16; None, float32 is"),
    "grad-number": ({"grad_dtype": 32}, TypeError, "grad_dtype is 32; None, float32 is allowed"),
    # gradients of options
    "dbias": ({"return_dbias": True}, ValueError, missing("bias")),
    "dsinks": ({"return_dsinks": True}, ValueError, missing("sinks")),
    "dalibi": ({"return_dalibi_slopes": True}, ValueError, missing("alibi_slopes")),
    "dbias-keep": (
        {"return_dbias": True, "bias": ones(70, dtype=bool)},
        TypeError,
        "return_dbias is set, but bias is bool, a mask, which has no gradient",
    ),
    # options, as for the forward
    "bias-shape": ({"bias": ones(5, 71)}, ValueError, r"bias has shape \(1, 1, 5, 71\); expected"),
    "sinks-shape": ({"sinks": ones(4)}, ValueError, r"sinks has shape \(4,\); .*8"),
    "window": ({"window_size": 3}, TypeError, "window_size is int; a pair"),
    "softcap": ({"softcap": -1.0}, ValueError, "softcap is -1.0; 0 "),
    "scale": ({"softmax_scale": "1"}, TypeError, "softmax_scale is str; None or a finite"),
    "used": ({"seqused_k": ends(1, 71)}, ValueError, r"seqused_k\[1\] is 71; .*70"),
    "stream": ({"stream": "0"}, TypeError, "stream is str; None or the address"),
    # dropout
    "dropout": (
        {"dropout_p": 0.25},
        ValueError,
        "dropout_p needs the random state of the forward: pass the rng_state of its Attention",
    ),
    "dropout-one": ({"dropout_p": 1, "seed": 0}, ValueError, "dropout_p is 1.0; 0 <= dropout_p < "),
    "seed-and-state": (
        {"dropout_p": 0.5, "seed": 1, "rng_state": (1, 0)},
        ValueError,
        "seed and rng_state are both given; one of them is allowed",
    ),
    "state-float": ({"rng_state": ones(2)}, TypeError, "rng_state is float32; int64 and uint64"),
}
WRONG_VARLEN: dict[str, Wrong] = {
    "rank": ({"q": ones(1, 5, 8, 16)}, ValueError, "q has 4 dimensions, .*expected 3: .total_tok"),
    "dout": ({"dout": ones(4, 8, 24)}, ValueError, r"dout has shape \(4, 8, 24\); expected \(5, 8"),
    "lse": ({"lse": ones(5, 8)}, ValueError, r"lse has shape \(5, 8\); expected \(8, 5\)"),
    "dlse": ({"dlse": ones(2, 8, 3)}, ValueError, "dlse has 3 dimensions"),
    "dk": ({"dk": ones(5, 4, 16)}, ValueError, r"dk has shape \(5, 4, 16\); expected \(7, 4, 16\)"),
    "int64": (
        {"cu_seqlens_q": np.array([0, 3, 5])},
        TypeError,
        r"cu_seqlens_q is int64; int32 is allowed: pass cu_seqlens_q\.astype\('int32'\)",
    ),
    "last": ({"cu_seqlens_k": ends(0, 3, 6)}, ValueError, r"cu_seqlens_k\[2\] is 6; .*7"),
    "max": ({"max_seqlen_q": 2}, ValueError, "sequence 0 of cu_seqlens_q has length 3; .* is 2"),
    "bias": (
        {"bias": ones(3, 5), "return_dbias": True},
        ValueError,
        r"bias has shape \(1, 1, 3, 5\); .*3.*4",
    ),
    "dbias": ({"return_dbias": True}, ValueError, missing("bias")),
    "dropout": ({"dropout_p": 0.25}, ValueError, "dropout_p needs the random state of the forw"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_attention_backward(wrong: str) -> None:
    refused(anyflash.attention_backward, BACKWARD, WRONG[wrong])


@pytest.mark.parametrize("wrong", WRONG_VARLEN)
def test_attention_varlen_backward(wrong: str) -> None:
    refused(anyflash.attention_varlen_backward, VARLEN, WRONG_VARLEN[wrong])


def test_the_right_calls_are_right() -> None:
    """What the tests above change."""
    anyflash.attention_backward(**BACKWARD)
    anyflash.attention_varlen_backward(**VARLEN)


@pytest.mark.parametrize(
    ("wide", "given", "message"),
    [
        ("dq", ("dq", "dk", "dv"), "dk is float16, but dq is float32"),
        ("dv", ("dq", "dk", "dv"), "dv is float32, but dq is float16"),
        ("dk", ("dk", "dv"), "dv is float16, but dk is float32"),
    ],
)
def test_gradients_have_one_dtype(wide: str, given: tuple[str, ...], message: str) -> None:
    arguments = {key: np.asarray(x, HALF) for key, x in BACKWARD.items() if key not in FILLED}
    arguments["lse"] = BACKWARD["lse"]
    targets = {key: BACKWARD[key] if key == wide else BACKWARD[key].astype(HALF) for key in given}
    wrong = ({}, TypeError, f"{message}; dq, dk and dv must have one dtype")
    refused(anyflash.attention_backward, arguments | targets, wrong)
    named = ({"grad_dtype": "float16"}, TypeError, f"{wide} is float32; float16 is allowed")
    refused(anyflash.attention_backward, arguments | targets, named)


def test_jax_needs_the_random_state(jax: ModuleType) -> None:
    given = {key: jax.numpy.asarray(x) for key, x in BACKWARD.items() if key not in FILLED}
    with pytest.raises(ValueError, match=r"backward: dropout_p needs the random state of the for"):
        anyflash.attention_backward(**given, dropout_p=0.5)


@pytest.mark.parametrize("name", ["dout", "k", "out", "lse", "dlse", "dv", "sinks"])
def test_frameworks_do_not_mix(torch: ModuleType, name: str) -> None:
    more: dict[str, Any] = {"dlse": ones(2, 8, 5), "sinks": ones(8)}
    x = torch.from_numpy((BACKWARD | more)[name])
    message = rf"{name} is an array of PyTorch \(Tensor\), but q is one of NumPy \(ndarray\)"
    refused(anyflash.attention_backward, BACKWARD | more, ({name: x}, TypeError, message))


def test_torch_gradients(torch: ModuleType) -> None:
    """What is said leads to another function."""
    given = {key: torch.from_numpy(x) for key, x in BACKWARD.items() if key not in FILLED}
    message = r"backward: dout requires grad.*anyflash\.torch\.attention .* gradients of gradients"
    with pytest.raises(NotImplementedError, match=message):
        anyflash.attention_backward(**given | {"dout": given["dout"].requires_grad_()})
    out, lse = torch.ones(1, 4, 2, 8, requires_grad=True), torch.ones(1, 2, 4)
    with pytest.raises(NotImplementedError, match=r"out_a requires grad.*formula in its docstr"):
        anyflash.merge_states(out, lse, out, lse)


def test_jax_tracer_of_merge_states(jax: ModuleType) -> None:
    out, lse = jax.numpy.ones((1, 4, 2, 8)), jax.numpy.ones((1, 2, 4))
    message = "out_a is a JAX tracer; inside jax.jit.* write the formula of its docstring in jax.n"
    with pytest.raises(NotImplementedError, match=message):
        jax.jit(anyflash.merge_states)(out, lse, out, lse)


def test_jax_tracer(jax: ModuleType) -> None:
    given = {key: jax.numpy.asarray(x) for key, x in BACKWARD.items() if key not in FILLED}
    message = r"anyflash\.attention_backward: dout is a JAX tracer; .*jax\.vjp of anyflash\.jax"
    with pytest.raises((NotImplementedError, TypeError), match=message):
        jax.jit(lambda dout: anyflash.attention_backward(**given | {"dout": dout}))(given["dout"])


@pytest.mark.parametrize("count", range(6))
def test_number_of_arguments(count: int) -> None:
    with pytest.raises(TypeError, match="missing"):
        anyflash.attention_backward(*[BACKWARD["q"]] * count)
    with pytest.raises(TypeError, match="positional"):
        anyflash.attention_backward(*[BACKWARD["q"]] * 7)
