"""What is wrong with this training? Buy measurements, name the cause, and see what its cure gives.

    python -m labs.clinic --seed 7                                       # at a terminal: asks what to measure next
    python -m labs.clinic --seed 7 --measure shares arrivals
    python -m labs.clinic --seed 7 --measure shares same_batch --diagnose slow_loader --gain 1.5

About 5 s on 2 CPU cores. A patient is a small real training on two ranks. Its seed decides which one of its lines was
changed, or none: nobody is told. Each measurement costs the seconds that it takes. After the diagnosis the named line
is put back and both trainings run in turn. The score is the diagnosis less the price.
"""

from __future__ import annotations

import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

from labs.clinic import illnesses, measurements
from labs.clinic.illnesses import BY_NAME, ILLNESSES, WELL, Illness
from labs.clinic.measurements import MEASUREMENTS, Findings
from labs.clinic.patients import Patient
from labs.kit import cli, measure, room
from labs.kit.errors import BadInput, did_you_mean, require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Measure = Literal[
    "steps", "shares", "ops", "memory", "arrivals", "cores", "disk", "census", "traffic", "same_batch", "batch", "alone"
]
CAUSE, GAIN, PER_SECOND = 60, 40, 2  # points for the cause, for the gain at best; points that a second costs
ADMISSION_STEPS, LEAST_STEPS = 8, 6
STEPS_S = 1.0  # that the steps of a measurement may take in all, before there are fewer of them
ROOM_SEEDS = (10, 16, 5, 9, 17, 6, 12, 3)
"""For an instructor: the same patients for all; what counts and settings tell first, what only times tell last."""


@dataclass(frozen=True)
class Config:
    """Which patient, what is measured, what it is said to have."""

    seed: int = 1
    """The patient. As many seeds in a row as there are kinds of patients hold each kind once."""
    measure: tuple[Measure, ...] = ()
    """Measurements to buy, in this order."""
    diagnose: str = ""
    """The cause: a name, words for it, or "healthy". Its cure is then applied and measured."""
    gain: float | None = None
    """How many times as fast you expect the cure to make it; for a healthy patient 1."""
    steps: int = 12
    """Steps that a measurement takes."""
    seconds: float = 2.5
    """Time for a cure and the illness in turn, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Rounds in turn; by default as many as fit into `seconds`, at least 6."""
    smoke: bool = False
    """Four steps for each measurement, two rounds."""

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**32, f"seed must be from 0 to 4294967295, not {self.seed}")
        require(4 <= self.steps <= 1000, f"steps must be from 4 to 1000, not {self.steps}")
        measure.require_budget(self.seconds, self.rounds)
        require(self.gain is None or 0.1 <= self.gain <= 1000, f"gain must be from 0.1 to 1000 times, not {self.gain}")
        require(self.gain is None or bool(self.diagnose), "gain is what you expect of a cure: say of which, diagnose")
        require(
            not self.diagnose or illnesses.recognised(self.diagnose) is not None,
            f"diagnose {self.diagnose!r:.60} is no cause that is known here, or more than one: "
            f"{did_you_mean(self.diagnose, BY_NAME)}there are {', '.join(i.name for i in ILLNESSES)}, healthy",
        )

    def taken(self, step_s: float) -> int:
        """Steps of a measurement: fewer of long ones."""
        return 4 if self.smoke else min(self.steps, max(LEAST_STEPS, round(STEPS_S / step_s)))


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for one rank: nobody would be late, and nothing would be exchanged."""
    require(world_size >= 2, f"the clinic's patients train on 2 ranks or more, not on {world_size}: use nproc=2")


def predict(share: float) -> float:
    """Gain, as a ratio of speeds, if `share` of a step, below 1, goes away: 1 / (1 - share)."""
    return 1 / (1 - share)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Admit one patient, take what was bought, and try the cure."""
    illness = illnesses.draw(config.seed)
    with tempfile.TemporaryDirectory() as folder:
        admit = partial(Patient, illnesses.source(illness), rank, config.seed, Path(folder))
        seen = admission(admit, rank)
        yield from seen
        steps = config.taken(rank.slowest([seen[0].value])[0])
        for done, name in enumerate(config.measure, 1):
            found, price_s = bought(name, admit, steps, rank)
            yield rank.record("price_s", "s", price_s, measure=name)
            for what, value in found.items():
                yield rank.record("finding", "", value, measure=name, what=what)
            rank.progress(done, len(config.measure) + bool(config.diagnose), name)
        if config.diagnose:
            named = illnesses.recognised(config.diagnose)
            assert named is not None
            yield rank.record("right", "", float(is_right(illness, named)), said=config.diagnose, understood=named)
            yield from treatment(illness, named, config, rank, Path(folder))


def admission(admit: measurements.Admit, rank: Rank) -> list[Record]:
    """What everybody sees, for nothing: step times and losses of rank 0, and what `top` says of each rank."""
    with measurements.patients(admit()) as (p,):
        p.go(2)
        start, cpu = time.perf_counter(), time.process_time()
        p.go(ADMISSION_STEPS)
        busy = (time.process_time() - cpu) / (time.perf_counter() - start)
    return [
        rank.record("step_s", "s", rank.gather(p.steps[2:])[0]),
        rank.record("loss", "nats", rank.gather(p.losses)[0]),
        rank.record("busy", "cores", rank.gather(busy)),
        rank.record("batch", "samples", p.batch),
    ]


