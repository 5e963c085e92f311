"""By what factor do twelve habits of measuring fool you here?

    python -m labs.fooled --nproc 2
    python -m labs.fooled --ways blocked single_pair --seconds 10

About 15 s on 2 CPU cores. Each habit is followed as somebody in a hurry would, and next to it, in turn, the same is
measured as this course does. Where both sides are the same code the truth is known; otherwise the honest answer stands
for it. On a CPU, where every operator returns when it is done, a device that works through a queue is emulated.
Three of the ways take two ranks.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from labs.common import models
from labs.common.data.fashion import vectors
from labs.common.data_parallel.training import train_step
from labs.common.timing import probing
from labs.common.timing.busy import counter_of
from labs.common.timing.roofline import matmul_work, training_step_work
from labs.fooled import learning as learning
from labs.fooled import two_units
from labs.fooled.best_of_many import best_against_median
from labs.fooled.busy_as_useful import Work, busy_told_as_useful
from labs.fooled.cold_start import first_steps_count
from labs.fooled.debug_baseline import baseline_in_debug_mode
from labs.fooled.early_clock import clock_stops_early
from labs.fooled.learning import best_rate, samples_told_as_learning, train_to_loss
from labs.fooled.neighbour import neighbour_on, one_after_the_other
from labs.fooled.one_clock import one_clock_of_many
from labs.fooled.other_size import rate_of_another_size
from labs.fooled.single_pair import single_pair_decides
from labs.fooled.streams import open_stream
from labs.fooled.ways import WAYS, Way
from labs.fooled.weak_as_strong import weak_told_as_strong
from labs.kit import _compat, measure
from labs.kit.errors import did_you_mean, require
from labs.kit.measure import Estimate
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Answers = tuple[float, float]
"""The fooling one and the honest one, in the unit of the way."""
Followed = Callable[[], Answers]
"""Follows a way once."""
LARGER, LOSS = 32, 0.8
"""The larger batch of `samples_rate` over the small one; nats at which a training is done."""
SEARCHED = 2
"""Seeds with which a learning rate is searched; none of them is measured with."""
SMALL_BYTES, LARGE_BYTES = 40_040, 40_040_000
"""Gradients of the article's Linear(1000, 10), 10,010 parameters in FP32; and a thousand times as many."""
FEW = 8
"""The batch of `busy_as_useful` is the usual one over this."""


