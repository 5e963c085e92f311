"""Which num_workers is the smallest that keeps your model busy?

    python -m labs.tune_dataloader --nproc 1 --dataset my_package.my_module:factory --batch-size 64

    tuning = tune_dataloader(dataset, step, batch_size=64)
    loader = DataLoader(dataset, 64, shuffle=True, **tuning.settings)

About 7 s on 2 CPU cores. The factory takes no arguments and returns (map-style dataset, training step that takes a
batch) and optionally, as a third element, a dictionary of DataLoader options. The step moves the batch to the device,
and it really trains, so pass a copy of a model that you want to keep. Without --dataset, loads the course's photos as
if from a server that takes 18 ms each, for a simulated GPU whose step sleeps.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from labs.common.loading import feed
from labs.common.loading.images import Photos, photos
from labs.kit import cli
from labs.kit.errors import BadInput, require
from labs.kit.host import core_count
from labs.kit.lab import imported, require_findable
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records

if TYPE_CHECKING:
    import pandas

CLOSE = 0.9
"""The fewest workers that reach this share of the best rate win."""
HOPELESS = 0.6
"""Skip numbers of workers whose expected rate is below this share of the best expected one."""
GAIN = 1.1
"""Stop if twice as many workers speed the loader up by less than this factor."""
OWN = ("batch_size", "num_workers", "shuffle", "sampler", "batch_sampler", "drop_last", "persistent_workers")
TURN_S, MOST_ROUNDS = 0.25, 6


@dataclass(frozen=True)
class Tuning:
    """Rates in samples per second: the model alone, and the loader alone and both together by number of workers."""

    model: Sequence[float]
    loader: Mapping[int, float]
    both: Mapping[int, Sequence[float]]

    @property
    def workers(self) -> int:
        """The fewest workers that reach CLOSE of the best rate."""
        return cheapest({w: statistics.median(rates) for w, rates in self.both.items()})

    @property
    def settings(self) -> dict[str, int | bool]:
        """Arguments for DataLoader. Persistent workers, because otherwise each epoch waits for new ones."""
        return {"num_workers": self.workers} | ({"persistent_workers": True} if self.workers else {})

    @property
    def table(self) -> pandas.DataFrame:
        """Samples per second by number of workers."""
        import pandas

        rows = [
            {"num_workers": w, "loader alone": rate, "both together": statistics.median(self.both[w])}
            if w in self.both
            else {"num_workers": w, "loader alone": rate}
            for w, rate in self.loader.items()
        ]
        return pandas.DataFrame(rows).set_index("num_workers").assign(**{"model alone": statistics.median(self.model)})

    def __str__(self) -> str:
        """Return what to set, the rate it gives, and what limits it."""
        workers, model = self.workers, statistics.median(self.model)
        rate, loader = statistics.median(self.both[workers]), self.loader[workers]
        said = f"num_workers={workers}: {rate:,.0f} samples/s, {rate / model:.0%} of the model alone."
        if rate >= 0.9 * model:
            return f"{said} The model limits: a faster loader can't help."
        if workers and rate < 0.85 * min(model, loader):
            return f"{said} The loader alone gives {loader:,.0f}: the step and the workers seem to share cores."
        return f"{said} The loader limits, with {loader:,.0f} alone: do less per sample, or store it in another format."


def tune_dataloader(
    dataset: Dataset,
    step: feed.Step,
    *,
    batch_size: int,
    budget_s: float = 15.0,
    max_workers: int | None = None,
    device: torch.device | str | None = None,
    **loader_options: Any,
) -> Tuning:
    """Measure the model and the loader alone, then interleave promising numbers of workers with both together.

    Tries 0, 1, 2, 4, 8, ... workers, up to twice the cores (at least 8), and stops when more don't help.
    Synchronises `device` after a step, by default the accelerator if there is one. BadInput if an argument is wrong.
    """
    most = max(8, 2 * core_count()) if max_workers is None else max_workers
    _check(dataset, batch_size, most, loader_options)
    place = torch.device(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")
    deadline = time.perf_counter() + budget_s
    with ExitStack() as stack:
        loaders: dict[int, Iterator[Any]] = {}

        def turn(workers: int, do: feed.Step | None) -> float:
            """Return one turn's samples per second; loaders stay open, so workers start only once."""
            if workers not in loaders:
                loader = feed.endless(dataset, workers, batch_size, **loader_options)
                loaders[workers] = stack.enter_context(feed.running(loader))
            skip = feed.ready(workers, loader_options.get("prefetch_factor", 2)) if workers else 0
            found = feed.drive(
                loaders[workers], do, 2, place, skip=skip, wave=max(1, workers), least_s=TURN_S, deadline=latest
            )
            return found.parts(1)[0][1] if found.wait_s else math.nan

        latest = math.inf  # measure each once, whatever the budget
        turn(0, None)
        stored = next(loaders[0])
        _try(step, stored)
        model = [feed.drive(feed.alone(stored), step, 3, place, skip=2, least_s=TURN_S).parts(1)[0][1]]
        alone: dict[int, float] = {}
        for workers in ladder(most):
            alone[workers] = turn(workers, None)
            if is_enough(model[0], alone):
                break
        both: dict[int, list[float]] = {w: [] for w in finalists(model[0], alone)}
        for done in range(MOST_ROUNDS):
            latest = math.inf if done == 0 else deadline
            rates = {w: turn(w, step) for w in both}
            if any(map(math.isnan, rates.values())):
                break
            for workers, rate in rates.items():
                both[workers].append(rate)
            model.append(feed.drive(feed.alone(stored), step, 3, place, least_s=TURN_S / 2).parts(1)[0][1])
    return Tuning(model, alone, both)


