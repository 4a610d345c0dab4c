"""The mutants of a C++ source: small changes, each of which some test should notice.

They are made of the text, with comments and strings blanked out. What does not compile is no
mutant; the runner finds that out.
"""

from __future__ import annotations

import importlib
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LINT = Path(__file__).resolve().parents[1] / "lint"
if str(LINT) not in sys.path:
    sys.path.append(str(LINT))
cpp = importlib.import_module("check_functions")  # blank() and body_of()

# As clang-format writes them, with blanks around: template brackets have none.
SWAPS = {
    " < ": (" <= ",),
    " <= ": (" < ",),
    " > ": (" >= ",),
    " >= ": (" > ",),
    " == ": (" != ",),
    " != ": (" == ",),
    " && ": (" || ",),
    " || ": (" && ",),
    " + ": (" - ",),
    " - ": (" + ",),
    " * ": (" / ",),
    " / ": (" * ",),
    " ? ": (" && false ? ", " || true ? "),
}
NUMBER = re.compile(r"(?<![\w.'\"])\d+(?![\w.'])")
CONDITION = re.compile(r"\b(?:if|while) \(")
STATEMENT = re.compile(
    r"(?m)(?<=[;{}:]\n) +(?=\S)"
    r"(?!(?:return|throw|break|case|using|const|auto|template)\b)[^\n;{}#]*;$"
)
PARAMETER = re.compile(r"const |[\w:<>]+[&*]? [&*]?\w+$")
DECLARATION = re.compile(r"^[\w:<>]+[ *&]+\w+(?: =|;|\{|\()")
CALL = re.compile(r"\b(?!if\b|for\b|while\b|switch\b|return\b)(\w+)\(")


@dataclass(frozen=True)
class Mutant:
    file: str
    begin: int
    end: int
    text: str  # in place of [begin, end)
    kind: str
    line: int
    before: str  # the line, and what becomes of it
    after: str

    @property
    def key(self) -> str:
        """Names it also when lines move."""
        return f"{self.file}: {self.before} -> {self.after}"

    def apply(self, source: str) -> str:
        return source[: self.begin] + self.text + source[self.end :]


def closing(text: str, start: int) -> int:
    """Where the bracket closes that opens at `start`; -1 if nowhere."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i
    return -1


def arguments(text: str, start: int) -> list[tuple[int, int]]:
    """Of the call whose bracket opens at `start`: where each begins and ends."""
    end = closing(text, start)
    places, depth, begin = [], 0, start + 1
    for i in range(start + 1, end):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if text[i] == "," and depth == 0:
            places.append((begin, i))
            begin = i + 2
    return [*places, (begin, end)] if end > start + 1 else []


def changes(source: str) -> Iterator[tuple[int, int, str, str]]:
    text = cpp.blank(source)
    for old, news in SWAPS.items():
        for found in re.finditer(re.escape(old), text):
            for new in news:
                yield found.start(), found.end(), new, "operator"
    for found in NUMBER.finditer(text):
        yield found.start(), found.end(), str(int(found[0]) + 1), "off by one"
    for found in CONDITION.finditer(text):
        begin, end = found.end(), closing(text, found.end() - 1)
        yield begin, end, f"!({source[begin:end]})", "negated condition"
    for found in STATEMENT.finditer(text):
        statement = found[0].strip()
        if not DECLARATION.match(statement) and ("(" in statement or "=" in statement):
            yield found.start(), found.end(), ";", "dropped statement"
    for found in CALL.finditer(text):
        places = arguments(text, found.end() - 1)
        for (a, b), (c, d) in itertools.pairwise(places):
            first, second = source[a:b].strip(), source[c:d].strip()
            if first != second and not PARAMETER.match(first):
                yield a, d, f"{source[c:d]}, {source[a:b]}", "swapped arguments"
    for found in re.finditer(r"\{\n", text):
        header = text[: found.start()]
        header = header[max(header.rfind(c) for c in ";}{") + 1 :]
        body = cpp.body_of(header)
        if body is not None and body[0] != "lambda":
            void = re.search(r"\bvoid\b[^(]*$", header[: body[1]] + " ")
            early = " return;" if void else " return {};"
            yield found.start() + 1, found.start() + 1, early, "early return"


def line_of(text: str, at: int, end: int) -> str:
    first = text.rfind("\n", 0, at) + 1
    last = text.find("\n", end)
    return " ".join(text[first : last if last >= 0 else len(text)].split())


def skipped_ranges(source: str, functions: tuple[str, ...]) -> list[tuple[int, int]]:
    text = cpp.blank(source)
    ranges = []
    for name in functions:
        found = re.search(rf"\b{re.escape(name)}(?:\([^;]*?)?(?: const)? \{{\n", text)
        if found is None:
            raise ValueError(f"there is no {name}")
        ranges.append((found.start(), closing(text, found.end() - 2)))
    return ranges


def mutants_of(file: str, source: str, skipped: tuple[str, ...] = ()) -> Iterator[Mutant]:
    ranges = skipped_ranges(source, skipped)
    for begin, end, text, kind in changes(source):
        if any(first <= begin <= last for first, last in ranges):
            continue
        changed = source[:begin] + text + source[end:]
        before = line_of(source, begin, end)
        after = line_of(changed, begin, begin + len(text))
        line = source.count("\n", 0, begin) + 1
        if before != after:
            yield Mutant(file, begin, end, text, kind, line, before, after)