@dataclass(frozen=True)
class Config:
    """Which ways, and for how long."""

    ways: tuple[str, ...] = ()
    """Names of WAYS in labs/fooled/ways.py, such as blocked or single_pair. Default: all twelve."""
    seconds: float = 10.0
    """Time for all twelve, in s. A slower machine repeats each way less often, but at least 6 times."""
    rounds: int | None = None
    """Times that each way is followed; by default as many as fit into its part of `seconds`, at least 6."""
    batch_size: int = 64
    """Samples per step of the training steps, on one rank."""
    seed: int = 0
    """Seed of the models and of the data."""
    smoke: bool = False
    """Each way twice: too few for an interval."""

    def __post_init__(self) -> None:
        for name in self.ways:
            require(
                name in WAYS, f"ways: there is no {name!r}: {did_you_mean(name, WAYS)}take some of {', '.join(WAYS)}"
            )
        measure.require_budget(self.seconds, self.rounds)
        require(2 <= self.batch_size <= 10_000, f"batch_size must be from 2 to 10000, not {self.batch_size}")
        require(0 <= self.seed < 2**32, f"seed must be from 0 to 4294967295, not {self.seed}")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Each way in its turn: pairs of answers. What takes one rank is measured by rank 0, and the others wait."""
    chosen = [way for way in WAYS.values() if way.key in (config.ways or WAYS)]
    for done, way in enumerate(chosen):
        rank.progress(done, len(chosen), way.title)
        if rank.world_size < way.ranks:
            yield rank.record("left_out", "1", 1.0, way=way.key, because=f"it takes {way.ranks} ranks")
        elif way.key in TOGETHER or rank.rank == 0:
            yield from answers(way, config, rank)
        rank.barrier()
    rank.progress(len(chosen), len(chosen), "done")


def answers(way: Way, config: Config, rank: Rank) -> Iterator[Record]:
    """Both answers of a way, as often as its part of the time allows."""
    slowest = rank.slowest if way.key in TOGETHER else list  # ranks that measure together stop together
    with contextlib.ExitStack() as stack:
        once, settings = PREPARED[way.key](config, rank, stack), {}
        if isinstance(once, tuple):
            once, settings = once
        pairs = [once() for _ in measure.within(itertools.repeat(None), measure.rounds_of(config, slowest, way.share))]
    fooled, honest = zip(*pairs, strict=True)
    case = {"way": way.key} | settings | ({"truth": way.truth} if way.truth else {})
    kind = "modelled" if way.key == "early_clock" and rank.device.type == "cpu" else "measured"  # an emulated queue
    yield rank.record("fooled", way.unit, fooled, kind=kind, **case)
    yield rank.record("honest", way.unit, honest, kind=kind, **case)


# -- what each way is tried on: a function that follows it once; and settings, where some were searched for here


def early_clock(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    stream = stack.enter_context(contextlib.closing(open_stream(rank.device)))
    return functools.partial(clock_stops_early, product(384, rank), 10, stream)


def cold_start(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    _compat.preload_dynamo()

    batches = itertools.count(max(1, config.batch_size // 8))  # new shapes each time: kernels are chosen for a shape

    def new_training() -> Callable[[], None]:
        return training("mlp", next(batches), config, rank)

    return functools.partial(first_steps_count, new_training, 3, rank.device)


def best_of_many(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    step, seeds = product(256, rank), itertools.count(config.seed)
    return lambda: best_against_median(step, 10, rank.device, next(seeds))


def blocked(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    seeds = itertools.count(config.seed, 2)
    step = block_of(product(256, rank), 0, rank).block  # of 8 ms: a neighbour on a core comes in slices of some 3 ms
    return lambda: one_after_the_other(step, 8, rank.device, neighbour_on, next(seeds))


def single_pair(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    step, seeds = product(256, rank), itertools.count(config.seed)
    return lambda: single_pair_decides(step, 20, rank.device, next(seeds))


def debug_baseline(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    step, seeds = steady(training("mlp", config.batch_size, config, rank), rank), itertools.count(config.seed)
    return lambda: baseline_in_debug_mode(step, 6, rank.device, next(seeds))


def weak_as_strong(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    one, each, shared = config.batch_size, config.batch_size, max(1, config.batch_size // rank.world_size)
    alone = training("mlp", one, config, rank)
    steps = {
        "alone": alone if rank.rank == 0 else idle,
        "a batch each": training("mlp", each, config, rank, ddp=True),
        "one batch shared": training("mlp", shared, config, rank, ddp=True),
    }
    for step in steps.values():
        measure.time_steps(step, 5, rank.device)  # a fixed number: ranks that decide for themselves would hang
        rank.barrier()
    return functools.partial(weak_told_as_strong, steps, 3, rank)


def two_units_for_one(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    rows, step = two_units.sentences(), two_units.next_word_training(rank.device, config.seed)
    in_order = dict(zip(two_units.ORDERS, (rows, sorted(rows, key=len)), strict=True))
    batches = {order: two_units.batched(own, rank.device) for order, own in in_order.items()}
    for batch in itertools.chain(*batches.values()):  # each length once: kernels are chosen for a shape
        step(batch)
    seeds = itertools.count(config.seed)
    return lambda: two_units.padding_counts_as_tokens(step, batches, rank.device, next(seeds))


def samples_rate(config: Config, rank: Rank, stack: contextlib.ExitStack) -> tuple[Followed, dict[str, list]]:
    data, seeds = vectors(10_000, rank.device), itertools.count(config.seed)
    batches = config.batch_size // 2, LARGER * config.batch_size // 2

    def samples_with(batch: int, rate: float, most: int) -> int:
        """Samples to the loss, together with all seeds of the search; given up once they are `most`."""
        used = 0
        for seed in range(SEARCHED):
            used += train_to_loss(batch, rate, 2**32 - 1 - seed, data, LOSS, most - used)[0] if used < most else 0
        return used

    train_to_loss(batches[0], 0.1, config.seed, data, 2.2)  # a warm-up
    rates = dict.fromkeys(batches, learning.RATES[len(learning.RATES) // 2])
    if not config.smoke:
        rates = {batch: best_rate(functools.partial(samples_with, batch)) for batch in batches}

    def once() -> Answers:
        seed = next(seeds)  # the same first weights for both
        return samples_told_as_learning(lambda batch, rate: train_to_loss(batch, rate, seed, data, LOSS), rates)

    return once, {"batches": list(rates), "learning_rates": list(rates.values()), "searched": not config.smoke}


def busy_as_useful(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    few = max(1, config.batch_size // FEW)
    side = 384 if rank.device.type == "cpu" else 4096
    training_step = steady(training("mlp", few, config, rank), rank)
    flop = {training_step: training_step_work(models.mlp(), few).flop}
    large = probing.matmul_step("fp32", side, rank.device)
    flop[large] = matmul_work(side, 4).flop
    counter = stack.enter_context(counter_of(rank.device))
    trained, multiplied = (block_of(step, flop[step], rank) for step in (training_step, large))
    return functools.partial(busy_told_as_useful, trained, multiplied, counter, 0.05, rank.device)


def block_of(step: Callable[[], object], flop: float, rank: Rank) -> Work:
    """As many steps as take 8 ms: the clock, and on a GPU the wait at the end, then cost next to nothing."""
    inner = probing.inner_calls(step, rank.device)

    def block() -> None:
        for _ in range(inner):
            step()

    return Work(block, inner * flop)


def one_clock(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    step, parts = (
        product(256, rank),
        8 * (2 if rank.rank == rank.world_size - 1 else 1),
    )  # the last one has twice as much

    def my_part() -> None:
        for _ in range(parts):
            step()

    my_part()
    return functools.partial(one_clock_of_many, my_part, rank)


def other_size(config: Config, rank: Rank, stack: contextlib.ExitStack) -> Followed:
    gradients = torch.zeros(LARGE_BYTES // 4, device=rank.device)

    def exchange(nbytes: int) -> None:
        dist.all_reduce(gradients[: nbytes // 4])

    for nbytes in (SMALL_BYTES, LARGE_BYTES):
        exchange(nbytes)  # connections and buffers are made at the first one
    return functools.partial(rate_of_another_size, exchange, SMALL_BYTES, LARGE_BYTES, 4, rank)


PREPARED = {
    "early_clock": early_clock,
    "cold_start": cold_start,
    "best_of_many": best_of_many,
    "blocked": blocked,
    "single_pair": single_pair,
    "debug_baseline": debug_baseline,
    "weak_as_strong": weak_as_strong,
    "two_units": two_units_for_one,
    "samples_rate": samples_rate,
    "busy_as_useful": busy_as_useful,
    "one_clock": one_clock,
    "other_size": other_size,
}
TOGETHER = ("weak_as_strong", "one_clock", "other_size")
"""Ways in which all ranks take part."""


def product(side: int, rank: Rank) -> Callable[[], object]:
    """A product of two square matrices that takes about a millisecond: on a GPU they are larger."""
    return probing.matmul_step("fp32", side if rank.device.type == "cpu" else 12 * side, rank.device)


def training(
    model: str, batch: int, config: Config, rank: Rank, *, ddp: bool = False, optimizer: type = torch.optim.SGD
) -> Callable[[], None]:
    """A training step with its own model and one batch on the device; nothing of it has run yet."""
    workload = models.make(model, config.seed)
    module = workload.module.to(rank.device)
    x, y = (t.to(rank.device) for t in workload.make_batch(batch))
    trained = DistributedDataParallel(module) if ddp else module
    return functools.partial(train_step, trained, optimizer(module.parameters(), lr=0.001), x, y, workload.loss)


def steady(step: Callable[[], None], rank: Rank) -> Callable[[], None]:
    """The same step, warm."""
    measure.warm_up(step, rank.device)
    return step


def idle() -> None:
    """Another rank's turn."""


