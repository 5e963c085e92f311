"""The editable round of notebook 05: does a training go on bit for bit with what a learner saves and loads?"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parameters_to_vector

from labs.kit.launch import run_on_ranks

SAVED_AT, STEPS = 5, 10
Parts = tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]


def resume_and_compare(save: Callable[..., Any], load: Callable[..., Any], ranks: int) -> None:
    """Print whether a training that was stopped after 5 of 10 steps went on as one that was not, on `ranks` ranks.

    `save(model, optimizer, scheduler)` gives the state; `load(state, model, optimizer, scheduler)` puts it into parts
    that a new process has just made.
    """
    found = run_on_ranks(_both, ranks, save, load)
    first = min(step for step, _ in found)
    difference = max(error for _, error in found)
    if first > STEPS and difference == 0:
        print(
            f"Stopped after step {SAVED_AT} of {STEPS}, resumed on {ranks} ranks: "
            "all losses and parameters are equal, bit for bit."
        )
    elif first > STEPS:
        print(f"All losses are equal, and the parameters differ at the end by {100 * difference:.2g} %.")
    else:
        print(
            f"The loss differs from step {first} on, and the parameters at the end by {100 * difference:.2g} % of "
            "the way they went. No error was raised."
        )


def _both(save: Callable[..., Any], load: Callable[..., Any]) -> tuple[int, float]:
    """(first step whose loss differs, difference of the parameters / distance they moved) on this rank."""
    whole = _new(seed=0)
    start, losses = _vector(whole), _train(whole, 1, SAVED_AT)
    file = io.BytesIO()
    torch.save(save(*whole), file)  # as a file would keep it: nothing in it is shared with the training
    losses += _train(whole, SAVED_AT + 1, STEPS)
    resumed = _new(seed=1)  # another process: other parameters, other random numbers
    file.seek(0)
    load(torch.load(file, weights_only=True), *resumed)
    again = losses[:SAVED_AT] + _train(resumed, SAVED_AT + 1, STEPS)
    differing = [step for step, (a, b) in enumerate(zip(losses, again, strict=True), start=1) if a != b]
    error = (_vector(resumed) - _vector(whole)).norm() / (_vector(whole) - start).norm()
    return min(differing, default=STEPS + 1), float(error)


def _new(seed: int) -> Parts:
    """A perceptron with dropout, SGD with momentum, and a learning rate that falls."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 * seed + torch.distributed.get_rank())  # ranks drop different features
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.5)


def _train(parts: Parts, first: int, last: int) -> list[float]:
    """The losses of these steps; what a step reads depends on its number and the rank alone."""
    model, optimizer, scheduler = parts
    ddp, losses = DistributedDataParallel(model), []  # gives all ranks rank 0's parameters
    for step in range(first, last + 1):
        own = torch.Generator().manual_seed(1000 * step + torch.distributed.get_rank())
        x, y = torch.randn(16, 32, generator=own), torch.randint(4, (16,), generator=own)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def _vector(parts: Parts) -> Tensor:
    return parameters_to_vector(parts[0].parameters()).detach().clone()