def _check(dataset: Any, batch_size: int, most: int, options: dict[str, Any]) -> None:
    require(
        not isinstance(dataset, IterableDataset), "an iterable dataset divides itself among workers: not tuned here"
    )
    for method in ("__getitem__", "__len__"):
        require(hasattr(dataset, method), f"the dataset, a {type(dataset).__name__}, needs {method}")
    require(0 < batch_size <= len(dataset), f"batch_size must be 1 to {len(dataset)} (samples), not {batch_size}")
    require(most >= 0, f"max_workers must not be negative: {most}")
    own = [name for name in OWN if name in options]
    require(not own, f"leave out {', '.join(own)}: the tuner decides on order and workers itself")


def _try(step: feed.Step, batch: Any) -> None:
    try:
        step(batch)
    except Exception as e:
        raise BadInput(f"your step fails: {type(e).__name__}: {e}") from e


def ladder(most: int) -> list[int]:
    """Return 0, 1, 2, 4, 8, ... and `most` itself."""
    return [*(w for w in [0, *(2**i for i in range(most.bit_length()))] if w < most), most]


def is_enough(model: float, loader: Mapping[int, float]) -> bool:
    """Judge from both sides' rates alone whether more workers than those in `loader` (ascending) wouldn't help."""
    *before, last = loader
    if last < 2:
        return False
    return loader[last] >= 2 * model or loader[last] < GAIN * loader[before[-1]]


def finalists(model: float, loader: Mapping[int, float]) -> list[int]:
    """Return the numbers of workers that may be best together, judging by both sides' rates alone."""
    rates = {w: feed.expected(model, rate, w) for w, rate in loader.items()}
    return [w for w in rates if rates[w] >= HOPELESS * max(rates.values())]


def cheapest(rates: Mapping[int, float]) -> int:
    """Return the fewest workers whose rate is CLOSE to the best."""
    return min(w for w in rates if rates[w] >= CLOSE * max(rates.values()))


@dataclass(frozen=True)
class Config:
    """What to tune."""

    dataset: str = "labs.tune_dataloader:remote_photos"
    """package.module:factory that returns (dataset, step) or (dataset, step, DataLoader options)."""
    batch_size: Annotated[int, Ge(1)] = 4
    """Samples per batch."""
    budget_s: Annotated[float, Gt(0)] = 6.0
    """Start no further round after this many seconds."""
    smoke: bool = False
    """Try at most one worker, in 1 s."""

    def __post_init__(self) -> None:
        require_findable(self.dataset, "dataset")


class RemotePhotos(Photos):
    """Photos from a server that takes 18 ms to answer."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        time.sleep(0.018)
        return super().__getitem__(i)


def remote_photos() -> tuple[Dataset, feed.Step]:
    """Return the course's photos and a simulated GPU that trains on 140 images per second."""
    local = photos()
    return RemotePhotos(local.paths, local.labels), lambda batch: time.sleep(len(batch[0]) / 140)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Tune on rank 0, with workers on all cores of the job, and yield the rates."""
    if rank.rank == 0:
        made = imported(config.dataset, "dataset")()
        good = isinstance(made, tuple) and len(made) in (2, 3) and callable(made[1])
        require(good, f"dataset {config.dataset!r} must return (dataset, step), not {type(made).__name__}")
        options = made[2] if len(made) == 3 else {}
        require(isinstance(options, dict), f"dataset {config.dataset!r}: options of DataLoader must be a dictionary")
        most, budget_s = (1, 1.0) if config.smoke else (None, config.budget_s)
        with unpinned(rank):
            tuning = tune_dataloader(
                *made[:2], batch_size=config.batch_size, budget_s=budget_s, max_workers=most, device=rank.device,
                **options,
            )  # fmt: skip
            yield rank.record("samples_per_s", "1/s", tuning.model, rank=0, way="model")
            for workers, rate in tuning.loader.items():
                yield rank.record("samples_per_s", "1/s", rate, rank=0, way="loader", workers=workers)
            for workers, rates in tuning.both.items():
                yield rank.record("samples_per_s", "1/s", rates, rank=0, way="both", workers=workers)
    rank.barrier()


def tuned(records: Records) -> Tuning:
    """Rebuild the Tuning from a run's records."""
    loader = {r.case["workers"]: r.value for r in records.where("samples_per_s", way="loader")}
    both = {r.case["workers"]: r.samples for r in records.where("samples_per_s", way="both")}
    return Tuning(records.one("samples_per_s", way="model").samples, loader, both)


def category(records: Records) -> str:
    """Say what the tuner sets."""
    return f"num_workers={tuned(records).workers}"


def answer(records: Records) -> Iterator[str]:
    """Yield what to set, and the rates."""
    tuning = tuned(records)
    yield str(tuning)
    for workers, rates in tuning.both.items():
        rate = statistics.median(rates)
        yield f"{workers} workers: loader {tuning.loader[workers]:,.0f}, together {rate:,.0f} samples/s."


if __name__ == "__main__":
    cli.main()
