"""Each fault of the loop does to the answer what it is said to, in a simulated time; its processes leave nothing."""

import contextlib
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import psutil
import pytest
import torch
from processes import assert_no_survivors, new_environment, wait_for
from torch import nn

from labs.common import models
from labs.common.timing import benchmark_loop, streams
from labs.common.timing.benchmark_loop import LOOPS, RUNGS, WAITS, read_early, repaired, seen_shares, training
from labs.kit.launch import run_on_ranks
from labs.kit.rank import Rank

CPU = torch.device("cpu")
DATA_S, FIRST_S, STEADY_S, HICCUP_S = 1.0, 500.0, 10.0, 100.0


class SimulatedStream:
    """Host and device with clocks of their own: steps 0 and 8 take longer, a step is `submit`ted in no time."""

    device = CPU

    def __init__(self):
        self.now = self.free = 0.0
        self.steps, self.events = 0, []

    def make_batch(self):
        self.now += DATA_S
        return torch.zeros(4, 2), torch.zeros(4, 1)

    def to_device(self, x, non_blocking=False):
        if not non_blocking:
            self.synchronize()
        return x

    def submit(self, work, *args):
        extra = {0: FIRST_S - STEADY_S, 8: HICCUP_S}.get(self.steps, 0.0)
        self.free = max(self.now, self.free) + STEADY_S + extra
        self.steps += 1
        return work(*args)

    def item(self, result):
        self.synchronize()

    def record_event(self):
        self.events.append(max(self.now, self.free))

    def synchronize(self):
        self.now = max(self.now, self.free)

    def laps(self):
        return [b - a for a, b in itertools.pairwise(self.events)]


def nothing(x, y):
    """A step whose time is the stream's."""


@pytest.fixture
def simulated(monkeypatch):
    stream = SimulatedStream()
    monkeypatch.setattr(benchmark_loop, "time", SimpleNamespace(perf_counter=lambda: stream.now))
    return stream


EXPECTED = {
    "as printed": (DATA_S + FIRST_S + HICCUP_S + 8 * STEADY_S) / 10,  # each copy waits: only the last step escapes
    "data outside": 0.0,  # nothing waits: the clock saw the host only
    "synchronise": (FIRST_S + HICCUP_S + 9 * STEADY_S) / 10,
    "warm up": (HICCUP_S + 10 * STEADY_S) / 10,
    "median of steps": STEADY_S,
}


@pytest.mark.parametrize("name", RUNGS)
def test_every_loop_prints_what_it_mixes_in(name, simulated):
    assert LOOPS[name](nothing, simulated.make_batch, 10, simulated) == pytest.approx(EXPECTED[name])


SEEN = dict(zip(WAITS, (0, 0, 9, 10), strict=True))


@pytest.mark.parametrize("way", WAITS)
def test_a_clock_that_does_not_wait_sees_what_the_loop_waits_for(way, simulated):
    simulated.steps = 10  # behind all that is slower
    early, late = read_early(way, nothing, simulated.make_batch(), 10, simulated)
    assert (early, late) == pytest.approx((SEEN[way] * STEADY_S, 10 * STEADY_S))


def test_the_emulated_queue_waits_where_a_gpus_does():
    found = seen_shares("mlp", 64, 8, 3, CPU)
    free, copied, waited, read = (sorted(found[way])[1] for way in WAITS)
    assert max(free, copied) < 0.5 * min(waited, read), "what waits for nothing sees far less"
    assert waited < read <= 1, "a copy waits for the steps before it, a reading also for this one"


def test_the_loop_trains():
    workload = models.build("mlp")
    before = [p.clone() for p in workload.module.parameters()]
    with contextlib.closing(streams.open_stream(CPU)) as stream:
        assert repaired(training(workload, stream), lambda: workload.make_batch(4), 2, stream) > 0
    assert all((a != b).any() for a, b in zip(before, workload.module.parameters(), strict=True))


def test_the_articles_model_has_40_kb_of_gradients():
    workload = benchmark_loop.article()
    x, y = workload.make_batch(32)
    assert models.gradient_bytes(workload.module) == 4 * 10_010
    assert x.shape == (32, 1000) and y.shape == (32,) and workload.loss(workload.module(x), y).dim() == 0


@pytest.fixture
def stream():
    with contextlib.closing(streams.EmulatedStream()) as stream:
        yield stream


