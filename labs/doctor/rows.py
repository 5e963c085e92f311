"""Whether a dataset's samples are rows of tensors or arrays that it holds: then one index makes a batch."""

from __future__ import annotations

import random
import statistics
import sys
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
    numpy = sys.modules.get("numpy")
    arrays = (torch.Tensor, numpy.ndarray) if numpy else torch.Tensor
    values = [v for held in vars(dataset).values() for v in (held if isinstance(held, tuple | list) else [held])]
    held = [v for v in values[:MOST_HELD] if isinstance(v, arrays) and len(v.shape) and len(v) == len(dataset)]
    if not held or len(dataset) < 2:
        return None
    draws = _random_state()
    try:
        chosen = [_held_rows(held, dataset[i], i) for i in (0, len(dataset) // 2, len(dataset) - 1)]
    except Exception:  # the dataset's own: then it isn't so simple
        return None
    if draws != _random_state() or None in chosen or chosen.count(chosen[0]) < len(chosen):
        return None
    return lambda indices: [
        torch.as_tensor(held[k][indices if isinstance(held[k], torch.Tensor) else indices.numpy()]) for k in chosen[0]
    ]


def _held_rows(held: list[Any], sample: Any, i: int) -> list[int] | None:
    """Of which of these arrays each part of the sample is row `i`."""
    parts = sample if isinstance(sample, tuple | list) else [sample]
    parts = list(sample.values()) if isinstance(sample, dict) else parts
    found = [next((k for k, rows in enumerate(held) if _same(part, rows[i])), None) for part in parts]
    return None if None in found or not found else found


def _same(part: Any, row: Any) -> bool:
    if isinstance(part, str | bytes | dict):
        return False
    part, row = torch.as_tensor(part).double(), torch.as_tensor(row).double()
    return part.shape == row.shape and torch.allclose(part, row, rtol=1e-6, atol=0.0)  # in another format, perhaps


def _random_state() -> tuple[Any, Any]:
    """Two are equal if nothing was drawn between them."""
    return torch.get_rng_state().tolist(), random.getstate()


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
