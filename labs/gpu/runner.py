"""What does this GPU show for the course? Two minutes of checks, then launches from notebooks, most valuable first.

    make gpu                                  # python -m labs.gpu: 8 minutes, into records/<machine>-<month>/
    python -m labs.gpu --list                 # every task in order, with expected seconds
    python -m labs.gpu --minutes 30           # continues until nothing is left
    python -m labs.gpu --only large_models traces
    python -m labs.gpu --rehearse             # without a GPU: short runs on CPU cores, into build/

Each task runs in its own process with a time limit, and its files appear completely or not at all. Run the command
again to resume: it skips finished tasks and retries failed ones. Exit code: 0 nothing failed, 1 a task failed, 2 bad
input, 3 no GPU here, 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Gt

from labs.gpu.accept import refusal
from labs.gpu.tasks import TASKS, Place, Task
from labs.kit import cli, hardware, nvml, record, supervise, timeouts
from labs.kit.errors import did_you_mean, require
from labs.kit.supervise import watched_folder

PROG = "python -m labs.gpu"
ROOT = Path(__file__).parents[2]
REPORT = "gpu.json"
LEAST_S = 3.0
"""A task isn't started with less time left."""


@dataclass(frozen=True)
class Config:
    """Which tasks to run, for how long, and where their files go."""

    minutes: Annotated[float, Gt(0)] = 8.0
    """Start no task after this time, and stop the one that is running."""
    only: tuple[str, ...] = ()
    """Tasks to run (default: all)."""
    list: bool = False
    """Print the tasks with their expected seconds, and run nothing."""
    rehearse: bool = False
    """Do short runs on CPU cores, into build/gpu/rehearsal. They are no records."""
    out: Path = Path("records")
    """Parent of the folder <machine>-<year>-<month>."""

    def __post_init__(self) -> None:
        for name in self.only:
            require(name in TASKS, f"only: there is no task {name!r}: {did_you_mean(name, TASKS)}--list shows them all")
        there = next(p for p in (self.out.absolute(), *self.out.absolute().parents) if p.exists())
        writable = there.is_dir() and os.access(there, os.W_OK)
        require(writable, f"cannot write to {self.out}: choose another folder with --out")


@dataclass(frozen=True)
class Outcome:
    """How a task ended: "done", "failed", or "cannot" if it can't run here; with the reason and its seconds."""

    task: str
    word: str
    reason: str
    seconds: float
    utc: str

    @property
    def line(self) -> str:
        """One line for a terminal."""
        return f"{self.word:6}  {self.task:18} {self.seconds:5.0f} s  {self.reason}"


class Report:
    """The outcomes so far, in `folder`/gpu.json. Written after every task, read to resume a run."""

    def __init__(self, folder: Path, place: Place) -> None:
        self.path, self.place = folder / REPORT, place
        self.outcomes: dict[str, Outcome] = {}
        if self.path.exists():
            found = json.loads(self.path.read_text("utf-8"))["tasks"]
            self.outcomes = {row["task"]: Outcome(**row) for row in found if row["task"] in TASKS}

    def is_done(self, task: str) -> bool:
        """Return whether `task` needs no further try."""
        return task in self.outcomes and self.outcomes[task].word == "done"

    def add(self, outcome: Outcome) -> None:
        """Store an outcome, replacing an earlier one, and write the file."""
        self.outcomes[outcome.task] = outcome
        found = {
            "provenance": record.provenance(),
            "rehearsal": self.place.rehearsal,
            "tasks": [dataclasses.asdict(self.outcomes[name]) for name in TASKS if name in self.outcomes],
        }
        record.write_atomic(self.path, json.dumps(found, indent=1) + "\n")


