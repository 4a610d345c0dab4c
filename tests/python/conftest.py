"""Which tests run on which backends."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

# The oracle's many small products take ten times as long with two threads on a busy machine.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Frameworks bring OpenMP libraries of their own, whose idle threads would keep the others waiting.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest

from backends import capi
from cases.backward import BACKWARD_CASES
from cases.cache_case import CacheCase
from cases.case import Case
from cases.features import FEATURE_CASES
from cases.forward import FORWARD_CASES
from cases.gradient_case import GradientCase
from cases.kvcache import CACHE_CASES
from cases.packed_cache import PACKED_CASES, PackedCase
from cases.varlen import VARLEN_CASES
from run.backward import supports_backward
from run.forward import supports
from run.kvcache import supports_cache
from run.packed_cache import supports_packed

# The same random cases in every run; `--hypothesis-profile=random` draws new ones.
hypothesis.settings.register_profile("same", derandomize=True, deadline=None, database=None)
hypothesis.settings.register_profile("random", deadline=None, print_blob=True)
hypothesis.settings.load_profile("same")

CASES = (*FORWARD_CASES, *FEATURE_CASES, *VARLEN_CASES)
SUPPORTS = {
    Case: supports,
    GradientCase: supports_backward,
    CacheCase: supports_cache,
    PackedCase: supports_packed,
}
for table in (CASES, BACKWARD_CASES, CACHE_CASES, PACKED_CASES):
    assert len({case.id for case in table}) == len(table), "two cases have one id"


GPU_MARKERS = ("cuda", "emulated")  # how the names of the backends begin that such a test needs


def pytest_runtest_setup(item: pytest.Item) -> None:
    here = _present(capi.backend_names())
    for marker in filter(item.get_closest_marker, GPU_MARKERS):
        if not any(name.startswith(marker) for name in here):
            pytest.skip(f"needs a backend {marker}, which is absent or was not asked for")


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


def _marks(name: str) -> list[pytest.MarkDecorator]:
    return [getattr(pytest.mark, marker) for marker in GPU_MARKERS if name.startswith(marker)]


def _with_cases(names: list[str], cases: Sequence[Any]) -> Iterator[object]:
    """Case by case, so that its backends share the reference."""
    present = _present(names)
    if len(present) < len(names):
        yield pytest.param("cuda", cases[0], id="cuda", marks=pytest.mark.cuda)
    for case in cases:
        smoke = [pytest.mark.smoke] if case.smoke else []
        for name in present:
            if SUPPORTS[type(case)](name, case):
                yield pytest.param(name, case, id=f"{name}-{case.id}", marks=smoke + _marks(name))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`backend` is every backend, with `case` each of its cases, with `gradient_case` each of the
    backward's, with `cache_case` each with a cache, with `packed_cache_case` each with a cache and
    packed queries; `cpu` and `gpu` are some backends."""
    names = capi.backend_names()
    if not metafunc.definition.get_closest_marker("hopper"):
        names = [name for name in names if name != "emulated-sm90"]
    cpus = [name for name in names if name.startswith("cpu")]
    gpus = [name for name in names if name not in cpus]
    tables = (
        ("case", CASES),
        ("gradient_case", BACKWARD_CASES),
        ("cache_case", CACHE_CASES),
        ("packed_cache_case", PACKED_CASES),
    )
    for fixture, cases in tables:
        if fixture in metafunc.fixturenames:
            parameters = list(_with_cases(names, cases))
            metafunc.parametrize(("backend", fixture), parameters, indirect=["backend"])
            return
    for fixture, wanted in (("backend", names), ("cpu", cpus), ("gpu", gpus)):
        if fixture in metafunc.fixturenames:
            parameters = [pytest.param(name, marks=_marks(name)) for name in _present(wanted)]
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
def cupy() -> ModuleType:
    return pytest.importorskip("cupy")


@pytest.fixture
def jax() -> ModuleType:
    jax = importlib.import_module("jax")
    jax.config.update("jax_enable_x64", True)
    return jax
