"""Benchmark reports for exercise 11.2, made up by lot: in each set four fool their reader, and two are sound."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

WAYS = {
    "early_clock": "the clock stops before the work is done",
    "cold_start": "the first steps count",
    "best_of_many": "the best of one against the median of the other",
    "blocked": "one after the other, while the machine changes",
    "single_pair": "a single pair decides",
    "debug_baseline": "a baseline that nobody would run",
    "weak_as_strong": "more work on more GPUs, told as the same work on more GPUs",
    "two_units": "a unit that is not the same for both, such as tokens with padding, or epochs of few batches",
    "samples_rate": "samples per second, whatever is learnt from a sample",
    "busy_as_useful": "busy, told as useful",
    "one_clock": "the clock of one rank, while all wait for the slowest",
    "other_size": "measured at a size at which nobody uses it",
    "sound": "the report is sound",
}
ROUNDS = 10
Log = dict[str, list[float]]


@dataclass(frozen=True)
class Report:
    """What an engineer's message says, and the numbers in it."""

    lines: tuple[str, ...]
    log: Log
    """{name of a row in the report: its numbers, round by round}"""

    def __str__(self) -> str:
        return "\n".join(f"{n:2}  {line}" for n, line in enumerate(self.lines, start=1))


@dataclass(frozen=True)
class Made:
    """A report with what is wrong with it."""

    report: Report
    way: str
    honest: float | None
    """How many times as fast B is as A, as far as the report's numbers can tell; None if they cannot."""
    claimed: float
    against: dict[str, int]
    """{way: number of the line that speaks against it, in this report}; for "sound" the line that shows the fault"""
    rows: tuple[int, ...]
    """Numbers of the lines that `honest` comes from."""


@dataclass
class Draft:
    """The parts of a message. Where one is "" a sound one is drawn from SOUND_PARTS or CLOCKS."""

    draw: random.Random
    change: str
    claimed: float
    log: Log
    honest: float | None
    """None: the log cannot tell."""
    used: tuple[str, ...] = ()
    """Rows that `honest` comes from."""
    way: str = "sound"
    shows: str = ""
    """The part that shows what is wrong; by default the last row."""
    instead: dict[str, str] = field(default_factory=dict)
    """{way: the part that speaks against it}, where it is another one than in PARTS."""
    subject: str = "{change}: {claimed:.2f} times as fast"
    size: str = ""
    baseline: str = ""
    batch: str = ""
    timed: str = ""
    call: str = "train_step(next(batches))"
    steady: str = "took = statistics.median(seconds[10:])  # without the first ten"
    slowest: str = ""
    unit: str = ""
    order: str = ""
    learnt: str = ""
    end: str = ""

    def made(self) -> Made:
        """The message, its parts in order, and which line says what."""
        n = max(map(len, self.log.values()))
        loss = self.draw.uniform(1.2, 1.4)
        said = {part: getattr(self, part) or self.draw.choice(ways) for part, ways in SOUND_PARTS.items()}
        before, after = self.timed.split("|") if self.timed else self.draw.choice(CLOCKS)
        words = {
            "change": self.change,
            "claimed": self.claimed,
            "mb": self.draw.choice((48, 64, 96)),
            "n": n,
            "loss": loss,
            "other": loss + self.draw.uniform(-0.002, 0.002),
        }
        parts = [
            ("subject", f"Subject: {self.subject}"),
            *((part, said[part]) for part in ("size", "baseline", "batch")),
            ("code", "    for step in range(60):"),
            ("wait", f"        {before}"),
            ("code", f"        {self.call}"),
            ("wait", f"        {after}"),
            ("steady", f"    {self.steady}"),
            ("slowest", f"    {said['slowest']}"),
            ("unit", said["unit"]),
            ("order", said["order"]),
            ("rounds", f"{'round':26}" + "".join(f"{k:7}" for k in range(1, n + 1))),
            *((name, f"{name:26}" + "".join(f"{x:7}" for x in row)) for name, row in self.log.items()),
            ("learnt", said["learnt"]),
            ("end", said["end"]),
        ]
        lines = tuple(text.format(**words) for _, text in parts)
        place = {name: k for k, (name, _) in enumerate(parts, start=1)}
        against = {way: place[part] for way, part in (PARTS | self.instead).items() if way != self.way}
        against["sound"] = place[self.shows or [*self.log][-1]]
        rows = tuple(place[name] for name in self.used or [*self.log][:2])
        return Made(Report(lines, self.log), self.way, self.honest, self.claimed, against, rows)


