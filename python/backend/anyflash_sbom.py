"""The SBOM of a wheel, of which other projects' code it holds (CycloneDX, PEP 770).

A build with CUDA kernels holds other code than one without. So the wheel's own files are asked, and
a version that they do not show is that of the build environment.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

Component = dict[str, Any]
THIRD_PARTY = Path(__file__).resolve().parents[2] / "third_party"
GCC = re.compile(rb"GCC: \([^)]*\) (\d+)\.(\d+)\.(\d+)")
NVCC = re.compile(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)")
DLPACK = re.compile(rb"define DLPACK_M(?:AJ|IN)OR_VERSION (\d+)")
# In every library that holds code for a GPU, by nvcc's name for the section.
GPU_CODE = b".nv_fatbin"


def component(
    name: str, version: str, purl: str, licence: Mapping[str, str], what: str
) -> Component:
    """`purl` ends where the version begins. An unknown version is left out of both."""
    found: Component = {"type": "library", "bom-ref": name, "name": name, "description": what}
    if version:
        found["version"] = version
    if version and purl:
        found["purl"] = purl + version
    # CycloneDX keeps names of SPDX's list and expressions of several apart.
    found["licenses"] = [licence if "expression" in licence else {"license": licence}]
    return found


def pinned(package: str, file: str) -> str:
    """The version in a list of requirements."""
    text = (THIRD_PARTY / file).read_text(encoding="utf-8")
    found = re.search(rf"^{re.escape(package)}==([^\s;]+)", text, re.MULTILINE)
    return found[1] if found else ""


def installed(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return pinned(package, "requirements.txt")


def is_library(member: str) -> bool:
    return re.search(r"\.(so(\.[\d.]+)?|pyd|dll)$", member) is not None


def gcc_version(libraries: list[bytes]) -> str:
    """The newest that made a part of them: CUDA's static runtime was made by an older one."""
    found = {tuple(map(int, match.groups())) for data in libraries for match in GCC.finditer(data)}
    return ".".join(map(str, max(found))) if found else ""


def components(members: Mapping[str, bytes]) -> Iterator[Component]:
    """What the files of a wheel, or its libraries and headers alone, hold of other projects."""
    binaries = {name: data for name, data in members.items() if is_library(name)}
    libraries = list(binaries.values())
    modules = [data for name, data in binaries.items() if "/_core." in name]
    bsd, apache = {"id": "BSD-3-Clause"}, {"id": "Apache-2.0"}
    if any(GPU_CODE in data for data in libraries):
        version = pinned("nvidia-cutlass", "requirements-headers.txt")
        yield component("CUTLASS", version, "pkg:pypi/nvidia-cutlass@", bsd, "headers, compiled in")
        nvcc = next((match[1] for data in libraries for match in NVCC.finditer(data)), b"")
        eula = {"name": "NVIDIA CUDA Toolkit EULA"}
        yield component("CUDA", nvcc.decode(), "", eula, "static runtime, and headers compiled in")
    for name, data in members.items():
        if name.endswith("dlpack/dlpack.h"):
            version = ".".join(part.decode() for part in DLPACK.findall(data))
            yield component(
                "DLPack", version, "pkg:github/dmlc/dlpack@v", apache, "header, included"
            )
    if modules:
        version = installed("nanobind")
        yield component("nanobind", version, "pkg:pypi/nanobind@", bsd, "headers, compiled in")
    if any(b"XLA_FFI_" in data for data in modules):
        version = pinned("jaxlib", "requirements-xla.txt")
        yield component("XLA FFI", version, "pkg:pypi/jaxlib@", apache, "headers, compiled in")
    # What names the shared one holds no other.
    if any(is_elf(data) and b"libstdc++.so" not in data for data in libraries):
        gpl = {"expression": "GPL-3.0-or-later WITH GCC-exception-3.1"}
        version = gcc_version(libraries)
        yield component("libstdc++", version, "", gpl, "linked statically, shown to nobody")


def is_elf(data: bytes) -> bool:
    return data.startswith(b"\x7fELF")


def sbom(version: str, members: Mapping[str, bytes]) -> bytes:
    """The document. It holds no time and no random number, so that two builds write the same."""
    found = list(components(members))
    me = f"pkg:pypi/anyflash@{version}"
    wheel: Component = {
        "type": "library",
        "bom-ref": me,
        "name": "anyflash",
        "version": version,
        "purl": me,
    }
    wheel["licenses"] = [{"license": {"id": "BSD-3-Clause"}}]
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": wheel},
        "components": found,
        "dependencies": [{"ref": me, "dependsOn": [part["bom-ref"] for part in found]}],
    }
    return (json.dumps(document, indent=2) + "\n").encode()


def with_line(record: bytes, member: str, data: bytes) -> bytes:
    """RECORD with a line for `member`, before RECORD's own, which is the last."""
    rows = list(csv.reader(io.StringIO(record.decode())))
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    rows.insert(len(rows) - 1, [member, f"sha256={digest}", str(len(data))])
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def add_sbom(wheel: Path) -> None:
    """Writes the wheel anew, with `*.dist-info/sboms/anyflash.cdx.json`.

    The new file's time and mode are RECORD's. scikit-build-core takes that time from
    SOURCE_DATE_EPOCH.
    """
    written = wheel.with_suffix(".sbom")
    with zipfile.ZipFile(wheel) as source:
        infos = source.infolist()
        members = {info.filename: source.read(info) for info in infos}
    record = next(info for info in infos if info.filename.endswith(".dist-info/RECORD"))
    folder = record.filename.rpartition("/")[0]
    version = folder.removesuffix(".dist-info").split("-")[1]
    added = zipfile.ZipInfo(f"{folder}/sboms/anyflash.cdx.json", record.date_time)
    added.compress_type, added.external_attr = record.compress_type, record.external_attr
    data = sbom(version, members)
    with zipfile.ZipFile(written, "w") as target:
        for info in infos:
            if info is not record:
                target.writestr(info, members[info.filename])
        target.writestr(added, data)
        target.writestr(record, with_line(members[record.filename], added.filename, data))
    written.replace(wheel)
