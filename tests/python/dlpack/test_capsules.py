"""What DLPack allows and forbids, with a producer made by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import anyflash
from backends.capsules import IS_COPIED, READ_ONLY, Handmade, read
from calls.frameworks import EVERY_DTYPE, Producer, bits, inputs
from oracle.attention import Array

PROTOCOLS = pytest.mark.parametrize("protocol", ["any", "none", "version", "copy"])


def verify_freed(arrays: list[Handmade]) -> None:
    for x in arrays:
        x.verify_freed()


@EVERY_DTYPE
@PROTOCOLS
def test_protocols(protocol: str, dtype: str) -> None:
    """No keywords, as it was before versions; any; such as are needed."""
    arrays = inputs(dtype)
    expected, expected_lse = anyflash.attention(*arrays, causal=True, return_lse=True)
    target = np.zeros_like(expected)
    given = [Handmade(x, protocol) for x in (*arrays, target)]
    out, lse = anyflash.attention(*given[:3], causal=True, return_lse=True)
    assert isinstance(out, anyflash.Array)
    assert (bits(read(out)), bits(read(lse))) == (bits(expected), bits(expected_lse))
    assert anyflash.attention(*given[:3], causal=True, out=given[3]) is given[3]
    assert bits(target) == bits(expected)
    verify_freed(given)


def test_versions_are_asked_for_where_it_is_written() -> None:
    q, k, v = map(Handmade, inputs())
    out = Handmade(np.zeros((2, 30, 4, 12), np.float32))
    anyflash.attention(q, k, v, out=out)
    assert out.asked[-1]["max_version"] >= (1, 0)
    verify_freed([q, k, v, out])


def test_read_only() -> None:
    """Where an array says that it is read-only it is not written, and read all the same."""
    arrays = inputs()
    expected = anyflash.attention(*arrays)
    frozen = [Handmade(x, "version", flags=READ_ONLY) for x in arrays]
    assert bits(read(anyflash.attention(*frozen))) == bits(expected)
    target = np.zeros_like(expected)
    out = Handmade(target, flags=READ_ONLY)
    with pytest.raises(ValueError, match=r"anyflash\.attention: out is read-only"):
        anyflash.attention(*frozen, out=out)
    assert not target.any()
    verify_freed([*frozen, out])


def test_out_that_is_a_copy() -> None:
    q, k, v = map(Handmade, inputs())
    out = Handmade(np.zeros((2, 30, 4, 12), np.float32), flags=IS_COPIED)
    with pytest.raises(ValueError, match=r"anyflash\.attention: out is exported as a copy"):
        anyflash.attention(q, k, v, out=out)
    verify_freed([q, k, v, out])


@pytest.mark.parametrize("appended", [False, True])
def test_read_only_cache(appended: bool) -> None:
    q, k, v = inputs()
    new = [Handmade(x[:, :3].copy()) for x in (k, v)] if appended else []
    caches = [Handmade(x, flags=READ_ONLY) for x in (k, v)]
    lengths = Handmade(np.array([40, 20], np.int32))
    given = [Handmade(q), *caches, *new]
    if appended:
        before = [bits(k), bits(v)]
        name = r"anyflash\.attention_with_kvcache: k_cache is read-only"
        with pytest.raises(ValueError, match=name):
            anyflash.attention_with_kvcache(*given, cache_seqlens=lengths)
        assert [bits(k), bits(v)] == before
    else:
        out = anyflash.attention_with_kvcache(*given, cache_seqlens=lengths)
        arrays = (q, k, v)
        numbers = np.array([40, 20], np.int32)
        assert bits(read(out)) == bits(
            anyflash.attention_with_kvcache(*arrays, cache_seqlens=numbers)
        )
    verify_freed([*given, lengths])


def test_cache_is_appended_to() -> None:
    q, k, v = inputs()
    expected = [k.copy(), v.copy()]
    new = [x[:, 10:13].copy() for x in (k, v)]
    right = anyflash.attention_with_kvcache(q, *expected, *new, cache_seqlens=20)
    given = [Handmade(x) for x in (q, k, v, *new)]
    out = anyflash.attention_with_kvcache(*given, cache_seqlens=20)
    assert bits(read(out)) == bits(right)
    assert [bits(k), bits(v)] == [*map(bits, expected)]
    verify_freed(given)


@pytest.mark.parametrize("offset", [4, 64, 1 << 20])
def test_byte_offset(offset: int) -> None:
    """The first element lies byte_offset behind data, which may be anywhere."""
    arrays = inputs()
    expected = anyflash.attention(*arrays)
    target = np.zeros_like(expected)
    given = [Handmade(x, offset=offset) for x in (*arrays, target)]
    anyflash.attention(*given[:3], out=given[3])
    assert bits(target) == bits(expected)
    verify_freed(given)


def test_no_strides() -> None:
    """NULL: C order."""
    arrays = inputs()
    given = [Handmade(x, strides=False) for x in arrays]
    bias = np.random.default_rng(5).standard_normal((30, 50)).astype(np.float32)
    out = anyflash.attention(*given, bias=Handmade(bias, strides=False))
    assert bits(read(out)) == bits(anyflash.attention(*arrays, bias=bias))
    verify_freed(given)


def test_strides_of_0() -> None:
    q, k, v = inputs()
    wide = [np.broadcast_to(x[:, :1], x.shape) for x in (k, v)]
    keep = np.broadcast_to(np.arange(50) % 3 > 0, (2, 4, 30, 50))
    given = [Handmade(x) for x in (q, *wide, keep)]
    out = anyflash.attention(*given[:3], bias=given[3])
    assert bits(read(out)) == bits(anyflash.attention(q, *map(np.array, wide), bias=keep.copy()))
    verify_freed(given)


@pytest.mark.parametrize("shape", [(0, 3, 2, 8), (2, 0, 2, 8)])
@pytest.mark.parametrize("strides", [False, True])
def test_empty(shape: tuple[int, ...], strides: bool) -> None:
    x = Handmade(np.zeros(shape, np.float32), strides=strides)
    assert read(anyflash.attention(x, x, x)).shape == shape
    x.verify_freed()


DTYPES = {
    "complex64": (5, 64, 1),
    "float32x4": (2, 32, 4),
    "int4": (0, 4, 1),
    "float128": (2, 128, 1),
    "int16": (0, 16, 1),
    "opaque64": (3, 64, 1),
    "float8_e5m2": (12, 8, 1),
    "type code 99, bits 32": (99, 32, 1),
}


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("argument", ["q", "v", "bias", "out"])
def test_other_dtypes(argument: str, name: str) -> None:
    arrays: dict[str, Any] = {x: Handmade(y) for x, y in zip("qkv", inputs(), strict=True)}
    memory = np.zeros((2, 30, 4, 12) if argument == "out" else (2, 1, 30, 50), np.float32)
    x = inputs()["qkv".index(argument)] if argument in "qkv" else memory
    arrays[argument] = Handmade(x, dtype=DTYPES[name])
    with pytest.raises(TypeError, match=rf"^anyflash\.attention: {argument} is {name};.* allowed"):
        anyflash.attention(**arrays)
    arrays[argument].verify_freed()


DEVICES = {
    "opencl": 4,
    "vulkan": 7,
    "metal": 8,
    "vpi": 9,
    "rocm": 10,
    "rocm_host": 11,
    "ext_dev": 12,
    "oneapi": 14,
    "webgpu": 15,
    "hexagon": 16,
    "maia": 17,
    "trn": 18,
    "DLPack 99": 99,
}


@pytest.mark.parametrize("name", DEVICES)
def test_other_devices(name: str) -> None:
    """The second time __dlpack_device__ tells another one."""
    kind = DEVICES[name]
    q, _, v = map(Handmade, inputs())
    match = rf"^anyflash\.attention: k is on a device of type {name}; CPU and CUDA .*allowed"
    elsewhere = Handmade(inputs()[1], device=(kind, 0))
    with pytest.raises(TypeError, match=match):
        anyflash.attention(q, elsewhere, v)
    lying = Handmade(inputs()[1], exported_device=(kind, 0))
    with pytest.raises(TypeError, match=match):
        anyflash.attention(q, lying, v)
    verify_freed([q, lying, v])


def test_pinned_memory() -> None:
    """CUDA's memory of the host is the CPU's."""
    arrays = inputs()
    given = [Handmade(x, device=(3, 0)) for x in arrays]
    assert bits(read(anyflash.attention(*given))) == bits(anyflash.attention(*arrays))
    verify_freed(given)


@pytest.mark.parametrize("version", [(2, 0), (0, 8)])
def test_other_major_version(version: tuple[int, int]) -> None:
    """Nothing of the tensor may be read then, but it is freed."""
    q, k, v = inputs()
    text = ".".join(map(str, version))
    match = rf"^anyflash\.attention: k is exported as DLPack {text}; versions 1\.x"
    given = [Handmade(q), Handmade(k, "version", version=version, dtype=(77, 0, 0)), Handmade(v)]
    with pytest.raises(TypeError, match=match):
        anyflash.attention(*given)
    given[1].verify_freed()


def test_newer_minor_version() -> None:
    arrays = inputs()
    given = [Handmade(x, "version", version=(1, 999)) for x in arrays]
    assert bits(read(anyflash.attention(*given))) == bits(anyflash.attention(*arrays))
    verify_freed(given)


def test_too_many_dimensions() -> None:
    q, k, v = map(Handmade, inputs())
    deep = Handmade(np.zeros((1,) * 40, np.float32))
    with pytest.raises(ValueError, match=r"^anyflash\.attention: k has 40 dimensions"):
        anyflash.attention(q, deep, v)
    with pytest.raises(ValueError, match=r"^anyflash\.attention: bias has 40 dimensions"):
        anyflash.attention(q, k, v, bias=deep)
    verify_freed([q, v, deep])


def test_errors_free_what_was_read() -> None:
    q, k, v = inputs()
    given = [Handmade(x) for x in (q, k, v[:, :7].copy())]
    with pytest.raises(ValueError, match=r"^anyflash\.attention: v has shape"):
        anyflash.attention(*given)
    verify_freed(given)


class Returns(Handmade):
    """__dlpack__ returns or raises this."""

    def __init__(self, x: Array, what: Any) -> None:
        super().__init__(x)
        self.what = what

    def __dlpack__(self, **_: Any) -> Any:
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what


@pytest.mark.parametrize("what", [None, 1, "dltensor", np.zeros(3)], ids=str)
def test_no_capsule(what: Any) -> None:
    q, k, v = inputs()
    match = r"^anyflash\.attention: k cannot be read through DLPack: .*no capsule"
    with pytest.raises(TypeError, match=match):
        anyflash.attention(Handmade(q), Returns(k, what), Handmade(v))


def test_capsule_is_used_once() -> None:
    q, k, v = inputs()
    source = Handmade(k)
    again = Returns(k, source.__dlpack__())
    with pytest.raises(TypeError, match=r"^anyflash\.attention: k .*was read before"):
        anyflash.attention(Handmade(q), again, Handmade(v))
    source.verify_freed()


@pytest.mark.parametrize("error", [BufferError, TypeError])
def test_refusal_is_quoted(error: type[Exception]) -> None:
    q, k, v = inputs()
    read_before = Handmade(q)
    match = r"^anyflash\.attention: k cannot be read through DLPack: not today"
    with pytest.raises(TypeError, match=match):
        anyflash.attention(read_before, Returns(k, error("not today")), Handmade(v))
    read_before.verify_freed()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError])
def test_other_exceptions_pass(error: type[BaseException]) -> None:
    """What was read of other arrays is freed, and the next call works."""
    q, k, v = inputs()
    read_before = Handmade(q)
    with pytest.raises(error, match=r"^not today$"):
        anyflash.attention(read_before, Returns(k, error("not today")), Handmade(v))
    read_before.verify_freed()
    given = [Handmade(x) for x in (q, k, v)]
    assert bits(read(anyflash.attention(*given))) == bits(anyflash.attention(q, k, v))
    verify_freed(given)


def test_results_for_any_consumer() -> None:
    """anyflash.Array gives capsules of both kinds, writable; what they hold outlives it."""
    x = inputs()[0]
    out = anyflash.attention(*[Producer(x)] * 3)
    expected = bits(anyflash.attention(x, x, x))
    assert bits(read(out)) == expected
    for keywords in ({}, {"max_version": (1, 0)}, {"copy": False, "dl_device": (1, 0)}):
        view = np.from_dlpack(Returns(x, out.__dlpack__(**keywords)))
        assert bits(view) == expected
    kept = np.from_dlpack(out)
    assert kept.flags.writeable
    del out
    anyflash.attention(*[Producer(x * 2)] * 3)
    assert bits(kept) == expected