CLOCKS = (
    (
        "torch.cuda.synchronize(); start = time.perf_counter()",
        "torch.cuda.synchronize(); seconds.append(time.perf_counter() - start)",
    ),
    ("start.record()  # CUDA events", "end.record(); end.synchronize(); seconds.append(start.elapsed_time(end) / 1e3)"),
)
SOUND_PARTS = {
    "size": (
        "What we train: {mb} MB of gradients, in one process per GPU. Measured with just that.",
        "Measured with the model that we ship, {mb} MB of gradients, and its data.",
        "No toy: our model of this spring ({mb} MB of gradients), its data, its settings.",
    ),
    "baseline": (
        "A: main, as it runs every night. B: the same commit with {change}, nothing else.",
        "A is what all of us use today. B is A with {change}, and differs in no other option.",
        "A: main. B: main with {change}; the diff is one line. Nobody runs anything else than main.",
    ),
    "batch": (
        "Global batch 256 on 4 GPUs, for A and for B.",
        "4 GPUs and a global batch of 256 on both sides.",
        "Both on the same 4 GPUs, both with 64 samples on each.",
    ),
    "slowest": (
        "dist.all_reduce(took := torch.tensor(took), op=dist.ReduceOp.MAX)  # of all ranks",
        "took = slowest(took)  # all_reduce with op=dist.ReduceOp.MAX",
    ),
    "unit": (
        "The times below are of a step of 256 samples, from batch to batch.",
        "Milliseconds below are of one step with its 256 samples, the wait for them included.",
        "One step is 256 samples in A as in B; the times below are those of one step.",
    ),
    "order": (
        "A and B took turns, A B, B A, ..., in {n} rounds within half an hour.",
        "{n} rounds, each with one run of A and one of B, and the other one first in the next round.",
        "Between 9:10 and 9:50, A and B by turns, {n} times each, first A B, then B A, and so on.",
    ),
    "learnt": (
        "Loss after 2,000 steps, A and B: {loss:.3f} and {other:.3f}, five seeds each.",
        "They learn alike: after 2,000 steps the loss of A is {loss:.3f}, of B {other:.3f} (five seeds).",
        "Training loss after 2,000 steps, mean of five seeds: A {loss:.3f}, B {other:.3f}.",
    ),
    "end": (
        "Median of A / B, round by round: {claimed:.2f}.",
        "A / B in each round, and its median: {claimed:.2f}.",
        "{claimed:.2f} is the median of the rounds' own ratios, A / B.",
    ),
}
"""How a part reads where it holds no fault: several ways, or the odd line would stand out."""
PARTS = {
    "early_clock": "wait",
    "cold_start": "steady",
    "best_of_many": "end",
    "blocked": "order",
    "single_pair": "rounds",
    "debug_baseline": "baseline",
    "weak_as_strong": "batch",
    "two_units": "unit",
    "samples_rate": "learnt",
    "busy_as_useful": "unit",
    "one_clock": "slowest",
    "other_size": "size",
}
"""Which part of a message speaks for or against a way."""


def _turns(draw: random.Random, level: float, gain: float, scatter: float = 0.03, digits: int = 1) -> tuple[list, list]:
    """Times of A and B in ROUNDS rounds: B is `gain` times as fast, and what scatters meets both alike."""
    places = draw.sample(range(ROUNDS), ROUNDS)  # evenly spread, so that the best is always as far from the median
    common = [level * (1 + scatter * (2 * k / (ROUNDS - 1) - 1)) for k in places]
    a = [round(c * draw.uniform(0.996, 1.004), digits) for c in common]
    b = [round(c / gain * draw.uniform(0.996, 1.004), digits) for c in common]
    return a, b


