"""One unit of each template compiles with CUDA 12.9, which `make test` has no nvcc of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

import nvrtc
import pytest

Results = dict[str, "Future[nvrtc.Outcome]"]

# The longest first. The backward has a unit for each variant.
TEMPLATES = [
    "sm80_backward_bf16_d512",  # by chunks
    "sm80_backward_bf16_d128_wide",  # ping-pong
    "sm80_backward_bf16_d32_generic",
    "sm80_forward_bf16_d64",
    "sm80_decode_bf16_d64",
    "sm80_backward_bf16_d32",
    "sm80_prefill_bf16_d64",
    "sm90_backward_bf16_d512",  # the kernel for wide heads, by pairs of CTAs
    "sm90_backward_bf16_d64",
    "sm90_forward_bf16_d64",
    "sm90_prefill_bf16_d64",
    "sm90_decode_bf16_d64",
    "sm90_decode_bf16_d576_512",  # whose warpgroups share rows
]
# Of these units one kernel alone.
ONE_KERNEL = {
    "sm80_backward_bf16_d512": "sm80_backward_bf16_d512",
    "sm80_backward_bf16_d128_wide": "sm80_backward_bf16_d128",
}
DEVICE_CODE = re.compile(r"\b(ANYFLASH_DEVICE|__global__)\b")
WITHOUT_TEMPLATES = sorted(file.stem for file in nvrtc.CUDA_SOURCES)


@pytest.fixture(scope="module")
def units() -> dict[str, Path]:
    found = {unit.stem: unit for unit in nvrtc.all_units()}
    smaller = {
        kernel: nvrtc.with_one_kernel(found[unit], kernel) for kernel, unit in ONE_KERNEL.items()
    }
    return found | smaller


@pytest.fixture(scope="module")
def results(units: dict[str, Path]) -> Iterator[Results]:
    with ProcessPoolExecutor(2) as pool:
        names = TEMPLATES + WITHOUT_TEMPLATES
        yield {name: pool.submit(nvrtc.compile_unit, units[name]) for name in names}


@pytest.mark.parametrize("name", TEMPLATES + WITHOUT_TEMPLATES)
def test_unit_compiles(name: str, units: dict[str, Path], results: Results) -> None:
    outcome = results[name].result()
    assert outcome.cubin, outcome.log
    assert "serialized" not in outcome.log  # ptxas's complaint about wgmma
    kernels = set(re.findall(rb"\.text\.(_Z\w+)", outcome.cubin))
    descriptors = units[name].read_text().count("_descriptor<")
    assert len(kernels) >= max(descriptors, 1)


def operation_of(name: str) -> str:
    return "_".join(name.split("_")[:2])


def test_every_template_is_there(units: dict[str, Path]) -> None:
    operations = {operation_of(name) for name in units if name.startswith("sm")}
    assert operations == set(map(operation_of, TEMPLATES))


@pytest.mark.parametrize("operation", sorted(set(map(operation_of, TEMPLATES))))
def test_every_source_is_compiled(operation: str, results: Results) -> None:
    """A header with device code is in the line table of a unit: main loops are chosen by constants
    that no unit's name tells."""
    folder = nvrtc.ROOT / "cpp" / "kernels" / Path(*operation.split("_"))
    sources = {x.name for x in folder.glob("*.h") if DEVICE_CODE.search(x.read_text())}
    assert sources, folder
    cubins = [results[name].result().cubin for name in TEMPLATES if name.startswith(operation)]
    assert {x for x in sources if not any(f"{x}\0".encode() in y for y in cubins)} == set()
