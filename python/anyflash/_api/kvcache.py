"""anyflash.attention_with_kvcache: new queries against keys and values that are kept."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Literal, overload

from anyflash._call.dispatch import adapter_of, refuse
from anyflash._call.kvcache import KvCacheCall
from anyflash._call.options import (
    NO_SOFTCAP,
    UNBOUNDED,
    AttentionOptions,
    KvCacheOptions,
    OutputRequest,
)
from anyflash._call.results import ArrayT

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from anyflash._api.keywords import KvCacheKeywords


@overload
def attention_with_kvcache(
    q: ArrayT,
    k_cache: Any,
    v_cache: Any,
    k: Any = ...,
    v: Any = ...,
    *,
    return_lse: Literal[False] = ...,
    out: Any = ...,
    workspace: Any = ...,
    stream: int | None = ...,
    **options: Unpack[KvCacheKeywords[Any]],
) -> ArrayT: ...
@overload
def attention_with_kvcache(
    q: ArrayT,
    k_cache: Any,
    v_cache: Any,
    k: Any = ...,
    v: Any = ...,
    *,
    return_lse: Literal[True],
    out: Any = ...,
    workspace: Any = ...,
    stream: int | None = ...,
    **options: Unpack[KvCacheKeywords[Any]],
) -> tuple[ArrayT, ArrayT]: ...
@overload
def attention_with_kvcache(
    q: ArrayT,
    k_cache: Any,
    v_cache: Any,
    k: Any = ...,
    v: Any = ...,
    *,
    return_lse: bool = ...,
    out: Any = ...,
    workspace: Any = ...,
    stream: int | None = ...,
    **options: Unpack[KvCacheKeywords[Any]],
) -> ArrayT | tuple[ArrayT, ArrayT]: ...
def attention_with_kvcache(
    q: ArrayT,
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
    out: Any = None,
    out_dtype: Any = None,
    workspace: Any = None,
    stream: int | None = None,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    """Attention of new queries to a cache of keys and values, which new ones are appended to first.

    For generation, token by token or several at a time (prefill in chunks, speculation). The keys
    of a sequence are split over the processors, and the parts joined in float32 (Flash-Decoding,
    https://crfm.stanford.edu/2023/10/12/flashdecoding.html). All query heads that share a K/V head
    share one pass over it. Scores are made as in :func:`attention`, of which this is the result
    over each sequence's keys.

    Sequence b has ``n = cache_seqlens[b] - cache_leftpad[b]`` old keys, then the new ones, in all
    ``seqlen_k = n + seqlen_new``. Its last query is aligned with its last key. What is written is
    seen, also by this call.

    Integers in arrays are read on the device when the work runs: a CUDA graph that is replayed sees
    what they then hold. On a GPU they are clamped to what the arrays hold, so that no memory
    outside is touched; on the CPU wrong ones raise.

    Parameters
    ----------
    q : (batch, seqlen_q, heads, head_dim)
        Dtypes and devices as for :func:`attention`. All arrays belong to one framework and device.
    k_cache : (cache_batch, capacity, heads_k, head_dim)
    v_cache : (cache_batch, capacity, heads_k, head_dim_v); or None, with ``head_dim_v``
        With ``block_table``: (pages, page_size, heads_k, head_dim or head_dim_v), page_size a power
        of two. q's dtype, or int8, float8_e4m3fn or float8_e5m2 (NumPy: of ml_dtypes). Any strides,
        so that K and V may lie in one array. Written in place, but only if ``k`` is given: then
        they may neither be read-only nor of JAX. Rows that no query sees may hold anything.
    k : (batch, seqlen_new, heads_k, head_dim), optional
    v : (batch, seqlen_new, heads_k, head_dim_v), optional
        q's dtype. They become the cache's rows from ``cache_seqlens[b]`` on.
        ``cache_seqlens`` itself is not changed.
    rotary_cos, rotary_sin : (rows, rotary_dim / 2), optional
        Of the angles of each position, float32 or q's dtype. The first ``rotary_dim`` columns of q
        and k are rotated (rotary embedding, Su et al., arXiv 2104.09864), k before it is written.
        New key t is rotated by row ``n + t``, and query i by row ``n + i``. Without ``causal``
        and ``window_size`` all queries are rotated by row n. Need k.
    rotary_seqlens : (batch,) int32, optional
        The row that stands for n there, of each sequence: its first new key's. Default: n;
        ``cache_seqlens`` gives flash-attn's rotation, by the row in the cache, pad included.
    rotary_interleaved : bool
        A pair is columns 2 c and 2 c + 1 (GPT-J); False: c and c + rotary_dim / 2 (GPT-NeoX,
        Llama).
    cache_seqlens : (batch,) int32, or int, optional
        How many rows of the cache are filled, before the call; an int: of every sequence. Default:
        all. Needed where k is given.
    cache_batch_idx : (batch,) int32, optional
        The place of each sequence along the cache's first axis; default: its number. Not with
        ``block_table``.
    cache_leftpad : (batch,) int32, optional
        So many first rows are not used.
    block_table : (batch, pages of a sequence) int32, optional
        Row r of sequence b is row ``r % page_size`` of page ``block_table[b, r // page_size]``.
        Entries beyond a sequence's last row are not read.
    softmax_scale, causal, window_size, softcap, alibi_slopes, sinks
        As in :func:`attention`, aligned at each sequence's last key.
    tree_mask : (batch or 1, seqlen_q, seqlen_q) bool, optional
        Which of the last seqlen_q keys each query sees: the tokens of a tree of guesses, which are
        all appended, see their ancestors. A missing leading axis is broadcast.
    k_scale, v_scale : float32, optional
        Of a cache of 8 bits: a key is k_scale times what the cache holds. By head: (heads_k,); by
        page (place) and head: (k_cache.shape[0], heads_k); by row of the cache and head:
        (k_cache.shape[0], k_cache.shape[1], heads_k). What is appended, a rotated key rounded to
        q's dtype, is divided by the scale of its place. It is rounded to the nearest number, ties
        to even, and clamped to what the dtype holds; int8 gets 0 for NaN. Default: 1.
    num_splits : int
        So many parts; 0: chosen from the sizes.
    split_size : int, optional
        Keys of a part, a multiple of 64, in place of ``num_splits``; 0: as None. With it, or with
        ``num_splits=1``, a sequence's result does not depend on the batch: the same bits.
    head_dim_v : int, optional
        Latent attention (MLA of DeepSeek-V2, arXiv 2405.04434): the values are the first
        ``head_dim_v`` columns of k_cache, which is read once. Then ``v_cache``, ``v`` and
        ``v_scale`` are None: k and k_scale serve both. Columns of k that are rotated are so as
        values, too.
    return_lse : bool
        Return ``(out, lse)``.
    out, out_dtype, stream
        As in :func:`attention`.
    workspace : array of uint8, optional
        Contiguous memory on q's device, of at least :func:`kvcache_workspace_size` bytes, that
        nothing else uses meanwhile. Default: taken from the framework's allocator where needed.

    Returns
    -------
    out : (batch, seqlen_q, heads, head_dim_v)
        A query that sees no key gives 0.
    lse : (batch, heads, seqlen_q), float32, only with ``return_lse``
        Natural logarithm of the softmax's denominator, scale and sink included; where no key is
        seen -inf, or the sink. :func:`merge_states` joins it with attention to a shared prefix.

    Raises
    ------
    TypeError
        A dtype, array type or argument type that is not allowed; an immutable cache with k.
    ValueError
        Shapes, devices, lengths or numbers that do not fit. Nothing has been written.
    NotImplementedError
        Inputs that require gradients (there is no backward) or are traced, or a GPU that this
        build has no code for.

    Examples
    --------
    Two sequences of 3 and 5 tokens get one more; pages of 4 rows:

    >>> import numpy as np
    >>> import anyflash
    >>> k_cache, v_cache = np.zeros((2, 8, 4, 2, 16), np.float32)
    >>> table = np.array([[6, 0], [1, 3]], np.int32)
    >>> lengths = np.array([3, 5], np.int32)
    >>> q = np.ones((2, 1, 4, 16), np.float32)
    >>> k = v = np.ones((2, 1, 2, 16), np.float32)
    >>> out = anyflash.attention_with_kvcache(
    ...     q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
    ... )
    >>> out.shape
    (2, 1, 4, 16)
    >>> bool((k_cache[6, 3] == k[0, 0]).all() and (v_cache[3, 1] == v[1, 0]).all())
    True

    Latent attention, where 16 columns hold the values, too:

    >>> latent, q = np.ones((2, 8, 1, 24), np.float32), np.ones((2, 1, 4, 24), np.float32)
    >>> anyflash.attention_with_kvcache(q, latent, None, head_dim_v=16).shape
    (2, 1, 4, 16)
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
    outputs = OutputRequest(return_lse, out_dtype=out_dtype, out=out, stream=stream)
    name = "anyflash.attention_with_kvcache"
    tensors = (q, k_cache, v_cache)
    return attend_with_kvcache(name, tensors, cache, options, outputs, workspace=workspace)


def attend_with_kvcache(
    operation: str,
    tensors: tuple[ArrayT, Any, Any],
    cache: KvCacheOptions,
    options: AttentionOptions,
    outputs: OutputRequest,
    *,
    workspace: Any = None,
) -> ArrayT | tuple[ArrayT, ArrayT]:
    if (adapter := adapter_of(*tensors, cache.k, cache.v)) is not None:
        refuse(operation, out=outputs.out, stream=outputs.stream, workspace=workspace)
        result: ArrayT | tuple[ArrayT, ArrayT] = adapter.attend_with_kvcache(
            tensors, cache, options, outputs
        )
        return result
    return KvCacheCall(operation, tensors, cache, options, outputs, workspace=workspace).attend()


_SIGNATURE = inspect.signature(attention_with_kvcache)
_VARLEN = ("cu_seqlens_q", "cu_seqlens_k_new", "max_seqlen_q", "validate")


def kvcache_workspace_size(
    q: Any, k_cache: Any, v_cache: Any, k: Any = None, v: Any = None, **options: Any
) -> int:
    """Bytes of ``workspace`` that :func:`attention_with_kvcache` needs for the same arguments, or,
    with ``cu_seqlens_q`` among them, :func:`attention_varlen_with_kvcache`.

    For memory that is one's own, and the same in every step: in a CUDA graph, say. It counts for
    whatever the arrays hold, whatever lengths and pages they name; where sizes differ (of a batch
    that grows), the largest of several is needed. The memory need not be aligned.

    Parameters
    ----------
    q, k_cache, v_cache, k, v, options
        Those of :func:`attention_with_kvcache`. Nothing is read and nothing is written.

    Returns
    -------
    int
        0: no workspace is needed.

    Raises
    ------
    TypeError, ValueError, NotImplementedError
        As :func:`attention_with_kvcache`, but for what arrays of integers hold.

    Examples
    --------
    >>> import numpy as np
    >>> import anyflash
    >>> cache = np.zeros((1, 256, 2, 16), np.float32)
    >>> q = np.ones((1, 1, 4, 16), np.float32)
    >>> options = {"cache_seqlens": 100, "num_splits": 2}
    >>> size = anyflash.kvcache_workspace_size(q, cache, cache, **options)
    >>> memory = np.empty(size, np.uint8)
    >>> anyflash.attention_with_kvcache(q, cache, cache, workspace=memory, **options).shape
    (1, 1, 4, 16)
    """
    is_packed = options.get("cu_seqlens_q") is not None
    packing = {name: options.pop(name) for name in _VARLEN if is_packed and name in options}
    bound = _SIGNATURE.bind(q, k_cache, v_cache, k, v, **options)
    bound.apply_defaults()
    call = KvCacheCall.of("anyflash.kvcache_workspace_size", {**bound.arguments, **packing})
    return call.workspace_size()
