"""Says in what two builds of a wheel or an sdist differ.

    python tests/wheel/compare.py FIRST.whl SECOND.whl

Names members that only one has, those whose contents differ, for ELF files the sections that do,
and members of another time, mode or place. Exits with 1 if the two files are not the same bytes.
"""

from __future__ import annotations

import argparse
import hashlib
import struct
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ELF64_LITTLE = b"\x7fELF\x02\x01"
NO_BITS = 8  # a section's type: .bss and its like have no bytes in the file


@dataclass(frozen=True)
class Member:
    data: bytes
    about: str  # what the archive says of it: time, mode


def read_members(path: Path) -> dict[str, Member]:
    """In the archive's order."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            return {
                info.filename: Member(
                    archive.read(info),
                    "{:04}-{:02}-{:02} {:02}:{:02}:{:02}".format(*info.date_time)
                    + f", mode {info.external_attr >> 16:o}",
                )
                for info in archive.infolist()
            }
    with tarfile.open(path) as tar:
        found = {}
        for entry in tar:
            file = tar.extractfile(entry) if entry.isfile() else None
            about = f"time {entry.mtime}, mode {entry.mode:o}, {entry.uid}:{entry.gid}"
            about += f" {entry.uname}:{entry.gname}"
            found[entry.name] = Member(file.read() if file else b"", about)
        return found


def sections(data: bytes) -> dict[str, bytes]:
    """Of an ELF file of 64 bits, little endian; sections of one name are one after the other."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", data, 0x3A)
    # name, type, flags, address, offset, size
    headers = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    names_at = headers[names_index][4] if headers else 0
    found: dict[str, bytes] = {}
    for name_at, kind, _, _, offset, length in headers:
        begin = names_at + name_at
        name = data[begin : data.index(b"\0", begin)].decode(errors="replace")
        held = b"" if kind == NO_BITS else data[offset : offset + length]
        found[name] = found.get(name, b"") + held
    return found


def differing_sections(first: bytes, second: bytes) -> list[str]:
    """By name; none where a file is not ELF, or is cut off."""
    if not (first.startswith(ELF64_LITTLE) and second.startswith(ELF64_LITTLE)):
        return []
    try:
        a, b = sections(first), sections(second)
    except (struct.error, IndexError, ValueError):
        return []
    return [name or "(no name)" for name in {**a, **b} if a.get(name) != b.get(name)]


def where(first: bytes, second: bytes) -> str:
    named = differing_sections(first, second)
    if named:
        return "sections " + ", ".join(named)
    pairs = zip(first, second, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
    return f"byte {at}, of {len(first)} and {len(second)}"


def differences(first: dict[str, Member], second: dict[str, Member]) -> Iterator[str]:
    for name in first.keys() - second.keys():
        yield f"{name}: only in the first"
    for name in second.keys() - first.keys():
        yield f"{name}: only in the second"
    shared = [name for name in first if name in second]
    if shared != [name for name in second if name in first]:
        yield "the members' order differs"
    for name in shared:
        a, b = first[name], second[name]
        if a.data != b.data:
            yield f"{name}: contents differ: {where(a.data, b.data)}"
        if a.about != b.about:
            yield f"{name}: {a.about}, and {b.about}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    given = parser.parse_args(arguments)
    digests = [hashlib.sha256(p.read_bytes()).hexdigest() for p in (given.first, given.second)]
    if digests[0] == digests[1]:
        print(f"the same: sha256 {digests[0]}")
        return 0
    found = sorted(differences(read_members(given.first), read_members(given.second)))
    for line in found:
        print(line)
    if not found:
        print(
            "the members are the same, but the archives are not: another compression, or comments"
        )
    return 1


if __name__ == "__main__":
    sys.exit(main())
