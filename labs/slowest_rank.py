"""What does it cost that every step waits for the slowest of n ranks?

    python -m labs.slowest_rank --nproc 8 --oversubscribe         # ranks that mostly sleep can share cores
    torchrun --nproc-per-node 8 -m labs.slowest_rank --mean-ms 5

About 12 s on 2 CPU cores. Two kinds of delay with the same mean are planted on real ranks: small ones in every step
(exponential), and long ones in a few steps (rare). A step is a sleep, which stands for the work of a device, the delay,
and an all-reduce, which ends when the last rank has come. Groups of 1, 2, 4, ... ranks take turns.
Then the ranks that have a core each train alone, side by side: does one rank's list of step times tell what the slowest
of several takes?
"""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records
from labs.parts import models
from labs.parts.planning import slowest

Kind = Literal["exponential", "rare"]
KINDS: tuple[Kind, ...] = Kind.__args__
REAL_PART = 0.25  # of the seconds: for real training steps


@dataclass(frozen=True)
class Config:
    """Delays to plant, and what is trained beside them."""

    work_ms: float = 5.0
    """Sleep of every rank in every step, in ms: the work of a device, the same on all ranks."""
    mean_ms: float = 3.0
    """Mean delay of a rank in a step, in ms, of both kinds."""
    rare_share: float = 0.05
    """Share of a rank's steps that a rare delay hits; it lasts mean_ms / rare_share."""
    model: str = "mlp"
    """What the ranks with a core of their own train: one of labs.models.MODELS, or package.module:factory."""
    batch_size: int = 64
    """Samples of one of its steps."""
    seconds: float = 10.0
    """Time for all, in s. A slower machine takes fewer steps and has wider intervals."""
    rounds: int | None = None
    """Steps of each group and kind; by default as many as fit, at least 6."""
    seed: int = 0
    """Seed of the delays and of the model."""
    smoke: bool = False
    """Two steps of each group."""

    def __post_init__(self) -> None:
        require(self.work_ms >= 0 and self.mean_ms > 0, "work_ms must not be negative, and mean_ms must be positive")
        require(0 < self.rare_share <= 1, f"rare_share must be above 0 and at most 1, not {self.rare_share}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        measure.require_budget(self.seconds, self.rounds)
        models.require_known(self.model)


def group_sizes(world_size: int) -> list[int]:
    """1, 2, 4, ... and all."""
    return sorted({*(2**k for k in range(world_size.bit_length())), world_size})


def predict(config: Config, kind: Kind, n: int) -> float:
    """Mean seconds of a step of n ranks: the work, and the expected largest of n delays."""
    delay = (
        slowest.of_exponential(config.mean_ms, n)
        if kind == "exponential"
        else slowest.of_rare(config.rare_share, config.mean_ms / config.rare_share, n)
    )
    return 1e-3 * (config.work_ms + delay)


def draw_ms(config: Config, kind: Kind, dice: random.Random) -> float:
    """One delay in ms."""
    if kind == "exponential":
        return dice.expovariate(1 / config.mean_ms)
    return config.mean_ms / config.rare_share if dice.random() < config.rare_share else 0.0


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Planted delays in groups of every size, in turn; then real steps of ranks that have a core."""
    drawn: dict[tuple[Kind, int], list[float]] = {}
    steps: dict[tuple[Kind, int], Callable[[], None]] = {}
    for kind in KINDS:
        for n in group_sizes(rank.world_size):
            group = dist.new_group(list(range(n)))  # every rank must call this, also those outside of the group
            dice = random.Random(f"{config.seed} {kind} {n} {rank.rank}")
            mine = drawn.setdefault((kind, n), [])
            plan = functools.partial(draw_ms, config, kind, dice)
            steps[kind, n] = (
                functools.partial(delayed_step, config.work_ms, plan, mine, group) if rank.rank < n else _idle
            )
    for step in steps.values():
        rank.barrier()
        step()  # connections are made at the first collective of a group
    for mine in drawn.values():
        mine.clear()
    rounds = measure.rounds_of(config, rank.slowest, 1 - REAL_PART)
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
        yield rank.record("step_s", "s", predict(config, kind, n), kind="modelled", **case)
        yield rank.record("planted_s", "s", [1e-3 * (config.work_ms + ms) for ms in last], kind="modelled", **case)
        yield rank.record("step_s", "s", rank.slowest(samples), **case)
    yield from real_steps(config, rank)


def delayed_step(work_ms: float, plan: Callable[[], float], drawn: list[float], group: dist.ProcessGroup) -> None:
    """A step of one rank: work, this time's delay, and the all-reduce, in which it waits for the last one."""
    drawn.append(plan())
    time.sleep(1e-3 * (work_ms + drawn[-1]))
    dist.all_reduce(torch.zeros(1), group=group)


def _idle() -> None:
    """Another group's turn; the next barrier is the wait."""


def real_steps(config: Config, rank: Rank) -> Iterator[Record]:
    """Step times of ranks that train alone and begin each step together; as many ranks as there are cores."""
    active = max(1, min(rank.world_size, len(rank.host_cores) or rank.world_size))
    workload = models.build(config.model, config.seed)
    x, y = workload.make_batch(config.batch_size)
    optimizer = torch.optim.SGD(workload.module.parameters(), lr=0.01)

    def train_step() -> None:
        optimizer.zero_grad()
        workload.loss(workload.module(x), y).backward()
        optimizer.step()

    mine = train_step if rank.rank < active else _idle
    measure.time_steps(mine, 3 if config.smoke else 20, rank.device)
    rounds = 4 if config.smoke else measure.Budget(REAL_PART * config.seconds, rank.slowest, least=50, most=1000)
    found = measure.interleave({"step": mine}, rounds, rank.device, between=rank.barrier)["step"]
    for r, samples in enumerate(rank.gather(found)[:active]):
        yield rank.record("real_step_s", "s", samples, of_rank=r)


def measured(run: Records, kind: Kind) -> dict[int, Estimate]:
    """{ranks: mean seconds of a step} with planted delays."""
    every = run.where("step_s", delays=kind)
    return {r.case["ranks"]: measure.mean(r.samples, "s") for r in every if r.kind != "modelled"}


def formula(run: Records, kind: Kind) -> dict[int, float]:
    """{ranks: mean seconds of a step} by the expected maximum."""
    return {r.case["ranks"]: r.value for r in run.where("step_s", delays=kind) if r.kind == "modelled"}


def planted(run: Records, kind: Kind) -> dict[int, float]:
    """{ranks: mean of work and largest delay} of the very delays that this run drew."""
    return {r.case["ranks"]: float(np.mean(r.samples)) for r in run.where("planted_s", delays=kind)}


def real(run: Records) -> tuple[Estimate, Estimate, float]:
    """(mean step of the first rank, of the slowest at each step, what the first rank's list alone predicts for it).

    All in seconds. With one rank all three are the same.
    """
    every = [r.samples for r in run.where("real_step_s")]
    worst = tuple(max(step) for step in zip(*every, strict=True))
    return measure.mean(every[0], "s"), measure.mean(worst, "s"), slowest.of_samples(every[0], len(every))


def beyond_one_list(run: Records, resamples: int = 400) -> Estimate:
    """Seconds that the slowest takes more than one rank's list foretells, with a 95 % interval.

    Steps are resampled whole, with all ranks' times: the list and what is held against it share their luck.
    """
    every = np.asarray([r.samples for r in run.where("real_step_s")], float)
    draw = np.random.default_rng(0).integers(every.shape[1], size=(resamples, every.shape[1]))
    gaps = [every[:, i].max(axis=0).mean() - slowest.of_samples(every[0, i], len(every)) for i in draw]
    low, high = np.percentile(gaps, [2.5, 97.5])
    value = every.max(axis=0).mean() - slowest.of_samples(every[0], len(every))
    return Estimate(float(value), float(low), float(high), every.shape[1], "s")


def answer(run: Records) -> Iterator[str]:
    """What waiting costs with each kind of delay, how well it is foretold, and what real steps do."""
    for kind in KINDS:
        found, told, lots = measured(run, kind), formula(run, kind), planted(run, kind)
        n = max(found)
        yield (
            f"{kind.capitalize()} delays, {run[0].config['mean_ms']:g} ms in the mean: a step of 1 rank takes "
            f"{found[1]}, of {n} ranks {found[n]}. The formula says {1e3 * told[n]:.1f} ms, and "
            f"{1e3 * lots[n]:.1f} ms for the delays that were drawn."
        )
    ranks = len(run.where("real_step_s"))
    if ranks > 1:
        first, worst, told = real(run)
        yield (
            f"Real steps: {first} on one rank, {worst} for the slowest of {ranks}. One rank's list of times alone "
            f"would say {1e3 * told:.2f} ms."
        )


if __name__ == "__main__":
    cli.main()
