"""Sentences and tables computed from records, shown in a notebook and printed elsewhere."""

from __future__ import annotations

import itertools
import re
from typing import Any


def say(text: str) -> None:
    """Show `text` (Markdown, one paragraph or a list) under the cell."""
    from IPython.display import Markdown, display

    display(Markdown(text))


def show_table(table: Any) -> None:
    """Show a DataFrame whose cells hold sentences: in full and wrapped, unlike pandas' own way; words to the left."""
    import pandas
    from IPython.display import display

    with pandas.option_context("display.max_colwidth", None):
        text, markup = table.to_string(), table.to_html(justify="left", border=0)
    columns = (table.iloc[:, k] for k in range(table.shape[1]))
    wordy = itertools.cycle([any(re.search("[A-Za-z]{3}", str(v)) for v in column) for column in columns])
    # Jupyter's style for a row beats the one that pandas gives the row of headers.
    markup = markup.replace("<th>", '<th style="text-align:left">')
    markup = re.sub("<td>", lambda cell: '<td style="text-align:left">' if next(wordy) else cell[0], markup)
    display({"text/html": re.sub(r">\n\s*", ">", markup), "text/plain": text}, raw=True)
