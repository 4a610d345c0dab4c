"""The C ABI in tvm-ffi's calling convention: the library is loaded as any other module of tvm-ffi,
and gives the bits of the Python functions."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import anyflash
from anyflash import _embedding
from calls.frameworks import random
from calls.kvcache import angles, caches_of, call, every_option, latent

tvm_ffi = pytest.importorskip("tvm_ffi")
HEADER = Path(__file__).parents[3] / "cpp" / "include" / "anyflash" / "anyflash.h"
# Fields that the caller has other ways to say, or none.
NOT_OPTIONS = {"size", "stream", "reserved", "reserved2"}
CACHES = ("k_cache", "v_cache")


@pytest.fixture(scope="module")
def functions() -> Any:
    return tvm_ffi.load_module(anyflash.get_tvm_ffi_library())


def to_torch(x: Any) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x)  # the same memory


GIVE: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: x,
    "torch": to_torch,
    "tvm_ffi": tvm_ffi.from_dlpack,
}
EVERYWHERE = pytest.mark.parametrize("give", GIVE.values(), ids=GIVE)


def qkv(heads: int = 4) -> list[Any]:
    return [random(2, 30, heads, 16), random(2, 40, 2, 16), random(2, 40, 2, 8)]


def pairs(give: Callable[[Any], Any], options: dict[str, Any]) -> list[Any]:
    """Names, each with its value behind it."""
    return [
        word
        for name, x in options.items()
        for word in (name, give(x) if isinstance(x, np.ndarray) else x)
    ]


def forward(functions: Any, give: Any, tensors: list[Any], **options: Any) -> tuple[Any, Any]:
    q, _, v = tensors
    out = np.full((*q.shape[:-1], v.shape[-1]), np.nan, q.dtype)
    lse = np.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.nan, np.float32)
    given = map(give, (*tensors, out, lse))
    assert functions.forward(*given, *pairs(give, options)) is None
    return out, lse


def same(found: Any, wanted: Any) -> None:
    for x, right in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, right)


OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # What the functions are given, and what anyflash.attention calls the same.
    "none": ({}, {}),
    "causal": ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "softmax_scale": 0.3}),
    "integers": ({"causal": 1, "softcap": 5}, {"causal": True, "softcap": 5.0}),
    "left": ({"window_left": 0}, {"window_size": (0, None)}),
    "right": ({"window_right": 3}, {"window_size": (None, 3)}),
    "dropout": (
        {"dropout_p": 0.5, "seed": -3, "offset": 2},
        {"dropout_p": 0.5, "rng_state": (2**64 - 3, 2)},
    ),
    "part": (
        {"query_start": 5, "key_start": 8, "diagonal": 2, "causal": True},
        {"part": anyflash.Part(5, 8, 2), "causal": True},
    ),
    "not-given": ({"softmax_scale": None, "bias": None, "window_left": None}, {}),
}
ARRAYS = {
    "bias": random(1, 4, 30, 40),
    "sinks": random(4),
    "alibi_slopes": random(2, 4),
    "seqused_k": np.array([40, 13], np.int32),
    "key_ranges": np.tile(np.array([[0, 20], [7, 30], [9, 2], [-5, 99]], np.int32), (1, 2, 10, 1)),
    "block_mask": np.arange(8).reshape(2, 4, 1, 1) % 4 != 1,
}
BLOCKS = {"block_size_q": 64, "block_size_k": 128}
OPTIONS["arrays"] = (
    {**ARRAYS, **BLOCKS},
    {**ARRAYS, "block_size": (64, 128)},
)


@pytest.mark.parametrize(("given", "options"), OPTIONS.values(), ids=OPTIONS)
@EVERYWHERE
def test_forward(functions: Any, give: Any, given: Any, options: Any) -> None:
    right = anyflash.attention(*qkv(), return_lse=True, **options)
    same(forward(functions, give, qkv(), **given), right)


def test_outputs_besides(functions: Any) -> None:
    right = anyflash.attention(
        *qkv(), dropout_p=0.5, seed=7, return_max_logits=True, return_dropout_mask=True
    )
    mask, largest = np.zeros((2, 4, 30, 40), bool), np.zeros((2, 4), np.float32)
    others = {"dropout_p": 0.5, "seed": 7, "dropout_mask": mask, "max_logits": largest}
    out, _ = forward(functions, lambda x: x, qkv(), **others)
    same((out, mask, largest), (right.out, right.dropout_mask, right.max_logits))


def test_blocks_have_a_default_size(functions: Any) -> None:
    tensors = [random(1, 200, 2, 8) for _ in range(3)]
    blocks = np.array([[True, False], [True, True]])[None, None]
    right = anyflash.attention(*tensors, block_mask=blocks, return_lse=True)
    same(forward(functions, lambda x: x, tensors, block_mask=blocks), right)


def test_packed(functions: Any) -> None:
    tensors = [x.reshape(-1, *x.shape[2:]) for x in qkv()]
    ends = np.array([0, 11, 60], np.int32), np.array([0, 33, 80], np.int32)
    right = anyflash.attention_varlen(*tensors, *ends, 49, 47, causal=True, return_lse=True)
    packing = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    packing |= {"max_seqlen_q": 49, "max_seqlen_k": 47}
    same(forward(functions, to_torch, tensors, **packing, causal=True), right)


def test_strides_offsets_and_half_precision(functions: Any) -> None:
    torch = pytest.importorskip("torch")
    q, k, v = (
        torch.from_numpy(x).to(torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2)[:, 1:]
        for x in qkv()
    )
    out = torch.zeros(q.shape[:-1] + v.shape[-1:], dtype=q.dtype)
    functions.forward(q, k, v, out, None)
    assert torch.equal(out, anyflash.attention(q, k, v))


@EVERYWHERE
def test_backward(functions: Any, give: Any) -> None:
    tensors, bias, dlse = qkv(), random(1, 4, 30, 40), random(2, 4, 30)
    options = {"bias": bias, "causal": True, "dropout_p": 0.25, "seed": 5}
    out, lse = anyflash.attention(*tensors, return_lse=True, **options)
    dout = random(*out.shape)
    right = anyflash.attention_backward(
        dout, *tensors, out, lse, dlse=dlse, **options, return_dbias=True
    )
    grads = [np.full_like(x, np.nan) for x in (*tensors, bias)]
    given = map(give, (dout, *tensors, out, lse, *grads[:3]))
    others = {**options, "dlse": dlse, "dbias": grads[3], "deterministic": True}
    functions.backward(*given, *pairs(give, others))
    same(grads, [right.dq, right.dk, right.dv, right.dbias])


def decode(functions: Any, give: Any, arguments: dict[str, Any]) -> tuple[Any, Any]:
    given = dict(arguments)
    q, k_cache, v_cache = (given.pop(name) for name in ("q", *CACHES))
    for name in ("k", "v"):
        if name in given:
            given[f"{name}_new"] = given.pop(name)
    if "rotary_interleaved" in given:
        given["rotary_neox"] = not given.pop("rotary_interleaved")
    for name, bound in zip(
        ("window_left", "window_right"), given.pop("window_size", (None, None)), strict=True
    ):
        given[name] = bound
    columns = given["head_dim_v"] if v_cache is None else v_cache.shape[-1]
    out = np.zeros((*q.shape[:-1], columns), q.dtype)
    lse = np.zeros((q.shape[0], q.shape[2], q.shape[1]), np.float32)
    values = None if v_cache is None else give(v_cache)
    functions.forward_with_kvcache(
        give(q), give(k_cache), values, give(out), give(lse), *pairs(give, given)
    )
    return out, lse


DECODING = {name: x for name, x in every_option().items() if name != "out"}
DECODING |= {"append": call(), "pages": call(page_size=4) | {"causal": True}}
DECODING["rotated-pages"] = call(page_size=4) | dict(
    zip(("rotary_cos", "rotary_sin"), angles(16, 5), strict=True)
)


@pytest.mark.parametrize("name", DECODING)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_decoding(functions: Any, kind: str, name: str) -> None:
    """The caches are written in place."""
    names = caches_of(DECODING[name])
    given, other = (
        {key: x.copy() if key in names else x for key, x in DECODING[name].items()}
        for _ in range(2)
    )
    right = anyflash.attention_with_kvcache(**other, return_lse=True)
    same(decode(functions, GIVE[kind], given), right)
    same((given[x] for x in names), (other[x] for x in names))


def test_merge_states(functions: Any) -> None:
    tensors = qkv()
    halves = [[tensors[0], *(x[:, part] for x in tensors[1:])] for part in (slice(9), slice(9, 40))]
    states = [x for half in halves for x in anyflash.attention(*half, return_lse=True)]
    out, lse = (np.zeros_like(x) for x in states[:2])
    functions.merge_states(*states, out, lse, "num_threads", 1)
    same((out, lse), anyflash.merge_states(*states))
    functions.merge_states(*states, out, None)


def test_workspace(functions: Any) -> None:
    tensors = qkv()
    out = np.zeros((*tensors[0].shape[:-1], 8), np.float32)
    given = (*tensors, out, None)
    size = functions.forward_workspace_size(*given, "causal", True)
    assert size > 0
    functions.forward(*given, "causal", True, "workspace", np.empty(size, np.uint8))
    same((out,), (anyflash.attention(*tensors, causal=True),))
    for wrong, error, message in (
        (np.empty(size - 1, np.uint8), ValueError, f"{size} are needed"),
        (np.empty(size, np.int8), TypeError, "workspace must be uint8, one-dimensional and"),
        (np.empty((size, 1), np.uint8), TypeError, "workspace must be uint8, one-dimensional and"),
        (np.empty(2 * size, np.uint8)[::2], TypeError, "one-dimensional and contiguous"),
    ):
        with pytest.raises(error, match=message):
            functions.forward(*given, "workspace", wrong)
    cache = call()
    sizes = [
        functions.forward_with_kvcache_workspace_size(
            *(cache[x] for x in ("q", *CACHES)),
            np.zeros((3, 2, 4, 12), np.float32),
            None,
            "cache_seqlens",
            cache["cache_seqlens"],
            "num_splits",
            splits,
        )
        for splits in (1, 8)
    ]
    assert sizes == sorted(sizes)
    grads = [np.zeros_like(x) for x in tensors]
    lse = np.zeros((2, 4, 30), np.float32)
    assert functions.backward_workspace_size(out, *tensors, out, lse, *grads) >= 0


REFUSED: dict[str, tuple[tuple[Any, ...], type[Exception], str]] = {
    "too-few": ((), TypeError, r"got 4 arguments; 5 tensors are allowed, then names and values"),
    "odd": ((None, "causal"), TypeError, "got 6 arguments"),
    "lse": ((3,), TypeError, "lse is an int; a tensor or None is allowed"),
    "no-name": ((None, 3, True), TypeError, "behind the tensors there is an int; the name of an"),
    "unknown": ((None, "caussal", True), ValueError, "there is no option 'caussal'"),
    "of-another": ((None, "k_scale", None), ValueError, "there is no option 'k_scale'"),
    "long": ((None, "x" * 999, True), ValueError, f"no option '{'x' * 64}'"),
    "flag": ((None, "causal", 2), TypeError, "causal is an int; a bool is allowed"),
    "number": ((None, "softcap", "x"), TypeError, "softcap is a string; a float is allowed"),
    "integer": ((None, "seed", 1.5), TypeError, "seed is a float; an int of 64 bits is allowed"),
    "threads": ((None, "num_threads", 2**40), TypeError, "an int of 32 bits is allowed"),
    "tensor": ((None, "bias", 1), TypeError, "bias is an int; a tensor is allowed"),
    "value": ((None, "softcap", -1.0), ValueError, "softcap is -1"),
    "shape": ((None, "sinks", random(3)), ValueError, r"sinks has shape \(3\,?\)"),
    "dtype": ((np.zeros((2, 4, 30), np.int32),), TypeError, "lse is int32"),
}


@pytest.mark.parametrize(("arguments", "error", "message"), REFUSED.values(), ids=REFUSED)
def test_refused(functions: Any, arguments: Any, error: Any, message: str) -> None:
    """And nothing is written."""
    out = np.full((2, 30, 4, 8), 7, np.float32)
    with pytest.raises(error, match=message):
        functions.forward(*qkv(), out, *arguments)
    assert (out == 7).all()


def test_tensors_are_refused(functions: Any) -> None:
    q, k, v = qkv()
    out, grads = np.zeros((2, 30, 4, 8), np.float32), (q, k, v)
    with pytest.raises(TypeError, match="k is None; a tensor is allowed"):
        functions.forward(q, None, v, out, None)
    with pytest.raises(TypeError, match="dv is None; a tensor is allowed"):
        functions.backward(out, q, k, v, out, random(2, 4, 30), *grads[:2], None)
    with pytest.raises(ValueError, match="k has shape"):
        functions.forward(q, k[:1], v, out, None)


def test_latent_rows_are_refused(functions: Any) -> None:
    """v_cache may be None, but not without head_dim_v; nor beside it."""
    given = latent(new=0)
    q, cache, out = given["q"], given["k_cache"], np.full((3, 2, 4, 12), 7, np.float32)
    with pytest.raises(ValueError, match="v_cache is missing; it, or head_dim_v"):
        functions.forward_with_kvcache(q, cache, None, out, None)
    with pytest.raises(ValueError, match="v_cache is given with head_dim_v"):
        functions.forward_with_kvcache(q, cache, cache[..., :12], out, None, "head_dim_v", 12)
    with pytest.raises(ValueError, match="head_dim_v is 21; 1 to 20"):
        functions.forward_with_kvcache(q, cache, None, out, None, "head_dim_v", 21)
    with pytest.raises(TypeError, match="k_cache is None; a tensor is allowed"):
        functions.forward_with_kvcache(q, None, None, out, None, "head_dim_v", 12)
    with pytest.raises(TypeError, match="v_cache is an int; a tensor or None is allowed"):
        functions.forward_with_kvcache(q, cache, 1, out, None)
    assert (out == 7).all()


def fields(struct: str) -> set[str]:
    """Of a struct of options in the C header."""
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    found = re.search(rf"typedef struct {{([^}}]*)}} {struct};", text)
    assert found is not None
    names = {line.split("[")[0].split()[-1].lstrip("*") for line in found[1].split(";")[:-1]}
    return {name for name in names - NOT_OPTIONS if not name.startswith("has_")}


def test_no_option_is_left_out(functions: Any) -> None:
    """None, as a value, is as if the option were not there."""
    q, k, v = qkv()
    out, lse = np.zeros((2, 30, 4, 8), np.float32), random(2, 4, 30)
    options = fields("anyflash_forward_options") - {"block_size"}
    assert len(options) > 25
    for name in options | {"block_size_q", "block_size_k", "workspace"}:
        functions.forward(q, k, v, out, None, name, None)
    for name in fields("anyflash_backward_options"):
        functions.backward(out, q, k, v, out, lse, q.copy(), k.copy(), v.copy(), name, None)
    cache = call(new=0)
    given = [cache[name] for name in ("q", *CACHES)]
    for name in fields("anyflash_kvcache_options"):
        functions.forward_with_kvcache(*given, np.zeros((3, 2, 4, 12), "f4"), None, name, None)
    for name in fields("anyflash_merge_options"):
        functions.merge_states(out, lse, out, lse, out, None, name, None)


def test_version(functions: Any) -> None:
    assert functions.version() == anyflash.__version__


def test_a_build_without_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_embedding, "_folder", lambda: tmp_path)
    with pytest.raises(FileNotFoundError, match="build it where the package apache-tvm-ffi is"):
        anyflash.get_tvm_ffi_library()


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_links_neither_tvm_ffi_nor_the_standard_library() -> None:
    library = anyflash.get_tvm_ffi_library()

    def printed(*options: str) -> str:
        return subprocess.run(
            ["readelf", "-W", *options, library], check=True, capture_output=True, text=True
        ).stdout

    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", printed("-d"))
    assert {name for name in needed if not name.startswith("libc.")} == {"libanyflash.so"}
    shown = re.findall(r"GLOBAL DEFAULT +\d+ (\w+)", printed("--dyn-syms"))
    assert len(shown) >= 8
    assert all(name.startswith("__tvm_ffi_") for name in shown)