def run_task(name: str, task: Task, place: Place, folder: Path, root: Path, limit_s: float) -> Outcome:
    """Run one task for at most `limit_s` seconds, and move what it wrote into `folder`. A failure leaves NAME.log."""
    if task.gpus > place.gpus:
        return _outcome(name, "cannot", f"needs {task.gpus} GPUs; here {_count(place.gpus)}", 0.0)
    part = folder / f".part-{name}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    start, log = time.monotonic(), part / "log"
    words = [str(word) for word in task.command(place, part)]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    environment |= {key: value.format(part=part) for key, value in task.environment.items()}
    with log.open("wb") as out:
        process = supervise.started(
            [sys.executable, "-m", *words],
            root=root,
            grace_s=timeouts.STOP_S,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
        with process as running:
            try:
                code = running.wait(limit_s)
            except subprocess.TimeoutExpired:
                code = None
    said = log.read_text("utf-8", "replace")
    seconds = time.monotonic() - start
    (folder / f"{name}.log").unlink(missing_ok=True)
    files = [path for path in sorted(part.rglob("*")) if path.suffix in KEPT and path.stat().st_size]
    if code not in task.fine or ("--out" in words and not files):
        os.replace(log, folder / f"{name}.log")
        shutil.rmtree(part)
        why = f"stopped after {limit_s:.0f} s" if code is None else f"exit code {code}: {_last_line(said)}"
        return _outcome(name, "failed", why, seconds)
    log.unlink()
    measured = [] if place.rehearsal else [r for path in files if path.suffix == ".jsonl" for r in record.load(path)]
    refused = next(filter(None, map(refusal, measured)), None)
    if refused:
        shutil.rmtree(part)
        return _outcome(name, "failed", f"no record of a GPU: {refused}", seconds)
    for path in files:
        os.replace(path, folder / (f"{name}.json" if path.name == "report.json" else path.name))
    shutil.rmtree(part)
    return _outcome(name, "done", _first_line(said), seconds)


KEPT = {".jsonl", ".json", ".gz", ".txt"}


def _outcome(name: str, word: str, reason: str, seconds: float) -> Outcome:
    return Outcome(name, word, reason, round(seconds, 1), record.provenance()["utc"])


def _first_line(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    return next((line[:200] for line in lines if line and not line.startswith("[rank ")), "nothing was printed")


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing was printed"


def _count(gpus: int) -> str:
    return "is one" if gpus == 1 else f"are {gpus}"


def machine_folder(gpus: list[str], utc: str) -> str:
    """Return a folder name such as "4x-nvidia-a100-sxm4-80gb-2026-11"."""
    slug = re.sub(r"[^a-z0-9]+", "-", gpus[0].lower()).strip("-")
    return f"{len(gpus)}x-{slug}-{utc[:7]}" if len(gpus) > 1 else f"{slug}-{utc[:7]}"


def table() -> str:
    """List every task in order: expected seconds on an H200, limit, GPUs, question."""
    rows = [f"{'task':18} {'expected':>9} {'limit':>6} {'GPUs':>5}  question"]
    rows += [
        f"{name:18} {task.seconds:7.0f} s {task.limit_s:4.0f} s {task.gpus:5}  {task.question}"
        for name, task in TASKS.items()
    ]
    one = sum(task.seconds for task in TASKS.values() if task.gpus == 1)
    return "\n".join([*rows, f"On one GPU, all of them are expected to take {one / 60:.0f} minutes."])


def main() -> None:
    config = cli.parse_config(Config, __doc__, PROG)
    if config.list:
        print(table())
        return
    gpus = [] if config.rehearse else hardware.visible_gpu_names()
    if not gpus and not config.rehearse:
        why = nvml.report(brief=True).problem or "torch or CUDA_VISIBLE_DEVICES hides those that are here"
        print(f"{PROG}: no GPU for torch here ({why}), so nothing was run: see --rehearse", file=sys.stderr)
        raise SystemExit(3)
    place = Place(gpus=2 if config.rehearse else len(gpus), rehearsal=config.rehearse)
    if config.rehearse:
        folder = ROOT / "build" / "gpu" / "rehearsal"
        require_elsewhere(config.out)
    else:
        folder = (config.out / machine_folder(gpus, record.provenance()["utc"])).absolute()  # tasks run in ROOT
    folder.mkdir(parents=True, exist_ok=True)
    raise SystemExit(run_all([n for n in TASKS if n in (config.only or TASKS)], config, place, folder))


def require_elsewhere(out: Path) -> None:
    """Reject --out for a rehearsal."""
    if out != Config.out:
        cli.fail(PROG, "--rehearse writes into build/gpu/rehearsal alone: leave out --out")


def run_all(names: list[str], config: Config, place: Place, folder: Path) -> int:
    """Run the tasks in order while there is time. Returns the exit code."""
    report, until = Report(folder, place), time.monotonic() + 60 * config.minutes
    mark = "REHEARSAL, no record: " if place.rehearsal else ""
    skipped = [name for name in names if report.is_done(name)]
    if skipped:
        print(f"{mark}done before, skipped: {', '.join(skipped)}")
    code = 0
    with watched_folder(sockets=True) as root:
        try:
            for name in (name for name in names if name not in skipped):
                left = until - time.monotonic()
                if left < LEAST_S:
                    print(f"{mark}time is up; run the command again to resume with {name}")
                    break
                outcome = run_task(name, TASKS[name], place, folder, root, min(TASKS[name].limit_s, left))
                report.add(outcome)
                print(f"{mark}{outcome.line}", flush=True)
        except KeyboardInterrupt:
            print("interrupted: the tasks above are on disk; run the command again to resume", file=sys.stderr)
            code = 130
    words = [o.word for name, o in report.outcomes.items() if name in names]
    counted = ", ".join(f"{words.count(word)} {word}" for word in ("done", "failed", "cannot"))
    print(f"{mark}{counted}; {folder}")
    return code or int("failed" in words)
