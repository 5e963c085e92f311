"""Way 9: samples per second, told as if they were learning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from labs.kit import measure

Data = tuple[Tensor, Tensor, Tensor, Tensor]
"""Images and labels to train on, and others to judge by."""
JUDGED = 1000
MOST_SAMPLES = 500_000
"""A training that has not reached its loss by then ends there."""
RATES = (0.05, 0.1, 0.2, 0.4, 0.8, 1.6)
"""Learning rates of SGD that are searched, for each batch size of its own."""


def samples_told_as_learning(
    train: Callable[[int, float], tuple[int, float]], rates: Mapping[int, float]
) -> tuple[float, float]:
    """(fooled, honest) speed-up of a large batch: by samples per second, and by the time until the loss is reached.

    `train(batch, rate)` trains until then and returns its samples and seconds; `rates` are those of the small batch
    and of the large one, in this order.
    """
    (samples, seconds), (samples_large, seconds_large) = (train(batch, rate) for batch, rate in rates.items())
    by_samples = (samples_large / seconds_large) / (samples / seconds)
    by_learning = seconds / seconds_large
    return by_samples, by_learning


def best_rate(samples_to_loss: Callable[[float, int], int], rates: Sequence[float] = RATES) -> float:
    """The learning rate whose neighbours in `rates` need more samples to the loss, searched from the middle.

    `samples_to_loss(rate, most)` may give up at `most` samples: it has lost by then.
    """
    best = middle = len(rates) // 2
    fewest = samples_to_loss(rates[middle], MOST_SAMPLES)
    for step in (1, -1):
        while 0 <= best + step < len(rates) and (n := samples_to_loss(rates[best + step], fewest)) < fewest:
            best, fewest = best + step, n
        if best != middle:
            break  # the other side has been passed
    return rates[best]


def train_to_loss(
    batch: int, rate: float, seed: int, data: Data, target: float, most: int = MOST_SAMPLES
) -> tuple[int, float]:
    """Samples and seconds until a perceptron's loss on other images is at most `target` nats; judging costs none.

    After `most` samples the training ends without it.
    """
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
    while samples < most:
        seconds += sum(measure.time_steps(step, every, device))
        samples += every * batch
        with torch.no_grad():
            loss = nn.functional.cross_entropy(model(others[:JUDGED]), answers[:JUDGED]).item()
        if loss <= target:
            break
    return samples, seconds
