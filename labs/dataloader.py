"""Which is slower, the loader or the model? And how fast are both together?

    python -m labs.dataloader --nproc 1      |      python -m labs.dataloader --nproc 1 --workers 4 --cores 0
    python -m labs.dataloader --nproc 1 --dataset my_package.my_module:photos --model my_package.my_module:cnn

About 9 s on 2 CPU cores. These take turns: the model alone on one stored batch, the loader alone, and both together,
each with and without workers. In one more arm the step sleeps for as long as the model's step takes. It stands in for a
separate device, which leaves the CPU cores to the workers. Only rank 0 measures, with one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt

from labs.common.loading import feed
from labs.common.loading.images import training_step
from labs.kit import cli, measure
from labs.kit.lab import imported, require_findable
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

WITHIN = 0.15
"""The rule holds if the measured rate is within this share of the expected one."""


@dataclass(frozen=True)
class Config:
    """What to load, what to train, and how long to measure."""

    dataset: str = "labs.common.loading.images:photos"
    """package.module:factory, or in a notebook a function: returns a map-style dataset of (uint8 image, label)."""
    model: str = "labs.common.loading.images:cnn"
    """package.module:factory, or in a notebook a function: returns a module that takes a batch of float images."""
    batch_size: Annotated[int, Ge(1)] = 16
    """Images per batch."""
    workers: Annotated[int, Ge(1)] = 2
    """num_workers to compare with 0."""
    cores: Annotated[int, Ge(0)] = 2
    """CPU cores that training and workers may use; 0: all."""
    rounds: Annotated[int, Ge(2)] = 9
    """Number of rounds; each arm takes one turn per round."""
    block_s: Annotated[float, Gt(0)] = 0.06
    """Minimum duration of a turn, in s."""
    smoke: bool = False
    """Run two rounds of two batches."""

    def __post_init__(self) -> None:
        require_findable(self.dataset, "dataset")
        require_findable(self.model, "model")


def check_layout(config: Config, world_size: int) -> None:
    """Raise BadInput if a factory can't be imported."""
    imported(config.dataset, "dataset")
    imported(config.model, "model")


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Measure on rank 0 while the other ranks wait."""
    if rank.rank == 0:
        dataset = imported(config.dataset, "dataset")()
        step = training_step(imported(config.model, "model")(), rank.device)
        with feed.on_cores(rank, config.cores):
            yield from measured(config, rank, dataset, step)
    rank.barrier()


def measured(config: Config, rank: Rank, dataset: Any, step: Callable[[Any], None]) -> Iterator[Record]:
    """Yield each arm's images per second; where the model trains, also the share of time spent waiting and step
    seconds.
    """
    n, least_s = config.workers, 0.0 if config.smoke else config.block_s
    with ExitStack() as stack:
        loaders = {w: stack.enter_context(feed.running(feed.endless(dataset, w, config.batch_size))) for w in (0, n)}
        stored = next(loaders[0])
        measure.time_steps(lambda: step(stored), 3 if config.smoke else 15, rank.device)
        step_s = [0.0]

        def sleep(batch: Any) -> None:
            time.sleep(step_s[-1])  # as long as the model's step took in this round

        def turn(source: Iterator[Any], do: Any, workers: int) -> feed.Feed:
            skip = feed.ready(workers) if workers else 0
            return feed.drive(source, do, 2, rank.device, skip=skip, wave=max(1, workers), least_s=least_s)

        arms: dict[tuple[str, int, str], Callable[[], feed.Feed]] = {
            ("model", 0, "computes"): lambda: turn(feed.alone(stored), step, 0)
        }
        for w in (0, n):
            arms["loader", w, "none"] = lambda w=w: turn(loaders[w], None, w)
            arms["both", w, "computes"] = lambda w=w: turn(loaders[w], step, w)
        arms["both", n, "sleeps"] = lambda: turn(loaders[n], sleep, n)
        found: dict[tuple[str, int, str], list[feed.Feed]] = {arm: [] for arm in arms}
        rounds = 2 if config.smoke else config.rounds
        for done in range(rounds):
            for arm, measure_once in arms.items():
                found[arm].append(measure_once())
                if arm[0] == "model":
                    step_s.append(statistics.fmean(found[arm][-1].work_s))
            rank.progress(done + 1, rounds, f"round {done + 1} of {rounds}")
        for (way, workers, what), feeds in found.items():
            case = {"way": way, "workers": workers, "step": what}
            yield rank.record("images_per_s", "1/s", [f.parts(1)[0][1] for f in feeds], rank=0, **case)
            if way != "loader":
                waits = [f.parts(1)[0][0] for f in feeds]
                yield rank.record("wait_share", "1", waits, rank=0, **case)
                yield rank.record("step_s", "s", [statistics.fmean(f.work_s) for f in feeds], rank=0, **case)


def over_expected(records: Records) -> dict[tuple[int, str], measure.Estimate]:
    """Return {(workers, what the step does): measured over expected rate of loader and model together}, by round."""
    model = records.one("images_per_s", way="model").samples
    found = {}
    for both in records.where("images_per_s", way="both"):
        workers = both.case["workers"]
        loader = records.one("images_per_s", way="loader", workers=workers).samples
        expected = [feed.expected(m, rate, workers) for m, rate in zip(model, loader, strict=True)]
        found[workers, both.case["step"]] = measure.paired_ratio(both.samples, expected)
    return found


def category(records: Records) -> str:
    """Say whether the rule holds without workers, and with workers beside a step that sleeps or computes."""
    said = []
    for (workers, step), ratio in over_expected(records).items():
        said.append(f"{workers} workers, step {step}: {'holds' if abs(ratio.value - 1) <= WITHIN else 'fails'}")
    return "; ".join(said)


def answer(records: Records) -> Iterator[str]:
    """Yield the rate of each side alone, and how far both together are from the rule."""
    model = records.one("images_per_s", way="model").value
    for (workers, step), ratio in over_expected(records).items():
        loader = records.one("images_per_s", way="loader", workers=workers).value
        both = records.one("images_per_s", way="both", workers=workers, step=step).value
        yield (
            f"With {workers} workers: model {model:,.0f} images/s, loader {loader:,.0f}, together {both:,.0f} if the "
            f"step {step}, {ratio} of what the slower side or, without workers, taking turns would give."
        )


if __name__ == "__main__":
    cli.main()
