"""Settings of the site: `make docs` builds it into build/docs, with Sphinx."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import anyflash

# The pages of the command line show what it prints.
os.environ |= {
    "COLUMNS": "80",
    "NO_COLOR": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}

project = "anyflash"
copyright = "2026, the anyflash authors"
version = release = anyflash.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "numpydoc",
    "sphinx_copybutton",
    "sphinxcontrib.programoutput",
]
nitpicky = True
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4

autodoc_typehints = "none"  # the docstrings' types say shapes, too
numpydoc_show_class_members = False  # those of tuples
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"anyflash {release}"
copybutton_prompt_text = "$ "


def link_files_outside(app: Any, docname: str, source: list[str]) -> None:
    """What a page links to outside of this folder is no page here: the site has it as a file."""
    folder = Path(app.srcdir, docname).parent

    def link(found: re.Match[str]) -> str:
        target = (folder / found["path"]).resolve()
        if target.is_relative_to(app.srcdir):
            return found[0]
        return f"[{found['text']}](path:{found['path']})"

    source[0] = re.sub(r"\[(?P<text>[^]]+)\]\((?P<path>\.\./[^)#]+)(#[^)]*)?\)", link, source[0])


def setup(app: Any) -> None:
    app.connect("source-read", link_files_outside)
