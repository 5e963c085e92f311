"""The Trainer of exercise 05.4: small, and with all that a real one carries from step to step."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

ROWS, FEATURES, CLASSES = 80, 6, 3


class Sampler:
    """Numbers of the rows of each batch, in an order that is drawn anew for every epoch."""

    def __init__(self, seed: int, batch_rows: int = 16) -> None:
        self.batch_rows = batch_rows
        self.generator = torch.Generator().manual_seed(seed)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch: draws its order."""
        self.epoch, self.position = epoch, 0
        self.order = torch.randperm(ROWS, generator=self.generator)

    def next_rows(self) -> Tensor:
        if self.position == ROWS:
            self.set_epoch(self.epoch + 1)
        self.position += self.batch_rows
        return self.order[self.position - self.batch_rows : self.position]


class Trainer:
    """Mixed-precision training with augmentation; its steps depend on what is set here and on global random states."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.model = nn.Sequential(
            nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        self.sampler = Sampler(seed)
        data = torch.Generator().manual_seed(0)  # the same rows for every trainer: no part of its state
        self.x = torch.randn(ROWS, FEATURES, generator=data)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=data)).argmax(1)

    def step(self) -> float:
        """Take one step; returns the loss."""
        rows = self.sampler.next_rows()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(self.model(self.augmented(self.x[rows])), self.y[rows])
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item()

    def augmented(self, x: Tensor) -> Tensor:
        """Noise that fades from epoch to epoch, from NumPy; a feature left out, by Python's choice."""
        noise = torch.from_numpy(np.random.standard_normal(x.shape)).float()
        kept = torch.ones(FEATURES)
        kept[random.randrange(FEATURES)] = 0
        return (x + 0.3 / (1 + self.sampler.epoch) * noise) * kept
