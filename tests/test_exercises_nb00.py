"""Checkers of notebook 00: right answers of another style pass, and some wrong ones of rarer kinds have their name."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
from speeds import first

from labs.chapters.nb00 import exercise_busbw
from labs.kit.check import Mistake, examine


def passes(exercise_id, candidate):
    outcome = examine(exercise_id, candidate)
    assert outcome.state == "passed", outcome.text


def by_table(report):
    """A table of predicates, asked in another order."""
    calls = report["pass: operators"] * report["host time of an operator (µs)"]
    signs = {
        "overhead": calls >= max(v for k, v in report.items() if k in ("pass: arithmetic (µs)", "pass: memory (µs)")),
        "cache": report["triad: its arrays together (MiB)"] <= report["caches (MiB)"],
        "cores": report["device"] == "cpu" and report["usable cores"] / report["ranks"] < 1,
        "tf32": report["FP32 product (TFLOP/s)"] > 1.1 * (report["published FP32 peak (TFLOP/s)"] or float("inf")),
        "busy": np.greater(report["busy before the run (%)"], 5),
    }
    return next((word for word, found in signs.items() if found), "healthy")


def test_another_way_to_diagnose_passes():
    passes("00.1", by_table)


def block_of_calls(size_bytes):
    """One block of calls between two reads of the clock, as nccl-tests has it, and an object gathered."""
    ranks, buffer = dist.get_world_size(), torch.ones(size_bytes // 8, dtype=torch.float64)
    for _ in range(2):
        dist.all_reduce(buffer)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(6):
        dist.all_reduce(buffer)
    seconds = (time.perf_counter() - start) / 6
    found = [None] * ranks
    dist.all_gather_object(found, seconds)
    return torch.tensor(2 * (1 - 1 / ranks) * size_bytes / max(found) * 1e-9, dtype=torch.float64)


def asynchronous(size_bytes):
    """Asynchronous calls that are waited for, and NumPy."""
    ranks, buffer, seconds = dist.get_world_size(), torch.empty(size_bytes, dtype=torch.uint8), []
    dist.all_reduce(buffer.zero_())
    for _ in range(5):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(buffer, async_op=True).wait()
        seconds.append(time.perf_counter() - start)
    slowest = torch.tensor([np.mean(seconds)])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(np.float64(size_bytes) / 1e9 / slowest[0] * (2 - 2 / ranks))


@pytest.mark.parametrize("right", first(1, [block_of_calls, asynchronous]))
def test_other_ways_to_measure_pass(right):
    passes("00.3", right)


SIZE = 2**20
CALLS = {0: [1.1, 0.1, 0.1, 0.1, 0.1, 0.1], 1: [1.1, 0.1, 0.1, 0.1, 0.1, 0.1]}
"""Seconds of each all-reduce by rank, the first one included: both ranks wait for the slower one."""


def log_of(times, pause=(0.001,) * 5):
    """The checker's log of calls of so many seconds, with so long a pause after each but the last."""
    begun = [sum(times[:k]) + sum(pause[:k]) for k in range(len(times))]
    return [(SIZE, b, b + t) for b, t in zip(begun, times, strict=True)]


def stalled(rank=None, call=0, more_s=0.0):
    """The calls, with one that a neighbour made longer."""
    return {r: [t + more_s * (r == rank and k == call) for k, t in enumerate(times)] for r, times in CALLS.items()}


def test_a_measurement_that_was_disturbed_is_made_again_and_a_wrong_answer_stays_wrong(monkeypatch):
    found = {
        "quiet": [log_of(times) for times in CALLS.values()],
        "a long call": [log_of(times) for times in stalled(1, 3, 0.9).values()],
        "a long pause": [log_of(times, (0.001, 0.001, 0.9, 0.001, 0.001)) for times in CALLS.values()],
    }
    runs = []

    def on_ranks(body, ranks, f, size, first_s, when):
        runs.append(next(order))
        return [(f(size), [(size, begun, end) for _, begun, end in log]) for log in found[runs[-1]]]

    monkeypatch.setattr(exercise_busbw, "_on_a_made_clock", lambda f: None)
    monkeypatch.setattr(exercise_busbw, "on_ranks", on_ranks)
    monkeypatch.setattr(exercise_busbw.collectives, "bus_factor", lambda name, ranks: 1.0)
    order = iter(["a long call", "a long pause", "quiet"] * 2)
    exercise_busbw.check_busbw(lambda size: size / 1e9 / {"quiet": 0.1}.get(runs[-1], 0.7))
    assert runs == ["a long call", "a long pause", "quiet"] * 2

    order = iter(["a long pause", "quiet"])
    with pytest.raises(Mistake, match="you answer"):
        exercise_busbw.check_busbw(lambda size: size / 1e9 / 0.5)  # no slip that is known

    monkeypatch.setattr(exercise_busbw, "AGAIN_S", 0.0)
    order = iter(["a long call"])
    with pytest.raises(Mistake, match="you answer"):  # a machine that stays busy
        exercise_busbw.check_busbw(lambda size: size / 1e9 / 0.7)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda size_bytes: 0.05, "no all-reduce was seen"),
        (
            lambda size_bytes: [dist.all_reduce(torch.zeros(size_bytes // 4)) for _ in range(5)] and 700.0,
            "you answer 7",
        ),
        *first(
            0,
            [
                (lambda size_bytes: dist.all_reduce(torch.zeros(size_bytes // 4)) or 0.05, "only 1 all-reduces"),
                (lambda size_bytes: dist.all_reduce(torch.zeros(8)) or 0.05, "your all-reduces had 32 bytes"),
            ],
        ),
    ],
)
def test_a_number_that_was_not_measured_is_told(wrong, words):
    assert words in examine("00.3", wrong).text


def cores(share):
    def usable_cores(affinity, cpu_max):
        quota, period = cpu_max.split()
        return len(affinity) if quota == "max" else share(len(affinity), int(quota), int(period))

    return usable_cores


@pytest.mark.parametrize(
    "right",
    [
        cores(lambda n, quota, period: np.clip(quota // period, 1, n)),  # a NumPy integer
        cores(lambda n, quota, period: min(n, quota // period) or 1),
    ],
)
def test_other_whole_numbers_of_cores_pass(right):
    passes("00.2", right)
