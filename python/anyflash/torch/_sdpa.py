"""torch.nn.functional.scaled_dot_product_attention, computed here."""

from __future__ import annotations

import math
import numbers
import sys
from typing import Any

import torch
from torch import Tensor

from anyflash._arrays.base import FLOATS, listed
from anyflash._call import parsing
from anyflash._call.options import NO_DROPOUT, UNBOUNDED
from anyflash._call.parsing import flags
from anyflash.torch import _fast_path
from anyflash.torch._attention import attention
from anyflash.torch._dispatch_state import (
    PLAIN,
    autocast_dtype,
    is_plain,
    is_plain_eager,
    is_recorded,
)

_NAME = "anyflash.torch.scaled_dot_product_attention"
Shape = tuple[int, ...]
_FLOATS = _fast_path.DTYPES["cpu"]
_LARGE_SCALE = torch.finfo(torch.float32).max / 2


def scaled_dot_product_attention(  # noqa: PLR0917 (as PyTorch's)
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
    """``torch.nn.functional.scaled_dot_product_attention`` with the kernels of anyflash.

    Arguments, layout and meaning are PyTorch's; :func:`sdpa_routing` makes existing code call it.
    Differentiable in query, key, value and a mask of numbers, as :func:`attention` is.

    What differs: a query that sees no key gives 0 in every version of PyTorch (NaN before 2.5),
    and its gradients are 0. ``is_causal`` and a mask together are always refused. What dropout
    drops is drawn from the same generator, but is not what PyTorch would drop; ``dropout_p`` is
    rounded to a multiple of 2**-16, 1 excepted. Choices of ``torch.nn.attention.sdpa_kernel``
    have no effect.

    Parameters
    ----------
    query : (..., heads, L, head_dim)
    key : (..., heads, S, head_dim)
    value : (..., heads, S, head_dim_v)
        Any number of leading axes; also (L, head_dim). Axes before L and S are broadcast.
        CPU: float64, float32, float16, bfloat16. CUDA: float16, bfloat16, head dims up to 512.
        Nested tensors are not allowed.
    attn_mask : broadcastable to (..., heads, L, S), optional
        bool: True keeps the key. Numbers, of any dtype of query, are added to the scores. Or a
        ``torch.nn.attention.bias.CausalBias``.
    dropout_p : float
        0 to 1.
    is_causal : bool
        Query i sees the keys ``j <= i``, aligned at the top left, also where L is not S.
    scale : float, optional
        Default ``1 / sqrt(head_dim)``.
    enable_gqa : bool
        Heads of key and value divide those of query and serve consecutive ones. PyTorch has it
        from 2.5 on; here it always is there.

    Returns
    -------
    (..., heads, L, head_dim_v)
        In memory the heads of one query lie side by side: ``result.transpose(-3, -2)`` is
        contiguous.

    Raises
    ------
    RuntimeError
        Shapes, dtypes, devices that do not fit, as in PyTorch.
    TypeError, ValueError, NotImplementedError
        What :func:`attention` does not take.

    Examples
    --------
    >>> import torch
    >>> from anyflash.torch import scaled_dot_product_attention
    >>> query = torch.randn(2, 8, 5, 16, requires_grad=True)
    >>> key = value = torch.randn(2, 2, 7, 16)
    >>> out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    >>> out.sum().backward()
    >>> out.shape, query.grad.shape
    (torch.Size([2, 8, 5, 16]), torch.Size([2, 8, 5, 16]))
    """
    if type(is_causal) is not bool or type(enable_gqa) is not bool:
        is_causal, enable_gqa = flags(_NAME, is_causal=is_causal, enable_gqa=enable_gqa)
    if type(dropout_p) is not float:
        dropout_p = _number_of(dropout_p)
        if not isinstance(dropout_p, numbers.Real | torch.SymFloat):
            given = type(dropout_p).__name__
            raise TypeError(f"{_NAME}: dropout_p is {given}; a number is allowed")
    if scale is not None and (type(scale) is not float or not abs(scale) < _LARGE_SCALE):
        scale = _read_scale(scale, query)
    lower_right = False
    if attn_mask is not None and is_causal_bias(attn_mask):
        lower_right = is_lower_right(attn_mask)
        is_causal, attn_mask = _read_causal_bias(attn_mask, query, key, is_causal), None
    leading: Shape | None = None  # axes of the result, where they are not query's
    if not _is_regular(query, key, value, attn_mask, enable_gqa):
        query, key, value, attn_mask, leading = _regular(query, key, value, attn_mask, enable_gqa)
    window = UNBOUNDED
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError(f"{_NAME}: attn_mask and is_causal are both given; one is allowed")
        beyond = 0 if lower_right else query.shape[2] - key.shape[2]
        if beyond > 0:
            window, is_causal = (-1, beyond), False
        elif beyond < 0:  # keys that no query sees
            key, value = key[:, :, :beyond], value[:, :, :beyond]
    if dropout_p and not 0 < dropout_p <= 1:
        raise RuntimeError(f"{_NAME}: dropout_p is {dropout_p}; 0 <= dropout_p <= 1 is allowed")
    out: Tensor | None = None
    if (
        not dropout_p
        and is_plain_eager(query, key, value)
        and (attn_mask is None or _is_direct_mask(attn_mask))
    ):
        options = None
        if attn_mask is not None or window is not UNBOUNDED:
            options = _fast_path.options_of(attn_mask, window)
        out = _fast_path.forward(
            _NAME, query, key, value, scale, is_causal, False, options, heads_first=True
        )
    if out is None:
        out = attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            softmax_scale=scale,
            causal=is_causal,
            window_size=window,
            bias=attn_mask,
            dropout_p=dropout_p if 0 < dropout_p < 1 else NO_DROPOUT,
        ).transpose(1, 2)
    if dropout_p == 1:
        out = torch.nn.functional.dropout(out, 1.0)
    return out if leading is None else out.view(*leading, *out.shape[2:])


