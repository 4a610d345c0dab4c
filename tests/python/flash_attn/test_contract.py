"""anyflash.flash_attn: names, signatures and what is returned, as flash-attn 2.8.3 has them, with
what its main branch has added at the end of argument lists."""

from __future__ import annotations

import doctest
import importlib
import inspect
from typing import Any

import pytest

import anyflash.flash_attn as fa
from anyflash.flash_attn import flash_attn_2_cuda, flash_attn_interface
from calls.flash_attn_calls import one_thread
from calls.flash_attn_programs import spelled

torch: Any = importlib.import_module("torch")

__all__ = ["one_thread"]

OPTIONS = (
    "dropout_p=0.0 softmax_scale=None causal=False window_size=(-1,-1) softcap=0.0 "
    "alibi_slopes=None deterministic=False return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
SCORES = "dropout_p softmax_scale causal window_size_left window_size_right softcap alibi_slopes"
GRADS = "dout q k v out softmax_lse dq dk dv"
FIRST = "dropout_p softmax_scale=None causal=False return_attn_probs=False deterministic=False"
PUBLIC = {
    "flash_attn_func": f"q k v {OPTIONS}",
    "flash_attn_kvpacked_func": f"q kv {OPTIONS}",
    "flash_attn_qkvpacked_func": f"qkv {OPTIONS}",
    "flash_attn_varlen_func": f"q k v {LENGTHS} {OPTIONS} block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q kv {LENGTHS} {OPTIONS}",
    "flash_attn_varlen_qkvpacked_func": f"qkv cu_seqlens max_seqlen {OPTIONS}",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None rotary_cos=None rotary_sin=None cache_seqlens=None "
        "cache_batch_idx=None cache_leftpad=None block_table=None softmax_scale=None causal=False "
        "window_size=(-1,-1) softcap=0.0 rotary_interleaved=True alibi_slopes=None num_splits=0 "
        "return_softmax_lse=False"
    ),
}
PRIVATE = {
    "_flash_attn_forward": f"q k v {SCORES} return_softmax",
    "_flash_attn_varlen_forward": (
        f"q k v {LENGTHS} dropout_p softmax_scale causal window_size_left=-1 window_size_right=-1 "
        "softcap=0.0 alibi_slopes=None return_softmax=False block_table=None leftpad_k=None "
        "seqused_k=None zero_tensors=False num_splits=0"
    ),
    "_flash_attn_backward": f"{GRADS} {SCORES} deterministic rng_state=None",
    "_flash_attn_varlen_backward": (
        f"{GRADS} {LENGTHS} {SCORES} deterministic rng_state=None zero_tensors=False"
    ),
    "maybe_contiguous": "x",
    "round_multiple": "x m",
    "_get_block_size_n": "device head_dim is_dropout is_causal",
    # FlashAttention 1
    "flash_attn_unpadded_func": f"q k v {LENGTHS} {FIRST}",
    "flash_attn_unpadded_kvpacked_func": f"q kv {LENGTHS} {FIRST}",
    "flash_attn_unpadded_qkvpacked_func": f"qkv cu_seqlens max_seqlen {FIRST}",
}
WINDOW = "causal window_size_left window_size_right softcap"
EXTENSION = {
    "fwd": f"q k v out alibi_slopes dropout_p softmax_scale {WINDOW} return_softmax generator",
    "varlen_fwd": (
        "q k v out cu_seqlens_q cu_seqlens_k seqused_k leftpad_k block_table alibi_slopes "
        f"max_seqlen_q max_seqlen_k dropout_p softmax_scale zero_tensors {WINDOW} return_softmax "
        "generator num_splits=0"
    ),
    "bwd": (
        f"{GRADS} alibi_slopes dropout_p softmax_scale {WINDOW} deterministic generator rng_state"
    ),
    "varlen_bwd": (
        f"{GRADS} cu_seqlens_q cu_seqlens_k alibi_slopes max_seqlen_q max_seqlen_k dropout_p "
        f"softmax_scale zero_tensors {WINDOW} deterministic generator rng_state"
    ),
    "fwd_kvcache": (
        "q k_cache v_cache k v cache_seqlens rotary_cos rotary_sin cache_batch_idx cache_leftpad "
        f"block_table alibi_slopes out softmax_scale {WINDOW} rotary_interleaved num_splits"
    ),
}


@pytest.mark.parametrize(
    ("module", "name", "signature"),
    [
        (module, name, signature)
        for module, table in (
            (fa, PUBLIC),
            (flash_attn_interface, PUBLIC | PRIVATE),
            (flash_attn_2_cuda, EXTENSION),
        )
        for name, signature in table.items()
    ],
)
def test_signature(module: Any, name: str, signature: str) -> None:
    function = getattr(module, name)
    assert inspect.isfunction(function)
    assert spelled(function) == " ".join(signature.split())


def test_names() -> None:
    assert set(fa.__all__) == {*PUBLIC, "__version__", "install"}
    assert fa.__version__ == "2.8.3"
    assert flash_attn_interface.flash_attn_gpu is flash_attn_2_cuda
    for name in ("forward", "backward", "varlen_forward", "varlen_backward"):
        wrapped = getattr(flash_attn_interface, f"_wrapped_flash_attn_{name}")
        assert wrapped is getattr(flash_attn_interface, f"_flash_attn_{name}")


