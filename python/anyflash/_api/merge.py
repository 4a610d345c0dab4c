"""anyflash.merge_states: attention over two sets of keys, from each one's result."""

from __future__ import annotations

from typing import Any

from anyflash import _core
from anyflash._arrays.base import FLOATS, Instead
from anyflash._call import parsing
from anyflash._call.operands import Operands
from anyflash._call.results import ArrayT

_INSTEAD = Instead(
    "the formula in its docstring, written in the framework's functions, has gradients",
    "inside jax.jit, grad and vmap write the formula of its docstring in jax.numpy",
)
_LSE = ("float32", "float64")
_IN_PLACE = {"out": ("out_a", "out_b"), "lse": ("lse_a", "lse_b")}


def merge_states(
    out_a: ArrayT,
    lse_a: ArrayT,
    out_b: Any,
    lse_b: Any,
    *,
    out: Any = None,
    lse: Any = None,
    out_dtype: Any = None,
    stream: int | None = None,
) -> tuple[ArrayT, ArrayT]:
    """Joins attention over two disjoint sets of keys, given each one's result and LSE.

    ``lse = log(exp(lse_a) + exp(lse_b))`` and ``out = exp(lse_a - lse) out_a + exp(lse_b - lse)
    out_b`` (Milakov and Gimelshein, arXiv 1805.02867). Parts in float32
    (``attention(..., out_dtype="float32")``) are not rounded before they are joined.

    The parts are computed without sinks; a sink is one more part, with ``out_b`` 0 and ``lse_b``
    the sink. Dropout is drawn by a key's number in its own part: parts that drop out need
    different seeds, or a :class:`Part` that says where each one lies.

    Parameters
    ----------
    out_a, out_b : (batch, seqlen_q, heads, head_dim_v) or (total_q, heads, head_dim_v)
        Of one dtype: float32, float16, bfloat16; CPU also float64.
    lse_a, lse_b : (batch, heads, seqlen_q) or (heads, total_q), float32; CPU also float64
        Of one dtype. -inf or +inf (flash-attn's convention): the part saw no key.
    out, lse : arrays, optional
        Where to write the results; may be ``out_a`` or ``out_b`` and ``lse_a`` or ``lse_b``, and
        must not overlap one another or an input otherwise.
    out_dtype : optional
        Name or dtype of the result; default: that of ``out``, or else of ``out_a``.
    stream : int, optional
        CUDA: the address of a ``cudaStream_t`` to run on; default: the framework's current stream.

    Returns
    -------
    out : as ``out_a``
    lse : as ``lse_a``

    Raises
    ------
    TypeError
        A dtype, array type or argument type that is not allowed.
    ValueError
        Shapes or devices that do not fit. Nothing has been written.
    NotImplementedError
        Inputs that require gradients or are traced.

    Examples
    --------
    >>> import numpy as np
    >>> import anyflash
    >>> q = np.ones((1, 4, 2, 8), np.float32)
    >>> parts = [anyflash.attention(q, q[:, s], q[:, s], return_lse=True)
    ...          for s in (slice(0, 1), slice(1, 4))]
    >>> out, lse = anyflash.merge_states(*parts[0], *parts[1])
    >>> bool(np.allclose(out, anyflash.attention(q, q, q)))
    True
    """
    operands = Operands("anyflash.merge_states", "out_a", out_a, _INSTEAD)
    framework, device = operands.framework, operands.device
    shape, dtype = operands.read("out_a", out_a)
    lse_shape, lse_dtype = operands.read("lse_a", lse_a, _LSE)
    _, dtype_b = operands.read("out_b", out_b)
    _, lse_dtype_b = operands.read("lse_b", lse_b, _LSE)
    if lse_dtype_b != lse_dtype:
        raise TypeError(
            f"anyflash.merge_states: lse_b is {lse_dtype_b}; {lse_dtype} is allowed, as lse_a"
        )
    if dtype_b != dtype:
        raise TypeError(
            f"anyflash.merge_states: out_b is {dtype_b}, but out_a is {dtype}; both must have one "
            "dtype"
        )
    if stream is not None:
        stream = operands.stream(stream)
    allowed: tuple[str, ...] = FLOATS
    if out_dtype is not None:
        allowed = (operands.parse("out_dtype", parsing.dtype, out_dtype, FLOATS),)
    if out is not None:
        kind = operands.output("out", out, allowed)
    else:
        kind = dtype if out_dtype is None else allowed[0]
    if lse is not None:
        operands.output("lse", lse, _LSE)
    if out is not None or lse is not None:
        given = {"out": out, "lse": lse}
        operands.check_apart(
            {name: x for name, x in given.items() if x is not None},
            {"out_a": out_a, "lse_a": lse_a, "out_b": out_b, "lse_b": lse_b},
            _IN_PLACE,
        )

    result = operands.empty(shape, kind) if out is None else out
    result_lse = operands.empty(lse_shape, lse_dtype) if lse is None else lse
    _core.merge_states(
        operands.operation,
        framework.export(out_a, device, stream),
        framework.export(lse_a, device, stream),
        framework.export(out_b, device, stream),
        framework.export(lse_b, device, stream),
        framework.export_out(result, device),
        framework.export_out(result_lse, device),
        operands.as_bits(dtype),
        operands.as_bits(kind),
        framework.stream(out_a, device) if stream is None else stream,
    )
    return (
        framework.finish(result) if out is None else out,
        framework.finish(result_lse) if lse is None else lse,
    )
