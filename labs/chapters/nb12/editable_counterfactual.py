"""An editable round of notebook 12: the learner writes counterfactuals, and they take steps in turn."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labs.chapters.nb12.visit import is_smoke
from labs.common.loading.feed import endless
from labs.doctor_trial.cases import FASHION
from labs.doctor_trial.scripts.train_images import IMAGES, Files, build_model
from labs.kit import measure
from labs.kit.errors import require

BATCH, BLOCK, MOST_ROUNDS, SECONDS = 64, 4, 40, 6.0
"""Samples of a step; steps of a turn."""


class Job:
    """The patient's training, one step at a time: decoded images of clothes, a convolutional network, AdamW."""

    def __init__(self) -> None:
        import numpy as np

        torch.manual_seed(0)
        with np.load(FASHION) as arrays:
            images, labels = (torch.from_numpy(arrays[name][:IMAGES]) for name in ("x_train", "y_train"))
        self.model = build_model(width=8)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.batches: Iterator[tuple[Tensor, Tensor]] = iter(endless(Files(images, labels.long()), 0, BATCH))
        self.kept = next(self.batches)

    def train(self, x: Tensor, y: Tensor) -> None:
        """A step on images (batch, 1, 28, 28) and labels (batch,)."""
        loss = cross_entropy(self.model(x), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def state(self) -> tuple[Any, ...]:
        """Copies of what a step changes: weights, the optimizer's state, random numbers."""
        return (
            copy.deepcopy(self.model.state_dict()),
            copy.deepcopy(self.optimizer.state_dict()),
            torch.get_rng_state(),
        )

    def put_back(self, state: tuple[Any, ...]) -> None:
        """As if the steps since then had not been."""
        weights, optimizer, numbers = state
        self.model.load_state_dict(weights)
        self.optimizer.load_state_dict(optimizer)
        torch.set_rng_state(numbers)


Way = Callable[[Job], object]


def compare(as_it_is: Way, *otherwise: Way, seconds: float = SECONDS) -> None:
    """Steps of the first way and of each other one in turn, for `seconds`; prints how many times as fast each is.

    After the turn of any but the first, the job is put back.
    """
    ways = {way.__name__: way for way in (as_it_is, *otherwise)}
    require(len(ways) == 1 + len(otherwise) > 1, "compare() needs two functions or more, each with a name of its own")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        tell(taken_in_turn(ways, 0.5 if is_smoke() else seconds))
    finally:
        torch.set_num_threads(threads)


def taken_in_turn(ways: dict[str, Way], seconds: float) -> dict[str, list[float]]:
    """Seconds of a step by way, a mean for each round."""
    job, first = Job(), next(iter(ways))
    step_s: dict[str, list[float]] = {name: [] for name in ways}
    for name in ways:
        _turn(job, ways[name], name == first)  # warm-up: first calls are slower
    for order in measure.within(measure.orders(tuple(ways), 10_000), measure.Budget(seconds, most=MOST_ROUNDS)):
        for name in order:
            step_s[name].append(_turn(job, ways[name], name == first))
    return step_s


def _turn(job: Job, way: Way, stays: bool) -> float:
    before = job.state()
    begun = time.perf_counter()
    for _ in range(BLOCK):
        way(job)
    took = (time.perf_counter() - begun) / BLOCK
    if not stays:
        job.put_back(before)
    return took


def price(line: Callable[[nn.Module], object], calls: int = 20) -> None:
    """Print the median time of `line(model)` beside that of a step without it, taken in turn after a step each."""
    job, step_ms, line_ms = Job(), [], []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for _ in range(calls + 2):
            begun = time.perf_counter()
            job.train(*job.kept)
            between = time.perf_counter()
            line(job.model)
            step_ms.append(1e3 * (between - begun))
            line_ms.append(1e3 * (time.perf_counter() - between))
    finally:
        torch.set_num_threads(threads)
    for name, ms in (("a step on one rank, its data there", step_ms), (line.__name__, line_ms)):
        print(f"{name:36} {measure.estimate(ms[2:], 'ms')}")


def tell(step_s: dict[str, list[float]]) -> None:
    """Print the median step of each way, and the median of the ratios within rounds."""
    first = next(iter(step_s))
    for name, seconds in step_s.items():
        line = f"{name:18} {measure.estimate([1e3 * s for s in seconds]).value:6.1f} ms"
        if name != first:
            ratio = measure.paired_ratio(step_s[first], seconds)
            line += f"   {ratio} as fast"
        print(line)
    print(f"{len(step_s[first])} rounds of {BLOCK} steps each, in turn; ratios: {first} / the other, within a round")
