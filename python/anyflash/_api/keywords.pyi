"""Keyword arguments of attention, for the overloads that say what a call returns. For type checkers
alone: there is no such module."""

from typing import Any, Generic, Literal, TypeVar

from typing_extensions import Required, TypedDict

_X = TypeVar("_X")  # an array
_S = TypeVar("_S")  # a seed

class Keywords(TypedDict, Generic[_X, _S], total=False):
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int | None, int | None]
    softcap: float
    alibi_slopes: _X | None
    bias: _X | None
    block_mask: _X | None
    block_size: tuple[int, int]
    key_ranges: _X | None
    sinks: _X | None
    dropout_p: float
    seed: _S | None
    rng_state: _X | tuple[int, int] | None
    seqused_k: _X | None
    out_dtype: Any

class Plain(Keywords[_X, _S], Generic[_X, _S], total=False):
    """out"""

    return_lse: Literal[False]
    return_max_logits: Literal[False]
    return_dropout_mask: Literal[False]
    return_result: Literal[False]

class WithLse(Keywords[_X, _S], Generic[_X, _S], total=False):
    """(out, lse)"""

    return_lse: Required[Literal[True]]
    return_max_logits: Literal[False]
    return_dropout_mask: Literal[False]
    return_result: Literal[False]

class WithMaxLogits(Keywords[_X, _S], Generic[_X, _S], total=False):
    """AttentionResult"""

    return_lse: bool
    return_max_logits: Required[Literal[True]]
    return_dropout_mask: bool
    return_result: bool

class WithDropoutMask(Keywords[_X, _S], Generic[_X, _S], total=False):
    """AttentionResult"""

    return_lse: bool
    return_max_logits: bool
    return_dropout_mask: Required[Literal[True]]
    return_result: bool

class WithResult(Keywords[_X, _S], Generic[_X, _S], total=False):
    """AttentionResult"""

    return_lse: bool
    return_max_logits: bool
    return_dropout_mask: bool
    return_result: Required[Literal[True]]

class Unknown(Keywords[_X, _S], Generic[_X, _S], total=False):
    """One of these"""

    return_lse: bool
    return_max_logits: bool
    return_dropout_mask: bool
    return_result: bool

class KvCacheKeywords(TypedDict, Generic[_X], total=False):
    rotary_cos: _X | None
    rotary_sin: _X | None
    rotary_seqlens: _X | None
    rotary_interleaved: bool
    cache_seqlens: _X | int | None
    cache_batch_idx: _X | None
    cache_leftpad: _X | None
    block_table: _X | None
    softmax_scale: float | None
    causal: bool
    window_size: tuple[int | None, int | None]
    softcap: float
    alibi_slopes: _X | None
    sinks: _X | None
    tree_mask: _X | None
    k_scale: _X | None
    v_scale: _X | None
    num_splits: int
    split_size: int | None
    head_dim_v: int | None
    out_dtype: Any

class VarlenKvCacheKeywords(KvCacheKeywords[_X], Generic[_X], total=False):
    cu_seqlens_k_new: _X | None
    max_seqlen_q: int | None
    validate: bool
