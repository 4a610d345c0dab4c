#!/usr/bin/env python3
"""Static cost of a kernel's hot loop, read from its machine code. No GPU is needed.

  sass_cost.py FILE REGEX [--arch sm_80] [--threads N --smem DYNAMIC_BYTES] [--table]
  sass_cost.py FILE REGEX --list

FILE is a cubin, object, shared library or executable; REGEX is searched in the mangled and the
demangled kernel name. Prints one JSON object per kernel; machine_code/analysis.py says what the
figures mean. --threads and --smem (per CTA) give occupancy; without them 2 CTAs of 4 warps are
assumed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

from machine_code.analysis import Launch, analyse
from machine_code.disassembly import Disassembler, DisassemblyError, demangle
from machine_code.machine import MACHINES


def table_row(out: dict[str, Any]) -> str:
    loop, metrics, shares = out["loop"], out["metrics"], out["share_of_mma_peak"]
    counts = loop["counts"]
    return (
        f"regs {out['regs']:3} stack {out['stack']:3} "
        f"ldl/stl {counts.get('LDL_STL', 0)}/{out['ldl_stl_total']} "
        f"ctas {out.get('occupancy', {}).get('ctas_per_sm', '?')} | "
        f"hmma {counts['HMMA']:3} slots {loop['instructions']:4} "
        f"slots/hmma {metrics['issue_slots_per_hmma']:.2f} "
        f"int/hmma {metrics['integer_per_hmma']:.2f} "
        f"smemB/hmma {metrics['smem_bytes_per_hmma']:5.1f} "
        f"smem/tensor {metrics['smem_over_tensor']:.2f} "
        f"stall/tensor {metrics['stall_over_tensor']:.2f} | "
        f"overlap {shares['overlap']:.2f} serial {shares['serial']:.2f} "
        f"sim {shares['sim'] or 0:.3f} {out['sim_range']} | {out['kernel'][:150]}"
    )


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("regex")
    parser.add_argument("--arch", default="sm_80", help="architecture of the code to read")
    parser.add_argument("--params", choices=MACHINES, help="machine to cost it for (by --arch)")
    parser.add_argument("--threads", type=int, default=0, help="threads per CTA")
    parser.add_argument("--smem", type=int, default=0, help="dynamic shared memory per CTA, bytes")
    parser.add_argument("--loop", type=int, default=0, help="which hot loop, 0 = hottest")
    parser.add_argument("--tools", default="", help="folder of cuobjdump and nvdisasm")
    parser.add_argument("--list", action="store_true", help="only list the kernels")
    parser.add_argument("--table", action="store_true", help="one line per kernel")
    parser.add_argument("--no-sim", action="store_true", help="leave the simulation out")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    machine = MACHINES[args.params or args.arch.removesuffix("a")]
    disassembler = Disassembler(args.file, args.arch, args.tools)
    resources = disassembler.resources()
    hits = {
        name: shown
        for name, shown in zip(resources, demangle(resources), strict=True)
        if re.search(args.regex, name) or re.search(args.regex, shown)
    }
    if not hits:
        sys.exit(f"no kernel of {args.file} ({args.arch}) matches {args.regex}")
    if args.list:
        for name, shown in hits.items():
            print(resources[name], shown)
        return
    code = disassembler.code(hits)
    launch = Launch(args.threads, args.smem)
    for name, shown in hits.items():
        out = analyse(
            shown,
            resources[name],
            code[name],
            machine,
            launch,
            loop_index=args.loop,
            with_sim=not args.no_sim,
        )
        print(table_row(out) if args.table and "loop" in out else json.dumps(out, indent=1))


if __name__ == "__main__":
    try:
        main()
    except DisassemblyError as reason:
        sys.exit(str(reason))
