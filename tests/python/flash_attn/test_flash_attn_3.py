"""anyflash.flash_attn_3: FlashAttention-3's names, signatures, returns and results."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import pytest

import anyflash.flash_attn as fa2
import anyflash.flash_attn_3 as fa
from anyflash.flash_attn_3 import flash_attn_interface
from calls.flash_attn_calls import cumulative, integers, one_thread, paged, randn
from calls.flash_attn_programs import run, spelled

torch: Any = importlib.import_module("torch")

__all__ = ["one_thread"]

DESCALES = "q_descale=None k_descale=None v_descale=None"
SCORES = f"softmax_scale=None causal=False qv=None {DESCALES} window_size=(-1,-1)"
SIGNATURES = {
    "flash_attn_func": (
        f"q k v {SCORES} attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None "
        "deterministic=False sm_margin=0 return_attn_probs=False"
    ),
    "flash_attn_varlen_func": (
        "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k seqused_q=None seqused_k=None "
        f"{SCORES} attention_chunk=0 softcap=0.0 num_splits=1 pack_gqa=None deterministic=False "
        "sm_margin=0 return_attn_probs=False"
    ),
    "flash_attn_qkvpacked_func": (
        f"qkv softmax_scale=None causal=False {DESCALES} window_size=(-1,-1) attention_chunk=0 "
        "softcap=0.0 deterministic=False num_heads_q=None sm_margin=0 return_attn_probs=False"
    ),
    "flash_attn_combine": "out_partial lse_partial out=None out_dtype=None",
    "flash_attn_with_kvcache": (
        "q k_cache v_cache k=None v=None qv=None rotary_cos=None rotary_sin=None "
        "cache_seqlens=None cache_batch_idx=None cache_leftpad=None page_table=None "
        "cu_seqlens_q=None cu_seqlens_k_new=None max_seqlen_q=None rotary_seqlens=None "
        f"{DESCALES} softmax_scale=None causal=False window_size=(-1,-1) attention_chunk=0 "
        "softcap=0.0 rotary_interleaved=True scheduler_metadata=None num_splits=0 pack_gqa=None "
        "sm_margin=0 return_softmax_lse=False"
    ),
    "get_scheduler_metadata": (
        "batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens "
        "qkv_dtype=torch.bfloat16 headdim_v=None cu_seqlens_q=None cu_seqlens_k_new=None "
        "cache_leftpad=None page_size=None max_seqlen_k_new=0 causal=False window_size=(-1,-1) "
        "attention_chunk=0 has_softcap=False num_splits=0 pack_gqa=None sm_margin=0"
    ),
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name: str) -> None:
    assert getattr(fa, name) is getattr(flash_attn_interface, name)
    assert spelled(getattr(fa, name)) == SIGNATURES[name]


def test_names() -> None:
    assert set(fa.__all__) == {*SIGNATURES, "__version__", "install"}
    private = {"_flash_attn_forward", "_flash_attn_backward"}
    functions = {f"FlashAttn{kind}Func" for kind in ("", "QKVPacked", "Varlen")}
    assert set(flash_attn_interface.__all__) == SIGNATURES.keys() | private | functions
    assert fa.__version__ == "3.0.0"


@pytest.mark.parametrize("name", ["_kvcache", "flash_attn_interface"])
def test_examples(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"anyflash.flash_attn_3.{name}"))
    assert results.attempted > 0
    assert results.failed == 0


# Hints on how to divide the work change nothing.
HINTS = {"num_splits": 3, "pack_gqa": True, "sm_margin": 8, "k_descale": torch.ones(2, 2)}
OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"causal": True, "softcap": 3.0, "deterministic": True},
    {"window_size": (4, 1), "softmax_scale": 0.3},
)


def same_gradients(results: Any, inputs: Any, right: Any, right_inputs: Any) -> None:
    torch.testing.assert_close(results, right)
    weights = torch.randn(results.shape)
    torch.testing.assert_close(
        torch.autograd.grad(results, inputs, weights),
        torch.autograd.grad(right, right_inputs, weights),
    )


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_dense(options: dict[str, Any]) -> None:
    """As flash-attn 2's, but for what is returned and the LSE of rows without keys."""
    q, k, v = randn(2, 9, 4, 16), randn(2, 7, 2, 16, seed=1), randn(2, 7, 2, 12, seed=2)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out = fa.flash_attn_func(*given, **options, **HINTS)
    same = [x.clone().requires_grad_() for x in (q, k, v)]
    right, right_lse, _ = fa2.flash_attn_func(*same, **options, return_attn_probs=True)
    same_gradients(out, given, right, same)
    results = fa.flash_attn_func(*given, **options, return_attn_probs=True)
    assert (type(results), len(results)) == (tuple, 2)
    assert torch.equal(results[0], out)
    keyless = right_lse == torch.inf
    assert keyless.any() == options.get("causal", False) | ("window_size" in options)
    assert torch.equal(results[1], right_lse.masked_fill(keyless, -torch.inf))


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen(options: dict[str, Any]) -> None:
    rows, keys = [3, 0, 6], [5, 4, 2]
    cu = (cumulative(rows), cumulative(keys), torch.tensor(6), 5)
    used = integers([2, 4, 1])
    q, k, v = randn(9, 4, 16), randn(11, 2, 16, seed=1), randn(11, 2, 16, seed=2)
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    out, lse = fa.flash_attn_varlen_func(
        *given, *cu, seqused_k=used, **options, return_attn_probs=True
    )
    parts = [
        fa.flash_attn_func(q[None], k[None, :n], v[None, :n], **options, return_attn_probs=True)
        for q, k, v, n in zip(
            given[0].split(rows), given[1].split(keys), given[2].split(keys), used, strict=True
        )
    ]
    right = torch.cat([part[0][0] for part in parts])
    same_gradients(out, given, right, given)
    assert torch.equal(lse, torch.cat([part[1][0] for part in parts], 1))
    assert torch.equal(
        fa.flash_attn_varlen_func(*given, *cu, seqused_k=used, **options, **HINTS), out
    )


