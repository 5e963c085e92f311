"""Exercises of notebook 11: compute speedups with the right baseline, and find what is wrong with six reports."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import Any

import pandas as pd

from labs.kit.check import Mistake
from labs.kit.errors import brief
from labs.kit.exercise import Exercise, KnownMistake

Answer = Callable[..., Any]

# -- 11.1


def speedups(table: pd.DataFrame, scaling: str) -> list[float | None]:
    """Return each row's samples/s over its baseline's; None without a baseline.

    That is one GPU with the same model, precision and batch: per GPU if `scaling` is "weak", of all GPUs if "strong".
    """
    batch = table["batch_per_gpu"] * (table["gpus"] if scaling == "strong" else 1)
    rows = table.assign(batch=batch, rate=table["gpus"] * table["batch_per_gpu"] / table["step_ms"])
    keys = ["model", "precision", "batch"]
    baseline = rows[rows["gpus"] == 1].set_index(keys)["rate"].to_dict()
    found = [baseline.get(key) for key in rows[keys].itertuples(index=False, name=None)]
    return [rate / base if base else None for rate, base in zip(rows["rate"], found, strict=True)]


def _batch(table: pd.DataFrame, scaling: str) -> pd.Series:
    return table["batch_per_gpu"] * (table["gpus"] if scaling == "strong" else 1)


def _steps(table: pd.DataFrame, scaling: str) -> list[float | None]:
    """Divide times of steps, not rates."""
    samples = table["gpus"] * table["batch_per_gpu"] / _batch(table, scaling)  # over the baseline's samples
    return [s and s / n for s, n in zip(speedups(table, scaling), samples, strict=True)]


def _always_weak(table: pd.DataFrame, scaling: str) -> list[float | None]:
    return speedups(table, "weak")


def _any_precision(table: pd.DataFrame, scaling: str) -> list[float | None]:
    """Use the slowest precision's row as the baseline of all precisions."""
    by_rate = table.assign(rate=table["batch_per_gpu"] / table["step_ms"]).sort_values("rate")
    one = by_rate[by_rate["gpus"] == 1].assign(batch=lambda t: t["batch_per_gpu"])
    slowest = one.drop_duplicates(["model", "batch"]).set_index(["model", "batch"])["rate"].to_dict()
    return [
        (row.gpus * row.batch_per_gpu / row.step_ms / base) if (base := slowest.get((row.model, batch))) else None
        for row, batch in zip(table.itertuples(), _batch(table, scaling), strict=True)
    ]


def _any_batch(table: pd.DataFrame, scaling: str) -> list[float | None]:
    """Use the first row of one GPU with the model and precision, whatever its batch."""
    found = []
    for row in table.itertuples():
        same = table[(table.gpus == 1) & (table.model == row.model) & (table.precision == row.precision)]
        base = same.iloc[0].batch_per_gpu / same.iloc[0].step_ms if len(same) else None
        found.append(row.gpus * row.batch_per_gpu / row.step_ms / base if base else None)
    return found


TABLE = pd.DataFrame(
    [  # made up
        ("ResNet", 8, 64, "BF16", 64.0),
        ("ResNet", 8, 32, "FP32", 88.0),
        ("ResNet", 1, 32, "FP32", 80.0),
        ("ResNet", 1, 256, "FP32", 600.0),
        ("ResNet", 1, 64, "FP32", 150.0),
        ("ResNet", 1, 64, "BF16", 58.0),
        ("ResNet", 8, 8, "BF16", 14.0),
        ("VGG", 1, 64, "BF16", 120.0),
        ("VGG", 4, 16, "BF16", 75.0),
        ("VGG", 4, 64, "BF16", 160.0),
        ("VGG", 4, 64, "FP32", 300.0),
    ],
    columns=["model", "gpus", "batch_per_gpu", "precision", "step_ms"],
)


def observe_speedups(answer: Answer) -> dict[str, Any]:
    """Return the speedup of every row for both kinds of scaling."""
    seen: dict[str, Any] = {}
    for scaling in ("weak", "strong"):
        found = answer(TABLE.copy(), scaling)
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__len__") or len(found) != len(TABLE):
            raise Mistake(f"you return {brief(found)}, not one speedup per row", "return a list, in the table's order")
        for row, value in zip(TABLE.itertuples(index=False), list(found), strict=True):
            none = value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value))
            where = f"{scaling}: {row.model}, {row.gpus} GPUs, {row.batch_per_gpu} per GPU, {row.precision}"
            seen[where] = "no baseline" if none else float(value)
    return seen


# -- 11.2

WAYS = (
    "one pair", "blocked", "best of many", "early clock", "cold start", "busy", "debug baseline", "weak as strong",
    "two units", "samples rate", "one clock", "other size", "sound",
)  # fmt: skip
ROUNDS = 10
SETUP = """A: main. B: the same commit with {change}, nothing else. Both run on the same 4 GPUs.
{batch}
{clock}
{order}"""
BATCH = "Global batch 256 for both. A row holds the time of one step with its 256 samples."
CLOCK = "We synchronise before both clock readings, and take the slowest rank's median of steps 11 to 60."
ORDER = "10 rounds of A and B: first A, B, then B, A, and so on."
LOSS = "After 2,000 steps, the losses of A and B differ by less than those of two seeds."


