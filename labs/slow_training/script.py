"""A healthy training script. Each fault of labs.slow_training changes one line of `train`."""

from __future__ import annotations

import functools
import inspect
import io
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import count
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

from labs.common.data import fashion_mnist

SYNC_BUFFERS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")  # the second is the name before torch 2.13
    if name in inspect.signature(DistributedDataParallel).parameters
)
DDP = functools.partial(DistributedDataParallel, **{SYNC_BUFFERS: False})
"""Each rank keeps its own BatchNorm statistics: broadcasting them in forward would hide a late rank."""


def part(name: str) -> AbstractContextManager[object]:
    """Mark a named part of a step. A measurement replaces this function with a timer."""
    return nullcontext()


def build_model(width: int) -> nn.Module:
    """(batch, 1, 28, 28) -> (batch, 10): four convolutions with BatchNorm, two linear layers."""
    layers: list[nn.Module] = []
    inputs = 1
    for outputs, stride in ((width, 2), (2 * width, 2), (2 * width, 1), (4 * width, 1)):
        layers += [nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        inputs = outputs
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * 49, 256), nn.ReLU(), nn.Linear(256, 10))


def normalized(images: Tensor) -> Tensor:
    """(N, 28, 28) uint8 -> (N, 1, 28, 28) of the default dtype."""
    return ((images.to(torch.get_default_dtype()) / 255 - 0.286) / 0.353).unsqueeze(1)


class DecodedOnDemand(Dataset):
    """PNG files in memory; an image is decoded each time it is requested."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.labels, self.files = labels, []
        for image in images.numpy():
            file = io.BytesIO()
            Image.fromarray(image).save(file, "PNG", compress_level=1)
            self.files.append(file.getvalue())

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        image = np.asarray(Image.open(io.BytesIO(self.files[i])))
        return normalized(torch.from_numpy(image.copy())[None])[0], self.labels[i]


def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the accuracy on 512 images."""
    model.eval()
    with torch.no_grad():
        right = (model.module(normalized(images[:512])).argmax(1) == labels[:512]).float().mean().item()
    model.train()
    return right


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """Save a checkpoint: weights and the optimizer's state."""
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}, path)


def medians(model: nn.Module) -> list[float]:
    """Return the median magnitude of each weight tensor and of its gradient."""
    return [t.abs().median().item() for p in model.parameters() for t in (p.detach(), p.grad)]


def singular_values(model: nn.Module) -> list[float]:
    """Return the largest singular value of each weight matrix."""
    return [torch.linalg.matrix_norm(p.detach().flatten(1), 2).item() for p in model.parameters() if p.dim() > 1]


def average_weights(model: nn.Module) -> None:
    """Average the weights over all ranks, though they are already the same."""
    for p in model.parameters():
        dist.all_reduce(p.data)
        p.data /= dist.get_world_size()


def all_distances(history: list[Tensor], output: Tensor) -> list[Tensor]:
    """Return the differences between outputs within a batch, for all batches so far, sorted."""
    pairs = (output[:, None, :6] - output[None, :, :6]).detach().flatten()
    return [torch.cat((*history, pairs)).sort().values]


def train(rank: int, ranks: int, seed: int, folder: Path) -> Iterator[tuple[float, int]]:
    """Train on this rank; yields the loss and the number of images after each step."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.autograd.set_detect_anomaly(False)
    torch.manual_seed(seed)
    data = fashion_mnist()
    images, labels = torch.from_numpy(data.x_train[:2048]), torch.from_numpy(data.y_train[:2048]).long()
    dataset = TensorDataset(normalized(images), labels)
    sampler = DistributedSampler(dataset, ranks, rank, seed=seed, drop_last=True)
    loader = DataLoader(dataset, batch_size=64, sampler=sampler, drop_last=True)
    model = build_model(width=8)
    model = DDP(model, bucket_cap_mb=25)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    validate_every, save_every = 500, 1000
    history, step = [], 0
    for epoch in count():
        sampler.set_epoch(epoch)
        batches = iter(loader)
        while True:
            with part("data"):
                batch = next(batches, None)
            if batch is None:
                break
            x, y = batch
            with part("forward"):
                output = model(x)
                loss = cross_entropy(output, y)
            optimizer.zero_grad()
            with part("backward"):
                loss.backward()
            with part("optimizer"):
                optimizer.step()
            step += 1
            history.append(loss.detach())
            if step % validate_every == 0:
                evaluate(model, images, labels)
            if step % save_every == 0:
                save(model, optimizer, folder / f"checkpoint-{rank}.pt")
            yield loss.item(), len(x)
