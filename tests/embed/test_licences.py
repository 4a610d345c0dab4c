"""The licences of what a wheel or an installation holds of other projects."""

from __future__ import annotations

from programs import ROOT

from anyflash_sbom import components

TEXTS = ROOT / "third_party" / "licenses"
# A wheel with all of it.
MEMBERS = {
    "anyflash/_core.abi3.so": b"\x7fELF XLA_FFI_CallFrame .nv_fatbin",
    "anyflash/include/dlpack/dlpack.h": b"",
}


def test_each_component_of_the_sbom_has_a_text() -> None:
    names = {part["name"] for part in components(MEMBERS)}
    assert len(names) == 6
    assert {path.stem for path in TEXTS.iterdir()} == {name.replace(" ", "_") for name in names}


def test_the_wheel_gets_them() -> None:
    line = 'license-files = ["LICENSE", "third_party/licenses/*"]\n'
    assert line in (ROOT / "pyproject.toml").read_text()
