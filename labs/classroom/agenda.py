"""How many minutes each section of the course takes in a room, and agendas of half a day, one, two and two more days.

    python -m labs.classroom.agenda                                # minutes per section
    python -m labs.classroom.agenda --plan half --start 13:30      # half, one, two or more
    python -m labs.classroom.agenda --measured build/minutes.json  # with this machine's seconds, after `make course`

Seconds of the machine are recorded or, with --measured, yours; minutes of people are modelled from what there is to
read, to predict and to look at (`PACES`), and from the minutes that each exercise says it takes.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nbformat

from labs.classroom.plans import PLANS, Break
from labs.kit.cli import fail
from labs.kit.course import NOTEBOOKS
from labs.kit.errors import BadInput, require
from labs.kit.notebook_report import heading, pictures
from labs.kit.record import load

PACES = {
    "room": {"words": 1 / 120, "predictions": 2.0, "results": 3.0, "exercises": 2.0, "exercise_min": 1.0},
    "alone": {"words": 1 / 150, "predictions": 1.0, "results": 1.5, "exercises": 0.0, "exercise_min": 1.0},
}
"""Minutes for each word, prediction, figure or table, exercise, and minute that an exercise says it takes. In a room
text is spoken, a prediction waits for the last hand, a figure is discussed, and a solution is shown after an exercise.
Assumptions, not measurements: change them when your rooms are faster or slower."""
STATED = re.compile(r"About (\d+) minutes")
"""How an exercise says how long it takes who writes it alone, with its hints at hand: a guess of its author."""
FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
"""Tables for who wants them: they cost no minutes. Nor does a strip under a launch, which is looked at in passing."""
RECORD = NOTEBOOKS.parent / "records" / "amd-epyc-2-cores-2026-11" / "course.jsonl"


@dataclass
class Section:
    """One section of a notebook, an exercise counting as one, and what there is to do in it."""

    notebook: str
    """Its file name without .ipynb"""
    title: str
    words: int = 0
    predictions: int = 0
    results: int = 0
    """Figures and tables"""
    exercises: int = 0
    exercise_min: int = 0
    """Minutes that they say they take."""
    machine_s: float = 0.0

    @property
    def key(self) -> str:
        """As an agenda names it: "03/2", "03/03.1", "03/Claims on trial"."""
        number = re.match(r"[\d.]*\d", self.title)
        return f"{self.notebook[:2]}/{number[0] if number else self.title}"

    def minutes(self, pace: str = "room") -> float:
        """Of people, at one of PACES, and machine together."""
        return sum(getattr(self, what) * each for what, each in PACES[pace].items()) + self.machine_s / 60


def sections(path: Path, machine_s: dict[tuple[str, str], float]) -> list[Section]:
    """The sections of a notebook in order, its head as "Introduction"; seconds by (notebook, section)."""
    found = [Section(path.stem, "Introduction")]
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            found[-1].predictions += len(re.findall(r"\bpredict\(", cell.source))
            shown = FOLDED.sub("", str(cell.outputs))
            found[-1].results += len(pictures(cell)) - shown.count("labs-progress") + shown.count("<table")
            found[-1].exercises += len(re.findall(r"^check\(", cell.source, re.MULTILINE))
            continue
        for part in re.split(r"^(?=##)", cell.source, flags=re.MULTILINE):
            title = heading(part, 2) or heading(part, 3)
            if title and title not in ("You will", "You need"):
                found.append(Section(path.stem, title))
            if re.match(r"### \d\d\.\d", part) and (stated := STATED.search(part)):
                found[-1].exercise_min = int(stated[1])
            found[-1].words += len(re.sub(r"<[^>]*>|\]\([^)]*\)", " ", part).split())
    for section in found:
        section.machine_s = machine_s.get((section.notebook, section.title), 0.0)
    return found


def course(measured: Path = RECORD) -> list[Section]:
    """All sections of all notebooks, with the seconds of `measured`. BadInput if that holds none."""
    seconds = seconds_of(measured)
    return [s for path in sorted(NOTEBOOKS.glob("*.ipynb")) for s in sections(path, seconds)]


def seconds_of(path: Path) -> dict[tuple[str, str], float]:
    """Seconds by (notebook, section) from a record or from the minutes.json of `make course`. BadInput if neither."""
    try:
        if path.suffix == ".json":
            rows = json.loads(path.read_text("utf-8"))
            return {(n, s["section"]): float(s["seconds"]) for n, found in rows.items() for s in found}
        return {(r.case["notebook"], r.case["section"]): r.value for r in load(path).where("section_s")}
    except FileNotFoundError:
        raise BadInput(f"there is no {path}: `make course` writes build/minutes.json") from None
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as e:
        raise BadInput(f"{path} does not hold seconds per section ({e}): run `make course` again") from None


def table(found: list[Section]) -> str:
    """Minutes per section as a Markdown table, with a sum for each notebook."""
    lines = [
        "| section | words | predictions | figures, tables | exercises | their minutes | machine s | alone | "
        "in a room |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for name in dict.fromkeys(s.notebook for s in found):
        own = [s for s in found if s.notebook == name]
        lines.append(_row(f"**{name}**", own, "**"))
        lines += [_row(s.title, [s]) for s in own]
    return "\n".join(lines)


def _row(title: str, own: list[Section], bold: str = "") -> str:
    counts = [f"{sum(getattr(s, what) for s in own)}" for what in PACES["room"]]
    minutes = [f"{bold}{sum(s.minutes(pace) for s in own):.0f}{bold}" for pace in ("alone", "room")]
    return "| " + " | ".join([title, *counts, f"{sum(s.machine_s for s in own):.0f}", *minutes]) + " |"


def agenda(plan: str, found: list[Section], start: str) -> str:
    """One of PLANS as Markdown, a table for each day. BadInput for a plan or a time that there is not."""
    require(plan in PLANS, f"there is no plan {plan!r}; there are {', '.join(PLANS)}")
    clock = re.fullmatch(r"([01]?\d|2[0-3]):([0-5]\d)", start)
    require(bool(clock), f"start must be a time such as 09:00, not {start!r}")
    minute = int(clock[1]) * 60 + int(clock[2])
    return "\n\n".join("\n".join(_day(day, found, minute)) for day in PLANS[plan])


def _day(day: list[str | Break], found: list[Section], minute: float) -> Iterator[str]:
    known = {s.key: s for s in found}
    yield "| time | minutes | notebook | what |\n| --- | --: | --- | --- |"
    for item in day:
        if isinstance(item, Break):
            minute = math.ceil((minute + item.minutes) / 5) * 5
            yield f"| | {item.minutes} | | *{item.what}, until {_clock(minute)}* |"
            continue
        number, _, keys = item.partition("/")
        own = [known[f"{number}/{key}"] for key in keys.split(", ")]
        spent = sum(s.minutes() for s in own)
        yield f"| {_clock(minute)} | {spent:.0f} | {number} | {'; '.join(s.title for s in own)} |"
        minute += spent
    yield f"| {_clock(minute)} | | | *end* |"


def _clock(minute: float) -> str:
    return f"{int(minute) // 60:02}:{int(minute) % 60:02}"


def main() -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m labs.classroom.agenda",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", choices=list(PLANS), help="an agenda in place of minutes per section")
    parser.add_argument("--start", default="09:00", help="when it begins (default 09:00)")
    parser.add_argument("--measured", type=Path, default=RECORD, help="seconds of the machine, from `make course`")
    options = parser.parse_args()
    try:
        found = course(options.measured)
        print(agenda(options.plan, found, options.start) if options.plan else table(found))
    except BadInput as e:
        fail(parser.prog, str(e))
    return 0


if __name__ == "__main__":
    sys.exit(main())
