"""How many workers does a model need?

    python -m labs.loader_workers --nproc 1      |      python -m labs.loader_workers --nproc 1 --model-rate 1.5

About 8 s on 2 CPU cores. Compares two data sets: photos, whose items compute (they decode a JPEG), and items that wait,
as for a server. The model stands in for a GPU: its step sleeps, so it takes no core from the workers. It consumes
`model_rate` times as many items as one worker delivers, so the rule asks for that many workers, rounded up.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt, Le
from torch.utils.data import Dataset

from labs.common.loading import feed
from labs.common.loading.images import photos
from labs.kit import cli, measure
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

FED = 0.9
"""A model counts as fed if it reaches this share of its rate: handing over a batch takes some time."""
CPU = torch.device("cpu")  # the step sleeps on the host, so there is nothing to synchronise


@dataclass(frozen=True)
class Config:
    """How fast the model is, how items are made, and how long to measure."""

    model_rate: Annotated[float, Gt(0), Le(16)] = 2.5
    """The model's rate, as a multiple of one worker's."""
    wait_ms: Annotated[float, Gt(0)] = 6.0
    """Waiting time per item of the second data set, in ms."""
    batch_size: Annotated[int, Ge(1)] = 8
    """Items per batch."""
    cores: Annotated[int, Ge(0)] = 2
    """CPU cores that the workers may use; 0: all."""
    rounds: Annotated[int, Ge(2)] = 2
    """Number of rounds; each number of workers takes one turn per round."""
    smoke: bool = False
    """Run two rounds, with batches of one item."""


class Remote(Dataset):
    """Items that wait for a server and compute nothing."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s = wait_s

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, i: int) -> tuple[int, int]:
        time.sleep(self.wait_s)
        return i, 0


def workers_needed(model_rate: float, worker_rate: float) -> int:
    """Return how many workers feed the model if each delivers `worker_rate` regardless of the others. Same units."""
    return math.ceil(model_rate / worker_rate)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Yield one worker's items per second, then the share of its rate that the model reaches with 1, 2, ... workers."""
    if rank.rank == 0:
        with feed.on_cores(rank, config.cores):
            yield from measured(config, rank)
    rank.barrier()


def measured(config: Config, rank: Rank) -> Iterator[Record]:
    """Measure in rounds: one worker alone sets the model's rate for the rest of its round."""
    sets = {"compute": photos(), "wait": Remote(config.wait_ms / 1e3)}
    needed = workers_needed(config.model_rate, 1)
    tried = range(1, needed + 2)
    rounds, least_s, batch = (2, 0.0, 1) if config.smoke else (config.rounds, 0.08, config.batch_size)
    one: dict[str, list[float]] = {items: [] for items in sets}
    share: dict[tuple[str, int], list[float]] = {(items, n): [] for items in sets for n in tried}
    for done in range(rounds):
        for items, data in sets.items():
            one[items].append(rate(data, 1, batch, None, least_s))
            seconds = batch / (config.model_rate * statistics.median(one[items]))

            def step(batch: Any, seconds: float = seconds) -> None:
                time.sleep(seconds)

            stored = torch.zeros(batch)
            model = feed.drive(feed.alone(stored), step, 5, CPU).parts(1)[0][1]
            for n in tried:
                share[items, n].append(rate(data, n, batch, step, least_s) / model)
        rank.progress(done + 1, rounds, f"round {done + 1} of {rounds}")
    yield rank.record("workers_needed", "1", needed, kind="modelled", rank=0, model_rate=config.model_rate)
    for items, rates in one.items():
        yield rank.record("items_per_s", "1/s", rates, rank=0, items=items, workers=1)
    for (items, n), shares in share.items():
        yield rank.record("model_share", "1", shares, rank=0, items=items, workers=n)


def rate(data: Dataset, workers: int, batch: int, step: Callable[[Any], None] | None, least_s: float) -> float:
    """Return items per second of a fresh loader with `step` after each batch; batches ready beforehand don't count."""
    with feed.running(feed.endless(data, workers, batch)) as batches:
        skip, fewest = feed.ready(workers), 2 * workers
        return feed.drive(batches, step, fewest, CPU, skip=skip, wave=workers, least_s=least_s).parts(1)[0][1]


def enough(records: Records, items: str) -> int | None:
    """Return the fewest workers tried that feed the model; None if none do."""
    found = sorted(records.where("model_share", items=items), key=lambda r: r.case["workers"])
    return next((r.case["workers"] for r in found if r.value >= FED), None)


def category(records: Records) -> str:
    """Say how many workers feed the model, for items that wait and for items that compute."""
    return ", ".join(f"{items}: {enough(records, items) or 'never'}" for items in ("wait", "compute"))


def answer(records: Records) -> Iterator[str]:
    """Yield what the rule asks for, and how many workers were enough."""
    needed = records.one("workers_needed")
    yield f"A model {needed.case['model_rate']:g} times as fast as one worker should need {needed.value:.0f} workers."
    for items in ("wait", "compute"):
        shares = sorted(records.where("model_share", items=items), key=lambda r: r.case["workers"])
        said = ", ".join(f"{r.case['workers']}: {measure.estimate(r.samples).scaled(100, '%')}" for r in shares)
        n = enough(records, items)
        yield f"Items that {items}: {f'{n} are enough' if n else 'no number tried is enough'} (workers: share; {said})."


if __name__ == "__main__":
    cli.main()
