"""Compiles the CUDA units with NVRTC 12.9: the compiler of released wheels, but for its nvcc.

NVRTC compiles device code alone. So host functions are taken as device functions, and `include/`
stands in for what they use: a launch there only names its kernel, which is then compiled.

    python tests/nvrtc/nvrtc.py                  every unit, for the GPUs of released wheels
    python tests/nvrtc/nvrtc.py REGEX [--arch 101]
"""

from __future__ import annotations

import argparse
import ctypes
import re
import shutil
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PACKAGES = ROOT / ".venv" / "nvrtc" / "nvidia"
CUTLASS = ROOT / ".venv" / "headers" / "cutlass_library" / "source" / "include"
BUILD = ROOT / "build" / "nvrtc"
CUDA_SOURCES = sorted((ROOT / "cpp" / "kernels" / "cuda").glob("*.cu"))

DESCRIPTOR = re.compile(r'^    \w+::\w+_descriptor<[^";]*>\(\s*"(\w+)"\),\n', re.MULTILINE)

# The C++ library's headers that units include, of which NVRTC has none: those of CCCL.
STANDARD = ["array", "climits", "cstddef", "cstdint", "iterator", "optional", "type_traits"]
ALIASES = {
    name: f"#include <cuda/std/{name}>\nnamespace std {{ using namespace cuda::std; }}\n"
    for name in STANDARD
} | {"atomic": "", "stdlib.h": "", "stdint.h": "#include <cuda/std/cstdint>\n"}


class Outcome(NamedTuple):
    """What NVRTC made of a unit: machine code, or a log that says why not."""

    name: str
    cubin: bytes
    log: str
    seconds: float


def all_units() -> list[Path]:
    """The generated units, which are written anew, and the kernels that have none."""
    shutil.rmtree(BUILD, ignore_errors=True)
    configure = ["cmake", "-S", HERE, "-B", BUILD, "--log-level=WARNING"]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    return sorted(BUILD.glob("*.cu")) + CUDA_SOURCES


def with_one_kernel(unit: Path, kernel: str) -> Path:
    """A unit of one descriptor alone, where its others would take as long again."""
    source = DESCRIPTOR.sub(lambda x: x[0] if x[1] == kernel else "", unit.read_text())
    if f'"{kernel}"' not in source:
        raise ValueError(f"{unit} has no descriptor {kernel}")
    smaller = BUILD / "one_kernel" / f"{kernel}.cu"
    smaller.parent.mkdir(exist_ok=True)
    smaller.write_text(source)
    return smaller


def default_arch(unit: Path) -> str:
    """The architecture whose code serves every GPU of the unit's family."""
    return "90a" if unit.name.startswith("sm90_") else "80"


def compile_unit(unit: Path, arch: str | None = None) -> Outcome:
    """Compiles one unit to machine code, with the options of cmake/cuda.cmake."""
    began = time.monotonic()
    nvrtc = ctypes.CDLL(str(PACKAGES / "cuda_nvrtc" / "lib" / "libnvrtc.so.12"))
    folders = [
        HERE / "include",
        *(ROOT / "cpp" / folder for folder in ("kernels", "src", "include")),
        CUTLASS,
        PACKAGES / "cuda_cccl" / "include",
        PACKAGES / "cuda_runtime" / "include",
    ]
    # With -rdc ptxas would serialise wgmma; without it, functions of other units need a body.
    if unit.name.startswith("sm90_"):
        calls = ["-rdc=false", "-include=host_functions.h"]
    else:
        calls = ["-rdc=true"]
    options = [
        f"-arch=sm_{arch or default_arch(unit)}",
        "-std=c++17",
        "-ftz=true",
        "-lineinfo",  # changes no code, and tells the sources that it comes from
        "-default-device",
        "-include=prelude.h",
        *calls,
        *(f"-I{folder}" for folder in folders),
    ]
    program = ctypes.c_void_p()
    made = nvrtc.nvrtcCreateProgram(
        ctypes.byref(program),
        unit.read_bytes(),
        unit.name.encode(),
        len(ALIASES),
        _strings(ALIASES.values()),
        _strings(ALIASES),
    )
    if made != 0:
        raise RuntimeError(f"nvrtcCreateProgram: error {made}")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), _strings(options))
    log = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).rstrip(b"\0")
    cubin = b"" if failed else _read(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return Outcome(unit.stem, cubin, log.decode(), time.monotonic() - began)


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    encoded = [value.encode() for value in values]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _read(get_size: Any, get: Any, program: ctypes.c_void_p) -> bytes:
    size = ctypes.c_size_t()
    get_size(program, ctypes.byref(size))
    buffer = ctypes.create_string_buffer(size.value)
    get(program, buffer)
    return buffer.raw


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("regex", nargs="?", default="")
    parser.add_argument("--arch", help="of all units; default: 80, and 90a for sm90's")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    chosen = [unit for unit in all_units() if re.search(arguments.regex, unit.stem)]
    failures = 0
    with ProcessPoolExecutor(arguments.jobs) as pool:
        archs = [arguments.arch] * len(chosen)
        for outcome in pool.map(compile_unit, chosen, archs):
            print(
                f"{outcome.name:40} {outcome.seconds:5.0f} s  {len(outcome.cubin):9,} bytes",
                flush=True,
            )
            if not outcome.cubin:
                failures += 1
                print(outcome.log, flush=True)
    print(f"{len(chosen) - failures} of {len(chosen)} units compiled")
    raise SystemExit(failures != 0)


if __name__ == "__main__":
    main()
