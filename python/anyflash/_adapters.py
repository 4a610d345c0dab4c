"""Where a framework's own machinery must see what is done, its adapter does it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def adapter_of(*arrays: Any, autocast: bool = False) -> ModuleType | None:
    """anyflash.torch where gradients are recorded or operations traced, and where torch.autocast is
    on if ``autocast``; anyflash.jax for tracers and arrays on a GPU; None where the work can simply
    be done.

    The first array says which framework it is; others may be None.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(arrays[0], torch.Tensor):
        return _of_torch(torch, arrays, autocast)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(arrays[0], jax.Array):
        return _of_jax(jax, arrays)
    return None


def direct_of(q: Any) -> Callable[..., Any] | None:
    """The forward (anyflash.torch._direct) of PyTorch's tensors that no adapter has to see, which
    gives None for others; None where q is not PyTorch's, as far as that is known."""
    module: Any = sys.modules.get("anyflash.torch._direct")
    if module is None:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(q, torch.Tensor):
            return None
        from anyflash.torch import _direct as module
    attend: Callable[..., Any] = module.attend
    return attend


def refuse(operation: str, **targets: Any) -> None:
    """What says where to write and to run, an adapter's machinery decides."""
    for name, value in targets.items():
        if value is not None:
            raise NotImplementedError(
                f"{operation}: {name} is given, but gradients are recorded, or arrays are traced, "
                f"or immutable; leave {name} away"
            )


def _of_torch(torch: Any, arrays: tuple[Any, ...], autocast: bool) -> ModuleType | None:
    if not torch.compiler.is_compiling():
        recorded = torch.is_grad_enabled() and any(
            isinstance(x, torch.Tensor) and x.requires_grad for x in arrays
        )
        watched = (
            type(arrays[0]) not in (torch.Tensor, torch.nn.Parameter)
            or torch._C._len_torch_dispatch_stack()
            or torch._C._functorch.peek_interpreter_stack() is not None
            or torch._C._is_tracing()
            or torch.autograd.forward_ad._current_level >= 0
        )
        if not (recorded or watched or (autocast and torch._C._is_any_autocast_enabled())):
            return None
    import anyflash.torch

    return anyflash.torch


def _of_jax(jax: Any, arrays: tuple[Any, ...]) -> ModuleType | None:
    if not any(isinstance(x, jax.core.Tracer) for x in arrays) and all(
        device.platform == "cpu" for device in arrays[0].devices()
    ):
        return None
    import anyflash.jax

    return anyflash.jax
