"""Does DDP train the same model as one process, and what does each common bug look like from outside?

    python -m labs.ddp_training
    torchrun --nproc-per-node 2 -m labs.ddp_training --cases no_sampler no_set_epoch

About 6 s on 2 CPU cores. Every case trains the same CNN on the same Fashion-MNIST images; none of the bugs
stops the training, which is why they live so long. What gives them away is counted here.
"""

import copy
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, RandomSampler, Sampler

from labs.common import models
from labs.common.data import fashion_mnist
from labs.kit import cli, measure
from labs.kit.errors import require
from labs.kit.rank import Rank
from labs.kit.record import Record, Records

Case = Literal[
    "single",
    "ddp",
    "no_sampler",
    "no_set_epoch",
    "sampler_seed_per_rank",
    "different_models",
    "setup_twice",
    "unused_parameters",
    "every_rank_saves",
]
CPU, SAVES = torch.device("cpu"), 20
TRAINED = ("single", "ddp", "no_sampler", "no_set_epoch", "sampler_seed_per_rank", "different_models")


@dataclass(frozen=True)
class Config:
    """How much to train, and which cases."""

    cases: tuple[Case, ...] = Case.__args__
    """single and ddp are right; the others hold one bug each."""
    dtype: Literal["float32", "float64"] = "float32"
    """Number format. Rounding differences grow step by step; in float64 they start 10^9 times smaller."""
    samples: int = 1024
    """Images of the training set that are used, the first ones."""
    batch_size: int = 32
    """Images per rank and step."""
    epochs: int = 2
    """Passes over the images."""
    lr: float = 0.1
    """Learning rate of SGD with momentum 0.9."""
    seed: int = 0
    """Seed of the model and of the order of the images."""
    smoke: bool = False
    """Two steps of each epoch; samplers still go through all images."""

    def __post_init__(self) -> None:
        require(1 <= self.samples <= 10_000, f"samples must be between 1 and 10000, not {self.samples}")
        require(self.batch_size >= 1, f"batch_size must be at least 1, not {self.batch_size}")
        require(self.epochs >= 1, f"epochs must be at least 1, not {self.epochs}")
        require(self.lr > 0, f"lr must be positive, not {self.lr}")


def check_layout(config: Config, world_size: int) -> None:
    """BadInput if the images do not fill at least one step of all ranks."""
    step = config.batch_size * world_size
    require(config.samples >= step, f"samples must be at least {step} (batch_size x ranks), not {config.samples}")


def predict(config: Config, ranks: int) -> dict[str, int]:
    """Optimizer steps per epoch with a sampler that splits the images over `ranks`, and without one."""
    per_rank = -(-config.samples // ranks)
    return {"ddp": per_rank // config.batch_size, "no_sampler": config.samples // config.batch_size}


def run(config: Config, rank: Rank) -> Iterator[Record]:
    """Each case in turn, from the same start."""
    data = fashion_mnist()
    x = torch.from_numpy(data.x_train[: config.samples]).float().div(255).sub(0.286).div(0.353).unsqueeze(1)
    images = x.to(rank.device, getattr(torch, config.dtype))
    labels = torch.from_numpy(data.y_train[: len(x)]).long().to(rank.device)
    for done, case in enumerate(config.cases, start=1):
        if case in TRAINED:
            yield from train(case, images, labels, config, rank)
        elif case == "setup_twice":
            yield from setup_twice(rank)
        elif case == "unused_parameters":
            yield from unused_parameters(rank)
        else:
            yield from every_rank_saves(rank)
        rank.progress(done, len(config.cases), case)


def train(case: Case, images: Tensor, labels: Tensor, config: Config, rank: Rank) -> Iterator[Record]:
    """The training loop of every case; what a case changes is on the lines that name it."""
    alone = case == "single"
    torch.manual_seed(config.seed + (rank.rank if case == "different_models" else 0))
    module = models.ConvNet(channels=1, width=16).to(images)
    by_hand = case == "different_models"  # averages gradients as DDP does, without its broadcast at the start
    model = module if alone or by_hand else DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    sampler = make_sampler(case, len(images), config, rank)
    losses, orders = [], []
    for epoch in range(config.epochs):
        if isinstance(sampler, DistributedSampler) and case != "no_set_epoch":
            sampler.set_epoch(epoch)  # without it, every epoch has the same order
        orders.append(_batches(sampler, alone, config, rank))
        for rows in orders[-1][: 2 if config.smoke else None]:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images[rows]), labels[rows])
            loss.backward()
            if by_hand:
                _average_gradients(module, rank.world_size)
            optimizer.step()
            losses.append(_mean_over_ranks(loss, rank))
    yield from _signs(case, losses, orders, module, len(images), rank)


def make_sampler(case: Case, n: int, config: Config, rank: Rank) -> Sampler:
    """Shares `n` images out: each rank gets its own part of one order that all ranks draw alike, from one seed."""
    if case == "no_sampler":
        return RandomSampler(range(n), generator=torch.Generator().manual_seed(config.seed))
    seed = config.seed + (rank.rank if case == "sampler_seed_per_rank" else 0)
    return DistributedSampler(range(n), rank.world_size, rank.rank, shuffle=True, seed=seed)


def _batches(sampler: Sampler, alone: bool, config: Config, rank: Rank) -> list[list[int]]:
    """Rows of every step of one epoch; for one process alone, all ranks' rows together."""
    rows = list(sampler)
    steps = [rows[i : i + config.batch_size] for i in range(0, len(rows), config.batch_size)]
    steps = [s for s in steps if len(s) == config.batch_size]
    return [list(chain(*ranks)) for ranks in zip(*rank.gather(steps), strict=True)] if alone else steps


