"""Way 9: samples per second, told as if they were learning."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from labs.kit import measure

Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Images and labels to train on, and others to judge by."""
JUDGED = 1000
MOST_SAMPLES = 500_000
"""A training that has not reached its loss by then ends there."""


def samples_told_as_learning(train: Callable[[int], tuple[int, float]], small: int, large: int) -> tuple[float, float]:
    """(fooled, honest) speed-up of a large batch: by samples per second, and by the time until the loss is reached.

    `train(batch)` trains until then and returns its samples and seconds.
    """
    samples, seconds = train(small)
    samples_large, seconds_large = train(large)
    by_samples = (samples_large / seconds_large) / (samples / seconds)
    by_learning = seconds / seconds_large
    return by_samples, by_learning


def train_to_loss(batch: int, rate: float, seed: int, data: Data, target: float) -> tuple[int, float]:
    """Samples and seconds until a perceptron's loss on other images is at most `target` nats; judging costs none."""
    images, labels, others, answers = data
    device = images.device
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(196, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> None:
        rows = torch.randint(len(images), (batch,), device=device)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
        optimizer.step()

    samples, seconds, every = 0, 0.0, max(1, 512 // batch)
    while samples < MOST_SAMPLES:
        seconds += sum(measure.time_steps(step, every, device))
        samples += every * batch
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(others[:JUDGED]), answers[:JUDGED]).item()
        if loss <= target:
            break
    return samples, seconds
