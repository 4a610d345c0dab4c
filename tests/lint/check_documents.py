"""Checks the Markdown pages: links between them resolve, and the first pages stay short.

    python tests/lint/check_documents.py [ROOT]

A link is a path relative to the page, to a file or a folder of the repository, with or without the
anchor of one of its headings. Addresses on the web are not looked at.
Prints one line per finding and exits with 1 if there are any.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from sources import report, source_files

MAX_LINES = {"README.md": 200, "ARCHITECTURE.md": 200, "CONTRIBUTING.md": 130}
CODE = re.compile(r"^```.*?^```|^(?: {4}.*\n)+|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^()\s]+)\)|(?:src|srcset|href)=\"([^\"]+)\"")
WEB = re.compile(r"[a-z]+:")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def anchor(heading: str) -> str:
    """As GitHub makes it: lower case, hyphens for spaces, no punctuation."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {anchor(heading) for heading in HEADING.findall(text)}


def wrong_link(root: Path, page: str, link: str) -> str | None:
    """Why the link leads nowhere; None if it does not."""
    path, _, wanted = link.partition("#")
    target = (root / page).parent / path if path else root / page
    if not target.exists():
        return f"links to {link}, which does not exist"
    if not target.resolve().is_relative_to(root.resolve()):
        return f"links to {link}, outside of the repository"
    if wanted and wanted not in anchors(target):
        return f"links to {link}; {target.name} has no such heading"
    return None


def check_page(root: Path, page: str) -> Iterator[str]:
    text = (root / page).read_text(encoding="utf-8")
    lines = len(text.splitlines())
    if lines > MAX_LINES.get(page, lines):
        yield f"{page}: has {lines} lines; at most {MAX_LINES[page]} are allowed"
    prose = CODE.sub(lambda code: re.sub(r"[^\n]", " ", code[0]), text)
    for number, line in enumerate(prose.splitlines(), 1):
        for in_text, in_html in LINK.findall(line):
            link = in_text or in_html
            why = None if WEB.match(link) else wrong_link(root, page, link)
            if why is not None:
                yield f"{page}:{number}: {why}"


def findings(root: Path) -> list[str]:
    pages = [name for name in source_files(root) if name.endswith(".md")]
    return [finding for page in pages for finding in check_page(root, page)]


if __name__ == "__main__":
    sys.exit(report(__doc__, findings))
