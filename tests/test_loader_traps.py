"""DataLoader traps: each shows its symptom, each cure takes it away, errors name the item, no worker is left."""

import os
import signal
import sys
import threading
import time

import pytest
import torch
from torch.utils.data import DataLoader

from labs import loader_traps
from labs.common.loading.named_items import ItemFailed, NamedItems, loader_error
from labs.common.traps import datasets as trap_datasets
from labs.common.traps import failures as trap_failures
from labs.common.traps import shm as trap_shm
from labs.common.traps.datasets import Fails, Items, no_worker_left, workers_now
from labs.kit.errors import BadInput
from labs.kit.launch import launch

linux = pytest.mark.skipif(sys.platform != "linux", reason="forked workers and /dev/shm")


@pytest.fixture(scope="module")
def run():
    return launch("loader_traps", nproc=1, smoke=True)


@pytest.fixture(autouse=True)
def all_workers_end():
    with no_worker_left():
        yield


# -- closed forms


# -- the traps, as the lab records them


@pytest.mark.drill
def test_every_trap_is_run_and_leaves_no_worker(run):
    left = run.where("processes_left")
    assert {r.case["trap"] for r in left} == set(loader_traps.TRAPS) == set(loader_traps.Trap.__args__)
    assert [r.value for r in left] == [0] * len(left)
    assert {r.case["trap"] for r in run} == set(loader_traps.TRAPS)


def test_workers_are_processes(run):
    alone, four = run.where("worker_processes")
    assert (alone.value, alone.case["trainer_reads"]) == (1, True)
    assert (four.value, four.case["trainer_reads"], four.case["started_by_trainer"]) == (4, False, True)
    private, resident = run.one("worker_private_bytes", workers=4), run.one("worker_resident_bytes", workers=4)
    assert all(0 < p < r for p, r in zip(private.samples, resident.samples, strict=True)), "forked memory is shared"


def test_random_draws_repeat_where_it_says_so(run):
    for expected in run.where("predicted_share"):
        case = {k: expected.case[k] for k in ("way", "across")}
        assert run.one("duplicate_share", **case).value == expected.value, case
    alike, by_rank = (r.value for r in run.where("duplicate_share", across="ranks"))
    assert (alike, by_rank) == (1, 0)


def test_held_objects_become_private_and_arrays_do_not(run):
    growth = {r.case["held"]: r.samples[-1] for r in run.where("private_growth_bytes")}
    predicted = {r.case["held"]: r.value for r in run.where("predicted_growth_bytes")}
    for held, arrays in (("list of str", "NumPy array"), ("list of int", "torch tensor")):
        assert predicted[arrays] == 0 and growth[held] > growth[arrays] + 0.5 * predicted[held]


def test_first_batches_and_rates_are_there(run):
    cases = [(r.case["workers"], r.case["start_method"], r.case["persistent"]) for r in run.where("first_batch_s")]
    assert cases == [(0, "none", False), (2, "fork", False), (2, "fork", True)]
    kept = run.one("first_batch_s", persistent=True).samples
    assert len(kept) == 3 and min(kept[1:]) < kept[0], "workers that stay need not start again"
    found = [(r.case["source"], r.case["workers"]) for r in run.where("items_per_s")]
    assert found == [(s, w) for s in ("sleep", "compute") for w in loader_traps.SCALED]
    sleep = {r.case["workers"]: r.value for r in run.where("items_per_s", source="sleep")}
    assert sleep[4] > 1.2 * sleep[1]
    assert all(
        r.value <= 1.1 * run.one("predicted_items_per_s", **r.case).value
        for r in run.where("items_per_s", source="sleep")
    )


@pytest.mark.drill
@linux
def test_shared_memory_runs_out_in_a_worker_only(run):
    before = os.statvfs("/dev/shm").f_blocks
    own = trap_shm.small_shm("prefetch_factor=1", 5.0)
    assert (own["error"], own["batches"]) == ("none", 7)
    assert os.statvfs("/dev/shm").f_blocks == before
    loud, silent = run.where("batches_received", trap="shm")
    assert loud.value == silent.value == 0
    assert loud.case["words"].startswith("RuntimeError: unable to") and "timed out" in silent.case["words"]
    assert "unable to" in silent.case["printed"], "only the worker says why"


@pytest.mark.drill
@linux
def test_without_the_right_to_mount_the_file_size_is_limited(monkeypatch):
    def refuse(size):
        raise PermissionError

    monkeypatch.setattr(trap_shm, "_mount_small_shm", refuse)
    found = trap_shm.small_shm("batch too large", 5.0)
    assert found["how"] == "limit of the file size" and "File too large" in found["words"]


# -- failures and their cure


