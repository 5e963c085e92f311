"""Way 8: a unit that is not the same for both: tokens, of which one side has more that are padding."""

from __future__ import annotations

import functools
import re
import statistics
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from labs.common.data import moby_dick
from labs.common.data_parallel.training import train_step
from labs.common.models.text_models import Block
from labs.kit import measure

PADDING, WORDS = 0, 256
"""Number of the token that fills up a batch; the book's words are hashed to the numbers from 1 to 255."""
FIRST = "Call me Ishmael"
SENTENCES, ROWS, WIDTH = 128, 16, 64
"""Sentences of a pass and of a batch; width of the model."""
ORDERS = ("as they come", "by length")


def padding_counts_as_tokens(
    step: Callable[[Tensor], object], batches: Mapping[str, Sequence[Tensor]], device: torch.device, seed: int
) -> tuple[float, float]:
    """(fooled, honest) speed-up by sorting sentences by length: in tokens/s with the padding, and without it.

    `batches` of each of ORDERS hold the same sentences; `step` trains on one batch.
    """

    def one_pass(order: str) -> None:
        for batch in batches[order]:
            step(batch)

    seconds = measure.interleave({o: functools.partial(one_pass, o) for o in ORDERS}, 2, device, seed=seed)

    def gain(tokens: Callable[[Tensor], int]) -> float:
        unsorted, by_length = (sum(map(tokens, batches[o])) / statistics.median(seconds[o]) for o in ORDERS)
        return by_length / unsorted

    return gain(Tensor.numel), gain(lambda batch: int((batch != PADDING).sum()))


def sentences() -> list[Tensor]:
    """The first sentences of Moby-Dick's first chapter, each a row of numbers of its words."""
    book = moby_dick()
    parts = re.split(r"(?<=[.!?;])\s+", book[book.index(FIRST) :][: 400 * SENTENCES])[:SENTENCES]
    return [torch.tensor([1 + sum(map(ord, word)) % (WORDS - 1) for word in part.split()]) for part in parts]


def batched(rows: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """ROWS rows at a time, each batch padded to its longest: (rows, longest) int64."""
    groups = (list(rows[k : k + ROWS]) for k in range(0, len(rows), ROWS))
    return [nn.utils.rnn.pad_sequence(g, batch_first=True, padding_value=PADDING).to(device) for g in groups]


def next_word_training(device: torch.device, seed: int) -> Callable[[Tensor], None]:
    """A step of a transformer block that learns to predict each next word; padding is no target."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(WORDS, WIDTH), Block(WIDTH, 4), nn.Linear(WIDTH, WORDS)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=PADDING)

    return lambda batch: train_step(model, optimizer, batch[:, :-1], batch[:, 1:], loss)
