"""Driving a loader batch by batch: what is timed, what is not, and the rates and shares that follow."""

import subprocess
import sys
import time
from collections import OrderedDict, namedtuple

import psutil
import pytest
import torch
from again import holds_soon
from torch.utils.data import DataLoader, Dataset, TensorDataset

from labs.common.loading import feed as loading
from labs.common.loading.feed import (
    Feed,
    Forever,
    alone,
    drive,
    endless,
    expected,
    expected_on_cores,
    on_device,
    ready,
    rows,
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


def test_parts_of_single_steps_would_be_wrong():
    """What goes wrong when waves are cut: of 4 workers' batches three are there at once."""
    wrong = Feed(waves(4, 10).wait_s, waves(4, 10).work_s, 8)
    assert sorted(wrong.samples_per_s(40))[20] > 20 * waves(4, 10).samples_per_s()[0]


def test_a_feed_that_was_cut_short():
    assert Feed((), (), 8, 4).parts() == [] and Feed((), (), 8).samples_per_s() == ()
    assert len(Feed((0.1,) * 3, (0.1,) * 3, 8, 4).parts()) == 1
    assert len(Feed((0.1,) * 11, (0.1,) * 11, 8, 4).parts()) == 2, "the last three batches are no wave"
    for n in range(1, 40):
        assert len(Feed((0.1,) * n, (0.1,) * n, 8).parts()) <= 5


# -- drive


def test_waiting_and_working_are_told_apart_and_the_first_batches_are_left_out(clock):
    feed = drive(batches(clock, [9, 9, 1, 2, 3, 4]), lambda b: clock(0.5), 3, CPU, skip=2)
    assert feed == Feed((1, 2, 3), (0.5, 0.5, 0.5), 4)
    assert feed.samples_per_s() == pytest.approx([4 / 1.5, 4 / 2.5, 4 / 3.5])


def test_the_loader_alone_has_no_work(clock):
    assert drive(batches(clock, [1] * 4), None, 3, CPU) == Feed((1, 1, 1), (0, 0, 0), 4)


def test_whole_waves_and_at_least_so_many_seconds_are_timed(clock):
    assert len(drive(batches(clock, [1] * 99), None, 10, CPU, wave=4).wait_s) == 12
    assert len(drive(batches(clock, [1] * 99), None, 3, CPU, least_s=20).wait_s) == 20
    assert len(drive(batches(clock, [1] * 99), None, 3, CPU, wave=8, least_s=20).wait_s) == 24
    assert len(drive(batches(clock, [5] * 99), None, 3, CPU, least_s=10).wait_s) == 3
    assert len(drive(batches(clock, [1] * 99), None, 0, CPU, skip=3).wait_s) == 0


@pytest.mark.parametrize(("after", "timed"), [(-1, 0), (0, 0), (1.5, 0), (2.5, 1), (4.5, 3), (99, 9)])
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


def test_a_loader_that_ends_says_what_was_needed(clock):
    with pytest.raises(ValueError, match="the loader ended after 5 batches, and more are needed: take a smaller batch"):
        drive(batches(clock, [1] * 5), None, 6, CPU, skip=2)
    assert drive([None] * 3, lambda b: None, 2, CPU, size=7).batch == 7, "any object is a batch when its size is known"


@pytest.mark.parametrize(("every_step", "syncs"), [(True, 2 + 1 + 3), (False, 1 + 1)])
def test_the_device_is_synchronised_after_every_step_or_at_the_ends(clock, monkeypatch, every_step, syncs):
    seen = []
    monkeypatch.setattr(loading, "sync", lambda device: (seen.append(device), clock(0.25)))
    feed = drive(batches(clock, [1] * 9), lambda b: None, 3, CPU, skip=2, every_step=every_step)
    assert seen == [CPU] * syncs
    assert feed.work_s == ((0.25,) * 3 if every_step else (0, 0, 0.25)), "what is queued belongs to the time"


def test_alone_gives_the_same_batch_for_ever():
    batch = object()
    assert all(b is batch for b, _ in zip(alone(batch), range(5), strict=False))


# -- batches


Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(3, 2),
        [torch.zeros(3), 1],
        (["a"], {"name": "b", "x": torch.zeros(3)}),
        Pair("a", torch.zeros(3, 1)),
        OrderedDict(scale=torch.tensor(2.0), x=torch.zeros(3)),
    ],
)
def test_rows_of_a_batch_are_those_of_its_first_tensor(batch):
    assert rows(batch) == 3


