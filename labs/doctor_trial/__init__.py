"""Can the doctor be believed? Trainings that are well, and ones with one line changed: whom does it accuse of what?

    python -m labs.doctor_trial                                 # every patient once, every cure measured: 16 minutes
    python -m labs.doctor_trial --cases slow_loader train_ddp
    python -m labs.doctor_trial --healthy-runs 5 --out trial.jsonl

Needs a quiet machine. Each patient is a script of its own that `python -m labs.doctor` is given, under torchrun where
it trains on two ranks. Then the sick script and the cured one take steps in turn, and what was promised is compared.
"""

from __future__ import annotations

import json
import math
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labs.doctor.bottlenecks import OPTION, UNPRICED
from labs.doctor.profile import AS_IS
from labs.doctor_trial.cases import BY_NAME, BY_READING, Case, gains, with_cures
from labs.doctor_trial.in_turn import ScriptFailed, doctor_command, run_alone
from labs.kit import cli, measure, timeouts
from labs.kit.errors import did_you_mean, require
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records, attach_provenance

PROG = "python -m labs.doctor_trial"
NAME = "doctor_trial"
START_S = 6.0
"""Of one run of the doctor besides the steps in turn: two imports of torch, warm-up and steps as they are."""
BLOCK, MOST_ROUNDS = 20, 20
"""Steps of a turn of sick and cured."""
NEAR = 0.2
"""A bound is right within its interval or this share of the gain."""
FEW = ("images", "slow_loader")
"""Patients of a smoke run."""
READ, SEEN = "read in the source", "seen in the running script"
"""How a finding of no measurement is known: as labs/doctor/findings.py says, which imports torch."""


@dataclass(frozen=True)
class Config:
    """Which patients, how often, how long."""

    cases: tuple[str, ...] = ()
    """Patients by name; by default all."""
    runs: int = 1
    """Times that each sick patient is seen."""
    healthy_runs: int = 1
    """Times that each healthy patient is seen."""
    doctor_seconds: float = 5.5
    """That the doctor may take for counterfactuals, of each patient."""
    gains: bool = True
    """Whether sick and cured scripts take steps in turn."""
    gain_seconds: float = 6.0
    """For these steps, of each sick patient."""
    smoke: bool = False
    """One healthy and one sick patient, 3 s each."""

    def __post_init__(self) -> None:
        require(min(self.runs, self.healthy_runs) >= 0, "runs and healthy_runs must not be negative")
        require(max(self.runs, self.healthy_runs) <= 100, "runs and healthy_runs must be at most 100")
        require(1 <= self.doctor_seconds <= 100, f"doctor_seconds must be from 1 to 100, not {self.doctor_seconds:g}")
        require(1 <= self.gain_seconds <= 100, f"gain_seconds must be from 1 to 100, not {self.gain_seconds:g}")
        for name in self.cases:
            hint = did_you_mean(name, BY_NAME)
            require(name in BY_NAME, f"cases: there is no {name!r}: {hint}there are {', '.join(BY_NAME)}")
        require(bool(self.visits), "nobody is to be seen: runs, healthy_runs and cases leave no patient")

    @property
    def chosen(self) -> list[Case]:
        """Patients, in the order of the table."""
        names = self.cases or (FEW if self.smoke else tuple(BY_NAME))
        return [case for case in BY_NAME.values() if case.name in names]

    @property
    def visits(self) -> list[tuple[int, Case]]:
        """(round, patient): all patients of a round before the next round begins."""
        most = max(self.runs, self.healthy_runs)
        return [
            (n, case)
            for n in range(most)
            for case in self.chosen
            if n < (self.runs if case.is_ill else self.healthy_runs)
        ]

    @property
    def each_s(self) -> float:
        """For counterfactuals."""
        return min(3.0, self.doctor_seconds) if self.smoke else self.doctor_seconds

    @property
    def gain_s(self) -> float:
        """For sick and cured in turn."""
        return min(2.0, self.gain_seconds) if self.smoke else self.gain_seconds


def predicted_s(config: Config) -> float:
    """About how long all of it takes, in s. Loaders that are tried with workers, and slow disks, add to it."""
    priced = [case for case in config.chosen if config.gains and is_priced(case)]
    return len(config.visits) * (START_S + config.each_s) + len(priced) * (START_S + config.gain_s)


def is_priced(case: Case) -> bool:
    """Whether its cure makes it faster, so that there is a gain to measure."""
    return case.is_ill and case.by != BY_READING


def records(config: Config, folder: Path) -> Iterator[Record]:
    """Of one visit after the other, then of one cure after the other."""
    for n, case in config.visits:
        found = seen_by_doctor(case, folder / f"{n}-{case.name}", config.each_s)
        yield from _judged(case, n, found)
    for case in config.chosen:
        if config.gains and is_priced(case):
            yield from _gain(case, config.gain_s, folder / f"gain-{case.name}")


