"""What the build backend reads of the settings that scikit-build-core gives CMake."""

from __future__ import annotations

import pytest

import anyflash_build

VARIABLES = ("SKBUILD_CMAKE_DEFINE", "SKBUILD_CMAKE_ARGS", "CMAKE_ARGS")
OFF, ON = "-DANYFLASH_CUDA=OFF", "-DANYFLASH_CUDA:BOOL=on"


@pytest.mark.parametrize(
    ("settings", "environment", "expected"),
    [
        ({}, {}, "AUTO"),
        ({"cmake.define.ANYFLASH_CUDA": "off"}, {}, "OFF"),
        ({"skbuild.cmake.define.ANYFLASH_CUDA": ["ON", "0"]}, {}, "OFF"),
        ({"cmake.define.ANYFLASH_JAX": "OFF"}, {}, "AUTO"),
        ({"cmake.args": f"-Wno-dev;{OFF}"}, {}, "OFF"),
        ({"skbuild.cmake.args": ["-D", OFF[2:]]}, {}, "OFF"),
        ({}, {"CMAKE_ARGS": f"-DX='a b' {ON}"}, "ON"),
        ({}, {"CMAKE_ARGS": f"-DX={OFF}"}, "AUTO"),
        ({}, {"SKBUILD_CMAKE_ARGS": ON}, "ON"),
        # As CMake has it, the last wins; as scikit-build-core has it, the environment does.
        ({"cmake.define.ANYFLASH_CUDA": "ON"}, {"SKBUILD_CMAKE_DEFINE": OFF[2:]}, "OFF"),
        ({"cmake.define.ANYFLASH_CUDA": "ON", "cmake.args": OFF}, {}, "OFF"),
        ({"cmake.args": OFF}, {"CMAKE_ARGS": ON}, "ON"),
    ],
)
def test_setting(
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str | list[str]],
    environment: dict[str, str],
    expected: str,
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert anyflash_build.setting("ANYFLASH_CUDA", settings) == expected
    assert (anyflash_build.cuda_requirements(settings) == []) or expected != "OFF"
