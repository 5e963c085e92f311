"""The error catalog as a table that can be filtered, and as text."""

from __future__ import annotations

import html

from labs.symptom.catalog import Row, rows, subjects

PROG = "python -m labs.symptom"
SEEN = 70
"""Characters of a message in the table; the whole stands in the chart."""
STYLE = "<style>.labs-chart td,.labs-chart th{text-align:left!important;vertical-align:top}</style>"
FILTER = (
    "const t=this.closest('.labs-chart'),w=this.value.toLowerCase();"
    "t.querySelectorAll('tbody tr').forEach(r=>r.hidden=!r.textContent.toLowerCase().includes(w));"
    "t.querySelectorAll('details').forEach(d=>{d.open=w&&[...d.querySelectorAll('tbody tr')].some(r=>!r.hidden)})"
)
"""Opens the subjects that have a row with the word that is typed. Without scripts the table is there all the same."""


class Chart:
    """Rows of the chart by subject: what you see, what it is, what cures it, where it is shown."""

    def __init__(self, found: tuple[Row, ...]) -> None:
        self.rows = found

    def __repr__(self) -> str:
        """One line for each subject: what a page that shows text alone, and a strict comparison, see."""
        lines = []
        for subject in subjects():
            here = [row for row in self.rows if row.subject == subject]
            lines += [f"{subject}: {len(here)} rows"] if here else []
        return "\n".join([*lines, f"{len(self.rows)} rows; {PROG} --list prints them all"])

    def _repr_mimebundle_(self, **_: object) -> dict[str, str]:
        return {"text/html": self.markup(), "text/plain": repr(self)}

    def markup(self) -> str:
        """HTML: a field to filter by a word, and a folded table for each subject."""
        tables = "".join(self._table(subject) for subject in subjects())
        field = f'<input placeholder="a word of the message" aria-label="filter the chart" oninput="{FILTER}">'
        return f'<div class="labs-chart">{STYLE}{field}{tables}</div>'

    def _table(self, subject: str) -> str:
        here = [row for row in self.rows if row.subject == subject]
        if not here:
            return ""
        body = "".join(f"<tr><td>{'</td><td>'.join(_cells(row))}</td></tr>" for row in here)
        head = "<th>name, and what you see</th><th>fix</th>"
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        return f"<details><summary>{subject}: {len(here)}</summary>{table}</details>"


def chart(subject: str = "") -> Chart:
    """The chart, or the rows of one of its subjects. ValueError if there is no such subject."""
    if subject and subject not in subjects():
        raise ValueError(f"the chart has no subject {subject!r}; it has {', '.join(subjects())}")
    return Chart(tuple(row for row in rows() if subject in ("", row.subject)))


def _cells(row: Row) -> tuple[str, ...]:
    text = row.see[0].partition(" && ")[0]
    shown = text if len(text) <= SEEN else text[:SEEN].rsplit(" ", 1)[0] + " …"
    fix = html.escape(row.fix.replace(row.source, "") if row.source else row.fix)
    if row.source:
        fix += f' <a href="{html.escape(row.source)}">source</a>'
    return f"<b>{html.escape(row.name)}</b><br><code>{html.escape(shown)}</code>", fix
