"""Lays the installed anyflash out as a kernel of the Hugging Face Hub.

python tests/wheel/hub_kernel.py FOLDER

makes FOLDER/build/VARIANT for the CPU and, if this build has kernels for it, for CUDA. The package
`kernels` loads it by ``get_local_kernel(FOLDER)``, or from where it was uploaded to.
"""

from __future__ import annotations

import json
import platform
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyflash

# The module uses no symbol of PyTorch. Only variants of this kind serve all versions from one on.
FRAMEWORK = "torch-stable-abi24"
# Of no use without a compiler.
LEFT_OUT = ("__pycache__", "include", "cmake", "pkgconfig", "*.pyi")


def variants(build: dict[str, Any]) -> dict[str, str]:
    """The name of each and the kind of its backend."""
    place = f"{platform.machine()}-{platform.system().lower()}"
    found = {f"{FRAMEWORK}-cpu-{place}": "cpu"}
    if build["cuda"]:
        version = build["cuda"]["runtime_version"].replace(".", "")
        found[f"{FRAMEWORK}-cu{version}-{place}"] = "cuda"
    return found


def metadata(version: str, backend: str) -> dict[str, Any]:
    """Its python-depends may not name nanobind-backend: `kernels` knows a few packages alone."""
    return {
        "id": f"_anyflash_{backend}_{version.replace('.', '_')}",
        "name": "anyflash",
        "version": int(version.split(".", maxsplit=1)[0]),
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": backend},
    }


def main(folder: Path) -> None:
    package = find_spec("anyflash")
    assert package is not None and package.origin is not None
    build = anyflash.build_info()
    for name, backend in variants(build).items():
        variant = folder / "build" / name
        variant.mkdir(parents=True)
        ignored = shutil.ignore_patterns(*LEFT_OUT)
        shutil.copytree(Path(package.origin).parent, variant / "anyflash", ignore=ignored)
        shutil.copy(Path(__file__).with_name("hub_init.py"), variant / "__init__.py")
        text = json.dumps(metadata(build["version"], backend), indent=2)
        (variant / "metadata.json").write_text(text + "\n")
        print(variant)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
