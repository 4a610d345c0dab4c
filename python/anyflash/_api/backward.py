"""anyflash.attention_backward and its packed twin: gradients without an autograd."""

from __future__ import annotations

from typing import Any

from anyflash._call.backward import Backward
from anyflash._call.options import (
    BLOCK_SIZE,
    NO_DROPOUT,
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    GradientRequest,
    Packing,
    Part,
)
from anyflash._call.results import ArrayT, AttentionGrads


def attention_backward(  # noqa: PLR0917 (the order of flash-attn)
    dout: Any,
    q: ArrayT,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    seed: int | None = None,
    rng_state: Any = None,
    seqused_k: Any = None,
    part: Part | None = None,
    dlse: Any = None,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dalibi_slopes: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    grad_dtype: Any = None,
    accumulate_dq: bool = False,
    accumulate_dkv: bool = False,
    stream: int | None = None,
) -> AttentionGrads[ArrayT]:
    """Gradients of a number L, given ``dout``, its gradient with respect to attention's output.

    FlashAttention-2 (Dao, arXiv 2307.08691, section 3.1.2): the probabilities are made again, tile
    by tile, from q, k and the LSE; memory is linear in the sequence lengths. With S the scores
    before the softmax, as :func:`attention` makes them, and kept what dropout multiplies by::

        P  = exp(S - lse)        dV = (P * kept)^T dO      dP = kept * (dO V^T)
        dS = P * (dP - delta)    delta = rowsum(dO * out) - dlse
        dQ = softmax_scale * dS K      dK = softmax_scale * dS^T Q

    and with ``softcap``, dQ and dK take dS times the slope of the tanh. Queries that see no key,
    keys that no query sees, and what a mask hides give 0, whatever NaN and infinity is there.

    Parameters
    ----------
    dout : (batch, seqlen_q, heads, head_dim_v)
        q's dtype or float32; any strides, also 0.
    q : (batch, seqlen_q, heads, head_dim)
    k : (batch, seqlen_k, heads_k, head_dim)
    v : (batch, seqlen_k, heads_k, head_dim_v)
        What the forward was given: frameworks, dtypes, devices and strides as for
        :func:`attention`, all arrays of one framework and on one device.
    out : (batch, seqlen_q, heads, head_dim_v)
        The forward's result, q's dtype or float32.
    lse : (batch, heads, seqlen_q), float32
        The forward's ``lse``. -inf or +inf (flash-attn's convention): the row saw no key.
    softmax_scale, causal, window_size, softcap, alibi_slopes, bias, block_mask, block_size, \
key_ranges, sinks, seqused_k, part
        What the forward was given.
    dropout_p, seed, rng_state
        What the forward was given; where it drew the seed itself, ``rng_state`` of its
        :class:`AttentionResult`. With ``dropout_p`` one of the two must be given.
    dlse : (batch, heads, seqlen_q), float32, optional
        Gradient with respect to ``lse``; default: 0. Any strides, also 0.
    deterministic : bool
        The same bits in every run. On a GPU this costs time (7 matrix products instead of 5, no
        atomic additions); the CPU's gradients always are.
    return_dbias, return_dsinks, return_dalibi_slopes : bool
        Fill these fields of the result. ``dbias`` has bias's shape: a bias that is not broadcast
        has a gradient as large as the matrix of scores.
    dq, dk, dv : arrays, optional
        Where to write the gradients: shapes of q, k and v, all of q's dtype or all float32, q's
        device, any strides. They must not overlap one another or an input.
    grad_dtype : optional
        "float32" (or the framework's dtype): all gradients are float32, not rounded to their
        arrays' dtypes. Default: q's dtype, or that of ``dq``, ``dk``, ``dv``.
    accumulate_dq, accumulate_dkv : bool
        Add to ``dq``, or to ``dk`` and ``dv``, in place of overwriting them: float32 arrays (CPU:
        float64 ones with float64 inputs) that are given.
    stream : int, optional
        CUDA: the address of a ``cudaStream_t`` to run on; default: the framework's current stream.

    Returns
    -------
    AttentionGrads
        ``(dq, dk, dv, dbias, dsinks, dalibi_slopes)``, the last three None where not asked for. Of
        q's type and on its device, with the shapes and dtypes of their arrays; an
        :class:`anyflash.Array` each for other DLPack producers. ``dk`` and ``dv`` are summed in
        float32 (float64 on float64) over the query heads that share a K/V head.

    Raises
    ------
    TypeError
        A dtype, array type or argument type that is not allowed; ``return_dbias`` with a boolean
        bias.
    ValueError
        Shapes, devices or numbers that do not fit, the gradient of an array that is not given, or
        ``dropout_p`` without the forward's random state. Nothing has been written.
    NotImplementedError
        Inputs that require gradients or are traced, or a GPU that this build has no code for.

    Examples
    --------
    >>> import numpy as np
    >>> import anyflash
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 2, 8))
    >>> out, lse = anyflash.attention(q, k, v, causal=True, return_lse=True)
    >>> dout = np.ones_like(out)
    >>> dq, dk, dv, *_ = anyflash.attention_backward(dout, q, k, v, out, lse, causal=True)
    >>> dq.shape, dk.shape, dv.shape
    ((1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8))

    The last key is seen by the last query alone, and gets what its probability is of dout:

    >>> p = np.exp((q[0, 3, 0] @ k[0, 3, 0]) / 8**0.5 - lse[0, 0, 3])
    >>> bool(np.allclose(dv[0, 3, 0], p))
    True

    A bias that all heads and queries share, and dropout:

    >>> options = {"bias": np.zeros(4), "dropout_p": 0.5}
    >>> result = anyflash.attention(q, k, v, return_result=True, **options)
    >>> grads = anyflash.attention_backward(
    ...     dout, q, k, v, result.out, result.lse,
    ...     rng_state=result.rng_state, return_dbias=True, **options,
    ... )
    >>> grads.dbias.shape, grads.dsinks
    ((4,), None)
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
        part,
    )
    request = GradientRequest(
        deterministic,
        return_dbias,
        return_dsinks,
        return_dalibi_slopes,
        dq,
        dk,
        dv,
        grad_dtype,
        stream,
        accumulate_dq,
        accumulate_dkv,
    )
    call = Backward("anyflash.attention_backward", (q, k, v), options)
    return call.run(dout, out, lse, dlse, request)


def attention_varlen_backward(  # noqa: PLR0917 (the order of flash-attn)
    dout: Any,
    q: ArrayT,
    k: Any,
    v: Any,
    out: Any,
    lse: Any,
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
    seed: int | None = None,
    rng_state: Any = None,
    part: Part | None = None,
    dlse: Any = None,
    deterministic: bool = False,
    return_dbias: bool = False,
    return_dsinks: bool = False,
    return_dalibi_slopes: bool = False,
    dq: Any = None,
    dk: Any = None,
    dv: Any = None,
    grad_dtype: Any = None,
    accumulate_dq: bool = False,
    accumulate_dkv: bool = False,
    stream: int | None = None,
) -> AttentionGrads[ArrayT]:
    """:func:`attention_backward` over sequences of different lengths, packed without padding.

    A sequence's gradients have the same bits as alone or in any other batch. Those of bias, sinks
    and slopes are summed over the batch where these have no batch axis.

    Parameters that are not listed are those of :func:`attention_backward`, but for block_mask and
    key_ranges (as in :func:`attention_varlen`).

    Parameters
    ----------
    dout, out : (total_q, heads, head_dim_v)
    q : (total_q, heads, head_dim)
    k : (total_k, heads_k, head_dim)
    v : (total_k, heads_k, head_dim_v)
    lse, dlse : (heads, total_q), float32
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_k, validate
        As in :func:`attention_varlen`.
    bias : (batch or 1, heads or 1, max_seqlen_q or 1, max_seqlen_k or 1), optional
        ``dbias`` is 0 beyond a sequence's lengths.

    Returns
    -------
    AttentionGrads
        Of the shapes of q, k, v, bias, sinks and alibi_slopes.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention_backward`.

    Examples
    --------
    Three sequences of 2, 0 and 3 tokens, and a sink for each of two heads:

    >>> import numpy as np
    >>> import anyflash
    >>> q = np.ones((5, 2, 8), np.float32)
    >>> packing = np.array([0, 2, 2, 5], np.int32), np.array([0, 2, 2, 5], np.int32), 3, 3
    >>> sinks = np.zeros(2, np.float32)
    >>> out, lse = anyflash.attention_varlen(q, q, q, *packing, sinks=sinks, return_lse=True)
    >>> grads = anyflash.attention_varlen_backward(
    ...     np.ones_like(out), q, q, q, out, lse, *packing, sinks=sinks, return_dsinks=True
    ... )
    >>> grads.dq.shape, grads.dsinks.shape
    ((5, 2, 8), (2,))
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
        part,
    )
    packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, validate)
    request = GradientRequest(
        deterministic,
        return_dbias,
        return_dsinks,
        return_dalibi_slopes,
        dq,
        dk,
        dv,
        grad_dtype,
        stream,
        accumulate_dq,
        accumulate_dkv,
    )
    call = Backward("anyflash.attention_varlen_backward", (q, k, v), options, packing)
    return call.run(dout, out, lse, dlse, request)
