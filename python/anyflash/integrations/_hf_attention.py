"""The function that transformers' models call in place of their own attention."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

import anyflash.torch
from anyflash.integrations._hf_masks import (
    MAX_DECODED,
    is_traced,
    longest_sequence,
    pack,
    packed_sequences,
    read_keys,
)
from anyflash.integrations._hf_paged import Pages, update_cache
from anyflash.torch._dispatch_state import autocast_dtype, is_grad_enabled

# Their arguments are collected in dictionaries here, which a type checker cannot look into.
attention: Any = anyflash.torch.attention
attention_varlen: Any = anyflash.torch.attention_varlen
attention_with_kvcache: Any = anyflash.torch.attention_with_kvcache

_logger: Any = import_module("transformers.utils.logging").get_logger(__name__)
_NAME = "anyflash.integrations.transformers"
_NOT_GIVEN = object()


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: Any = _NOT_GIVEN,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Any = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    cache: Any = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """For transformers' AttentionInterface.

    query (batch, heads, seqlen_q, head_dim), key, value (batch, heads_k, seqlen_k, head_dim): gives
    (batch, seqlen_q, heads, head_dim_v), and None for the weights, which are never made.
    """
    _check(others)
    paged = others | {"cu_seq_lens_k": cu_seq_lens_k, "max_length_k": max_length_k}
    paged |= {"cu_seq_lens_q": cu_seq_lens_q, "max_length_q": max_length_q}
    if cache is not None:  # from transformers 5.24 on, models have already updated theirs
        key, value = update_cache(cache, module, key, value, paged)
        cu_seq_lens_k, max_length_k = paged["cu_seq_lens_k"], paged["max_length_k"]
    pages = Pages.of(paged)
    half = _half(module, query)
    states = States(*(x.to(half or x.dtype).transpose(1, 2) for x in (query, key, value)))
    numbers: Options = {
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    drop = {"dropout_p": dropout} if dropout else {}
    mask = attention_mask
    ends = (cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k)
    packed = all(x is not None for x in ends)
    if not packed and mask is None and _may_be_packed(states, _is_causal(module, is_causal)):
        mask = packed_sequences(others.get("position_ids"), *states.q.shape[:2])
    if not packed and mask is not None and mask.ndim == 1:
        longest = longest_sequence(mask)
        packed, ends = True, (mask, mask, longest, longest)
    if not packed and mask is not None and mask.ndim == 4:
        out = _masked(states, mask, position_bias, numbers, drop)
        return out if half is None else out.to(query.dtype), None

    causal = _is_causal(module, is_causal)
    numbers["causal"] = causal
    if sliding_window is _NOT_GIVEN:
        sliding_window = _own_window(module) if causal else None
    # Where it hides nothing, a kernel without windows serves. transformers counts the query itself.
    if sliding_window is not None and (is_traced() or sliding_window < states.k.shape[1]):
        numbers["window_size"] = (sliding_window - 1, 0 if causal else sliding_window - 1)
    if pages is not None:
        out = pages.attend(*states, numbers)
    elif packed:
        if position_bias is not None:
            raise NotImplementedError(
                f"{_NAME}: position_bias is given with packed sequences; only one of the two is "
                "allowed"
            )
        out = _packed(states, ends, numbers | drop)
    elif mask is None:
        out = _plain(states, position_bias, numbers, drop)
    elif not causal and "window_size" not in numbers:  # perhaps of other tokens than the queries
        out = _masked(states, mask[:, None, None, :].bool(), position_bias, numbers, drop)
    else:
        out = _padded(states, mask.bool(), position_bias, numbers, drop)
    return out if half is None else out.to(query.dtype), None


def _may_be_packed(states: States, causal: bool) -> bool:
    """By position_ids alone: one row, as in transformers' own flash attention, or what a function
    around this one has gathered.
    """
    if states.q.shape[1] != states.k.shape[1]:
        return False
    return _is_wrapped() or (causal and states.q.shape[0] == 1)


def _is_wrapped() -> bool:
    """Another function stands in the place of this one, and calls it."""
    functions: Any = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    return functions.get("anyflash", attention_forward) is not attention_forward


def _check(others: dict[str, Any]) -> None:
    """What would change the result if it were ignored."""
    if others.get("head_mask") is not None:
        raise NotImplementedError(
            f"{_NAME}: head_mask is given, which anyflash does not take; allowed: None "
            '(attn_implementation="eager" takes it)'
        )
    if others.get("output_attentions"):
        _logger.warning_once(
            f"{_NAME}: output_attentions=True has no effect, the weights are never made; "
            'attn_implementation="eager" gives them'
        )


def _half(module: torch.nn.Module, query: Tensor) -> torch.dtype | None:
    """On a GPU, float32 states of a model in half precision (PEFT keeps its norms so) are cast."""
    if query.dtype != torch.float32 or not query.is_cuda or autocast_dtype("cuda") is not None:
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
    layer = getattr(module, "layer_idx", None)
    return window if layer is not None and kinds[layer] == "sliding_attention" else None


class States(NamedTuple):
    q: Tensor  # (batch, seqlen_q, heads, head_dim)
    k: Tensor  # (batch, seqlen_k, heads_k, head_dim)
    v: Tensor  # (batch, seqlen_k, heads_k, head_dim_v)

    def of_first_keys(self, count: int) -> States:
        return States(self.q, self.k[:, :count], self.v[:, :count])


Options = dict[str, Any]


def _plain(states: States, bias: Tensor | None, numbers: Options, drop: Options) -> Tensor:
    """All queries of a sequence stand at its last keys."""
    if bias is None and not drop and _decodes(states, numbers):
        return _tensor(attention_with_kvcache(*states, **numbers))
    return _tensor(attention(*states, bias=bias, **numbers, **drop))


def _decodes(states: States, numbers: Options) -> bool:
    """Few queries, many keys, no gradients: the keys may be split."""
    q, k, v = states
    if not q.shape[1] < k.shape[1] or q.shape[1] > MAX_DECODED:
        return False
    given = (q, k, v, numbers["sinks"])
    return not (is_grad_enabled() and any(x is not None and x.requires_grad for x in given))


def _packed(states: States, ends: tuple[Any, ...], options: Options) -> Tensor:
    """Sequences one after the other, in (batch * seqlen)."""
    rows = (x.flatten(0, 1) for x in states)
    lengths = (int(x) for x in ends[2:])
    out = attention_varlen(*rows, *(x.int() for x in ends[:2]), *lengths, **options)
    return _tensor(out.unflatten(0, states.q.shape[:2]))


def _padded(
    states: States,
    mask: Tensor,
    position_bias: Tensor | None,
    numbers: Options,
    drop: Options,
) -> Tensor:
    """``mask`` (batch, seqlen_k) says which keys are no padding, and which of the queries at them.

    Padded queries give 0, or what the keys give that they see.
    """
    q, k, _ = states = states.of_first_keys(mask.shape[1])
    if position_bias is not None:
        position_bias = position_bias[..., : k.shape[1]]
    if not is_traced():
        keys = read_keys(mask)
        if keys.all:
            return _plain(states, position_bias, numbers, drop)
    bias = _join(mask[:, None, None, :], position_bias)
    whole = partial(attention, *states, bias=bias, **numbers, **drop)
    if position_bias is not None or is_traced():
        return _tensor(whole())
    if keys.at_end and not drop and _decodes(states, numbers):
        return _tensor(attention_with_kvcache(*states, cache_leftpad=keys.first, **numbers))
    if q.shape[1] != k.shape[1] or not (keys.together or "window_size" not in numbers):
        return _tensor(whole())
    packing = pack(mask)
    rows = (x.flatten(0, 1).index_select(0, packing.tokens) for x in states)
    ends = (packing.ends, packing.ends, keys.longest, keys.longest)
    out = _tensor(attention_varlen(*rows, *ends, **numbers, **drop))
    padded = out.new_zeros((q.shape[0] * q.shape[1], *out.shape[1:]))
    return padded.index_copy(0, packing.tokens, out).view(*q.shape[:2], *out.shape[1:])


def _masked(
    states: States,
    mask: Tensor,
    position_bias: Tensor | None,
    numbers: Options,
    drop: Options,
) -> Tensor:
    """``mask`` (batch, heads or 1, seqlen_q or 1, seqlen_k), or key_ranges of int32, hides all that
    is to be hidden."""
    if mask.dtype == torch.int32:
        states = states.of_first_keys(mask.shape[2])
        if position_bias is not None:
            position_bias = position_bias[..., : mask.shape[2]]
        given = {"key_ranges": mask, "bias": position_bias}
        return _tensor(attention(*states, **given, **numbers, **drop))
    states = states.of_first_keys(mask.shape[-1])
    if position_bias is not None:
        position_bias = position_bias[..., : mask.shape[-1]]
    if mask.dtype == torch.bool and mask.shape[1:3] == (1, 1) and not is_traced():
        keys = read_keys(mask)
        if keys.together and position_bias is None and not drop and _decodes(states, numbers):
            cache = {"cache_leftpad": keys.first, "cache_seqlens": keys.first + keys.count}
            return _tensor(attention_with_kvcache(*states, **cache, **numbers))
        if keys.at_begin:
            used = {"seqused_k": keys.count, "bias": position_bias}
            return _tensor(attention(*states, **used, **numbers, **drop))
    return _tensor(attention(*states, bias=_join(mask, position_bias), **numbers, **drop))


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
