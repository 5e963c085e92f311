"""An editable round of notebook 10: the learner lets a replica drift and sees after how many steps it is noticed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from labs import nan_clinic as lab
from labs.common.data import fashion
from labs.kit.failure import RankTimeout
from labs.kit.launch import run_on_ranks

STEPS, EVERY = 30, 5
BATCH = 32  # images per rank and step
Batches = Iterator[tuple[Tensor, Tensor]]
Train = Callable[[int, nn.Module, torch.optim.Optimizer, Batches], object]


def healthy(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """The loop that there is to compare with."""
    for x, y in batches:
        loss = cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def compare(train: Train, every: int = EVERY, ranks: int = 2, limit_s: float = 45.0) -> None:
    """Run the learner's `train(rank, model, optimizer, batches)` on ranks that compare replicas; print what was seen.

    An error of the loop is raised as `run_on_ranks` does it; a rank that left the loop is told after `limit_s`.
    """
    try:
        tell(run_on_ranks(train_and_check, ranks, train, every, timeout_s=limit_s))
    except RankTimeout:
        print(f"Given up after {limit_s:g} s: a rank waits for another that has left the loop, or takes other steps.")


def train_and_check(train: Train, every: int = EVERY) -> dict:
    """On each rank: the learner's `train(rank, model, optimizer, batches)`, its replicas compared every k steps.

    `found` is (steps, names of the parameters that differ), or None; `losses` are those of this rank's replica on the
    test images at each comparison, `healthy` the last one of the healthy loop, in nats.
    """
    well = _trained(healthy, every)["losses"][-1]  # first: a learner's loop may end on one rank alone
    return {**_trained(train, every), "healthy": well, "every": every}


def _trained(train: Train, every: int) -> dict:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
    x, y, test_x, test_y = fashion.vectors(10_000, torch.device("cpu"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[dist.get_rank() :: dist.get_world_size()]
    found: list[tuple[int, list[str]]] = []
    losses: list[float] = []  # of the test images, at each comparison

    def batches() -> Batches:
        for step in range(1, STEPS + 1):
            own = order[(step - 1) * BATCH : step * BATCH]
            yield x[own], y[own]
            if step % every == 0:  # here, between two steps, all ranks compare; also after a `continue`
                differ = lab.replica_check(dict(ddp.module.named_parameters()))
                found.extend([(step, sorted({name for name, _ in differ}))] if differ else [])
                with torch.no_grad():
                    losses.append(cross_entropy(ddp.module(test_x), test_y).item())

    train(dist.get_rank(), ddp, optimizer, batches())
    first = found[0] if found else None
    return {"found": first, "losses": losses}


def tell(ranks: list[dict]) -> None:
    """Print when the replicas were found to differ, in which parameters, and what the losses said."""
    first = ranks[0]
    if first["found"] is None:
        print(f"After {STEPS} steps and {len(first['losses'])} comparisons the replicas are the same, bit for bit.")
    else:
        step, names = first["found"]
        print(f"Compared every {first['every']} steps, the replicas differ after step {step}, in {', '.join(names)}.")
    print(f"{'after step':>10}" + "".join(f"{f'rank {r}':>10}" for r in range(len(ranks))) + "   (loss on test images)")
    for k, losses in enumerate(zip(*(of["losses"] for of in ranks), strict=True), 1):
        print(f"{k * first['every']:>10}" + "".join(f"{loss:>10.3f}" for loss in losses))
    print(f"{'healthy':>10}" + "".join(f"{of['healthy']:>10.3f}" for of in ranks) + f"   after step {STEPS}")
