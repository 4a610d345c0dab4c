"""Where a framework's own machinery must see what is done, its adapter does it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Protocol

from anyflash._call.options import AttentionOptions, KvCacheOptions, OutputRequest, Packing
from anyflash._call.results import Returned


class Adapter(Protocol):
    """The modules anyflash.torch._adapter and anyflash.jax._adapter."""

    def attend(
        self,
        tensors: tuple[Any, Any, Any],
        options: AttentionOptions,
        packing: Packing | None,
        outputs: OutputRequest,
    ) -> Returned[Any]:
        """Attention of q, k and v."""

    def attend_with_kvcache(
        self,
        tensors: tuple[Any, Any, Any],
        cache: KvCacheOptions,
        options: AttentionOptions,
        outputs: OutputRequest,
    ) -> Any | tuple[Any, ...]:
        """Attention of q to k_cache and v_cache."""


def adapter_of(*arrays: Any, autocast: bool = False) -> Adapter | None:
    """PyTorch's where gradients are recorded or operations traced, and where torch.autocast is on
    if ``autocast``. JAX's for tracers and arrays on a GPU. None where the work can simply be done.

    The first array says which framework it is; others may be None.
    """
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(arrays[0], torch.Tensor):
        return _of_torch(arrays, autocast)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(arrays[0], jax.Array):
        return _of_jax(jax, arrays)
    return None


def fast_path_of(q: Any) -> Callable[..., Any] | None:
    """Attention of PyTorch's tensors in few steps, which gives None for those that its adapter has
    to see: anyflash.torch._plain. None where q is not PyTorch's, as far as that costs nothing to
    say."""
    module: Any = sys.modules.get("anyflash.torch._plain")
    if module is None:
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(q, torch.Tensor):
            return None
        import anyflash.torch._plain as module
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


def _of_torch(arrays: tuple[Any, ...], autocast: bool) -> Adapter | None:
    import anyflash.torch._adapter as module

    return module if module.needs_adapter(arrays, autocast) else None


def _of_jax(jax: Any, arrays: tuple[Any, ...]) -> Adapter | None:
    if not any(isinstance(x, jax.core.Tracer) for x in arrays) and all(
        device.platform == "cpu" for device in arrays[0].devices()
    ):
        return None
    from anyflash.jax import _adapter

    return _adapter
