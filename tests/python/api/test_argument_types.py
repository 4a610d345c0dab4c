"""Flags and numbers of every function that attends: errors say whose value is wrong, and how."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import anyflash

# Wheels and GPUs are also tested where one of these is not installed.
jnp: Any = pytest.importorskip("jax.numpy")
torch: Any = pytest.importorskip("torch")

Function = Callable[..., Any]
HUGE = 10**400  # float() raises OverflowError


def calls(array: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    """Right arguments, by the function's name."""
    x, ends = array(np.ones((1, 4, 2, 16), np.float32)), array(np.array([0, 4], np.int32))
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 4, "max_seqlen_k": 4}
    dense = {"q": x, "k": x, "v": x}
    varlen = {name: t[0] for name, t in dense.items()} | packed
    cache = {"q": x, "k_cache": x, "v_cache": x}
    lse = array(np.zeros((1, 2, 4), np.float32))
    sizes = ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv", "headdim")
    return {
        "attention": dense,
        "attention_varlen": varlen,
        "attention_backward": dense | {"dout": x, "out": x, "lse": lse},
        "attention_varlen_backward": varlen | {"dout": x[0], "out": x[0], "lse": lse[0]},
        "attention_with_kvcache": cache,
        "attention_varlen_with_kvcache": cache | {"q": x[0], "cu_seqlens_q": ends},
        "scaled_dot_product_attention": {"query": x, "key": x, "value": x},
        "dot_product_attention": {"query": x, "key": x, "value": x},
        "flash_attn_func": dense,
        "flash_attn_varlen_func": varlen,
        "flash_attn_with_kvcache": cache,
        "flash_attn_qkvpacked_func": {"qkv": array(np.ones((1, 4, 3, 2, 16), np.float32))},
        "flash_attn_kvpacked_func": {
            "q": x,
            "kv": array(np.ones((1, 4, 2, 2, 16), np.float32)),
        },
        "get_scheduler_metadata": {**dict.fromkeys(sizes, 16), "cache_seqlens": ends},
    }


def recorded(x: Any) -> Any:
    """Numbers that require grad."""
    tensor = torch.from_numpy(x)
    return tensor.requires_grad_() if tensor.is_floating_point() else tensor


# By module: how an array is made. With gradients, anyflash's functions are those of anyflash.torch.
KINDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "numpy": (anyflash, np.asarray),
    "neutral-torch": (anyflash, torch.from_numpy),
    "torch": (importlib.import_module("anyflash.torch"), torch.from_numpy),
    "recorded": (importlib.import_module("anyflash.torch"), recorded),
    "flash_attn": (importlib.import_module("anyflash.flash_attn"), torch.from_numpy),
    "flash_attn_3": (importlib.import_module("anyflash.flash_attn_3"), torch.from_numpy),
    "jax": (importlib.import_module("anyflash.jax"), jnp.asarray),
}
CALLS: dict[str, tuple[Function, dict[str, Any]]] = {
    f"{kind}-{name}": (getattr(module, name), arguments)
    for kind, (module, array) in KINDS.items()
    for name, arguments in calls(array).items()
    if hasattr(module, name) and not (kind == "recorded" and "kvcache" in name)
}
FLAGS = [
    (call, name)
    for call, (function, _) in CALLS.items()
    for name, parameter in inspect.signature(function).parameters.items()
    if "bool" in str(parameter.annotation)
]
NUMBERS = [
    (call, name)
    for call, (function, _) in CALLS.items()
    for name in ("softmax_scale", "scale", "softcap", "dropout_p")
    if name in inspect.signature(function).parameters
]


def refusal(call: str, **changed: Any) -> str:
    """The message of the TypeError or ValueError."""
    function, arguments = CALLS[call]
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        function(**arguments | changed)
    return str(error.value)


def test_calls_are_right() -> None:
    assert len(CALLS) > 20
    assert len(FLAGS) > 80
    for function, arguments in CALLS.values():
        function(**arguments)


@pytest.mark.parametrize(("call", "name"), FLAGS)
def test_flags(call: str, name: str) -> None:
    wrong: tuple[Any, ...] = (np.array([True, False]), np.array(True), torch.ones(2), "yes", 1.0)
    for value in wrong:
        message = refusal(call, **{name: value})
        pattern = rf"^anyflash\S*: {name} is {type(value).__name__}; True or False is allowed$"
        assert re.search(pattern, message), message
    message = refusal(call, **{name: 2})
    assert f": {name} is 2; True, False, 1 or 0 is allowed" in message


@pytest.mark.parametrize(("call", "name"), FLAGS)
def test_flags_that_are_no_bools_of_python(call: str, name: str) -> None:
    """NumPy's, and 0 and 1: the same results."""
    if re.match("accumulate_|return_(dbias|dsinks|dalibi_slopes)$", name):
        return  # they need what the call has not
    function, arguments = CALLS[call]
    for value in (True, False):
        expected = function(**arguments, **{name: value})
        for other in (np.bool_(value), int(value), np.int64(value)):
            found = function(**arguments, **{name: other})
            assert type(found) is type(expected)
            for a, b in zip(parts(found), parts(expected), strict=True):
                np.testing.assert_array_equal(a, b)


def parts(result: Any) -> list[Any]:
    every = result if isinstance(result, tuple) else (result,)
    return [
        x.detach().numpy() if isinstance(x, torch.Tensor) else np.asarray(x)
        for x in every
        if x is not None
    ]


@pytest.mark.parametrize(("call", "name"), NUMBERS)
def test_numbers_beyond_float64(call: str, name: str) -> None:
    # Of flash-attn's softcap, what is negative means none.
    for value in (HUGE,) if "flash_attn" in call and name == "softcap" else (HUGE, -HUGE):
        message = refusal(call, **{name: value})
        shown = "(softmax_)?scale" if name == "scale" else name
        assert re.search(rf"^anyflash\S*: {shown} is (beyond|-?1000)", message), message
        assert "allowed" in message


@pytest.mark.parametrize("name", ["k", "v"])
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax"])
def test_new_keys_keep_their_name(kind: str, name: str) -> None:
    """The core calls them k_new and v_new."""
    call = f"{kind}-attention_with_kvcache"
    x = CALLS[call][1]["q"]
    given = {"k": x[:, :1], "v": x[:, :1], "cache_seqlens": 1}
    for wrong, words in ((x[:, :1, :, :, None], "5 dimensions"), (x[0], "3 dimensions")):
        message = refusal(call, **given | {name: wrong})
        assert re.search(rf": {name} has {words}", message), message


@pytest.mark.parametrize(
    ("call", "name"), [(call, name) for call, name in NUMBERS if name.endswith("scale")]
)
def test_scales_that_are_no_numbers(call: str, name: str) -> None:
    for value in ("1", True, [1.0], 1j):
        message = refusal(call, **{name: value})
        assert f"{name} is {type(value).__name__}; None or a finite number is allowed" in message
