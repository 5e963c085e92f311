"""The loop of exercise 10.1: it works on one rank, and hangs on several."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def train(job):
    """Train the model of `job` on the data of all ranks; log the losses of each epoch."""
    for epoch in range(job.epochs):
        seen = torch.zeros(2, dtype=torch.float64)  # sum of losses, number of samples
        for x, y in job.batches(epoch):  # from this rank's own files
            job.optimizer.zero_grad()
            loss = job.loss(job.model(x), y)  # the sum over this batch
            loss.backward()
            average_gradients(job.model, len(x))
            job.optimizer.step()
            seen[0] += loss.item()
            seen[1] += len(x)
        if dist.get_rank() == 0:  # one line per epoch is enough
            job.log(epoch, mean_over_ranks(seen), validate(job))


def average_gradients(model: nn.Module, samples: int) -> None:
    """Turn gradients of a sum over this rank's `samples` into those of the mean over all ranks' samples."""
    count = torch.tensor(samples, dtype=torch.float64)
    dist.all_reduce(count)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # None: no backward since zero_grad()
        dist.all_reduce(p.grad)
        p.grad /= count


def mean_over_ranks(seen: torch.Tensor) -> float:
    """`seen` holds this rank's sum of losses and its number of samples; the mean over all samples of all ranks."""
    dist.all_reduce(seen)
    return float(seen[0] / seen[1])


def validate(job) -> float:
    """Mean loss over the validation samples of all ranks."""
    seen = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for x, y in job.validation():  # this rank's part
            seen[0] += job.loss(job.model(x), y).item()
            seen[1] += len(x)
    return mean_over_ranks(seen)