@pytest.mark.parametrize(
    "name",
    ["_kvcache", "bert_padding", "flash_attn_interface", "layers.rotary", "ops.triton.rotary"],
)
def test_examples(name: str) -> None:
    module = importlib.import_module(f"anyflash.flash_attn.{name}")
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


QKV = torch.randn(2, 9, 3, 4, 16, generator=torch.Generator().manual_seed(2))
CU = torch.tensor([0, 9, 18], dtype=torch.int32)
CALLS = {
    "flash_attn_func": QKV.unbind(2),
    "flash_attn_kvpacked_func": (QKV[:, :, 0], QKV[:, :, 1:]),
    "flash_attn_qkvpacked_func": (QKV,),
    "flash_attn_varlen_func": (*QKV.flatten(0, 1).unbind(1), CU, CU, 9, 9),
    "flash_attn_varlen_kvpacked_func": (
        *(x.flatten(0, 1) for x in (QKV[:, :, 0], QKV[:, :, 1:])),
        *(CU, CU, 9, 9),
    ),
    "flash_attn_varlen_qkvpacked_func": (QKV.flatten(0, 1), CU, 9),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dropout_p", [0, 0.0, 0.25])
def test_returns(name: str, dropout_p: float) -> None:
    """A tensor, or a tuple of three."""
    function, given = getattr(fa, name), CALLS[name]
    torch.manual_seed(0)
    out = function(*given, dropout_p)
    torch.manual_seed(0)
    results = function(*given, dropout_p=dropout_p, return_attn_probs=True)
    assert isinstance(results, tuple)
    again, lse, mask = results
    assert torch.equal(again, out)
    assert lse.shape == ((4, 18) if "varlen" in name else (2, 4, 9))
    assert mask.shape == ((2, 4, 128, 128) if dropout_p else (0,))
    assert (mask.dtype, lse.dtype) == (QKV.dtype, torch.float32)
    assert not mask.requires_grad


@pytest.mark.parametrize("name", CALLS)
def test_applied_functions(name: str) -> None:
    """flash-attn's Functions are called by some with all arguments, in order."""
    given = [
        x.clone().requires_grad_() if x is not CU and hasattr(x, "clone") else x
        for x in CALLS[name]
    ]
    options = [0.0, None, True, (3, 0), 0.0, None, False, False]
    options += [None] if name == "flash_attn_varlen_func" else []
    words = name.removesuffix("_func").split("_")
    spelling = {"kvpacked": "KVPacked", "qkvpacked": "QKVPacked"}
    title = "".join(spelling.get(word, word.capitalize()) for word in words) + "Func"
    applied = getattr(flash_attn_interface, title).apply
    out = applied(*given, *options, True)
    assert torch.equal(out, getattr(fa, name)(*given, causal=True, window_size=(3, -1)))
    assert out.requires_grad
    assert not applied(*given, *options, False).requires_grad


def test_first_names() -> None:
    """Those of FlashAttention 1: return_attn_probs comes before deterministic."""
    qkv = QKV.flatten(0, 1)
    results = flash_attn_interface.flash_attn_unpadded_qkvpacked_func(
        qkv, CU, 9, 0.0, None, True, True
    )
    right = fa.flash_attn_varlen_qkvpacked_func(qkv, CU, 9, causal=True)
    assert torch.equal(results[0], right)
    q, kv = qkv[:, 0], qkv[:, 1:]
    lengths = (CU, CU, 9, 9)
    for function, given in (
        (flash_attn_interface.flash_attn_unpadded_kvpacked_func, (q, kv)),
        (flash_attn_interface.flash_attn_unpadded_func, (q, *kv.unbind(1))),
    ):
        out = function(*given, *lengths, 0.0, None, True, False, True)
        assert torch.equal(out, right)


# A query that sees no key -------------------------------------------------------------------------


def test_rows_without_keys() -> None:
    """out 0, LSE +inf, gradients finite, and 0 of q; the private functions too."""
    q, k, v = (x.clone().requires_grad_() for x in QKV.unbind(2))
    given = (q, k[:, :4], v[:, :4])
    out, lse, _ = fa.flash_attn_func(*given, causal=True, return_attn_probs=True)
    assert (lse[:, :, :5] == torch.inf).all()
    assert lse[:, :, 5:].isfinite().all()
    assert (out[:, :5] == 0).all()
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    assert all(x.isfinite().all() for x in grads)
    assert (grads[0][:, :5] == 0).all()
    private = flash_attn_interface._flash_attn_forward(
        *given, 0.0, 0.25, True, -1, -1, 0.0, None, False
    )
    assert torch.equal(private[0], out)
    assert torch.equal(private[1], lse)
    dq = torch.empty_like(q)
    flash_attn_interface._flash_attn_backward(
        *(torch.ones_like(out), *given, *private[:2], dq, None, None),
        *(0.0, 0.25, True, -1, -1, 0.0, None, False),
    )
    assert torch.equal(dq, grads[0])


@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_rows_or_no_keys(rows: int, keys: int) -> None:
    q, kv = torch.randn(2, rows, 4, 16), torch.randn(2, keys, 2, 2, 16)
    q.requires_grad_()
    kv.requires_grad_()
    out, lse, mask = fa.flash_attn_kvpacked_func(q, kv, 0.5, return_attn_probs=True)
    assert out.shape == q.shape
    assert (out == 0).all()
    assert (lse == torch.inf).all()
    assert mask.shape == (2, 4, 128 * (rows > 0), 128 * (keys > 0))
    out.sum().backward()
    assert (q.grad == 0).all()
    assert (kv.grad == 0).all()
