"""All claims of the articles on one page: what reading says, and the verdict in the committed run of a notebook."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from reading import Notebook

WORDS = ("holds", "does not hold", "depends", "needs GPUs", "not tried yet")
SECTION = "Claims on trial"


class Rows(HTMLParser):
    """The rows of all tables in a piece of HTML, each as the texts of its cells, whose lines are kept apart."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[str]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th") and self.rows:
            self.rows[-1].append("")
        elif tag == "br":
            self.handle_data("\n")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def verdicts(notebook: Notebook) -> dict[str, str]:
    """{id of a claim: verdict} from the tables of claims among a notebook's outputs."""
    found = {}
    for cell in notebook.content["cells"]:
        for output in cell.get("outputs", ()):
            parser = Rows()
            parser.feed("".join(output.get("data", {}).get("text/html", "")))
            for row in parser.rows:
                if len(row) >= 3 and re.fullmatch(r"[A-Z]\d\d\w?", name := row[0].partition("\n")[0].strip()):
                    found[name] = re.sub(r"^\W+", "", row[2].partition("\n")[0].replace("\xa0", " ")).strip()
    return found


def kind(verdict: str) -> str:
    """The verdict as one of WORDS."""
    if verdict.startswith("needs"):
        return "needs GPUs"
    return verdict if verdict in WORDS else "not tried yet"


def page(file: Path, notebooks: list[Notebook]) -> str:
    """The page of the claims in `file`, claims.toml."""
    content = tomllib.loads(file.read_text("utf-8"))
    by_number = {n.number: n for n in notebooks}
    said = {
        c["id"]: (verdicts(by_number[c["notebook"]]).get(c["id"]) if c["notebook"] in by_number else None)
        or c.get("verdict", "")
        for c in content["claim"]
    }
    parts = [INTRODUCTION.format(claims=len(said), articles=len(content["articles"]))]
    parts += ["\n".join(summary(content, said))]
    for notebook in notebooks:
        rows = [row(c, said[c["id"]]) for c in content["claim"] if c["notebook"] == notebook.number]
        if rows:
            here = any(section.heading == SECTION for section in notebook.sections)
            link = (
                f"[{SECTION}]({notebook.path}#claims-on-trial) in the notebook"
                if here
                else f"[notebook]({notebook.path})"
            )
            head = f"## {notebook.number} {notebook.short}\n\nThe evidence: {link}."
            parts.append("\n".join([head, "", *HEAD, *rows]))
    return "\n\n".join(parts) + "\n"


def summary(content: dict[str, Any], said: dict[str, str]) -> list[str]:
    """The table of verdicts by article."""
    lines = [f"| article | {' | '.join(WORDS)} |", "| --- |" + " ---: |" * len(WORDS)]
    for key, article in content["articles"].items():
        count = Counter(kind(v) for name, v in said.items() if name[0] == key)
        name = f"{key}: {article['title_en']}, {article['date']}"
        lines.append(f"| {name} | {' | '.join(str(count[word]) for word in WORDS)} |")
    return lines


def row(claim: dict[str, Any], verdict: str) -> str:
    """One claim as a row of a table."""
    text = re.sub(r"([|*_`$<\[\]])", r"\\\1", claim["claim"])
    place = f"{claim['id']}, line{'' if claim['lines'].isdigit() else 's'} {claim['lines']}"
    if verdict.startswith("needs") and claim.get("command"):
        verdict += f": `{claim['command']}`"
    return f"| {place} | {text} | {claim['paper']} | {verdict or 'not tried yet'} |"


INTRODUCTION = """# Claims on trial

{claims} statements of {articles} articles on training with several GPUs. *On paper* is what reading, arithmetic and
documentation say of a statement; *verdict* comes from the records of a notebook's committed run, or, where no notebook
launches the experiment any more, from `labs/kit/claims.toml`. On your machine a computed verdict may differ."""
HEAD = ["| claim | statement | on paper | verdict |", "| --- | --- | --- | --- |"]
