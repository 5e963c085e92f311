"""Every experiment and tool of the course.

python -m labs                           # a table: notebook, experiment, question, seconds
python -m labs data_parallel --nproc 2   # run one, like `python -m labs.data_parallel --nproc 2`
"""

from __future__ import annotations

import ast
import json
import re
import runpy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from labs.kit.cli import closed_pipe_is_no_error, fail
from labs.kit.errors import did_you_mean
from labs.kit.lab import experiments

LABS = Path(__file__).parent
NOTEBOOKS = LABS.parent / "notebooks"
PROG = "python -m labs"


@dataclass(frozen=True)
class Row:
    """A runnable file or folder of labs/, described by its own docstring."""

    notebooks: str
    """Numbers of the notebooks that launch or name it, such as "01 03"; empty if none does."""
    name: str
    question: str
    seconds: str
    """Duration on two CPU cores according to its docstring; empty if the docstring doesn't say."""


def rows(labs: Path = LABS, notebooks: Path = NOTEBOOKS) -> list[Row]:
    """Return everything that can be run, in notebook order; entries that no notebook names come last."""
    cells = {path.name[:2]: _cells(path) for path in sorted(notebooks.glob("[0-9][0-9]_*.ipynb"))}
    found = []
    for name, path in experiments(labs).items():
        said = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
        uses = re.compile(rf'launch\(\s*"{name}"|\blabs\.{name}\b')
        seconds = re.search(r"About (\d+) s\b", said)
        numbers = " ".join(number for number, text in cells.items() if uses.search(text))
        found.append(Row(numbers, name, said.partition("\n")[0], seconds[1] if seconds else ""))
    return sorted(found, key=lambda row: (row.notebooks or "~", row.name))


def _cells(path: Path) -> str:
    return "\n".join("".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"])


def table(found: list[Row]) -> Iterator[str]:
    """Yield the table's lines: a heading, then one line per row."""
    lines = [("notebook", "experiment", "seconds", "question")]
    lines += [(row.notebooks or "-", row.name, row.seconds or "-", row.question) for row in found]
    widths = [max(len(line[column]) for line in lines) for column in range(3)]
    for notebook, name, seconds, question in lines:
        yield f"{notebook:{widths[0]}}  {name:{widths[1]}}  {seconds:>{widths[2]}}  {question}"


def main() -> None:
    """Print the table, or run the experiment named by the first argument with the remaining arguments."""
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    known = list(experiments())
    if name in ("-h", "--help"):
        with closed_pipe_is_no_error():
            print("\n".join([*table(rows()), "", f"{PROG} NAME --help shows an experiment's options"]))
        return
    if name not in known:
        fail(PROG, f"there is no experiment {name!r}: {did_you_mean(name, known)}{PROG} lists them all")
    sys.argv[:2] = [f"labs.{name}"]
    runpy.run_module(f"labs.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