@pytest.mark.parametrize("batch", [None, "text", [], [1, 2], {"a": ["b"]}, torch.tensor(1.0)])
def test_a_batch_without_rows(batch):
    with pytest.raises(TypeError, match="must hold a tensor"):
        rows(batch)


def test_every_tensor_of_a_batch_is_moved_and_nothing_else_is_touched():
    batch = {
        "pair": Pair(torch.zeros(2), "name"),
        "list": [torch.zeros(2), 3],
        "tuple": (torch.zeros(2),),
        "none": None,
    }
    moved = on_device(batch, torch.device("meta"))
    assert isinstance(moved["pair"], Pair) and moved["pair"].y == "name" and moved["list"][1] == 3
    tensors = [moved["pair"].x, moved["list"][0], moved["tuple"][0]]
    assert all(t.is_meta for t in tensors) and moved["none"] is None and type(moved["tuple"]) is tuple


# -- loaders


def test_an_endless_order_has_every_index_once_per_epoch():
    order = iter(Forever(5000, seed=3))
    first, second = ([next(order) for _ in range(5000)] for _ in range(2))
    assert sorted(first) == sorted(second) == list(range(5000)) and first != second
    again = iter(Forever(5000, seed=3))
    assert [next(again) for _ in range(5000)] == first != list(range(5000))


def test_an_endless_loader_goes_on_and_takes_whole_batches():
    data = TensorDataset(torch.arange(10))
    loader = iter(endless(data, 0, 4))
    drawn = [next(loader)[0] for _ in range(10)]
    assert all(len(b) == 4 for b in drawn) and torch.cat(drawn)[:40].bincount().tolist() == [4] * 10


def test_an_order_can_go_on_from_one_loader_to_the_next():
    data, order = TensorDataset(torch.arange(100)), iter(range(100))
    assert [next(iter(endless(data, 0, 4, order)))[0].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert next(iter(endless(data, 0, 4)))[0].equal(next(iter(endless(data, 0, 4)))[0])


def test_options_that_need_workers_are_dropped_without_any():
    options = {"prefetch_factor": 4, "persistent_workers": True, "multiprocessing_context": "fork", "timeout": 5}
    data = TensorDataset(torch.arange(10))
    assert len(next(iter(endless(data, 0, 4, **options)))[0]) == 4
    assert endless(data, 2, 4, **options).prefetch_factor == 4


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


def test_a_learners_own_warnings_come_as_before():
    with running(endless(TensorDataset(torch.arange(64)), 0, 4)), pytest.warns(UserWarning, match="will create 99"):
        DataLoader(TensorDataset(torch.arange(64)), num_workers=99)


def test_what_is_ready_before_the_first_batch_is_taken():
    assert (ready(0), ready(2), ready(4, 8)) == (1, 5, 33)


# -- what both together should reach


def test_without_workers_times_add_up_and_with_workers_the_slower_one_decides():
    assert expected(100, 50, 0) == pytest.approx(1 / (0.01 + 0.02))
    assert expected(100, 50, 2) == 50 and expected(50, 100, 2) == 50


def test_cpu_seconds_of_model_and_workers_share_the_cores():
    assert expected_on_cores(100, 200, 100, workers=2, cores=2) == pytest.approx(100)  # 2 / (0.01 + 0.01)
    assert expected_on_cores(100, 200, 50, workers=4, cores=2) == pytest.approx(2 / 0.03)
    assert expected_on_cores(100, 200, 50, workers=4, cores=64) == 100
    assert expected_on_cores(100, 50, 50, workers=0, cores=64) == expected(100, 50, 0)


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
