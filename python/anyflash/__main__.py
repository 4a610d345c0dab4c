"""`python -m anyflash`: what is built, what this machine can run; demo, doctor, bench
and completion."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import select
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import anyflash
from anyflash._cli import completion, doctor, terminal
from anyflash._cli.terminal import Section
from anyflash.bench import _cli as bench

NEXT_COMMANDS = (
    ("python -m anyflash demo", "search sentences with a real transformer (all-MiniLM-L6-v2)"),
    ("python -m anyflash doctor", "whether attention computes here, and what to do next"),
    ("python -m anyflash bench", "measure attention's speed here, beside other libraries'"),
    ("python -m anyflash --json", "these facts, for a program"),
)
EXIT_STATUS = {
    0: "all is well",
    1: "attention fails or is wrong, a GPU cannot be used, or a package is missing",
    2: "the arguments are wrong, or ask for what is not there",
    130: "it was interrupted before there was a result",
    141: "whoever read the output closed it",
}


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


def _built(info: dict[str, Any]) -> list[tuple[str, str]]:
    cuda = info["cuda"]
    archs = f"runtime {cuda['runtime_version']} for {' '.join(cuda['archs'])}" if cuda else "no"
    return [("CUDA", archs), ("CPU", " ".join(info["cpu"]["compiled"]))]


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


def overview(info: dict[str, Any]) -> list[Section]:
    """What is built, and what this machine can run."""
    header = ("op", "arch", "dtypes", "head dims", "features")
    rows = _kernel_rows(info["kernels"])
    return [
        Section(f"anyflash {info['version']}"),
        Section("built", _built(info)),
        *([Section("kernels", rows, header)] if rows else []),
        Section("this machine", _machine(info)),
    ]


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


class _Parser(argparse.ArgumentParser):
    """Its help has colours on a terminal; Python's own has them from 3.14 on."""

    def print_help(self, file: Any = None) -> None:
        if file is None and sys.version_info < (3, 14):
            terminal.show_help(self.format_help())
        else:
            super().print_help(file)


def _add_json(parser: argparse.ArgumentParser, about: str, **options: Any) -> None:
    """--json, which may stand before and after the command."""
    parser.add_argument("--json", action="store_const", const=bench.STDOUT, help=about, **options)


def _parser() -> argparse.ArgumentParser:
    statuses = "\n".join(f"  {status:<5}{means}" for status, means in EXIT_STATUS.items())
    parser = _Parser(
        prog="python -m anyflash",
        description="Print what is built and what this machine can run.",
        epilog=f"exit status:\n{statuses}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"anyflash {anyflash.__version__}")
    _add_json(parser, "print JSON; without a command, anyflash.build_info()")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    _add_demo(commands)
    doctor_parser = commands.add_parser(
        "doctor",
        help="what a bug report needs, whether attention computes here, and what to do next",
        description="Print what is built, this machine, packages and variables that matter, the "
        "result of a small attention on the CPU and on every GPU, and the one thing to do next. "
        "The exit status is 1 if a result is wrong, or if a GPU of this machine cannot be used.",
    )
    _add_json(doctor_parser, "print JSON", default=argparse.SUPPRESS)
    bench.add_parser(commands)
    completion_parser = commands.add_parser(
        "completion",
        help="a script by which a shell completes the command anyflash",
        description="Print a script by which a shell completes the command anyflash. Its first "
        "lines say how it is loaded.",
    )
    completion_parser.add_argument("shell", choices=completion.SHELLS)
    return parser


def _add_demo(commands: Any) -> None:
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
    _add_json(demo, "print JSON", default=argparse.SUPPRESS)


def _run_demo(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
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
    show = _print_json if arguments.json else demo.show
    return demo.run(sentences, query, arguments.top, arguments.backend, show)


def _print_json(found: dict[str, Any]) -> None:
    print(json.dumps(found, indent=2))


def _run(argv: Sequence[str]) -> int:
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.command == "demo":
        return _run_demo(parser, arguments)
    if arguments.command == "bench":
        return bench.main(arguments, argv)
    if arguments.command == "completion":
        if arguments.json:
            parser.error("completion: prints a script, so that it has no --json")
        print(completion.script(arguments.shell, parser), end="")
        return 0
    info = anyflash.build_info()
    if arguments.command == "doctor":
        found = doctor.examine(info)
        if arguments.json:
            _print_json({"build_info": info, **found})
        else:
            terminal.show([*overview(info), *doctor.sections(found)])
        return 0 if found["good"] else 1
    if arguments.json:
        _print_json(info)
    else:
        terminal.show([*overview(info), Section("next", NEXT_COMMANDS)])
    return 0


def _is_closed(pipe: int) -> bool:
    """At its other end."""
    poll = select.poll()
    poll.register(pipe, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status."""
    try:
        try:
            return _run(sys.argv[1:] if argv is None else argv)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        if not _is_closed(sys.stdout.fileno()):
            raise
        # Python flushes once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141


if __name__ == "__main__":
    sys.exit(main())
