"""Which rank holds the others up, when every rank's own timer says the same?

    python -m labs.last_to_arrive                               # launches its own ranks
    python -m labs.last_to_arrive --nproc 4 --oversubscribe     # ranks that mostly sleep can share cores
    python -m labs.last_to_arrive --place data                  # late where a timer does see it
    torchrun --nproc-per-node 2 -m labs.last_to_arrive --model my_package.module:factory

About 8 s on 2 CPU cores. Steps take turns: nobody is late; one rank is late in each; any rank is late in a few. Each
rank keeps its own timer's seconds, and how long it waited at the step's last all-reduce: whoever waits least came last.
Then what noting that costs: steps with the note and without, in turn.

DDP refuses hooks whose annotations are strings, so there is no `from __future__ import annotations` here.
"""

import random
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from labs.common.cost_model import waiting
from labs.common.profiling import late_training
from labs.common.profiling.late_training import PHASES, Training
from labs.common.timing.moments import now, seconds_between
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

CASES = ("nobody", "one rank", "any rank")
COST_PART = 0.2  # of the seconds: for what the note costs


@dataclass(frozen=True)
class Config:
    """How late who is, and what is trained."""

    delay_ms: float = 30.0
    """How late a rank is when it is, in ms."""
    late_rank: int | None = None
    """The one rank that is late in every step; by default the seed decides."""
    place: str = "backward"
    """Where it is late: data, forward, backward or optimizer."""
    rare_share: float = 0.2
    """Share of its steps in which each rank is late, where any of them may be."""
    model: str = late_training.SLEEPING
    """"sleeping": layers that sleep, so that ranks can share cores; or one of labs.models.MODELS, or
    package.module:factory."""
    layers: int = 6
    """Layers of the sleeping model."""
    layer_ms: float = 1.5
    """Time of one of them forward, in ms; backward takes twice as long."""
    width: int = 256
    """Width of its layers."""
    batch_size: int = 32
    """Samples per rank."""
    seconds: float = 6.0
    """Time for all, in s. A slower machine takes fewer steps and has wider intervals."""
    rounds: int | None = None
    """Steps of each case; by default as many as fit, at least 6."""
    seed: int = 0
    """Seed of the model, the data, the choice of the late rank and the rare delays."""
    smoke: bool = False
    """Two steps of each case."""

    def __post_init__(self) -> None:
        late_training.require_training(self)
        require(0 < self.rare_share <= 1, f"rare_share must be above 0 and at most 1, not {self.rare_share}")
        require(self.late_rank is None or self.late_rank >= 0, f"late_rank must be a rank, not {self.late_rank}")
        measure.require_budget(self.seconds, self.rounds)


def check_layout(config: Config, world_size: int) -> None:
    """BadInput for a rank that there is not, or a model that cannot be built."""
    require(
        config.late_rank is None or config.late_rank < world_size,
        f"late_rank {config.late_rank} needs more ranks: the last of {world_size} is {world_size - 1}",
    )
    late_training.build(config)