def _ratio(a: Sequence[float], b: Sequence[float]) -> float:
    """Median of a / b, pair by pair."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def _rows(a: Sequence[float], b: Sequence[float], unit: str, what: str = "") -> Log:
    return {f"{way}{what} ({unit})": list(x) for way, x in (("A", a), ("B", b))}


def _early_clock(draw: random.Random, change: str) -> Draft:
    told = _turns(draw, draw.uniform(2.0, 2.6), draw.uniform(1.6, 2.2), digits=2)
    loop = _turns(draw, draw.uniform(2.6, 3.4), draw.uniform(1.02, 1.08), digits=3)
    log = _rows(*told, "ms") | _rows(*loop, "s", ", all 60 steps")
    return Draft(
        draw,
        change,
        _ratio(*told),
        log,
        _ratio(*loop),
        tuple(log)[2:],
        "early_clock",
        timed="start = time.perf_counter()|seconds.append(time.perf_counter() - start)",
        learnt='"All 60 steps": one clock around the loop and a torch.cuda.synchronize() behind it. Loss '
        "after 2,000 steps: {loss:.3f} and {other:.3f}.",
    )


def _cold_start(draw: random.Random, change: str) -> Draft:
    steady = _turns(draw, draw.uniform(40, 50), draw.uniform(0.84, 0.92))
    first = [round(draw.uniform(2400, 2600), 0) for _ in range(ROUNDS)]
    mean_a = [round((59 * a + f) / 60, 1) for a, f in zip(steady[0], first, strict=True)]
    mean_b = [round(b * draw.uniform(1.01, 1.012), 1) for b in steady[1]]
    log = _rows(mean_a, mean_b, "ms") | _rows(*steady, "ms", ", median step")
    return Draft(
        draw,
        "no torch.compile",
        _ratio(mean_a, mean_b),
        log,
        _ratio(*steady),
        tuple(log)[2:],
        "cold_start",
        subject="without torch.compile: {claimed:.2f} times as fast",
        baseline="A: main, as it runs every night, with torch.compile. B: the same commit without it.",
        steady="took = statistics.fmean(seconds)",
    )


def _best_of_many(draw: random.Random, change: str) -> Draft:
    a, b = _turns(draw, draw.uniform(45, 60), draw.uniform(1.0, 1.03), scatter=0.14)
    end = f"A takes {statistics.median(a):.1f} ms, the median. B gets down to {min(b):.1f} ms: {{claimed:.2f}}."
    return Draft(
        draw,
        change,
        statistics.median(a) / min(b),
        _rows(a, b, "ms"),
        _ratio(a, b),
        (),
        "best_of_many",
        shows="B (ms)",
        end=end,
    )


def _blocked(draw: random.Random, change: str) -> Draft:
    level, fall = draw.uniform(60, 70), draw.uniform(0.010, 0.013)
    a, b = (
        [round(level * (1 - fall * k) * draw.uniform(0.997, 1.003), 1) for k in range(start, start + ROUNDS)]
        for start in (0, ROUNDS)
    )
    return Draft(
        draw,
        change,
        _ratio(a, b),
        _rows(a, b, "ms"),
        None,
        (),
        "blocked",
        shows="A (ms)",
        order="All rounds of A ran in the first half hour, all of B in the one after it.",
    )


def _single_pair(draw: random.Random, change: str) -> Draft:
    level = draw.uniform(55, 65)
    a, b = round(level * 1.03, 1), round(level * 0.95, 1)
    earlier = [round(level * draw.uniform(0.93, 1.07), 1) for _ in range(3)]
    log = {"A (min)": [a], "B (min)": [b], "A, last week (min)": [*earlier, round(level * 1.07, 1)]}
    return Draft(
        draw,
        change,
        a / b,
        log,
        None,
        (),
        "single_pair",
        shows="A, last week (min)",
        instead={"blocked": "A, last week (min)"},
        order="A ran once today, and B right after it, on the same node.",
        call="train_epoch()",
        steady="took = sum(seconds[10:])  # without the first ten",
        unit="The times below are of epochs 11 to 60 together, of the same data.",
        end="A / B: {claimed:.2f}.",
    )


def _debug_baseline(draw: random.Random, change: str) -> Draft:
    main, b = _turns(draw, draw.uniform(45, 55), draw.uniform(1.01, 1.06))
    a = [round(x * draw.uniform(1.52, 1.54), 1) for x in main]
    log = {**_rows(a, b, "ms"), "main (ms)": main}
    return Draft(
        draw,
        change,
        _ratio(a, b),
        log,
        _ratio(main, b),
        ("B (ms)", "main (ms)"),
        "debug_baseline",
        baseline="A: last month's branch, with set_detect_anomaly(True), loss.item() at each step. B: main "
        "with {change}. Main took turns, too.",
    )


def _weak_as_strong(draw: random.Random, change: str) -> Draft:
    a, b = _turns(draw, draw.uniform(95, 110), draw.uniform(0.86, 0.92))
    quarter = [round(x / draw.uniform(2.19, 2.21), 1) for x in a]
    log = {**_rows(a, b, "ms"), "B, 64 per GPU (ms)": quarter}
    return Draft(
        draw,
        "four GPUs",
        4 * _ratio(a, b),
        log,
        _ratio(a, quarter),
        ("A (ms)", "B, 64 per GPU (ms)"),
        "weak_as_strong",
        subject="our step of 256 samples, on four GPUs: {claimed:.2f} times as fast",
        baseline="A: main on one GPU. B: the same commit on four.",
        batch="The global batch has to stay 256, or we would search the learning rate anew. A: 256 on "
        "its GPU. B: 256 on each.",
        learnt="Loss after 512,000 samples: {loss:.3f} and {other:.3f}.",
        unit="The times below are of one optimizer step, from batch to batch.",
        end="Median of 4 x A / B, round by round, since there are four: {claimed:.2f}.",
    )


def _two_units(draw: random.Random, change: str) -> Draft:
    gain, steps = draw.uniform(0.92, 0.96), draw.choice((500, 550, 600))
    a, whole = _turns(draw, draw.uniform(48, 60), gain)
    b = [round(x * steps * 64 / 60_000, 1) for x in whole]
    honest = _ratio([x / 60_000 for x in a], [y / (steps * 64) for y in b])
    return Draft(
        draw,
        "the streaming loader",
        _ratio(a, b),
        _rows(a, b, "s"),
        honest,
        (),
        "two_units",
        shows="unit",
        batch="Global batch 64 on 4 GPUs, for A and for B.",
        unit="The times below are of an epoch: A goes through all 60,000 images, B, which streams, takes "
        f"{steps} batches.",
    )


def _samples_rate(draw: random.Random, change: str) -> Draft:
    rate_b, rate_a = _turns(draw, draw.uniform(9, 11), draw.uniform(1.7, 1.9), digits=2)
    need_a, need_b = _turns(draw, draw.uniform(2.2, 2.6), draw.uniform(0.4, 0.44), digits=2)
    log = _rows(rate_a, rate_b, "1,000/s") | _rows(need_a, need_b, "million", ", to 90 %")
    times = ([n / r for n, r in zip(need, rate, strict=True)] for need, rate in ((need_a, rate_a), (need_b, rate_b)))
    return Draft(
        draw,
        "batch 2,048",
        _ratio(rate_b, rate_a),
        log,
        _ratio(*times),
        tuple(log),
        "samples_rate",
        subject="batch 2,048 instead of 256: our training {claimed:.2f} times as fast",
        batch="4 GPUs for A and for B; the global batch is ours to choose.",
        unit="The first two rows are samples per second of the whole job, counted over 60 steps.",
        learnt='"To 90 %": samples until the validation accuracy is 90 %, each round another seed.',
        end="Median of B / A of the samples per second, round by round: {claimed:.2f}.",
    )


def _busy_as_useful(draw: random.Random, change: str) -> Draft:
    busy_b, busy_a = _turns(draw, draw.uniform(93, 95), draw.uniform(1.3, 1.45), scatter=0.02, digits=0)
    ms = _turns(draw, draw.uniform(45, 55), draw.uniform(0.92, 0.96))
    log = _rows(busy_a, busy_b, "%") | _rows(*ms, "ms", ", a step")
    return Draft(
        draw,
        change,
        _ratio(busy_b, busy_a),
        log,
        _ratio(*ms),
        tuple(log)[2:],
        "busy_as_useful",
        subject="{change}: the GPUs do {claimed:.2f} times as much",
        unit="The first two rows are utilisation as nvidia-smi shows it, of all GPUs; then steps of 256.",
        end="Median of B / A of the utilisation, round by round: {claimed:.2f}.",
    )


def _one_clock(draw: random.Random, change: str) -> Draft:
    a, b = _turns(draw, draw.uniform(7, 9), draw.uniform(1.4, 1.6), digits=2)
    a1 = [round(x * draw.uniform(0.96, 1.0), 2) for x in a]
    b1 = [round(x * draw.uniform(1.08, 1.1), 2) for x in a]
    log = _rows(a, b, "s", ", rank 0") | _rows(a1, b1, "s", ", rank 1")
    slowest = [[max(pair) for pair in zip(*rows, strict=True)] for rows in ((a, a1), (b, b1))]
    return Draft(
        draw,
        "the new split",
        _ratio(a, b),
        log,
        _ratio(*slowest),
        tuple(log),
        "one_clock",
        subject="validation with the new split of its files: {claimed:.2f} times as fast",
        batch="2 GPUs and the same files for A and for B. Each rank takes its part; all go on with the last.",
        slowest="if rank == 0: print(took)  # the rows of rank 1 are from its own log",
        call="validate(my_files)",
        unit="The times below are of one validation.",
        learnt="Loss on all files, A and B: {loss:.3f} and {loss:.3f}.",
        end="Median of A / B of rank 0, round by round: {claimed:.2f}.",
    )


def _other_size(draw: random.Random, change: str) -> Draft:
    """LL sends a flag of 4 bytes with every 4 bytes: a little less latency, and half of the bandwidth at most."""
    small = _turns(draw, draw.uniform(80, 95), draw.uniform(1.1, 1.25))  # at 64 kB NCCL is near LL by itself
    large = _turns(draw, draw.uniform(10, 12), draw.uniform(0.4, 0.48), digits=2)
    log = _rows(*small, "µs") | _rows(*large, "ms", ", 64 MB")
    return Draft(
        draw,
        "NCCL_PROTO=LL",
        _ratio(*small),
        log,
        _ratio(*large),
        tuple(log)[2:],
        "other_size",
        subject="our gradients' all-reduce with NCCL_PROTO=LL: {claimed:.2f} times as fast",
        size="What we train: 64 MB of gradients, one bucket. Measured with 64 kB, and once more with 64 MB.",
        call="dist.all_reduce(gradients)",
        unit="The times below are of one all-reduce; the first two rows are those of 64 kB.",
        end="Median of A / B, round by round: {claimed:.2f}.",
    )


def _sound_loop(draw: random.Random, change: str) -> Draft:
    a, b = _turns(draw, draw.uniform(45, 55), draw.uniform(1.12, 1.3))
    loop = [[round(0.06 * x * draw.uniform(1.03, 1.04), 3) for x in row] for row in (a, b)]
    return Draft(draw, change, _ratio(a, b), _rows(a, b, "ms") | _rows(*loop, "s", ", all 60 steps"), _ratio(a, b))


def _sound_nothing(draw: random.Random, change: str) -> Draft:
    a, b = _turns(draw, draw.uniform(45, 55), 1.0, scatter=0.12)
    return Draft(
        draw,
        change,
        _ratio(a, b),
        _rows(a, b, "ms"),
        _ratio(a, b),
        subject="{change}: no difference that we can show ({claimed:.2f})",
    )


def _sound_ranks(draw: random.Random, change: str) -> Draft:
    """One rank prints; what it prints is the slowest one's time."""
    a, b = _turns(draw, draw.uniform(45, 55), draw.uniform(1.08, 1.2))
    rank_0 = [[round(x * draw.uniform(0.7, 0.75), 1) for x in row] for row in (a, b)]
    return Draft(
        draw,
        change,
        _ratio(a, b),
        _rows(a, b, "ms") | _rows(*rank_0, "ms", ", rank 0 alone"),
        _ratio(a, b),
        learnt='Rank 0 prints. "Alone" is its own clock, without the wait in all-reduces. Loss after '
        "2,000 steps: {loss:.3f} and {other:.3f}.",
    )


