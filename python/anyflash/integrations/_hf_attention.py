"""The function that transformers' models call in place of their own attention."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from anyflash.integrations._hf_masks import is_traced, longest_sequence, pack, read_keys
from anyflash.torch import attention, attention_varlen, attention_with_kvcache

_logger: Any = import_module("transformers.utils.logging").get_logger(__name__)
_NAME = "anyflash.integrations.transformers"
_NOT_GIVEN = object()
# From here on, a block of queries fills the processors without the keys being split.
_MAX_DECODED = 16


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: Any = _NOT_GIVEN,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | None = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """For transformers' AttentionInterface.

    query (batch, heads, seqlen_q, head_dim), key, value (batch, heads_k, seqlen_k, head_dim): gives
    (batch, seqlen_q, heads, head_dim_v), and None for the weights, which are never made.
    """
    _check(others)
    states = (query, key, value)
    half = _half(module, query)
    if half is not None:
        states = (query.to(half), key.to(half), value.to(half))
    q, k, v = (x.transpose(1, 2) for x in states)
    numbers = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    drop = {"dropout_p": dropout} if dropout else {}
    mask = attention_mask
    if mask is not None and mask.ndim == 4:
        out = _masked(q, k, v, mask, position_bias, numbers, drop)
        return out if half is None else out.to(query.dtype), None

    causal = _is_causal(module, is_causal)
    if sliding_window is _NOT_GIVEN:
        sliding_window = _own_window(module) if causal else None
    if sliding_window is not None and sliding_window < k.shape[1]:
        # transformers counts the query itself.
        numbers["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    numbers["causal"] = causal
    ends = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    if all(x is not None for x in ends):
        out = _packed(q, k, v, ends, numbers | drop)
    elif mask is None:
        out = _plain(q, k, v, position_bias, numbers, drop)
    elif mask.ndim == 1:
        longest = longest_sequence(mask)
        out = _packed(q, k, v, (mask, mask, longest, longest), numbers | drop)
    else:
        k, v = k[:, : mask.shape[1]], v[:, : mask.shape[1]]
        out = _padded(q, k, v, mask, position_bias, numbers, drop)
    return out if half is None else out.to(query.dtype), None


def _check(others: dict[str, Any]) -> None:
    """What would change the result if it were ignored."""
    for name, instead in (("head_mask", "eager"), ("cache", "sdpa")):
        if others.get(name) is not None:
            raise NotImplementedError(
                f"{_NAME}: {name} is given, which anyflash does not take; allowed: None "
                f'(attn_implementation="{instead}" takes it)'
            )
    if others.get("output_attentions"):
        _logger.warning_once(
            f"{_NAME}: output_attentions=True has no effect, the weights are never made; "
            'attn_implementation="eager" gives them'
        )


def _half(module: torch.nn.Module, query: Tensor) -> torch.dtype | None:
    """On a GPU, float32 states of a model in half precision (PEFT keeps its norms so) are cast."""
    if query.dtype != torch.float32 or not query.is_cuda or torch.is_autocast_enabled():
        return None
    config = getattr(module, "config", None)
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def _is_causal(module: torch.nn.Module, given: bool | None) -> bool:
    causal = getattr(module, "is_causal", None) if given is None else given
    if causal is None:
        raise NotImplementedError(
            f"{_NAME}: {type(module).__name__} does not say whether it is causal; expected an "
            "attribute or an argument is_causal"
        )
    return bool(causal)


def _own_window(module: torch.nn.Module) -> int | None:
    """Of a causal layer that does not pass its window on, by the rule that makes its mask."""
    config = getattr(module, "config", None)
    window: int | None = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return window
    return window if kinds[getattr(module, "layer_idx", 0)] == "sliding_attention" else None


Options = dict[str, Any]


def _plain(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, numbers: Options, drop: Options
) -> Tensor:
    """All queries of a sequence stand at its last keys."""
    if bias is None and not drop and _decodes(q, k, v, numbers):
        return _tensor(attention_with_kvcache(q, k, v, **numbers))
    return _tensor(attention(q, k, v, bias=bias, **numbers, **drop))


def _decodes(q: Tensor, k: Tensor, v: Tensor, numbers: Options) -> bool:
    """Few queries, many keys, no gradients: the keys may be split."""
    if not q.shape[1] < k.shape[1] or q.shape[1] > _MAX_DECODED:
        return False
    given = (q, k, v, numbers["sinks"])
    return not (torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in given))


def _packed(q: Tensor, k: Tensor, v: Tensor, ends: tuple[Any, ...], options: Options) -> Tensor:
    """Sequences one after the other, in (batch * seqlen)."""
    rows = (x.flatten(0, 1) for x in (q, k, v))
    lengths = (int(x) for x in ends[2:])
    out = attention_varlen(*rows, *(x.int() for x in ends[:2]), *lengths, **options)
    return _tensor(out).unflatten(0, q.shape[:2])


def _padded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    position_bias: Tensor | None,
    numbers: Options,
    drop: Options,
) -> Tensor:
    """``mask`` (batch, seqlen_k) says which keys are no padding, and which of the queries at them.

    Padded queries give 0, or what the keys give that they see.
    """
    if position_bias is not None:
        position_bias = position_bias[..., : k.shape[1]]
    if not is_traced():
        keys = read_keys(mask)
        if keys.at_begin and keys.at_end and bool(keys.longest == k.shape[1]):
            return _plain(q, k, v, position_bias, numbers, drop)
    bias = _join(mask[:, None, None, :], position_bias)
    whole = partial(attention, q, k, v, bias=bias, **numbers, **drop)
    if position_bias is not None or is_traced():
        return _tensor(whole())
    if keys.at_end and not drop and _decodes(q, k, v, numbers):
        return _tensor(attention_with_kvcache(q, k, v, cache_leftpad=keys.first, **numbers))
    if q.shape[1] != k.shape[1] or not (keys.together or "window_size" not in numbers):
        return _tensor(whole())
    packing = pack(mask)
    rows = (x.flatten(0, 1).index_select(0, packing.tokens) for x in (q, k, v))
    ends = (packing.ends, packing.ends, keys.longest, keys.longest)
    out = _tensor(attention_varlen(*rows, *ends, **numbers, **drop))
    padded = out.new_zeros((q.shape[0] * q.shape[1], *out.shape[1:]))
    return padded.index_copy(0, packing.tokens, out).unflatten(0, q.shape[:2])


def _masked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    position_bias: Tensor | None,
    numbers: Options,
    drop: Options,
) -> Tensor:
    """``mask`` (batch, heads or 1, seqlen_q or 1, seqlen_k) hides all that is to be hidden."""
    k, v = k[:, : mask.shape[-1]], v[:, : mask.shape[-1]]
    if position_bias is not None:
        position_bias = position_bias[..., : k.shape[1]]
    if mask.dtype == torch.bool and mask.shape[1:3] == (1, 1) and not is_traced():
        keys = read_keys(mask)
        if keys.together and position_bias is None and not drop and _decodes(q, k, v, numbers):
            cache = {"cache_leftpad": keys.first, "cache_seqlens": keys.first + keys.count}
            return _tensor(attention_with_kvcache(q, k, v, **cache, **numbers))
        if keys.at_begin:
            used = {"seqused_k": keys.count, "bias": position_bias}
            return _tensor(attention(q, k, v, **used, **numbers, **drop))
    return _tensor(attention(q, k, v, bias=_join(mask, position_bias), **numbers, **drop))


def _join(mask: Tensor, position_bias: Tensor | None) -> Tensor:
    """One bias of both."""
    if position_bias is None:
        return mask
    if mask.dtype == torch.bool:
        return position_bias.masked_fill(~mask, float("-inf"))
    return position_bias + mask


def _tensor(out: Any) -> Tensor:
    """attention's type depends on its options; here it is one tensor."""
    assert isinstance(out, Tensor)
    return out
