"""What PyTorch is asked about its state: who looks at what is done with a tensor, and how.

No other module asks; tests/lint/check_torch_state.py looks for those that do.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

PLAIN = (Tensor, torch.nn.Parameter)

# Looked up once: each of these takes as long as what it asks.
is_compiling = torch.compiler.is_compiling  # by torch.compile or torch.export
_is_dynamo_compiling = torch.compiler.is_dynamo_compiling
is_any_autocast_enabled = torch._C._is_any_autocast_enabled
is_deterministic = torch.are_deterministic_algorithms_enabled
is_grad_enabled = torch.is_grad_enabled
is_jit_tracing = torch._C._is_tracing
_len_torch_dispatch_stack = torch._C._len_torch_dispatch_stack
_is_key_included = torch._C._dispatch_tls_is_dispatch_key_included
_OLDER_VMAP, _OLDER_BATCHED = map(torch._C._dispatch_key_parse, ("VmapMode", "Batched"))
_peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack


def is_exported(x: Any) -> bool:
    """Whether x stands for a tensor while torch.export runs the code itself (strict=False)."""
    module = sys.modules.get("torch._subclasses.fake_tensor") if is_compiling() else None
    return module is not None and isinstance(x, module.FakeTensor)


def is_plain(*tensors: Any) -> bool:
    """Whether all are tensors, of no subclass, that hold their own numbers."""
    for x in tensors:  # noqa: SIM110 (all() is slower)
        if type(x) not in PLAIN or x.is_neg() or x.is_nested:
            return False
    return True


def autocast_dtype(device: str) -> torch.dtype | None:
    """What torch.autocast casts to on this kind of device; None where it is off."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def is_mapped_backward() -> bool:
    """Whether autograd maps a backward, as is_grads_batched=True asks for: by PyTorch's older vmap,
    which no Function sees."""
    return _is_key_included(_OLDER_VMAP)


def is_mapped(x: Any) -> bool:
    """Whether that vmap maps x."""
    return isinstance(x, Tensor) and torch._C._dispatch_keys(x).has(_OLDER_BATCHED)


def is_capturing() -> bool:
    """Whether the work becomes part of a CUDA graph, so that nobody may wait for a result."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def is_in_functorch() -> bool:
    """Whether a transformation of torch.func is at work."""
    return _peek_interpreter_stack() is not None


def _is_watched(x: Any) -> bool:
    """Whether torch.func, a mode, torch.jit or a subclass sees what is done with x."""
    return (
        type(x) not in PLAIN
        or _len_torch_dispatch_stack() > 0
        or _peek_interpreter_stack() is not None
        or is_jit_tracing()
    )


def is_traced(x: Tensor) -> bool:
    """Whether someone else than autograd looks at what is done with x, torch.compile among them.
    Then work must be done by operators."""
    return is_compiling() or x.is_meta or _is_watched(x)


def is_forward_mode() -> bool:
    """Whether derivatives in forward mode are at work."""
    return forward_ad._current_level >= 0


def is_recorded(*tensors: Any) -> bool:
    """Whether autograd wants to know what is done with one of them, tensors or not."""
    if is_forward_mode():
        return True
    if not is_grad_enabled():
        return False
    for x in tensors:  # noqa: SIM110 (any() is slower)
        if isinstance(x, Tensor) and x.requires_grad:
            return True
    return False


def is_only_recorded(q: Any, k: Any, v: Any) -> bool:
    """Whether they are plain tensors, and autograd alone wants to know what is done with them."""
    return (
        not is_traced(q)
        and is_plain(q, k, v)
        and not is_forward_mode()
        and not is_any_autocast_enabled()
        and is_recorded(q, k, v)
    )


def needs_adapter(arrays: tuple[Any, ...], autocast: bool) -> bool:
    """Whether arrays, q first, must go through anyflash.torch; autocast counts if ``autocast``."""
    return (
        is_compiling()
        or is_recorded(*arrays)
        or _is_watched(arrays[0])
        or (autocast and is_any_autocast_enabled())
    )


def is_plain_eager(q: Any, k: Any, v: Any) -> bool:
    """Whether they are plain tensors that hold their own numbers, and nobody compiles, traces,
    records or casts what is done with them. The questions above, in one step: these are asked by
    calls that take little else. What else than TorchDynamo compiles has a mode, or tensors of
    another type."""
    return not (
        _is_dynamo_compiling()
        or type(q) not in PLAIN
        or type(k) not in PLAIN
        or type(v) not in PLAIN
        or _len_torch_dispatch_stack() > 0
        or _peek_interpreter_stack() is not None
        or is_jit_tracing()
        or forward_ad._current_level >= 0
        or (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))
        or is_any_autocast_enabled()
        or q.is_neg()
        or k.is_neg()
        or v.is_neg()
    )
