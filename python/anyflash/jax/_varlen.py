"""anyflash.jax.attention_varlen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from jax import Array

from anyflash._call.options import (
    BLOCK_SIZE,
    NO_DROPOUT,
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    OutputRequest,
    Packing,
)
from anyflash._call.results import AttentionResult
from anyflash.jax._attend import attend
from anyflash.jax._context_parallel import Context

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyflash._api.keywords import (
        Plain,
        Unknown,
        WithDropoutMask,
        WithLse,
        WithMaxLogits,
        WithResult,
    )


@overload
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[Plain[Any, Any]],
) -> Array: ...
@overload
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[WithLse[Any, Any]],
) -> tuple[Array, Array]: ...
@overload
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[WithResult[Any, Any]],
) -> AttentionResult[Array]: ...
@overload
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[WithMaxLogits[Any, Any]],
) -> AttentionResult[Array]: ...
@overload
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[WithDropoutMask[Any, Any]],
) -> AttentionResult[Array]: ...
@overload
def attention_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    validate: bool = ...,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[Unknown[Any, Any]],
) -> Array | tuple[Array, Array] | AttentionResult[Array]: ...
def attention_varlen(  # noqa: PLR0917 (in the order that flash-attn has)
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Any = None,
    validate: bool = False,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = UNBOUNDED,
    softcap: float = NO_SOFTCAP,
    alibi_slopes: Any = None,
    bias: Any = None,
    block_mask: Any = None,
    block_size: tuple[int, int] = BLOCK_SIZE,
    key_ranges: Any = None,
    sinks: Any = None,
    dropout_p: float = NO_DROPOUT,
    seed: Any = None,
    rng_state: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_dropout_mask: bool = False,
    return_result: bool = False,
    out_dtype: Any = None,
    context_axis: str | None = None,
    method: str = "ring",
    layout: str = "contiguous",
) -> Array | tuple[Array, Array] | AttentionResult[Array]:
    """:func:`anyflash.attention_varlen` for JAX.

    As :func:`anyflash.jax.attention`; under jax.vmap it is a loop. Its heads may be sharded. With
    ``context_axis`` devices share all packed rows, and chunks may cut sequences.

    Parameters that are not listed are those of :func:`anyflash.attention_varlen` and
    :func:`anyflash.jax.attention`.

    Parameters
    ----------
    q : (total_q, heads, head_dim)
    k : (total_k, heads_k, head_dim)
    v : (total_k, heads_k, head_dim_v)
    cu_seqlens_q, cu_seqlens_k : (batch + 1,) int32
        They may be traced. The last one is total_q or total_k: make padding at the end a sequence
        of its own.
    max_seqlen_q, max_seqlen_k : int
        Upper bounds of the sequences' lengths, which XLA must know.
    validate : bool
        Check the lengths also on a GPU, which waits for it. On the CPU they are always checked.
    context_axis, method, layout
        As in :func:`anyflash.jax.attention`: q, k and v are a device's rows, ``cu_seqlens`` and
        ``key_ranges`` the whole's. Then there is no ``bias`` and no ``block_mask``, and no dropout
        with method "ring", whose chunks would cut the draws of eight keys.

    Returns
    -------
    out : (total_q, heads, head_dim_v)
    lse : (heads, total_q), float32, only with ``return_lse``
    AttentionResult
        Instead of both, where one is asked for.

    Raises
    ------
    TypeError, ValueError, NotImplementedError, jax.errors.JaxRuntimeError
        As :func:`anyflash.jax.attention`.

    Examples
    --------
    Sequences of 2, 0 and 3 tokens:

    >>> import jax
    >>> import jax.numpy as jnp
    >>> import anyflash.jax
    >>> q = jnp.ones((5, 2, 8))
    >>> ends = jnp.array([0, 2, 2, 5], jnp.int32)
    >>> @jax.jit
    ... def f(q, ends):
    ...     return anyflash.jax.attention_varlen(q, q, q, ends, ends, 3, 3, causal=True)
    >>> f(q, ends).shape
    (5, 2, 8)
    """
    options = AttentionOptions(
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        bias,
        block_mask,
        block_size,
        key_ranges,
        sinks,
        dropout_p,
        seed,
        rng_state,
        seqused_k,
    )
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
    outputs = OutputRequest(
        return_lse, return_max_logits, return_dropout_mask, return_result, out_dtype
    )
    context = Context(context_axis, method, layout)
    return attend((q, k, v), options, packing, outputs, deterministic, context=context)
