"""anyflash.jax.dot_product_attention."""

from __future__ import annotations

import numbers
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from anyflash._call import parsing
from anyflash._call.options import AttentionOptions, OutputRequest
from anyflash.jax._call import Call, converted

_OPERATION = "anyflash.jax.dot_product_attention"
_FAR = 1 << 31  # a window that is wider than any sequence


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: Any = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """``jax.nn.dot_product_attention``, whose arguments and results these are.

    Causal masks and windows are aligned at the top left: query i sees the keys ``j <= i``. In two
    things it differs. A query that sees no key gives 0, and -inf as residual, where jax.nn takes
    the mean of all values. The gradient of ``bias`` is there whatever its shape. What is
    sharded over the batch or the heads stays where it is, as :func:`anyflash.jax.attention` says.

    Parameters
    ----------
    query : (batch, seqlen_q, heads, head_dim) or (seqlen_q, heads, head_dim)
    key : (batch, seqlen_k, heads_k, head_dim) or (seqlen_k, heads_k, head_dim)
    value : (batch, seqlen_k, heads_k, head_dim_v) or (seqlen_k, heads_k, head_dim_v)
        Of one dtype: float64, float32, float16, bfloat16; on a GPU float16 and bfloat16.
    bias : optional
        Added to the scores; broadcast to (batch, heads, seqlen_q, seqlen_k).
    mask : bool, optional
        True keeps a key; broadcast likewise. Best alone: with a bias, both make one new array.
    scale : number or array of one element, optional
        Default: 1 / sqrt(head_dim). One that is traced has a gradient, too. It is multiplied with
        query, in at least float32, and the product is rounded to query's dtype.
    is_causal : bool
    query_seq_lengths, key_value_seq_lengths : (batch,) int32, optional
        Queries and keys from there on are padding: the former give 0, the latter are not seen.
    local_window_size : int or (left, right), optional
        Query i sees the keys ``i - left <= j <= i + right``.
    implementation : "xla", "cudnn" or None
        For programs that name one: what is computed, and how, is the same.
    return_residual : bool
        Return the LSE, too.

    Returns
    -------
    out : as query, with value's head_dim
    residual : (batch, seqlen_q, heads) or (seqlen_q, heads), query's dtype
        Only with ``return_residual``. It has no gradient, as in jax.nn.

    Raises
    ------
    TypeError, ValueError
        Dtypes, shapes or numbers that do not fit.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import anyflash.jax
    >>> x = jnp.ones((1, 6, 4, 8))
    >>> out = anyflash.jax.dot_product_attention(x, x, x, is_causal=True, local_window_size=(2, 0))
    >>> out.shape
    (1, 6, 4, 8)
    """
    if implementation is not None and (
        not isinstance(implementation, str) or implementation not in ("xla", "cudnn")
    ):
        raise ValueError(
            f"{_OPERATION}: implementation is {implementation!r}; 'xla', 'cudnn' and None are "
            "allowed"
        )
    is_causal, return_residual = parsing.flags(
        _OPERATION, is_causal=is_causal, return_residual=return_residual
    )
    query, key, value = (
        _array(name, x, (3, 4)) for name, x in (("query", query), ("key", key), ("value", value))
    )
    shape = query.shape
    query, key, value = (_with_batch(x) for x in (query, key, value))
    scores = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    bias, mask = _broadcast("bias", bias, scores), _broadcast("mask", mask, scores)
    if mask is not None and mask.dtype != jnp.bool_:
        raise ValueError(f"{_OPERATION}: mask is {mask.dtype.name}; bool is allowed")
    query_seq_lengths = _lengths("query_seq_lengths", query_seq_lengths, scores[0])
    key_value_seq_lengths = _lengths("key_value_seq_lengths", key_value_seq_lengths, scores[0])
    left, right = _window(local_window_size)
    if is_causal:
        right = 0
    rows, columns, window = _aligned(query.shape[1], key.shape[1], left, right)
    used = None
    if key_value_seq_lengths is not None:
        lengths = jnp.minimum(key_value_seq_lengths, columns)
        if window == (-1, -1):
            used = lengths
        else:  # they would move the window
            keep = (jnp.arange(columns) < lengths[:, None])[:, None, None]
            mask = keep if mask is None else _cut(mask, rows, columns) & keep
    bias, mask = _cut(bias, rows, columns), _cut(mask, rows, columns)
    if isinstance(scale, jax.core.Tracer):
        query, scale = _scaled(query, scale), 1.0
    call = Call(_OPERATION, q=query[:, :rows], k=key[:, :columns], v=value[:, :columns])
    options = AttentionOptions(
        None if scale is None else call.parse("scale", _number, scale),
        window_size=window,
        bias=_joined(bias, mask),
        seqused_k=used,
    )
    call.scores(options)
    results: Any = call.run(OutputRequest(return_lse=True))
    out, lse = results
    missing = query.shape[1] - rows
    if missing:
        out = jnp.pad(out, ((0, 0), (0, missing), (0, 0), (0, 0)))
        lse = jnp.pad(lse, ((0, 0), (0, 0), (0, missing)), constant_values=-np.inf)
    if query_seq_lengths is not None:
        real = jnp.arange(query.shape[1]) < query_seq_lengths[:, None]
        out = jnp.where(real[:, :, None, None], out, 0)
        lse = jnp.where(real[:, None], lse, -jnp.inf)
    out = out.reshape(*shape[:-1], out.shape[-1])
    if not return_residual:
        return out
    residual = jnp.swapaxes(lse, 1, 2).astype(query.dtype).reshape(shape[:-1])
    return out, jax.lax.stop_gradient(residual)


