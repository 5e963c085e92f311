"""Which notebook needs which: read from what each says under "You need", as a drawing and as a table.

A notebook that is linked to there is needed, unless its sentence says that it is not required: then it helps.
"""

from __future__ import annotations

import html
import re

from reading import Notebook

LINKED = re.compile(r"\]\((\d\d)_\w+\.ipynb")
NOT_REQUIRED = re.compile(r"\b(?:not|neither|none)\b[^.]*\brequired\b")
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # Okabe and Ito: legible on white and on black
ROW, LEFT, WIDTH, RADIUS = 34, 150, 520, 5  # pixels
Arrows = dict[tuple[str, str], bool]
"""{(from, to): whether it is required}: numbers of notebooks"""


def arrows(notebooks: list[Notebook]) -> Arrows:
    """What each notebook needs of those before it, and what helps."""
    numbers = {n.number for n in notebooks}
    found: Arrows = {}
    for notebook in notebooks:
        for sentence in re.split(r"(?<=\.)\s", notebook.section("You need")):
            required = not NOT_REQUIRED.search(sentence)
            for number in LINKED.findall(sentence):
                if number in numbers and number < notebook.number:
                    found[number, notebook.number] = required or found.get((number, notebook.number), False)
    return found


def drawn(all_arrows: Arrows) -> Arrows:
    """The arrows without those that a way over other notebooks makes superfluous.

    A required one goes only where each arrow of that way is required, too.
    """

    def way(start: str, end: str, required: bool, steps: int = 1) -> bool:
        """Whether arrows lead from one to the other in `steps` or more."""
        after = [b for (a, b), needed in all_arrows.items() if a == start and b <= end and (needed or not required)]
        return any((b == end and steps <= 1) or way(b, end, required, steps - 1) for b in after)

    return {(a, b): required for (a, b), required in all_arrows.items() if not way(a, b, required, 2)}


def svg(notebooks: list[Notebook], all_arrows: Arrows) -> str:
    """The notebooks one below the other, with an arc on their left from each to those that build on it."""
    y = {n.number: ROW * (k + 0.5) for k, n in enumerate(notebooks)}
    color = {n.number: COLORS[k % len(COLORS)] for k, n in enumerate(notebooks)}
    parts = []
    for (a, b), required in drawn(all_arrows).items():
        out = LEFT - 14 - (LEFT - 24) * ((y[b] - y[a]) / (ROW * max(len(notebooks) - 1, 1))) ** 0.6
        path = f"M{LEFT - RADIUS} {y[a]:g}C{out:.0f} {y[a]:g} {out:.0f} {y[b]:g} {LEFT - RADIUS - 7} {y[b]:g}"
        dash = "" if required else ' stroke-dasharray="4 4"'
        parts.append(f'<path d="{path}" fill="none" stroke="{color[a]}" stroke-width="2"{dash}/>')
        tip = f"M{LEFT - RADIUS - 1} {y[b]:g}l-9 -4v8z"
        parts.append(f'<path d="{tip}" fill="{color[a]}"/>')
    for n in notebooks:
        address = html.escape(f"{n.path.with_suffix('.html')}")
        parts.append(f'<circle cx="{LEFT}" cy="{y[n.number]:g}" r="{RADIUS}" fill="{color[n.number]}"/>')
        parts.append(
            f'<a href="{address}"><text x="{LEFT + 14}" y="{y[n.number] + 5:g}" fill="currentColor">'
            f"{n.number} {html.escape(n.short)}</text></a>"
        )
    height = ROW * len(notebooks)
    return (
        f'<svg class="notebook-map" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" '
        f'aria-label="An arc leads from each notebook to those that build on it; the table below says the same">'
        f"{''.join(parts)}</svg>"
    )


def page(notebooks: list[Notebook]) -> str:
    """The page with the drawing and the table."""
    found = arrows(notebooks)
    by_number = {n.number: n for n in notebooks}

    def named(numbers: list[str]) -> str:
        return ", ".join(f'[{k}]({by_number[k].path} "{by_number[k].short}")' for k in numbers) or "-"

    rows = []
    for n in notebooks:
        needs = [a for (a, b), required in found.items() if b == n.number and required]
        helps = [a for (a, b), required in found.items() if b == n.number and not required]
        used = [b for (a, b) in found if a == n.number]
        rows.append(f"| [{n.number} {n.short}]({n.path}) | {named(needs)} | {named(helps)} | {named(used)} |")
    return "\n".join([INTRODUCTION, "", svg(notebooks, found), "", *HEAD, *rows, ""])


INTRODUCTION = """# How the notebooks build on each other

A whole line leads to a notebook from one that it needs, a broken one from one that helps. Lines that follow from others
are left out of the drawing; the table has them all. Each notebook says under "You need" what it takes from the others,
and a section of it is often enough."""
HEAD = ["| notebook | needs | is helped by | is used by |", "| --- | --- | --- | --- |"]
