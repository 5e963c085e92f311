"""How many workers does a model need, and what else wants their cores?

    python -m labs.loader_cores
    python -m labs.loader_cores --nproc 1 --parts needed --model-rates 1.4 2.8
    torchrun --nproc-per-node 1 -m labs.loader_cores --parts augmentation

About 10 s on 2 CPU cores, once the JPEG tiles have been cut. Nothing here needs a GPU: workers use the host's cores.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils.data import Dataset

from labs.common.data.tiles import tiles
from labs.common.loading.feed import Step, alone, drive, endless, ready, running
from labs.common.loading.image_datasets import JpegFolder
from labs.common.loading.rates import counted
from labs.kit import measure
from labs.kit.errors import require
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records
from labs.loader_cores.augment import STAGES, AugmentedJpegs, jitter_batch

Part = Literal["needed", "augmentation", "threads"]
SHARE = {"needed": 0.35, "augmentation": 0.1, "threads": 0.2}
TURN_S = 0.06  # least time of a turn
ENOUGH = 0.9  # of the model's own rate: it is fed; the rest may be what it takes to hand a batch over


@dataclass(frozen=True)
class Config:
    """What to measure, and how large it is."""

    parts: tuple[Part, ...] = get_args(Part)
    """What to measure."""
    batch_size: int = 8
    """Images per batch."""
    model_rates: tuple[float, ...] = (1.4,)
    """Rate of the model in needed, as a multiple of what one worker delivers. Beyond the number of cores, workers that
    compute cannot feed it."""
    seconds: float = 6.0
    """Time for all rounds, in s. A slower machine takes fewer rounds and has wider intervals."""
    rounds: int | None = None
    """Times that all cases of a part take turns; by default as many as fit into `seconds`, at least 6."""
    smoke: bool = False
    """64 images, 2 rounds."""

    def __post_init__(self) -> None:
        require(bool(self.parts and self.model_rates), "parts and model_rates must each hold something")
        require(1 <= self.batch_size <= 64, f"batch_size must be from 1 to 64, not {self.batch_size}")
        require(
            all(0.1 <= r <= 16 for r in self.model_rates),
            f"model_rates must be from 0.1 to 16 times the rate of "
            f"one worker, not {', '.join(f'{r:g}' for r in self.model_rates)}",
        )
        measure.require_budget(self.seconds, self.rounds, least=2)


def predict(model_rate: float, worker_rate: float) -> int:
    """Workers that feed a model of `model_rate` images/s, if each of them has a core of its own. Rates in the same
    unit."""
    return math.ceil(model_rate / worker_rate)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Part by part, on rank 0; other ranks only wait."""
    if rank.rank == 0:
        many = 64 if config.smoke else 1024
        cut = tiles(many, progress=lambda n, all: rank.progress(n, all, "cutting tiles"))
        for done, part in enumerate(config.parts, start=1):
            with unpinned(rank):  # workers inherit the cores of their rank: let them have all
                yield from PARTS[part](cut, config, rank)
            rank.progress(done, len(config.parts), part)
    rank.barrier()


def turns(config: Config, part: Part) -> Iterator[int]:
    """Rounds of a part."""
    return measure.within(count(), measure.rounds_of(config, list, SHARE[part]))


def rate(data: Dataset, workers: int, batch: int, step: Step | None, **options: Any) -> float:
    """Samples per second of a fresh loader, with `step` after each batch."""
    skip = ready(workers, options.get("prefetch_factor", 2))
    with running(endless(data, workers, batch, **options)) as batches:
        next(batches)
        feed = drive(batches, step, max(2, workers), CPU, skip=skip, wave=max(1, workers), least_s=TURN_S)
    return feed.parts(1)[0][1]


CPU = torch.device("cpu")  # what waits here is a step that sleeps: there is nothing to synchronise


def needed(cut: Any, config: Config, rank: Rank) -> Iterator[Record]:
    """Predicted from one worker's rate, then measured with one worker less and one more.

    The model is a stand-in for a GPU: its step sleeps, and takes no core from the workers.
    """
    data, batch = JpegFolder(cut.paths, cut.labels), config.batch_size
    one = [rate(data, 1, batch, None) for _ in range(2 if config.smoke else 6)]
    yield rank.record("images_per_s", "1/s", one, rank=0, way="one worker")
    for times in config.model_rates:
        model_rate = times * measure.estimate(one).value
        workers = predict(times, 1.0)  # not of measured rates: 3 * r / r may round to a little above 3
        yield rank.record("predicted_workers", "workers", workers, kind="modelled", rank=0, model_rate=times)
        step = partial(sleep, batch / model_rate)
        found: dict[Any, list[float]] = {}
        for _ in turns(config, "needed"):
            stored = torch.zeros(batch)
            found.setdefault("model", []).append(drive(alone(stored), step, 3, CPU, least_s=TURN_S).parts(1)[0][1])
            for n in range(max(1, workers - 1), workers + 2):
                found.setdefault(n, []).append(rate(data, n, batch, step))
        for n, samples in found.items():
            case = {"way": "model"} if n == "model" else {"way": "both", "workers": n}
            yield rank.record("images_per_s", "1/s", samples, rank=0, model_rate=times, **case)


