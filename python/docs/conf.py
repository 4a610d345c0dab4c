"""Settings of the site: `make docs` builds it into build/docs, with Sphinx."""

from __future__ import annotations

import os

import anyflash

# The pages of the command line show what it prints.
os.environ |= {"COLUMNS": "80", "NO_COLOR": "1"}

project = "anyflash"
copyright = "anyflash's authors"
version = release = anyflash.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "numpydoc",
    "sphinx_copybutton",
    "sphinxcontrib.programoutput",
]
exclude_patterns = ["performance/data"]
nitpicky = True
myst_enable_extensions = ["attrs_block", "dollarmath"]
myst_heading_anchors = 4

autodoc_typehints = "none"  # the docstrings' types say shapes, too
numpydoc_show_class_members = False  # those of tuples
maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"anyflash {release}"
copybutton_prompt_text = "$ "
