"""Checks that one module asks PyTorch about its state: who records, compiles, traces or casts.

    python tests/lint/check_torch_state.py [ROOT]

The other files of python/ get the answers from that module, so that all of them ask alike.
Prints one line per finding and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import read, report, source_files

FOLDER = "python/"
HOME = "python/anyflash/torch/_dispatch_state.py"

QUESTIONS = re.compile(
    r"_?(is_(any_)?autocast\w*|get_autocast_\w+"
    r"|is_(grad|inference_mode)_enabled|current_level"
    r"|is_(dynamo_)?compiling|is_exporting|is_(fx_)?tracing|is_scripting|is_in_onnx_export"
    r"|len_torch_(dispatch|function)_stack|peek_interpreter_stack"
    r"|are_deterministic_algorithms_enabled|is_current_stream_capturing)"
)


def questions(text: str) -> Iterator[tuple[int, str]]:
    """Line and name of each question that Python source asks PyTorch."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and QUESTIONS.fullmatch(node.attr):
            if "paddle" not in ast.unparse(node.value):  # which has some of the same names
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from ((node.lineno, x.name) for x in node.names if QUESTIONS.fullmatch(x.name))


def findings(root: Path) -> list[str]:
    result: list[str] = []
    for name in source_files(root):
        if not name.startswith(FOLDER) or not name.endswith(".py") or name == HOME:
            continue
        for line, question in sorted(questions(read(root, name) or "")):
            result.append(f"{name}:{line}: {question} is asked of PyTorch; ask {HOME}")
    return result


if __name__ == "__main__":
    sys.exit(report(__doc__, findings))