@pytest.mark.drill
@pytest.mark.parametrize("how", ["raises", "unreadable_jpeg", "killed"])
def test_torch_alone_does_not_name_the_item_and_named_items_do(run, how):
    bare = run.one("seconds_until_error", failure=how, named=False)
    named = run.one("seconds_until_error", failure=how, named=True)
    assert not bare.case["names_item"] and named.case["names_item"]
    assert named.case["error"] == "ItemFailed" and "item 5" in named.case["words"] and named.case["left"] == 0
    assert max(bare.value, named.value) < 10
    if how != "killed":
        assert bare.case["left"] == 2, "the error keeps the workers of a plain loop alive"
    if how == "unreadable_jpeg":
        assert "tile-05.jpg" in named.case["words"]


@pytest.mark.drill
@pytest.mark.parametrize(("how", "words"), [("exits", "worker"), ("hangs", "timed out after")])
def test_a_worker_that_exits_or_hangs(how, words):
    found = trap_failures.fail(how, True, 1, timeout_s=0.3, hang_s=0.6)
    assert words in found["words"] and "was reading item 5" in found["words"] and found["left"] == 0


def test_errors_name_the_item_without_workers_and_by_any_name():
    dataset = NamedItems(Fails(8, "raises", 5, 0.0), name=lambda i: f"row {i} of train.csv")
    with pytest.raises(ItemFailed, match=r"item 5 \(row 5 of train.csv\): ValueError: label 12"), dataset.named():
        list(DataLoader(dataset))


def broken_connection(why):
    """What a trainer sees when a worker dies in the middle of a transfer; torch tells `why` a moment later."""

    def _try_get_data():
        raise ConnectionResetError("[Errno 104] Connection reset by peer")

    def tell(*_):
        raise RuntimeError(why)

    before = signal.signal(signal.SIGALRM, tell if why else signal.SIG_IGN)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        _try_get_data()
    except ConnectionResetError as e:
        return loader_error(e)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.drill
def test_a_broken_connection_waits_for_its_reason():
    assert broken_connection("DataLoader worker (pid 7) is killed") == "DataLoader worker (pid 7) is killed"
    assert broken_connection("") == "DataLoader worker closed its connection (ConnectionResetError)"


@pytest.mark.drill
def test_only_the_dead_worker_is_named():
    dataset = NamedItems(Items(8))
    dataset._reading[1] = torch.tensor([11, 3])
    dataset._reading[2] = torch.tensor([12, 4])

    def die(words):
        with pytest.raises(ItemFailed) as caught, dataset.named():
            dataset._reading[1:3] = torch.tensor([[11, 3], [12, 4]])
            raise RuntimeError(words)
        return str(caught.value)

    assert die("DataLoader worker (pid 12) is killed by signal: Killed. ").endswith(
        "Killed: process 12 was reading item 4"
    )
    assert "item 3" in (both := die("DataLoader timed out after 12 seconds")) and "item 4" in both
    assert "no item was being read" in die("DataLoader worker (pid 13) exited unexpectedly")


@pytest.mark.drill
def test_the_guard_ends_what_a_loop_left():
    before = workers_now()
    with no_worker_left():
        iterator = iter(DataLoader(trap_datasets.Source(64, 0.01), num_workers=2))
        iterator.me = iterator  # only the garbage collector can find it
        del iterator
        assert len(workers_now()) == len(before) + 2
        start = time.perf_counter()
    assert workers_now() == before
    assert time.perf_counter() - start < 2 * 5.0, "what torch waits for two workers"


class LeftLocked(threading.Condition):
    """As when torch's handler of SIGCHLD raises between the lock's being taken and its being given back."""

    told = False

    def __enter__(self):
        super().__enter__()
        if not self.told:
            self.told = True
            raise RuntimeError("DataLoader worker (pid 12) is killed by signal: Killed. ")


@linux
@pytest.mark.timeout(60, method="thread")  # a wait in __del__ swallows what a signal raises
@pytest.mark.parametrize("named", [True, False])
def test_a_death_while_the_trainer_writes_to_a_queue_does_not_block_it_for_ever(monkeypatch, named):
    dataset = NamedItems(Fails(16, "raises", -1, 0.0))

    class Loader(DataLoader):
        def __iter__(self):
            iterator = super().__iter__()
            yield next(iterator)
            queue = iterator._index_queues[0]
            left = LeftLocked(queue._notempty._lock)
            left._waiters, queue._notempty = queue._notempty._waiters, left
            yield from iterator

    with no_worker_left():
        found = trap_failures.caught(Loader(dataset, 2, num_workers=2), dataset.named() if named else None)
    assert found["error"] == ("ItemFailed" if named else "RuntimeError") and found["batches"] >= 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"traps": ()}, "traps must"),
        ({"traps": ("fire",)}, "traps"),
        ({"workers": 0}, "workers must"),
        ({"objects": 1}, "objects must"),
        ({"loader_timeout_s": 0.0}, "loader_timeout_s"),
        ({"hang_s": 0.1}, "hang_s must"),
        ({"item_ms": 0.0}, "item_ms must"),
        ({"rounds": 0}, "rounds must"),
        ({"failures": ("sleeps",)}, "failures"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("loader_traps", nproc=1, **values)
