"""The doctor's command from a notebook: patients of its trial are examined as in a shell, and the page is shown.

A patient is a whole script with one bad line, see labs/doctor_trial/cases.py.
"""

from __future__ import annotations

import html
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from labs.doctor import report
from labs.doctor.report import Report
from labs.doctor_trial.cases import BY_NAME, Case, Change, gains, with_cures
from labs.doctor_trial.in_turn import Script, doctor_command, run_alone
from labs.kit import measure, room, timeouts
from labs.kit.display import say
from labs.kit.errors import BadInput
from labs.kit.record import Record, Records, attach_provenance

STEPS, SECONDS = 30, 9.0
"""As they are; for counterfactuals."""
BLOCK, MOST_ROUNDS = 12, 20
"""Steps of a turn of the cures."""
OTHER_CURES = {"slow_loader": {"2 workers decode": Change("workers = 0", "workers = 2")}}
"""By patient: what does not mend its bad line, and helps."""
FIRST_CURE = {"slow_loader": "decoded once, kept"}
"""What the line does that the healthy script has in its place."""


def is_smoke() -> bool:
    """Whether all runs are to be short."""
    return os.environ.get("COURSE_SMOKE") == "1"


def examine(patient: str) -> Report:
    """Run `python -m labs.doctor` on this patient, under torchrun if it has several ranks, and show the page.

    BadInput if the doctor leaves no report.
    """
    case = BY_NAME[patient]
    steps, seconds = (12, 1.0) if is_smoke() else (STEPS, SECONDS)
    with tempfile.TemporaryDirectory(prefix="labs-doctor-") as name:
        folder = Path(name)
        script = case.write(folder / "patient")
        options = ("--steps", str(steps), "--seconds", f"{seconds:g}")
        code, said = run_alone(
            doctor_command(script, (*options, "--out", str(folder / "report"))), folder, timeouts.DOCTOR_S
        )
        written = folder / "report" / "report.json"
        if not written.is_file():
            last = (said.strip().splitlines() or ["not a word"])[-1]
            raise BadInput(f"the doctor left no report of {patient} (exit code {code}): {last}")
        found = report.load(written)
    show_page(found, in_shell(script, options))
    return found


def in_shell(script: Script, options: Sequence[str] = ()) -> str:
    """As a person would type it."""
    start = f"torchrun --nproc-per-node {script.ranks} -m" if script.ranks > 1 else "python -m"
    return f"{start} labs.doctor {' '.join(options)} {Path(script.argv[0]).name} --data fashion_mnist_12k.npz"


def show_page(found: Report, typed: str) -> None:
    """What a terminal would show: first what is measured, below a line that opens it the rest."""
    lines = report.page(found, everything=True).splitlines()
    end = next((i for i, line in enumerate(lines) if line.startswith(BELOW_THE_FOLD)), len(lines))
    print("\n".join([f"$ {typed}", "", *lines[:end]]).rstrip())
    if rest := "\n".join(lines[end:]).strip():
        say(f"<pre>{html.escape(rest)}</pre>", folded="The rest, with --all: options, what is fine, what isn't known")


BELOW_THE_FOLD = tuple(title.upper() for title in (report.MORE, report.OPTIONS, report.NOT_PRICED, report.FINE))


def show_lines(patient: str, begin: str, end: str) -> None:
    """The patient's script from the line that begins with `begin` to the one that begins with `end`, with numbers."""
    lines = BY_NAME[patient].text.splitlines()
    first = next(i for i, line in enumerate(lines) if line.strip().startswith(begin))
    last = next(i for i, line in enumerate(lines) if i >= first and line.strip().startswith(end))
    print("\n".join(f"{i + 1:4} {lines[i]}".rstrip() for i in range(first, last + 1)))


def cures(patient: str, seconds: float = 8.0) -> Records:
    """The patient and each of its cures take steps in turn: `gain` (x) by `cure`, one sample for each round."""
    case = BY_NAME[patient]
    with tempfile.TemporaryDirectory(prefix="labs-cures-") as name:
        budget = measure.Budget(1.0 if is_smoke() else seconds, most=MOST_ROUNDS)
        taken = with_cures(case, cured_texts(case), BLOCK, budget, Path(name))
    records = _gains({name: [b.step_s for b in blocks] for name, blocks in taken.items()}, case.name)
    room.keep_records(found := attach_provenance(records))
    return found


def cured_texts(case: Case) -> Mapping[str, str]:
    """By what was done: the script with its bad line mended, and the sick one with another cure."""
    others = {cure: change.made(case.text) for cure, change in OTHER_CURES.get(case.name, {}).items()}
    return {FIRST_CURE.get(case.name, "cured"): case.cured, **others}


def _gains(step_s: Mapping[str, Sequence[float]], patient: str) -> list[Record]:
    layout = {"rank": None, "device": "cpu"}
    return [
        Record("doctor", "gain", "x", ratios, case={"patient": patient, "cure": cure}, layout=layout)
        for cure, ratios in gains(step_s).items()
    ]
