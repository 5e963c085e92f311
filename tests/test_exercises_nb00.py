"""Checkers of notebook 00: right answers of another style pass, and some wrong ones of rarer kinds have their name."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
import torch.distributed as dist

from labs.chapters.nb00 import exercise_reports
from labs.kit import hardware
from labs.kit.check import examine


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


def by_numbers(report):
    """NumPy text, and rules on times as shares."""
    if report["busy before the run (%)"] >= 50:
        return np.str_("busy")
    if (
        report["published FP32 peak (TFLOP/s)"]
        and report["FP32 product (TFLOP/s)"] / report["published FP32 peak (TFLOP/s)"] > 1.05
    ):
        return np.str_("tf32")
    if report["ranks"] > report["usable cores"]:
        return np.str_("cores")
    if report["caches (MiB)"] > report["triad: its arrays together (MiB)"]:
        return np.str_("cache")
    calls = report["pass: operators"] * report["host time of an operator (µs)"]
    small = calls > 0.5 * report["pass: measured (µs)"]
    return np.str_("overhead" if small else "healthy")


@pytest.mark.parametrize("right", [by_table, by_numbers])
def test_other_ways_to_diagnose_pass(right):
    passes("00.1", right)


def test_the_reports_of_the_notebook_are_those_of_the_checker():
    known = [case.report for case in exercise_reports.cases()]
    assert all(report in known for report in exercise_reports.REPORTS.values())
    assert {case.cause for case in exercise_reports.cases()} == set(exercise_reports.CAUSES)


def test_no_report_shows_what_its_card_cannot_do():
    """A made-up GPU is no faster than its published figures, but for the fault that it is there for."""
    for case in exercise_reports.cases():
        report, card = case.report, hardware.spec(case.report["card"] or "")
        if card:
            assert (report["triad (GB/s)"] < card.bandwidth_gb_s) == (case.cause != "cache"), report
            assert (report["FP32 product (TFLOP/s)"] < card.fp32) == (case.cause != "tf32"), report
            assert (report["TF32 product (TFLOP/s)"] or 0) < (card.tensor_tf32 or 1), report
            assert report["caches (MiB)"] == (card.l2_mib or report["caches (MiB)"])


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


@pytest.mark.parametrize("right", [block_of_calls, asynchronous])
def test_other_ways_to_measure_pass(right):
    passes("00.3", right)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda size_bytes: 0.05, "no all-reduce was seen"),
        (lambda size_bytes: dist.all_reduce(torch.zeros(size_bytes // 4)) or 0.05, "only 1 all-reduces of this size"),
        (lambda size_bytes: dist.all_reduce(torch.zeros(8)) or 0.05, "your all-reduces had 32 bytes"),
        (
            lambda size_bytes: [dist.all_reduce(torch.zeros(size_bytes // 4)) for _ in range(5)] and 700.0,
            "you answer 7",
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


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (cores(lambda n, quota, period: min(n, quota // period or n)), "half a core became 8 cores"),
        (cores(lambda n, quota, period: 0.5 if quota < period else min(n, quota // period)), "half a core gives 0.5"),
        (lambda affinity, cpu_max: cores(lambda n, q, p: min(n, q // p))(range(max(affinity) + 1), cpu_max), "6 cores"),
    ],
)
def test_half_a_core_and_cores_by_number_are_told(wrong, words):
    assert words in examine("00.2", wrong).text
