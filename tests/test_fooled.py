"""Where an effect is planted, the honest way finds the truth and the fooling one misses it; nothing stays behind."""

import contextlib
import itertools
import os
import subprocess
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from again import holds_soon
from processes import MARK, PYTHON, assert_no_survivors, new_environment

from labs import fooled as lab
from labs.fooled import neighbour as neighbour_module
from labs.fooled.busy_as_useful import Work
from labs.fooled.neighbour import neighbour_on
from labs.fooled.ways import WAYS
from labs.kit import measure
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records

CPU = torch.device("cpu")


class Clock:
    """A clock that only moves when somebody works."""

    def __init__(self):
        self.now = 0.0

    def costs(self, *seconds):
        """A step that takes these seconds, again and again."""
        each = itertools.cycle(seconds)
        return lambda *_: self.spend(next(each))

    def spend(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(measure.time, "perf_counter", lambda: made.now)
    return made


def rank(clock=None, world_size=2, slowest=list):
    return SimpleNamespace(device=CPU, world_size=world_size, slowest=slowest, barrier=lambda: None)


# -- each way, with a planted effect


def test_a_clock_that_does_not_wait_sees_the_orders_alone(clock):
    class Stream:
        done = 0.0

        def submit(self, step):
            clock.spend(0.001)
            self.done = max(self.done, clock.now) + 1.0

        def synchronize(self):
            clock.now = max(clock.now, self.done)

    told, so = lab.clock_stops_early(None, 10, Stream())
    assert (told, so) == (pytest.approx(0.001), pytest.approx(1.0, rel=0.001))


def test_first_steps_that_take_longer_are_not_those_of_a_training(clock):
    first = iter([7.0, 3.0])
    told, so = lab.first_steps_count(lambda: lambda: clock.spend(next(first, 1.0)), 4, CPU)
    assert (told, so) == (3.0, 1.0)


def test_a_best_time_beats_a_median_of_the_same_code(clock):
    told, so = lab.best_against_median(clock.costs(1.0, 1.25, 1.5), 12, CPU, 0)
    assert told >= 1.25 and so == pytest.approx(1.0, abs=0.25) and so < told


def test_a_neighbour_slows_down_whatever_comes_second(clock):
    there, visits = [], []

    @contextlib.contextmanager
    def neighbour(device):
        there.append(device)
        yield
        visits.append(there.pop())

    told, so = lab.one_after_the_other(lambda: clock.spend(2.0 if there else 1.0), 6, CPU, neighbour, 0)
    assert (told, so) == (2.0, 1.0) and visits == [CPU, CPU]


@pytest.mark.parametrize(("first_s", "usual_s"), [(1.5, 1.0), (1.0, 1.5)])
def test_one_pair_with_an_outlier_decides_wrongly_and_many_do_not(clock, first_s, usual_s):
    first = iter([first_s])
    told, so = lab.single_pair_decides(lambda: clock.spend(next(first, usual_s)), 20, CPU, 0)
    assert (told, so) == (1.5, 1.0)


def test_a_debug_switch_in_the_baseline_is_no_speed_up_of_ours(clock):
    told, so = lab.baseline_in_debug_mode(lambda: clock.spend(3.0 if torch.is_anomaly_enabled() else 1.0), 4, CPU, 0)
    assert (told, so) == (3.0, 1.0) and not torch.is_anomaly_enabled()


def test_a_batch_that_grows_with_the_ranks_looks_like_a_speed_up(clock):
    steps = {"alone": clock.costs(1.0), "a batch each": clock.costs(1.25), "one batch shared": clock.costs(1.0)}
    told, so = lab.weak_told_as_strong(steps, 4, rank())
    assert (told, so) == (pytest.approx(1.6), pytest.approx(1.0))


def test_samples_per_second_are_not_the_time_to_a_loss():
    done = {(32, 0.1): (1000, 1.0), (1024, 0.8): (16000, 2.0)}
    told, so = lab.samples_told_as_learning(lambda *how: done[how], {32: 0.1, 1024: 0.8})
    assert (told, so) == (8.0, 0.5)


def test_a_device_that_is_busy_all_the_time_may_do_a_tenth_of_what_it_could(clock):
    training, product = Work(clock.costs(1.0), 10.0), Work(clock.costs(0.5), 50.0)
    busy = SimpleNamespace(busy_s=lambda: 5.0 + clock.now, memory_s=2.0)
    assert lab.busy_told_as_useful(training, product, busy, 8.0, CPU) == (1.0, 0.1)
    half = SimpleNamespace(busy_s=lambda: clock.now / 2, memory_s=0.0)
    assert lab.busy_told_as_useful(training, product, half, 8.0, CPU) == (0.5, 0.1)


def test_the_clock_of_a_rank_with_little_work_is_not_the_job_s(clock):
    told, so = lab.one_clock_of_many(clock.costs(1.0), rank(slowest=lambda samples: [max(*samples, 2.0)]))
    assert (told, so) == (1.0, 2.0)


def test_latency_makes_a_small_message_s_rate_useless_for_a_large_one(clock):
    told, so = lab.rate_of_another_size(lambda n: clock.spend(0.001 + n / 1e9), 40_000, 40_000_000, 4, rank())
    assert so == pytest.approx(0.041) and told == pytest.approx(1.04)


# -- what comes out of a run


def made(way, fooled, honest, kind="measured", **case):
    case |= {"way": way} | ({"truth": WAYS[way].truth} if WAYS[way].truth else {})
    unit = WAYS[way].unit
    return [
        Record("fooled", "fooled", unit, tuple(fooled), kind, case, layout={"world_size": 2}),
        Record("fooled", "honest", unit, tuple(honest), "measured", case, layout={"world_size": 2}),
    ]


SURE = [2.0, 2.1, 1.9, 2.0, 2.05, 1.95]
EVEN = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98]


