"""anyflash.jax.attention_varlen_with_kvcache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, overload

import jax

from anyflash._call.kvcache import check_packed
from anyflash._call.options import (
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    KvCacheOptions,
    OutputRequest,
)
from anyflash.jax._kvcache import attend_with_kvcache

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyflash._api.keywords import VarlenKvCacheKeywords


@overload
def attention_varlen_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cu_seqlens_q: Any,
    k: None = ...,
    v: None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[VarlenKvCacheKeywords[Any]],
) -> jax.Array: ...
@overload
def attention_varlen_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cu_seqlens_q: Any,
    k: Any = ...,
    v: Any = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[VarlenKvCacheKeywords[Any]],
) -> jax.Array | tuple[jax.Array, ...]: ...
def attention_varlen_with_kvcache(  # noqa: PLR0917 (as attention_varlen and attention_with_kvcache)
    q: Any,
    k_cache: Any,
    v_cache: Any,
    cu_seqlens_q: Any,
    k: Any = None,
    v: Any = None,
    *,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    validate: bool = False,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    rotary_seqlens: Any = None,
    rotary_interleaved: bool = True,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Any = None,
    sinks: Any = None,
    tree_mask: Any = None,
    k_scale: Any = None,
    v_scale: Any = None,
    num_splits: int = 0,
    split_size: int | None = None,
    head_dim_v: int | None = None,
    return_lse: bool = False,
    out_dtype: Any = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """:func:`anyflash.attention_varlen_with_kvcache` for JAX, which returns the caches it has
    appended to.

    As :func:`attention_with_kvcache`; the heads alone may be sharded.

    Parameters that are not listed are those of :func:`anyflash.attention_varlen_with_kvcache`.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k_cache : (cache_batch, capacity, heads_k, head_dim), or pages with ``block_table``
    v_cache : (cache_batch, capacity, heads_k, head_dim_v), or pages; or None, with ``head_dim_v``
    cu_seqlens_q, cu_seqlens_k_new : (batch + 1,) int32
        They may be traced. The last one is total_q, or total_new: make padding at the end a
        sequence of its own.
    k, v : (total_new, heads_k, head_dim or head_dim_v), optional

    Returns
    -------
    out : (total_q, heads, head_dim_v)
    lse : (heads, total_q), float32, only with ``return_lse``
    k_cache, v_cache
        Only where ``k`` is given, as for :func:`attention_with_kvcache`.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError
        As :func:`attention_with_kvcache`.

    Examples
    --------
    A prompt of three tokens beside a single one:

    >>> import jax.numpy as jnp
    >>> import anyflash.jax
    >>> q, k = jnp.ones((4, 4, 16)), jnp.ones((4, 2, 16))
    >>> k_cache, v_cache = jnp.zeros((2, 8, 2, 16)), jnp.zeros((2, 8, 2, 16))
    >>> out, k_cache, v_cache = anyflash.jax.attention_varlen_with_kvcache(
    ...     q, k_cache, v_cache, jnp.array([0, 3, 4], jnp.int32), k, k,
    ...     cache_seqlens=jnp.array([0, 5], jnp.int32), causal=True,
    ... )
    >>> out.shape, int(k_cache[0, :3].sum()), int(k_cache[1, 5].sum())
    ((4, 4, 16), 96, 32)
    """
    check_packed("anyflash.jax.attention_varlen_with_kvcache", cu_seqlens_q)
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
        cu_seqlens_q,
        cu_seqlens_k_new,
        max_seqlen_q,
        validate,
    )
    outputs = OutputRequest(return_lse, out_dtype=out_dtype)
    return attend_with_kvcache((q, k_cache, v_cache), cache, options, outputs)
