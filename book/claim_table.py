"""All claims of the articles on one page, by notebook, with the verdicts that claims.toml holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from reading import Notebook

INTRODUCTION = """# Claims

{claims} statements of {articles} articles on training with several GPUs. If a notebook still runs the experiment, a
function computes the verdict from its records: `python -m labs.claims ID` prints it. The other verdicts stand here."""
HEAD = ["| claim | statement | verdict | decided by |", "| --- | --- | --- | --- |"]


def page(file: Path, notebooks: list[Notebook]) -> str:
    """Return the page of the claims in `file`, claims.toml."""
    content = tomllib.loads(file.read_text("utf-8"))
    parts = [INTRODUCTION.format(claims=len(content["claim"]), articles=len(content["articles"]))]
    parts += ["\n".join(f"* {key}: {a['title_en']}, {a['date']}" for key, a in content["articles"].items())]
    for notebook in notebooks:
        rows = [row(c) for c in content["claim"] if c["notebook"] == notebook.number]
        if rows:
            parts.append("\n".join([f"## {notebook.number} [{notebook.short}]({notebook.path})", "", *HEAD, *rows]))
    return "\n\n".join(parts) + "\n"


def row(claim: dict[str, Any]) -> str:
    """Return one claim as a row of a table."""
    text = re.sub(r"([|*_`$<\[\]])", r"\\\1", claim["claim"])
    place = f"{claim['id']}, line{'' if claim['lines'].isdigit() else 's'} {claim['lines']}"
    return f"| {place} | {text} | {claim.get('verdict', 'computed')} | {claim.get('decided', 'the records')} |"
