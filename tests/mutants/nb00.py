"""Typical mistakes in notebook 00: {exercise: {mistake: (function, words that its feedback must hold)}}."""

from __future__ import annotations

import math
import statistics
import time

import torch
import torch.distributed as dist

from labs.chapters.nb00 import solutions


def _diagnose(**rules):
    """The reference with some of its rules replaced; each takes the report."""

    def usual(name):
        return lambda r: solutions.diagnose(r) == name

    def diagnose(report):
        names = ("tf32", "busy", "cores", "cache", "overhead")
        return next((n for n in names if rules.get(n, usual(n))(report)), "healthy")

    return diagnose


def _calls_in_ms(r):
    calls = r["pass: operators"] * r["host time of an operator (µs)"] / 1e3
    return calls > max(r["pass: arithmetic (µs)"], r["pass: memory (µs)"])


def _busbw(rate=None, warm=True, slowest=dist.ReduceOp.MAX, count=5, elements=4, wait=True):
    """A measurement of an all-reduce; `rate(bytes, seconds, ranks)` is what is returned of it."""

    def busbw(size_bytes):
        buffer, ranks = torch.zeros(size_bytes // elements), dist.get_world_size()
        if warm:
            dist.all_reduce(buffer)
        seconds = []
        for _ in range(count):
            dist.barrier()
            start = time.perf_counter()
            if wait:
                dist.all_reduce(buffer)
            else:
                dist.all_reduce(buffer, async_op=True)
            seconds.append(time.perf_counter() - start)
        taken = torch.tensor(statistics.median(seconds) if warm else sum(seconds) / count, dtype=torch.float64)
        if slowest is not None:
            dist.all_reduce(taken, op=slowest)
        s, t, n = size_bytes, taken.item(), ranks
        return rate(s, t, n) if rate else 2 * s * (n - 1) / n / t / 1e9

    return busbw


def _crashes_on_max(affinity, cpu_max):
    quota, period = map(int, cpu_max.split())
    return max(1, min(len(affinity), quota // period))


def _quota_only(affinity, cpu_max):
    quota, period = cpu_max.split()
    return len(affinity) if quota == "max" else max(1, int(quota) // int(period))


def _affinity_only(affinity, cpu_max):
    return len(affinity)


def _fixed_period(affinity, cpu_max):
    quota = cpu_max.split()[0]
    return len(affinity) if quota == "max" else max(1, min(len(affinity), int(quota) // 100_000))


def _zero_cores(affinity, cpu_max):
    quota, period = cpu_max.split()
    return len(affinity) if quota == "max" else min(len(affinity), int(quota) // int(period))


def _rounds_up(affinity, cpu_max):
    quota, period = cpu_max.split()
    return len(affinity) if quota == "max" else min(len(affinity), math.ceil(int(quota) / int(period)))


MUTANTS = {
    "00.1": {
        "rates that are alike": (
            _diagnose(
                tf32=lambda r: (
                    r["TF32 product (TFLOP/s)"] is not None
                    and r["FP32 product (TFLOP/s)"] > 0.9 * r["TF32 product (TFLOP/s)"]
                )
            ),
            "two peaks are equal",
        ),
        "slow when idle": (
            _diagnose(overhead=lambda r: (r["SM clock when idle (MHz)"] or 1e9) < 300),
            "calls take 343",
        ),
        "any use": (_diagnose(busy=lambda r: r["busy before the run (%)"] > 0), "1 % busy"),
        "as many ranks as cores": (
            _diagnose(cores=lambda r: r["device"] == "cpu" and r["ranks"] >= r["usable cores"]),
            "2 ranks have 2 usable cores",
        ),
        "one array": (
            _diagnose(cache=lambda r: r["triad: its arrays together (MiB)"] < r["caches (MiB)"] / 3),
            "24 MiB together",
        ),
        "wrong unit": (_diagnose(overhead=_calls_in_ms), "20 operators of 7 µs"),
        "against arithmetic alone": (
            _diagnose(
                overhead=lambda r: (
                    r["pass: operators"] * r["host time of an operator (µs)"] > r["pass: arithmetic (µs)"]
                )
            ),
            "limited by memory",
        ),
    },
    "00.2": {
        "max not handled": (_crashes_on_max, "no quota"),
        "quota only": (_quota_only, "may run on one"),
        "affinity only": (_affinity_only, "quota is ignored"),
        "period assumed": (_fixed_period, "period"),
        "half a core is none": (_zero_cores, "0 cores"),
        "rounded up": (_rounds_up, "2.2 cores became 3"),
    },
    "00.3": {
        "algbw": (_busbw(lambda s, t, n: s / t / 1e9), "algbw"),
        "all-gather's factor": (_busbw(lambda s, t, n: s / t * (n - 1) / n / 1e9), "all-gather"),
        "no warm-up": (_busbw(warm=False), "makes the connections"),
        "own time": (_busbw(slowest=None), "a time of its own"),
        "fastest rank": (_busbw(slowest=dist.ReduceOp.MIN), "fastest rank"),
        "bytes taken for elements": (_busbw(elements=1), "torch.zeros(size_bytes // 4)"),
        "never waited for": (_busbw(wait=False), "never waited for"),
    },
}
