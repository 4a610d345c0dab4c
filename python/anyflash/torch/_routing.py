"""sdpa_routing: torch.nn.functional.scaled_dot_product_attention by anyflash, in existing code.

The name is replaced, not calls intercepted. A ``TorchFunctionMode`` would cost each call of any
PyTorch function a microsecond. It would not see what ``nn.MultiheadAttention``, ``backward`` and
threads of ``nn.DataParallel`` do within.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.backends import mha

import anyflash
from anyflash.torch._dispatch_state import (
    PLAIN,
    autocast_dtype,
    is_compiling,
    is_exported,
    is_forward_mode,
    is_jit_tracing,
)
from anyflash.torch._fast_path import DTYPES
from anyflash.torch._sdpa import (
    is_causal_bias,
    is_lower_right,
    refuse_causal_twice,
    scaled_dot_product_attention,
)

_FUNCTION = "scaled_dot_product_attention"
_HOME = "torch.nn.functional"
_CUDA_HEAD_DIM = 512

_lock = threading.Lock()
_depth = 0
_fast_path = True
_active = False
_torch_sdpa: Any = torch.nn.functional.scaled_dot_product_attention


@contextlib.contextmanager
def sdpa_routing() -> Iterator[None]:
    """Within it ``torch.nn.functional.scaled_dot_product_attention`` is computed by anyflash, as
    :func:`scaled_dot_product_attention`.

    A context manager and a decorator; it may be nested, and entered by several threads. Like
    ``torch.nn.attention.sdpa_kernel`` it holds for the whole process: also for the threads of
    autograd, which recompute checkpointed activations, and of ``nn.DataParallel``. Backward passes
    of checkpointed models belong within it. What ``torch.compile`` traces within is routed, too.

    Reached are callers that look the function up in ``torch.nn.functional``, and modules that
    imported it by its own name. ``nn.MultiheadAttention`` (with ``need_weights=False``) is among
    them, and ``nn.Transformer*``, whose fused fast path for inference is off meanwhile. Not
    reached are other references to it that were taken before (``import ... as``, default
    arguments, attributes of objects), and C++.

    PyTorch's own function still computes what anyflash does not. These are nested tensors and other
    subclasses, ``is_causal`` with a mask, forward-mode derivatives, and ``torch.jit.trace``; and
    devices, dtypes and head dims that :func:`attention` does not take. No heads are such, too, and
    views like ``z.conj().imag``, which are negated when they are read. ``torch.jit.script`` belongs
    outside.

    Examples
    --------
    >>> import torch
    >>> import anyflash.torch
    >>> layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    >>> x = torch.randn(1, 5, 16)
    >>> with torch.no_grad(), anyflash.torch.sdpa_routing():
    ...     layer(x).shape
    torch.Size([1, 5, 16])
    """
    _enter()
    try:
        yield
    finally:
        _leave()


def _enter() -> None:
    global _active, _depth, _fast_path, _torch_sdpa  # noqa: PLW0603
    with _lock:
        if not _depth:
            standing = torch.nn.functional.scaled_dot_product_attention
            if standing is not _routed:  # put back by someone who replaced it within
                _torch_sdpa = standing
            _fast_path = mha.get_fastpath_enabled()
            mha.set_fastpath_enabled(False)
            _active = True
            _rebind(_torch_sdpa, _routed)
        _depth += 1


def _leave() -> None:
    global _active, _depth  # noqa: PLW0603
    with _lock:
        _depth -= 1
        if not _depth:
            _rebind(_routed, _torch_sdpa)
            _active = False
            mha.set_fastpath_enabled(_fast_path)


def _rebind(old: Any, new: Any) -> None:
    """In all modules that hold the function; of PyTorch's own only where it is public: the others
    recognize it by identity."""
    for name, module in list(sys.modules.items()):
        public = name == _HOME or not name.startswith("torch.")
        if public and getattr(module, "__dict__", {}).get(_FUNCTION) is old:
            setattr(module, _FUNCTION, new)


def _routed(  # noqa: PLR0917 (as PyTorch's)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    # Not active: for those who took it while it stood in torch.nn.functional.
    if _active and _is_ours(query, key, value, attn_mask, is_causal):
        return scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    # A CausalBias recognizes PyTorch's function by where it stands.
    if attn_mask is not None and is_causal_bias(attn_mask):
        refuse_causal_twice(is_causal)
        attn_mask = _written_out(attn_mask, query.device)
    newer = {"enable_gqa": True} if enable_gqa else {}  # unknown to PyTorch before 2.5
    result: Tensor = _torch_sdpa(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, **newer
    )
    return result


def _written_out(bias: Any, device: torch.device) -> Tensor:
    """A CausalBias as a mask."""
    shape = (bias.seq_len_q, bias.seq_len_kv)
    keep = torch.ones(shape, dtype=torch.bool, device=device)
    return keep.tril(shape[1] - shape[0] if is_lower_right(bias) else 0)


def _is_ours(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool
) -> bool:
    """Whether anyflash computes it, or at least says what is wrong with it."""
    for x in (query, key, value):
        if type(x) not in PLAIN and not is_exported(x):
            return False
    if attn_mask is not None:
        known = type(attn_mask) in PLAIN or is_causal_bias(attn_mask) or is_exported(attn_mask)
        if is_causal or not known:
            return False
    if query.is_nested or key.is_nested or value.is_nested:
        return False
    if is_forward_mode():
        return False
    if not is_compiling() and (is_jit_tracing() or _is_negated(query, key, value, attn_mask)):
        return False
    for x in (query, key, value):
        if x.dim() > 2 and x.shape[-3] == 0:
            return False
    device = query.device
    kind, dtype = device.type, query.dtype
    if kind not in DTYPES or not query.dim() or not query.shape[-1] or not value.shape[-1]:
        return False
    cast = autocast_dtype(kind)
    if cast is not None and dtype != torch.float64:
        dtype = cast
    if kind == "cpu" or dtype not in DTYPES[kind]:
        return dtype in DTYPES[kind]
    return max(query.shape[-1], value.shape[-1]) <= _CUDA_HEAD_DIM and _is_supported_gpu(
        device.index
    )


def _is_negated(*tensors: Any) -> bool:
    """Whether one is a view whose numbers are negated when they are read."""
    return any(type(x) in PLAIN and x.is_neg() for x in tensors)


def _is_supported_gpu(index: int) -> bool:
    return index in _supported_gpus()


@functools.cache
def _supported_gpus() -> frozenset[int]:
    devices = anyflash.build_info()["devices"]
    return frozenset(device["index"] for device in devices if device["supported"])


# A constant for torch.compile: what torch.compiler.assume_constant_result does, which would import
# torch._dynamo. It takes no frozenset.
_is_supported_gpu._dynamo_marked_constant = True  # type: ignore[attr-defined]