# -- what came out


@dataclass(frozen=True)
class Row:
    """Both answers of one way. `fooled` and `honest` are over the truth, or over the honest median that stands for it.

    `gap` is the fooling answer over the honest one of the same round: with it, it is judged whether a way fools.
    """

    way: Way
    told: Estimate
    """The fooling answer in the way's unit; `said` is the honest one."""
    said: Estimate
    fooled: Estimate
    honest: Estimate
    gap: Estimate
    kinds: tuple[str, str]
    """Of the fooling and of the honest answer: measured, or modelled where the device's queue is emulated."""

    @property
    def told_text(self) -> str:
        """The fooling answer with its unit."""
        return self._in_unit(self.told)

    @property
    def said_text(self) -> str:
        """The honest answer with its unit; "(modelled)" where both are."""
        return f"{self._in_unit(self.said)}{' (modelled)' if self.kinds == ('modelled', 'modelled') else ''}"

    def _in_unit(self, answer: Estimate) -> str:
        return str(answer.scaled(100, "%") if self.way.unit == "1" else answer)

    @property
    def fools(self) -> bool:
        """Whether this run shows that the fooling answer differs from the honest one."""
        return self.gap.n >= measure.fewest() and measure.differs(self.gap)

    @property
    def fools_much(self) -> bool:
        """Whether this run shows that it does so by more than 5 %."""
        return self.fools and (self.gap.low > 1.05 or self.gap.high < 1 / 1.05)

    @property
    def factor(self) -> float:
        """By how much it fools, in either direction: at least 1."""
        return max(self.gap.value, 1 / self.gap.value)