# One visit


@dataclass
class Seen:
    """What the doctor said of one patient."""

    seconds: float
    exit_code: int | None
    findings: list[dict[str, Any]] = field(default_factory=list)
    """As in report.json: name, gain, kind, by, ..."""
    complaint: str = ""
    """Last line of its standard error, if there is no report."""

    def names(self, case: Case) -> list[str]:
        """Of all that is said, in the report's order; options only where the illness may be one."""
        wanted = [f for f in self.findings if f["kind"] != OPTION or f["name"] in case.names]
        if case.by == BY_READING:
            wanted = [f for f in wanted if f["by"] in (READ, SEEN)]
        return list(dict.fromkeys(f["name"] for f in wanted))

    def accusations(self) -> list[str]:
        """What a patient that is well must not be told: that something holds it back, or that a line is wrong."""
        return [f["name"] for f in self.findings if f["kind"] not in (OPTION, UNPRICED)]


def seen_by_doctor(case: Case, folder: Path, seconds: float) -> Seen:
    """Run the doctor's command on it. What it says goes into `folder`."""
    script = case.write(folder / "patient")
    report = folder / "report"
    options = ["--seconds", f"{seconds:g}", "--out", str(report)]
    begun = time.monotonic()
    code, said = run_alone(doctor_command(script, options), folder, timeouts.DOCTOR_S)
    found = Seen(time.monotonic() - begun, code)
    if (report / "report.json").is_file():
        row = json.loads((report / "report.json").read_text())
        found.findings = row["findings"]
    else:
        found.complaint = (said.strip().splitlines() or ["no report, and not a word"])[-1]
    shutil.rmtree(folder, ignore_errors=True)
    return found


def _judged(case: Case, n: int, found: Seen) -> Iterator[Record]:
    names = found.names(case)
    of = {"patient": case.name, "ill": case.is_ill, "by": case.by, "run": n}
    yield _record("visit_s", "s", [found.seconds], **of, exit_code=found.exit_code, complaint=found.complaint)
    said = {"first": names[0] if names else "", "second": names[1] if len(names) > 1 else ""}
    if not case.is_ill:
        accused = found.accusations()
        yield _record("accused", "1", [bool(accused)], **of, **said, of=accused)
        return
    place = next((i for i, name in enumerate(names, 1) if name in case.names), 0)
    yield _record("place", "1", [place], **of, **said, wanted=list(case.names))
    finding = next((f for f in found.findings if f["name"] in case.names and f["gain"]), None)
    if finding:
        bound = finding["gain"]
        yield _record(
            "bound",
            "x",
            [bound["value"]],
            **of,
            low=bound["low"],
            high=bound["high"],
            how=finding["by"],
            said=finding["name"],
        )


# Cures


def _gain(case: Case, seconds: float, folder: Path) -> Iterator[Record]:
    """Sick / cured, per sample, round after round."""
    of, cures = {"patient": case.name}, {"cured": case.cured}
    try:
        taken = with_cures(case, cures, BLOCK, measure.Budget(seconds, most=MOST_ROUNDS), folder)
    except ScriptFailed as e:
        yield _record("no_gain", "1", [1], **of, why=str(e))
        return
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    step_s = {name: [b.step_s for b in blocks] for name, blocks in taken.items()}
    yield _record("gain", "x", gains(step_s)["cured"], **of)
    for name, times in step_s.items():
        yield _record("step_s", "s", times, **of, script="sick" if name == AS_IS else name)


def _record(metric: str, unit: str, samples: Sequence[float], **case: Any) -> Record:
    return Record(NAME, metric, unit, tuple(float(s) for s in samples), case=case)


# What a reader sees


def share(run: Records, of: Sequence[bool]) -> Estimate | None:
    """True ones of all, with its Wilson interval; None of nothing."""
    return measure.proportion(sum(of), len(of)) if of else None


@dataclass(frozen=True)
class Promise:
    """A bound, and what the cure gave."""

    patient: str
    bound: Estimate
    gain: Estimate

    @property
    def kept(self) -> bool:
        """Within the bound's interval, or near it."""
        within = self.bound.low <= self.gain.high and self.gain.low <= self.bound.high
        return within or abs(self.bound.value / self.gain.value - 1) <= NEAR

    @property
    def exceeded(self) -> bool:
        """Surely more was given than a bound that is to hold "at most"."""
        return self.gain.low > self.bound.high