def bought(name: str, admit: measurements.Admit, steps: int, rank: Rank) -> tuple[Findings, float]:
    """What a measurement finds, and the seconds that it took."""
    rank.barrier()
    start = time.perf_counter()
    found = MEASUREMENTS[name](admit, rank, steps)
    [price_s] = rank.slowest([time.perf_counter() - start])
    return found, price_s


def is_right(illness: Illness, named: str) -> bool:
    """Whether this is what the patient has; every healthy one is "healthy"."""
    return named == (illness.name if illness in ILLNESSES else "healthy")


def treatment(illness: Illness, named: str, config: Config, rank: Rank, folder: Path) -> Iterator[Record]:
    """The patient and the same with the line put back that `named` would have changed, in turn.

    If it is another illness, that line is as it should be: there is nothing to put back, and nothing to measure. The
    suspicious line of a healthy patient is put back: it gives what it gives.
    """
    sick, well = illnesses.source(illness), illnesses.treated(illness, named)
    if named == "healthy" and illness in WELL:
        well = illnesses.healthy_source() if illness.name in ("items", "zeroed") else sick
    if well == sick and not is_right(illness, named):
        return
    make = partial(Patient, rank=rank, seed=config.seed, folder=folder)
    rounds = measure.rounds_of(config, rank.slowest)
    with measurements.patients(make(sick), make(well)) as (p, q):
        yield rank.record("gain", "x", measurements.in_turn(p, q, rank, rounds))


# What a learner reads


def symptoms(run: Records) -> str:
    """What is seen at admission, in a sentence."""
    steps, loss = run.one("step_s"), run.one("loss").samples
    busy = ", ".join(f"{100 * b:.0f} %" for b in run.one("busy").samples)
    return (
        f"Patient {steps.config['seed']}: {run.one('batch').value:.0f} images a step and rank, a step takes "
        f"{measure.estimate(steps.samples, 's')}. The loss went from {loss[0]:.2f} to {loss[-1]:.2f} in "
        f"{len(loss)} steps. top: {busy} (rank 0, 1, ...)."
    )


def reading(run: Records, name: str) -> str:
    """What a measurement found, in a line; without a word of what it means."""
    found = {r.case["what"]: r.value for r in run.where("finding", measure=name)}
    price = run.one("price_s", measure=name).value
    return f"{name} ({price:.1f} s): {'; '.join(f'{what} {_shown(what, value)}' for what, value in found.items())}."


def _shown(what: str, value: float) -> str:
    if what.startswith("share of") or what in (
        "data",
        "host-to-device",
        "forward",
        "backward",
        "optimizer",
        "exposed communication",
        "overhead",
    ):
        return f"{100 * value:.0f} %"
    if what.startswith("step_s"):
        return f"{1e3 * value:.1f} ms"
    if what.endswith("late"):
        return f"{100 * value:.0f} % of a step"
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.2f}"


@dataclass(frozen=True)
class Verdict:
    """What came of a diagnosis."""

    seed: int
    understood: str
    right: bool
    gain: Estimate | None
    """What the cure gave; None if there was nothing to put back."""
    predicted: float | None
    price_s: float
    bought: int

    @property
    def score(self) -> int:
        """Points for the cause and the gain, less those for the seconds; never below 0."""
        gain = GAIN * closeness(self.predicted, self.gain) if self.right else 0
        return max(0, round(CAUSE * self.right + gain - PER_SECOND * self.price_s))

    def __str__(self) -> str:
        """In plain words."""
        many = f"{self.bought} measurement{'s' if self.bought != 1 else ''}"
        said = [f"You bought {many}, {self.price_s:.1f} s; the cause is {'right' if self.right else 'wrong'}"]
        if not self.right and self.gain is None:
            said.append(f"the line of {self.understood} is as it should be: nothing to put back, nothing gained")
        if self.predicted is not None and self.gain is not None:
            said.append(f"you predicted {self.predicted:.2g}x, the cure gave {_times(self.gain)}")
        elif self.gain is not None:
            said.append(f"the cure gave {_times(self.gain)}; you predicted nothing")
        return f"{'; '.join(said)}. Score: {self.score} of {CAUSE + GAIN}."


def _times(gain: Estimate) -> str:
    return f"{gain.value:.2f}x [{gain.low:.2f}, {gain.high:.2f}]"


def closeness(predicted: float | None, gain: Estimate | None) -> float:
    """1 within the interval, 0 from a factor of two away from it; in between on a logarithmic scale."""
    if predicted is None or gain is None:
        return 0.0
    edge = min(max(predicted, gain.low), gain.high)
    return max(0.0, 1 - abs(math.log2(predicted / edge)))


