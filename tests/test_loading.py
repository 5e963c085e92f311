"""Driving a loader batch by batch: what is timed, what is not, and the rates and shares that follow."""

import subprocess
import sys
import time

import psutil
import pytest
import torch
from again import holds_soon
from torch.utils.data import Dataset, TensorDataset

from labs.common.loading import feed as loading
from labs.common.loading.feed import (
    Feed,
    Forever,
    alone,
    drive,
    endless,
    expected,
    ready,
    running,
)

CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch):
    """A clock that only moves when it is told to: `clock(2.0)`."""
    now = [100.0]
    monkeypatch.setattr(loading.time, "perf_counter", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    move.now = now
    return move


def batches(clock, seconds, size=4):
    """Batches of `size` rows that take as many seconds each."""
    for s in seconds:
        clock(s)
        yield torch.zeros(size, 2)


# -- Feed


def waves(workers, count, wave_s=1.0, work_s=0.01):
    """What a loader gives whose `workers` finish together: one batch is waited for, the others are there."""
    return Feed((wave_s, *[0.0] * (workers - 1)) * count, (work_s,) * workers * count, 8, workers)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_every_part_of_a_run_holds_whole_waves(workers):
    feed = waves(workers, 10)
    rate, share = 8 * workers / (1 + 0.01 * workers), 1 / (1 + 0.01 * workers)
    assert feed.samples_per_s() == pytest.approx([rate] * 5) and feed.wait_share == pytest.approx([share] * 5)
    assert len(feed.samples_per_s(2)) == 2 and feed.parts(1) == [pytest.approx((share, rate))]


# -- drive


def test_waiting_and_working_are_told_apart_and_the_first_batches_are_left_out(clock):
    feed = drive(batches(clock, [9, 9, 1, 2, 3, 4]), lambda b: clock(0.5), 3, CPU, skip=2)
    assert feed == Feed((1, 2, 3), (0.5, 0.5, 0.5), 4)
    assert feed.samples_per_s() == pytest.approx([4 / 1.5, 4 / 2.5, 4 / 3.5])


def test_whole_waves_and_at_least_so_many_seconds_are_timed(clock):
    assert len(drive(batches(clock, [1] * 99), None, 10, CPU, wave=4).wait_s) == 12
    assert len(drive(batches(clock, [1] * 99), None, 3, CPU, least_s=20).wait_s) == 20
    assert len(drive(batches(clock, [1] * 99), None, 3, CPU, wave=8, least_s=20).wait_s) == 24
    assert len(drive(batches(clock, [5] * 99), None, 3, CPU, least_s=10).wait_s) == 3
    assert len(drive(batches(clock, [1] * 99), None, 0, CPU, skip=3).wait_s) == 0


@pytest.mark.parametrize(
    ("after", "timed"),
    [
        (-1, 0),
        (2.5, 1),
        (99, 9),
    ],
)
def test_no_batch_is_asked_for_after_the_deadline(clock, after, timed):
    asked = []

    def source():
        while True:
            asked.append(clock.now[0])
            clock(1)
            yield torch.zeros(4)

    start = clock.now[0]
    feed = drive(source(), None, 9, CPU, skip=2, deadline=start + after)
    assert len(feed.wait_s) == timed and all(t < start + after for t in asked)


def test_alone_gives_the_same_batch_for_ever():
    batch = object()
    assert all(b is batch for b, _ in zip(alone(batch), range(5), strict=False))


# -- batches


def test_an_endless_order_has_every_index_once_per_epoch():
    order = iter(Forever(5000, seed=3))
    first, second = ([next(order) for _ in range(5000)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(5000)) and first != second
    again = iter(Forever(5000, seed=3))
    assert [next(again) for _ in range(5000)] == first != list(range(5000))


@pytest.mark.filterwarnings("error")
def test_workers_are_gone_when_the_block_ends_also_by_an_error():
    data, before = TensorDataset(torch.arange(64)), set(psutil.Process().children())
    forked = {"multiprocessing_context": "fork"}  # or a fork server would stay
    with running(endless(data, 6, 4, **forked)) as source:
        assert len(next(source)[0]) == 4 and len(set(psutil.Process().children()) - before) == 6
    assert set(psutil.Process().children()) <= before
    with pytest.raises(ZeroDivisionError), running(endless(data, 1, 4, **forked)):
        1 / 0  # noqa: B018
    assert set(psutil.Process().children()) <= before
    with running([1, 2]) as source:
        assert list(source) == [1, 2]


# -- what both together should reach


def test_without_workers_times_add_up_and_with_workers_the_slower_one_decides():
    assert expected(100, 50, 0) == pytest.approx(1 / (0.01 + 0.02))
    assert expected(100, 50, 2) == 50 and expected(50, 100, 2) == 50


class Sleeping(Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.zeros(2)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_sleeping_source_is_as_fast_as_its_workers(workers):
    """Samples of less than a wave said twice that for 4 workers."""

    def measured():
        with running(endless(Sleeping(), workers, 4)) as source:
            feed = drive(source, None, 6 * workers, CPU, skip=ready(workers), wave=workers)
        (_, rate), *_ = feed.parts(1)
        return rate / (workers / 0.004)

    first = measured()
    assert first < 1.2, "a busy machine makes it slower, not faster"
    assert holds_soon(lambda share: share > 0.2, first, measured)


OF_A_CELL = """
import types
main = types.ModuleType("__main__")
exec('''
class Squares:
    def __len__(self): return 8
    def __getitem__(self, i): return float(i * i)
''', main.__dict__)
if __name__ == "__main__":
    from labs.common.loading.feed import endless
    batches = iter(endless(main.Squares(), 1, 4, order=range(8), multiprocessing_context="spawn"))
    print(next(batches).tolist())
"""


def test_a_data_set_of_a_cell_reaches_workers_that_are_not_forked(tmp_path):
    """As on macOS, and from Python 3.14 on: they cannot import what a notebook's cell defines."""
    (tmp_path / "a_notebook.py").write_text(OF_A_CELL)
    done = subprocess.run([sys.executable, tmp_path / "a_notebook.py"], capture_output=True, text=True, timeout=250)
    assert done.stdout == "[0.0, 1.0, 4.0, 9.0]\n", done.stderr
