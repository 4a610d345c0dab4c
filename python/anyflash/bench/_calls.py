"""Ways to call attention of one query and one key, to time what a call costs on the host: with a
GPU's arrays, what the host takes to launch it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import anyflash

Way = tuple[str, Callable[[], Any]]


def framework_calls(framework: str, undo: ExitStack) -> Iterator[Way]:
    """Ways to call attention of one query and one key, for the cost of a call on the host. ``undo``
    is closed when they have been timed."""
    if framework == "numpy":
        np: Any = importlib.import_module("numpy")
        x, cache = np.ones((1, 1, 1, 8), np.float32), np.ones((1, 4, 1, 8), np.float32)
        yield "anyflash", lambda: anyflash.attention(x, x, x)
        yield "kvcache", lambda: anyflash.attention_with_kvcache(x, cache, cache, cache_seqlens=3)
    elif framework.startswith("jax jit"):
        yield from _jax_calls("cuda" if framework.endswith("GPU") else "cpu")
    elif framework in {"torch GPU flash", "torch GPU registry"}:
        yield _flash_call(framework.endswith("registry"), undo)
    elif framework == "cupy GPU":
        cp: Any = importlib.import_module("cupy")
        y, rows = cp.ones((1, 1, 1, 8), cp.float16), cp.ones((1, 4, 1, 8), cp.float16)
        yield "anyflash", lambda: anyflash.attention(y, y, y)
        yield "kvcache", lambda: anyflash.attention_with_kvcache(y, rows, rows, cache_seqlens=3)
    else:
        yield from _torch_calls(framework)


def _flash_call(registered: bool, undo: ExitStack) -> Way:
    """PyTorch's own function with what it has for flash attention: its kernels, or ours."""
    torch = importlib.import_module("torch")
    choice = importlib.import_module("torch.nn.attention")
    undo.enter_context(choice.sdpa_kernel(choice.SDPBackend.FLASH_ATTENTION))
    if registered:
        importlib.import_module("anyflash.torch").register()
        choice.activate_flash_attention_impl("anyflash")
        undo.callback(choice.restore_flash_attention_impl)
    x = torch.ones((1, 1, 1, 8), dtype=torch.float16, device="cuda")
    attend = torch.nn.functional.scaled_dot_product_attention
    return "adapter" if registered else "framework", lambda: attend(x, x, x)


def _torch_calls(framework: str) -> Iterator[Way]:
    torch = importlib.import_module("torch")
    adapter = importlib.import_module("anyflash.torch")
    flash_attn = importlib.import_module("anyflash.flash_attn")
    theirs = torch.nn.functional.scaled_dot_product_attention
    recorded = framework in {"torch recorded", "torch with backward"}
    kind = {"dtype": torch.float16, "device": "cuda"} if framework == "torch GPU" else {}
    x = torch.ones((1, 1, 1, 8), requires_grad=recorded, **kind)
    swapped, cache = x.transpose(1, 2), torch.ones((1, 4, 1, 8), **kind)
    ways: dict[str, Callable[[], Any]] = {
        "anyflash": lambda: anyflash.attention(x, x, x),
        "adapter": lambda: adapter.attention(x, x, x),
        "sdpa": lambda: adapter.scaled_dot_product_attention(swapped, swapped, swapped),
        "flash_attn": lambda: flash_attn.flash_attn_func(x, x, x),
        "framework": lambda: theirs(swapped, swapped, swapped),
    }
    if not recorded:
        ways["kvcache"] = lambda: anyflash.attention_with_kvcache(x, cache, cache, cache_seqlens=3)
    for name, way in ways.items():
        if framework.endswith("backward"):
            dout = swapped.detach() if name in {"sdpa", "framework"} else x.detach()

            def way(way: Callable[[], Any] = way, dout: Any = dout) -> Any:
                return torch.autograd.grad(way(), x, dout)

        yield name, way


def _jax_calls(platform: str) -> Iterator[Way]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else most of a GPU's memory
    jax = importlib.import_module("jax")
    adapter = importlib.import_module("anyflash.jax")
    dtype = jax.numpy.float32 if platform == "cpu" else jax.numpy.bfloat16
    x = jax.numpy.ones((1, 1, 1, 8), dtype, device=jax.devices(platform)[0])
    ways = {"adapter": adapter.attention, "framework": jax.nn.dot_product_attention}
    for name, way in ways.items():
        yield name, partial(_awaited, jax.jit(way), x)


def _awaited(attend: Callable[..., Any], x: Any) -> Any:
    return attend(x, x, x).block_until_ready()