def row(run: Records, way: Way) -> Row | None:
    """Both answers of a way; None if this run has left it out."""
    if not len(run.where("fooled", way=way.key)):
        return None
    told, said = run.one("fooled", way=way.key), run.one("honest", way=way.key)
    gap = measure.paired_ratio(told.samples, said.samples)
    truth = way.truth or said.value
    honest = measure.estimate([s / truth for s in said.samples], "x")
    fooled = measure.estimate([s / truth for s in told.samples], "x") if way.truth else gap
    return Row(
        way,
        measure.estimate(told.samples, way.unit),
        measure.estimate(said.samples, way.unit),
        fooled,
        honest,
        gap,
        (told.kind, said.kind),
    )


def rows(run: Records) -> list[Row]:
    """All that this run has measured, in the order of WAYS."""
    return [found for way in WAYS.values() if (found := row(run, way))]


def left_out(run: Records) -> dict[str, str]:
    """{way: why it was not measured}."""
    return {r.case["way"]: r.case["because"] for r in run.where("left_out")}


def unsteady_pairs(run: Records, margin: float = 0.05) -> Estimate:
    """Share of single pairs of runs of the same code that differ by more than `margin`, with its 95 % interval."""
    factors = run.one("fooled", way="single_pair").samples
    return measure.proportion(sum(f > 1 + margin for f in factors), len(factors))


def answer(run: Records) -> Iterator[str]:
    """Each way: what is told, what is so, and whether this run can tell them apart."""
    for found in rows(run):
        told = f"{found.way.title}: {found.way.quantity} told as {found.told_text}, honestly {found.said_text}"
        yield f"{told}; {found.gap} of it." if found.fools else f"{told}; no difference that this run can show."
    if len(run.where("fooled", way="single_pair")):
        yield f"Single pairs of the same code that differ by more than 5 %: {unsteady_pairs(run).scaled(100, '%')}."
    for way, why in left_out(run).items():
        yield f"{WAYS[way].title}: not measured, {why}."
