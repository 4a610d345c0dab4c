"""Which tests run on which backends."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

# pytest's importlib mode does not put this folder on the path; the modules here import one another.
sys.path.insert(0, str(Path(__file__).parent))

import capi
import hypothesis
import pytest
from cases import CASES, EMULATED_TILES, Case

# The same random cases in every run; `--hypothesis-profile=random` draws new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: the few cases that run under compute-sanitizer")


OTHER_ISA_SCORES = 1 << 16


def supports(name: str, case: Case) -> bool:
    """Whether the backend can run the case, and should: some are slow, and `cpu` runs them all."""
    if name.startswith("cpu"):
        return not case.gpu_only and (name == "cpu" or case.scores <= OTHER_ISA_SCORES)
    if case.dtype not in ("fp16", "bf16") or max(case.d, case.head_dim_v) > 256:
        return False
    if name == "cuda":
        return True
    try:
        row = capi.backend(name).row(case.dtype, max(case.d, case.head_dim_v))
    except capi.Unavailable:
        return True  # the test then fails and says what to do
    return row is not None and case.tiles <= EMULATED_TILES


def _parameters(names: list[str], with_cases: bool) -> Iterator[object]:
    for name in names:
        # One skip says that there is no GPU; where `cuda` is asked for by name, all tests fail.
        absent = name == "cuda" and capi.cuda_driver() is None and not capi.WANTED
        if absent and with_cases:
            skip = pytest.mark.skip(reason="no CUDA device in this machine")
            yield pytest.param(name, CASES[0], id=name, marks=skip)
        elif absent:
            continue
        elif with_cases:
            for case in (case for case in CASES if supports(name, case)):
                smoke = [pytest.mark.smoke] if case.smoke else []
                yield pytest.param(name, case, id=f"{name}-{case.id}", marks=smoke)
        else:
            yield pytest.param(name, id=name)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend` is every backend, with `case` each of its cases; `cpu` and `gpu` are some."""
    names = capi.backend_names()
    cpus = [name for name in names if name.startswith("cpu")]
    gpus = [name for name in names if name not in cpus]
    if "case" in metafunc.fixturenames:
        parameters = list(_parameters(names, with_cases=True))
        metafunc.parametrize(("backend", "case"), parameters, indirect=["backend"])
        return
    for fixture, wanted in (("backend", names), ("cpu", cpus), ("gpu", gpus)):
        if fixture in metafunc.fixturenames:
            parameters = list(_parameters(wanted, with_cases=False))
            metafunc.parametrize(fixture, parameters, indirect=True)


def _backend(request: pytest.FixtureRequest) -> capi.Backend:
    try:
        return capi.backend(request.param)
    except capi.Unavailable as reason:
        pytest.fail(f"{request.param}: {reason}", pytrace=False)


backend = pytest.fixture(_backend, name="backend")
cpu = pytest.fixture(_backend, name="cpu")
gpu = pytest.fixture(_backend, name="gpu")


@pytest.fixture
def torch() -> ModuleType:
    return importlib.import_module("torch")


@pytest.fixture
def jax() -> ModuleType:
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)
    return jax
