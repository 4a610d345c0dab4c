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
exclude_patterns = ["README.md"]  # for who changes the site
nitpicky = True
myst_enable_extensions = ["attrs_inline"]
myst_heading_anchors = 4

autodoc_typehints = "none"  # the docstrings' types say shapes, too
numpydoc_show_class_members = False  # those of tuples
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"anyflash {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_use_index = html_domain_indices = False  # nothing of the theme leads there
pygments_dark_style = "github-dark"  # Furo's underlines modules, as if they were links
copybutton_prompt_text = "$ "


# As GitHub shows one of two pictures, by the reader's theme.
PICTURE = re.compile(
    r"""<picture>\s*<source media="\(prefers-color-scheme: dark\)" srcset="(?P<dark>[^"]+)">\s*"""
    r"""<img alt="(?P<alt>[^"]+)" src="(?P<light>[^"]+)">\s*</picture>"""
)
LINK = re.compile(r"\[(?P<text>[^]]+)\]\((?P<path>\.\./[^)#]+)(#[^)]*)?\)")


def for_the_site(app: Any, docname: str, source: list[str]) -> None:
    """The pages are read on GitHub, too. Here, pictures follow the site's theme, and links to files
    outside of this folder, which are no pages of the site, lead to its copies of them."""
    folder = Path(app.srcdir, docname).parent

    def link(found: re.Match[str]) -> str:
        if (folder / found["path"]).resolve().is_relative_to(app.srcdir):
            return found[0]
        return f"[{found['text']}](path:{found['path']})"

    pair = r"![\g<alt>](\g<light>){.only-light}\n![\g<alt>](\g<dark>){.only-dark}"
    source[0] = LINK.sub(link, PICTURE.sub(pair, source[0]))


def setup(app: Any) -> None:
    app.connect("source-read", for_the_site)
