"""tests/wheel/compare.py names what differs, and nothing else."""

from __future__ import annotations

import io
import struct
import tarfile
import zipfile
from pathlib import Path

import compare
import pytest

FILES = {"anyflash/__init__.py": b"one = 1\n", "anyflash/lib/libanyflash.so": b""}


def elf(**sections: bytes) -> bytes:
    """The least ELF file: a header, the sections' bytes, their names, the table."""
    names = b"\0" + b"".join(f".{name}\0".encode() for name in sections) + b".shstrtab\0"
    body, headers, at = b"", [struct.pack("<IIQQQQIIQQ", *[0] * 10)], 64
    for name, data in {**sections, "shstrtab": names}.items():
        name_at = names.index(f"\0.{name}\0".encode()) + 1
        headers.append(struct.pack("<IIQQQQIIQQ", name_at, 1, 0, 0, at, len(data), 0, 0, 1, 0))
        body, at = body + data, at + len(data)
    start = b"\x7fELF\x02\x01\x01".ljust(16, b"\0") + struct.pack(
        "<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, at, 0, 64, 0, 0, 64, len(headers), len(headers) - 1
    )
    return start + body + b"".join(headers)


def wheel(path: Path, year: int = 2020, mode: int = 0o644, **changes: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in {**FILES, **changes}.items():
            info = zipfile.ZipInfo(name, (year, 1, 1, 0, 0, 0))
            info.external_attr = mode << 16
            archive.writestr(info, data)
    return path


def said(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[str]]:
    code = compare.main([str(path) for path in paths])
    return code, capsys.readouterr().out.splitlines()


def test_two_that_are_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, lines = said(capsys, wheel(tmp_path / "a.whl"), wheel(tmp_path / "b.whl"))
    assert code == 0
    assert lines[0].startswith("the same: sha256 ")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"anyflash/extra.py": b""}, "anyflash/extra.py: only in the second"),
        (
            {"anyflash/__init__.py": b"one = 2\n"},
            "anyflash/__init__.py: contents differ: byte 6, of 8 and 8",
        ),
        (
            {"anyflash/__init__.py": b"one = 1\n# more\n"},
            "anyflash/__init__.py: contents differ: byte 8, of 8 and 15",
        ),
    ],
    ids=["a member more", "a byte", "a longer one"],
)
def test_names_the_member(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, bytes], line: str
) -> None:
    other = wheel(tmp_path / "b.whl", **changes)
    assert said(capsys, wheel(tmp_path / "a.whl"), other) == (1, [line])


def test_names_times_and_modes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = wheel(tmp_path / "b.whl", year=2021, mode=0o600)
    code, lines = said(capsys, wheel(tmp_path / "a.whl"), other)
    assert code == 1
    assert len(lines) == len(FILES)
    assert lines[0].endswith("2020-01-01 00:00:00, mode 644, and 2021-01-01 00:00:00, mode 600")


def test_names_sections(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Only those that differ, though all that follow have moved."""
    library = "anyflash/lib/libanyflash.so"
    first = {library: elf(text=b"code", comment=b"GCC 14", data=b"same")}
    second = {library: elf(text=b"code", comment=b"GCC 14.1", data=b"same")}
    a, b = wheel(tmp_path / "a.whl", **first), wheel(tmp_path / "b.whl", **second)
    assert said(capsys, a, b) == (1, [f"{library}: contents differ: sections .comment"])


def test_a_broken_library_is_compared_by_bytes() -> None:
    whole = elf(text=b"code")
    assert compare.where(whole, whole[:70]) == f"byte 70, of {len(whole)} and 70"


def test_the_order_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turned = dict(reversed(FILES.items()))
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as archive:
        for name, data in turned.items():
            info = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            info.external_attr = 0o644 << 16
            archive.writestr(info, data)
    code, lines = said(capsys, wheel(tmp_path / "a.whl"), tmp_path / "b.whl")
    assert (code, lines) == (1, ["the members' order differs"])


def test_sdists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, data in (("a", b"1"), ("b", b"2")):
        with tarfile.open(tmp_path / name, "w:gz") as tar:
            entry = tarfile.TarInfo("anyflash/PKG-INFO")
            entry.size = 1
            tar.addfile(entry, io.BytesIO(data))
    code, lines = said(capsys, tmp_path / "a", tmp_path / "b")
    assert (code, lines) == (1, ["anyflash/PKG-INFO: contents differ: byte 0, of 1 and 1"])