def _sound_spell(draw: random.Random, change: str) -> Draft:
    """A gain that is hard to believe, with a slow spell of the machine in it that met both."""
    a, b = _turns(draw, draw.uniform(90, 99), draw.uniform(2.6, 3.2))
    slow = draw.sample(range(ROUNDS), 2)
    a, b = ([round(x * (2.8 if k in slow else 1), 1) for k, x in enumerate(row)] for row in (a, b))
    return Draft(
        draw,
        change,
        _ratio(a, b),
        _rows(a, b, "ms"),
        _ratio(a, b),
        order="A and B took turns, A B, B A, ..., in {n} rounds; a neighbour's job came and went.",
    )


Writer = Callable[[random.Random, str], Draft]
CANNOT_TELL: tuple[Writer, ...] = (_blocked, _single_pair)
CAN_TELL: tuple[Writer, ...] = (
    _early_clock,
    _cold_start,
    _best_of_many,
    _debug_baseline,
    _weak_as_strong,
    _two_units,
    _samples_rate,
    _busy_as_useful,
    _one_clock,
    _other_size,
)
SOUND: tuple[Writer, ...] = (_sound_loop, _sound_nothing, _sound_ranks, _sound_spell)
CHANGES = (
    "the fused optimizer",
    "channels_last",
    "pinned memory",
    "buckets of 50 MB",
    "gradients as bucket views",
    "two workers more",
)


def made(seat: int) -> dict[int, Made]:
    """Six reports by number: one whose numbers cannot tell, three others that fool, two sound ones, in any order."""
    draw = random.Random(f"seat {seat}")
    writers = [draw.choice(CANNOT_TELL), *draw.sample(CAN_TELL, 3), *draw.sample(SOUND, 2)]
    draw.shuffle(writers)
    changes = draw.sample(CHANGES, len(CHANGES))
    return {n: write(draw, change).made() for n, (write, change) in enumerate(zip(writers, changes, strict=True), 1)}


def every(seed: int) -> list[Made]:
    """One report of each kind, for tests."""
    draw: Any = random.Random(seed)
    return [write(draw, CHANGES[seed % len(CHANGES)]).made() for write in (*CANNOT_TELL, *CAN_TELL, *SOUND)]
