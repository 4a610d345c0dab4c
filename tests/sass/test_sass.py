"""The machine code of the sm_80 kernels: no GPU needed.

The exact rules hold for every compiler. The rest compares with recorded.json, so that a change that
makes the code worse is seen; it applies to the compiler that the figures were recorded with.
"""

from __future__ import annotations

import os
import warnings
from typing import NoReturn

import pytest
from anchors import ANCHORS
from figures import (
    BACKWARD_SHARE,
    COMPARED,
    GENERIC_SHARE,
    MIN_WARPS_PER_SM,
    ONE_FEATURE_SHARE,
    OTHER_TILES_SHARE,
    PARTED_ABOVE,
    SPILL_LIMITS,
    Library,
    compare,
    expected_hmma,
    kernel_key,
    load_recorded,
    plain_name,
)


def fail(message: str, library: Library, kernel: str) -> NoReturn:
    pytest.fail(f"{kernel}: {message}\n{library.how_to_inspect(kernel)}", pytrace=False)


def twin(name: str) -> str:
    """The kernel of the other dtype."""
    return name.replace("_bf16_", "_f16_") if "_bf16_" in name else name.replace("_f16_", "_bf16_")


def test_library_has_kernels(library: Library) -> None:
    assert library.rows
    if os.environ.get("ANYFLASH_EXPECT_CUDA") == "1":
        # One dtype is enough.
        here = set(library.rows) | {twin(name) for name in library.rows}
        missing = set(load_recorded()["kernels"]) - here
        assert not missing, f"recorded, but not in this build: {sorted(missing)}"


def test_tensor_instructions(library: Library, kernel: str) -> None:
    loop = library.analysis(kernel).get("loop")
    if loop is None:
        fail("no loop holds tensor instructions", library, kernel)
    counts, expected = loop["mma_shapes"], expected_hmma(library.rows[kernel])
    if sum(counts.values()) != expected:
        fail(f"{counts} in the hot loop, the arithmetic says {expected}", library, kernel)
    row = library.rows[kernel]
    dtype = ".BF16" if row["dtype"] == "bfloat16" else ""
    if "quantized_cache" in row["features"]:  # float16, whatever Q is
        dtype = ""
    if set(counts) != {f"HMMA.16816.F32{dtype}"}:
        fail(f"{counts} in the hot loop, allowed is HMMA.16816.F32{dtype}", library, kernel)


def test_spills(library: Library, kernel: str) -> None:
    """Of the plain kernels: those with features have no counterpart to be measured by, nor have a
    tile for 228 KB of shared memory, head dim 256 in 99 KB, 512, or prefill. (recorded.json bounds
    them all.) Of decoding kernels, those that read 16-bit caches must do without."""
    row = library.rows[kernel]
    if kernel.endswith(("_wide", "_d256_compact")):
        return
    if row["features"] and (row["op"] != "decode" or "quantized_cache" in row["features"]):
        return
    if row["op"] == "prefill" or (row["op"] != "decode" and row["head_dim"] > PARTED_ABOVE):
        return
    spills = library.figures(kernel)["spills_loop"]
    limit = 0 if row["op"] == "decode" else SPILL_LIMITS[row["op"], row["head_dim"]]
    if spills > limit:
        message = f"{spills} local loads and stores in the hot loop, at most {limit} are allowed"
        fail(message, library, kernel)


def test_generic_keeps_half_of_the_tensor_cores(library: Library, kernel: str) -> None:
    """Along the heaviest path of the loop for block maps and ALiBi."""
    if not kernel.endswith("_generic") or library.rows[kernel]["op"] != "forward":
        return
    plain = plain_name(kernel)
    generic_sim, plain_sim = library.figures(kernel)["sim"], library.figures(plain)["sim"]
    if generic_sim < GENERIC_SHARE * plain_sim:
        message = f"sim is {generic_sim}; at least half of {plain}'s {plain_sim} is required"
        fail(message, library, kernel)


def test_one_feature_is_nearly_as_fast(library: Library, kernel: str) -> None:
    if len(library.rows[kernel]["features"]) != 1:
        return
    plain = plain_name(kernel)
    sim, plain_sim = library.figures(kernel)["sim"], library.figures(plain)["sim"]
    if sim < ONE_FEATURE_SHARE * plain_sim:
        message = f"sim is {sim}; {ONE_FEATURE_SHARE} of {plain}'s {plain_sim} are required"
        fail(message, library, kernel)


def test_backward_is_as_lean_as_flash_attn_2(library: Library, kernel: str) -> None:
    row = library.rows[kernel]
    anchor = ANCHORS["backward"].get(f"d{row['head_dim']} full")
    same_dims = row["head_dim"] == row["head_dim_v"]
    if row["op"] != "backward" or row["features"] or anchor is None or not same_dims:
        return
    share = OTHER_TILES_SHARE if kernel.endswith(("_compact", "_wide")) else BACKWARD_SHARE
    for figure in ("stall_per_hmma", "smem_over_tensor"):
        value, limit = library.figures(kernel)[figure], share * anchor[figure]
        if value > limit:
            fail(f"{figure} is {value}; at most {limit:.2f} is allowed", library, kernel)


