"""Checks how long functions are, and how many parameters templates have.

    python tests/lint/check_functions.py [ROOT]

A C++ function or lambda has at most 80 lines, from its name to its closing brace, a CUDA kernel
120; a template has at most 6 parameters. The statements of a Python function have at most 80 lines.
Prints one line per finding and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sources import CPP_SUFFIXES, read, report, source_files

MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 120
MAX_TEMPLATE_PARAMETERS = 6

# What hides braces: comments, strings (raw ones, too), characters, and directives of the
# preprocessor. A digit separator begins no character.
HIDDEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/
    |R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"
    |"(?:\\.|[^"\\\n])*"
    |(?<![0-9a-fA-F])'(?:\\.|[^'\\\n])+'
    |^[ \t]*\#(?:\\\n|[^\n])*""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
SCOPE = re.compile(r"\b(namespace|class|struct|union|enum|extern)\b(?!.*[()=])", re.DOTALL)
BLOCK = re.compile(r"(^|\b(else|do|try)|[:;{}])\s*$")
CONTROL = re.compile(r"\b(if|for|while|switch|catch|constexpr)\s*$")
# What may stand between a function's parameters and its body.
QUALIFIERS = re.compile(
    r"(\s|\b(?:const|noexcept|override|final|mutable)\b|\bANYFLASH_[A-Z_]+\b|&"
    r"|__attribute__\s*\(\(\w+\)\)|->(?:[\w:<>,*&\s]|decltype\s*\([^()]*\))+)*$"
)
LAMBDA = re.compile(r"(?:^|[^\w\s\])]|\b(?:return|co_return))\s*(\[[^\[\]]*\])\s*$")
# Behind a constructor's parameters, unless the colon is a conditional's.
INITIALIZERS = re.compile(r"\)\s*(?:noexcept\s*)?:(?!:)")
NAME = re.compile(r"([~\w:]+|operator\s*\S+?|operator\s*\(\s*\))\s*$")


@dataclass(frozen=True)
class Function:
    name: str
    line: int
    lines: int
    is_kernel: bool = False


def blank(text: str) -> str:
    """The text with blanks for comments, strings and directives, in the same places."""
    return HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def opening(text: str, end: int, brackets: str) -> int:
    """Where the bracket was opened that closes at `end`; -1 if nowhere."""
    depth = 0
    for i in range(end, -1, -1):
        depth += (text[i] == brackets[1]) - (text[i] == brackets[0])
        if depth == 0:
            return i
    return -1


def without_initializers(header: str) -> str:
    for found in INITIALIZERS.finditer(header):
        head = header[: found.start() + 1]
        if head.count("(") == head.count(")") and "?" not in head:
            return head
    return header


def body_of(header: str) -> tuple[str, int] | None:
    """Whose body begins behind the header: a name, and where it stands; None for other braces."""
    if header.rstrip().endswith((")", "}")):
        header = without_initializers(header)
    end = QUALIFIERS.search(header)
    head = header[: end.start()] if end else header
    if head.endswith("]"):
        bare = LAMBDA.search(head)
        return ("lambda", bare.start(1)) if bare else None
    if not head.endswith(")"):
        return None
    paren = opening(head, len(head) - 1, "()")
    before = head[: max(paren, 0)]
    captures = LAMBDA.search(before)
    if captures:
        return "lambda", captures.start(1)
    if paren < 0 or CONTROL.search(before):
        return None
    name = NAME.search(before)
    return (name[1], name.start(1)) if name else None


def functions(text: str) -> Iterator[Function]:
    """Functions and lambdas of C++ source."""
    text = blank(text)
    begin = 0  # of what stands before the next brace
    stack: list[tuple[int, Function | None, bool]] = []  # before it; what it opens; an initializer
    for i, char in enumerate(text):
        if char == ";":
            begin = i + 1
        elif char == "{":
            header = text[begin:i]
            found = None if SCOPE.search(header.rpartition(">")[2]) else body_of(header)
            function = None
            if found is not None:
                line = text.count("\n", 0, begin + found[1]) + 1
                function = Function(found[0], line, 0, "__global__" in header)
            other = BLOCK.search(header) or SCOPE.search(header) or header.rstrip().endswith(")")
            stack.append((begin, function, not (function or other)))
            begin = i + 1
        elif char == "}" and stack:
            before, function, is_initializer = stack.pop()
            if function is not None:
                lines = text.count("\n", 0, i) + 2 - function.line
                yield Function(function.name, function.line, lines, function.is_kernel)
            begin = before if is_initializer else i + 1


def template_parameters(text: str) -> Iterator[tuple[int, int]]:
    """Line and number of parameters of every template."""
    text = blank(text)
    for found in re.finditer(r"\btemplate\s*<", text):
        depth, commas, end = 1, 0, found.end()
        while depth > 0 and end < len(text):
            depth += (text[end] in "<({") - (text[end] in ">)}")
            commas += depth == 1 and text[end] == ","
            end += 1
        empty = not text[found.end() : end - 1].strip()
        yield text.count("\n", 0, found.start()) + 1, 0 if empty else commas + 1


def check_cpp(name: str, text: str) -> Iterator[str]:
    for function in functions(text):
        limit = MAX_KERNEL_LINES if function.is_kernel else MAX_FUNCTION_LINES
        if function.lines > limit:
            yield (
                f"{name}:{function.line}: {function.name} has {function.lines} lines; "
                f"at most {limit} are allowed"
            )
    for line, count in template_parameters(text):
        if count > MAX_TEMPLATE_PARAMETERS:
            yield (
                f"{name}:{line}: the template has {count} parameters; "
                f"at most {MAX_TEMPLATE_PARAMETERS} are allowed"
            )


def check_python(name: str, text: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        body = node.body[ast.get_docstring(node) is not None :]
        lines = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
        if lines > MAX_FUNCTION_LINES:
            yield (
                f"{name}:{node.lineno}: the statements of {node.name} have {lines} lines; "
                f"at most {MAX_FUNCTION_LINES} are allowed"
            )


def findings(root: Path) -> list[str]:
    result: list[str] = []
    for name in source_files(root):
        text = read(root, name)
        if text is None:
            continue
        if Path(name).suffix in CPP_SUFFIXES:
            result += check_cpp(name, text)
        elif name.endswith(".py"):
            result += check_python(name, text)
    return result


if __name__ == "__main__":
    sys.exit(report(__doc__, findings))
