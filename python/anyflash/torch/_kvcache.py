"""anyflash.torch.attention_with_kvcache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyflash import _kvcache
from anyflash._options import NO_SOFTCAP, UNBOUNDED
from anyflash.torch._attention import as_dtype, check_tensor
from anyflash.torch._ops import define, lse_shape, or_empty
from anyflash.torch._watched import is_traced

_OPERATION = "anyflash.torch.attention_with_kvcache"
_SCHEMA = (
    "(Tensor q, Tensor{} k_cache, Tensor{} v_cache, Tensor? k, Tensor? v, *, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? rotary_seqlens, bool rotary_interleaved, Tensor? cache_seqlens, "
    "SymInt? filled, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
    "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, "
    "SymInt num_splits, SymInt? split_size, bool return_lse, ScalarType? out_dtype)"
    " -> (Tensor, Tensor)"
)


def _attend(
    *tensors: Tensor,
    cache_seqlens: Tensor | None,
    filled: int | None,
    window_left: int,
    window_right: int,
    return_lse: bool,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    result = _kvcache.attend(
        _OPERATION,
        *tensors,
        cache_seqlens=filled if cache_seqlens is None else cache_seqlens,
        window_size=(window_left, window_right),
        return_lse=return_lse,
        **options,
    )
    return result if return_lse else (result, or_empty(None, tensors[0]))


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *others: Tensor | None,
    return_lse: bool,
    out_dtype: torch.dtype | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v_cache.shape[-1]), dtype=out_dtype)
    lse = q.new_empty(lse_shape(q), dtype=torch.float32) if return_lse else or_empty(None, q)
    return out, lse


def _refuse_gradients(arguments: dict[str, Any]) -> None:
    """As it is done where nothing is traced."""
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{_OPERATION}: {name} requires grad, but attention with a KV cache has no "
                "backward; use torch.no_grad(), or detach() the tensor"
            )


# Two operators: where one that only reads looked like one that writes, compilers would copy caches.
define("attention_with_kvcache", _SCHEMA.format("", ""), _attend, _fake)
define("attention_with_kvcache_", _SCHEMA.format("(a!)", "(b!)"), _attend, _fake)


def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    rotary_interleaved: bool = True,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    tree_mask: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
    split_size: int | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | str | None = None,
) -> Any:
    """:func:`anyflash.attention_with_kvcache` for PyTorch, also within ``torch.compile`` and
    ``torch.export``.

    The caches are written in place where k and v are given. There is no backward: tensors that
    require grad are refused where gradients are recorded.

    Parameters that are not listed are those of :func:`anyflash.attention_with_kvcache`.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k_cache : (cache_batch, capacity, heads_k, head_dim)
    v_cache : (cache_batch, capacity, heads_k, head_dim_v)
        With ``block_table``: (pages, page_size, heads_k, head_dim or head_dim_v).
    k, v : (batch, seqlen_new, heads_k, head_dim or head_dim_v), optional

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
    lse : (batch, heads, seqlen_q), float32, only with ``return_lse``

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`anyflash.attention_with_kvcache`.

    Examples
    --------
    >>> import torch
    >>> import anyflash.torch
    >>> k_cache, v_cache = torch.zeros(2, 2, 16, 2, 8)
    >>> q = k = v = torch.ones(2, 1, 2, 8)
    >>> anyflash.torch.attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=3).shape
    torch.Size([2, 1, 2, 8])
    >>> bool((k_cache[:, 3] == 1).all())
    True
    """
    options: dict[str, Any] = {
        "rotary_cos": rotary_cos,
        "rotary_sin": rotary_sin,
        "rotary_seqlens": rotary_seqlens,
        "rotary_interleaved": rotary_interleaved,
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
        "softmax_scale": softmax_scale,
        "causal": causal,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
        "sinks": sinks,
        "tree_mask": tree_mask,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "num_splits": num_splits,
        "split_size": split_size,
        "return_lse": return_lse,
        "out_dtype": as_dtype(out_dtype),
    }
    check_tensor(_OPERATION, q)
    tensors = (q, k_cache, v_cache, k, v)
    if not is_traced(q):
        return _kvcache.attend(
            _OPERATION, *tensors, cache_seqlens=cache_seqlens, window_size=window_size, **options
        )
    _refuse_gradients({"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": k, "v": v, **options})
    left, right = (-1 if bound is None else bound for bound in window_size)
    is_tensor = isinstance(cache_seqlens, Tensor)
    run: Any = torch.ops.anyflash.attention_with_kvcache_
    if k is None and v is None:
        run = torch.ops.anyflash.attention_with_kvcache
    out, lse = run(
        *tensors,
        cache_seqlens=cache_seqlens if is_tensor else None,
        filled=None if is_tensor else cache_seqlens,
        window_left=left,
        window_right=right,
        **options,
    )
    return (out, lse) if return_lse else out
