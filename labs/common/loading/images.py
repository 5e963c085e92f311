"""The photos that notebook 02 loads, and the model that it trains on them, as in its first cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset

from labs.common.data.tiles import tiles


class Photos(Dataset):
    """JPEG files, decoded and resized on access: (3, 224, 224) uint8, label."""

    def __init__(self, paths, labels) -> None:
        self.paths, self.labels = paths, labels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        image = Image.open(self.paths[i]).convert("RGB").resize((224, 224))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1), self.labels[i]


def photos() -> Photos:
    """Return 1,024 JPEG tiles of 512 x 384 pixels, cut from nine photographs on first use."""
    cut = tiles()
    return Photos(cut.paths, cut.labels)


def cnn() -> nn.Module:
    """Classify (batch, 3, 224, 224) into nine classes; on one CPU core a little faster than two loading processes."""
    return nn.Sequential(
        nn.Conv2d(3, 20, 7, stride=4), nn.ReLU(), nn.Conv2d(20, 40, 3, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 9),
    )  # fmt: skip


def training_step(model: nn.Module, device: torch.device) -> Callable[[Any], None]:
    """Return a training step on a batch of uint8 images and labels in host memory."""
    model = model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step(batch: Any) -> None:
        images, labels = (part.to(device) for part in batch)
        loss = nn.functional.cross_entropy(model(images.float() / 255), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step