def _average_gradients(module: nn.Module, world_size: int) -> None:
    for p in module.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world_size


def _mean_over_ranks(loss: Tensor, rank: Rank) -> float:
    """One rank's loss is that of its shard only; the mean over ranks is the loss of the whole batch."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / rank.world_size


def _signs(case: Case, losses: list, orders: list, module: nn.Module, n: int, rank: Rank) -> Iterator[Record]:
    """What can be counted from outside, whatever the code looks like."""
    rows = [rank.gather([i for step in epoch for i in step]) for epoch in orders]
    if case == "single":
        rows = [ranks[:1] for ranks in rows]  # all ranks computed the same
    first = [i for ranks in rows[0] for i in ranks]
    yield rank.record("loss", "nats", losses, case=case)
    yield rank.record("steps_per_epoch", "steps", len(orders[0]), case=case)
    yield rank.record("distinct_share", "1", len(set(first)) / n, case=case)
    yield rank.record("repeated_share", "1", 1 - len(set(first)) / len(first), case=case)
    if len(rows) > 1:
        yield rank.record("same_order_next_epoch", "1", float(rows[0] == rows[1]), case=case)
    yield rank.record("parameter_spread", "1", parameter_spread(module, rank), case=case)


def parameter_spread(module: nn.Module, rank: Rank) -> float:
    """Greatest difference of any parameter between any rank and rank 0; 0 if all ranks hold the same model."""
    mine = torch.cat([p.detach().flatten() for p in module.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    return rank.slowest([(mine - first).abs().max().item()])[0]


def setup_twice(rank: Rank) -> Iterator[Record]:
    """`init_process_group` a second time, as one of the articles does. The error is the case's `error`."""
    try:
        dist.init_process_group("gloo")
        error = "none"
    except (ValueError, RuntimeError) as e:
        error = f"{type(e).__name__}: {e}"
    yield rank.record("raised", "1", float(error != "none"), case="setup_twice", error=error)


class _Gate(nn.Module):
    """A layer that no forward uses: its gradient never comes, and DDP waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def unused_parameters(rank: Rank) -> Iterator[Record]:
    """Two steps with an unused layer: plain, and with `find_unused_parameters=True`."""
    torch.manual_seed(0)
    gate = _Gate().to(rank.device)
    for find in (False, True):
        ddp = DistributedDataParallel(copy.deepcopy(gate), find_unused_parameters=find)
        error = "none"
        try:
            for _ in range(2):
                ddp(torch.ones(4, 8, device=rank.device)).sum().backward()
        except RuntimeError as e:
            error = f"RuntimeError: {str(e).split('.')[0]}"
        case = {"case": "unused_parameters", "find_unused_parameters": find, "error": error}
        yield rank.record("raised", "1", float(error != "none"), **case)


def every_rank_saves(rank: Rank) -> Iterator[Record]:
    """Save to one path 20 times, each time read it back at once: how often is what is there damaged?

    Each rank begins half a save after the one before it: ranks at work do not begin in the same instant, either.
    """
    module = models.mlp().module
    folder = tempfile.mkdtemp() if rank.rank == 0 else None
    path = Path(rank.gather(folder)[0], "checkpoint.pt")
    [save_s] = rank.slowest(measure.time_steps(lambda: torch.save(module.state_dict(), f"{path}.{rank.rank}"), 1, CPU))
    for guarded in (False, True):
        writes, damaged = not guarded or rank.rank == 0, 0
        for _ in range(SAVES):
            rank.barrier()
            if writes:
                time.sleep(rank.rank * save_s / 2)
                torch.save(module.state_dict(), path)
                damaged += not _readable(path)
        ranks = rank.gather((writes, damaged))
        case = {"case": "every_rank_saves", "guarded": guarded}
        yield rank.record("writers", "ranks", sum(w for w, _ in ranks), **case)
        yield rank.record("damaged_share", "1", sum(d for _, d in ranks) / SAVES, **case)
    if rank.rank == 0:
        shutil.rmtree(folder)


def _readable(path: Path) -> bool:
    try:
        torch.load(path, weights_only=True)
    except Exception:
        return False
    return True


def answer(run: Records) -> Iterator[str]:
    """Whether DDP trains as one process does; what gives each bug away; what torch itself refuses."""
    losses = {r.case["case"]: r.samples for r in run.where("loss")}
    if {"single", "ddp"} <= set(losses):
        gap = max(abs(a - b) for a, b in zip(losses["single"], losses["ddp"], strict=True))
        steps = len(losses["ddp"])
        yield f"Over {steps} steps the loss of DDP differs from that of one process by at most {gap:.1g} nats."
    for case in losses:
        if case not in ("single", "ddp"):
            yield f"{case}: {', '.join(_symptoms(run, case)) or 'nothing to be seen here'}."
    for r in run.where("raised"):
        if r.value:
            yield f"{r.case['case']}: torch raises {r.case['error']}."


def _symptoms(run: Records, case: str) -> Iterator[str]:
    def at(metric: str) -> float:
        return sum(r.value for r in run.where(metric, case=case))  # one record, or none after a single epoch

    if at("repeated_share"):
        yield f"{at('distinct_share'):.0%} of the images are seen, {at('repeated_share'):.0%} are repeats"
    if at("same_order_next_epoch"):
        yield "the next epoch has the same order"
    if at("parameter_spread"):
        yield f"the ranks' parameters differ by up to {at('parameter_spread'):.2g}"


if __name__ == "__main__":
    cli.main()
