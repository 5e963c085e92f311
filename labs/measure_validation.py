"""Does a comparison find the slowdowns that are there, and none that aren't?

    python -m labs.measure_validation
    torchrun --nproc-per-node 2 -m labs.measure_validation --parts planted

About 14 s on 2 CPU cores. Rank 0 measures, the others wait. Two parts:

  planted     interleaves the same work twice and 5 % more of it: how many comparisons of n pairs find a difference?
  neighbour   compares work with itself while another program arrives halfway: one after the other, and interleaved
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le

from labs.kit import cli, measure, supervise
from labs.kit.errors import require
from labs.kit.hardware import require_shareable
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

UNITS = 100  # units of work in a step: one unit is 1 %
ARMS = {"A": 0, "A again": 0, "+5 %": 5}  # units added to UNITS
PAIRS = (5, 10, 20, 40)
LONG_STEP_S = 20e-3  # beside another program: far longer than the scheduler's time slice (3 ms)
ORDERS = ("one after the other", "in turn")


@dataclass(frozen=True)
class Config:
    """What to validate and how often."""

    parts: tuple[str, ...] = ()
    """Any of planted, neighbour. Default: both."""
    seconds: Annotated[float, Gt(0)] = 8.0
    """Time for the planted slowdown, in s; a slower machine makes fewer comparisons."""
    step_ms: Annotated[float, Ge(0.5), Le(1000)] = 1.0
    """Approximate duration of a step, in ms."""
    rounds: Annotated[int, Ge(6)] = 24
    """Rounds of A and B with a neighbour; it arrives after half of them."""
    seed: int = 0
    """Seed for the order of the arms in each round."""
    smoke: bool = False
    """Run only a few rounds."""

    def __post_init__(self) -> None:
        wrong = sorted(set(self.parts) - set(PARTS))
        require(not wrong, f"parts may hold {', '.join(PARTS)}, not {', '.join(wrong)}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Run each part on rank 0 while the other ranks idle."""
    for name, part in PARTS.items():
        if name in (config.parts or PARTS) and rank.rank == 0:
            yield from part(config, rank)
        rank.barrier()


def work_of(unit_s: float, device: torch.device) -> Callable[[int], None]:
    """Return `work(k)`, which does k equal matrix products of about `unit_s` seconds each."""
    side = 128 if device.type == "cpu" else 1024  # on a GPU a product must outlast its launch
    weight, rows = torch.randn(side, side, device=device), side
    for _ in range(3):  # time grows almost, but not exactly, in proportion to the rows
        x, out = torch.randn(rows, side, device=device), torch.empty(rows, side, device=device)

        def work(k: int, x: torch.Tensor = x, out: torch.Tensor = out) -> None:
            for _ in range(k):
                torch.mm(x, weight, out=out)

        fastest = min(measure.time_steps(lambda: work(UNITS), 6, device)[1:]) / UNITS
        rows = max(1, round(rows * unit_s / fastest))
    return work


