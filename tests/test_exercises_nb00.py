"""Exercises of notebook 00: right answers of another style pass, and answers that measure nothing don't."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from speeds import first

from labs.kit.check import examine


def by_table(card):
    """Asks in another order, with a table of predicates."""
    reasons = card["throttle reasons"]
    signs = {
        "idle": card["utilisation (%)"] < 1,
        "power": any(reason.startswith("power") for reason in reasons),
        "heat": any(reason.endswith("thermal slowdown") for reason in reasons),
        "locked": "application clocks setting" in reasons,
    }
    return next((word for word, found in signs.items() if found), "fine")


def by_float(affinity, cpu_max):
    quota, period = cpu_max.split()
    share = math.inf if quota == "max" else float(quota) / float(period)
    return np.int64(min(len(affinity), max(1, math.floor(min(share, 1e6)))))


def block_of_calls(size_bytes):
    """One block of calls between two reads of the clock, as nccl-tests has it, and an object gathered."""
    ranks, buffer = dist.get_world_size(), torch.ones(size_bytes // 8, dtype=torch.float64)
    for _ in range(2):
        dist.all_reduce(buffer)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(6):
        dist.all_reduce(buffer)
    found = [None] * ranks
    dist.all_gather_object(found, (time.perf_counter() - start) / 6)
    return torch.tensor(2 * (1 - 1 / ranks) * size_bytes / max(found) * 1e-9, dtype=torch.float64)


def asynchronous(size_bytes):
    """Asynchronous calls that are waited for."""
    ranks, buffer, seconds = dist.get_world_size(), torch.zeros(size_bytes, dtype=torch.uint8), []
    dist.all_reduce(buffer)
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer, async_op=True).wait()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor([np.mean(seconds)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(size_bytes / 1e9 / slowest[0] * (2 - 2 / ranks))


RIGHT = [("00.1", by_table), ("00.2", by_float), ("00.3", block_of_calls), *first(0, [("00.3", asynchronous)])]


@pytest.mark.parametrize(("exercise_id", "answer"), RIGHT)
def test_another_way_passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def never_waited(size_bytes):
    buffer = torch.zeros(size_bytes // 4)
    work = [dist.all_reduce(buffer, async_op=True) for _ in range(5)]
    return 1e-3 * len(work)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda size_bytes: 0.05, "4 or more"),
        (lambda size_bytes: "fast", "expected 'a number', got"),
        *first(0, [(never_waited, "it waits for every all-reduce")]),
    ],
)
def test_what_was_not_measured_is_said(answer, words):
    outcome = examine("00.3", answer)
    assert outcome.state == "not yet" and words in outcome.text, outcome.text


def test_a_fraction_of_a_core_is_shown():
    text = examine(
        "00.2", lambda affinity, cpu_max: 2.7 if cpu_max == "270000 100000" else by_float(affinity, cpu_max)
    ).text
    assert "2.7" in text and "not a whole number" in text
