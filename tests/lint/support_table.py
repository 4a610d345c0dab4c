"""The README's table of kernels, made from the list that the installed library reports.

python tests/lint/support_table.py           prints it
python tests/lint/support_table.py --write   puts it into README.md
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import anyflash

README = Path(__file__).parents[2] / "README.md"
BEGIN = "from the kernel list -->\n"
END = "<!-- end of support-table -->"
HEADER = (
    "| kernels | operation | dtypes | head dims | tile (queries x keys) |\n|---|---|---|---|---|"
)


def rows(kernels: list[dict[str, Any]]) -> list[str]:
    """One line for kernels that differ in dtype and head dim only."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for kernel in kernels:
        groups.setdefault((kernel["arch"], kernel["op"]), []).append(kernel)
    lines = []
    for (arch, op), members in groups.items():
        dtypes = dict.fromkeys(kernel["dtype"] for kernel in members)
        dims = sorted({kernel["head_dim"] for kernel in members})
        tiles = dict.fromkeys(f"{kernel['block_m']} x {kernel['block_n']}" for kernel in members)
        head_dims = "any" if dims == [0] else ", ".join(map(str, dims))
        lines.append(f"| {arch} | {op} | {', '.join(dtypes)} | {head_dims} | {', '.join(tiles)} |")
    return lines


def main() -> None:
    table = "\n".join([HEADER, *rows(anyflash.build_info()["kernels"])]) + "\n"
    if "--write" not in sys.argv:
        print(table, end="")
        return
    before, rest = README.read_text().split(BEGIN)
    README.write_text(before + BEGIN + table + END + rest.split(END)[1])


if __name__ == "__main__":
    main()