def test_occupancy(library: Library, kernel: str) -> None:
    row = library.rows[kernel]
    if kernel.endswith(("_compact", "_wide")):  # an A100 runs others, or these for small problems
        return
    if row["op"] == "decode":  # an A100's shared memory goes to tiles on their way instead
        warps = library.figures(kernel)["ctas"] * row["warps"]
        if warps < MIN_WARPS_PER_SM:
            message = f"registers for {warps} warps an SM; at least {MIN_WARPS_PER_SM} are required"
            fail(message, library, kernel)
        return
    if row["op"] == "forward" and row["head_dim"] > PARTED_ABOVE:  # one CTA of 160 KB
        return
    occupancy = library.analysis(kernel)["occupancy"]
    if occupancy["warps_per_sm"] < MIN_WARPS_PER_SM:
        message = f"an SM holds {occupancy}; at least {MIN_WARPS_PER_SM} warps are required"
        fail(message, library, kernel)


def test_not_worse_than_recorded(library: Library, kernel: str) -> None:
    recorded = load_recorded()
    if kernel not in recorded["kernels"]:
        pytest.fail(f"{kernel} is not recorded: run python tests/sass/record.py", pytrace=False)
    if library.compiler != recorded["compiler"]:
        pytest.skip(
            f"recorded with nvcc {recorded['compiler']}, compiled by {library.compiler}: "
            "only the exact rules are checked"
        )
    worse, better = compare(recorded["kernels"][kernel], library.figures(kernel))
    if worse:
        record = "where it is worth it, record it and say why: python tests/sass/record.py"
        fail(f"worse than recorded: {'; '.join(worse)}\n  {record}", library, kernel)
    if better:
        hint = "record it: python tests/sass/record.py"
        warnings.warn(
            f"{kernel} is better than recorded ({'; '.join(better)}); {hint}", stacklevel=1
        )


@pytest.mark.parametrize(("figure", "sign", "tolerance"), COMPARED)
def test_comparison_sees_both_directions(figure: str, sign: int, tolerance: float) -> None:
    before = {name: 100.0 for name, _, _ in COMPARED}
    assert compare(before, before) == ([], [])
    assert compare(before, before | {figure: 100 * (1 + 0.9 * tolerance)}) == ([], [])
    change = 100 * tolerance + 1
    assert compare(before, before | {figure: 100 - sign * change})[0]
    assert compare(before, before | {figure: 100 + sign * change})[1]


def test_kernels_are_found_by_their_template_arguments() -> None:
    name = (
        "_ZN8anyflash4sm8014forward_kernelINS0_13ForwardTraitsIN7cutlass{}ELi{}ELi{}ENS_{}ForwardE"
        "LNS_10TileConfigE{}EEES5_EEvNS_13ForwardParamsE"
    )
    key = kernel_key(name.format("6half_t", 64, 64, "12Plain", 0))
    assert key == ("forward", "float16", 64, 64, (), 0, "")
    key = kernel_key(name.format("6half_t", 64, 64, "14Dropout", 0))
    assert key == ("forward", "float16", 64, 64, ("dropout",), 0, "")
    key = kernel_key(name.format("10bfloat16_t", 192, 128, "13Scored", 1))
    assert key == ("forward", "bfloat16", 192, 128, ("softcap", "alibi"), 0, "compact")
    name = (
        "_ZN8anyflash4sm8015backward_kernelINS0_14BackwardTraitsIN7cutlass6half_tELi64ELi32ELb0ELb0E"
        "LNS_10TileConfigE2EEENS_13PlainBackwardEEEvNS_15BackwardScratchE"
    )
    assert kernel_key(name) == ("backward", "float16", 64, 32, (), 0, "wide")
    dropout = name.replace("13PlainBackward", "15DropoutBackward")
    assert kernel_key(dropout) == ("backward", "float16", 64, 32, ("dropout",), 0, "wide")
    assert kernel_key(name.replace("15backward_kernel", "21postprocess_dq_kernel")) is None
    name = (
        "_ZN8anyflash4sm8025backward_by_chunks_kernelINS0_13ChunkedTraitsINS0_14BackwardTraitsIN7cutlass"
        "6half_tELi512ELi512ELb0ELb0ELNS_10TileConfigE0EEEEENS_13PlainBackwardELNS0_11KeyGradientE{}E"
        "EEvNS_15BackwardScratchE"
    )
    assert kernel_key(name.format(0)) == ("backward", "float16", 512, 512, (), 0, "")
    assert kernel_key(name.format(1)) is None
    name = (
        "_ZN8anyflash4sm8013decode_kernelINS0_12DecodeTraitsIN7cutlass{}ELi128ELi128ELi{}ELb{}EEEEEv"
        "NS_13KvCacheParamsE"
    )
    key = kernel_key(name.format("6half_t", 16, 0))
    assert key == ("decode", "float16", 128, 128, ("softcap", "alibi"), 16, "")
    key = kernel_key(name.format("10bfloat16_t", 64, 1))
    features = ("softcap", "alibi", "quantized_cache")
    assert key == ("decode", "bfloat16", 128, 128, features, 64, "")
    assert kernel_key("_ZN8anyflash9copy_rowsEv") is None
