"""README's table of kernels is what this build holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import anyflash

_SPEC = importlib.util.spec_from_file_location(
    "support_table", Path(__file__).parent / "support_table.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
support_table = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(support_table)


def test_readme_lists_the_kernels() -> None:
    """A CPU-only build, or one for another processor, holds fewer rows than README, no others."""
    table = support_table.README.read_text().split(support_table.BEGIN)[1]
    for row in support_table.rows(anyflash.build_info()["kernels"]):
        assert row in table, "run: python tests/lint/support_table.py --write"