@dataclass(frozen=True)
class Report:
    """An engineer's report, made up: its text, and its rows of numbers, round by round."""

    text: str
    rows: dict[str, list[float]]
    end: str

    def __str__(self) -> str:
        wide = max(map(len, self.rows)) + 2
        lines = [f"{name:{wide}}" + "".join(f"{x:7.4g}" for x in row) for name, row in self.rows.items()]
        return "\n".join([self.text, *lines, LOSS, self.end])


@cache
def _made() -> dict[int, tuple[Report, str, float | None]]:
    """Return each report with its way and its honest speedup (None: its rows can't tell)."""
    draw = random.Random(11)

    def pair(level: float, gain: float, scatter: float = 0.03) -> tuple[list[float], list[float]]:
        """Return times of A and B: B is `gain` times as fast, and scatter is common to both."""
        common = [level * draw.uniform(1 - scatter, 1 + scatter) for _ in range(ROUNDS)]
        return tuple([round(c / g * draw.uniform(0.996, 1.004), 2) for c in common] for g in (1, gain))  # type: ignore[return-value]

    def text(change: str, batch: str = BATCH, clock: str = CLOCK, order: str = ORDER) -> str:
        return SETUP.format(change=change, batch=batch, clock=clock, order=order)

    def ratio(a: list[float], b: list[float]) -> float:
        return median(x / y for x, y in zip(a, b, strict=True))

    def end(what: str, found: float) -> str:
        return f"Median of A / B, round by round: {found:.2f}. So {what} is {found:.2f} times as fast."

    made = {}
    drift = [round(63 * 0.988**k * draw.uniform(0.997, 1.003), 1) for k in range(2 * ROUNDS)]
    a, b = drift[:ROUNDS], drift[ROUNDS:]
    blocked = text("pinned memory", order="We ran A ten times between 9:00 and 9:30, and then B ten times.")
    made[1] = (
        Report(blocked, {"A (ms)": a, "B (ms)": b}, end("training with pinned memory", ratio(a, b))),
        "blocked",
        None,
    )

    a, b = pair(50, 1.15)
    alone = [[round(x * draw.uniform(0.70, 0.75), 2) for x in row] for row in (a, b)]
    rows = {"A (ms)": a, "B (ms)": b, "A, rank 0 alone (ms)": alone[0], "B, rank 0 alone (ms)": alone[1]}
    buckets = text("buckets of 50 MB", batch=f'{BATCH} "Alone" leaves out the wait for other ranks.')
    made[2] = Report(buckets, rows, end("training with these buckets", ratio(a, b))), "sound", ratio(a, b)

    a, b = pair(98, 0.9)
    small = pair(98 / 2.2, 1)[0]
    rows = {"A (ms)": a, "B (ms)": b, "B, 64 per GPU (ms)": small}
    four = text(
        "four GPUs", batch="Our learning rate needs a global batch of 256. A: 256 on its GPU. B: 256 on each GPU."
    )
    four = four.replace("Both run on the same 4 GPUs.", "A runs on one of them.")
    said = end("our step", 4 * ratio(a, b)).replace("A / B", "4 x A / B")
    made[3] = Report(four, rows, said), "weak as strong", ratio(a, small)

    a, b = pair(48, 1.0, scatter=0.15)
    same = f"Median of A / B, round by round: {ratio(a, b):.2f}. We see no difference."
    made[4] = Report(text("channels_last"), {"A (ms)": a, "B (ms)": b}, same), "sound", ratio(a, b)

    a, b = pair(2.3, 1.9)
    loop_a, loop_b = pair(3.1, 1.05)
    rows = {"A (ms)": a, "B (ms)": b, "A, 60 steps (s)": loop_a, "B, 60 steps (s)": loop_b}
    early = "We read time.perf_counter() before and after each step, and take the slowest rank's median of steps 11 to "
    early += '60. "60 steps" is one clock around the loop, with torch.cuda.synchronize() at both ends.'
    fused = text("a fused optimizer", clock=early)
    made[5] = Report(fused, rows, end("a step with it", ratio(a, b))), "early clock", ratio(loop_a, loop_b)

    a, b = pair(8, 1.5)
    a1 = [round(x * draw.uniform(0.96, 1.0), 2) for x in a]
    b1 = [round(x * draw.uniform(1.08, 1.1), 2) for x in a]
    rows = {"A, rank 0 (s)": a, "B, rank 0 (s)": b, "A, rank 1 (s)": a1, "B, rank 1 (s)": b1}
    split = text("another split of the files", batch="The same files for both. A row holds the time of one validation.")
    clock = "We synchronise before both clock readings. Training resumes when both ranks are done."
    split = split.replace("4 GPUs", "2 GPUs").replace(CLOCK, clock)
    slowest = [list(map(max, *pairs)) for pairs in ((a, a1), (b, b1))]
    made[6] = Report(split, rows, end("validation", ratio(a, b))), "one clock", ratio(*slowest)
    return made


