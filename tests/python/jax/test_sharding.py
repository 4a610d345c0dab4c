"""Arrays that are sharded over devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import anyflash

FILES = sorted(map(str, (Path(__file__).parent / "eight_devices").glob("*.py")))


def test_on_eight_devices() -> None:
    """A process learns how many devices it has before it makes its first array."""
    package = Path(anyflash.__file__).parents[1]
    paths = os.pathsep.join([str(package), *filter(None, sys.path)])
    environment = os.environ | {
        "PYTHONPATH": paths,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *FILES],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
