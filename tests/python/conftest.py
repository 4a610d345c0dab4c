"""Which tests run on which backends."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

# The oracle's many small products take ten times as long with two threads on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Frameworks bring OpenMP libraries of their own, whose idle threads would keep the others waiting.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
# pytest's importlib mode does not put this folder on the path; the modules here import one another.
sys.path.insert(0, str(Path(__file__).parent))

import capi
import hypothesis
import pytest
from backward_cases import BACKWARD_CASES
from cases import Case
from feature_cases import FEATURE_CASES
from forward_cases import FORWARD_CASES
from gradient_case import GradientCase
from kvcache_cases import CacheCase
from kvcache_tables import CACHE_CASES
from running import supports
from running_backward import supports_backward
from running_kvcache import supports_cache
from varlen_cases import VARLEN_CASES

# The same random cases in every run; `--hypothesis-profile=random` draws new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

CASES = (*FORWARD_CASES, *FEATURE_CASES, *VARLEN_CASES)
SUPPORTS = {Case: supports, GradientCase: supports_backward, CacheCase: supports_cache}
for table in (CASES, BACKWARD_CASES, CACHE_CASES):
    assert len({case.id for case in table}) == len(table), "two cases have one id"


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: the few cases that run under compute-sanitizer")
    config.addinivalue_line("markers", "forward: of the operation that sm90 has kernels for")


@pytest.fixture
def many_threads() -> Iterator[None]:
    """Calls use as many threads as they are asked to, however little there is to do."""
    core = importlib.import_module("anyflash._core")
    core.set_work_per_thread(1)
    yield
    core.set_work_per_thread(0)


def _present(names: list[str]) -> list[str]:
    # Where `cuda` is asked for by name, all tests fail without one.
    absent = capi.cuda_driver() is None and not capi.WANTED
    return [name for name in names if not (absent and name == "cuda")]


def _with_cases(names: list[str], cases: Sequence[Any]) -> Iterator[object]:
    """Case by case, so that its backends share the reference."""
    present = _present(names)
    if len(present) < len(names):
        skip = pytest.mark.skip(reason="no CUDA device in this machine")
        yield pytest.param("cuda", cases[0], id="cuda", marks=skip)
    for case in cases:
        marks = [pytest.mark.smoke] if case.smoke else []
        for name in present:
            if SUPPORTS[type(case)](name, case):
                yield pytest.param(name, case, id=f"{name}-{case.id}", marks=marks)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend` is every backend, with `case` each of its cases, with `gradient_case` each of the
    backward's, with `cache_case` each with a cache; `cpu` and `gpu` are some backends."""
    names = capi.backend_names()
    if not metafunc.definition.get_closest_marker("forward"):
        names = [name for name in names if name != "emulated-sm90"]
    cpus = [name for name in names if name.startswith("cpu")]
    gpus = [name for name in names if name not in cpus]
    tables = (("case", CASES), ("gradient_case", BACKWARD_CASES), ("cache_case", CACHE_CASES))
    for fixture, cases in tables:
        if fixture in metafunc.fixturenames:
            parameters = list(_with_cases(names, cases))
            metafunc.parametrize(("backend", fixture), parameters, indirect=["backend"])
            return
    for fixture, wanted in (("backend", names), ("cpu", cpus), ("gpu", gpus)):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, _present(wanted), indirect=True)


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