def test_a_way_fools_only_if_this_run_shows_it():
    found = {r.way.key: r for r in lab.rows(Records([*made("blocked", SURE, EVEN), *made("cold_start", EVEN, EVEN)]))}
    assert found["blocked"].fools and found["blocked"].factor == pytest.approx(2, rel=0.02)
    assert not found["cold_start"].fools
    few = lab.rows(Records(made("blocked", SURE[:2], EVEN[:2])))[0]
    assert not few.fools, "two samples hold no interval"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"ways": ("block",)}, "ways: there is no 'block': did you mean"),
        ({"batch_size": 1}, "batch_size must be from 2"),
        ({"seed": -1}, "seed must be from 0"),
        ({"seconds": 0.0}, "seconds must be a positive number, not 0"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        lab.Config(**values)


# -- real runs


def neighbours():
    """Busy processes that this process has started."""
    return [p for p in psutil.Process().children(recursive=True) if "os.getppid" in " ".join(p.cmdline())]


def test_a_neighbour_is_a_busy_process_that_ends_with_the_block_also_after_an_error():
    with neighbour_on(CPU):
        [found] = neighbours()
        before = found.cpu_times().user
        assert holds_soon(lambda used: used > before, before, lambda: (time.sleep(0.3), found.cpu_times().user)[1])
    assert not neighbours()
    with pytest.raises(KeyError), neighbour_on(CPU):
        raise KeyError
    assert not neighbours()


def test_a_neighbour_whose_starter_is_gone_before_it_begins_does_not_stay():
    nobody = str(os.getpid() + 10_000_000)  # above any process id
    subprocess.run([*PYTHON, "-c", neighbour_module.BUSY, nobody], check=True, timeout=100)


@pytest.mark.drill
def test_a_neighbour_ends_when_whoever_started_it_is_killed():
    program = (
        "import os, torch\nfrom labs.fooled.neighbour import neighbour_on\n"
        "with neighbour_on(torch.device('cpu')):\n    os.kill(os.getpid(), 9)"
    )
    environment = new_environment()
    done = subprocess.run([*PYTHON, "-c", program], env=environment)
    assert done.returncode == -9
    assert_no_survivors(environment[MARK])


@pytest.mark.quiet
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_way_runs_and_nothing_is_left(ranks):
    run = launch("fooled", ranks, smoke=True, oversubscribe=True)
    measured, left = {r.case["way"] for r in run.where("honest")}, {r.case["way"] for r in run.where("left_out")}
    wanted = {way.key for way in WAYS.values() if way.ranks > ranks}
    assert left == wanted and measured == set(WAYS) - wanted
    assert all(len(r.samples) == 2 and min(r.samples) > 0 for r in run.where("honest"))
    assert all(len(r.samples) == 2 for r in run.where("fooled"))
    assert {r.case["way"] for r in run if r.kind == "modelled" and r.metric == "fooled"} == {"early_clock"}
    assert not any(r.fools for r in lab.rows(run) if r.gap.n < measure.fewest())
    assert not neighbours()