def planted(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield interleaved seconds of each arm, and whether each comparison of n pairs detects a difference."""
    work = work_of((0.5 if config.smoke else config.step_ms) / 1e3 / UNITS, rank.device)
    steps = {arm: functools.partial(work, UNITS + more) for arm, more in ARMS.items()}
    measure.warm_up(steps["A"], rank.device)
    budget = 40 if config.smoke else measure.Budget(config.seconds, least=400, most=2400)
    seconds = measure.interleave(steps, budget, rank.device, seed=config.seed,
                                 on_round=lambda done, total: rank.progress(done, total, "planted"))  # fmt: skip
    for arm, samples in seconds.items():
        yield rank.record("step_s", "s", samples, rank=0, part="planted", arm=arm)
    for arm in [*ARMS][1:]:
        for pairs in PAIRS:
            ratios = comparisons(seconds["A"], seconds[arm], pairs)
            found = [float(ratio.low > 1 if ARMS[arm] else measure.differs(ratio)) for ratio in ratios]
            yield rank.record("found", "1", found, rank=0, arm=arm, pairs=pairs)


def comparisons(a: Sequence[float], b: Sequence[float], pairs: int) -> list[measure.Estimate]:
    """Return the ratio of `b` to `a` in each full window of `pairs` rounds."""
    starts = range(0, len(a) - pairs + 1, pairs)
    return [measure.paired_ratio(b[i : i + pairs], a[i : i + pairs], resamples=499) for i in starts]


def neighbour(config: Config, rank: Rank) -> Iterator[Record]:
    """Compare A with itself while another program arrives halfway: first one after the other, then interleaved."""
    rounds = 6 if config.smoke else config.rounds
    with neighbour_on(rank.device) as (arrive, leave):
        work = work_of(LONG_STEP_S / UNITS, rank.device)
        sides = {side: functools.partial(work, UNITS) for side in "AB"}
        measure.warm_up(sides["A"], rank.device)
        blocks = measure.interleave({"A": sides["A"]}, rounds, rank.device)
        arrive()
        blocks |= measure.interleave({"B": sides["B"]}, rounds, rank.device)
        leave()
        measure.interleave({"A": sides["A"]}, 3, rank.device)

        def halfway(done: int, total: int) -> None:
            if done == total // 2:
                arrive()

        turns = measure.interleave(sides, rounds, rank.device, seed=config.seed, on_round=halfway)
    for order, seconds in zip(ORDERS, (blocks, turns), strict=True):
        for side, samples in seconds.items():
            yield rank.record("step_s", "s", samples, rank=0, part="neighbour", order=order, side=side)


@contextlib.contextmanager
def neighbour_on(device: torch.device) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield (arrive, leave) of another process that multiplies matrices on `device`, on the same CPU core.

    Call it before this process computes: on a CPU, the process is forked. BadInput for a GPU in exclusive-process mode.
    """
    if device.type == "cuda":
        require_shareable({device.index})
    method = "fork" if device.type == "cpu" else "forkserver"
    context: Any = multiprocessing.get_context(method)
    busy, ready = context.Event(), context.Event()
    with supervise.forked(_multiply, busy, ready, device, method=method):
        if not ready.wait(100):
            raise RuntimeError("the neighbour's process did not start within 100 s")
        yield busy.set, busy.clear


def _multiply(busy: Any, ready: Any, device: torch.device) -> None:
    side = 256 if device.type == "cpu" else 4096
    x, out = torch.randn(side, side, device=device), torch.empty(side, side, device=device)
    ready.set()
    while True:
        busy.wait()
        torch.mm(x, x, out=out)
        measure.sync(device)


PARTS = {"planted": planted, "neighbour": neighbour}


def same_code(records: Records) -> dict[str, measure.Estimate]:
    """Return {order: B over A with the neighbour}; both are the same work. The i-th samples form pairs."""
    found = {}
    for order in ORDERS:
        b, a = (records.one("step_s", part="neighbour", order=order, side=side).samples for side in "BA")
        found[order] = measure.paired_ratio(b, a)
    return found


def detection(records: Records, arm: str) -> dict[int, measure.Estimate]:
    """Return {pairs: share of comparisons that detect `arm`, with its 95 % Wilson interval}."""
    return {r.case["pairs"]: measure.proportion(round(sum(r.samples)), len(r.samples))
            for r in records.where("found", arm=arm)}  # fmt: skip


def fewest_pairs(records: Records, arm: str = "+5 %", power: float = 0.8) -> int | None:
    """Return the fewest pairs whose share of detections is at least `power`, even at its lower bound; else None."""
    return min((pairs for pairs, share in detection(records, arm).items() if share.low >= power), default=None)


def category(records: Records) -> str:
    """Say whether each order is off by more than 10 %, and whether 10 pairs are enough to find 5 %."""
    off = {order: "off" if abs(ratio.value - 1) > 0.1 else "right" for order, ratio in same_code(records).items()}
    said = ", ".join(f"{order}: {word}" for order, word in off.items())
    return f"{said}; 10 pairs {'find' if (fewest_pairs(records) or 99) <= 10 else 'miss'} 5 %"


def answer(run: Records) -> Iterator[str]:
    """Yield what another program does to the same code, and how many pairs find 5 %."""
    if run.where("step_s", part="neighbour"):
        for order, ratio in same_code(run).items():
            yield f"With another program from halfway on, B / A of the same code, measured {order}: {ratio}."
    if run.where("found"):
        for arm in [*ARMS][1:]:
            shares = ", ".join(f"{pairs} pairs: {100 * s.value:.0f} %" for pairs, s in detection(run, arm).items())
            yield f"Comparisons that show a difference, {arm}: {shares}."


if __name__ == "__main__":
    cli.main()
