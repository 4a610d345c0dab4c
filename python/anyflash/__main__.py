"""`python -m anyflash`: what is built, what this machine can run; doctor, demo and bench."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import anyflash
from anyflash._cli import doctor
from anyflash.bench import _cli as bench

NEXT_COMMANDS = (
    ("python -m anyflash demo", "search sentences with a real transformer (all-MiniLM-L6-v2)"),
    ("python -m anyflash doctor", "what a bug report needs, and whether attention computes here"),
    ("python -m anyflash bench", "measure attention's speed here, beside other libraries'"),
    ("python -m anyflash --json", "these facts, for a program"),
)


def _head_dim(kernel: dict[str, Any]) -> str:
    """'64', or '192/128' where v has another one."""
    dims = kernel["head_dim"], kernel["head_dim_v"]
    if not any(dims):
        return "any"
    return "/".join(str(dim) for dim in dict.fromkeys(dims))


def _kernel_rows(kernels: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """One row (op, arch, dtypes, head dims, features) for all dtypes that agree in the rest."""
    known: defaultdict[str, set[str]] = defaultdict(set)  # of an operation
    for kernel in kernels:
        known[kernel["op"]].update(kernel["features"])
    dims: defaultdict[tuple[str, str, str, str], dict[tuple[int, int], str]] = defaultdict(dict)
    for kernel in kernels:
        features = kernel["features"]
        word = (
            "all"
            if features and set(features) == known[kernel["op"]]
            else " ".join(features) or "none"
        )
        group = dims[kernel["op"], kernel["arch"], word, kernel["dtype"]]
        group[kernel["head_dim"], kernel["head_dim_v"]] = _head_dim(kernel)
    dtypes: defaultdict[tuple[str, str, str, str], list[str]] = defaultdict(list)
    for (op, arch, word, dtype), group in sorted(dims.items()):
        dtypes[op, arch, word, " ".join(group[key] for key in sorted(group))].append(dtype)
    return [
        (op, arch, " ".join(names), head_dims, word)
        for (op, arch, word, head_dims), names in dtypes.items()
    ]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _built(info: dict[str, Any]) -> list[tuple[str, str]]:
    cuda = info["cuda"]
    facts = [
        (
            "CUDA",
            f"runtime {cuda['runtime_version']} for {' '.join(cuda['archs'])}" if cuda else "no",
        ),
        ("CPU", " ".join(info["cpu"]["compiled"])),
    ]
    rows = _kernel_rows(info["kernels"])
    if rows:
        table = _table([("op", "arch", "dtypes", "head dims", "features"), *rows])
        facts += zip(("kernels", *[""] * len(rows)), table, strict=True)
    return facts


def _machine(info: dict[str, Any]) -> list[tuple[str, str]]:
    threads = info["cpu"]["threads"]
    facts = [("CPU", f"{info['cpu']['isa']}, {threads} thread{'s' if threads != 1 else ''}")]
    for device in info["devices"]:
        use = "ready" if device["supported"] else "no kernels for it in this build"
        about = f"{device['name']}, compute capability {device['compute_capability']}: {use}"
        facts.append((f"GPU {device['index']}", about))
    if info["device_error"]:
        facts.append(("GPU", info["device_error"]))
    elif not info["devices"]:
        facts.append(("GPU", "none"))
    return facts


def overview(info: dict[str, Any], commands: bool = True) -> str:
    """The text that `python -m anyflash` prints."""
    lines = [f"anyflash {info['version']}"]
    for title, facts in (("built", _built(info)), ("this machine", _machine(info))):
        lines += ["", title, *(f"  {name:<9}{value}".rstrip() for name, value in facts)]
    if commands:
        lines += ["", "next", *(f"  {row}" for row in _table(NEXT_COMMANDS))]
    return "\n".join(lines)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m anyflash",
        description="Print what is built and what this machine can run.",
    )
    parser.add_argument("--version", action="version", version=f"anyflash {anyflash.__version__}")
    parser.add_argument("--json", action="store_true", help="print anyflash.build_info() as JSON")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")

    demo = commands.add_parser(
        "demo",
        help="search sentences with a real transformer (all-MiniLM-L6-v2)",
        description="Rank sentences by their closeness in meaning to a query. The transformer "
        "all-MiniLM-L6-v2 runs in NumPy, with every attention layer through anyflash.attention: on "
        "a GPU where there is one for this build, else on the CPU.",
    )
    demo.add_argument("sentences", nargs="*", metavar="SENTENCE", help="default: a built-in set")
    demo.add_argument("--query", metavar="TEXT", help="default: the first of your sentences")
    demo.add_argument(
        "--backend", choices=("cuda", "cpu"), help="of attention; default: cuda where it works"
    )
    demo.add_argument("--top", type=_positive, default=5, metavar="N", help="default: 5")
    commands.add_parser(
        "doctor",
        help="what a bug report needs, and whether attention computes here",
        description="Print what is built, this machine, packages and variables that matter, and "
        "the result of a small attention on the CPU (with NumPy) and on every GPU (with PyTorch). "
        "The exit status is 1 if one of them is wrong.",
    )
    bench.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "demo":
        if importlib.util.find_spec("numpy") is None:  # the demonstration's own first import
            command = "python -m pip install numpy tokenizers safetensors"
            print(f"numpy is not installed; run: {command}", file=sys.stderr)
            return 1
        from anyflash import demo

        sentences, query = list(arguments.sentences), arguments.query
        if not sentences:
            sentences, query = list(demo.SENTENCES), query or demo.QUERY
        elif query is None:
            query = sentences.pop(0)
            if not sentences:
                parser.error("demo: give --query TEXT, or at least two sentences")
        return demo.run(sentences, query, arguments.top, arguments.backend)
    if arguments.command == "bench":
        return bench.main(arguments, sys.argv[1:] if argv is None else argv)
    info = anyflash.build_info()
    if arguments.command == "doctor":
        text, good = doctor.report(info)
        print(overview(info, commands=False), text, sep="\n\n")
        return 0 if good else 1
    print(json.dumps(info, indent=2) if arguments.json else overview(info))
    return 0


if __name__ == "__main__":
    sys.exit(main())
