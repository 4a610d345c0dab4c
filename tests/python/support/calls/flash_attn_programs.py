"""Programs that import flash_attn, each in a process, and functions as they see them."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

HEADER = "import anyflash.flash_attn as fa, importlib.metadata, importlib.util, sys, torch\n"


def run(program: str, *path: Path) -> str:
    lines = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n" + HEADER + program
    done = subprocess.run(
        [sys.executable, "-c", lines], check=False, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def spelled(function: Any) -> str:
    """As getfullargspec sees it, which does not look through decorators: ring attention's way."""
    spec = inspect.getfullargspec(function)
    assert (spec.varargs, spec.varkw, spec.kwonlyargs) == (None, None, [])
    defaults = [f"={value!r}".replace(" ", "") for value in spec.defaults or ()]
    required = [""] * (len(spec.args) - len(defaults))
    return " ".join(
        name + default for name, default in zip(spec.args, required + defaults, strict=True)
    )
