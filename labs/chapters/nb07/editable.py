"""The editable round of notebook 07: training on real ranks with a way to shrink gradients that the learner writes."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labs.common.data import fashion_mnist

STEPS, ROWS = 150, 32


def train(shrink: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None, steps: int = STEPS) -> list[float]:
    """Loss in nats of every step, the mean of all ranks, of a perceptron on Fashion-MNIST; call it on ranks.

    `shrink(gradient, left_out)` returns (what is sent, what is left out), all of one shape; None sends everything.
    """
    data = fashion_mnist()
    images = torch.from_numpy(data.x_train).flatten(1).float().div(255).sub(0.286).div(0.353)
    labels = torch.from_numpy(data.y_train).long()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))  # the same on all ranks
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    left_out = torch.zeros(sum(p.numel() for p in model.parameters()))
    losses = []
    for rows in torch.randperm(len(images)).split(ROWS * ranks)[:steps]:
        mine = rows[rank::ranks]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        gradient = nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
        sent, left_out = shrink(gradient, left_out) if shrink else (gradient, left_out)
        sent = sent / ranks
        dist.all_reduce(sent)  # here zeros travel as well: this round is about learning, not about bytes
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
        start = 0
        for p in model.parameters():
            p.grad.copy_(sent[start : start + p.numel()].view_as(p))
            start += p.numel()
        optimizer.step()
    return losses


def tell(mine: list[list[float]], everything: list[list[float]], last: int = 20) -> None:
    """Print the mean loss of the last steps, of the learner's way and of one that sends everything."""
    losses = [sum(run[0][-last:]) / last for run in (mine, everything)]
    print(
        f"mean loss of the last {last} of {len(mine[0])} steps: {losses[0]:.2f} nats, with all gradients "
        f"{losses[1]:.2f} nats"
    )
    apart = losses[0] - losses[1]
    print(f"{abs(apart):.2f} nats {'more' if apart > 0 else 'less'} than with all gradients, from the same images.")
