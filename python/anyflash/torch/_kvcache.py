"""anyflash.torch.attention_with_kvcache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor

from anyflash._call.kvcache import KvCacheCall, check_values
from anyflash._call.options import (
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    KvCacheOptions,
    OutputRequest,
)
from anyflash.torch._attend import as_dtype, check_no_nested, check_tensor
from anyflash.torch._dispatch_state import is_grad_enabled, is_traced
from anyflash.torch._fake_checks import check
from anyflash.torch._ops import define, lse_shape, or_empty
from anyflash.torch._sharding import is_distributed

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyflash._api.keywords import KvCacheKeywords

_OPERATION = "anyflash.torch.attention_with_kvcache"
_VARLEN_OPERATION = "anyflash.torch.attention_varlen_with_kvcache"
_SCHEMA = (
    "(Tensor q, Tensor{} k_cache, Tensor{}? v_cache, Tensor? k, Tensor? v, *, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? rotary_seqlens, bool rotary_interleaved, Tensor? cache_seqlens, "
    "SymInt? filled, Tensor? cache_batch_idx, Tensor? cache_leftpad, Tensor? block_table, "
    "float? softmax_scale, bool causal, SymInt window_left, SymInt window_right, float softcap, "
    "Tensor? alibi_slopes, Tensor? sinks, Tensor? tree_mask, Tensor? k_scale, Tensor? v_scale, "
    "SymInt num_splits, SymInt? split_size, SymInt? head_dim_v, bool return_lse, "
    "ScalarType? out_dtype, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k_new=None, "
    "SymInt? max_seqlen_q=None, bool validate=False) -> (Tensor, Tensor)"
)


def _name(cu_seqlens_q: Tensor | None) -> str:
    return _OPERATION if cu_seqlens_q is None else _VARLEN_OPERATION


def _operator(*tensors: Tensor | None, **given: Any) -> tuple[Tensor, Tensor]:
    filled = given.pop("filled")
    if filled is not None:
        given["cache_seqlens"] = filled
    given["window_size"] = given.pop("window_left"), given.pop("window_right")
    given |= zip(("q", "k_cache", "v_cache", "k", "v"), tensors, strict=True)
    result: Any = KvCacheCall.of(_name(given.get("cu_seqlens_q")), given).attend()
    return result if given["return_lse"] else (result, or_empty(None, given["q"]))


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    *others: Tensor | None,
    return_lse: bool,
    out_dtype: torch.dtype | None,
    head_dim_v: int | None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    columns = head_dim_v if v_cache is None else v_cache.shape[-1]
    out = q.new_empty((*q.shape[:-1], columns), dtype=out_dtype)
    lse = q.new_empty(lse_shape(q), dtype=torch.float32) if return_lse else or_empty(None, q)
    given = dict(zip(("k_new", "v_new"), others, strict=True)) | {"head_dim_v": head_dim_v}
    given |= {"q": q, "k_cache": k_cache, "v_cache": v_cache, "out": out}
    _check(given | {"lse": lse if return_lse else None} | options)
    return out, lse


def _check(given: dict[str, Any]) -> None:
    """By the core's names, but for an int that stands for all lengths."""
    packed = given.get("cu_seqlens_q") is not None
    filled = given.pop("filled")
    if filled is not None:
        batch = given["cu_seqlens_q"].shape[0] - 1 if packed else given["q"].shape[0]
        given["cache_seqlens"] = given["q"].new_empty(batch, dtype=torch.int32)
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    numbers = {name: x for name, x in given.items() if name not in tensors}
    name = _name(given.get("cu_seqlens_q"))
    check(name, "forward_with_kvcache", tensors, numbers)


def _refuse_gradients(operation: str, arguments: dict[str, Any]) -> None:
    """As it is done where nothing is traced."""
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.requires_grad and is_grad_enabled():
            raise NotImplementedError(
                f"{operation}: {name} requires grad, but attention with a KV cache has no "
                "backward; use torch.no_grad(), or detach() the tensor"
            )


# Two operators: where one that only reads looked like one that writes, compilers would copy caches.
define("attention_with_kvcache", _SCHEMA.format("", ""), _operator, _fake)
define("attention_with_kvcache_", _SCHEMA.format("(a!)", "(b!)"), _operator, _fake)