def sleep(seconds: float, batch: Any) -> None:
    """The step of a device that computes by itself: the host waits for it."""
    time.sleep(seconds)


def augmentation(cut: Any, config: Config, rank: Rank) -> Iterator[Record]:
    """Seconds per image of each stage, by one process; the same jitter for a batch, on the device."""
    data, images = AugmentedJpegs(cut.paths, cut.labels), 16
    stored = torch.stack([data[i][0] for i in range(images)]).to(rank.device)
    seconds: dict[str, list[float]] = {stage: [] for stage in STAGES}
    batched: list[float] = []
    for k in turns(config, "augmentation"):
        spent = dict.fromkeys(STAGES, 0.0)
        for i in range(images):
            value: Any = cut.paths[(images * k + i) % len(cut.paths)]
            for stage, work in STAGES.items():
                start = time.perf_counter()
                value = work(value)
                spent[stage] += time.perf_counter() - start
        for stage in STAGES:
            seconds[stage].append(spent[stage] / images)
        jitter_batch(stored)  # the first call after a pause is not typical
        batched.append(min(measure.time_steps(lambda: jitter_batch(stored), 2, rank.device)) / images)
    for stage, samples in seconds.items():
        yield rank.record("stage_s", "s", samples, rank=0, stage=stage)
    yield rank.record("batched_jitter_s", "s", batched, rank=0, on=rank.device.type)


class Smooth(Dataset):
    """Items that compute with torch: elementwise operations on 150,528 numbers, which torch splits over its threads."""

    def __init__(self) -> None:
        self.x = torch.rand(3, 224, 224)

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> Tensor:
        return self.x.mul(1.01).sqrt().add(0.1).exp().mean()


def take_threads(n: int, worker: int) -> None:
    """A worker_init_fn. A DataLoader gives each worker one thread; OpenCV and NumPy have numbers of their own."""
    torch.set_num_threads(n)


def threads(cut: Any, config: Config, rank: Rank) -> Iterator[Record]:
    """Items per second where each worker uses one thread, and where each uses as many as there are cores."""
    cores = len(rank.host_cores) or 1
    workers, found = min(4, max(2, cores)), {1: [], max(2, cores): []}
    for _ in turns(config, "threads"):
        for n, samples in found.items():
            options = {"worker_init_fn": partial(take_threads, n), "prefetch_factor": 1, "timeout": 60}
            samples.append(rate(Smooth(), workers, 1, None, **options))
    for n, samples in found.items():
        case = {"workers": workers, "threads": n, "cores": cores}
        yield rank.record("items_per_s", "1/s", samples, rank=0, **case)


PARTS = {"needed": needed, "augmentation": augmentation, "threads": threads}


def fed(records: Records, times: float) -> dict[int, measure.Estimate]:
    """{workers: rate of both together over that of the model alone}, for the model of `times` one worker's rate."""
    model = records.one("images_per_s", way="model", model_rate=times)
    both = records.where("images_per_s", way="both", model_rate=times)
    return {r.case["workers"]: measure.paired_ratio(r.samples, model.samples) for r in both}


def enough(records: Records, times: float) -> tuple[int | None, int | None]:
    """The fewest workers tried that are shown to give the model ENOUGH of its own rate, and that may give it."""
    shares = sorted(fed(records, times).items())
    shown = next((n for n, share in shares if share.low >= ENOUGH), None)
    return shown, next((n for n, share in shares if share.high >= ENOUGH), None)


def enough_text(records: Records, times: float) -> str:
    """`enough` in words."""
    shown, possible = enough(records, times)
    if shown is not None and shown == possible:
        return f"{counted(shown)} {'is' if shown == 1 else 'are'} enough"
    if possible is not None:
        return f"{counted(possible)} may be enough: these samples cannot tell"
    return "none of those tried are enough"


def augmentation_share(records: Records) -> measure.Estimate:
    """Share of an image's time in one process that crop, flip and colour jitter take."""
    stages = {r.case["stage"]: r.samples for r in records.where("stage_s")}
    parts = [stages[s] for s in ("crop and resize", "flip", "colour jitter")]
    return measure.paired_ratio(
        [sum(t) for t in zip(*parts, strict=True)], [sum(t) for t in zip(*stages.values(), strict=True)], "1"
    )


def answer(run: Records) -> Iterator[str]:
    """Workers predicted and found, what augmentation takes, what threads do."""
    for r in run.where("predicted_workers"):
        times = r.case["model_rate"]
        tried = ", ".join(f"{n}: {share.scaled(100, '%')}" for n, share in sorted(fed(run, times).items()))
        yield (
            f"A model {times:g} times as fast as one worker should need {counted(int(r.value))}; "
            f"{enough_text(run, times)} (workers: share of the model's own rate; {tried})."
        )
    if len(run.where("stage_s")):
        yield f"Crop, flip and colour jitter take {augmentation_share(run).scaled(100, '%')} of an image's time."
    rates = {r.case["threads"]: r for r in run.where("items_per_s")}
    if rates:
        case, ratio = rates[max(rates)].case, measure.paired_ratio(rates[max(rates)].samples, rates[1].samples)
        told = f"{case['workers']} workers with {case['threads']} threads each on {case['cores']} cores, over one each"
        yield measure.verdict(ratio, told) + "."
