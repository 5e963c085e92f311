"""The room's predictions: which question of which notebook, what was predicted, what was found."""

from __future__ import annotations

import ast
import functools
import json
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labs.classroom.room.collect import Learner, shown
from labs.kit.course import NOTEBOOKS

OTHER = "questions of your own"


@dataclass(frozen=True)
class Asked:
    """Where a notebook asks a question, and the number it prints there for a start."""

    place: int
    """Its rank among all questions of the course"""
    notebook: str
    section: str
    printed: float | None


@dataclass(frozen=True)
class Answer:
    """One learner's prediction and what their machine gave, both in the question's unit; None where there is none."""

    name: str
    predicted: float | None
    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Question:
    """What was to be predicted, and the room's latest answers, by name."""

    what: str
    unit: str
    kind: str
    """Of what was found: measured or modelled"""
    asked: Asked | None
    answers: tuple[Answer, ...]
    machines: int

    @property
    def predicted(self) -> list[float]:
        """All predictions."""
        return [a.predicted for a in self.answers if a.predicted is not None]

    @property
    def found(self) -> list[float]:
        """All that was found."""
        return [a.value for a in self.answers if a.value is not None]

    @property
    def medians(self) -> tuple[float | None, float | None]:
        """Of the predictions and of what was found."""
        return tuple(statistics.median(v) if v else None for v in (self.predicted, self.found))  # type: ignore[return-value]

    @property
    def as_printed(self) -> int:
        """How many predictions are the number that the notebook prints: perhaps not anybody's own."""
        printed = self.asked.printed if self.asked else None
        return sum(p == printed for p in self.predicted) if printed is not None else 0


def questions(learners: list[Learner]) -> list[Question]:
    """All questions that anybody answered, in the order of the course, those of no notebook last."""
    index = asked_in(NOTEBOOKS)
    keys = {(row["what"], row["unit"]) for learner in learners for row in learner.predictions}
    found = [_question(what, unit, learners, index.get(what)) for what, unit in keys]
    return sorted(found, key=lambda q: (q.asked.place if q.asked else len(index), q.what))


def _question(what: str, unit: str, learners: list[Learner], asked: Asked | None) -> Question:
    answers, kinds, machines = [], ["measured"], set()
    for learner in learners:
        rows = [r for r in learner.predictions if (r["what"], r["unit"]) == (what, unit)]
        if rows:
            answers.append(_latest(learner.name, rows))
            kinds += [r["kind"] for r in rows if r["value"] is not None]
            machines |= {machine_of(r["machine"]) for r in rows if r["value"] is not None}
    return Question(what, unit, kinds[-1], asked, tuple(answers), len(machines))


def _latest(name: str, rows: list[dict[str, Any]]) -> Answer:
    """The latest pair; a cell that was run again replaces what it gave before. A prediction alone waits for its run."""
    pairs = [r for r in rows if r["value"] is not None]
    if not pairs:
        return Answer(name, rows[-1]["predicted"], None, None, None)
    value, low, high = (pairs[-1][k] for k in ("value", "low", "high"))
    return Answer(name, pairs[-1]["predicted"], value, value if low is None else low, value if high is None else high)


def machine_of(provenance: dict[str, Any], device: str = "", ranks: int = 0) -> str:
    """The hardware's name, for example "2 x NVIDIA L4" or "Xeon 8481C, 8 cores", with the ranks used, if given."""
    gpus = provenance.get("gpus")
    names = [shown(g.get("name") if isinstance(g, dict) else g) for g in gpus] if isinstance(gpus, list) else []
    used = f", {ranks} rank{'s' * (ranks != 1)}" if ranks else ""
    if names and not device.startswith("cpu"):
        kinds = " + ".join(f"{names.count(n)} x {n}" if names.count(n) > 1 else n for n in dict.fromkeys(names))
        return kinds + used
    cores = provenance.get("cores")
    counted = f", {cores} cores" if isinstance(cores, int) and 0 < cores < 10**6 else ""
    return (shown(provenance.get("cpu")) or "unknown processor") + counted + used


@functools.cache
def asked_in(folder: Path) -> dict[str, Asked]:
    """{what: where it is asked} of all notebooks in the folder; {} where there are none."""
    index: dict[str, Asked] = {}
    for path in sorted(folder.glob("*.ipynb")):
        for section, what, printed in _predict_calls(json.loads(path.read_text(encoding="utf-8"))):
            index[what] = Asked(len(index), path.stem, section, printed)
    return index


def _predict_calls(notebook: dict[str, Any]) -> Iterator[tuple[str, str, float | None]]:
    """(section, what, number printed) of each predict(number, "what") in a notebook's code."""
    section = ""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            section = (re.findall(r"^##+ +(.+)$", source, re.MULTILINE) or [section])[-1]
            continue
        for node in ast.walk(ast.parse(re.sub(r"^[%!].*$", "", source, flags=re.MULTILINE))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "predict":
                match node.args:
                    case [number, ast.Constant(value=str(what)), *_]:
                        yield section, what, _number(number)


def _number(node: ast.expr) -> float | None:
    try:
        return float(ast.literal_eval(node))
    except (ValueError, TypeError):
        return None
