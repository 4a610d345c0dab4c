"""anyflash.attention: arrays in, arrays of the same kind out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, overload

from anyflash._call.dispatch import adapter_of, fast_path_of, refuse
from anyflash._call.forward import Forward
from anyflash._call.options import (
    BLOCK_SIZE,
    NO_DROPOUT,
    NO_SOFTCAP,
    OUTPUT_ALONE,
    UNBOUNDED,
    OutputRequest,
    Part,
    given_options,
    plain_options,
)
from anyflash._call.results import ArrayT, AttentionResult

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
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[Plain[Any, int]],
) -> ArrayT: ...
@overload
def attention(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[WithLse[Any, int]],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[WithResult[Any, int]],
) -> AttentionResult[ArrayT]: ...
@overload
def attention(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[WithMaxLogits[Any, int]],
) -> AttentionResult[ArrayT]: ...
@overload
def attention(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[WithDropoutMask[Any, int]],
) -> AttentionResult[ArrayT]: ...
@overload
def attention(
    q: ArrayT,
    k: Any,
    v: Any,
    *,
    part: Part | None = ...,
    out: Any = ...,
    lse: Any = ...,
    prior: tuple[Any, Any] | None = ...,
    stream: int | None = ...,
    **options: Unpack[Unknown[Any, int]],
) -> ArrayT | tuple[ArrayT, ArrayT] | AttentionResult[ArrayT]: ...
def attention(
    q: ArrayT,
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
    seed: int | None = None,
    rng_state: Any = None,
    seqused_k: Any = None,
    part: Part | None = None,
    return_lse: bool = False,
    return_max_logits: bool = False,
    return_dropout_mask: bool = False,
    return_result: bool = False,
    out: Any = None,
    out_dtype: Any = None,
    lse: Any = None,
    prior: tuple[Any, Any] | None = None,
    stream: int | None = None,
) -> ArrayT | tuple[ArrayT, ArrayT] | AttentionResult[ArrayT]:
    """Exact attention, ``softmax(softmax_scale * q k^T) v``, without a matrix of scores in memory.

    FlashAttention-2 (Dao, arXiv 2307.08691): tiles with an online softmax; memory is linear in the
    sequence lengths. All options combine. The score of query i and key j is made in this order::

        s = softmax_scale * q_i.k_j
        s = softcap * tanh(s / softcap)                             # if softcap > 0
        s = s + bias_ij - alibi_slope * |i + seqlen_k - seqlen_q - j|
        s = -inf where a mask hides j from i
        p = exp(s) / (exp(sink) + sum_j exp(s))
        p = 0 with probability dropout_p, else p / (1 - dropout_p)

    NaN and infinity in keys and values reach only the queries that see them.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
    k : (batch, seqlen_k, heads_k, head_dim)
    v : (batch, seqlen_k, heads_k, head_dim_v)
        Arrays of one framework (NumPy, PyTorch, JAX on the CPU, CuPy, or any object that speaks
        DLPack), one dtype and one device. The work is done there, and all arrays below must be
        there, too. ``heads_k`` divides ``heads``: each K/V head serves ``heads / heads_k``
        consecutive query heads (GQA, MQA).
        CPU: float64, float32, float16, bfloat16 (NumPy: of ml_dtypes), any head dim, any strides.
        CUDA: float16, bfloat16, head dims up to 512; arrays whose last axis is not contiguous, or
        whose rows do not begin at multiples of 16 bytes, are copied first.
    softmax_scale : float, optional
        Any finite number up to half of float32's range (float64: of float64's); default
        ``1 / sqrt(head_dim)``.
    causal : bool
        Query i sees the keys ``j <= i + seqlen_k - seqlen_q`` (aligned at the bottom right).
    window_size : (left, right)
        Query i sees ``i + seqlen_k - seqlen_q - left <= j <= i + seqlen_k - seqlen_q + right``;
        -1 or None: no bound on that side. With ``causal``, right is 0.
    softcap : float
        0: none.
    alibi_slopes : (heads,) or (batch or 1, heads), optional
        ALiBi (Press et al., arXiv 2108.12409). float32, float16, bfloat16; CPU also float64.
    bias : (batch or 1, heads or 1, seqlen_q or 1, seqlen_k or 1), optional
        Numbers (dtypes as for alibi_slopes) are added to the scores; bool: True keeps the key. A
        score of -inf hides the key, too. Missing leading axes and axes of extent 1 are broadcast;
        any strides, also 0; nothing is copied.
    block_mask : (batch or 1, heads or 1, query blocks, key blocks) bool, optional
        True keeps a block of scores, whole; the others are skipped. Missing leading axes are
        broadcast. :func:`create_block_mask` makes one.
    block_size : (queries, keys)
        Of a block of ``block_mask``: multiples of 64.
    key_ranges : (batch or 1, heads_k or 1, seqlen_k, 2 or 4) int32, optional
        Key j is seen by the queries ``a <= i < b`` with ``a, b = key_ranges[..., j, :]``, or where
        it has four numbers, also by ``c <= i < d``: a mask of documents, trees or prefixes in O(S)
        memory. Tiles that no query sees are skipped. Any numbers are allowed; an interval without
        queries is empty. Queries count from the first, whatever the lengths, and in a ``part`` from
        the whole's first. :func:`create_key_ranges` makes them.
    sinks : (heads,), optional
        A logit that takes part in the denominator only. dtypes as for alibi_slopes.
    dropout_p : float
        0 <= dropout_p < 1, rounded to a multiple of 2**-16, at most 1 - 2**-16. What is dropped
        follows from seed, offset, batch, head, row and column alone, the same on every device.
    seed : int, optional
        0 to 2**64 - 1. Where neither it nor ``rng_state`` is given, one is drawn from the
        framework's default generator, so that ``torch.manual_seed`` and ``numpy.random.seed``
        make runs repeatable. JAX has none and needs one of the two. For others it is random.
    rng_state : (seed, offset) or contiguous array of (2,) int64 or uint64, optional
        In place of ``seed``. An array is read on the device when the work runs: a CUDA graph that
        is replayed sees what it then holds.
    seqused_k : (batch,) int32, contiguous, optional
        Of a sequence's keys only so many, the first ones, are used. Masks and ALiBi are aligned
        with the last of them.
    part : Part, optional
        The call computes a part of a larger attention: :class:`Part` says which rows, keys and
        heads of it. Masks, ALiBi and dropout are the whole's, bias and block_mask are the part's,
        and key_ranges those of its keys.
    return_lse : bool
        Return ``(out, lse)``.
    return_max_logits, return_dropout_mask : bool
        Fill these fields of the :class:`AttentionResult`; imply ``return_result``.
    return_result : bool
        Return an :class:`AttentionResult`, with ``lse``.
    out : array, optional
        Where to write the result: shape (batch, seqlen_q, heads, head_dim_v), q's dtype or float32,
        q's device. It must not overlap an input or ``lse``.
    out_dtype : optional
        "float32" (or the framework's dtype): the result is not rounded to q's dtype, as is wanted
        for parts that are joined.
    lse : array, optional
        Where to write the LSE, whether or not it is returned: (batch, heads, seqlen_q) float32 (CPU
        also float64), q's device. It must not overlap an input.
    prior : (out, lse), optional
        Result and LSE of the same queries over other keys, in float32 (CPU also float64): the
        results are joined with them as :func:`merge_states` does, in one pass. They may be ``out``
        and ``lse``, which are then a state that call after call continues, with 0 where no key has
        been seen. A sink counts in each call that has it.
    stream : int, optional
        CUDA: the address of a ``cudaStream_t`` to run on; default: the framework's current stream.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
        Type, dtype and device of q; an :class:`anyflash.Array` for other DLPack producers. A query
        that sees no key gives 0.
    lse : (batch, heads, seqlen_q), float32, only with ``return_lse``
        Natural logarithm of the softmax's denominator, scale and sink included, before dropout;
        where no key is seen -inf, or the sink.
    AttentionResult
        Instead of both, where one is asked for.

    Raises
    ------
    TypeError
        A dtype, array type or argument type that is not allowed.
    ValueError
        Shapes, devices or numbers that do not fit. Nothing has been written.
    NotImplementedError
        Inputs that require gradients (:func:`attention_backward` computes them) or are traced, or a
        GPU that this build has no code for.

    Examples
    --------
    >>> import numpy as np
    >>> import anyflash
    >>> q = np.ones((1, 4, 2, 8), np.float32)
    >>> anyflash.attention(q, q, q, causal=True).shape
    (1, 4, 2, 8)

    A window of three keys, ALiBi, and the last key hidden from all queries:

    >>> slopes = np.array([0.5, 0.25], np.float32)
    >>> keep = np.array([True, True, True, False])
    >>> out, lse = anyflash.attention(
    ...     q, q, q, window_size=(2, 0), alibi_slopes=slopes, bias=keep, return_lse=True
    ... )
    >>> out.shape, lse.shape
    ((1, 4, 2, 8), (1, 2, 4))

    The keys in two parts, the second of which continues the first:

    >>> state = anyflash.attention(q, q[:, :1], q[:, :1], return_lse=True)
    >>> out = anyflash.attention(q, q[:, 1:], q[:, 1:], prior=state, out=state[0], lse=state[1])
    >>> out is state[0], bool(np.allclose(out, anyflash.attention(q, q, q)))
    (True, True)

    Dropout that can be repeated:

    >>> result = anyflash.attention(q, q, q, dropout_p=0.5, seed=7, return_dropout_mask=True)
    >>> result.rng_state, result.dropout_mask.shape
    ((7, 0), (1, 2, 4, 4))
    >>> again = anyflash.attention(q, q, q, dropout_p=0.5, rng_state=result.rng_state)
    >>> bool((again == result.out).all())
    True
    """
    # A small call takes 3 us: what is left at its default is not read.
    options = None
    if not (
        window_size is UNBOUNDED
        and softcap is NO_SOFTCAP
        and dropout_p is NO_DROPOUT
        and alibi_slopes is None
        and bias is None
        and block_mask is None
        and key_ranges is None
        and sinks is None
        and seed is None
        and rng_state is None
        and seqused_k is None
        and part is None
    ):
        options = given_options(
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
    # Whether anyflash makes all that is written.
    inside = out is None and lse is None and stream is None and prior is None
    plain = (
        inside
        and out_dtype is None
        and return_max_logits is False
        and return_dropout_mask is False
        and return_result is False
    )
    if plain and options is None:
        attend = fast_path_of(q)
        if attend is not None:
            result: ArrayT | tuple[ArrayT, ArrayT] | None = attend(
                "anyflash.attention", q, k, v, softmax_scale, causal, return_lse
            )
            if result is not None:
                return result
    if options is None:
        options = plain_options(softmax_scale, causal)
    outputs = (
        OUTPUT_ALONE
        if plain and return_lse is False
        else OutputRequest(
            return_lse,
            return_max_logits,
            return_dropout_mask,
            return_result,
            out_dtype,
            out,
            stream,
            lse,
            prior,
        )
    )
    tensors = (q, k, v)
    adapter = adapter_of(q, k, v, bias, sinks, alibi_slopes, autocast=inside)
    if adapter is not None:
        refuse("anyflash.attention", out=out, lse=lse, prior=prior, stream=stream, part=part)
        return adapter.attend(tensors, options, None, outputs)
    return Forward("anyflash.attention", tensors, options).run(outputs)