def note_wait(waits: list, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own average over all ranks; of a step's last bucket it notes how long this rank waited, in s.

    No clock is shared: the end is the same for all, so the rank with the shortest wait was the last to arrive. On a GPU
    the two moments are events of its streams, and nobody waits for them: read them when the training has ended.
    """
    arrived = now(bucket.buffer().device) if bucket.is_last() else None  # its last gradient is there
    averaged = allreduce_hook(dist.group.WORLD, bucket)
    if arrived is None:
        return averaged

    def over(future: torch.futures.Future) -> Tensor:
        waits.append((arrived, now(bucket.buffer().device)))
        return future.value()

    return averaged.then(over)


def late_by(waits: list[list[float]]) -> list[tuple[float, ...]]:
    """For each step how many s after the first rank each rank came, from every rank's waits at the same collective."""
    return [tuple(max(step) - wait for wait in step) for step in zip(*waits, strict=True)]


def predict(config: Config, case: str, world_size: int) -> float:
    """Seconds by which a step is longer: the delay of one rank, or the expected largest of all ranks' rare ones.

    Labs.slowest_rank tries the second formula on more ranks and other delays.
    """
    if case == "nobody":
        return 0.0
    share = 1.0 if case == "one rank" else config.rare_share
    return waiting.of_rare(share, 1e-3 * config.delay_ms, 1 if case == "one rank" else world_size)


def late_rank_of(config: Config, world_size: int) -> int:
    """The rank that is late in every step of one case."""
    drawn = random.Random(config.seed).randrange(world_size)
    return drawn if config.late_rank is None else config.late_rank


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """The three cases in turn, then what the note costs."""
    waits: list = []
    training = Training(late_training.build(config), config.batch_size, rank.device, note_wait, waits)
    late_rank, dice = late_rank_of(config, rank.world_size), random.Random(f"{config.seed} {rank.rank}")
    delays: dict[str, Callable[[], float]] = {
        "nobody": lambda: 0.0,
        "one rank": lambda: 1e-3 * config.delay_ms * (rank.rank == late_rank),
        "any rank": lambda: 1e-3 * config.delay_ms * (dice.random() < config.rare_share),
    }
    timers: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    noted: dict[str, list] = {case: [] for case in CASES}
    planted: dict[str, list[float]] = {case: [] for case in CASES}

    def step(case: str) -> None:
        planted[case].append(delays[case]())
        timers[case].append(training.step({config.place: planted[case][-1]}))
        noted[case].append(waits.pop())

    for _ in range(2 if config.smoke else 5):  # DDP rearranges its buckets after the first
        training.step({})
    waits.clear()
    seconds = measure.interleave(
        {case: partial(step, case) for case in CASES},
        measure.rounds_of(config, rank.slowest, 1 - COST_PART),
        rank.device,
        between=rank.barrier,
        on_round=lambda done, total: rank.progress(done, total, f"step {done} of {total}"),
    )
    yield rank.record("planted_s", "s", 1e-3 * config.delay_ms, kind="modelled", of_rank=late_rank, place=config.place)
    for case in CASES:
        yield rank.record("added_s", "s", predict(config, case, rank.world_size), kind="modelled", late=case)
        drawn = [max(ranks) for ranks in zip(*rank.gather(planted[case]), strict=True)]
        yield rank.record("drawn_s", "s", drawn, kind="modelled", late=case)
        yield rank.record("step_s", "s", rank.slowest(seconds[case]), late=case)
        yield from _of_ranks(case, timers[case], [seconds_between(*n) for n in noted[case]], rank)
    yield from cost_of_noting(config, rank)


def _of_ranks(case: str, timers: list[dict[str, float]], waits: list[float], rank: Rank) -> Iterator[Record]:
    """Each rank's own timers, and when it came to the last all-reduce."""
    late = list(zip(*late_by(rank.gather(waits)), strict=True))
    for r, of_rank in enumerate(rank.gather(timers)):
        yield rank.record("own_step_s", "s", [sum(t.values()) for t in of_rank], of_rank=r, late=case)
        for phase in PHASES:
            yield rank.record("own_s", "s", [t[phase] for t in of_rank], of_rank=r, late=case, phase=phase)
        yield rank.record("late_s", "s", late[r], of_rank=r, late=case)


def cost_of_noting(config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds of a step without any hook and with the one that notes, in turn."""
    waits: list = []
    kinds = {"plain": (), "noting": (note_wait, waits)}
    trained = {
        name: Training(late_training.build(config), config.batch_size, rank.device, *hook)
        for name, hook in kinds.items()
    }
    steps = {name: partial(training.step, {}) for name, training in trained.items()}
    for step in steps.values():
        measure.time_steps(step, 2, rank.device)
    rounds = measure.rounds_of(config, rank.slowest, COST_PART)
    for name, samples in measure.interleave(steps, rounds, rank.device, between=rank.barrier).items():
        yield rank.record("cost_step_s", "s", rank.slowest(samples), hook=name)


def lateness(run: Records, case: str) -> dict[int, Estimate]:
    """{rank: s after the first rank, at the last all-reduce of a step}."""
    return {r.case["of_rank"]: measure.estimate(r.samples, "s") for r in run.where("late_s", late=case)}


def own_timers(run: Records, case: str, phase: str | None = None) -> dict[int, float]:
    """{rank: median s of a step, or of a phase, by that rank's own timer}."""
    found = run.where("own_s", late=case, phase=phase) if phase else run.where("own_step_s", late=case)
    return {r.case["of_rank"]: statistics.median(r.samples) for r in found}


@dataclass(frozen=True)
class Verdict:
    """Which rank comes last, and how sure that is."""

    rank: int
    share: Estimate
    """In how many of the steps, of 1."""
    by: Estimate
    """s after the one before it, in those steps: what all would win if it came with that one."""

    @property
    def clear(self) -> bool:
        """Whether one rank is to blame: it is last in more than half of the steps, beyond chance."""
        return self.share.low > 0.5


def blame(run: Records, case: str) -> Verdict:
    """Who came last most often. Needs two ranks."""
    late = list(zip(*(r.samples for r in run.where("late_s", late=case)), strict=True))
    last = [max(range(len(step)), key=step.__getitem__) for step in late]
    rank, times = Counter(last).most_common(1)[0]
    by = [step[rank] - sorted(step)[-2] for step, r in zip(late, last, strict=True) if r == rank]
    return Verdict(rank, measure.proportion(times, len(last)), measure.estimate(by, "s"))


def added(run: Records, case: str) -> Estimate:
    """By how many s a step is longer than with nobody late: the mean over the run."""
    pairs = zip(run.one("step_s", late=case).samples, run.one("step_s", late="nobody").samples, strict=True)
    return measure.mean([a - b for a, b in pairs], "s")


def predicted(run: Records, case: str) -> tuple[float, float]:
    """Added s by the formula, and by the delays that this run drew."""
    by_formula = next(r.value for r in run.where("added_s", late=case))
    return by_formula, statistics.fmean(next(r.samples for r in run.where("drawn_s", late=case)))


def cost(run: Records) -> Estimate:
    """Seconds that the note adds to a step, paired."""
    noting, plain = (run.one("cost_step_s", hook=name).samples for name in ("noting", "plain"))
    return measure.estimate([a - b for a, b in zip(noting, plain, strict=True)], "s")


def is_shown(found: Estimate) -> bool:
    """Whether these samples, if there are enough of them, tell this cost from nothing."""
    return found.n >= measure.fewest() and measure.differs(found, 0.0)


def answer(run: Records) -> Iterator[str]:
    """What the timers say, whom the arrivals name, what it costs, and what knowing it costs."""
    if run[0].layout["world_size"] == 1:
        yield "One rank waits for nobody: whoever comes last needs two."
        return
    [planted] = run.where("planted_s")
    own = own_timers(run, "one rank")
    where = f"{planted.case['place']} of rank {planted.case['of_rank']}"
    yield (
        f"{1e3 * planted.value:g} ms are planted in {where}, in each step. The ranks' own timers: "
        f"{', '.join(f'{1e3 * s:.1f}' for s in own.values())} ms for a step on ranks "
        f"{', '.join(map(str, own))}."
    )
    found = blame(run, "one rank")
    who = "Arrivals name" if found.clear else "Arrivals cannot tell for sure, most often"
    often = f"{100 * found.share.value:.0f} % of the steps"
    yield f"{who} rank {found.rank}: last in {often}, {found.by} after the one before it."
    other = blame(run, "any rank")
    often = f"{100 * other.share.value:.0f} %"
    yield (
        f"Where any rank is late now and then, rank {other.rank} comes last most often, in {often}"
        + (": one rank would be blamed." if other.clear else ": no rank is singled out.")
    )
    for case in CASES[1:]:
        formula, drawn = predicted(run, case)
        yield (
            f"{case.capitalize()} late: a step takes {added(run, case)} longer in the mean; the formula says "
            f"{1e3 * formula:.1f} ms, and {1e3 * drawn:.1f} ms for the delays that were drawn."
        )
    noting = cost(run)
    shown = f"adds {noting} to a step" if is_shown(noting) else f"adds nothing that this run can show ({noting})"
    yield f"The note of one wait per step {shown}."


if __name__ == "__main__":
    cli.main()