@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[KvCacheKeywords[Tensor]],
) -> Tensor: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[KvCacheKeywords[Tensor]],
) -> tuple[Tensor, Tensor]: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
    k: Tensor | None = ...,
    v: Tensor | None = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[KvCacheKeywords[Tensor]],
) -> Tensor | tuple[Tensor, Tensor]: ...
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None,
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
    head_dim_v: int | None = None,
    return_lse: bool = False,
    out_dtype: torch.dtype | str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """:func:`anyflash.attention_with_kvcache` for PyTorch, also within ``torch.compile`` and
    ``torch.export``.

    The caches are written in place where k is given. There is no backward: tensors that
    require grad are refused where gradients are recorded.

    DTensors may be sharded on batch or heads: q, k and v, and the caches likewise. A single head of
    the caches is replicated where q's heads are sharded. Nothing is communicated. Pages, and caches
    with ``cache_batch_idx``, belong to the whole batch: where that is sharded they are replicated,
    and only read.

    Parameters that are not listed are those of :func:`anyflash.attention_with_kvcache`.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k_cache : (cache_batch, capacity, heads_k, head_dim)
    v_cache : (cache_batch, capacity, heads_k, head_dim_v); or None, with ``head_dim_v``
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
    options = AttentionOptions(
        softmax_scale, causal, window_size, softcap, alibi_slopes, sinks=sinks
    )
    cache = KvCacheOptions(
        k,
        v,
        rotary_cos,
        rotary_sin,
        rotary_seqlens,
        rotary_interleaved,
        cache_seqlens,
        cache_batch_idx,
        cache_leftpad,
        block_table,
        tree_mask,
        k_scale,
        v_scale,
        num_splits,
        split_size,
        head_dim_v,
    )
    outputs = OutputRequest(return_lse, out_dtype=out_dtype)
    return attend_with_kvcache((q, k_cache, v_cache), cache, options, outputs)


def attend_with_kvcache(
    tensors: tuple[Tensor, Tensor, Tensor | None],
    cache: KvCacheOptions,
    options: AttentionOptions,
    outputs: OutputRequest,
) -> Tensor | tuple[Tensor, Tensor]:
    q, k_cache, v_cache = tensors
    operation = _name(cache.cu_seqlens_q)
    check_tensor(operation, q)
    check_no_nested(operation, q=q, k_cache=k_cache, v_cache=v_cache)
    outputs = OutputRequest(outputs.return_lse, out_dtype=as_dtype(outputs.out_dtype))
    if not is_traced(q):
        return KvCacheCall(operation, tensors, cache, options, outputs).attend()
    check_values(operation, v_cache, cache)
    left, right = (-1 if bound is None else bound for bound in options.window_size)
    is_tensor = isinstance(cache.cache_seqlens, Tensor)
    given: dict[str, Any] = {
        "rotary_cos": cache.rotary_cos,
        "rotary_sin": cache.rotary_sin,
        "rotary_seqlens": cache.rotary_seqlens,
        "rotary_interleaved": cache.rotary_interleaved,
        "cache_seqlens": cache.cache_seqlens if is_tensor else None,
        "filled": None if is_tensor else cache.cache_seqlens,
        "cache_batch_idx": cache.cache_batch_idx,
        "cache_leftpad": cache.cache_leftpad,
        "block_table": cache.block_table,
        "softmax_scale": options.softmax_scale,
        "causal": options.causal,
        "window_left": left,
        "window_right": right,
        "softcap": options.softcap,
        "alibi_slopes": options.alibi_slopes,
        "sinks": options.sinks,
        "tree_mask": cache.tree_mask,
        "k_scale": cache.k_scale,
        "v_scale": cache.v_scale,
        "num_splits": cache.num_splits,
        "split_size": cache.split_size,
        "head_dim_v": cache.head_dim_v,
        "return_lse": outputs.return_lse,
        "out_dtype": outputs.out_dtype,
        "cu_seqlens_q": cache.cu_seqlens_q,
        "cu_seqlens_k_new": cache.cu_seqlens_k_new,
        "max_seqlen_q": cache.max_seqlen_q,
        "validate": cache.validate,
    }
    arguments = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "k": cache.k, "v": cache.v}
    _refuse_gradients(operation, {**arguments, **given})
    operator: Any = torch.ops.anyflash.attention_with_kvcache_
    if cache.k is None and cache.v is None:
        operator = torch.ops.anyflash.attention_with_kvcache
    if is_distributed(q):
        from anyflash.torch import _dtensor_kvcache

        out, lse = _dtensor_kvcache.attend(operation, arguments, given, operator)
    else:
        out, lse = operator(*arguments.values(), **given)
    return (out, lse) if outputs.return_lse else out
