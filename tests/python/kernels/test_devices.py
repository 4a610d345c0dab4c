"""GPUs that the build has no code for, or too small for a kernel: the emulated one, altered."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tuned_tiles import SIZES, Key, rows

from backends import capi
from backends.emulated import A100_SMEM, LARGE_SMEM, SMALL_SMEM, emulated
from cases.cache_case import CacheCase
from cases.case import Blocks, Case, Features, Packed
from cases.gradient_case import GradientCase
from run.backward import backward, verify_backward
from run.forward import assert_same_bits, bits, run, verify
from run.kvcache import run_cache

__all__ = ["emulated"]

SMEM = {80: A100_SMEM, 90: LARGE_SMEM, 100: LARGE_SMEM} | dict.fromkeys((86, 89, 120), SMALL_SMEM)

pytestmark = pytest.mark.emulated


def launched(head_dim: int = 64) -> set[str]:
    """The kernels that were launched."""
    backend = capi.backend("emulated-sm80")
    before = backend.library.launches()
    backend.forward(*Case("device", sq=3, sk=5, d=head_dim).tensors())
    return {name for name, n in backend.library.launches().items() if n != before[name]}


@pytest.mark.parametrize("capability", [80, 86, 89])
def test_code_for_8_0_runs_on_8_x(emulated: ctypes.CDLL, capability: int) -> None:
    emulated.emulated_set_compute_capability(capability)
    launched()


@pytest.mark.parametrize("capability", [75, 100, 120])
def test_other_gpus_are_told_what_was_built(emulated: ctypes.CDLL, capability: int) -> None:
    emulated.emulated_set_compute_capability(capability)
    with pytest.raises(capi.CallError) as caught:
        launched()
    assert caught.value.status == capi.UNSUPPORTED
    assert f"{capability // 10}.{capability % 10}" in caught.value.message
    assert "sm_80" in caught.value.message


SCORED = Features(softcap=5.0, alibi="h")
DROPPED = Features(dropout_p=0.3)
SMALL_BLOCKS = Features(blocks=Blocks((128, 64)))
LARGE_BLOCKS = Features(blocks=Blocks((128, 128)))


@pytest.mark.parametrize(
    ("kernel", "problem"),
    [
        ("sm90_forward_f16_d64", Case("plain", sq=70, sk=90, causal=True)),
        ("sm90_forward_f16_d96", Case("odd", sq=70, sk=90, d=90, dv=70)),
        ("sm80_forward_f16_d64", Case("negative", sq=70, sk=90, scale=-0.3)),
        ("sm80_forward_f16_d64", Case("tiny", sq=70, sk=90, scale=1e-30)),
        ("sm90_forward_f16_d64_softcap", Case("cap", sq=70, sk=90, features=Features(softcap=5.0))),
        ("sm80_forward_f16_d64_scored", Case("both", sq=70, sk=90, features=SCORED)),
        ("sm80_forward_f16_d64_generic", Case("64", sq=70, sk=90, features=SMALL_BLOCKS)),
        ("sm90_forward_f16_d64_blocks", Case("128", sq=70, sk=90, features=LARGE_BLOCKS)),
        ("sm80_forward_f16_d64_dropout", Case("small", sq=70, sk=90, features=DROPPED)),
        (
            "sm90_forward_f16_d128_dropout",
            Case("large", sq=70, sk=90, d=65, dv=65, features=DROPPED),
        ),
    ],
)
def test_hopper_leaves_to_sm80_what_its_kernels_lack(kernel: str, problem: Case) -> None:
    verify(replace(capi.backend("emulated-sm90"), expected=kernel), problem)


def test_kernels_that_do_not_fit_are_not_launched(emulated: ctypes.CDLL) -> None:
    emulated.emu_set_options(0, -1, 1 << 15)
    with pytest.raises(
        capi.CallError, match=r"q has head dim 256.*32768 bytes.*up to (64|96)"
    ) as caught:
        launched(256)
    assert caught.value.status == capi.UNSUPPORTED


@pytest.mark.parametrize("operation", ["forward", "backward", "decode"])
@pytest.mark.parametrize("sizes", [{"d": 513, "dv": 40}, {"d": 40, "dv": 513}], ids=["q", "v"])
def test_the_largest_head_dim_is_named(sizes: dict[str, int], operation: str) -> None:
    gpu = capi.backend("emulated-sm80")
    case = Case("large", "fp16", 1, 3, 5, **sizes)
    call: dict[str, Callable[[], Any]] = {
        "forward": lambda: run(gpu, case),
        "backward": lambda: backward(gpu, GradientCase(case)),
        "decode": lambda: run_cache(gpu, CacheCase("large", lengths=(5,), **sizes).call()),
    }
    name = "q" if sizes["d"] == 513 else "v_cache" if operation == "decode" else "v"
    message = f": {name} has head dim 513; the {operation} kernels .* take head dims up to 512$"
    with pytest.raises(capi.CallError, match=message) as caught:
        call[operation]()
    assert caught.value.status == capi.UNSUPPORTED


STREAM, OTHER_STREAM = 7, 8
PACKED = Features(packed=Packed((9, 20), (30, 40)))
READ_LENGTHS: dict[str, Callable[..., Any]] = {
    "forward": lambda gpu, **options: run(gpu, Case("capture", features=PACKED), **options),
    "backward": lambda gpu, **options: backward(
        gpu, GradientCase(Case("capture", features=PACKED)), **options
    ),
    "decode": lambda gpu, **options: run_cache(
        gpu, CacheCase("capture", "fp16", lengths=(9, 30)).call(), **options
    ),
}


@pytest.mark.parametrize("operation", READ_LENGTHS)
def test_validate_in_a_capture(emulated: ctypes.CDLL, operation: str) -> None:
    """To copy lengths to the host would wait for the stream, which invalidates a capture."""
    gpu, call = capi.backend("emulated-sm80"), READ_LENGTHS[operation]
    emulated.emulated_capture(STREAM)
    with pytest.raises(capi.CallError, match="validate is set, but the stream is being captured"):
        call(gpu, stream=STREAM, validate=1)
    call(gpu, stream=STREAM)
    call(gpu, stream=OTHER_STREAM, validate=1)


@pytest.mark.parametrize(
    "name", ["plain", "causal", "square", "one key more", "window", "packed", "float32"]
)
@pytest.mark.parametrize(
    ("head_dim", "kernel"),
    [
        (32, "32_wide"),
        (128, "128_wide"),
        (192, "192_128_wide"),
        (256, "256_wide"),
        (512, "512_wide"),
    ],
)
def test_backward_on_227_kilobytes(
    emulated: ctypes.CDLL, head_dim: int, kernel: str, name: str
) -> None:
    """Larger tiles of rows."""
    emulated.emu_set_options(0, -1, LARGE_SMEM)
    features = {
        "window": Features(window=(70, 40)),
        "packed": Features(packed=Packed((130, 0, 33), (200, 5, 64))),
    }
    d_v = 128 if head_dim == 192 else 0
    sq, sk = {"square": (256, 256), "one key more": (128, 129)}.get(name, (150, 333))
    causal = name in ("causal", "square", "one key more")
    case = Case("tiles", "fp16", 1, sq, sk, 4, 2, head_dim, d_v, causal=causal)
    values = "normal" if name in ("plain", "float32") else "nan_v"
    case = replace(case, values=values, features=features.get(name, Features()))
    backend = replace(capi.backend("emulated-sm80"), expected=f"sm80_backward_f16_d{kernel}")
    grad_dtype = "fp32" if name == "float32" else ""
    verify_backward(backend, GradientCase(case, grad_dtype=grad_dtype))


def on_emulated_gpu(head_dim: int, kernel: str, name: str, values: str) -> None:
    features = {
        "window": Features(window=(70, 40), max_logits=True),
        "packed": Features(packed=Packed((130, 0, 33), (200, 5, 64))),
    }
    keys = 1 if name == "one key" else 333
    case = Case("tiles", "fp16", 1, 150, keys, 2, 1, head_dim, causal=name == "causal")
    case = replace(case, values=values, features=features.get(name, Features()))
    backend = replace(capi.backend("emulated-sm80"), expected=f"sm80_forward_f16_d{kernel}")
    verify(backend, case)


VALUES = pytest.mark.parametrize("values", ["normal", "falling", "nan_v"])
NAMES = pytest.mark.parametrize("name", ["plain", "causal", "window", "packed", "one key"])


@VALUES
@NAMES
@pytest.mark.parametrize(
    ("head_dim", "kernel"),
    [(128, "128_wide"), (200, "256_wide"), (256, "256_wide"), (512, "512_wide")],
)
def test_forward_on_227_kilobytes(
    emulated: ctypes.CDLL, head_dim: int, kernel: str, name: str, values: str
) -> None:
    """Where an SM has room for two CTAs with more buffers, or where warps share rows."""
    emulated.emu_set_options(0, -1, LARGE_SMEM)
    on_emulated_gpu(head_dim, kernel, name, values)


@VALUES
@NAMES
@pytest.mark.parametrize(
    ("head_dim", "kernel"), [(60, "64"), (128, "128"), (256, "256"), (512, "512")]
)
def test_small_problems(
    emulated: ctypes.CDLL, head_dim: int, kernel: str, name: str, values: str
) -> None:
    """Smaller tiles where larger ones would leave multiprocessors idle."""
    emulated.emulated_set_full_grid(108)
    on_emulated_gpu(head_dim, f"{kernel}_compact", name, values)


@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("smem", [A100_SMEM, LARGE_SMEM])
def test_tiles_do_not_change_bits(
    emulated: ctypes.CDLL, smem: int, causal: bool, head_dim: int
) -> None:
    emulated.emu_set_options(0, -1, smem)
    backend = capi.backend("emulated-sm80")
    case = Case("tiles", "fp16", 1, 200, 300, 2, 1, head_dim, causal=causal, values="falling")
    large = run(backend, case)
    emulated.emulated_set_full_grid(108)
    assert_same_bits(run(backend, case), large)


Family = tuple[str, int, int]  # operation, head dims


def bits_groups(emulated: ctypes.CDLL) -> dict[Family, list[set[str]]]:
    """Tile configs of plain kernels, of those that the emulator has several of, which say that they
    give a row the same bits (KernelDescriptor::bits_group)."""
    found: dict[tuple[Family, int], set[str]] = {}
    for row in capi.backend("emulated-sm80").library.rows:
        if row.dtype != "fp16" or row.op == "decode" or row.variant not in PLAIN:
            continue
        family = row.op, row.head_dim, row.head_dim_v
        group = emulated.emulated_bits_group(row.name.encode())
        assert group >= 0
        found.setdefault((family, group), set()).add(PLAIN[row.variant])
    groups: dict[Family, list[set[str]]] = {}
    for (family, _), configs in found.items():
        groups.setdefault(family, []).append(configs)
    return groups


PLAIN = {"plain": "", "compact": "compact", "wide": "wide"}


def results(
    family: Family, causal: bool, rows: int = 200, keys: int = 300
) -> tuple[str, dict[str, bytes]]:
    """The kernel's config ("generic" and so on, if it is no plain one), and the results' bits."""
    op, d, d_v = family
    emulated = capi.backend("emulated-sm80")
    library = emulated.library
    case = Case("tiles", "fp16", 1, rows, keys, 2, 1, d, d_v, causal=causal, values="falling")
    before = library.launches()
    if op == "forward":
        tensors = run(emulated, case)._asdict()
        found = {name: tensors[name] for name in ("out", "lse")}
    else:
        found = backward(emulated, GradientCase(case, deterministic=True)).outputs()
    (name,) = (name for name, n in library.launches().items() if n != before[name])
    variant = capi.Row.parse(name).variant
    config = "" if variant == "plain" else variant
    return config, {name: bits(tensor.view) for name, tensor in found.items()}


@pytest.mark.parametrize("op", ["forward", "backward"])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_of_a_bits_group_give_the_same_bits(
    emulated: ctypes.CDLL, op: str, causal: bool
) -> None:
    emulated.emu_set_options(0, -1, LARGE_SMEM)
    groups = bits_groups(emulated)
    compared = 0
    for family, configs in ((f, c) for f, all_of in groups.items() for c in all_of):
        if family[0] != op or len(configs) == 1:
            continue
        name = f"sm80_{op}_f16_d{'_'.join(dict.fromkeys(map(str, family[1:])))}"
        found = {}
        for config in sorted(configs):
            kernel = "_".join([name, *([config] if config else [])])
            emulated.emulated_prefer_kernel(kernel.encode())
            ran, found[config] = results(family, causal)
            assert ran == config
        first, *others = found.values()
        assert all(other == first for other in others), f"{family}: {configs}"
        compared += len(others)
    assert compared >= 3, groups


def test_the_table_of_tiles_keeps_bits(emulated: ctypes.CDLL) -> None:
    """Of what a GPU takes for some head dims, by the table or by the rules. The table's head dims
    that the emulator lacks must all have one config."""
    table = rows((capi.REPOSITORY / "cpp/src/tuned_tiles.cpp").read_text())
    capabilities = {cc for cc, _ in table}
    assert capabilities <= SMEM.keys(), "SMEM lacks a GPU's shared memory"
    library = capi.backend("emulated-sm80").library
    has = {(row.op, row.head_dim, row.head_dim_v) for row in library.rows if row.dtype == "fp16"}
    groups = bits_groups(emulated)
    families = {*groups, *(key.family[:3] for _, key in table)}
    for capability, family in itertools.product(capabilities | {80, 89, 90}, families):
        emulated.emu_set_options(0, -1, SMEM[capability])
        emulated.emulated_prefer_kernel(b"")
        taken = set()
        for bounded, size in itertools.product((False, True), SIZES):
            emulated.emulated_set_full_grid(10**6 if size == "small grid" else 1)
            config = table.get((capability, Key(*family, bounded, size)))
            if config is None:
                config = "what the rules choose"
                if family in has:
                    config = results(family, bounded, rows=8, keys=8)[0]
            taken.add(config)
        alike = len(taken) == 1 or any(taken <= group for group in groups.get(family, []))
        assert alike, f"{capability}, {family}: {taken}"


class Counters(ctypes.Structure):
    """emu::Counters."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("launches", "blocks", "barriers", "mma"),
            *("ldmatrix_matrices", "ldmatrix_conflicts", "cp_async"),
        )
    )


@pytest.mark.parametrize(
    "options",
    [{}, {"dropout_p": 0.5}, {"dropout_p": 0.5, "softcap": 2.0}],
    ids=["plain", "dropout", "generic"],
)
@pytest.mark.parametrize("head_dim", [32, 64, 128, 256])
def test_no_bank_conflicts(emulated: ctypes.CDLL, head_dim: int, options: dict[str, float]) -> None:
    """Swizzled tiles: every 8x8 matrix that ldmatrix reads comes in one pass over the banks.

    The products are also as many as the arithmetic says: 128 x 64 x head_dim, twice, in steps of
    16 x 8 x 16.
    """
    emulated.emu_reset_counters()
    case = Case("banks", sq=128, sk=64, heads=1, heads_k=1, d=head_dim)
    capi.backend("emulated-sm80").forward(*case.tensors(), **options)
    counters = Counters()
    emulated.emu_get_counters(ctypes.byref(counters))
    assert counters.ldmatrix_matrices > 0
    assert counters.ldmatrix_conflicts == 0
    assert counters.mma == 2 * 128 * 64 * head_dim // (16 * 8 * 16)
