"""Does the course's way of timing find what is there, and nothing else?

    python -m labs.measure_validation
    torchrun --nproc-per-node 2 -m labs.measure_validation --parts planted

About 18 s on 2 CPU cores. Rank 0 measures, the others wait. Differences of known size are planted, none among
them, and counted when found; a neighbour moves in halfway.
"""

import contextlib
import dataclasses
import functools
import math
import statistics
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

UNITS = 100  # of work in a step, so that one unit more is 1 %
ARMS = {"A": 0, "A again": 0, "+2 %": 2, "+5 %": 5, "+10 %": 10}  # units more than UNITS
LONG_STEP_S = 10e-3  # next to a neighbour: longer than a slice of the scheduler (3 ms)
REPETITIONS = 12, 40  # the interval of 0 of 12 ends at 24 %, of 0 of 40 at 9 %


@dataclass(frozen=True)
class Config:
    """What to validate and how often."""

    parts: tuple[str, ...] = ()
    """What to do, of planted, neighbour. Default: all."""
    seconds: float = 11.0
    """Time for planted differences, in s: a slower machine makes fewer comparisons."""
    repetitions: int | None = None
    """Comparisons with each planted difference; by default as many as fit into `seconds`, from 12 to 40."""
    pairs: int = 20
    """Rounds in each comparison: each takes every side once."""
    step_ms: float = 2.0
    """About the duration of the step that differences are planted in."""
    seed: int = 0
    """Draws the order of the sides in each round."""
    smoke: bool = False
    """Two repetitions of six pairs."""

    def __post_init__(self) -> None:
        wrong = sorted(set(self.parts) - set(PARTS))
        require(not wrong, f"parts may hold {', '.join(PARTS)}, not {', '.join(wrong)}")
        measure.require_budget(self.seconds, None)
        require(
            self.repetitions is None or self.repetitions >= 1, f"repetitions must be at least 1, not {self.repetitions}"
        )
        require(self.pairs >= 6, f"pairs must be at least 6, not {self.pairs}: fewer support no 95 % interval")
        require(0.5 <= self.step_ms <= 1000, f"step_ms must be between 0.5 and 1000, not {self.step_ms}")