@pytest.mark.parametrize("heads", [None, 4])
def test_qkvpacked(heads: int | None) -> None:
    qkv = randn(2, 6, 3, 4, 16) if heads is None else randn(2, 6, 8, 16)
    given = [x.clone().requires_grad_() for x in (qkv, qkv)]
    options = {"causal": True, "window_size": (2, -1)}
    out, lse = fa.flash_attn_qkvpacked_func(
        given[0], num_heads_q=heads, **options, return_attn_probs=True
    )
    parts = given[1].unbind(2) if heads is None else given[1].split([4, 2, 2], 2)
    right, right_lse = fa.flash_attn_func(*parts, **options, return_attn_probs=True)
    assert torch.equal(lse, right_lse)
    same_gradients(out, given[0], right, given[1])
    with pytest.raises(ValueError, match=r"qkv has shape .*num_heads_q is 3; expected"):
        fa.flash_attn_qkvpacked_func(randn(2, 6, 8, 16), num_heads_q=3)


# A cache ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 16, 24])
def test_appending(size: int | None) -> None:
    """As flash-attn 2's; rotated by the row in the cache, or by that of rotary_seqlens."""
    filled = integers([17, 40])
    q, (k, v) = randn(2, 3, 4, 16), randn(2, 2, 3, 2, 16, seed=1)
    cos, sin = torch.rand(2, 60, 8)
    dense, table = randn(2, 2, 48, 2, 16, seed=2), None
    if size:
        table = torch.randperm(2 * 48 // size).view(2, -1).to(torch.int32)
        caches = [paged(x, table, table.numel(), size) for x in dense]
    else:
        caches = list(dense)
    pad = None if size else integers([5, 9])
    copies = [[x.clone() for x in caches] for _ in range(3)]
    given = {"cache_seqlens": filled, "cache_leftpad": pad, "causal": True, "num_splits": 2}
    out, *others = fa.flash_attn_with_kvcache(
        *(q, *copies[0], k, v, None, cos, sin),
        **given,
        page_table=table,
        return_softmax_lse=True,
        scheduler_metadata=fa.get_scheduler_metadata(2, 3, 48, 4, 2, 16, filled),
    )
    assert [x.shape for x in others] == [(2, 4, 3), (0,), (0,)]
    right, lse = fa2.flash_attn_with_kvcache(
        *(q, *copies[1], k, v, cos, sin), **given, block_table=table, return_softmax_lse=True
    )
    assert torch.equal(out, right)
    assert torch.equal(others[0], lse)
    torch.testing.assert_close(copies[0], copies[1], rtol=0, atol=0, equal_nan=True)
    shifted = fa.flash_attn_with_kvcache(
        *(q, *copies[2], k, v),
        rotary_cos=cos.roll(-11, 0),
        rotary_sin=sin.roll(-11, 0),
        rotary_seqlens=filled - 11,
        page_table=table,
        **given,
    )
    torch.testing.assert_close(shifted, out)
    torch.testing.assert_close(copies[2], copies[1], equal_nan=True)


def test_bounds_that_nothing_meets() -> None:
    """FlashAttention-3 counts them by the last query and key."""
    q, (k, v) = randn(1, 3, 2, 16), randn(2, 1, 3, 2, 16, seed=1)
    cos, sin = torch.rand(2, 32, 8)
    results = []
    for window in ((-1, -1), (31, 2), (31, -1), (-1, 2), (30, -1), (-1, 1)):
        caches = randn(2, 1, 32, 2, 16, seed=2)
        results.append(
            fa.flash_attn_with_kvcache(*(q, *caches, k, v, None, cos, sin, 7), window_size=window)
        )
    for same in results[1:4]:
        assert torch.equal(same, results[0])
    for other in results[4:]:
        assert not torch.allclose(other, results[0])


@pytest.mark.parametrize("size", [None, 24])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 2)}], ids=str)
def test_packed_queries(options: dict[str, Any], size: int | None) -> None:
    rows, filled = [3, 0, 1], [40, 5, 20]
    q, dense = randn(4, 4, 16), randn(2, 3, 48, 2, 16, seed=1)
    caches, table = list(dense), None
    if size:
        table = torch.randperm(6).view(3, 2).to(torch.int32)
        caches = [paged(x, table, 6, size) for x in dense]
    packed = {"cu_seqlens_q": cumulative(rows), "max_seqlen_q": 3, "page_table": table}
    given = {"cache_seqlens": integers(filled), "cache_leftpad": integers([7, 0, 2])}
    out, lse, *_ = fa.flash_attn_with_kvcache(
        q, *caches, **packed, **given, **options, return_softmax_lse=True
    )
    assert (out.shape, lse.shape) == ((4, 4, 16), (4, 4))
    for b, part in enumerate(q.split(rows)):
        kv = [x[b : b + 1, [7, 0, 2][b] : filled[b]] for x in dense]
        right, right_lse = fa.flash_attn_func(part[None], *kv, **options, return_attn_probs=True)
        at = slice(sum(rows[:b]), sum(rows[: b + 1]))
        torch.testing.assert_close(out[at], right[0])
        torch.testing.assert_close(lse[:, at], right_lse[0])