def test_an_emulated_stream_works_in_order_and_later(stream):
    gate, done = multiprocessing.Event(), []
    stream.submit(gate.wait)
    for i in range(3):
        stream.submit(done.append, i)
    assert done == []
    gate.set()
    stream.synchronize()
    assert done == [0, 1, 2]


def test_an_emulated_stream_notes_when_work_ended_not_when_it_was_submitted(stream):
    stream.record_event()
    for seconds in (0.0, 0.05):
        stream.submit(time.sleep, seconds)
        stream.record_event()
    stream.synchronize()
    short, long = stream.laps()
    assert long >= 0.05 > short


def test_a_blocking_copy_and_a_reading_wait_for_all_before_them(stream):
    x, done = torch.ones(3), []
    stream.submit(time.sleep, 0.02)
    stream.submit(done.append, "first")
    late = stream.to_device(x, non_blocking=True)
    assert done == [], "a non_blocking copy waits for nothing"
    copy = stream.to_device(x)
    assert done == ["first"] and torch.equal(copy, x) and torch.equal(late, x) and copy is not x
    stream.submit(time.sleep, 0.02)
    stream.submit(done.append, "second")
    assert stream.item(stream.submit(torch.sum, x)) == 3.0 and done == ["first", "second"]


def test_an_error_surfaces_when_one_waits_and_what_follows_is_skipped(stream):
    done = []
    stream.submit(lambda: 1 / 0)
    stream.submit(done.append, 1)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            stream.synchronize()
    assert done == []


def test_closing_drops_what_is_queued_and_ends_the_thread():
    stream, gate, done = streams.EmulatedStream(), multiprocessing.Event(), []
    stream.submit(gate.wait)
    stream.submit(done.append, 1)
    stream._closed = True  # as close() begins; its join would wait for the gate
    gate.set()
    stream.close()
    assert done == [] and not stream._thread.is_alive()


def test_an_emulated_stream_computes_with_as_many_threads_as_its_maker(stream):
    seen = []
    stream.submit(lambda: seen.append(torch.get_num_threads()))
    stream.synchronize()
    assert seen == [torch.get_num_threads()]


# -- processes


def answers_on_ranks(repeats):
    number, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rank = Rank(number, size, number, size, CPU, "gloo", ())
    return benchmark_loop.answers(
        "labs.common.timing.benchmark_loop:article", 4, 2, repeats, rank
    ), multiprocessing.active_children()


def test_ranks_share_the_repeats_and_all_know_all_answers():
    results = run_on_ranks(answers_on_ranks, 2, 3)
    (first, left), (second, left_too) = results
    assert first == second and tuple(first) == RUNGS
    assert all(len(v) == 3 and min(v) > 0 for v in first.values())
    assert left == left_too == []


def broken():
    def loss(output, target):
        raise RuntimeError("no such loss\nand more lines")

    return models.Workload(nn.Linear(2, 1), lambda rows: (torch.zeros(rows, 2), torch.zeros(rows, 1)), loss)


def lost():
    os.kill(os.getpid(), signal.SIGKILL)


def endless():
    time.sleep(1000)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("factory", "words"),
    [("broken", "RuntimeError: no such loss$"), ("lost", "died without a word"), ("endless", "no answer within 0.5 s")],
)
def test_what_goes_wrong_in_a_process_is_one_line_and_leaves_none(factory, words, monkeypatch):
    monkeypatch.setattr(benchmark_loop, "ANSWER_WITHIN_S", 0.5 if factory == "endless" else 60.0)
    with pytest.raises(RuntimeError, match=words) as e:
        benchmark_loop.one_answer(f"{__name__}:{factory}", 2, 2, "synchronise", CPU)
    assert "\n" not in str(e.value) and "(synchronise)" in str(e.value)
    assert multiprocessing.active_children() == []


def test_without_a_wait_the_loop_does_not_even_notice_that_it_failed():
    assert benchmark_loop.one_answer(f"{__name__}:broken", 2, 2, "data outside", CPU) > 0


@pytest.mark.drill
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux tells a process that its parent died")
def test_nothing_is_left_when_the_rank_is_killed():
    code = "import torch; from labs.common.timing import benchmark_loop as b; "
    code += f"b.one_answer('{__name__}:endless', 2, 2, 'synchronise', torch.device('cpu'))"
    environment = new_environment()
    parent = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        wait_for(lambda: psutil.Process(parent.pid).children(), what="the benchmark's process")
    finally:
        parent.kill()
        parent.wait()
    assert_no_survivors(environment["LABS_TEST_MARK"])