def _array(name: str, x: Any, ranks: tuple[int, ...]) -> Any:
    try:
        x = converted(x)
    except TypeError as error:
        raise TypeError(f"{_OPERATION}: {name} {error}") from None
    if x.ndim not in ranks:
        allowed = f"{ranks[0]} or {ranks[-1]}" if len(ranks) > 1 else ranks[0]
        raise ValueError(
            f"{_OPERATION}: {name} has {x.ndim} dimensions, shape {x.shape}; expected {allowed}"
        )
    return x


def _with_batch(x: Any) -> Any:
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


def _broadcast(name: str, x: Any, scores: tuple[int, ...]) -> Any:
    """A bias or a mask, with 4 dimensions."""
    if x is None:
        return None
    x = _with_batch(_array(name, x, tuple(range(5))))
    if any(n not in (1, full) for n, full in zip(x.shape, scores, strict=True)):
        raise ValueError(
            f"{_OPERATION}: {name} has shape {x.shape}; expected what broadcasts to {scores}: "
            "(batch, heads, seqlen_q, seqlen_k)"
        )
    return x


def _scaled(query: Any, scale: Any) -> Any:
    """With a scale that is traced: the kernels take numbers alone."""
    is_real = jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)
    if scale.size != 1 or not is_real:
        raise TypeError(
            f"{_OPERATION}: scale is {scale.dtype.name} of shape {scale.shape}; None, a number or "
            "an array of one is allowed"
        )
    # jax.nn multiplies the scores, in float32. Of what can be done before the kernel, one rounding
    # of the product is nearest to it; a scale of 16 bits would be a second one.
    wide = jnp.promote_types(query.dtype, jnp.float32)
    return (query.astype(wide) * scale.reshape(()).astype(wide)).astype(query.dtype)


def _number(x: Any) -> float:
    """A number, or an array of one element, as JAX takes it."""
    if getattr(x, "size", 0) == 1 and x.dtype.kind in "iuf":
        x = x.item()
    return parsing.scale(x)


def _lengths(name: str, x: Any, batch: int) -> Any:
    if x is None:
        return None
    x = _array(name, x, (1,))
    if x.shape != (batch,) or not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(
            f"{_OPERATION}: {name} is {x.dtype.name} of shape {x.shape}; integers of shape "
            f"{(batch,)} are allowed"
        )
    return x.astype(jnp.int32)


def _window(size: Any) -> tuple[int | None, int | None]:
    if size is None:
        return None, None
    pair = size if isinstance(size, (tuple, list)) else (size, size)
    if len(pair) != 2 or not all(isinstance(n, numbers.Integral) for n in pair):
        raise TypeError(
            f"{_OPERATION}: local_window_size is {_shown(size)}; None, an int or a pair of int is "
            "allowed"
        )
    left, right = (min(operator.index(n), _FAR) for n in pair)
    if min(left, right) < 0:
        raise ValueError(
            f"{_OPERATION}: local_window_size is {size}; 0 or more on both sides is allowed"
        )
    return left, right


def _shown(x: Any) -> str:
    return str(x) if isinstance(x, (tuple, list)) else type(x).__name__


def _aligned(
    rows: int, columns: int, left: int | None, right: int | None
) -> tuple[int, int, tuple[int, int]]:
    """The queries and keys that take part, and their window aligned at the bottom right."""
    if right is not None:
        columns = min(columns, rows + right)
    if left is not None:
        rows = min(rows, columns + left)
    shift = columns - rows
    window = (-1 if left is None else left + shift, -1 if right is None else right - shift)
    return rows, columns, window


def _cut(x: Any, rows: int, columns: int) -> Any:
    """(..., seqlen_q or 1, seqlen_k or 1) without the queries and keys that take no part."""
    if x is None:
        return None
    height, width = x.shape[2:]
    return x[:, :, : rows if height > 1 else 1, : columns if width > 1 else 1]


def _joined(bias: Any, mask: Any) -> Any:
    if bias is None:
        return mask
    if not jnp.issubdtype(bias.dtype, jnp.floating):
        bias = bias.astype(jnp.float32)
    return bias if mask is None else jnp.where(mask, bias, -jnp.inf)
