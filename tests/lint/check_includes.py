"""Checks what no compiler does: who includes whom, how long files are, and stray paths.

    python tests/lint/check_includes.py [ROOT]

The layers, an arrow meaning "includes":

    python/src -> cpp/include <- cpp/src <- kernels/<family> -> cuda -> variant -> common -> CuTe

A kernel sees of cpp/src only plain data (KERNEL_CONTRACT); families never see each other. The CPU's
includes nothing of cuda.
Prints one line per finding and exits with 1 if there are any.
"""

from __future__ import annotations

import posixpath
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sources import CPP_SUFFIXES, read, report, source_files

MAX_LINES = 400
MAX_COLUMNS = 100
LONG_FILES = {".h", ".hpp", ".cpp", ".cu", ".cuh", ".c", ".py", ".cmake", ".in"}

# Headers of cpp/src that kernels may include, and those that the binding may.
KERNEL_CONTRACT = {
    "append.h",
    "copy_rows.h",
    "grid_heuristics.h",
    "kernel_descriptor.h",
    "merge_states.h",
    "params.h",
    "side_outputs.h",
    "threads.h",
}
BINDING_CONTRACT = {"describe.h", "dlpack.h", "memory.h", "prefer_kernel.h", "tuned_tiles.h"}

# Angle-bracket headers, by what they belong to; what matches nothing is unknown and never allowed.
EXTERNAL = {
    "std": re.compile(r"[a-z_]+|(stddef|stdint|math|string|limits)\.h"),
    "openmp": re.compile(r"omp\.h"),
    "threads": re.compile(r"pthread\.h"),
    "processor": re.compile(r"cpuid\.h|sys/syscall\.h|unistd\.h"),
    "intrinsics": re.compile(r"immintrin\.h|intrin\.h|arm_neon\.h"),
    "dlpack": re.compile(r"dlpack/dlpack\.h"),
    "loader": re.compile(r"dlfcn\.h"),
    "cuda_runtime_api": re.compile(r"cuda_runtime_api\.h"),
    "cuda": re.compile(r"cuda\.h|cuda_[a-z0-9_]+\.h|cuda/.+"),
    "cute": re.compile(r"(cute|cutlass)/.+"),
    "nanobind": re.compile(r"nanobind/.+"),
    "xla": re.compile(r"xla/ffi/api/.+"),
    "tvm_ffi": re.compile(r"tvm/ffi/c_api\.h|tvm/ffi/extra/c_env_api\.h"),  # in C alone
}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)')
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
# A path of somebody's machine, or of a folder that lies beside some checkouts and is no part of the
# repository. Addresses such as https://host/home/... are neither.
MACHINE_PATH = re.compile(
    r"(?<![\w.~-])/(?:home|root|Users|work|workspace|mnt|tmp)/[\w.]"
    r"|(?<![\w./~-])(?:\.{1,2}/)*shared/[\w.]"
)
ARCHITECTURE_NAME = re.compile(r"\b(sm\d+|cpu)::")


@dataclass(frozen=True)
class Layer:
    """A folder: the folders and single headers it may include, and the kinds of external ones."""

    folder: str
    folders: tuple[str, ...]
    headers: frozenset[str] = frozenset()
    external: frozenset[str] = frozenset({"std"})


PUBLIC = "cpp/include/"
# cute stands for CUTLASS too, cuda for every header of the toolkit.
DEVICE = frozenset({"std", "cuda", "cuda_runtime_api", "cute"})


def contract(names: set[str]) -> frozenset[str]:
    return frozenset(f"cpp/src/{name}" for name in names)


