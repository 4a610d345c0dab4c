"""anyflash.jax.attention_with_kvcache."""

from __future__ import annotations

import functools
import numbers
from typing import TYPE_CHECKING, Any, Literal, overload

import jax
import jax.numpy as jnp

from anyflash._call import parsing
from anyflash._call.kvcache import check_values
from anyflash._call.options import (
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    KvCacheOptions,
    OutputRequest,
)
from anyflash.jax import _ffi, _vmap
from anyflash.jax._call import Call
from anyflash.jax._divide import Divided
from anyflash.jax._ffi import Arrays
from anyflash.jax._operations import FLOAT32, Settings, struct
from anyflash.jax._partition import CACHES

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyflash._api.keywords import KvCacheKeywords


@overload
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: None = ...,
    v: None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[KvCacheKeywords[Any]],
) -> jax.Array: ...
@overload
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: None = ...,
    v: None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[KvCacheKeywords[Any]],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: None,
    k: Any,
    v: None = ...,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[KvCacheKeywords[Any]],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: None,
    k: Any,
    v: None = ...,
    *,
    return_lse: Literal[True],
    **options: Unpack[KvCacheKeywords[Any]],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[KvCacheKeywords[Any]],
) -> tuple[jax.Array, jax.Array, jax.Array]: ...
@overload
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    *,
    return_lse: Literal[True],
    **options: Unpack[KvCacheKeywords[Any]],
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]: ...
@overload
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = ...,
    v: Any = ...,
    *,
    return_lse: bool = ...,
    **options: Unpack[KvCacheKeywords[Any]],
) -> jax.Array | tuple[jax.Array, ...]: ...
def attention_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
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
    """:func:`anyflash.attention_with_kvcache` for JAX, which returns the caches it has appended to.

    JAX's arrays are immutable: where ``k`` is given, the result holds the new caches. Within
    jax.jit they are the old ones, updated in place, if these are donated to the compiled function.
    So they are if made in it, as the carry of a jax.lax.scan is. Else XLA copies the caches first.
    There is no
    derivative. Under jax.vmap it is a loop.

    Arrays that are sharded over the batch or the heads stay where they are, caches included: each
    device appends to its own. Heads of the caches lie where q's do; a single one may be replicated.
    Pages, and places by ``cache_batch_idx``, belong to the whole batch: where that is sharded they
    are replicated, and only read.

    Parameters that are not listed are those of :func:`anyflash.attention_with_kvcache`. There,
    JAX's arrays on a GPU and tracers come here.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k_cache : (cache_batch, capacity, heads_k, head_dim), or pages with ``block_table``
    v_cache : (cache_batch, capacity, heads_k, head_dim_v), or pages; or None, with ``head_dim_v``
        Arrays of JAX or NumPy, which are not written.
    cache_seqlens : (batch,) int32, or int, optional
        Rows of the caches that are filled, before the call. The array may be traced.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
    lse : (batch, heads, seqlen_q), float32, only with ``return_lse``
    k_cache, v_cache
        Only where ``k`` is given: ``(out, k_cache, v_cache)``, or ``(out, lse, k_cache, v_cache)``;
        with ``head_dim_v`` without v_cache.

    Raises
    ------
    TypeError, ValueError
        As :func:`anyflash.attention_with_kvcache`, when the call is traced.
    NotImplementedError
        It is differentiated, or this build has no XLA handlers.
    jax.errors.JaxRuntimeError
        When the work runs: lengths that do not fit (on the CPU), or a GPU that this build has no
        code for.

    Examples
    --------
    A step of generation that updates its caches in place:

    >>> import functools
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import anyflash.jax
    >>> @functools.partial(jax.jit, donate_argnames=("k_cache", "v_cache"))
    ... def step(q, k, v, k_cache, v_cache, lengths):
    ...     return anyflash.jax.attention_with_kvcache(
    ...         q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=True
    ...     )
    >>> q, k, v = jnp.ones((2, 1, 4, 16)), jnp.ones((2, 1, 2, 16)), jnp.ones((2, 1, 2, 16))
    >>> k_cache, v_cache = jnp.zeros((2, 8, 2, 16)), jnp.zeros((2, 8, 2, 16))
    >>> out, k_cache, v_cache = step(q, k, v, k_cache, v_cache, jnp.array([3, 5]))
    >>> out.shape, int(k_cache[0, 3].sum()), int(k_cache[1, 5].sum())
    ((2, 1, 4, 16), 32, 32)
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
    tensors: tuple[Any, Any, Any],
    cache: KvCacheOptions,
    options: AttentionOptions,
    outputs: OutputRequest,
) -> jax.Array | tuple[jax.Array, ...]:
    given = dict(zip(("q", *CACHES), tensors, strict=True))
    packed = cache.cu_seqlens_q is not None
    name = "attention_varlen_with_kvcache" if packed else "attention_with_kvcache"
    call = Call(f"anyflash.jax.{name}", **given)
    check_values(call.operation, given["v_cache"], cache)
    call.scores(options)
    if packed:
        call.check_rank(("q",), 3, "(total_q, heads, head_dim)")
        _pack(call, cache)
    names = ["k_cache"] if packed else ["q", "k_cache"]
    names += ["v_cache"] if "v_cache" in call.arrays else []
    call.check_rank(tuple(names), 4, "(batch, seqlen, heads, head_dim)")
    if cache.head_dim_v is not None:
        columns = call.arrays["k_cache"].shape[3]
        head_dim_v = call.parse("head_dim_v", parsing.columns, cache.head_dim_v, columns)
        call.numbers["head_dim_v"] = head_dim_v
    call.array("cache_batch_idx", cache.cache_batch_idx)
    call.array("cache_leftpad", cache.cache_leftpad)
    call.array("block_table", cache.block_table)
    call.array("k_new", cache.k, argument="k")
    call.array("v_new", cache.v, argument="v")
    call.array("rotary_cos", cache.rotary_cos)
    call.array("rotary_sin", cache.rotary_sin)
    call.array("rotary_seqlens", cache.rotary_seqlens)
    call.array("tree_mask", cache.tree_mask)
    call.array("k_scale", cache.k_scale)
    call.array("v_scale", cache.v_scale)
    call.array("cache_seqlens", _seqlens(call, cache.cache_seqlens))
    call.numbers["rotary_interleaved"], return_lse = parsing.flags(
        call.operation,
        rotary_interleaved=cache.rotary_interleaved,
        return_lse=outputs.return_lse,
    )
    call.numbers["num_splits"] = call.parse("num_splits", parsing.integer, cache.num_splits)
    if cache.split_size is not None:
        call.numbers["split_size"] = call.parse("split_size", parsing.integer, cache.split_size)
    appends = cache.k is not None or cache.v is not None
    return _attend(call, return_lse, outputs.out_dtype, appends)


def _pack(call: Call, cache: KvCacheOptions) -> None:
    """Sequences have different numbers of queries."""
    call.array("cu_seqlens_q", cache.cu_seqlens_q)
    call.array("cu_seqlens_k_new", cache.cu_seqlens_k_new)
    shape = tuple(call.arrays["cu_seqlens_q"].shape)
    if len(shape) != 1 or shape[0] < 1:
        raise ValueError(f"{call.operation}: cu_seqlens_q has shape {shape}; expected (batch + 1,)")
    if cache.max_seqlen_q is not None:
        longest = call.parse("max_seqlen_q", parsing.length, cache.max_seqlen_q)
        call.numbers["max_seqlen_q"] = longest
    (call.numbers["validate"],) = parsing.flags(call.operation, validate=cache.validate)


def _seqlens(call: Call, cache_seqlens: Any) -> Any:
    """An int is that of all sequences."""
    if not isinstance(cache_seqlens, numbers.Integral):
        return cache_seqlens
    filled = call.parse("cache_seqlens", parsing.length, cache_seqlens)
    ends = call.arrays.get("cu_seqlens_q")
    new = (
        call.arrays.get("k_new") if ends is None else None
    )  # packed, lengths are known to JAX only
    shapes = (None if x is None else x.shape for x in (call.arrays.get("block_table"), new))
    call.parse("cache_seqlens", parsing.check_room, filled, call.arrays["k_cache"].shape, *shapes)
    batch = call.arrays["q"].shape[0] if ends is None else ends.shape[0] - 1
    return jnp.full((batch,), filled, jnp.int32)


def _attend(
    call: Call, return_lse: Any, out_dtype: Any, appends: bool
) -> jax.Array | tuple[jax.Array, ...]:
    q, k_cache = call.arrays["q"], call.arrays["k_cache"]
    written = (name for name in CACHES if appends and name in call.arrays)
    names = ("out", *(("lse",) if return_lse else ()), *written)
    settings = call.settings(names, (q.shape[-3], k_cache.shape[1]), out_dtype, False)
    shapes = _results(settings, call.arrays)
    _ffi.check(call.operation, "forward_with_kvcache", call.arrays | shapes, settings.numbers)
    results = _without_derivative(settings, _ffi.vary_alike(call.arrays))
    given = tuple(results[name] for name in names)
    return given if len(given) > 1 else given[0]


def _results(settings: Settings, operands: Arrays) -> Arrays:
    q, numbers = operands["q"], dict(settings.numbers)
    columns = numbers.get("head_dim_v") or operands["v_cache"].shape[-1]
    kinds = {
        "out": ((*q.shape[:-1], columns), settings.out_dtype),
        "lse": ((*q.shape[:-3], q.shape[-2], q.shape[-3]), FLOAT32),
    }
    caches = (name for name in CACHES if name in operands)
    kinds |= {name: (operands[name].shape, operands[name].dtype) for name in caches}
    return {name: struct(*kinds[name]) for name in settings.results}


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(settings: Settings, operands: Arrays) -> Arrays:
    names = settings.results

    def run(operands: Arrays, *_: Any) -> Arrays:
        return _ffi.call(
            settings.operation,
            "forward_with_kvcache",
            settings.numbers,
            operands,
            _results(settings, operands),
            {name: name for name in CACHES if name in names},
        )

    @jax.custom_batching.custom_vmap
    def call(operands: Arrays) -> Arrays:
        return Divided(settings.operation, run, operands, _results(settings, operands), 0)()

    @call.def_vmap
    def _(size: int, batched: Any, operands: Arrays) -> tuple[Arrays, Any]:
        again = functools.partial(_run, settings)
        return _vmap.loop(again, batched[0], operands), dict.fromkeys(names, True)

    result: Arrays = call(operands)
    return result


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_derivative(settings: Settings, operands: Arrays) -> Arrays:
    result: Arrays = _run(settings, operands)
    return result


@_without_derivative.defjvp
def _(settings: Settings, *_: Any) -> Any:
    raise NotImplementedError(
        f"{settings.operation}: attention with a KV cache has no derivative; use "
        "jax.lax.stop_gradient on the arrays, or anyflash.jax.attention"
    )
