"""The types of the binding are those that are written down."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent / "core_stub.py"


def test_stub_is_what_the_binding_says() -> None:
    command = [sys.executable, str(SCRIPT), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"run python {SCRIPT}:\n{done.stdout}{done.stderr}"
