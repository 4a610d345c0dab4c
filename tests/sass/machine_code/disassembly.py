"""Runs NVIDIA's cuobjdump and reads what it prints."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from .instructions import Instruction

HOW_TO_INSTALL = "pip install -r tests/requirements/sass.txt"


class DisassemblyError(Exception):
    """The disassembler is missing or could not read the file."""


def find_cuobjdump(folder: str = "") -> Path:
    """From `folder`, else from this environment's packages (where it is pinned), else from PATH."""
    packages = [str(Path(entry) / "nvidia" / "cu13" / "bin") for entry in sys.path if entry]
    found = shutil.which("cuobjdump", path=os.pathsep.join([folder, *packages]))
    found = found or shutil.which("cuobjdump")
    if not found:
        raise DisassemblyError(
            f"cuobjdump is neither in this environment nor on PATH; run: {HOW_TO_INSTALL}"
        )
    return Path(found)


def demangle(names: Iterable[str]) -> list[str]:
    names = list(names)
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if not tool or not names:
        return names
    shown = subprocess.run(
        [tool], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return shown.stdout.splitlines()


class Disassembler:
    """The code for one architecture in one file (cubin, object, library or executable)."""

    def __init__(self, file: Path, arch: str = "sm_80", folder: str = "") -> None:
        self.file = file.resolve()
        self.arch = arch
        self._cuobjdump = find_cuobjdump(folder)
        # A cubin holds one architecture, and cuobjdump refuses to select there.
        self._select = [] if file.suffix == ".cubin" else ["-arch", arch]

    def _run(self, *options: str, cwd: str | None = None) -> str:
        # cuobjdump calls nvdisasm, which lies in the same folder.
        path = f"{self._cuobjdump.parent}{os.pathsep}{os.environ.get('PATH', '')}"
        command = [str(self._cuobjdump), *options, str(self.file)]
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            cwd=cwd,
            env={**os.environ, "PATH": path},
            check=False,
        )
        if result.returncode != 0 and "does not contain device code" not in result.stderr:
            raise DisassemblyError(f"{' '.join(command)}: {result.stderr.strip()}")
        return result.stdout

    def resources(self) -> dict[str, dict[str, int]]:
        """{mangled name: counters REG, STACK, SHARED, LOCAL} of every kernel."""
        found: dict[str, dict[str, int]] = {}
        name = None
        for line in self._run("-res-usage", *self._select).splitlines():
            if header := re.match(r"\s*Function (\S+):", line):
                name = header[1]
            elif name and "REG:" in line:
                counters = re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", line)
                found[name] = {counter: int(value) for counter, value in counters}
                name = None
        return found

    def code(self, names: Iterable[str]) -> dict[str, list[Instruction]]:
        """{mangled name: instructions}."""
        text = self._run("-sass", *self._select, "-fun", ",".join(names))
        functions: dict[str, list[Instruction]] = {}
        for section in re.split(r"^\s*Function : ", text, flags=re.MULTILINE)[1:]:
            name, _, body = section.partition("\n")
            code = parse(body)
            if code:
                # A second one is the same kernel for another architecture.
                functions.setdefault(name.strip(), code)
        return functions

    def compiler(self) -> str:
        """The version of ptxas that wrote the code ("13.0.88"), as noted in the code itself."""
        with tempfile.TemporaryDirectory() as folder:
            self._run("-xelf", "all", cwd=folder)
            cubins = [file.read_bytes() for file in Path(folder).glob(f"*.{self.arch}.cubin")]
        notes = [
            re.search(rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", cubin)
            for cubin in cubins
        ]
        return ", ".join(sorted({note[1].decode() for note in notes if note})) or "unknown"


def parse(text: str) -> list[Instruction]:
    """The instructions of one function as `cuobjdump -sass` prints it."""
    code: list[Instruction] = []
    for line in text.splitlines():
        if found := re.match(
            r"\s*/\*([0-9a-f]{4,})\*/\s+(?:(@!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);", line
        ):
            code.append(Instruction(int(found[1], 16), found[2], found[3], found[4].strip()))
        elif code and (found := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$", line)):
            # The upper half of the instruction above; its top 23 bits hold the scheduling.
            bits = int(found[1], 16) >> 41
            code[-1] = code[-1]._replace(
                stall=bits & 15,
                write_barrier=bits >> 5 & 7,
                read_barrier=bits >> 8 & 7,
                wait_mask=bits >> 11 & 63,
            )
    return code