def predict(scatter: float, slower: float, power: float = 0.9) -> int:
    """Pairs after which a slowdown of the share `slower` is found with probability `power`, at level 95 %.

    `scatter` is the relative standard deviation of the ratio of one pair. For normal noise the median of n pairs
    has standard error sqrt(pi / 2) scatter / sqrt(n), which must be slower / (z_0.975 + z_power).
    """
    z = statistics.NormalDist().inv_cdf
    return math.ceil(math.pi / 2 * (scatter / slower * (z(0.975) + z(power))) ** 2)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Each part on rank 0, the other ranks idle."""
    if config.smoke:
        config = dataclasses.replace(config, repetitions=2, pairs=6, step_ms=0.5)
    for name, part in PARTS.items():
        if name in (config.parts or PARTS) and rank.rank == 0:
            yield from part(config, rank)
        rank.barrier()


def work_of(unit_s: float, device: torch.device) -> Callable[[int], None]:
    """`work(k)` does k equal matrix products of about `unit_s` seconds each."""
    side = 128 if device.type == "cpu" else 1024  # on a GPU a product must outlast its launch
    weight, rows = torch.randn(side, side, device=device), side
    for _ in range(3):  # time is proportional to the rows, but not quite
        x, out = torch.randn(rows, side, device=device), torch.empty(rows, side, device=device)

        def work(k: int, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            for _ in range(k):
                torch.mm(x, weight, out=out)

        fastest = min(measure.time_steps(lambda: work(UNITS), 6, device)[1:]) / UNITS
        rows = max(1, round(rows * unit_s / fastest))
    return work


def planted(config: Config, rank: Rank) -> Iterator[Record]:
    """The same work and 2, 5 and 10 % more of it, all in turn; how many comparisons find it."""
    work = work_of(config.step_ms / 1e3 / UNITS, rank.device)
    steps = {arm: functools.partial(work, UNITS + more) for arm, more in ARMS.items()}
    measure.warm_up(steps["A"], rank.device)
    least, most = (n * config.pairs for n in ((config.repetitions,) * 2 if config.repetitions else REPETITIONS))
    seconds = measure.interleave(
        steps,
        measure.Budget(config.seconds, least=least, most=most),
        rank.device,
        seed=config.seed,
        on_round=lambda done, total: rank.progress(done, total, f"round {done} of {total}"),
    )
    for arm, samples in seconds.items():
        yield rank.record("step_s", "s", samples, rank=0, part="planted", arm=arm, slower=ARMS[arm] / UNITS)
    for arm in [*ARMS][1:]:
        ratios = comparisons(seconds["A"], seconds[arm], config.pairs)
        metric, counts = "slowdowns_found", [ratio.low > 1 for ratio in ratios]
        if not ARMS[arm]:
            metric, counts = "intervals_with_1", [not measure.differs(ratio) for ratio in ratios]
        case = {"arm": arm, "repetitions": len(ratios), "pairs": config.pairs}
        yield rank.record(metric, "repetitions", sum(counts), rank=0, **case)


def comparisons(a: Sequence[float], b: Sequence[float], pairs: int, resamples: int = 9999) -> list[measure.Estimate]:
    """Ratio of `b` to `a` in each window of `pairs` rounds; a rest that does not fill a window is left out."""
    starts = range(0, len(a) - pairs + 1, pairs)
    return [measure.paired_ratio(b[i : i + pairs], a[i : i + pairs], resamples=resamples) for i in starts]


def power(records: Records, pairs_list: Sequence[int] = (5, 10, 20, 40)) -> list[dict]:
    """How often `pairs` pairs show a planted slowdown: rows of arm, slower, pairs and share.

    `share` is an Estimate over the windows of so many pairs that the samples hold, with its 95 % Wilson interval. An
    interval below 1 has found no slowdown. Where none is planted, `share` is the rate of false alarms, of either sign.
    A size that does not fit even once is left out.
    LookupError without the samples, ValueError for fewer than 2 pairs, which have no interval.
    """
    if min(pairs_list) < 2:
        raise ValueError(f"an interval needs at least 2 pairs, not {min(pairs_list)}")
    reference, rows = records.one("step_s", part="planted", arm="A"), []
    counted = {record.case["pairs"] for record in records.where("intervals_with_1")}
    for record in records.where("step_s", part="planted"):
        for pairs in pairs_list if record.case["arm"] != "A" else ():
            resamples = 9999 if pairs in counted else 999  # the same intervals as the lab's own count, to the last one
            ratios = comparisons(reference.samples, record.samples, pairs, resamples)
            shown = sum(r.low > 1 if record.case["slower"] else measure.differs(r) for r in ratios)
            if ratios:
                share = measure.proportion(shown, len(ratios))
                rows.append(
                    {"arm": record.case["arm"], "slower": record.case["slower"], "pairs": pairs, "share": share}
                )
    return rows


def neighbour(config: Config, rank: Rank) -> Iterator[Record]:
    """A against the same A, while a neighbour moves in halfway: first all of one, and then in turn."""
    work = work_of(LONG_STEP_S / UNITS, rank.device)
    sides = {side: functools.partial(work, UNITS) for side in "AB"}
    measure.warm_up(sides["A"], rank.device)
    rounds = 2 * config.pairs

    def halfway(done: int, total: int) -> None:
        if done == total // 2:
            move_in()

    with neighbour_on(rank.device) as move_in:
        blocks = measure.interleave({"A": sides["A"]}, rounds, rank.device)
        move_in()
        blocks |= measure.interleave({"B": sides["B"]}, rounds, rank.device)
    with neighbour_on(rank.device) as move_in:
        turns = measure.interleave(sides, rounds, rank.device, seed=config.seed, on_round=halfway)
    for order, seconds in (("one after the other", blocks), ("in turn", turns)):
        for side, samples in seconds.items():
            yield rank.record("step_s", "s", samples, rank=0, part="neighbour", order=order, side=side)


@contextlib.contextmanager
def neighbour_on(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yields a function that starts a thread which multiplies matrices on `device`; it ends with the block.

    torch lets go of the interpreter's lock while it multiplies, so that only the core or the GPU is shared.
    """
    leave = threading.Event()
    side = 256 if device.type == "cpu" else 4096

    def live() -> None:
        stream = torch.Stream(device) if device.type != "cpu" else contextlib.nullcontext()
        with stream:
            x, out = torch.randn(side, side, device=device), torch.empty(side, side, device=device)
            while not leave.is_set():
                torch.mm(x, x, out=out)
                if device.type != "cpu":
                    stream.synchronize()  # a queue of its own would make everyone wait for all of it

    thread = threading.Thread(target=live, name="neighbour", daemon=True)
    try:
        yield thread.start
    finally:
        leave.set()
        if thread.ident is not None:
            thread.join()


def answer(run: Records) -> Iterator[str]:
    """How often it finds what is there and what is not, and what a neighbour does."""
    for r in run.where("intervals_with_1"):
        held = measure.proportion(round(r.value), r.case["repetitions"]).scaled(100, "%")
        yield f"The same code against itself, {r.case['pairs']} pairs: the interval holds 1 in {held}; 95 % is meant."
    found = [
        f"{r.case['arm']} in {measure.proportion(round(r.value), r.case['repetitions']).scaled(100, '%')}"
        for r in run.where("slowdowns_found")
    ]
    if found:
        yield f"More work is found: {', '.join(found)} of the comparisons."
    for order in ("one after the other", "in turn"):
        sides = [r.samples for side in "BA" for r in run.where("step_s", part="neighbour", order=order, side=side)]
        if sides:
            ratio = measure.paired_ratio(*sides)
            end = "a difference that is not there" if measure.differs(ratio) else "no difference, as there is none"
            yield f"A neighbour moves in halfway, the same code {order}: {ratio}, {end}."


PARTS = {"planted": planted, "neighbour": neighbour}

if __name__ == "__main__":
    cli.main()
