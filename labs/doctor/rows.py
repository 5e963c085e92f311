"""Whether a dataset's samples are rows of tensors or arrays that it holds: then one index makes a batch."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import Subset

BATCHES = 8
MOST_HELD = 50  # Values of a dataset that are looked at


def rows_in_memory(dataset: Any) -> Callable[[Any], Any] | None:
    """What gives all rows of a batch with one index, where a sample is rows of tensors that the dataset holds; or None.

    That it does is tried on some samples: what is decoded or augmented is no row.
    """
    dataset = whole(dataset)
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or hasattr(dataset, "__getitems__"):
        return None
    values = [v for held in vars(dataset).values() for v in (held if isinstance(held, tuple | list) else [held])]
    arrays = [v for v in values[:MOST_HELD] if hasattr(v, "__array__") and len(v.shape) and len(v) == len(dataset)]
    draws = torch.get_rng_state().tolist(), random.getstate()
    try:
        chosen = [_held_rows(arrays, dataset[i], i) for i in (0, len(dataset) // 2, len(dataset) - 1)]
    except Exception:  # the dataset's own: then it isn't so simple
        return None
    same_draws = draws == (torch.get_rng_state().tolist(), random.getstate())
    if not same_draws or not chosen[0] or chosen.count(chosen[0]) < len(chosen):
        return None
    held = [arrays[k] for k in chosen[0]]
    return lambda ix: [torch.as_tensor(rows[ix if isinstance(rows, torch.Tensor) else ix.numpy()]) for rows in held]


def _held_rows(held: list[Any], sample: Any, i: int) -> list[int] | None:
    """Of which of these arrays each part of the sample is row `i`; in another format, perhaps."""
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
    """Of a part (random_split) the dataset that it is a part of."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset


def by_batch_ms(dataset: Any, batch_size: int | None) -> float | None:
    """Of one index for each batch, in an order by lot; None if samples are more than rows."""
    rows = rows_in_memory(dataset) if batch_size else None
    if rows is None:
        return None
    order, times = torch.randperm(len(whole(dataset)), generator=torch.Generator()), []
    for at in range(BATCHES + 1):
        begun = time.perf_counter()
        rows(order[at * batch_size % len(order) :][:batch_size])
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[1:])