@pytest.mark.parametrize("how", ["packed", "batched-new", "batched-queries"])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_new_keys(how: str, causal: bool) -> None:
    """Packed queries, new keys or both, rotated, as each sequence by itself."""
    rows = [2, 2, 2] if how == "batched-queries" else [3, 0, 1]
    new = [2, 2, 2] if how == "batched-new" else [4, 1, 0]
    filled = [40, 5, 20]
    q, k, v = randn(sum(rows), 4, 16), *randn(2, sum(new), 2, 16, seed=1)
    caches, alone = (list(randn(2, 3, 48, 2, 16, seed=2)) for _ in range(2))
    rotary = dict(zip(("rotary_cos", "rotary_sin"), torch.rand(2, 64, 8), strict=True))
    options = {"causal": causal, **rotary}
    lengths = {"cu_seqlens_q": cumulative(rows), "cu_seqlens_k_new": cumulative(new)}
    given = [q, k, v]
    if how == "batched-new":
        given[1:] = (x.view(3, 2, 2, 16) for x in (k, v))
        del lengths["cu_seqlens_k_new"]
    if how == "batched-queries":
        given[0] = q.view(3, 2, 4, 16)
        del lengths["cu_seqlens_q"]
    out, lse, *_ = fa.flash_attn_with_kvcache(
        given[0],
        *caches,
        *given[1:],
        **lengths,
        **options,
        cache_seqlens=integers(filled),
        return_softmax_lse=True,
    )
    assert out.shape == given[0].shape
    if how == "batched-queries":
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1, 2)
    parts = zip(q.split(rows), k.split(new), v.split(new), strict=True)
    for b, (q_b, k_b, v_b) in enumerate(parts):
        own = [x[b : b + 1] for x in alone]
        right, right_lse, *_ = fa.flash_attn_with_kvcache(
            q_b[None],
            *own,
            k_b[None],
            v_b[None],
            **options,
            cache_seqlens=integers(filled[b : b + 1]),
            return_softmax_lse=True,
        )
        at = slice(sum(rows[:b]), sum(rows[: b + 1]))
        torch.testing.assert_close(out[at], right[0])
        torch.testing.assert_close(lse[:, at], right_lse[0])
    for x, wanted in zip(caches, alone, strict=True):
        assert torch.equal(x, wanted)