def reports() -> dict[int, Report]:
    """Return the six reports by number."""
    return {n: report for n, (report, _, _) in _made().items()}


def which_way(reports: Mapping[int, Report]) -> dict[int, tuple[str, float | None]]:
    """Return each report's way and its honest speedup."""

    def speedup(n: int, a: str, b: str) -> float:
        return median(x / y for x, y in zip(reports[n].rows[a], reports[n].rows[b], strict=True))

    validation = reports[6].rows  # the slower rank decides
    a = map(max, validation["A, rank 0 (s)"], validation["A, rank 1 (s)"])
    b = map(max, validation["B, rank 0 (s)"], validation["B, rank 1 (s)"])
    return {
        1: ("blocked", None),  # the machine got faster all the time
        2: ("sound", speedup(2, "A (ms)", "B (ms)")),
        3: ("weak as strong", speedup(3, "A (ms)", "B, 64 per GPU (ms)")),
        4: ("sound", speedup(4, "A (ms)", "B (ms)")),
        5: ("early clock", speedup(5, "A, 60 steps (s)", "B, 60 steps (s)")),
        6: ("one clock", median(x / y for x, y in zip(a, b, strict=True))),
    }


def observe_which_way(answer: Answer) -> dict[str, Any]:
    """Return for each report whether the way and the speedup are right, or what was answered instead."""
    found, seen = answer(reports()), {}
    for n, (_, way, honest) in _made().items():
        try:
            said, value = found[n]
        except (KeyError, TypeError, ValueError, IndexError):
            raise Mistake(
                f"your answer has no (way, speedup) for report {n}",
                "return {1: ('sound', 1.23), 2: ('busy', None), ...}",
            ) from None
        if said not in WAYS:
            raise Mistake(f"report {n}: {said!r:.60} is not one of the names", f"they are {', '.join(WAYS)}")
        seen[f"report {n}: the way"] = "right" if said == way else said
        near = value is None if honest is None else value is not None and math.isclose(value, honest, rel_tol=0.01)
        seen[f"report {n}: the speedup"] = "right" if near else "None" if value is None else f"{value:.2f}"
    return seen


def _claimed(reports: Mapping[int, Report]) -> dict[int, float]:
    """Return the speedup that each report claims."""
    found = {n: list(r.rows.values())[:2] for n, r in reports.items()}
    return {n: (4 if n == 3 else 1) * median(x / y for x, y in zip(*rows, strict=True)) for n, rows in found.items()}


def _believes_all(reports: Mapping[int, Report]) -> dict[int, tuple[str, float | None]]:
    return {n: ("sound", value) for n, value in _claimed(reports).items()}


def _claimed_numbers(reports: Mapping[int, Report]) -> dict[int, tuple[str, float | None]]:
    claimed = _claimed(reports)
    return {n: (way, claimed[n]) for n, (way, _) in which_way(reports).items()}


def _claimed_if_any(reports: Mapping[int, Report]) -> dict[int, tuple[str, float | None]]:
    claimed = _claimed(reports)
    return {n: (way, x if x is None else claimed[n]) for n, (way, x) in which_way(reports).items()}


def _upside_down(reports: Mapping[int, Report]) -> dict[int, tuple[str, float | None]]:
    return {n: (way, x if x is None else 1 / x) for n, (way, x) in which_way(reports).items()}


EXERCISES = {
    "11.1": Exercise(
        "11.1",
        20,
        "compute speedups with the right baseline",
        observe_speedups,
        speedups,
        (
            KnownMistake(
                "This is a ratio of step times, but the steps process different numbers of samples.",
                "Compare samples per second: `gpus * batch_per_gpu / step_ms`.",
                _steps,
            ),
            KnownMistake(
                "The baseline has another precision.",
                "FP32 on one GPU makes every BF16 speedup look better.",
                _any_precision,
            ),
            KnownMistake(
                "The baseline has another batch.",
                "Weak scaling keeps the batch per GPU, strong scaling the batch of all GPUs.",
                _any_batch,
            ),
            KnownMistake(
                "For strong scaling, the baseline has the batch that all GPUs share.",
                "Its batch is `gpus * batch_per_gpu` of the row.",
                _always_weak,
            ),
        ),
    ),
    "11.2": Exercise(
        "11.2",
        25,
        "find what is wrong with six reports",
        observe_which_way,
        which_way,
        (
            KnownMistake(
                "You believe the last line of this report.",
                "Read the other lines: clock, order, batch and rows. Which of them doesn't fit the last line?",
                _believes_all,
            ),
            KnownMistake(
                "The way is right, but no row of this report tells how fast B is.",
                "The machine changed all the time. What would A have taken in the second half hour?",
                _claimed_numbers,
            ),
            KnownMistake(
                "The way is right, but this is the speedup that the report claims.",
                "Other rows of the report hold what it should have compared.",
                _claimed_if_any,
            ),
            KnownMistake(
                "The ratio is upside down.",
                "Above 1 means that B is faster: divide A's time by B's.",
                _upside_down,
            ),
        ),
    ),
}
