"""The examples of the documentation run."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest

import anyflash

MODULES = sorted(
    module.name
    for folder in ("", "_api.", "_arrays.", "_call.", "_cli.")
    for module in pkgutil.iter_modules(
        [str(Path(anyflash.__path__[0], folder.rstrip(".")))], f"anyflash.{folder}"
    )
    if module.name not in ("anyflash.__main__", "anyflash._core")
)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name), raise_on_error=False).failed == 0


@pytest.mark.parametrize(
    "name", [name for name in anyflash.__all__ if callable(getattr(anyflash, name))]
)
def test_public_functions_are_documented(name: str) -> None:
    public = getattr(anyflash, name)
    assert public.__doc__
    if name not in ("Array", "AttentionGrads", "AttentionResult", "build_info"):
        assert doctest.DocTestFinder(recurse=False).find(public)[0].examples
