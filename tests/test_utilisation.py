"""Busy time is not speed: the counters, the windows, and six jobs that prove it."""

import time

import pytest
import torch
from again import holds_soon
from fakes import FakeNvml, card

from labs import utilisation
from labs.common.timing import busy
from labs.kit.errors import BadInput
from labs.kit.launch import launch

ALL = [
    "large products", "small products", "memory traffic", "one number at a time", "waiting for data", "one long kernel",
]  # fmt: skip
HERE = "CPU time of the process"


def measured():
    return launch("utilisation", nproc=2, oversubscribe=True, smoke=True, wait_ms=40.0)


@pytest.fixture(scope="module")
def run():
    return measured()


def test_every_job_has_its_three_records(run):
    assert [r.case["job"] for r in run.where("busy_share", counter=HERE)] == ALL
    for metric in ("busy_share", "flop_s", "share_of_peak"):
        assert [r.case["job"] for r in run.where(metric)] == ALL
        assert all(len(r.samples) == 2 for r in run.where(metric))
    assert max(run.one("share_of_peak", job="large products").samples) == 1


def is_busy_and_slow(run):
    busy_of = {j: max(run.one("busy_share", job=j).samples) for j in ALL}
    rate_of = {j: max(run.one("flop_s", job=j).samples) for j in ALL}
    slow, fast, wait = "one number at a time", "large products", "waiting for data"
    assert all(0 <= s <= 1.05 for r in run.where("busy_share") for s in r.samples)
    return (
        busy_of[slow] > 0.2 * busy_of[fast]  # neighbours may take a part of both
        and rate_of[slow] < rate_of[fast] / 1000
        and busy_of[wait] < 0.8 * busy_of[fast]
        and rate_of[wait] > 10 * rate_of[slow]
    )


def test_a_job_can_be_as_busy_as_another_at_a_thousandth_of_its_speed(run):
    assert holds_soon(is_busy_and_slow, run, measured)


def test_windows_of_a_job_by_hand(monkeypatch):
    """A step of 0.1 s and 8 FLOP after a wait of 0.3 s, on a clock that only they move."""
    now, cpu = [0.0], [0.0]

    class Counter:
        name, memory_s = "by hand", 0.5

        def busy_s(self):
            return cpu[0]

    def sleep(seconds):
        now[0] += seconds

    def step():
        now[0] += 0.1
        cpu[0] += 0.1

    for module in (busy, utilisation):
        monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])
        monkeypatch.setattr(module.time, "sleep", sleep)
    config = utilisation.Config(windows=3, window_s=1.0)
    job = utilisation.Job(step, 8.0, wait_s=0.3)
    shares, rates = utilisation.watch(job, config, Counter(), torch.device("cpu"))
    assert shares == pytest.approx([0.25] * 3) and rates == pytest.approx([20.0] * 3)


def test_busy_between_is_linear_between_marks():
    assert busy.busy_between([(10.0, 1.0), (12.0, 2.0)], 10.5, 11.5) == pytest.approx(0.5)


# -- counters


def test_cpu_time_counts_work_and_not_sleep():
    counter = busy.CpuTime()

    def both():
        asleep = busy.work_for(0.05, lambda: time.sleep(0.01), counter)
        at_work = busy.work_for(0.05, lambda: sum(range(10_000)), counter)
        return [(last - first) / (end - start) for (start, first), *_, (end, last) in (asleep, at_work)]

    assert holds_soon(lambda shares: shares[0] < 0.5 * shares[1], both(), both)


def test_nvml_percent_adds_up_to_seconds(monkeypatch):
    clock = iter([100.0, 102.0, 105.0])
    monkeypatch.setattr(busy.time, "perf_counter", lambda: next(clock))
    counter = busy.NvmlUtilization(FakeNvml([card()]), card())  # the fake is 7 % busy
    assert counter.busy_s() == pytest.approx(0.14)
    assert counter.busy_s() == pytest.approx(0.35)


def test_a_gpu_without_the_counter_is_one_line():
    with pytest.raises(BadInput, match=r"^NVML reads no utilization.gpu .*run on another one$"):
        busy.NvmlUtilization(FakeNvml([card()], unsupported=("nvmlDeviceGetUtilizationRates",)), card())


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"windows": 0}, "windows must be at least 1"),
        ({"window_s": float("nan")}, "window_s"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("utilisation", nproc=1, **values)