def test_combine() -> None:
    """Of parts of the keys, one of which a query does not see."""
    q, k, v = randn(2, 5, 4, 16), randn(2, 12, 4, 16, seed=1), randn(2, 12, 4, 16, seed=2)
    whole, lse = fa.flash_attn_func(q, k, v, return_attn_probs=True)
    parts = [
        fa.flash_attn_func(q, k[:, at], v[:, at], return_attn_probs=True)
        for at in (slice(0, 3), slice(3, 10), slice(10, 12), slice(0, 0))
    ]
    outs = torch.stack([out for out, _ in parts])
    outs[3] = torch.nan
    lses = torch.stack([lse.transpose(1, 2) for _, lse in parts])
    out, joined = fa.flash_attn_combine(outs, lses)
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(joined, lse.transpose(1, 2))
    half = torch.empty(2, 5, 4, 16, dtype=torch.bfloat16)
    assert fa.flash_attn_combine(outs, lses, half)[0] is half
    assert torch.equal(half, fa.flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0])
    assert torch.equal(half, out.bfloat16())
    nothing, joined = fa.flash_attn_combine(outs[3:], lses[3:])
    assert (nothing == 0).all()
    assert (joined == -torch.inf).all()
    with pytest.raises(ValueError, match=r"out_partial has shape .* and lse_partial \(2, 5, 4\)"):
        fa.flash_attn_combine(outs, lses[0])


# What it cannot do --------------------------------------------------------------------------------

Q, CACHE, CU = randn(2, 3, 4, 16), randn(2, 32, 2, 16), cumulative([3, 3])
DENSE, CACHED = (Q, CACHE, CACHE), (Q, CACHE.clone(), CACHE.clone())
PACKED = (Q.flatten(0, 1), *(CACHE.flatten(0, 1)[:6],) * 2, CU, CU, 3, 3)
FP8 = torch.float8_e4m3fn
REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {
    "qv": ("flash_attn_func", DENSE, {"qv": Q}, "qv is given; only None is allowed"),
    "chunk": ("flash_attn_func", DENSE, {"attention_chunk": 8}, "attention_chunk is 8; only 0"),
    "fp8": ("flash_attn_func", tuple(x.to(FP8) for x in DENSE), {}, "q is .*float8_e4m3fn; float"),
    "packed-chunk": (
        "flash_attn_qkvpacked_func",
        (randn(1, 3, 3, 2, 16),),
        {"attention_chunk": 2},
        "attention_chunk is 2",
    ),
    "varlen-qv": ("flash_attn_varlen_func", PACKED, {"qv": Q}, "qv is given"),
    "used": ("flash_attn_varlen_func", PACKED, {"seqused_q": CU}, "seqused_q is given; only None"),
    "no-lengths": (
        "flash_attn_varlen_func",
        (*PACKED[:4], None, 3, 3),
        {"seqused_k": integers([3, 3])},
        "cu_seqlens_k is None; both are needed",
    ),
    "cache-qv": ("flash_attn_with_kvcache", CACHED, {"qv": Q}, "qv is given.*head_dim_v="),
    "cache-chunk": ("flash_attn_with_kvcache", CACHED, {"attention_chunk": 4}, "chunk is 4"),
    "cache-fp8": (
        "flash_attn_with_kvcache",
        (Q, *(x.to(FP8) for x in CACHED[1:])),
        {"k_descale": torch.ones(2, 2)},
        "k_cache is torch.float8_e4m3fn, but q is torch.float32; .*anyflash.attention_with_kvc",
    ),
    "new-lengths": (
        "flash_attn_with_kvcache",
        CACHED,
        {"cu_seqlens_k_new": CU},
        "cu_seqlens_k_new is given without",
    ),
    "packed-new": (
        "flash_attn_with_kvcache",
        (PACKED[0], *CACHED[1:], PACKED[1][:5], PACKED[2][:5]),
        {"cu_seqlens_q": CU, "cache_seqlens": 3},
        "k has 5 rows, but q 6; cu_seqlens_k_new is needed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    """In a sentence."""
    function, given, options, message = REFUSED[name]
    with pytest.raises((NotImplementedError, TypeError, ValueError), match=message):
        getattr(fa, function)(*given, **options)


def test_installed() -> None:
    """Beside flash-attn 2, or alone; as transformers looks for it."""
    run("""
import anyflash.flash_attn_3 as fa3
fa3.install()
fa3.install()
import flash_attn_interface
from flash_attn_interface import flash_attn_func, flash_attn_with_kvcache
import flash_attn_3.flash_attn_interface as again

assert flash_attn_func is fa3.flash_attn_func is again.flash_attn_func
assert flash_attn_interface.__spec__.name == "flash_attn_interface"
assert importlib.metadata.version("flash-attn-3") == "3.0.0"
names = importlib.metadata.packages_distributions()
assert names["flash_attn_interface"] == names["flash_attn_3"] == ["flash_attn_3"]
assert importlib.util.find_spec("flash_attn_3._C") is None
assert importlib.util.find_spec("flash_attn") is None
fa.install()
from flash_attn import flash_attn_func as second
assert second is fa.flash_attn_func is not flash_attn_func
assert importlib.metadata.version("flash_attn") == "2.8.3"
""")
