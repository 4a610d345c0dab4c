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
    "sm80_backward_bf16_d32_generic",
    "sm80_forward_bf16_d64",
    "sm80_decode_bf16_d64",
    "sm80_backward_bf16_d32",
    "sm80_prefill_bf16_d64",
    "sm90_backward_bf16_d256",  # the kernel for wide heads
    "sm90_backward_bf16_d64",
    "sm90_forward_bf16_d64",
]
WITHOUT_TEMPLATES = sorted(file.stem for file in nvrtc.CUDA_SOURCES)


@pytest.fixture(scope="module")
def units() -> dict[str, Path]:
    return {unit.stem: unit for unit in nvrtc.all_units()}


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


def test_every_template_is_there(units: dict[str, Path]) -> None:
    operations = {"_".join(name.split("_")[:2]) for name in units if name.startswith("sm")}
    assert operations == {"_".join(name.split("_")[:2]) for name in TEMPLATES}