def verdict(run: Records, price_s: float | None = None, bought: int | None = None) -> Verdict:
    """Of a run with a diagnosis; price and number of all measurements if they were bought in other runs."""
    right, gains, prices = run.one("right"), run.where("gain"), [r.value for r in run.where("price_s")]
    gain = measure.estimate(gains[0].samples, "x") if gains else None
    return Verdict(
        right.config["seed"],
        right.case["understood"],
        bool(right.value),
        gain,
        right.config["gain"],
        sum(prices) if price_s is None else price_s,
        len(prices) if bought is None else bought,
    )


def chart(seed: int) -> list[str]:
    """What the patient has, once it may be told: the cause, the line, the cure, the notebook."""
    illness = illnesses.draw(seed)
    if illness in WELL:
        return [f"It is healthy; wrong with it: {illness.cause}."]
    key = f"{illness.key} shows it ({illness.sign}); {', '.join(illness.blind)} do not"
    return [
        f"It was {illness.name}: {illness.cause}. {key}. Notebook {illness.teaches} is about such costs. The cure, "
        f"in line {illnesses.line(illness)} of `train`:",
        *illnesses.cure(illness).splitlines(),
    ]


@dataclass
class Case:
    """A patient in a notebook: measurements are bought one by one, then comes the diagnosis."""

    seed: int
    smoke: bool = False
    records: Records = field(default_factory=Records)
    price_s: float = 0.0
    bought: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.records = self._run()
        print(symptoms(self.records))

    def _run(self, **parameters: object) -> Records:
        from labs.kit.launch import launch

        given = {"smoke": True} if self.smoke else {}
        return launch("clinic", nproc=2, device="cpu", seed=self.seed, **given, **parameters)

    def measure(self, *names: str) -> None:
        """Buy measurements: what they find is printed with its price. BadInput names those there are."""
        require(bool(names), f"measure() needs a name: {', '.join(MEASUREMENTS)}")
        run = self._run(measure=tuple(names))
        self.price_s += sum(r.value for r in run.where("price_s"))
        self.bought += names
        self.records += run
        for name in dict.fromkeys(names):
            print(reading(run, name))
        print(f"Spent so far: {self.price_s:.1f} s.")

    def diagnose(self, cause: str, gain: float | None = None) -> Verdict:
        """Say what it is, and how many times as fast its cure makes it: the cure is applied and measured."""
        given = None if gain is None or gain != gain else float(gain)  # NaN: nothing was predicted
        run = self._run(diagnose=cause, gain=given)
        self.records += run
        found = verdict(run, self.price_s, len(self.bought))
        print(found)
        if found.right:
            print("\n".join(chart(self.seed)))
        keep(found)
        return found

    def reveal(self) -> None:
        """Give up: what the patient has."""
        print("\n".join(chart(self.seed)))


def admit(seed: int, smoke: bool = False) -> Case:
    """The patient of this seed. What it has is not told."""
    return Case(seed, smoke)


def keep(found: Verdict) -> None:
    """Keep the score and the prediction in the room, if there is one."""
    if found.gain is not None and found.predicted is not None:
        room.keep_prediction(
            f"gain of the cure of patient {found.seed}",
            "x",
            found.predicted,
            found.gain.value,
            found.gain.low,
            found.gain.high,
        )
    room.keep_outcome(
        f"clinic {found.seed}",
        "passed" if found.right else "not yet",
        f"score {found.score}: {found.understood} after {found.bought} measurements",
    )


def answer(run: Records) -> Iterator[str]:
    """Symptoms, readings and the verdict."""
    yield symptoms(run)
    for record in run.where("price_s"):
        yield reading(run, record.case["measure"])
    if run.where("right"):
        found = verdict(run)
        keep(found)
        yield str(found)
        if found.right:
            yield from chart(found.seed)


# At a terminal


def interactive(seed: int) -> None:
    """Ask what to measure next, until there is a diagnosis."""
    case = admit(seed)
    print(f"Measurements: {', '.join(MEASUREMENTS)}.\nType some of them, or: diagnose CAUSE GAIN, or: give up")
    while True:
        print("> ", end="", flush=True)
        line = sys.stdin.readline()
        words = line.split()
        if not line or words in (["quit"], ["q"]):
            return
        try:
            if words == ["give", "up"]:
                case.reveal()
                return
            if words[:1] == ["diagnose"]:
                *cause, last = words[1:] or [""]
                gain = _number(last)
                if case.diagnose(" ".join(cause if gain is not None else [*cause, last]), gain).right:
                    return
            elif words:
                case.measure(*words)
        except BadInput as e:
            print(e)


def _number(word: str) -> float | None:
    try:
        return float(word.rstrip("x"))
    except ValueError:
        return None


def main() -> None:
    """As every lab; at a terminal, with nothing asked, a conversation."""
    alone = "RANK" not in os.environ and sys.stdin is not None and sys.stdin.isatty()
    asked = ("--measure", "--diagnose", "--out", "--table", "--smoke", "--help", "-h")
    if alone and not any(word.split("=")[0] in asked for word in sys.argv[1:]):
        command = cli.parse(sys.modules[__name__], "python -m labs.clinic")
        interactive(command.config.seed)
        return
    cli.main()
