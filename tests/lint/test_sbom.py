"""The SBOM that the build backend adds to a wheel (python/backend/anyflash_sbom.py)."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import os
import stat
import zipfile
from pathlib import Path

import pytest

import anyflash_build
from anyflash_sbom import add_sbom, sbom

DATE = (2020, 2, 2, 0, 0, 0)
INFO = "anyflash-0.1.0.dist-info"
GCC = b"\x7fELF GCC: (GNU) 8.5.0 20210514\0GCC: (Debian 12.2.0-14) 12.2.0\0"
MEMBERS = {
    "anyflash/_core.abi3.so": GCC + b"XLA_FFI_CallFrame",
    "anyflash/lib/libanyflash.so.0.1.0": GCC
    + b".nv_fatbin\0Cuda compilation tools, release 12.9, V12.9.86\n",
    "anyflash/include/dlpack/dlpack.h": b"#define DLPACK_MAJOR_VERSION 1\n\n"
    b"#define DLPACK_MINOR_VERSION 3\n",
    f"{INFO}/METADATA": b"Name: anyflash\n",
}


def versions(members: dict[str, bytes]) -> dict[str, str | None]:
    parts = json.loads(sbom("0.1.0", members))["components"]
    return {part["name"]: part.get("version") for part in parts}


def write_wheel(path: Path) -> Path:
    """As scikit-build-core does, with RECORD at the end."""
    lines = [f"{name},sha256=x,{len(data)}" for name, data in MEMBERS.items()]
    record = "\n".join([*lines, f"{INFO}/RECORD,,", ""]).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**MEMBERS, f"{INFO}/RECORD": record}.items():
            info = zipfile.ZipInfo(name, DATE)
            info.compress_type = zipfile.ZIP_DEFLATED
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, data)
    return path


def test_lists_what_the_files_show() -> None:
    found = versions(MEMBERS)
    assert found["CUDA"] == "12.9.86"
    assert found["DLPack"] == "1.3"
    assert found["libstdc++"] == "12.2.0"
    assert found["XLA FFI"] == "0.6.2"
    assert found["CUTLASS"] == "4.2.0.0"
    assert found["nanobind"]


def test_lists_nothing_that_is_not_there() -> None:
    """A build without CUDA kernels and without handlers for JAX, with the system's libstdc++."""
    plain = b"\x7fELF GCC: (GNU) 14.1.0\0libstdc++.so.6"
    members = {"anyflash/_core.abi3.so": plain, "anyflash/_core.pyi": b"XLA_FFI_"}
    assert versions(members).keys() == {"nanobind"}


def test_a_version_that_nothing_shows_is_left_out() -> None:
    members = {"anyflash/lib/libanyflash.so": b"\x7fELF .nv_fatbin"}
    assert versions(members) == {"CUTLASS": "4.2.0.0", "CUDA": None, "libstdc++": None}


def test_pins_are_those_of_the_lists() -> None:
    root = Path(__file__).parents[2]
    listed = (root / "third_party/requirements-headers.txt").read_text()
    assert f"nvidia-cutlass=={versions(MEMBERS)['CUTLASS']}\n" in listed


@pytest.mark.parametrize("times", [1, 2], ids=["once", "twice the same"])
def test_a_wheel_gets_it(tmp_path: Path, times: int) -> None:
    wheels = [
        write_wheel(tmp_path / f"anyflash-0.1.0-{n}-cp310-abi3-any.whl") for n in range(times)
    ]
    for wheel in wheels:
        add_sbom(wheel)
    assert len({wheel.read_bytes() for wheel in wheels}) == 1
    assert sorted(tmp_path.iterdir()) == wheels
    name = f"{INFO}/sboms/anyflash.cdx.json"
    with zipfile.ZipFile(wheels[0]) as archive:
        assert archive.testzip() is None
        infos = archive.infolist()
        assert [info.filename for info in infos[:-2]] == list(MEMBERS)
        assert [info.filename for info in infos[-2:]] == [name, f"{INFO}/RECORD"]
        assert {info.date_time for info in infos} == {DATE}
        assert {info.external_attr >> 16 for info in infos} == {stat.S_IFREG | 0o644}
        data = archive.read(name)
        rows = list(csv.reader(archive.read(f"{INFO}/RECORD").decode().splitlines()))
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert [name, f"sha256={digest}", str(len(data))] in rows
    assert rows[-1] == [f"{INFO}/RECORD", "", ""]
    assert len(rows) == len(MEMBERS) + 2


def test_the_backend_adds_it_at_the_time_of_source_date_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package of Python alone, so that nothing is compiled; its files are of two times."""
    project = tmp_path / "project"
    (project / "anyflash/include/dlpack").mkdir(parents=True)
    header = project / "anyflash/include/dlpack/dlpack.h"
    header.write_bytes(MEMBERS["anyflash/include/dlpack/dlpack.h"])
    (project / "pyproject.toml").write_text(
        '[project]\nname = "anyflash"\nversion = "0.1.0"\n'
        '[tool.scikit-build]\nwheel.cmake = false\nwheel.packages = ["anyflash"]\n'
        "wheel.reproducible = true\n"
    )
    monkeypatch.chdir(project)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1577934246")  # 2020-01-02 03:04:06
    written = []
    for folder, time in (("a", 1_600_000_000), ("b", 1_700_000_000)):
        os.utime(header, (time, time))
        (tmp_path / folder).mkdir()
        name = anyflash_build.build_wheel(str(tmp_path / folder))
        written.append((tmp_path / folder / name).read_bytes())
    assert written[0] == written[1]
    with zipfile.ZipFile(io.BytesIO(written[0])) as archive:
        assert {info.date_time for info in archive.infolist()} == {(2020, 1, 2, 3, 4, 6)}
        parts = json.loads(archive.read(f"{INFO}/sboms/anyflash.cdx.json"))["components"]
    assert [(part["name"], part["version"]) for part in parts] == [("DLPack", "1.3")]


def test_pyproject_asks_for_reproducible_wheels() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert "\nwheel.reproducible = true" in text