def promises(run: Records) -> list[Promise]:
    """Of sick patients that were given a bound, by the median run, and whose cure was measured."""
    found = []
    for r in run.where("gain"):
        bounds = sorted(run.where("bound", patient=r.case["patient"]), key=lambda b: b.value)
        if bounds:
            b = bounds[len(bounds) // 2]
            bound = Estimate(b.value, b.case["low"], b.case["high"], 1, "x")
            found.append(Promise(r.case["patient"], bound, measure.estimate(r.samples, "x")))
    return found


def answer(run: Records) -> Iterator[str]:
    """How many are named, how many accused, whether bounds hold; what went wrong, by name."""
    places, accused = run.where("place"), run.where("accused")
    if places:
        near = share(run, [1 <= r.value <= 2 for r in places])
        first = share(run, [r.value == 1 for r in places])
        yield (
            f"{len(places)} visits to {len({r.case['patient'] for r in places})} sick patients: the illness was "
            f"named first or second in {_percent(near)}, first in {_percent(first)}."
        )
        missed = [
            f"{r.case['patient']} ({r.case['first'] or 'nothing was said'})" for r in places if not 1 <= r.value <= 2
        ]
        yield f"Missed: {', '.join(missed) or 'none'}."
    if accused:
        wrong = [f"{r.case['patient']} of {', '.join(r.case['of'])}" for r in accused if r.value]
        rate = _percent(share(run, [bool(r.value) for r in accused]))
        yield (
            f"{len(accused)} visits to {len({r.case['patient'] for r in accused})} healthy patients: accused in "
            f"{rate}: {'; '.join(wrong) or 'nobody'}."
        )
    if given := promises(run):
        kept = share(run, [p.kept for p in given])
        off = [f"{p.patient} ({p.bound.value:.2f}x promised, {p.gain.value:.2f}x given)" for p in given if not p.kept]
        yield (
            f"Bounds against gains of {len(given)} cures: within the interval or {100 * NEAR:.0f} % in "
            f"{_percent(kept)}; not so: {', '.join(off) or 'none'}. Surely more than promised: "
            f"{', '.join(p.patient for p in given if p.exceeded) or 'none'}."
        )
        priced = {p.patient for p in given}
        unpriced = sorted({r.case["patient"] for r in run.where("gain")} - priced)
        yield f"Ill, and without a bound: {', '.join(unpriced) or 'none'}."
    small = [r.case["patient"] for r in run.where("gain") if measure.estimate(r.samples, "x").low < 1.15]
    if small:
        yield f"Cures that give less than 15 % here, or not surely more: {', '.join(small)}."
    failed = [f"{r.case['patient']}: {r.case['complaint']}" for r in run.where("visit_s") if r.case["complaint"]]
    failed += [f"{r.case['patient']}: {r.case['why']}" for r in run.where("no_gain")]
    if failed:
        yield f"Without a report or a gain: {'; '.join(failed)}."
    if took := [r.value for r in run.where("visit_s")]:
        yield f"A visit took {statistics.median(took):.0f} s, at most {max(took):.0f} s."


def _percent(found: Estimate | None) -> str:
    if found is None:
        return "none"
    return f"{100 * found.value:.0f} % [{100 * found.low:.0f}, {100 * found.high:.0f}]"


def trial(config: Config, told: Any = None) -> Records:
    """All visits and cures; `told` is called with each record as it comes. Nothing is left at the end."""
    found = []
    with tempfile.TemporaryDirectory(prefix="labs-trial-") as folder:
        for record in records(config, Path(folder)):
            found.append(record)
            if told:
                told(record)
    return attach_provenance(found)


def _line(r: Record) -> str:
    """Of one record, while the trial goes on; "" for those that nobody waits for."""
    c = r.case
    if r.metric == "place":
        named = {1: "first", 2: "second"}.get(int(r.value), "MISSED")
        return f"{c['patient']:20} {named}: {c['first'] or 'nothing'}, {c['second']}"
    if r.metric == "accused":
        return f"{c['patient']:20} {'ACCUSED of ' + ', '.join(c['of']) if r.value else 'well'}"
    if r.metric == "gain":
        return f"{c['patient']:20} cure: {measure.estimate(r.samples, 'x')}"
    if r.metric == "no_gain" or c.get("complaint"):
        return f"{c['patient']:20} {c.get('why') or c['complaint']}"
    return ""


@dataclass(frozen=True)
class Command(Config, cli.Output):
    """Which patients, how often, how long, and where the records go."""

    def __post_init__(self) -> None:
        Config.__post_init__(self)
        cli.Output.__post_init__(self)


def main() -> None:
    """Say how long it takes, then each patient as it comes, then the answer."""
    config = cli.parse_config(Command, __doc__, PROG)
    minutes = math.ceil(predicted_s(config) / 60)
    visits = len(config.visits)
    many, long = f"{visits} visit{'s'[: visits - 1]}", f"{minutes} minute{'s'[: minutes - 1]}"
    print(f"{many}, about {long}: nothing else should run here.", file=sys.stderr, flush=True)
    begun = time.monotonic()

    def told(record: Record) -> None:
        if line := _line(record):
            print(f"{time.monotonic() - begun:6.0f} s  {line}", file=sys.stderr, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    try:
        raise SystemExit(cli.report(sys.modules[__name__], trial(config, told), None, config))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
