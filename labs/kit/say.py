"""Sentences and tables computed from records, shown in a notebook and printed elsewhere."""

from __future__ import annotations

import re
from typing import Any


def say(text: str) -> None:
    """Show `text` (Markdown, one paragraph or a list) under the cell."""
    from IPython.display import Markdown, display

    display(Markdown(text))


def show_table(table: Any) -> None:
    """Show a DataFrame whose cells hold sentences: in full, wrapped and aligned to the left, unlike pandas' own way."""
    import pandas
    from IPython.display import display

    with pandas.option_context("display.max_colwidth", None):
        text, markup = table.to_string(), table.to_html(justify="left", border=0)
    markup = re.sub(r">\n\s*", ">", markup).replace("<td>", '<td style="text-align:left">')  # a third of the bytes
    display({"text/html": markup, "text/plain": text}, raw=True)
