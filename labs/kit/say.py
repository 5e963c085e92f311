"""Sentences computed from records, shown as text in a notebook and printed elsewhere."""

from __future__ import annotations


def say(text: str) -> None:
    """Show `text` (Markdown, one paragraph or a list) under the cell."""
    from IPython.display import Markdown, display

    display(Markdown(text))
