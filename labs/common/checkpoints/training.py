"""A training in which everything has a state, and a restart that forgets one part of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from labs.common.checkpoints.data import ResumableLoader
from labs.common.checkpoints.state import random_state, set_random_state, training_state
from labs.common.precision import amp
from labs.kit.rank import Rank

Forgotten = Literal["nothing", "optimizer", "scheduler", "scaler", "random", "data", "buffers"]
SIDE = 14  # pixels


def perceptron() -> nn.Module:
    """(batch, 196) -> (batch, 10) logits; 53,514 parameters, and buffers, which are no parameters."""
    layers = nn.Linear(SIDE**2, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 10)
    return nn.Sequential(*layers)


class Training:
    """A perceptron with dropout and BatchNorm on Fashion-MNIST, in FP16, as a new process makes it for `seed`.

    AdamW, a one-cycle schedule, loss scaling; images are mirrored by NumPy's and shifted by Python's random numbers.
    """

    def __init__(self, images: tuple[Tensor, ...], steps: int, batch_size: int, seed: int, rank: Rank) -> None:
        """`images` are those of `labs.common.data.fashion.vectors`."""
        for seeded in (torch.manual_seed, np.random.seed, random.seed):
            seeded(seed + rank.rank)  # ranks draw different dropout masks; DDP gives all the model of rank 0
        x, y, self.x_test, self.y_test = images
        module = perceptron().to(rank.device)
        self.rank, self.losses, self.read, self.skipped = rank, [], [], []
        self.model = DistributedDataParallel(module) if rank.world_size > 1 else module
        self.optimizer = torch.optim.AdamW(module.parameters())
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=5e-3, total_steps=steps + 1)
        self.scaler = amp.scaler("fp16", rank.device, init_scale=2.0**24, growth_interval=50)
        dataset = TensorDataset(x, y, torch.arange(len(x)))
        self.data = ResumableLoader(dataset, batch_size, seed=seed, rank=rank.rank, world_size=rank.world_size)

    @property
    def parts(self) -> dict[str, Any]:
        """All that has a state, besides the random generators."""
        return {name: getattr(self, name) for name in ("model", "optimizer", "scheduler", "scaler", "data")}

    def train(self, steps: int) -> None:
        """`steps` optimizer steps; for each, `losses` has the mean over ranks, `read` this rank's (epoch, image)s."""
        mine = []
        while len(mine) < steps:
            for x, y, rows in self.data:
                mine.append(self.step(x, y))
                self.read.append([(self.data.epoch, row) for row in rows.tolist()])
                if len(mine) == steps:
                    break
        self.losses += [sum(ranks) / len(ranks) for ranks in zip(*self.rank.gather(mine), strict=True)]

    def step(self, x: Tensor, y: Tensor) -> float:
        """One step on (batch, 196) images, changed at random; returns this rank's loss."""
        images = x.unflatten(1, (SIDE, SIDE)).roll(random.choice((-1, 0, 1)), dims=2)
        images = images.flip(2) if np.random.random() < 0.5 else images
        before = self.scaler.get_scale()
        batch = [(images.flatten(1), y)]
        loss = amp.train_step(self.model, nn.functional.cross_entropy, batch, self.optimizer, "fp16", self.scaler)
        if self.scaler.get_scale() < before:  # a gradient was not finite: this step was left out
            self.skipped.append(len(self.read))
        else:
            self.scheduler.step()
        return loss.item()

    def state(self) -> dict[str, Any]:
        """What a checkpoint of all ranks holds; a collective."""
        return training_state(**self.parts, random=self.rank.gather(random_state()))

    def resume(self, state: dict[str, Any], forgotten: Forgotten = "nothing") -> None:
        """Go on from `state` as code does that never heard of one part: it keeps what a new process has."""
        for name, part in self.parts.items():
            if name == "data":
                whole = state["data"]
                part.load_state_dict({**whole, "samples": 0} if forgotten == "data" else whole)
            elif name == "model":
                module = part.module if self.rank.world_size > 1 else part
                kept = dict(module.named_parameters()) if forgotten == "buffers" else state["model"]
                module.load_state_dict({name: state["model"][name] for name in kept}, strict=forgotten != "buffers")
            elif name != forgotten:
                part.load_state_dict(state[name])
        if forgotten != "random":
            set_random_state(state["random"][self.rank.rank])

    def test_loss(self) -> float:
        """Mean cross-entropy over the test images, in nats. Draws no random numbers."""
        module = self.model.module if self.rank.world_size > 1 else self.model  # DDP would give all rank 0's buffers
        module.eval()
        with torch.no_grad():
            loss = nn.functional.cross_entropy(module(self.x_test), self.y_test).item()
        module.train()
        return loss


def states(seed: int) -> Iterator[dict[str, Any]]:
    """The state of a perceptron with AdamW after each step on random images: for drills on files."""
    torch.manual_seed(seed)
    module = perceptron()
    optimizer = torch.optim.AdamW(module.parameters())
    while True:
        optimizer.zero_grad()
        module(torch.randn(32, SIDE**2)).square().mean().backward()
        optimizer.step()
        yield training_state(module, optimizer)
