"""What a training run asks of its allocator, in order, and what an allocator makes of it."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.optim import Optimizer

from labs.parts.models import Workload
from labs.parts.models.large_models import BertShape, bert
from labs.parts.oracle.internals import CudaRules, FakeTensorMode
from labs.parts.oracle.tracker import Block as Tracked
from labs.parts.oracle.tracker import Tracker
from labs.parts.remedies.blocks import Block
from labs.parts.remedies.caching_allocator import CachingAllocator

Request = tuple[int, int]  # (number of a tensor, its bytes); 0 bytes: it is freed

SHAPE = BertShape(layers=4, hidden=768, heads=12)  # a third of BERT-base
SHORTEST, LONGEST = 128, 512  # tokens


class Replay:
    """Puts requests to `allocator`. Tensors that are still there when one `feed` ends are there for the next."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.held: dict[int, Block] = {}

    def feed(self, requests: Iterable[Request]) -> None:
        """OutOfMemory where the allocator says so. Empty tensors get no block, as in torch."""
        malloc, free, held = self.allocator.malloc, self.allocator.free, self.held
        for number, size in requests:
            if size:
                held[number] = malloc(size)
            elif number in held:
                free(held.pop(number))


def slivers(count: int, large_bytes: int, small_bytes: int) -> tuple[list[Request], list[Request], list[Request]]:
    """A pattern that fragments, in three parts: large tensors that go, as many smaller ones, one large tensor.

    A smaller tensor settles in the segment of a large one that has gone, which can then not be given back. All that
    is free are `count` rests; the last tensor, of their size together, fits into none.
    """
    first = [(i, large_bytes) for i in range(count)] + [(i, 0) for i in range(count)]
    second = [(count + i, small_bytes) for i in range(count)]
    return first, second, [(2 * count, count * (large_bytes - small_bytes))]


@dataclass(frozen=True)
class Run:
    """A training run: tensors that are there all the time, and the requests of a step by its length in tokens."""

    resident: list[Request]
    steps: dict[int, list[Request]]


def draw_lengths(kinds: int, steps: int, seed: int) -> list[int]:
    """Tokens in the longest sequence of each of `steps` batches: `kinds` different ones, LONGEST among them."""
    draw = random.Random(seed)
    found = [*draw.sample(range(SHORTEST, LONGEST), kinds - 1), LONGEST]
    drawn = [draw.choice(found) for _ in range(steps)]
    drawn[steps // 2] = LONGEST
    return drawn


def bert_run(lengths: Iterable[int], rows: int, shape: BertShape = SHAPE) -> Run:
    """A run of BERT with AdamW, traced on tensors that have a shape but no memory, by CUDA's rules.

    Gradients go at the end of each step, so that a step asks for the same whichever came before it.
    """
    with FakeTensorMode(), Tracker() as tracker:
        module = bert(shape, LONGEST).module
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, foreach=True)  # as on a GPU
        _step(module, optimizer, bert(replace(shape, layers=0), SHORTEST), rows)  # makes Adam's state
        resident = [(id(block), block.nbytes) for block, _ in tracker.live.values()]
        parts = {}
        for n in dict.fromkeys(lengths):
            batches, start = bert(replace(shape, layers=0), n), len(tracker.moves)
            _step(module, optimizer, batches, rows)
            parts[n] = tracker.moves[start:]
    return Run(resident, {n: [_request(*move) for move in part] for n, part in parts.items()})


def _request(tracked: Tracked, sign: int, *op: object) -> Request:
    return id(tracked), tracked.nbytes if sign > 0 else 0  # the tracker keeps all it has seen: no id comes twice


def _step(module: nn.Module, optimizer: Optimizer, batches: Workload, rows: int) -> None:
    x, y = batches.make_batch(rows)
    with CudaRules(None):
        loss = batches.loss(module(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
