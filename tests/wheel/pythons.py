"""The installed package with every CPython from 3.10 on that is here, and with an old NumPy.

    python tests/wheel/pythons.py [--package FOLDER]

One compiled module serves all of them. For each Python, and for NumPy 1.26 and the newest that it
takes, an environment is made in build/pythons, and the tests run that need no framework. FOLDER
holds `anyflash`; by default where this Python finds it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/pythons"
TESTS = ("tests/python/dlpack", "tests/python/kernels/test_errors.py")
NUMPYS = ("numpy==1.26.4", "numpy")
# NumPy before 2.1 exports no read-only arrays and reads no capsules of DLPack 1; before 2.0 no
# array has more than 32 dimensions.
NOT_WITH_NUMPY_1 = (
    "not read_only and not too_many_dimensions and not other_dtypes and not versions "
    "and not any_consumer"
)


def pythons() -> dict[str, Path]:
    """By version, "3.12": those on PATH, and pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(root.glob("3.*/bin/python")), Path(sys.executable)]
    for minor in range(10, 20):
        found = shutil.which(f"python3.{minor}")
        candidates += [Path(found)] if found else []
    result: dict[str, Path] = {}
    for path in candidates:
        command = [path, "-c", "import sys; print(*sys.version_info[:2], sys.abiflags)"]
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        words = run.stdout.split()
        if run.returncode == 0 and len(words) == 2 and words[0] == "3" and int(words[1]) >= 10:
            result.setdefault(".".join(words), path)
    return dict(sorted(result.items(), key=lambda item: int(item[0][2:])))


def test(version: str, python: Path, numpy: str, package: Path) -> tuple[bool, str]:
    """Whether the tests pass, and the last line of what was printed."""
    name = f"{version}-{re.sub(r'[^0-9.]', '', numpy) or 'newest'}"
    folder = BUILD / name
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    pip = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    pip.append("--only-binary=:all:")
    if subprocess.run([*pip, numpy], check=False, capture_output=True).returncode != 0:
        return numpy != "numpy", f"there is no {numpy} for it"
    requirements = ROOT / "tests/requirements/pythons.txt"
    run = subprocess.run([*pip, numpy, "-r", requirements], check=False, capture_output=True)
    if run.returncode != 0:
        return False, f"pip cannot install {requirements.name}"
    chosen = [] if numpy == "numpy" else ["-k", NOT_WITH_NUMPY_1]
    environment = os.environ | {"PYTHONPATH": str(package), "ANYFLASH_TEST_BACKENDS": "cpu"}
    command = [folder / "bin/python", "-m", "pytest", *TESTS, *chosen]
    run = subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    return run.returncode == 0, run.stdout.strip().splitlines()[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", type=Path)
    package = parser.parse_args().package
    if package is None:
        found = importlib.util.find_spec("anyflash")
        assert found is not None and found.origin is not None
        package = Path(found.origin).parents[1]
    # Of the folder nothing else is wanted: it may hold this Python's own NumPy.
    alone = BUILD / "package"
    alone.mkdir(parents=True, exist_ok=True)
    link = alone / "anyflash"
    link.unlink(missing_ok=True)
    link.symlink_to(package.resolve() / "anyflash")
    good = True
    for version, python in pythons().items():
        for numpy in NUMPYS:
            passed, line = test(version, python, numpy, alone)
            print(f"{version}, {numpy}: {'ok' if passed else 'FAILED'}, {line}", flush=True)
            good &= passed
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
