"""One wheel in every CPython from 3.10 on that is here, with an old NumPy and with the newest.

    python tests/wheel/pythons.py [--wheel FILE]

By default the wheel is this Python's installed package, packed again. Each Python gets an
environment in build/pythons, and runs the tests that need no framework. Pythons that are not here
are named: .github/workflows/wheels.yml has them.
"""

from __future__ import annotations

import argparse
import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / "build/pythons"
SERVED = ("3.10", "3.11", "3.12", "3.13", "3.14")
TESTS = ("tests/python/dlpack", "tests/python/kernels/test_errors.py")
ADDED = {"INSTALLER", "REQUESTED", "RECORD", "direct_url.json"}  # by pip, to what a wheel holds
NUMPYS = ("numpy", "numpy==1.26.4")
# NumPy before 2.1 exports no read-only arrays and reads no capsules of DLPack 1; before 2.0 no
# array has more than 32 dimensions.
NOT_WITH_NUMPY_1 = (
    "not read_only and not too_many_dimensions and not other_dtypes and not versions "
    "and not any_consumer"
)


class Outcome(NamedTuple):
    good: bool
    text: str


def version_of(python: Path) -> str | None:
    """As in SERVED; None if it does not run, or is free-threaded or older."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2], sys.abiflags)"]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    words = run.stdout.split()
    known = run.returncode == 0 and len(words) == 2 and words[0] == "3" and int(words[1]) >= 10
    return ".".join(words) if known else None


def pythons() -> dict[str, Path]:
    """By version: those on PATH, and pyenv's."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    candidates = [*sorted(root.glob("3.*/bin/python")), Path(sys.executable)]
    for minor in range(10, 20):
        found = shutil.which(f"python3.{minor}")
        candidates += [Path(found)] if found else []
    result: dict[str, Path] = {}
    for path in candidates:
        version = version_of(path)
        if version is not None:
            result.setdefault(version, path)
    return dict(sorted(result.items(), key=lambda item: int(item[0][2:])))


def packed_again(folder: Path) -> Path:
    """The wheel of which the installed package comes, without what pip has added."""
    package = importlib.metadata.distribution("anyflash")
    tag = re.search(r"^Tag: (\S+)$", package.read_text("WHEEL") or "", re.MULTILINE)
    assert tag is not None
    name = f"anyflash-{package.version}"
    site = Path(str(package.locate_file("")))
    rows = io.StringIO()
    record = csv.writer(rows, lineterminator="\n")
    wheel = folder / f"{name}-{tag[1]}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path in (*site.glob("anyflash/**/*"), *site.glob(f"{name}.dist-info/**/*")):
            if path.is_dir() or path.name in ADDED or path.suffix == ".pyc":
                continue
            data = path.read_bytes()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.writerow((path.relative_to(site), f"sha256={digest}", len(data)))
            archive.writestr(str(path.relative_to(site)), data)
        record.writerow((f"{name}.dist-info/RECORD", "", ""))
        archive.writestr(f"{name}.dist-info/RECORD", rows.getvalue())
    return wheel


def environment(version: str, python: Path, wheel: Path) -> Path:
    """Its Python. Raises CalledProcessError with what pip says."""
    folder = BUILD / version
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True, capture_output=True)
    requirements = ROOT / "tests/requirements/pythons.txt"
    install(folder / "bin/python", str(wheel), "-r", str(requirements))
    return folder / "bin/python"


def install(python: Path, *what: str) -> None:
    pip = [python, "-m", "pip", "--disable-pip-version-check", "-q", "install"]
    command = [*pip, "--only-binary=:all:", *what]
    subprocess.run(command, check=True, capture_output=True, text=True)


def test(python: Path, numpy: str) -> Outcome:
    """The last line of what pytest prints."""
    try:
        install(python, "--upgrade", numpy)
    except subprocess.CalledProcessError:
        return Outcome(numpy != "numpy", f"there is no {numpy} for it")
    chosen = [] if numpy == "numpy" else ["-k", NOT_WITH_NUMPY_1]
    # Nothing but the wheel may be found.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = subprocess.run(
        [python, "-m", "pytest", *TESTS, *chosen],
        check=False,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=kept | {"ANYFLASH_TEST_BACKENDS": "cpu"},
    )
    return Outcome(run.returncode == 0, (run.stdout + run.stderr).strip().splitlines()[-1])


def test_all(version: str, python: Path, wheel: Path) -> dict[str, Outcome]:
    """By NumPy."""
    try:
        inside = environment(version, python, wheel)
    except subprocess.CalledProcessError as error:
        return {"the wheel": Outcome(False, str(error.stderr).strip())}
    return {numpy: test(inside, numpy) for numpy in NUMPYS}


def report(outcomes: dict[str, dict[str, Outcome]]) -> bool:
    """Whether all is well."""
    for version, of_version in outcomes.items():
        for numpy, outcome in of_version.items():
            print(f"{version}, {numpy}: {'ok' if outcome.good else 'FAILED'}, {outcome.text}")
    for version in SERVED:
        if version not in outcomes:
            print(f"{version}: not here, not run; a job of .github/workflows/wheels.yml")
    return bool(outcomes) and all(o.good for each in outcomes.values() for o in each.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path)
    given = parser.parse_args().wheel
    BUILD.mkdir(parents=True, exist_ok=True)
    wheel = packed_again(BUILD) if given is None else given.resolve(strict=True)
    print(f"{wheel.name}, {wheel.stat().st_size >> 20} MiB", flush=True)
    found = pythons()
    with ThreadPoolExecutor(os.cpu_count()) as workers:
        tests = {
            version: workers.submit(test_all, version, found[version], wheel) for version in found
        }
        outcomes = {version: test.result() for version, test in tests.items()}
    return 0 if report(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