def layers(root: Path) -> list[Layer]:
    """The rules; every family's folder below cpp/kernels gets the same ones."""
    common, variant, cuda = (f"cpp/kernels/{name}/" for name in ("common", "variant", "cuda"))
    shared = (PUBLIC, common, variant)
    kernel_headers = contract(KERNEL_CONTRACT)
    result = [
        Layer(PUBLIC, (PUBLIC,), external=frozenset({"std", "dlpack"})),
        Layer(
            "cpp/src/",
            (PUBLIC, "cpp/src/"),
            external=frozenset(
                {"std", "dlpack", "openmp", "processor", "threads", "cuda_runtime_api"}
            ),
        ),
        Layer(common, (PUBLIC, common), kernel_headers, DEVICE),
        Layer(variant, shared, kernel_headers, DEVICE),
        Layer(cuda, (*shared, cuda), kernel_headers, DEVICE),
        Layer(
            "python/src/",
            (PUBLIC, "python/src/"),
            contract(BINDING_CONTRACT),
            frozenset({"std", "dlpack", "loader", "nanobind", "xla"}),
        ),
        Layer("cpp/tvm_ffi/", (PUBLIC, "cpp/tvm_ffi/"), external=frozenset({"std", "tvm_ffi"})),
    ]
    kernels = root / "cpp" / "kernels"
    for folder in sorted(kernels.iterdir()) if kernels.is_dir() else []:
        own = f"cpp/kernels/{folder.name}/"
        if not folder.is_dir() or own in (common, variant, cuda):
            continue
        if folder.name == "cpu":
            external = frozenset({"std", "openmp", "intrinsics"})
            result.append(Layer(own, (*shared, own), kernel_headers, external))
        else:
            result.append(Layer(own, (*shared, cuda, own), kernel_headers, DEVICE))
    return result


# Headers outside these folders: made by the build, or of the emulator, where a macro asks for it.
INCLUDE_FOLDERS = (PUBLIC, "cpp/src/", "cpp/kernels/", "python/src/")
GENERATED = {"anyflash/version.h": f"{PUBLIC}anyflash/version.h.in"}
EMULATED = {("cpp/kernels/common/launch.h", "emu.hpp")}


def resolve(root: Path, includer: str, header: str) -> str | None:
    """The file that a quoted include names, relative to the root."""
    if header in GENERATED:
        return GENERATED[header]
    own = includer.rpartition("/")[0] + "/"
    for folder in (own, *INCLUDE_FOLDERS):
        if (root / folder / header).is_file():
            return posixpath.normpath(folder + header)
    return None


def wrong_include(root: Path, layer: Layer, name: str, quoted: str, angle: str) -> str | None:
    """Why the include is not allowed; None if it is."""
    if angle:
        kinds = [kind for kind, pattern in EXTERNAL.items() if pattern.fullmatch(angle)]
        if any(kind in layer.external for kind in kinds):
            return None
        allowed = ", ".join(sorted(layer.external))
        return f"includes <{angle}>; {layer.folder} may include {allowed}"
    if (name, quoted) in EMULATED:
        return None
    target = resolve(root, name, quoted)
    if target is None:
        return f'includes "{quoted}", which is in none of {", ".join(INCLUDE_FOLDERS)}'
    if target.startswith(layer.folders) or target in layer.headers:
        return None
    allowed = ", ".join((*layer.folders, *sorted(layer.headers)))
    return f'includes "{quoted}" ({target}); {layer.folder} may include {allowed}'


def check_layers(root: Path, name: str, text: str, rules: list[Layer]) -> Iterator[str]:
    for layer in rules:
        if not name.startswith(layer.folder) or Path(name).suffix not in CPP_SUFFIXES:
            continue
        for number, line in enumerate(text.splitlines(), 1):
            match = INCLUDE.match(line)
            if match is None:
                continue
            why = wrong_include(root, layer, name, match[1] or "", match[2] or "")
            if why is not None:
                yield f"{name}:{number}: {why}"
        neutral = layer.folder in ("cpp/kernels/common/", "cpp/kernels/variant/")
        named = ARCHITECTURE_NAME.search(COMMENT.sub("", text)) if neutral else None
        if named is not None:
            yield f"{name}: names the architecture {named[1]}; {layer.folder} serves all of them"


def check_text(name: str, text: str) -> Iterator[str]:
    lines = text.splitlines()
    suffix = Path(name).suffix
    if suffix in LONG_FILES and len(lines) > MAX_LINES:
        yield f"{name}: has {len(lines)} lines; at most {MAX_LINES} are allowed"
    for number, line in enumerate(lines, 1):
        if suffix in CPP_SUFFIXES and len(line) > MAX_COLUMNS:
            yield f"{name}:{number}: has {len(line)} columns; at most {MAX_COLUMNS} are allowed"
        match = MACHINE_PATH.search(line)
        if match is not None:
            path = line[match.start() :].split()[0]
            yield f"{name}:{number}: names a path of one machine: {path}"


def findings(root: Path) -> list[str]:
    rules = layers(root)
    result: list[str] = []
    for name in source_files(root):
        text = read(root, name)
        if text is not None:
            result += check_layers(root, name, text, rules)
            result += check_text(name, text)
    return result


if __name__ == "__main__":
    sys.exit(report(__doc__, findings))
