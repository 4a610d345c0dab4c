"""Checks that the sentences of the Markdown pages, and of the package's docstrings, are short.

    python tests/lint/check_sentences.py [ROOT]

A sentence has at most 30 words. A word is what stands between blanks and has a letter or a digit: a
number, its unit, a formula without blanks; a span of code is one word. A colon or a semicolon ends
no sentence; the end of a paragraph or of a list's item does. Headings, tables, blocks of code,
comments, tags, and where links lead to are not looked at.
Of docstrings these are paragraphs, and what is said of each parameter, where no name begins with an
underscore. Examples and tables are not looked at.
Prints one line per finding and exits with 1 if there are any.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from sources import report, source_files

PACKAGE = "python/anyflash/"
MAX_WORDS = 30
SHOWN_WORDS = 8  # of a sentence that is too long

FENCE = re.compile(r"^[ \t]*(```+|~~~+).*?^[ \t]*\1[`~]*[ \t]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"(?<!`)(`+)(?!`)((?:[^\n]|\n(?!\s*\n))+?)(?<!`)\1(?!`)")
LINK = re.compile(r"!?\[([^\[\]]*)\]\([^()]*\)")
TAG = re.compile(r"</?[A-Za-z][^<>]*>")
REFERENCE = re.compile(r"^ {0,3}\[[^\]]+\]:.*$", re.MULTILINE)

ITEM = re.compile(r"(\s*)(?:[-*+]|\d+[.)])\s+")
QUOTE = re.compile(r"\s*>\s?")
NO_PROSE = re.compile(r"\s*(?:#+\s|\||(?:-{3,}|\*{3,}|_{3,}|={3,})\s*$)")
INDENTED_CODE = re.compile(r" {4}|\t")
# A full stop, but not an abbreviation's.
END = re.compile(r"(?<!\be\.g)(?<!\bi\.e)(?<!\bvs)(?<!\bcf)(?<!\bal)[.!?][\])\"'*_]*(?=\s|$)")
WORD = re.compile(r"\S*\w\S*")

EXAMPLE = re.compile(r"\s*(>>>|\.\.\.( |$))")
TABLE = re.compile(r"^ *=[ =]+$.*?^ *=[ =]+$(?=\s*^\s*$|\s*\Z)", re.MULTILINE | re.DOTALL)
ROLE = re.compile(r":[a-z:]+:(?=`)")  # of Sphinx: :func:`name`


@dataclass(frozen=True)
class Sentence:
    line: int
    words: list[str]


def blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")


def prose(page: str) -> str:
    """The page without what has no sentences, in the same lines."""
    page = COMMENT.sub(blank, FENCE.sub(blank, page))
    page = REFERENCE.sub("", page)
    page = CODE.sub(lambda code: "code" + blank(code), page)
    page = LINK.sub(lambda link: link[1] + "\n" * (link[0].count("\n") - link[1].count("\n")), page)
    return TAG.sub(blank, page)


def blocks(page: str) -> Iterator[tuple[int, str]]:
    """Paragraphs and items of lists, each with the number of its first line."""
    first, lines = 0, list[str]()
    after_blank, in_list = True, False
    for number, full in enumerate([*prose(page).splitlines(), ""], 1):
        line = QUOTE.sub("", full, count=1) if QUOTE.match(full) else full
        item = ITEM.match(line)
        if item is None and after_blank and line.strip():
            in_list = in_list and line[0].isspace()
        code = after_blank and not in_list and INDENTED_CODE.match(line)
        skipped = not line.strip() or NO_PROSE.match(line) or code
        if lines and (skipped or item):
            yield first, "\n".join(lines)
            lines = []
        if item:
            in_list = True
        if not skipped:
            first = first if lines else number
            lines.append(line[item.end() :] if item else line)
        # The lines of a block of code follow one another.
        after_blank = not line.strip() or bool(code)


def sentences(page: str) -> Iterator[Sentence]:
    for first, block in blocks(page):
        begin = 0
        for end in [*(found.end() for found in END.finditer(block)), len(block)]:
            text = block[begin:end]
            words = WORD.findall(text)
            if words:
                start = begin + len(text) - len(text.lstrip())
                yield Sentence(first + block.count("\n", 0, start), words)
            begin = end


def check_page(name: str, page: str) -> Iterator[str]:
    for sentence in sentences(page):
        count = len(sentence.words)
        if count > MAX_WORDS:
            begin = " ".join(sentence.words[:SHOWN_WORDS])
            yield (
                f"{name}:{sentence.line}: a sentence has {count} words; "
                f"at most {MAX_WORDS} are allowed: {begin} ..."
            )


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def as_page(docstring: str) -> str:
    """Markdown of the docstring's sentences, in the same lines."""
    first, *others = TABLE.sub(blank, ROLE.sub("", docstring)).split("\n")
    margin = min((indent(line) for line in others if line.strip()), default=0)
    result = list[str]()
    in_example = False
    literal: int | None = None  # the indentation of a literal block
    before = ""  # the last line of prose
    for line, after in pairwise([" " * margin + first.lstrip(), *others, ""]):
        is_deeper = after.strip() != "" and indent(after) > indent(line)
        if not line.strip():
            in_example = False
            if literal is None or (after.strip() and indent(after) < literal):
                opens = before.endswith(":") and indent(after) > indent(before)
                literal = indent(after) if opens else None
        elif EXAMPLE.match(line):
            in_example = True
        # A parameter: its name and its type, above what is said of it.
        is_name = is_deeper and not ITEM.match(line)
        is_prose = line.strip() and not in_example and literal is None and not is_name
        result.append(line.strip() if is_prose else "")
        before = line.rstrip() if is_prose else before
    return "\n".join(result)


def docstrings(text: str) -> Iterator[tuple[int, str]]:
    """Line and text of the docstrings of a module, and of what in it has a public name."""
    pending: list[ast.Module | ast.ClassDef | ast.FunctionDef] = [ast.parse(text)]
    while pending:
        node = pending.pop(0)
        first = node.body[0] if node.body else None
        value = first.value if isinstance(first, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value
        if not isinstance(node, ast.FunctionDef):
            inner = [x for x in node.body if isinstance(x, ast.ClassDef | ast.FunctionDef)]
            pending += [x for x in inner if not x.name.startswith("_")]


def check_module(name: str, text: str) -> Iterator[str]:
    for line, docstring in docstrings(text):
        yield from check_page(name, "\n" * (line - 1) + as_page(docstring))


def findings(root: Path) -> list[str]:
    result = list[str]()
    for name in source_files(root):
        is_module = name.startswith(PACKAGE) and name.endswith(".py")
        if name.endswith(".md") or is_module:
            check = check_module if is_module else check_page
            result += check(name, (root / name).read_text(encoding="utf-8"))
    return result


if __name__ == "__main__":
    sys.exit(report(__doc__, findings))
