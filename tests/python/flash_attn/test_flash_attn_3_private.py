"""anyflash.flash_attn_3: the private functions and autograd Functions of FlashAttention-3."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

import anyflash.flash_attn_3 as fa
from anyflash.flash_attn_3.flash_attn_interface import (
    FlashAttnFunc,
    FlashAttnQKVPackedFunc,
    FlashAttnVarlenFunc,
    _flash_attn_backward,
    _flash_attn_forward,
)
from calls.flash_attn_calls import cumulative, integers, one_thread, paged, randn
from calls.flash_attn_programs import spelled

torch: Any = importlib.import_module("torch")

__all__ = ["one_thread"]

SIGNATURES = {
    _flash_attn_forward: (
        "q k v k_new=None v_new=None qv=None out_=None cu_seqlens_q=None cu_seqlens_k=None "
        "cu_seqlens_k_new=None seqused_q=None seqused_k=None max_seqlen_q=None max_seqlen_k=None "
        "page_table=None kv_batch_idx=None leftpad_k=None rotary_cos=None rotary_sin=None "
        "seqlens_rotary=None q_descale=None k_descale=None v_descale=None softmax_scale=None "
        "causal=False window_size_left=-1 window_size_right=-1 attention_chunk=0 softcap=0.0 "
        "rotary_interleaved=True scheduler_metadata=None num_splits=1 pack_gqa=None sm_margin=0"
    ),
    _flash_attn_backward: (
        "dout q k v out softmax_lse cu_seqlens_q=None cu_seqlens_k=None sequed_q=None "
        "sequed_k=None max_seqlen_q=None max_seqlen_k=None dq=None dk=None dv=None "
        "softmax_scale=None is_causal=False window_size_left=-1 window_size_right=-1 softcap=0.0 "
        "deterministic=False sm_margin=0"
    ),
}
ROWS, KEYS = [3, 0, 6], [5, 4, 2]
PACKED = {
    "cu_seqlens_q": cumulative(ROWS),
    "cu_seqlens_k": cumulative(KEYS),
    "max_seqlen_q": 6,
    "max_seqlen_k": 5,
}
USED = integers([2, 4, 1])


def tensors(packed: bool) -> list[Any]:
    """q, k, v and dout."""
    shapes = [(9, 4, 16), (11, 2, 16), (11, 2, 16), (9, 4, 16)]
    lead = () if packed else (2,)
    return [randn(*lead, *shape, seed=i) for i, shape in enumerate(shapes)]


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signature(function: Any) -> None:
    assert spelled(function) == SIGNATURES[function]


@pytest.mark.parametrize("packed", [False, True])
def test_forward_and_backward(packed: bool) -> None:
    """What autograd gives, and what is written where."""
    q, k, v, dout = tensors(packed)
    scores = {"softmax_scale": 0.3, "softcap": 3.0}
    window = {"window_size_left": 4, "window_size_right": 1}
    lengths = PACKED | {"seqused_k": USED} if packed else {}
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    function = fa.flash_attn_varlen_func if packed else fa.flash_attn_func
    right, right_lse = function(
        *given, **lengths, **scores, window_size=(4, 1), return_attn_probs=True
    )
    expected = torch.autograd.grad(right, given, dout)

    target = torch.full_like(q, torch.nan)
    out, lse, *parts = _flash_attn_forward(
        *given[:3], out_=target, **lengths, **scores, **window, num_splits=3
    )
    assert out is target
    assert not out.requires_grad
    torch.testing.assert_close(out, right.detach())
    torch.testing.assert_close(lse, right_lse)
    recorded, *_ = _flash_attn_forward(*given[:3], **lengths, **scores, **window)
    found = torch.autograd.grad(recorded, given, dout)
    torch.testing.assert_close(found, expected)
    lse = lse.detach()
    assert [x.shape for x in parts] == [(0,)] * 2
    gradients = [torch.full_like(x, torch.nan) for x in (q, k, v)]
    if packed:
        lengths["sequed_k"] = lengths.pop("seqused_k")
    softmax_d = _flash_attn_backward(
        *(dout, q, k, v, out, lse),
        **lengths,
        **dict(zip(("dq", "dk", "dv"), gradients, strict=True)),
        **scores,
        **window,
    )
    torch.testing.assert_close(gradients, list(expected))
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).transpose(-1, -2))


@pytest.mark.parametrize("deterministic", [False, True])
def test_backward_of_a_part_of_the_keys(deterministic: bool) -> None:
    """out and the LSE are of all keys; the gradients of the parts add up."""
    q, k, v, dout = tensors(False)
    out, lse, *_ = _flash_attn_forward(q, k, v)
    whole, sums = [torch.empty_like(x) for x in (q, k, v)], torch.zeros_like(q)
    _flash_attn_backward(dout, q, k, v, out, lse, dq=whole[0], dk=whole[1], dv=whole[2])
    for keys in (slice(0, 4), slice(4, 11)):
        parts = [torch.empty_like(x) for x in (q, k[:, keys], v[:, keys])]
        _flash_attn_backward(
            *(dout, q, k[:, keys], v[:, keys], out, lse),
            **dict(zip(("dq", "dk", "dv"), parts, strict=True)),
            deterministic=deterministic,
        )
        sums += parts[0]
        torch.testing.assert_close(parts[1:], [x[:, keys] for x in whole[1:]])
    torch.testing.assert_close(sums, whole[0])


def test_forward_with_a_cache() -> None:
    """As flash_attn_with_kvcache calls it in FlashAttention-3: pages, new keys, packed queries."""
    q, k, v, _ = tensors(True)
    new = [x[:9] for x in (k, v)]
    table = integers([[3, 1], [0, 5], [2, 4]])
    pages = [paged(randn(3, 32, 2, 16, seed=i), table, 6, 16) for i in (5, 6)]
    filled, lengths = integers([4, 20, 9]), {"cu_seqlens_q": cumulative(ROWS), "max_seqlen_q": 6}
    right_pages = [x.clone() for x in pages]
    right, right_lse, *_ = fa.flash_attn_with_kvcache(
        *(q, *right_pages, *new),
        cache_seqlens=filled,
        page_table=table,
        causal=True,
        return_softmax_lse=True,
        **lengths,
    )
    out, lse, *_ = _flash_attn_forward(
        *(q, *pages, *new), seqused_k=filled, page_table=table, causal=True, **lengths
    )
    assert torch.equal(out, right)
    assert torch.equal(lse, right_lse)
    for x, wanted in zip(pages, right_pages, strict=True):
        assert torch.equal(x, wanted)


def test_functions() -> None:
    q, k, v, _ = (x.requires_grad_() for x in tensors(False))
    no_scales = (None, None, None)
    results = FlashAttnFunc.apply(
        q, k, v, 0.3, True, None, *no_scales, (4, -1), 0, 2.0, 1, None, False, 0, True
    )
    right = fa.flash_attn_func(
        q, k, v, 0.3, True, window_size=(4, -1), softcap=2.0, return_attn_probs=True
    )
    for x, wanted in zip(results, right, strict=True):
        assert torch.equal(x, wanted)
    torch.testing.assert_close(
        torch.autograd.grad(results[0].sum(), (q, k, v)),
        torch.autograd.grad(right[0].sum(), (q, k, v)),
    )
    qkv = randn(2, 6, 8, 16)
    out = FlashAttnQKVPackedFunc.apply(qkv, None, True, *no_scales, (-1, -1), 0, 0.0, False, 4)
    assert torch.equal(out, fa.flash_attn_qkvpacked_func(qkv, causal=True, num_heads_q=4))
    rows, keys, values, _ = tensors(True)
    cu = (PACKED["cu_seqlens_q"], PACKED["cu_seqlens_k"])
    out = FlashAttnVarlenFunc.apply(rows, keys, values, *cu, None, USED, 6, 5, 0.3, True)
    right = fa.flash_attn_varlen_func(rows, keys, values, *cu, 6, 5, None, USED, 0.3, True)
    assert torch.equal(out, right)


def test_refused() -> None:
    q, k, v, dout = tensors(False)
    with pytest.raises(NotImplementedError, match="_flash_attn_forward: qv is given; only None"):
        _flash_attn_forward(q, k, v, qv=q)
    with pytest.raises(
        NotImplementedError, match="cu_seqlens_k is given; only None is allowed: of"
    ):
        _flash_attn_forward(q, k[0], v[0], cu_seqlens_k=cumulative(KEYS))
    with pytest.raises(NotImplementedError, match="_flash_attn_backward: seqused_q is given"):
        _flash_attn_backward(dout, q, k, v, q, dout, sequed_q=USED)
