"""Ways to call attention of one query and one key, to time what a call costs on the host: with a
GPU's arrays, what the host takes to launch it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import anyflash


def framework_calls(framework: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Ways to call attention of one query and one key, for the cost of a call on the host."""
    if framework == "numpy":
        np: Any = importlib.import_module("numpy")
        x, cache = np.ones((1, 1, 1, 8), np.float32), np.ones((1, 4, 1, 8), np.float32)
        yield "anyflash", lambda: anyflash.attention(x, x, x)
        yield "kvcache", lambda: anyflash.attention_with_kvcache(x, cache, cache, cache_seqlens=3)
    elif framework == "jax jit":
        yield from _jax_calls()
    elif framework == "cupy GPU":
        cp: Any = importlib.import_module("cupy")
        y, rows = cp.ones((1, 1, 1, 8), cp.float16), cp.ones((1, 4, 1, 8), cp.float16)
        yield "anyflash", lambda: anyflash.attention(y, y, y)
        yield "kvcache", lambda: anyflash.attention_with_kvcache(y, rows, rows, cache_seqlens=3)
    else:
        yield from _torch_calls(framework)


def _torch_calls(framework: str) -> Iterator[tuple[str, Callable[[], Any]]]:
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


def _jax_calls() -> Iterator[tuple[str, Callable[[], Any]]]:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else most of a GPU's memory
    jax = importlib.import_module("jax")
    adapter = importlib.import_module("anyflash.jax")
    x = jax.numpy.ones((1, 1, 1, 8), device=jax.devices("cpu")[0])
    ours, theirs = jax.jit(adapter.attention), jax.jit(jax.nn.dot_product_attention)
    yield "adapter", lambda: ours(x, x, x).block_until_ready()
    yield "framework", lambda: theirs(x, x, x).block_until_ready()
