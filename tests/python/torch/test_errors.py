"""Wrong arguments of anyflash.torch: what is said, and that nothing is written or drawn."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import anyflash
from anyflash.torch import attention, attention_varlen, attention_with_kvcache
from calls.torch_calls import Call

NAME = r"^anyflash\.torch\.attention: "


def call(**changes: Any) -> Any:
    return attention(**Call().tensors() | changes)


def complex_part() -> torch.Tensor:
    """A view whose numbers torch negates when somebody reads them."""
    return torch.randn(2, 30, 4, 20, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize("q", [1, "q", None, np.ones((2, 30, 4, 20), np.float32)])
def test_q_is_a_tensor(q: Any) -> None:
    message = rf"{NAME}q is {type(q).__name__}; a torch\.Tensor is allowed"
    with pytest.raises(TypeError, match=message):
        call(q=q)
    with pytest.raises(TypeError, match=r"^anyflash\.torch\.attention_varlen: q is"):
        attention_varlen(q, q, q, q, q, 1, 1)
    with pytest.raises(TypeError, match=r"^anyflash\.torch\.attention_with_kvcache: q is"):
        attention_with_kvcache(q, q, q)


CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "numpy": ({"k": np.ones(3)}, TypeError, "k is an array of NumPy"),
    "none": ({"v": None}, TypeError, "v is NoneType; arrays of"),
    "dtype": ({"k": torch.ones(2, 50, 2, 20).half()}, TypeError, "k is float16, but q is float32"),
    "integers": ({"q": torch.ones(2, 30, 4, 20).int()}, TypeError, "q is int32"),
    "device": ({"v": torch.ones(2, 50, 2, 12, device="meta")}, TypeError, "v is on meta"),
    "sparse": ({"k": torch.ones(2, 50, 2, 20).to_sparse()}, TypeError, "k is a tensor of layout"),
    "negative": ({"q": complex_part()}, TypeError, "q is a conjugate or a negative"),
    "rank": ({"q": torch.ones(30, 4, 20)}, ValueError, "q has 3 dimensions"),
    "heads": ({"q": torch.ones(2, 30, 3, 20)}, ValueError, "heads"),
    "bias": ({"bias": torch.ones(30, 49)}, ValueError, "bias has shape"),
    "bias-dtype": ({"bias": torch.ones(30, 50).int()}, TypeError, "bias is int32"),
    "sinks": ({"sinks": torch.ones(3)}, ValueError, "sinks has shape"),
    "slopes": ({"alibi_slopes": torch.ones(3)}, ValueError, "alibi_slopes has shape"),
    "used": ({"seqused_k": torch.ones(2)}, TypeError, "seqused_k is float32"),
    "window": ({"window_size": 3}, TypeError, "window_size is int; a pair"),
    "window-low": ({"window_size": (-2, 0)}, ValueError, r"window_size is \(-2, 0\)"),
    "block": (
        {"block_mask": torch.ones(1, 1, dtype=torch.bool), "block_size": (5, 64)},
        ValueError,
        "block_size is",
    ),
    "softcap": ({"softcap": -1}, ValueError, "softcap is -1"),
    "scale": ({"softmax_scale": "x"}, TypeError, "softmax_scale is str"),
    "p": ({"dropout_p": 1.0}, ValueError, "dropout_p is 1.0"),
    "p-type": ({"dropout_p": None}, TypeError, "dropout_p is NoneType"),
    "seed": ({"dropout_p": 0.1, "seed": -1}, ValueError, "seed is -1"),
    "both": (
        {"dropout_p": 0.1, "seed": 1, "rng_state": (1, 2)},
        ValueError,
        "seed and rng_state are both given",
    ),
    "state": ({"dropout_p": 0.1, "rng_state": (1, 2, 3)}, ValueError, "rng_state"),
    "state-dtype": (
        {"dropout_p": 0.1, "rng_state": torch.ones(2)},
        TypeError,
        "rng_state is float",
    ),
    "out_dtype": ({"out_dtype": torch.int32}, TypeError, "out_dtype is int32"),
    "out_dtype-name": ({"out_dtype": "wide"}, TypeError, "out_dtype is wide"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nested_tensors(name: str, recorded: bool, layout: Any) -> None:
    parts = [torch.ones(3, 2, 8), torch.ones(4, 2, 8)]
    nested = torch.nested.nested_tensor(parts, layout=layout, requires_grad=recorded)
    given = dict.fromkeys(("q", "k", "v"), torch.ones(2, 4, 2, 8)) | {name: nested}
    message = (
        rf"^anyflash[.\w]*: {name}\w* is a nested tensor; use anyflash\.torch\.attention_varlen"
    )
    for attend in (attention, anyflash.attention):
        for options in ({}, {"softcap": 1.0}):
            with pytest.raises(TypeError, match=message):
                attend(**given, **options)
    for decode in (attention_with_kvcache, anyflash.attention_with_kvcache):
        with torch.no_grad(), pytest.raises(TypeError, match=message):
            decode(*given.values())


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_wrong_arguments(name: str, recorded: bool) -> None:
    changes, kind, message = CASES[name]
    given = Call().tensors(*(() if recorded else ("none",))) | changes
    before = torch.get_rng_state()
    with pytest.raises(kind, match=NAME + ".*" + message):
        attention(**given)
    assert torch.equal(torch.get_rng_state(), before)


def test_packed_names_itself() -> None:
    given = Call(varlen=True).tensors()
    message = r"^anyflash\.torch\.attention_varlen: "
    with pytest.raises(TypeError, match=message + "cu_seqlens_q is int64"):
        attention_varlen(**given | {"cu_seqlens_q": given["cu_seqlens_q"].long()})
    with pytest.raises(ValueError, match=message + ".*cu_seqlens_k"):
        attention_varlen(**given | {"cu_seqlens_k": given["cu_seqlens_k"] + 1})


def test_targets_are_refused_where_gradients_are_recorded() -> None:
    """And not written."""
    for varlen in (False, True):
        call = Call(varlen=varlen)
        given = call.tensors()
        attend = anyflash.attention_varlen if varlen else anyflash.attention
        out = torch.full(call.dout.shape, 7.0)
        with pytest.raises(NotImplementedError, match=r"attention\w*: out is given, but gradients"):
            attend(**given, out=out)
        assert (out == 7).all()
        with torch.no_grad():
            assert attend(**given, out=out) is out
        assert not (out == 7).any()


def test_decoding_refuses_gradients() -> None:
    q, cache = torch.ones(2, 1, 2, 8, requires_grad=True), torch.zeros(2, 16, 1, 8)
    new = torch.ones(2, 1, 1, 8)
    for attend in (attention_with_kvcache, anyflash.attention_with_kvcache):
        with pytest.raises(NotImplementedError, match=r"q requires grad.*no backward"):
            attend(q, cache, cache.clone(), new, new, cache_seqlens=3)
        assert not cache.any()
        with torch.no_grad():
            assert attend(q, cache.clone(), cache, cache_seqlens=3).shape == q.shape


def test_tensors_of_inference_mode_are_not_saved() -> None:
    given = Call().tensors()
    with torch.inference_mode():
        k = given["k"] + 0
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        attention(**given | {"k": k})
