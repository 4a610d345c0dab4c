"""register: anyflash in PyTorch's own registry of flash attention."""

from __future__ import annotations

from typing import Any

import torch

from anyflash import _core
from anyflash.torch._aten import OVERRIDES

NAME = "anyflash"
SDPA = "_scaled_dot_product_flash_attention"


def register() -> None:
    """Enters anyflash in PyTorch's registry of flash attention, as ``"anyflash"``.

    Nothing else changes until ``torch.nn.attention.activate_flash_attention_impl("anyflash")``.
    From then on, what PyTorch computes by flash attention on CUDA is computed by anyflash, forward
    and backward. This is ``scaled_dot_product_attention``, also of nested tensors and in compiled
    code, and ``torch.nn.attention.varlen.varlen_attn``. They have grouped heads, dropout, windows,
    used lengths and pages. PyTorch goes on to choose its backend, for example by
    ``torch.nn.attention.sdpa_kernel``. ``torch.nn.attention.restore_flash_attention_impl()`` brings
    back PyTorch's own kernels.

    It may be called more than once. On the CPU, and where PyTorch has no such registry, use
    :func:`sdpa_routing`.

    What differs from PyTorch's kernels: the LSE of a query that sees no key is -inf. What dropout
    drops is drawn from the same generator, but is not what PyTorch would drop. Three options have
    no gradients, and are refused where those are recorded: ``seqused_k``, ``block_table`` and
    ``alibi_slopes``. ``return_debug_mask`` and tensors of 8 bits are refused. An error in
    ``scaled_dot_product_attention`` is a RuntimeError with the text that others have.

    Shapes are PyTorch's: query (batch, heads, seqlen_q, head_dim), or packed (total_q, heads,
    head_dim), of float16 or bfloat16 and head dims up to 512. Heads of key and value divide those
    of query.

    Raises
    ------
    NotImplementedError
        This version of PyTorch has no registry; :func:`sdpa_routing` works with all versions.

    Examples
    --------
    >>> import torch
    >>> import anyflash.torch
    >>> anyflash.torch.register()
    >>> "anyflash" in torch.nn.attention.list_flash_attention_impls()
    True
    """
    import torch.nn.attention as registry

    enter = getattr(registry, "register_flash_attention_impl", None)
    if enter is None:
        raise NotImplementedError(
            "anyflash.torch.register: PyTorch "
            f"{torch.__version__} has no torch.nn.attention.register_flash_attention_impl; use "
            "anyflash.torch.sdpa_routing()"
        )
    enter(NAME, register_fn=activate)


class Activation:
    """PyTorch holds it as long as anyflash is active, and removes it to restore its own kernels."""

    def __init__(self, library: Any, kernel: Any) -> None:
        self._library = library
        self._kernel = kernel

    def remove(self) -> None:
        self._library = self._kernel = None  # what they registered is undone when they go


def activate(dispatch_key: str = "CUDA") -> Activation:
    """Registers those operators of `OVERRIDES` that this version of PyTorch has."""
    library: Any = torch.library.Library("aten", "IMPL", dispatch_key)  # type: ignore[no-untyped-call]
    kernel = _kernel_of_sdpa(dispatch_key)
    for name, function in OVERRIDES.items():
        if is_operator(name) and not (name == SDPA and kernel is not None):
            library.impl(name, function, dispatch_key)
    return Activation(library, kernel)


def _kernel_of_sdpa(dispatch_key: str) -> Any:
    """The operator that ``scaled_dot_product_attention`` calls, registered without Python; None
    where PyTorch has no C interface for that."""
    if torch.version.hip is not None:
        return None
    try:
        return _core.register_torch_kernel(torch._C.__file__, dispatch_key, _by_python)
    except NotImplementedError:
        return None


def _by_python(*arguments: Any) -> tuple[Any, ...]:
    """The same operator, whose tensors come and go as handles of PyTorch's C interface."""
    handles, (*flags, scale) = arguments[:3], arguments[3:]
    # Its namesake for one tensor does not take the handle.
    tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs(list(handles))
    results = OVERRIDES[SDPA](*tensors, *flags, scale=scale)
    to_handle = torch._C._aoti.unsafe_alloc_void_ptr_from_tensor
    return tuple(to_handle(x) if isinstance(x, torch.Tensor) else x for x in results)


def is_operator(name: str) -> bool:
    """Whether aten has it: a name, or name.overload."""
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    return packet is not None and (overload or "default") in packet.overloads()
