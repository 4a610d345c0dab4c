"""anyflash_forward against float64, on every backend."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings

import anyflash
from backends import capi
from backends.capi import Backend
from backends.tensors import WRITABLE_LAYOUTS, empty, place, sparse
from cases.case import Case, Layouts
from cases.random_cases import random_cases
from oracle.attention import DTYPES, check
from run.forward import assert_same_bits, bits, run, supports, verify

pytestmark = pytest.mark.hopper


def test_case(backend: Backend, case: Case) -> None:
    verify(backend, case)


def test_random(backend: Backend) -> None:
    examples = {"emulated-sm80": 80, "emulated-sm90": 80, "cuda": 500}.get(backend.name, 120)
    dtypes = sorted({row.dtype for row in backend.rows()})

    @settings(max_examples=examples)
    @given(random_cases(dtypes).filter(lambda case: supports(backend.name, case)))
    def verify_one(case: Case) -> None:
        verify(backend, case)

    verify_one()


def test_without_lse(backend: Backend) -> None:
    case = Case("without-lse", sq=70, sk=90, causal=True)
    q, k, v, out, _ = case.tensors()
    backend.forward(q, k, v, out, causal=True)
    assert bits(out.view) == bits(run(backend, case).out.view)


def test_default_options_and_compact_strides(backend: Backend) -> None:
    """A null `options` and null strides mean the defaults."""
    tensors = Case("defaults", sq=70, sk=90).tensors()
    with backend.memory.resident([t.storage for t in tensors]) as addresses:
        dl = [
            capi.dl_tensor(tensor, address, backend.device)
            for tensor, address in zip(tensors, addresses, strict=True)
        ]
        for tensor in dl:
            tensor.strides = None
        size = backend.library.workspace_size(dl)
        workspace = np.empty(max(size, 1), np.uint8)
        with backend.memory.resident([workspace]) as (address,):
            backend.library.forward(dl, None, address, size)
    check(tensors.out.view, tensors.lse.view, Case("defaults", sq=70, sk=90).expected())


def test_workspace_does_not_grow_with_the_scores(backend: Backend) -> None:
    """Memory is linear in the sequence length, not quadratic."""

    def size(length: int) -> int:
        tensors = Case("linear", sq=length, sk=length, heads=8, heads_k=8).tensors()
        dl = [capi.dl_tensor(t, t.storage.ctypes.data, backend.device) for t in tensors]
        return backend.library.workspace_size(dl)

    assert size(4096) <= 4 * size(1024) + 4096


@pytest.mark.parametrize("head_dim", [64, 128, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_batch_invariance(backend: Backend, causal: bool, head_dim: int) -> None:
    """A sequence has the same bits alone and beside others, also beside so many that a GPU takes
    other tiles."""
    batch = 80 if backend.name == "cuda" else 5
    case = Case("batch", "fp16", batch, 70, 150, 4, 4, head_dim, causal=causal)
    q, k, v, out, lse = run(backend, case)
    for index in (0, 1, batch // 2, batch - 1):
        one = slice(index, index + 1)
        single_out = empty(out.view[one].shape, out.view.dtype)
        single_lse = empty(lse.view[one].shape, lse.view.dtype, axes="bhs")
        inputs = [place(tensor.view[one]) for tensor in (q, k, v)]
        backend.forward(*inputs, single_out, single_lse, causal=causal)
        assert bits(single_out.view) == bits(out.view[one]), f"out of sequence {index} differs"
        assert bits(single_lse.view) == bits(lse.view[one]), f"lse of sequence {index} differs"


def test_repeats_have_the_same_bits(backend: Backend) -> None:
    case = Case("repeat", batch=2, sq=150, sk=200, heads=4, heads_k=2, causal=True)
    first = run(backend, case)
    for _ in range({"cuda": 250, "emulated-sm80": 5, "emulated-sm90": 5}.get(backend.name, 20)):
        assert_same_bits(run(backend, case), first)


def test_layout_does_not_change_bits(backend: Backend) -> None:
    case = Case("layouts", batch=2, sq=70, sk=100, heads=4, heads_k=2, d=40, causal=True)
    first = run(backend, case)
    for name in WRITABLE_LAYOUTS:
        if not name.startswith("fused"):
            assert_same_bits(run(backend, replace(case, layouts=Layouts(*[name] * 5))), first)


@pytest.mark.usefixtures("many_threads")
@pytest.mark.parametrize("dtype", ["fp64", "fp32", "fp16", "bf16"])
@pytest.mark.parametrize("sq", [1, 300])
def test_thread_count_invariance(cpu: Backend, dtype: str, sq: int) -> None:
    case = Case("threads", dtype, batch=2, sq=sq, sk=700, heads=3, heads_k=1, causal=True)
    one = run(cpu, case, num_threads=1)
    for num_threads in (2, 3, 7, 64):
        assert_same_bits(run(cpu, case, num_threads=num_threads), one)


@pytest.mark.usefixtures("many_threads")
def test_calls_from_several_threads(cpu: Backend) -> None:
    """Also: a thread's error message is its own."""
    cases = [Case(f"thread-{i}", "fp32", sq=60 + i, sk=90 + i, causal=True) for i in range(8)]

    def work(case: Case) -> None:
        for _ in range(5):
            q, k, v, out, lse = run(cpu, case)
            check(out.view, lse.view, case.expected())
            with pytest.raises(capi.CallError, match=rf"v has .*\b{case.sk - 1}\b"):
                cpu.forward(q, k, place(v.view[:, :-1]), out, lse)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, cases))


# Strides of q, k, v and out; each is beyond 2**31 elements on another axis.
FAR = (1 << 31) + 64


@pytest.mark.parametrize(
    "strides",
    [
        pytest.param((FAR, 2 * 64, 64, 1), id="batch"),
        pytest.param((2 * 64, FAR, 64, 1), id="row"),
        pytest.param((3 * 64, 64, FAR, 1), id="head"),
    ],
)
def test_strides_beyond_int32(backend: Backend, strides: tuple[int, int, int, int]) -> None:
    case = Case("far", batch=2, sq=3, sk=3, causal=True)
    inputs = [sparse(values, strides) for values in case.values_of_inputs()]
    for tensor in inputs:
        tensor.storage.flags.writeable = False
    out = sparse(np.full((2, 3, 2, 64), np.nan, np.float16), strides)
    lse = empty((2, 2, 3), DTYPES["fp32"], axes="bhs")
    backend.forward(*inputs, out, lse, causal=True)
    check(out.view, lse.view, case.expected())


def test_the_default_is_the_best_instruction_set() -> None:
    info = anyflash.build_info()
    assert capi.best_isa() == info["cpu"]["isa"]
    assert capi.backend("cpu").library.version == anyflash.__version__ == info["version"]


def test_unknown_instruction_set() -> None:
    library = capi.backend("cpu").library
    tensors = Case("isa", "fp32").tensors()
    dl = [capi.dl_tensor(t, t.storage.ctypes.data, (capi.KDL_CPU, 0)) for t in tensors]
    options = capi.Options(size=ctypes.sizeof(capi.Options), cpu_isa=99)
    with pytest.raises(capi.CallError, match=r"cpu_isa.*99") as error:
        library.workspace_size(dl, options)
    assert error.value.status == capi.INVALID_VALUE
