"""Checks that no initializer in braces has more than 4 values without names.

    python tests/lint/check_aggregates.py [ROOT]

    Tile{64, 128, 4, 1}                         allowed
    Problem{op, device, dtype, 64, 64}          a finding: which 64 is what?
    {{90, "sm80"}, {op, 64, 64}, {true, size}}  allowed: structs in a struct

Where there are more, fields are assigned by their names, or grouped into structs; what is made in
several places gets a function. (C++17 has no designated initializers. C has: they are names.)

Values that are alike need no names, and any number of them is allowed:

* elements of an array or a container: it is declared with [], its type is one of CONTAINER, the
  loop over the values stands there, or the minimum or maximum is asked for;
* rows, each in braces of its own; only numbers; only strings and characters; only lambdas.

What a directive of the preprocessor hides is not seen: initializers of the C ABI are macros.
Prints one line per finding and exits with 1 if there are any.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from check_functions import HIDDEN, SCOPE, blank
from sources import CPP_SUFFIXES, read, report, source_files

MAX_VALUES = 4

# What stands before the braces of elements, back to the end of the statement before.
ARRAY = re.compile(
    r"(?:\[\s*\]"  # as many elements as there are values
    # A type and a name: arrays[0] = {...} and return arrays[0] = {...} assign one element.
    r"|\b(?!(?:else|return)\b)[\w>*&]+\s+[\w*&:]*(?:\[[^\[\]]*\])+)"
    r"\s*=?\s*$"
)
CONTAINER = re.compile(
    r"\b(?:array|deque|initializer_list|list|map|set|span|unordered_map|unordered_set|vector)"
    r"\s*<[^=()]*>"  # the type, and the name of a variable that has it
    r"(?:\s*[&\s]\s*[\w:]+)?\s*[=(]?\s*$"
)
LOOP = re.compile(r"\bfor\s*\(.*[^:]:\s*$", re.DOTALL)
EXTREMUM = re.compile(r"\bstd::(?:max|min|minmax)\s*\(\s*$")

# One value, as marked() leaves it.
ROW = re.compile(r"(?:[\w:]+|[\w:]+<.*>)?\s*\{.*\}", re.DOTALL)
NUMBER = re.compile(r"[-+]?\s*\.?\d(?:[\w.']|(?<=[eEpP])[-+])*")
LITERAL = re.compile(r'(?:"\s*)+')
LAMBDA = re.compile(r"\[.*", re.DOTALL)
NAMED = re.compile(r"\.\w+\s*=")


@dataclass
class Bracket:
    """One of ( [ { and where its values are apart."""

    start: int
    commas: list[int] = field(default_factory=list)
    angles: int = 0  # < that begin template arguments and are still open
    has_statements: bool = False


@dataclass(frozen=True)
class Initializer:
    line: int
    before: str  # what stands before the braces, back to the end of the statement before
    values: list[str]


def marked(text: str) -> str:
    """As blank(), but a string or a character begins with a quotation mark."""

    def mark(found: re.Match[str]) -> str:
        hidden = blank(found[0])
        return hidden if found[0].lstrip().startswith(("//", "/*", "#")) else '"' + hidden[1:]

    return HIDDEN.sub(mark, text)


def braces(text: str) -> Iterator[tuple[Bracket, int]]:
    """Braces without statements, and where they end; inner ones before the outer one."""
    stack: list[Bracket] = []
    for i, char in enumerate(text):
        if char in "([{":
            stack.append(Bracket(i))
        elif not stack:
            continue
        elif char in ")]}":
            bracket = stack.pop()
            if char == "}" and not bracket.has_statements:
                yield bracket, i
        elif char == ";":
            stack[-1].has_statements = True
        # clang-format puts blanks around the operators < and >, and none within brackets.
        elif char == "<":
            stack[-1].angles += text[i - 1].isidentifier() or text[i - 1].isdigit()
        elif char == ">":
            stack[-1].angles -= stack[-1].angles > 0 and text[i - 1] not in "- \n"
        elif char == "," and stack[-1].angles == 0:
            stack[-1].commas.append(i)


def initializers(text: str) -> Iterator[Initializer]:
    """Of C++ source; bodies of functions, classes and enums are none."""
    text = marked(text)
    for bracket, end in braces(text):
        begin = max(text.rfind(char, 0, bracket.start) for char in ";{}") + 1
        before = text[begin : bracket.start]
        if before.rstrip().endswith(")") or SCOPE.search(before.rpartition(">")[2]):
            continue
        cuts = [bracket.start, *bracket.commas, end]
        values = [text[a + 1 : b].strip() for a, b in itertools.pairwise(cuts)]
        if not values[-1]:
            values.pop()  # there is none behind the last comma
        yield Initializer(text.count("\n", 0, bracket.start) + 1, before, values)


def are_alike(initializer: Initializer) -> bool:
    """Whether the values are elements, not fields."""
    if any(x.search(initializer.before) for x in (ARRAY, CONTAINER, LOOP, EXTREMUM)):
        return True
    kinds = (ROW, NUMBER, LITERAL, LAMBDA)
    return any(all(kind.fullmatch(value) for value in initializer.values) for kind in kinds)


def check_cpp(name: str, text: str) -> Iterator[str]:
    for initializer in initializers(text):
        count = sum(NAMED.match(value) is None for value in initializer.values)
        if count > MAX_VALUES and not are_alike(initializer):
            yield (
                f"{name}:{initializer.line}: the initializer has {count} values without names; "
                f"at most {MAX_VALUES} are allowed"
            )


def findings(root: Path) -> list[str]:
    result: list[str] = []
    for name in source_files(root):
        text = read(root, name) if Path(name).suffix in CPP_SUFFIXES else None
        if text is not None:
            result += check_cpp(name, text)
    return result


if __name__ == "__main__":
    sys.exit(report(__doc__, findings))
