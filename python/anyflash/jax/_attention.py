"""anyflash.jax.attention."""

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
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[Plain[Any, Any]],
) -> Array: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[WithLse[Any, Any]],
) -> tuple[Array, Array]: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[WithResult[Any, Any]],
) -> AttentionResult[Array]: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[WithMaxLogits[Any, Any]],
) -> AttentionResult[Array]: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[WithDropoutMask[Any, Any]],
) -> AttentionResult[Array]: ...
@overload
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    deterministic: bool = ...,
    context_axis: str | None = ...,
    method: str = ...,
    layout: str = ...,
    **options: Unpack[Unknown[Any, Any]],
) -> Array | tuple[Array, Array] | AttentionResult[Array]: ...
def attention(
    q: Any,
    k: Any,
    v: Any,
    *,
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
    seqused_k: Any = None,
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
    """:func:`anyflash.attention` for JAX: compiled, differentiable and batched.

    It works within jax.jit, grad, vjp, vmap, lax.scan, checkpoint and shard_map. Gradients flow to
    q, k, v, a bias of numbers, sinks and alibi_slopes, from the output and from the LSE. Those of
    bias, sinks and slopes are computed only where they are wanted. Gradients of gradients are made
    of JAX's own operations: memory is then quadratic in the sequence lengths. There is no
    forward-mode derivative (jax.jvp, jax.jacfwd).

    jax.vmap folds its axis into the batch. It is a loop with dropout, so that every part drops what
    it would drop alone, with mapped sinks, and for gradients that the batch shares.

    Arrays that are sharded over the batch or the heads stay where they are, also in the backward;
    nothing is gathered. Where the devices outnumber the key heads, shard q's heads and replicate k
    and v. A bias, sinks and slopes may be replicated; their gradients are summed over the devices.
    Dropout drops what it drops of the whole; within jax.shard_map a device counts its own part
    alone, and needs a seed of its own.

    A sequence stays on one device, unless ``context_axis`` names the axis of the mesh that shares
    it. The call is then within a jax.shard_map over all axes, and the results are those of the
    whole sequence for this device's rows. Dropout, too, drops what it drops of the whole, so that
    all devices of the axis need the same seed. Partial results are float32, or float64 of float64
    arrays; gradients of these are as exact as the float32 of the LSE, as on one device. There are
    then no gradients of gradients, and no jax.vmap.

    Parameters that are not listed are those of :func:`anyflash.attention`; arrays may be traced,
    numbers not. There, JAX's arrays on a GPU and tracers come here.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k : (batch, seqlen_k, heads_k, head_dim)
    v : (batch, seqlen_k, heads_k, head_dim_v)
        Arrays of JAX or NumPy. CPU: float64, float32, float16, bfloat16. CUDA: float16, bfloat16.
    seed : int, integer array of shape (), or key of jax.random, optional
        Where ``dropout_p`` is not 0, it or ``rng_state`` is needed: JAX has no global generator. A
        key's two words are a seed's: ``jax.random.key(7)`` drops what ``seed=7`` drops, in every
        framework. Arrays may be traced.
    rng_state : (seed, offset), or uint32 (4,), or int64 or uint64 (2,), optional
        In place of ``seed``. Four words of 32 bits are seed and offset, low words first: JAX has no
        integers of 64 bits unless ``jax_enable_x64`` is set.
    deterministic : bool
        Of the gradients, as in :func:`anyflash.attention_backward`.
    context_axis : str, optional
        The axis of the mesh that shares the sequence. Then q, k and v are a device's rows, of which
        all devices have as many. A bias has its rows, and all keys in the sequence's own order.
        ``block_mask``, ``key_ranges``, ``seqused_k``, ``sinks`` and ``alibi_slopes`` are the
        whole's, and so are ``max_logits``, on each device. There is no ``dropout_mask``.
    method : "ring", "gather" or "all_to_all"
        Ring: keys and values travel from device to device, and memory is linear in a device's
        rows; with dropout chunks are a multiple of 8 keys. Gather: every device gets all keys and
        values. All to all: rows are exchanged for heads, which the devices divide; where there are
        fewer key heads, these divide the devices. Chunks are whole blocks of a ``block_mask``.
    layout : "contiguous" or "zigzag"
        Which rows a device has: its part of the sequence, or of the sequence in the order of
        :func:`zigzag_order`, with which all have the same work under a causal mask.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
    lse : (batch, heads, seqlen_q), float32, only with ``return_lse``
    AttentionResult
        Instead of both, where one is asked for; ``rng_state`` is uint32 (4,). ``max_logits`` and
        ``dropout_mask`` have no gradient.

    Raises
    ------
    TypeError, ValueError
        As :func:`anyflash.attention`, when the call is traced. Lengths or heads that ``layout`` or
        ``method`` cannot share.
    NameError
        ``context_axis`` is no axis of a jax.shard_map around the call.
    NotImplementedError
        This build has no XLA handlers; a mesh, or a jax.shard_map, that leaves some of its axes to
        the compiler. With ``context_axis``: results, transforms or options that are not supported.
    jax.errors.JaxRuntimeError
        When the call is compiled: shardings that would need a gather, where the compiler made them.
        Where types have them, it is a ValueError.

        When the work runs: lengths that do not fit (on the CPU). On a GPU: no code for it, or a
        dtype or head dim that its kernels do not take.

    Examples
    --------
    >>> import jax
    >>> import jax.numpy as jnp
    >>> import anyflash.jax
    >>> q = jax.random.normal(jax.random.key(0), (2, 6, 4, 8))
    >>> @jax.jit
    ... def loss(q, bias):
    ...     out, lse = anyflash.jax.attention(q, q, q, bias=bias, causal=True, return_lse=True)
    ...     return out.sum() + lse.sum()
    >>> dq, dbias = jax.grad(loss, argnums=(0, 1))(q, jnp.zeros((4, 6, 6)))
    >>> dq.shape, dbias.shape
    ((2, 6, 4, 8), (4, 6, 6))

    Dropout, and a batch of batches:

    >>> out = anyflash.jax.attention(q, q, q, dropout_p=0.5, seed=jax.random.key(1))
    >>> jax.vmap(anyflash.jax.attention)(*[jnp.stack([q, q, q])] * 3).shape
    (3, 2, 6, 4, 8)

    A sequence that devices share, here one:

    >>> from functools import partial
    >>> from jax.sharding import AxisType, PartitionSpec
    >>> mesh = jax.make_mesh((1,), ("cp",), axis_types=(AxisType.Auto,))
    >>> rows = PartitionSpec(None, "cp")
    >>> of_rows = partial(anyflash.jax.attention, context_axis="cp", causal=True)
    >>> shared = jax.shard_map(of_rows, mesh=mesh, in_specs=rows, out_specs=rows)
    >>> jax.jit(shared)(q, q, q).shape
    (2, 6, 4, 8)

    To export a function, allow its custom call; who runs it must have imported this module. For
    several devices, JAX exports it only within jax.shard_map:

    >>> from jax import export
    >>> allowed = [export.DisabledSafetyCheck.custom_call("anyflash_forward")]
    >>> exported = export.export(jax.jit(anyflash.jax.attention), disabled_checks=allowed)(q, q, q)
    >>> exported.call(q, q, q).shape
    (2, 6, 4, 8)
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
    outputs = OutputRequest(
        return_lse, return_max_logits, return_dropout_mask, return_result, out_dtype
    )
    context = Context(context_axis, method, layout)
    return attend((q, k, v), options, None, outputs, deterministic, context=context)
