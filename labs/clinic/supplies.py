"""What the clinic's training is made of besides its loop: a model, three ways to keep its images, savers and checks."""

from __future__ import annotations

import io
import os
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from labs.clinic.sync_buffers import SYNC_BUFFERS
from labs.common.data import fashion_mnist

IMAGES = 2048
OWN_BUFFERS = {SYNC_BUFFERS: False}
"""Ranks keep BatchNorm's statistics to themselves: DDP's copy in forward would hide who is late."""


def part(name: str) -> AbstractContextManager[object]:
    """A named part of a step. It does nothing here: whoever measures puts a stopwatch in its place."""
    return nullcontext()


def build_model(width: int = 8) -> nn.Module:
    """(batch, 1, 28, 28) images -> (batch, 10) logits: four convolutions with BatchNorm, then two linear layers."""
    layers: list[nn.Module] = []
    for inputs, outputs, stride in (
        (1, width, 2),
        (width, 2 * width, 2),
        (2 * width, 2 * width, 1),
        (2 * width, 4 * width, 1),
    ):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * width * 49, 256), nn.ReLU(), nn.Linear(256, 10))


def load_images() -> tuple[Tensor, Tensor]:
    """Real images (IMAGES, 28, 28) uint8 and their labels (IMAGES,) int64."""
    data = fashion_mnist()
    return torch.from_numpy(data.x_train[:IMAGES]), torch.from_numpy(data.y_train[:IMAGES]).long()


def normalised(images: Tensor) -> Tensor:
    """(N, 28, 28) uint8 -> (N, 1, 28, 28) float32 with mean 0 and deviation 1."""
    return ((images / 255 - 0.286) / 0.353).unsqueeze(1)


def in_memory(images: Tensor, labels: Tensor, folder: Path) -> Dataset:
    """Decoded once, before the training."""
    return TensorDataset(normalised(images), labels)


class decoded_when_asked(Dataset):
    """PNG files in memory: every image is decoded each time that it is asked for."""

    def __init__(self, images: Tensor, labels: Tensor, folder: Path) -> None:
        self.labels, self.files = labels, []
        for image in images.numpy():
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG", compress_level=1)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = np.asarray(Image.open(io.BytesIO(self.files[i])))
        return normalised(torch.from_numpy(image.copy())[None])[0], self.labels[i]


class read_when_asked(Dataset):
    """A compressed archive that each batch opens anew: to read some rows, NumPy unpacks the whole array."""

    def __init__(self, images: Tensor, labels: Tensor, folder: Path) -> None:
        self.path, self.length = folder / "images.npz", len(images)
        if not self.path.exists():
            np.savez_compressed(self.path, x=images.numpy(), y=labels.numpy())

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, rows: list[int]) -> list[tuple[Tensor, Tensor]]:
        with np.load(self.path) as archive:
            x, y = normalised(torch.from_numpy(archive["x"][rows])), torch.from_numpy(archive["y"][rows])
        return list(zip(x, y, strict=True))


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of right answers on 256 images."""
    model.eval()
    with torch.no_grad():
        right = (model.module(normalised(images[:256])).argmax(1) == labels[:256]).float().mean().item()
    model.train()
    return right


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """A checkpoint: weights and the optimizer's states."""
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)


def statistics(model: nn.Module) -> dict[str, float]:
    """The median magnitude of each weight tensor and of its gradient, as a monitoring service draws them."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = p.detach().abs().median().item()
        found[f"{name}.grad"] = p.grad.abs().median().item()
    return found


def largest_singular_values(model: nn.Module) -> list[float]:
    """Of each weight matrix: whether training blows up."""
    return [torch.linalg.matrix_norm(p.detach().flatten(1), 2).item() for p in model.parameters() if p.dim() > 1]


def average_weights(model: nn.Module) -> None:
    """Mean of all ranks' weights. Collective, and with DDP idle work: they are the same already."""
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def quality(history: list[Tensor], output: Tensor) -> list[Tensor]:
    """How far two outputs of a batch are apart in six classes, of all batches so far, sorted for quantiles."""
    pairs = (output[:, None, :6] - output[None, :, :6]).detach().flatten()
    return [torch.cat((*history, pairs)).sort().values]


class Log:
    """One row for each value; `durable` waits after each until the disk has it."""

    def __init__(self, path: Path, durable: bool) -> None:
        self.file, self.durable = path.open("w", buffering=1), durable

    def write(self, step: int, values: Tensor) -> None:
        """A row for each of `values`."""
        for value in values.tolist():
            self.file.write(f"{step} {value:.4f}\n")
            if self.durable:
                os.fsync(self.file.fileno())
