"""Find out if a dataset's samples are rows of tensors or arrays that it holds, so that one index makes a batch."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset

BATCHES = 8
MOST_HELD = 50  # Values of a dataset to check


def rows_in_memory(dataset: Any) -> Callable[[Any], Any] | None:
    """Return a function that makes a batch with one index; None if samples aren't rows of tensors in the dataset.

    Checked on three samples: a decoded or augmented sample is no row.
    """
    dataset = whole(dataset)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or hasattr(dataset, "__getitems__"):
        return None
    values = [v for held in vars(dataset).values() for v in (held if isinstance(held, tuple | list) else [held])]
    arrays = [v for v in values[:MOST_HELD] if hasattr(v, "__array__") and len(v.shape) and len(v) == len(dataset)]
    draws = torch.get_rng_state().tolist(), random.getstate()
    try:
        chosen = [_held_rows(arrays, dataset[i], i) for i in (0, len(dataset) // 2, len(dataset) - 1)]
    except Exception:  # raised by the dataset: its samples aren't plain rows
        return None
    same_draws = draws == (torch.get_rng_state().tolist(), random.getstate())
    if not same_draws or not chosen[0] or chosen.count(chosen[0]) < len(chosen):
        return None
    held = [arrays[k] for k in chosen[0]]
    return lambda ix: [torch.as_tensor(rows[ix if isinstance(rows, torch.Tensor) else ix.numpy()]) for rows in held]


def _held_rows(held: list[Any], sample: Any, i: int) -> list[int] | None:
    """Return which array has each part of the sample as its row `i`, in any dtype; None if a part is in no array."""
    parts = list(sample.values()) if isinstance(sample, dict) else sample
    parts = parts if isinstance(parts, tuple | list) else [parts]
    parts, rows = ([torch.as_tensor(x).double() for x in of] for of in (parts, [array[i] for array in held]))
    found = [
        next(
            (k for k, row in enumerate(rows) if part.shape == row.shape and torch.allclose(part, row, 1e-6, 0.0)), None
        )
        for part in parts
    ]
    return None if None in found else found


def whole(dataset: Any) -> Any:
    """Return the whole dataset that a Subset, as from random_split, is a part of."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def by_batch_ms(dataset: Any, batch_size: int | None) -> float | None:
    """Return the median time of one index for a batch, in random order; None if samples aren't plain rows."""
    rows = rows_in_memory(dataset) if batch_size else None
    if rows is None:
        return None
    order, times = torch.randperm(len(whole(dataset)), generator=torch.Generator()), []
    for at in range(BATCHES + 1):
        begun = time.perf_counter()
        rows(order[at * batch_size % len(order) :][:batch_size])
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[1:])