def _number_of(x: Any) -> Any:
    """Of a tensor, its one number, as PyTorch's functions take it."""
    return x.item() if isinstance(x, Tensor) and not x.dim() and not x.requires_grad else x


def _read_scale(scale: Any, query: Any) -> float:
    result = parsing.named(_NAME, "scale", parsing.scale, _number_of(scale))
    if abs(result) > _LARGE_SCALE and getattr(query, "dtype", None) != torch.float64:
        raise ValueError(f"{_NAME}: scale is {result}; at most half of float32's range is allowed")
    return result


def _is_regular(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> bool:
    """Whether :func:`attention` takes them, its axes swapped; the others cost more time."""
    for x in (query, key, value):
        if not isinstance(x, Tensor) or x.is_nested:
            return False
    shape, shape_k, shape_v = query.shape, key.shape, value.shape
    return (
        len(shape) == len(shape_k) == len(shape_v) == 4
        and shape[0] == shape_k[0] == shape_v[0]
        and shape_k[1] == shape_v[1]
        and shape_k[2] == shape_v[2]
        and shape[3] == shape_k[3]
        and (shape[1] == shape_k[1] or (enable_gqa and shape[1] % max(shape_k[1], 1) == 0))
        and 0 not in (shape[1], shape[3], shape_v[3])
        and query.dtype == key.dtype == value.dtype
        and query.dtype in _FLOATS
        and query.device == key.device == value.device
        and (
            attn_mask is None
            or (
                isinstance(attn_mask, Tensor)
                and attn_mask.dim() <= 4
                and _fits(attn_mask, (*shape[:3], shape_k[2]))
                and attn_mask.device == query.device
                and (attn_mask.dtype == torch.bool or attn_mask.is_floating_point())
            )
        )
    )


def _fits(mask: Tensor, full: Shape) -> bool:
    shape, first = mask.shape, len(full) - mask.dim()
    if first < 0:
        return False
    for size, wanted in zip(shape, full[first:], strict=True):  # noqa: SIM110 (all() is slower)
        if size not in (1, wanted):
            return False
    return True


def _is_direct_mask(mask: Tensor) -> bool:
    return is_plain(mask) and not is_recorded(mask)


def is_causal_bias(mask: Any) -> bool:
    if type(mask) in PLAIN:
        return False
    # Its module imports torch._dynamo, and has been imported by who has one.
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(mask, module.CausalBias)


def is_lower_right(mask: Any) -> bool:
    return bool(mask.variant.name == "LOWER_RIGHT")


def refuse_causal_twice(is_causal: bool) -> None:
    """Where attn_mask is a CausalBias."""
    if is_causal:
        raise ValueError(f"{_NAME}: a CausalBias and is_causal are both given; one is allowed")


def _read_causal_bias(mask: Any, query: Tensor, key: Tensor, is_causal: bool) -> bool:
    given, right = (mask.seq_len_q, mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    refuse_causal_twice(is_causal)
    if given != right:
        raise RuntimeError(f"{_NAME}: attn_mask is a CausalBias of {given}; expected {right}")
    return True


def _refuse(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
    """What needs no broadcasting to be seen."""
    for name, x in {"query": query, "key": key, "value": value, "attn_mask": attn_mask}.items():
        if x is None and name == "attn_mask":
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{_NAME}: {name} is {type(x).__name__}; a torch.Tensor is allowed")
        if x.is_nested:
            raise RuntimeError(
                f"{_NAME}: {name} is a nested tensor; use anyflash.torch.attention_varlen"
            )
        if x.device != query.device:
            raise RuntimeError(f"{_NAME}: {name} is on {x.device}, but query is on {query.device}")
        if name == "attn_mask":
            if x.dtype != torch.bool and not x.is_floating_point():
                raise RuntimeError(f"{_NAME}: attn_mask is {x.dtype}; bool or floats are allowed")
            continue
        if x.dim() < 2:
            raise RuntimeError(
                f"{_NAME}: {name} has shape {tuple(x.shape)}; at least 2 axes are needed"
            )
        if x.dtype not in _FLOATS:
            raise TypeError(f"{_NAME}: {name} is {x.dtype}; {listed(FLOATS)}")
        if x.dtype != query.dtype and autocast_dtype(x.device.type) is None:
            raise RuntimeError(f"{_NAME}: {name} is {x.dtype}, but query is {query.dtype}")


def _regular(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, enable_gqa: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Shape]:
    """The same with four axes each, and the result's axes before L."""
    _refuse(query, key, value, attn_mask)
    flat = query.dim() == key.dim() == value.dim() == 2
    query, key, value = (x[None] if x.dim() == 2 else x for x in (query, key, value))
    shapes = [tuple(x.shape) for x in (query, key, value)]
    shape, shape_k, shape_v = shapes
    given = f"query, key and value have shapes {shape}, {shape_k} and {shape_v}"
    if shape[-1] != shape_k[-1] or shape_k[-2] != shape_v[-2]:
        raise RuntimeError(
            f"{_NAME}: {given}; (..., L, E), (..., S, E) and (..., S, Ev) are allowed"
        )
    if 0 in (shape[-3], shape_k[-3], shape_v[-3], shape[-1], shape_v[-1]):
        raise RuntimeError(f"{_NAME}: {given}; heads and head dims must be at least 1")
    heads = shape[-3]
    if enable_gqa:
        if any(n != heads and (n == 0 or heads % n) for n in (shape_k[-3], shape_v[-3])):
            raise RuntimeError(f"{_NAME}: {given}; heads of key and value must divide query's")
        if shape_k[-3] != shape_v[-3]:
            key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    try:
        last = -3 if enable_gqa else -2
        leading = [x[:last] for x in shapes]
        batch = tuple(torch.broadcast_shapes(*leading))  # type: ignore[no-untyped-call]
    except RuntimeError:
        raise RuntimeError(
            f"{_NAME}: {given}; the leading axes must be equal or 1 (of heads with enable_gqa=True "
            "also a divisor)"
        ) from None
    if not enable_gqa:
        batch, heads = batch[:-1], batch[-1]
        query = query.expand(*query.shape[:-3], heads, -1, -1)
        if not key.shape[-3] == value.shape[-3] == 1:  # one K/V head serves all without copies
            key, value = (x.expand(*x.shape[:-3], heads, -1, -1) for x in (key, value))
    if attn_mask is not None:
        attn_mask = _regular_mask(attn_mask, (*batch, heads, shape[-2], shape_k[-2]))
    query, key, value = (_flattened(x, batch) for x in (query, key, value))
    return query, key, value, attn_mask, () if flat else (*batch, heads)


def _flattened(x: Tensor, batch: Shape) -> Tensor:
    """(*batch, heads, length, dim) with one axis for batch."""
    rest = x.shape[-3:]
    return x.expand(*batch, *rest).reshape(math.prod(batch), *rest)


def _regular_mask(mask: Tensor, full: Shape) -> Tensor:
    if not _fits(mask, full):
        raise RuntimeError(
            f"{_NAME}: attn_mask has shape {tuple(mask.shape)}, which is not broadcast to {full}"
        )
    if mask.dim() <= 3:
        return mask
    ones = all(size == 1 for size in mask.shape[:-3])
    return _flattened(mask, (1,) * (mask.dim() - 3) if ones else full[:-3])
