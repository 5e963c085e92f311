"""Does a search of seconds find what a full sweep of DataLoader settings finds?

    python -m labs.tune_dataloader --nproc 1
    python -m labs.tune_dataloader --nproc 1 --dataset my_package.my_module:factory --batch-size 64

About 60 s on 2 CPU cores. Three workloads: JPEG files to decode, samples so small that workers cost more than they
bring, and a source that lets every item wait. With --dataset the tuner runs on your own: the factory takes no
arguments and returns (map-style dataset, training step that takes a batch), or as a third a dictionary of options for
DataLoader, such as {"collate_fn": my_collate}.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from labs.common.data.tiles import tiles
from labs.common.loading.feed import Step, on_device
from labs.common.loading.image_datasets import JpegFolder
from labs.common.loading.rates import counted
from labs.common.loading.tile_training import WIDTHS, Trainer
from labs.kit.errors import require
from labs.kit.lab import imported, require_findable
from labs.kit.measure import Estimate, differs, estimate
from labs.kit.rank import Rank, unpinned
from labs.kit.record import Record, Records
from labs.tune_dataloader.bench import Bench, blame
from labs.tune_dataloader.rules import FEWEST, Setting, cheapest, ratio
from labs.tune_dataloader.search import tune_dataloader

Name = Literal["decode", "tiny", "slow source"]
BATCH = {"decode": 8, "tiny": 64, "slow source": 8}


@dataclass(frozen=True)
class Config:
    """What to tune, and the sweep that it is held against."""

    workloads: tuple[Name, ...] = get_args(Name)
    """Those of the course to tune; without `dataset`."""
    dataset: str = ""
    """package.module:factory of your own dataset and training step: tuned, without a sweep."""
    batch_size: int = 32
    """Samples per batch of your own dataset."""
    budget_s: float = 20.0
    """Longest search of the tuner."""
    workers: tuple[int, ...] = (0, 1, 2, 4, 8)
    """num_workers of the sweep; the largest also bounds the tuner's search on the workloads."""
    prefetch: tuple[int, ...] = (1, 2, 4)
    """prefetch_factor of the sweep, each with each number of workers."""
    rounds: int = 6
    """Most times that the sweep takes each of its settings in turn; as the tuner, it ends when the choice is clear."""
    checks: int = 6
    """Times that the tuned setting and the best of the sweep take turns afterwards, if they differ."""
    item_s: float = 0.003
    """Seconds that the slow source waits per item."""
    smoke: bool = False
    """Tiny samples only, with at most one worker."""

    def __post_init__(self) -> None:
        require(
            bool(self.workloads and self.workers and self.prefetch),
            "workloads, workers and prefetch must each hold something",
        )
        require(min(self.workers) >= 0, f"workers must not be negative: {min(self.workers)}")
        require(min(self.prefetch) >= 1, f"prefetch must be at least 1, not {min(self.prefetch)}")
        require(min(self.rounds, self.checks) >= 1, "rounds and checks must be at least 1")
        require(self.budget_s > 0, f"budget_s must be a positive number of seconds, not {self.budget_s}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(self.item_s >= 0, f"item_s must not be negative: {self.item_s}")
        if self.dataset:
            require_findable(self.dataset, "dataset")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the factory cannot be imported."""
    if config.dataset:
        imported(config.dataset, "dataset")


class SlowSource(Dataset):
    """Items that take `item_s` to arrive and no computing, as over a network: (64 float32, label)."""

    def __init__(self, item_s: float) -> None:
        self.item_s = item_s

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.item_s)
        return torch.full((64,), float(index)), index % 10


class Perceptron:
    """A training step on (64 float32 per sample, label): much faster than any loader."""

    def __init__(self, device: torch.device) -> None:
        torch.manual_seed(0)
        self.module, self.device = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device), device
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-4)

    def __call__(self, batch: Any) -> None:
        x, y = on_device(batch, self.device)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(x), y).backward()
        self.optimizer.step()


def workload(name: Name, config: Config, rank: Rank) -> tuple[Dataset, Step]:
    """Dataset and training step of one of the course's workloads."""
    if name == "decode":
        cut = tiles(progress=lambda n, all: rank.progress(n, all, "cutting tiles"))
        return JpegFolder(cut.paths, cut.labels), Trainer(WIDTHS["light"], rank.device, seed=0)
    if name == "tiny":
        return TensorDataset(torch.randn(4096, 64), torch.arange(4096) % 10), Perceptron(rank.device)
    return SlowSource(config.item_s), Perceptron(rank.device)


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Rank 0 does everything; its workers may run on all cores of the job."""
    if rank.rank == 0:
        estimate([1.0, 2.0])  # imports what it needs, so that no search has to wait for it
        with unpinned(rank):
            if config.dataset:
                yield from tune_own(config, rank)
            else:
                for name in ("tiny",) if config.smoke else config.workloads:
                    yield from against_sweep(name, config, rank)
    rank.barrier()


def tune_own(config: Config, rank: Rank) -> Iterator[Record]:
    """Tune what the factory makes, and print what was found."""
    factory = imported(config.dataset, "dataset")
    with blame(f"dataset {config.dataset!r}"):
        found = factory()
    good = isinstance(found, tuple) and len(found) in (2, 3) and callable(found[1])
    options = found[2] if good and len(found) == 3 else {}
    require(
        good and isinstance(options, dict),
        f"dataset {config.dataset!r} must return (dataset, step) or (dataset, "
        f"step, options of DataLoader as a dict), not {type(found).__name__}",
    )
    own = [name for name in ("batch_size", "budget_s", "max_workers", "device") if name in options]
    require(not own, f"dataset {config.dataset!r}: leave {', '.join(own)} out of the options of DataLoader")
    tuning = tune_dataloader(
        found[0], found[1], batch_size=config.batch_size, budget_s=config.budget_s, device=rank.device, **options
    )
    print(f"{tuning}\n{tuning.table.to_string(index=False, float_format='{:.3g}'.format, na_rep='')}")
    for r in tuning.records:
        yield rank.record(r.metric, r.unit, r.samples, rank=0, **r.case)


def against_sweep(name: Name, config: Config, rank: Rank) -> Iterator[Record]:
    """The tuner, then the full sweep, then the tuned setting and the best of the sweep in turn."""
    dataset, step = workload(name, config, rank)
    most, total = max(config.workers), 3 * len(config.workloads)
    done = 3 * config.workloads.index(name) if name in config.workloads else 0
    rank.progress(done, total, f"{name}: tuner")
    tuning = tune_dataloader(
        dataset,
        step,
        batch_size=BATCH[name],
        budget_s=config.budget_s,
        max_workers=1 if config.smoke else most,
        device=rank.device,
    )
    tuned = tuning.choice.setting
    yield rank.record("search_s", "s", tuning.seconds, rank=0, workload=name, by="tuner")
    case = {"workload": name, "prefetch": tuned.prefetch, "limit": tuning.limit, "sure": tuning.choice.sure}
    yield rank.record("tuned_workers", "workers", tuned.workers, rank=0, **case)

    rank.progress(done + 1, total, f"{name}: full sweep")
    start = time.perf_counter()
    rates = in_turn(Bench(dataset, step, BATCH[name], rank.device), settings(config), config.rounds)
    yield rank.record("search_s", "s", time.perf_counter() - start, rank=0, workload=name, by="sweep")
    for setting, samples in rates.items():
        yield rate_of(setting, samples, "sweep", name, rank)

    rank.progress(done + 2, total, f"{name}: tuned against best")
    best = max(rates, key=lambda s: estimate(rates[s]).value)
    if tuned != best:  # a setting needs no comparison with itself
        bench = Bench(dataset, step, BATCH[name], rank.device)
        rates = in_turn(bench, sorted({tuned, best}), config.checks, config.checks)
    for by, setting in (("tuned", tuned), ("best", best)):
        yield rate_of(setting, rates[setting], by, name, rank)
    shares = [t / b for t, b in zip(rates[tuned], rates[best], strict=True)]
    yield rank.record("share_of_best", "1", shares, rank=0, workload=name)


def settings(config: Config) -> list[Setting]:
    """All combinations; prefetch_factor means nothing without workers."""
    if config.smoke:
        return [Setting(0), Setting(1)]
    return sorted({Setting(w, p if w else 2) for w in config.workers for p in config.prefetch})


def in_turn(bench: Bench, these: list[Setting], most: int, fewest: int = FEWEST) -> dict[Setting, list[float]]:
    """Samples per second of model and loader together, one turn of each per round.

    From `fewest` rounds on it ends as the tuner does: when it is clear which of them to choose.
    """
    arms = [("together", s) for s in these]

    def rates() -> dict[Setting, list[float]]:
        return {s: found for (_, s), found in bench.evidence.in_turn(arms).items()}

    bench.first()
    bench.in_turn(arms, lambda: cheapest(rates()).sure, fewest=fewest, most=most)
    return rates()


def rate_of(setting: Setting, samples: list[float], by: str, name: Name, rank: Rank) -> Record:
    """One setting's rates as a record."""
    case = {"workload": name, "workers": setting.workers, "prefetch": setting.prefetch, "by": by}
    return rank.record("rate_per_s", "1/s", samples, rank=0, **case)


def verdicts(records: Records) -> list[dict[str, Any]]:
    """One row per workload: tuned workers and limit, share of the best rate (Estimate), and of the sweep's time."""
    rows = []
    for r in records.where("tuned_workers"):
        name = r.case["workload"]
        shares = records.one("share_of_best", workload=name).samples
        tuner_s, sweep_s = (records.one("search_s", workload=name, by=by).value for by in ("tuner", "sweep"))
        share: Estimate = ratio(shares, [1.0] * len(shares))
        tuned, best = (_setting(records.one("rate_per_s", workload=name, by=by)) for by in ("tuned", "best"))
        rows.append(
            {
                "workload": name,
                "workers": int(r.value),
                "limit": r.case["limit"],
                "share_of_best": share,
                "share_of_time": tuner_s / sweep_s,
                "best": str(best),
                "same": tuned == best,
            }
        )
    return rows


def _setting(record: Record) -> Setting:
    return Setting(record.case["workers"], record.case["prefetch"])


def answer(run: Records) -> Iterator[str]:
    """How near the search came to the best of a full sweep, and in what share of its time.

    With `dataset` the run has told it already, in full.
    """
    for row in verdicts(run):
        yield told(row)


def told(row: dict[str, Any]) -> str:
    """One row of `verdicts` in a sentence."""
    found = f"{row['workload']}: the search settled on {counted(row['workers'])} (limit: {row['limit']})"
    time = f"in {row['share_of_time']:.0%} of the time of the sweep"
    if row["same"]:
        return f"{found} {time}. The sweep found the same setting to be the best."
    share = row["share_of_best"].scaled(100, "%")
    lost = "in turn" if differs(share, 100) else "no difference that this run can show"
    return f"{found} {time}. It reaches {share} of the sweep's best, {row['best']}: {lost}."
