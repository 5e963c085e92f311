"""What does it cost that every step waits for the slowest of n ranks?

    python -m labs.slowest_rank --nproc 8 --oversubscribe         # ranks that mostly sleep can share cores
    torchrun --nproc-per-node 8 -m labs.slowest_rank --mean-ms 5

About 9 s on 2 CPU cores. Two kinds of delay with the same mean are planted on real ranks: small ones in every step
(exponential), and long ones in a few steps (rare). A step is a sleep, which stands for the work of a device, the delay,
and an all-reduce, which ends when the last rank has come. Groups of 1, 2, 4, ... ranks take turns.
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from labs.common.cost_model import waiting
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Kind = Literal["exponential", "rare"]
KINDS: tuple[Kind, ...] = Kind.__args__


@dataclass(frozen=True)
class Config:
    """Delays to plant."""

    work_ms: float = 5.0
    """Sleep of every rank in every step, in ms: the work of a device, the same on all ranks."""
    mean_ms: float = 3.0
    """Mean delay of a rank in a step, in ms, of both kinds."""
    rare_share: float = 0.05
    """Share of a rank's steps that a rare delay hits; it lasts mean_ms / rare_share."""
    seconds: float = 8.0
    """Time for all, in s. A slower machine takes fewer steps and has wider intervals."""
    rounds: int | None = None
    """Steps of each group and kind; by default as many as fit, at least 6."""
    seed: int = 0
    """Seed of the delays."""
    smoke: bool = False
    """Two steps of each group."""

    def __post_init__(self) -> None:
        require(self.work_ms >= 0 and self.mean_ms > 0, "work_ms must not be negative, and mean_ms must be positive")
        require(0 < self.rare_share <= 1, f"rare_share must be above 0 and at most 1, not {self.rare_share}")
        measure.require_budget(self.seconds, self.rounds)


def group_sizes(world_size: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({*(2**k for k in range(world_size.bit_length())), world_size})


def predict(config: Config, kind: Kind, n: int) -> float:
    """Mean seconds of a step of n ranks: the work, and the expected largest of n delays."""
    delay = (
        waiting.of_exponential(config.mean_ms, n)
        if kind == "exponential"
        else waiting.of_rare(config.rare_share, config.mean_ms / config.rare_share, n)
    )
    return 1e-3 * (config.work_ms + delay)


def draw_ms(config: Config, kind: Kind, dice: random.Random) -> float:
    """One delay in ms."""
    if kind == "exponential":
        return dice.expovariate(1 / config.mean_ms)
    return config.mean_ms / config.rare_share if dice.random() < config.rare_share else 0.0


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Planted delays in groups of every size, in turn."""
    drawn: dict[tuple[Kind, int], list[float]] = {}
    steps: dict[tuple[Kind, int], Callable[[], None]] = {}
    for kind in KINDS:
        for n in group_sizes(rank.world_size):
            group = dist.new_group(list(range(n)))  # every rank must call this, also those outside of the group
            dice = random.Random(f"{config.seed} {kind} {n} {rank.rank}")
            own = drawn.setdefault((kind, n), [])
            plan = functools.partial(draw_ms, config, kind, dice)
            steps[kind, n] = (
                functools.partial(delayed_step, config.work_ms, plan, own, group) if rank.rank < n else _idle
            )
    for step in steps.values():
        rank.barrier()
        step()  # connections are made at the first collective of a group
    for own in drawn.values():
        own.clear()
    rounds = measure.rounds_of(config, rank.slowest)
    seconds = measure.interleave(
        steps,
        rounds,
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"step {done} of {total}"),
    )
    planted = rank.gather(drawn)
    for (kind, n), samples in seconds.items():
        last = [max(of_ranks) for of_ranks in zip(*(p[kind, n] for p in planted[:n]), strict=True)]
        case = {"delays": kind, "ranks": n}
        yield rank.record("formula_s", "s", predict(config, kind, n), kind="modelled", **case)
        yield rank.record("planted_s", "s", [1e-3 * (config.work_ms + ms) for ms in last], kind="modelled", **case)
        yield rank.record("step_s", "s", rank.slowest(samples), **case)


def delayed_step(work_ms: float, plan: Callable[[], float], drawn: list[float], group: dist.ProcessGroup) -> None:
    """A step of one rank: work, this time's delay, and the all-reduce, in which it waits for the last one."""
    drawn.append(plan())
    time.sleep(1e-3 * (work_ms + drawn[-1]))
    dist.all_reduce(torch.zeros(1), group=group)


def _idle() -> None:
    """Another group's turn; the next barrier is the wait."""


def means_ms(run: Records) -> dict[tuple[str, int], tuple[Estimate, float]]:
    """{(delays, ranks): (measured mean of a step in ms, the formula's)}."""
    formula = {(r.case["delays"], r.case["ranks"]): 1e3 * r.value for r in run.where("formula_s")}
    every = {(r.case["delays"], r.case["ranks"]): r for r in run.where("step_s")}
    return {key: (measure.mean([1e3 * s for s in r.samples], "ms"), formula[key]) for key, r in every.items()}


def category(run: Records) -> str:
    """Which kind of delay costs all ranks together more."""
    found = means_ms(run)
    n = max(ranks for _, ranks in found)
    rare, small = found["rare", n][0], found["exponential", n][0]
    return "rare" if rare.low > small.high else "small" if rare.high < small.low else "inconclusive"


def answer(run: Records) -> Iterator[str]:
    """What waiting costs with each kind of delay, beside the formula."""
    for (kind, n), (measured, formula) in means_ms(run).items():
        if n > 1:
            yield f"{kind.capitalize()} delays: {n} ranks take {measured} per step; the formula says {formula:.1f} ms."


if __name__ == "__main__":
    cli.main()
