"""anyflash.attention: arrays in, arrays of the same kind out."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from anyflash import _core
from anyflash._arrays import Device, Framework, framework_of

_T = TypeVar("_T")
_NAME = "anyflash.attention"


def _about(argument: str, function: Callable[..., _T], *args: Any) -> _T:
    """Calls function(*args); its errors get the operation's and the argument's names in front."""
    try:
        return function(*args)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise type(error)(f"{_NAME}: {argument} {error}") from None


def _scale(softmax_scale: Any) -> float | None:
    if softmax_scale is None:
        return None
    if isinstance(softmax_scale, bool) or not isinstance(softmax_scale, numbers.Real):
        raise TypeError(
            f"{_NAME}: softmax_scale is {type(softmax_scale).__name__}; None or a finite number is "
            "allowed"
        )
    scale = float(softmax_scale)
    if not math.isfinite(scale):
        raise ValueError(f"{_NAME}: softmax_scale is {scale}; a finite number is allowed")
    return scale


class _Input(NamedTuple):
    argument: str
    array: Any
    framework: Framework
    device: Device
    shape: tuple[int, ...]
    dtype: Any


def _input(argument: str, x: Any, q: _Input | None = None) -> _Input:
    """Reads what an array is, and checks that it belongs with q."""
    framework = _about(argument, framework_of, x)
    if q is not None and framework is not q.framework:
        raise TypeError(
            f"{_NAME}: {argument} is an array of {framework.name} ({type(x).__name__}), but q is "
            f"one of {q.framework.name} ({type(q.array).__name__}); pass arrays of one framework"
        )
    _about(argument, framework.check, x)
    device = _about(argument, framework.device, x)
    if q is not None and device != q.device:
        raise ValueError(
            f"{_NAME}: {argument} is on {device.kind}:{device.number}, but q is on "
            f"{q.device.kind}:{q.device.number}; all arrays must be on one device"
        )
    shape, dtype = _about(argument, framework.describe, x, device)
    if q is not None and dtype != q.dtype:
        raise TypeError(
            f"{_NAME}: {argument} is {dtype}, but q is {q.dtype}; q, k, v and out must have one "
            "dtype"
        )
    if len(shape) != 4:
        raise ValueError(
            f"{_NAME}: {argument} has {len(shape)} dimensions, shape {shape}; expected 4: "
            "(batch, seqlen, heads, head_dim)"
        )
    return _Input(argument, x, framework, device, shape, dtype)


def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    return_lse: bool = False,
    out: Any = None,
    stream: int | None = None,
) -> Any:
    """Exact attention, ``softmax(softmax_scale * q k^T) v``, without a matrix of scores in memory.

    FlashAttention-2 (Dao, arXiv 2307.08691): tiles with an online softmax; memory is linear in the
    sequence lengths.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k : (batch, seqlen_k, heads_k, head_dim)
    v : (batch, seqlen_k, heads_k, head_dim_v)
        Arrays of one framework (NumPy, PyTorch, JAX on the CPU, CuPy, or any object that speaks
        DLPack), one dtype and one device, which is where the work is done. ``heads_k`` divides
        ``heads``: each K/V head serves ``heads / heads_k`` consecutive query heads (GQA, MQA).
        CPU: float64, float32, float16, bfloat16 (NumPy: of ml_dtypes), any head dim, any strides.
        CUDA: float16, bfloat16, head dims up to 256; arrays whose last axis is not contiguous, or
        whose rows do not begin at multiples of 16 bytes, are copied first.
    softmax_scale : float, optional
        Any finite number; default ``1 / sqrt(head_dim)``.
    causal : bool
        Query i sees the keys ``j <= i + seqlen_k - seqlen_q`` (aligned at the bottom right).
    return_lse : bool
        Return ``(out, lse)``.
    out : array, optional
        Where to write the result: shape (batch, seqlen_q, heads, head_dim_v), dtype and device of
        q. It must not overlap q, k or v.
    stream : int, optional
        CUDA: the address of a ``cudaStream_t`` to run on; default: the framework's current stream.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
        Type, dtype and device of q; an :class:`anyflash.Array` for other DLPack producers. A query
        that sees no key gives 0.
    lse : (batch, heads, seqlen_q), float32, only with ``return_lse``
        Natural logarithm of the softmax's denominator, scale included; -inf where no key is seen.

    Raises
    ------
    TypeError
        A dtype, array type or argument type that is not allowed.
    ValueError
        Shapes, devices or numbers that do not fit. Nothing has been written.
    NotImplementedError
        Inputs that require gradients or are traced, or a GPU that this build has no code for.

    Examples
    --------
    >>> import numpy as np
    >>> import anyflash
    >>> q = np.ones((1, 4, 2, 8), np.float32)
    >>> anyflash.attention(q, q, q, causal=True).shape
    (1, 4, 2, 8)
    """
    inputs = [first := _input("q", q), _input("k", k, first), _input("v", v, first)]
    framework, device = first.framework, first.device
    scale = _scale(softmax_scale)
    if stream is not None and (isinstance(stream, bool) or not isinstance(stream, int)):
        raise TypeError(
            f"{_NAME}: stream is {type(stream).__name__}; None or the address of a cudaStream_t as "
            "an int is allowed"
        )

    batch, seqlen_q, heads, _ = first.shape
    if out is None:
        shape = (batch, seqlen_q, heads, inputs[2].shape[3])
        result = framework.empty(shape, q, None, device)
    else:
        result = _input("out", out, first).array
        _about("out", framework.check_out, out)
    target = framework.export_out(result, device)
    lse = lse_target = None
    if return_lse:
        lse = framework.empty((batch, heads, seqlen_q), q, "float32", device)
        lse_target = framework.export_out(lse, device)

    q_in, k_in, v_in = (framework.export(x.array, device, stream) for x in inputs)
    _core.forward(
        q_in,
        k_in,
        v_in,
        target,
        lse_target,
        scale,
        bool(causal),
        framework.stream(q, device) if stream is None else stream,
        framework.bf16_bits(q),
        lambda size: framework.workspace(size, q, device, stream),
    )
    result = result if out is not None else framework.finish(result)
    return (result, framework.finish(lse)) if return_lse else result
