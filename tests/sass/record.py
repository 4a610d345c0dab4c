#!/usr/bin/env python3
"""Records the figures of the installed library's kernels in recorded.json, or prints them.

record.py           write recorded.json and say what changed; kernels that this build has not stay
record.py --table   print a Markdown table beside flash-attn 2's figures
"""

from __future__ import annotations

import argparse
import json
import sys

from anchors import ANCHORS, SOURCE
from figures import RECORDED, Figures, Library, compare, load_recorded
from machine_code.disassembly import DisassemblyError

DECODE_HEADER = (
    "| kernel | regs | CTAs an SM has registers for | spills loop/all |\n|---|---|---|---|"
)
HEADER = (
    "| kernel | regs | spills loop/all | slots/HMMA | stall/HMMA | smem/tensor | sim |\n"
    "|---|---|---|---|---|---|---|"
)


def table_row(name: str, of: Figures) -> str:
    return (
        f"| {name} | {of['registers']:g} | {of['spills_loop']:g}/{of['spills_total']:g} "
        f"| {of['slots_per_hmma']:.2f} | {of['stall_per_hmma']:.1f} "
        f"| {of['smem_over_tensor']:.2f} | {of['sim']:.2f} |"
    )


def decode_table(library: Library) -> str:
    lines = [DECODE_HEADER]
    for name, row in library.rows.items():
        if row["op"] == "decode":
            of = library.figures(name)
            spills = f"{of['spills_loop']:g}/{of['spills_total']:g}"
            lines.append(f"| {name} | {of['registers']:g} | {of['ctas']:g} | {spills} |")
    return "\n".join(lines)


def table(library: Library) -> str:
    lines = [
        f"Steady-state unmasked loop, nvcc {library.compiler}; FA2 is {SOURCE}.\n",
        HEADER,
    ]
    groups: dict[tuple[str, int], list[str]] = {}
    for name, row in library.rows.items():
        if row["op"] == "decode":
            continue
        groups.setdefault((row["op"], row["head_dim"]), []).append(name)
    for (op, dim), names in sorted(groups.items()):
        lines += [table_row(name, library.figures(name)) for name in sorted(names)]
        lines += [
            table_row(f"*FA2 {op} {anchor}*", ANCHORS[op][anchor])
            for anchor in (f"d{dim} full", f"d{dim} causal")
            if anchor in ANCHORS[op]
        ]
    return "\n".join(lines)


def record(library: Library) -> None:
    old = load_recorded()["kernels"] if RECORDED.exists() else {}
    new = {name: library.figures(name) for name in sorted(library.rows)}
    for name in sorted(new):
        if name not in old:
            print(f"{name}: new")
            continue
        worse, better = compare(old[name], new[name])
        for word, changes in (("worse", worse), ("better", better)):
            if changes:
                print(f"{name}: {word}: {'; '.join(changes)}")
    kernels = dict(sorted((old | new).items()))
    content = {"compiler": library.compiler, "kernels": kernels}
    RECORDED.write_text(json.dumps(content, indent=1) + "\n")
    print(f"{RECORDED.name}: {len(new)} kernels, compiled by nvcc {library.compiler}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true", help="print a table, write nothing")
    args = parser.parse_args()
    library = Library()
    if library.absent:
        sys.exit(f"nothing to read: {library.absent}")
    if args.table:
        print(table(library), decode_table(library), sep="\n\n")
    else:
        record(library)


if __name__ == "__main__":
    try:
        main()
    except DisassemblyError as reason:
        sys.exit(str(reason))
