"""The models that train on JPEG tiles, and a dataset that watches what a worker loads."""

import itertools
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, get_worker_info

from labs.common.loading.feed import on_device

WIDTHS = {"light": 16, "even": 64, "heavy": 128}
"""Channels of the first layer; "even" is about as fast as one loading process."""


class TileNet(nn.Module):
    """Averages 4 x 4 pixels, then three convolutions with stride 2; takes (batch, 3, 224, 224) uint8 images."""

    def __init__(self, width: int, classes: int = 9) -> None:
        super().__init__()
        sizes = (3, width, 2 * width, 4 * width)
        layers = [m for a, b in itertools.pairwise(sizes) for m in (nn.Conv2d(a, b, 3, stride=2, padding=1), nn.ReLU())]
        self.features = nn.Sequential(nn.AvgPool2d(4), *layers)
        self.head = nn.Linear(4 * width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """(batch, 3, 224, 224), uint8 or float32 in 0-255 -> (batch, classes) logits."""
        return self.head(self.features(images.float().div(255)).mean((2, 3)))


class Trainer:
    """One training step of a TileNet on a batch (images, labels) that may still be on the host."""

    def __init__(self, width: int, device: torch.device, seed: int, non_blocking: bool = False) -> None:
        torch.manual_seed(seed)
        self.module, self.device, self.non_blocking = TileNet(width).to(device), device, non_blocking
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)

    def __call__(self, batch: Any) -> None:
        images, labels = on_device(batch, self.device, self.non_blocking)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(images), labels).backward()
        self.optimizer.step()


class Watched(Dataset):
    """`dataset` with who loaded an item and when: adds (worker, start_s, end_s) of the clock that all share."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple:
        start = time.perf_counter()
        item = self.dataset[index]
        info = get_worker_info()
        # float64, or the collated seconds would be rounded to milliseconds after a few hours of uptime
        seconds = torch.tensor((start, time.perf_counter()), dtype=torch.float64)
        return (*item, -1 if info is None else info.id, seconds)
