"""Does the loader keep the device busy, and which settings matter?

    python -m labs.dataloader --nproc 1
    python -m labs.dataloader --nproc 1 --parts sweep --workers 0 1 2 4 8 --batches 16 64 256
    torchrun --nproc-per-node 1 -m labs.dataloader

About 25 s on 2 CPU cores, once the JPEG tiles have been cut. Rank 0 trains and loads; its workers may use all cores.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from labs.common.data.tiles import tiles
from labs.common.loading.feed import Feed, alone, drive, endless, expected, expected_on_cores, ready, running
from labs.common.loading.image_datasets import JpegFolder
from labs.common.loading.rates import compared, counted, may_be_equal, quotient
from labs.common.loading.tile_training import WIDTHS, Trainer, Watched
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records

LEAST_TIMED, IN_TURN = 5, 2  # batches of each loader; loaders of each case that is compared in turn
Part = Literal["prediction", "timeline", "sweep", "transfer"]
SMOKE = {"workers": (0, 1), "batches": (4,), "batch_size": 4}  # with --smoke in a shell


@dataclass(frozen=True)
class Config:
    """The images, the models and the settings to try."""

    parts: tuple[Part, ...] = get_args(Part)
    """What to measure; transfer needs a GPU."""
    images: int = 1024
    """JPEG tiles of 512 x 384 pixels, cut once and kept; each is decoded and resized to 224 x 224."""
    batch_size: int = 16
    """Images per batch, where the batch is not what varies."""
    models: tuple[Literal["light", "even", "heavy"], ...] = ("light", "even", "heavy")
    """Convolutional networks, from much faster to much slower than one loading process."""
    workers: tuple[int, ...] = (0, 1, 2, 4)
    """num_workers to try."""
    batches: tuple[int, ...] = (4, 16, 32)
    """Batch sizes of the sweep."""
    seconds: float = 15.0
    """Time for what is timed in all parts together, in s, equally long for each loader and model.

    A part takes its share, a slower machine times fewer batches. What starts workers, and the timeline, come on top.
    """
    timed: int | None = None
    """Batches that are timed in each case, after those that were ready before; each worker has as many: rounded up.

    By default as many as fit into its part of `seconds`, at least 5.
    """
    seed: int = 0
    """Seed of the model."""
    smoke: bool = False
    """Few images, cases and batches."""

    def __post_init__(self) -> None:
        require(
            bool(self.parts and self.models and self.workers and self.batches),
            "parts, models, workers and batches must each hold something",
        )
        require(self.images >= 64, f"images must be at least 64, not {self.images}")
        require(min(self.workers) >= 0, f"workers must not be negative: {min(self.workers)}")
        require(min(*self.batches, self.batch_size) >= 1, "batch_size and batches must be at least 1")
        measure.require_budget(self.seconds, None)
        require(self.timed is None or self.timed >= 2, f"timed must be at least 2, not {self.timed}")
        largest = max(*self.batches, self.batch_size)
        require(largest <= self.images, f"a batch of {largest} needs as many images: raise images or lower the batch")


def predict(model: float, loader: float, one: float, workers: int, cores: int) -> dict[str, float]:
    """Images per second of both together by the two formulas: the slower one, and the same on shared cores."""
    return {
        "the slower one": expected(model, loader, workers),
        "shared cores": expected_on_cores(model, loader, one, workers, cores),
    }


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 does everything; other ranks only wait. Its workers may run on all cores of the job."""
    if rank.rank == 0:
        cut = tiles(
            64 if config.smoke else config.images, progress=lambda n, all: rank.progress(n, all, "cutting tiles")
        )
        data = JpegFolder(cut.paths, cut.labels)
        for done, part in enumerate(config.parts, start=1):
            with unpinned(rank):
                yield from PARTS[part](data, config, rank)
            rank.progress(done, len(config.parts), part)
    rank.barrier()


def one_batch(data: Dataset, size: int) -> tuple[Tensor, Tensor]:
    """The first `size` items as one batch, loaded beforehand: what a DataLoader's default `collate_fn` does."""
    images, labels = zip(*(data[i] for i in range(size)), strict=True)
    return torch.stack(images), torch.tensor(labels)


def _feed(
    data: Dataset,
    step: Any,
    config: Config,
    rank: Rank,
    workers: int,
    batch: int,
    *,
    every_step: bool = True,
    **options: Any,
) -> Feed:
    """Drive a fresh loader; its workers are gone when this returns."""
    skip = ready(workers, options.get("prefetch_factor") or 2)
    with running(endless(data, workers, batch, **options)) as batches:
        return drive(
            batches,
            step,
            device=rank.device,
            skip=skip,
            wave=max(1, workers),
            every_step=every_step,
            **_how_long(config, batch),
        )


def _how_long(config: Config, batch: int) -> dict[str, Any]:
    """How many batches to time, and for how long at least. Small batches are more, or they would be all noise."""
    if config.smoke:
        return {"timed": 2}
    usual, least_s = config.timed or LEAST_TIMED, 0.0 if config.timed else config.seconds / feeds(config)
    as_many_images = min(max(3, usual * config.batch_size // batch), 4 * usual)
    return {"timed": usual if batch == config.batch_size else as_many_images, "least_s": least_s}


def feeds(config: Config) -> int:
    """How many loaders and models are timed one after the other, if all parts run."""
    n = len(config.workers)
    return 2 * n * (1 + len(config.models)) + (n * len(config.batches) + 4) * IN_TURN


def _rate(rank: Rank, feed: Feed, way: str, **case: Any) -> Record:
    return rank.record("images_per_s", "1/s", feed.samples_per_s(), rank=0, way=way, batch=feed.batch, **case)


def prediction(data: Dataset, config: Config, rank: Rank) -> Iterator[Record]:
    """Model alone, loader alone, both: for every model and number of workers.

    What is alone is measured again beside every run of both, since a machine is not equally fast all the time.
    """
    workers = config.workers[:2] if config.smoke else config.workers
    stored = one_batch(data, config.batch_size)
    names = config.models[:1] if config.smoke else config.models
    steps = {model: Trainer(WIDTHS[model], rank.device, config.seed) for model in names}
    models: dict[str, list[float]] = {model: [] for model in names}
    for n in workers:
        loader = list(_feed(data, None, config, rank, n, config.batch_size).samples_per_s())
        for model, step in steps.items():
            how_long = _how_long(config, config.batch_size)
            models[model] += drive(alone(stored), step, device=rank.device, skip=2, **how_long).samples_per_s()
            both = _feed(data, step, config, rank, n, config.batch_size)
            yield _rate(rank, both, "both", model=model, workers=n)
            yield rank.record("wait_share", "1", both.wait_share, rank=0, model=model, workers=n)
        loader += _feed(data, None, config, rank, n, config.batch_size).samples_per_s()
        yield rank.record("images_per_s", "1/s", loader, rank=0, way="loader", batch=config.batch_size, workers=n)
    for model, rates in models.items():
        yield rank.record("images_per_s", "1/s", rates, rank=0, way="model", batch=config.batch_size, model=model)


def timeline(data: Dataset, config: Config, rank: Rank) -> Iterator[Record]:
    """Who loaded which batch when, and when the trainer waited: two workers, the lightest and the heaviest model."""
    for model in dict.fromkeys((config.models[0], config.models[-1])):
        step, workers = Trainer(WIDTHS[model], rank.device, config.seed), 2
        spans: dict[str, list[tuple[float, float]]] = {"waits": [], "trains": []}
        with running(endless(Watched(data), workers, config.batch_size)) as batches:
            for _ in range(4 if config.smoke else 14):
                asked = time.perf_counter()
                images, labels, worker, seconds = next(batches)
                got = time.perf_counter()
                step((images, labels))
                spans["waits"].append((asked, got))
                spans["trains"].append((got, time.perf_counter()))
                loaded = (seconds[:, 0].min().item(), seconds[:, 1].max().item())
                spans.setdefault(f"worker {int(worker[0])}", []).append(loaded)
        zero = min(start for found in spans.values() for start, _ in found)
        for who, found in spans.items():
            for edge, values in zip(("start_s", "end_s"), zip(*found, strict=True), strict=True):
                yield rank.record(edge, "s", [v - zero for v in values], rank=0, who=who, model=model)


def sweep(data: Dataset, config: Config, rank: Rank) -> Iterator[Record]:
    """Loader alone over workers and batch size, all cells in turn: one run of each would crown the luckiest."""
    sizes = config.batches[:1] if config.smoke else config.batches
    cells = list(itertools.product(sizes, config.workers[:2] if config.smoke else config.workers))
    turns = [[_feed(data, None, config, rank, n, batch) for batch, n in cells] for _ in range(IN_TURN)]
    for (batch, n), feeds_ in zip(cells, zip(*turns, strict=True), strict=True):
        samples = [rate for feed in feeds_ for rate in feed.samples_per_s()]
        yield rank.record("images_per_s", "1/s", samples, rank=0, way="sweep", batch=batch, workers=n)


def _in_turn(cases: Sequence[tuple[dict[str, Any], Callable[[], Feed]]], rank: Rank) -> Iterator[Record]:
    """Two feeds of each case, taken in turn, so that a slow spell hits all of them."""
    found = [[feed() for _, feed in cases] for _ in range(IN_TURN)]
    for k, (case, _) in enumerate(cases):
        samples = [rate for turn in found for rate in turn[k].samples_per_s()]
        yield rank.record("images_per_s", "1/s", samples, rank=0, way="both", batch=found[0][k].batch, **case)


def transfer(data: Dataset, config: Config, rank: Rank) -> Iterator[Record]:
    """pin_memory and non_blocking, all four ways: nothing without a GPU, where there is nothing to copy to."""
    if rank.device.type != "cuda":
        return
    workers, cases = max(config.workers), []
    for pin, non_blocking in itertools.product((False, True), repeat=2):
        step = Trainer(WIDTHS["even"], rank.device, config.seed, non_blocking)
        # no synchronisation between steps: it would undo the overlap that is to be measured
        feed = functools.partial(
            _feed, data, step, config, rank, workers, config.batch_size, every_step=False, pin_memory=pin
        )
        cases.append(({"model": "even", "pin_memory": pin, "non_blocking": non_blocking, "workers": workers}, feed))
    yield from _in_turn(cases, rank)


PARTS = {
    "prediction": prediction,
    "timeline": timeline,
    "sweep": sweep,
    "transfer": transfer,
}


def comparisons(records: Records, cores: int) -> list[dict[str, Any]]:
    """One row per model and number of workers: measured rates, both predictions, and measured / predicted."""
    rows = []
    plain = [
        r for r in records.where("images_per_s", way="both") if set(r.case) == {"way", "model", "workers", "batch"}
    ]
    for both in plain:
        model, n = both.case["model"], both.case["workers"]
        alone_, loader = (
            records.one("images_per_s", way="model", model=model).value,
            records.one("images_per_s", way="loader", workers=n).value,
        )
        one = records.one("images_per_s", way="loader", workers=0).value
        found = predict(alone_, loader, one, n, cores)
        rows.append({"model": model, "workers": n, "measured": both, "alone": alone_, "loader": loader, **found})
    return rows


def as_fast(records: Records, **case: Any) -> tuple[Record, list[Record]]:
    """Of the rates with this case: the one with the largest median, and all that cannot be told from it, itself too."""
    rows = records.where("images_per_s", **case)
    best = max(rows, key=lambda r: r.value)
    return best, [r for r in rows if r is best or may_be_equal(best, r)]


def answer(run: Records) -> Iterator[str]:
    """For each model its best number of workers and what limits; the best cell of the sweep; pinned memory."""
    for alone_ in run.where("images_per_s", way="model"):
        model = alone_.case["model"]
        both = [
            r
            for r in run.where("images_per_s", way="both", model=model)
            if set(r.case) == {"way", "model", "workers", "batch"}
        ]
        if both:
            best = max(both, key=lambda r: r.value)
            if min(len(best.samples), len(alone_.samples)) < 2:
                yield f"{model} model: single samples, of which nothing can be said. Raise --seconds or --timed."
                continue
            share = quotient(best, alone_).scaled(100, "%")
            fed = "the loader, or cores that both share, limit" if share.high < 95 else "the model may be what limits"
            fed = "the model limits" if share.low >= 95 else fed
            yield (
                f"{model} model: with {counted(best.case['workers'])} it reaches most, {share} of its own "
                f"{alone_.value:,.0f} images/s: {fed}."
            )
    if len(run.where("images_per_s", way="sweep")):
        best, tied = as_fast(run, way="sweep")
        others = sorted({r.case["workers"] for r in tied} - {best.case["workers"]})
        known = f"; {', '.join(map(str, others))} cannot be told from it" if others else ""
        yield (
            f"The loader alone is fastest with {counted(best.case['workers'])} and batches of "
            f"{best.case['batch']}, {best.value:,.0f} images/s{known}."
        )
    both = run.where("images_per_s", way="both")
    ways = {(r.case["pin_memory"], r.case["non_blocking"]): r for r in both if "pin_memory" in r.case}
    if ways:
        yield f"{compared(ways[True, True], ways[False, False], 'pin_memory with non_blocking over neither')}."


if __name__ == "__main__":
    cli.main()
