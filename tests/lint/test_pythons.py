"""tests/wheel/pythons.py: the wheel that it packs, and what it calls a failure."""

from __future__ import annotations

import base64
import csv
import hashlib
import sys
import zipfile
from pathlib import Path

import pytest
import pythons

OK, BAD = pythons.Outcome(True, "3 passed"), pythons.Outcome(False, "1 failed")


def test_the_wheel_is_whole(tmp_path: Path) -> None:
    wheel = pythons.packed_again(tmp_path)
    assert "-cp310-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    (record,) = [name for name in members if name.endswith(".dist-info/RECORD")]
    listed = {name: digest for name, digest, _ in csv.reader(members[record].decode().splitlines())}
    assert listed.keys() == members.keys()
    for name, data in members.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert listed[name] in {"", f"sha256={digest}"}
    assert {"anyflash/_core.abi3.so", "anyflash/py.typed"} < members.keys()
    assert not any(name.endswith((".pyc", "INSTALLER")) for name in members)


def test_this_python_is_found() -> None:
    assert "{}.{}".format(*sys.version_info) in pythons.pythons()


def test_what_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert pythons.report({"3.10": {"numpy": OK}, "3.13": {"numpy": OK}})
    printed = capsys.readouterr().out
    assert "3.10, numpy: ok, 3 passed" in printed
    assert "3.14: not here, not run" in printed
    assert "3.13: not here" not in printed
    assert not pythons.report({"3.10": {"numpy": OK}, "3.13": {"numpy": BAD}})
    assert "3.13, numpy: FAILED, 1 failed" in capsys.readouterr().out
    assert not pythons.report({})


def test_a_wheel_that_cannot_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pythons, "BUILD", tmp_path)
    wheel = tmp_path / "anyflash-0.1.0-cp39-none-any.whl"
    wheel.write_bytes(b"no archive")
    ((what, outcome),) = pythons.test_all("3.x", Path(sys.executable), wheel).items()
    assert what == "the wheel"
    assert not outcome.good and "anyflash" in outcome.text
