"""Sphinx's settings for the book: notebooks as committed (nothing is run), no network to build it nor to read it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # for reading.slug

project = "Make PyTorch training fast"
extensions = ["myst_nb"]
root_doc = "index"

nb_execution_mode = "off"
nb_render_markdown_format = "myst"
nb_merge_streams = True

myst_enable_extensions = ["dollarmath"]
myst_dmath_allow_space = False  # as JupyterLab does: "$5 and $6" is no formula
myst_dmath_allow_digits = False
myst_heading_anchors = 3
myst_heading_slug_func = "reading.slug"
# The notebooks are written in Jupyter's Markdown: what else means something in MyST is text there.
myst_disable_syntax = ["myst_block_break", "myst_line_comment", "myst_role", "myst_target"]
highlight_language = "none"
suppress_warnings = ["misc.highlighting_failure"]  # a cell with "!" and "%run" is Python to a notebook alone
smartquotes = False  # options such as --nproc stay as they are

html_theme = "furo"
html_title = project
html_static_path = [str(HERE / "static")]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_use_index = False  # the glossary is one
html_theme_options = {"navigation_with_keys": True}
html_extra_path = [os.environ["BOOK_FILES"]] if "BOOK_FILES" in os.environ else []


def math(translator: object, node: nodes.Element) -> None:
    """A formula as MathML, which browsers draw themselves."""
    block = isinstance(node, nodes.math_block)
    translator.body.append(convert(node.astext(), display="block" if block else "inline"))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (math, None), (math, None))


html_math_renderer = "mathml"
