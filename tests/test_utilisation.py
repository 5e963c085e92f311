"""Busy time is not speed: the counters, the windows, and five jobs that prove it."""

import time

import pytest
import torch
from again import holds_soon
from fakes import FakeNvml, card

from labs import utilisation
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.parts.timing import busy
from labs.parts.timing.roofline import Work

ALL = ["large products", "small products", "memory traffic", "one number at a time", "waiting for data"]
HERE = "CPU time of the process"


def measured():
    return launch("utilisation", nproc=2, oversubscribe=True, smoke=True, wait_ms=40.0)


@pytest.fixture(scope="module")
def run():
    return measured()


def test_predict_by_hand():
    work = Work(flop=1000, bytes=200)
    assert utilisation.predict(work, 1000, 1000) == (1.0, pytest.approx(1000))  # arithmetic limits: 1 s
    assert utilisation.predict(work, 1000, 100) == (1.0, pytest.approx(500))  # memory limits: 2 s
    assert utilisation.predict(work, 1000, 100, overhead_s=10) == (1.0, pytest.approx(100))
    share, rate = utilisation.predict(work, 1000, 1000, wait_s=3)
    assert (share, rate) == (pytest.approx(0.25), pytest.approx(250))


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


def shows_bursts(run):
    slow, fast = (run.one("polled_share", window_s=w, counter=HERE).samples for w in (1.0, 0.05))
    assert len(slow) == 1 and len(fast) == 20
    assert sum(slow) == pytest.approx(sum(fast) / len(fast), abs=1e-6)  # one run, read twice
    return min(fast) < 0.4 * slow[0] and max(fast) > 1.4 * slow[0]


def test_the_slow_reader_sees_half_and_the_fast_one_bursts(run):
    assert holds_soon(shows_bursts, run, measured)


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


# -- windows over known marks


def square(bursts: int = 5, phase_s: float = 0.1, ticks: int = 50) -> list[busy.Mark]:
    """Marks of perfect bursts that begin with work."""
    marks, total = [(0.0, 0.0)], 0.0
    for i in range(2 * bursts * ticks):
        total += 0 if (i // ticks) % 2 else phase_s / ticks
        marks.append(((i + 1) * phase_s / ticks, total))
    return marks


def test_polled_by_hand():
    assert busy.polled(square(), 1.0, 1.0) == pytest.approx([0.5])
    assert busy.polled(square(), 0.2, 1.0) == pytest.approx([0.5] * 5)
    assert busy.polled(square(), 0.05, 1.0) == pytest.approx([1, 1, 0, 0] * 5)
    assert busy.polled(square(), 0.15, 1.0)[:3] == pytest.approx([2 / 3, 2 / 3, 1 / 3])
    assert len(busy.polled(square(), 0.3, 1.0)) == 3  # what is left at the end is no whole window


def test_busy_between_is_linear_between_marks():
    assert busy.busy_between([(10.0, 1.0), (12.0, 2.0)], 10.5, 11.5) == pytest.approx(0.5)


# -- counters


def test_cpu_time_counts_work_and_not_sleep():
    counter = busy.CpuTime()

    def both():
        asleep = busy.work_for(0.05, lambda: time.sleep(0.01), counter)
        at_work = busy.work_for(0.05, lambda: sum(range(10_000)), counter)
        return busy.polled(asleep, 0.05, 0.05)[0], busy.polled(at_work, 0.05, 0.05)[0]

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
        ({"window_s": 0.0}, "window_s must be above 0"),
        ({"window_s": float("nan")}, "window_s"),
        ({"wait_ms": -1.0}, "wait_ms must be from 0"),
        ({"burst_ms": 1.0}, "burst_ms must be from 10"),
        ({"bursts": 0}, "bursts must be at least 1"),
        ({"poll_s": ()}, "poll_s must hold"),
        ({"poll_s": (0.0,)}, "poll_s must hold"),
        ({"poll_s": (9.0,)}, "a window of 9 s does not fit into 3 s of bursts: raise bursts"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("utilisation", nproc=1, **values)
