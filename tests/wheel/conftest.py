"""The wheel that is tested: --wheel FILE."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", type=Path, required=True, help="a repaired wheel of anyflash")


@pytest.fixture(scope="session")
def wheel(request: pytest.FixtureRequest) -> Path:
    path: Path = request.config.getoption("--wheel")
    return path.resolve(strict=True)


@pytest.fixture(scope="session")
def unpacked(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("unpacked")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder
