"""What does the format of the dataset cost: images per second, disk, start-up, memory per worker?

    python -m labs.dataset_formats
    python -m labs.dataset_formats --nproc 1 --images 1024 --side 160

About 8 s on 2 CPU cores. The same images as JPEG files, tar shards, a decoded memory map and a cache in RAM are read
in turn, in the same random order, by one process: a DataLoader without workers, batches collated. The limit is
a copy of the same bytes from memory to memory. Files that were just written or read are in the system's page cache
("warm"); where the system lets them be evicted, reads from the disk are measured, too ("cold").
"""

import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from labs.common.data import photos
from labs.common.data.tiles import tiles
from labs.common.loading.image_datasets import JpegFolder, MemoryMap, RamCache
from labs.dataset_formats.image_formats import JPEG, MAP, RAM, TAR, Formats, formats_of, listed
from labs.dataset_formats.page_cache import can_evict, evict, flush, private_bytes
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records

COPY, AHEAD = "memory copy", "memory map, read ahead"
DECODES, DATASETS = (JPEG, TAR), (JPEG, TAR, MAP, RAM)
DISK_BYTES = 2**24  # read from the disk to learn its rate
TILES = 1024  # the default of all labs on tiles: cut once


@dataclass(frozen=True)
class Config:
    """How many images, of which size, how often."""

    images: int = 512
    """Images of 512 x 384 pixels in each format."""
    batch: int = 64
    """Images per batch; formats that decode read one batch per turn, the others all images."""
    side: int = 224
    """Width and height in pixels of what a dataset returns, and of what the decoded formats store."""
    seconds: float = 3.5
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that all formats take turns; by default as many as fit into `seconds`, at least 6."""
    smoke: bool = False
    """48 images, 2 rounds."""

    def __post_init__(self) -> None:
        require(self.images >= 1, f"images must be at least 1, not {self.images}")
        require(1 <= self.batch <= self.images, f"batch must be 1 to {self.images} (images), not {self.batch}")
        require(1 <= self.side <= 4096, f"side must be 1 to 4,096 pixels, not {self.side}")
        measure.require_budget(self.seconds, self.rounds, least=2)


def predict(image_bytes: float, bytes_per_s: float, cpu_s: float = 0.0) -> float:
    """Images/s of one reader that first gets `image_bytes` and then computes for `cpu_s` on each image.

    An upper limit: bytes that are fetched in small pieces come more slowly than `bytes_per_s`.
    """
    return 1 / (image_bytes / bytes_per_s + cpu_s)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 reads, format by format; the others wait for it."""
    if config.smoke:
        config = replace(config, images=48, batch=8)
    if rank.rank == 0:
        yield from _alone(config, rank)
    rank.barrier()


def _alone(config: Config, rank: Rank) -> Iterator[Record]:
    with unpinned(rank):
        count = config.images if config.smoke else max(TILES, config.images)
        kept = tiles(count, progress=lambda done, total: rank.progress(done, total, "cutting tiles, once"))
    filled: list[RamCache] = []
    fill_s = measure.time_steps(
        lambda: filled.append(RamCache(listed(kept.folder, config.images, config.side))), 1, rank.device
    )
    formats = formats_of(kept, filled[0], config.side)
    rank.progress(1, 5, "formats are there")
    starts = {name: lambda make=make: make()[0] for name, make in formats.open.items()}
    startup_s = measure.interleave(starts, measure.rounds_of(config, part=0.05), rank.device) | {RAM: fill_s}
    datasets = {name: make() for name, make in formats.open.items()} | {RAM: filled[0]}
    for name in datasets:
        yield rank.record("disk_bytes", "B", formats.disk_bytes(name), rank=0, format=name)
        yield rank.record("startup_s", "s", startup_s[name], rank=0, format=name)
    yield rank.record("shared_bytes", "B", filled[0].images.nbytes, rank=0, format=RAM)
    rates = warm(datasets, config, rank) | drafts(formats.paths[JPEG], config, rank)
    for name, samples in rates.items():
        yield rank.record("images_per_s", "1/s", samples, rank=0, format=name, cache="warm")
    rank.progress(3, 5, "read from the page cache")
    for name, dataset in datasets.items():
        yield from with_worker(name, dataset, config, rank)
    rank.progress(4, 5, "read by a worker")
    yield from cold(datasets, formats, rates, config, rank)


def orders(images: int, take: int, seed: int) -> Iterator[list[int]]:
    """The next `take` of the images in random order, for ever; equal for all formats that take equally many."""
    order = np.random.default_rng(seed).permutation(images)
    for start in range(0, 2**62, take):
        yield order[np.arange(start, start + take) % images].tolist()


def read(dataset: Dataset, indices: Sequence[int], batch: int) -> None:
    """Read these items as a training loop does: collated into batches, in this order."""
    for _ in DataLoader(dataset, batch, sampler=indices):
        pass


def turns(dataset: Dataset, order: Iterator[list[int]], batch: int) -> Callable[[], object]:
    """A step that reads the next items of `order` at each call."""
    return lambda: read(dataset, next(order), batch)


def warm(datasets: dict[str, Dataset], config: Config, rank: Rank) -> dict[str, list[float]]:
    """Images/s of all formats and of the limit in turn, from the page cache."""
    images, target = datasets[RAM].images, torch.empty_like(datasets[RAM].images[: config.batch])
    take = {name: config.batch if name in DECODES else config.images for name in (*datasets, COPY)}
    steps = {name: turns(d, orders(config.images, take[name], 0), config.batch) for name, d in datasets.items()}
    steps[COPY] = lambda: [target[: len(part)].copy_(part) for part in images.split(config.batch)]
    for name in (MAP, RAM, COPY):
        steps[name]()  # the first pass maps the pages into this process
    seconds = measure.interleave(steps, measure.rounds_of(config, part=0.4), rank.device)
    return {name: [take[name] / s for s in seconds[name]] for name in steps}


def drafts(tile_paths: Sequence[Path], config: Config, rank: Rank) -> dict[str, list[float]]:
    """Images/s of whole photographs and of as many tiles: decoded at full size, and at a size that libjpeg offers."""
    paths = photos()[: min(len(tile_paths), 2 if config.smoke else 9)]
    labels, steps = range(len(paths)), {}
    for name, files in {"photo": paths, "tile": tile_paths[: len(paths)]}.items():
        for draft in (False, True):
            dataset = JpegFolder(files, labels, config.side, draft)
            steps[name + ", draft" * draft] = turns(dataset, orders(len(files), len(files), 0), len(files))
    seconds = measure.interleave(steps, measure.rounds_of(config, part=0.27), rank.device)
    return {name: [len(paths) / s for s in seconds[name]] for name in steps}


def with_worker(name: str, dataset: Dataset, config: Config, rank: Rank) -> Iterator[Record]:
    """One DataLoader worker: what it delivers once it runs, and the memory it adds to the job."""
    take = min(config.images, (3 if name in DECODES else 16) * config.batch)
    indices = next(orders(config.images, take, seed=1))
    others = set(multiprocessing.active_children())
    with unpinned(rank):
        loader = DataLoader(dataset, config.batch, sampler=indices, num_workers=1, persistent_workers=True)
        batches = iter(loader)
        try:
            seconds = measure.time_steps(lambda: next(batches), len(loader), rank.device)
            [worker] = set(multiprocessing.active_children()) - others
            size = private_bytes(worker.pid)
        finally:
            loader = batches = None  # ends the worker
        # in here, since a record notes the cores that are free to it
        found = [rank.record("worker_bytes", "B", size, rank=0, format=name)]
        if len(seconds) > 1:  # the first batch waits for the worker to start
            rates = [config.batch / s for s in seconds[1:]]
            found.append(rank.record("worker_images_per_s", "1/s", rates, rank=0, format=name))
    yield from found


def cold(
    datasets: dict[str, Dataset], formats: Formats, warm_rates: dict[str, list[float]], config: Config, rank: Rank
) -> Iterator[Record]:
    """Formats on disk in turn, each read after all files were evicted; nothing where the system keeps them.

    The prediction knows a format's rate from the page cache, and that of the disk when it is read front to back.
    """
    if not can_evict(formats.paths[JPEG][0]):
        return
    [file], ahead = formats.paths[MAP], MemoryMap(formats.paths[MAP][0], ahead=True)
    readers = {name: datasets[name] for name in (JPEG, TAR, MAP)} | {AHEAD: ahead}
    take, size = max(1, config.batch // 2), min(file.stat().st_size, DISK_BYTES)

    def forget() -> None:
        datasets[MAP].close()  # mapped pages stay
        ahead.close()
        for name in (JPEG, TAR, MAP):
            evict(formats.paths[name])

    rounds = measure.rounds_of(config, part=0.28)
    most = rounds if isinstance(rounds, int) else rounds.most
    indices = {i for order in islice(orders(config.images, take, 2), most) for i in order}
    flush([*(formats.paths[JPEG][i] for i in indices), *formats.paths[TAR], file])
    steps = {name: turns(d, orders(config.images, take, 2), take) for name, d in readers.items()}
    steps["disk"] = partial(front_to_back, file, size)
    seconds = measure.interleave(steps, rounds, rank.device, between=forget)
    disk = rank.record("disk_bytes_per_s", "B/s", [size / s for s in seconds["disk"]], rank=0)
    yield disk
    for name in readers:
        kind = MAP if name == AHEAD else name
        modelled = predict(
            formats.disk_bytes(kind) / config.images, disk.value, 1 / statistics.median(warm_rates[kind])
        )
        case = {"format": name, "cache": "cold"}
        yield rank.record("images_per_s", "1/s", [take / s for s in seconds[name]], rank=0, **case)
        yield rank.record("predicted_images_per_s", "1/s", modelled, rank=0, kind="modelled", **case)


def front_to_back(path: Path, size: int) -> None:
    """Read the first `size` bytes of a file in pieces of 1 MiB."""
    with path.open("rb", buffering=0) as file:
        for start in range(0, size, 2**20):
            file.read(min(2**20, size - start))


def answer(run: Records) -> Iterator[str]:
    """The fastest format against the JPEG folder, in one process, through a worker and from the disk."""
    warm = {r.case["format"]: r for r in run.where("images_per_s", cache="warm") if r.case["format"] in DATASETS}
    best = max(warm.values(), key=lambda r: r.value)
    name, disk = best.case["format"], {r.case["format"]: r.value / 1e6 for r in run.where("disk_bytes")}
    if name != JPEG:
        yield f"From the page cache the {name} gives {best.value / warm[JPEG].value:,.3g} x the images/s of the {JPEG}."
    else:
        yield f"From the page cache nothing is faster than the {JPEG}: {best.value:,.0f} images/s."
    worker = {r.case["format"]: r.value for r in run.where("worker_images_per_s")}
    if JPEG in worker and name in worker and name != JPEG:
        yield f"Through one worker, which hands batches over, that is {worker[name] / worker[JPEG]:,.3g} x."
    yield f"On disk: {', '.join(f'{f} {mb:,.0f} MB' for f, mb in disk.items())}."
    cold = {r.case["format"]: r.value for r in run.where("images_per_s", cache="cold")}
    if cold:
        speed = run.one("disk_bytes_per_s").value / 1e6
        rates = ", ".join(f"{f} {rate:,.0f}" for f, rate in cold.items())
        yield f"From this disk, {speed:,.0f} MB/s front to back, images/s: {rates}."
    else:
        yield "Nothing is said of the disk: this system keeps files in memory."
