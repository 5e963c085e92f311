"""Find out if a dataset's samples are rows of tensors or arrays that it holds, so that one index makes a batch."""

from __future__ import annotations

import copy
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset

BATCHES = 8
MOST_HELD = 50  # Values of a dataset to check


def rows_in_memory(dataset: Any) -> Callable[[Any], Any] | None:
    """Return a function that makes a batch with one index; None if samples aren't rows of tensors in the dataset.

    Checked on three samples: a decoded or augmented sample is no row.
    """
    dataset = copy.copy(whole(dataset))  # a file that it opens when it is read stays in this copy
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or hasattr(dataset, "__getitems__"):
        return None
    held = [v for of in vars(dataset).values() for v in (of if isinstance(of, tuple | list) else [of])][:MOST_HELD]
    arrays = [v for v in held if hasattr(v, "__array__") and len(getattr(v, "shape", ())) and len(v) == len(dataset)]
    if not arrays:
        return None
    of_torch, of_python, of_numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        chosen = [_held_rows(arrays, dataset[i], i) for i in (0, len(dataset) // 2, len(dataset) - 1)]
        same_draws = torch.equal(of_torch, torch.get_rng_state()) and of_python == random.getstate()
    finally:
        torch.set_rng_state(of_torch), random.setstate(of_python), np.random.set_state(of_numpy)
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
    try:
        return _by_batch_ms(dataset, batch_size) if batch_size else None
    except Exception:  # a list has no attributes, a dataset may raise anything: its samples aren't plain rows
        return None


def _by_batch_ms(dataset: Any, batch_size: int) -> float | None:
    rows = rows_in_memory(dataset)
    if rows is None:
        return None
    order, times = torch.randperm(len(whole(dataset)), generator=torch.Generator()), []
    for at in range(BATCHES + 1):
        begun = time.perf_counter()
        rows(order[at * batch_size % len(order) :][:batch_size])
        times.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(times[1:])
