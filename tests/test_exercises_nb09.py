"""Exercises of notebook 09: right answers of another style pass."""

import itertools

import numpy as np
import pytest
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from labs.exercises import nb09
from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def longer_warm_up_and_stop(job):
    """The slow steps are all warm-up, the recorded ones end with the loop's own start and stop."""
    prof = profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=job.slow, active=job.active, repeat=1)
    )
    prof.start()
    batches = iter(job.batches())
    for _ in range(job.steps):
        with record_function("data"):
            x = next(batches, None)
        with record_function("forward"):
            loss = job.forward(x)
        with record_function("backward"):
            job.backward(loss)
        with record_function("exchange"):
            job.exchange().wait()
        with record_function("update"):
            job.update()
        prof.step()
    prof.stop()
    return prof


def one_step_later(job):
    """It skips more steps than it must."""
    plan = schedule(skip_first=1, wait=job.slow - 1, warmup=1, active=job.active, repeat=1)
    return nb09._profiled(job, plan)


@pytest.mark.parametrize("answer", [longer_warm_up_and_stop, one_step_later])
def test_other_schedules(answer):
    passes("09.1", answer)


def by_unions(events):
    """Spans joined, then subtracted."""
    bars = [e for e in events if e["ph"] == "X"]
    [main] = {e["tid"] for e in bars if e["name"].startswith("ProfilerStep")}
    runs = [e for e in bars if e["cat"] == "cpu_op" and e["tid"] == main and "c10d" not in e["name"]]
    reduces = [e for e in bars if e["name"] == "gloo:all_reduce"]
    edges = sorted({t for e in bars for t in (e["ts"], e["ts"] + e["dur"])})

    def covered(rows, a, b):
        return any(e["ts"] <= a and b <= e["ts"] + e["dur"] for e in rows)

    pieces = [(a, b) for a, b in itertools.pairwise(edges) if covered(reduces, a, b) and not covered(runs, a, b)]
    return sum(b - a for a, b in pieces) / 1e3


def with_cumulative_sums(events):
    """Starts count up, ends count down, sorted by NumPy."""
    bars = [e for e in events if e["ph"] == "X"]
    main = next(e["tid"] for e in bars if "ProfilerStep" in e["name"])
    reduces = np.array([e["name"] == "gloo:all_reduce" for e in bars])
    runs = np.array([(e["cat"], e["tid"]) == ("cpu_op", main) and "c10d::" not in e["name"] for e in bars])
    starts, lengths = (np.array([e[key] for e in bars]) for key in ("ts", "dur"))
    moments = np.concatenate([starts, starts + lengths])
    order = np.argsort(moments, kind="stable")
    open_reduces, open_runs = (np.cumsum(np.concatenate([x, -1 * x])[order])[:-1] for x in (1 * reduces, 1 * runs))
    gaps = np.diff(moments[order])
    return float(gaps[(open_reduces > 0) & (open_runs == 0)].sum() / 1000)


@pytest.mark.parametrize("answer", [by_unions, with_cumulative_sums])
def test_other_ways_to_find_exposed_communication(answer):
    passes("09.2", answer)
