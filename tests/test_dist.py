"""One rank's view of the job: backend choice, seeds, collectives, core and thread of its own."""

import os

import pytest
import torch

from labs.kit.errors import BadInput
from labs.kit.hardware import Device, place
from labs.kit.launch import run_on_ranks
from labs.kit.rank import Rank, unpinned, use


def test_a_gpu_rank_makes_its_device_current_before_anything_else(monkeypatch):
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert use(Device("cuda", 3, "a gpu")) == torch.device("cuda", 3) and chosen == [torch.device("cuda", 3)]


def test_a_system_without_affinity_still_limits_threads(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    threads = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    assert use(Device("cpu", 0, "a cpu", (0,))) == torch.device("cpu") and threads == [1]


def test_collectives_of_a_rank():
    def function(rank):
        return {
            "gather": rank.gather({"rank": rank.rank}),
            "slowest": rank.slowest([1.0 + rank.rank, 5.0 - rank.rank]),
            "agree": (rank.agree(True), rank.agree(rank.rank == 0)),
            "seed": torch.rand(1).item(),
            "phases": sorted(rank.startup_s),
            "sizes": (rank.world_size, rank.local_world_size, rank.local_rank == rank.rank),
        }

    found = run_with_rank(function)
    assert found[0] == found[1]
    assert found[0]["gather"] == [{"rank": 0}, {"rank": 1}] and found[0]["slowest"] == [2.0, 5.0]
    assert found[0]["agree"] == (True, False) and found[0]["sizes"] == (2, 2, True)
    assert found[0]["phases"] == ["process group", "process start"]


def run_with_rank(function):
    """`function(rank)` on two ranks, as a lab's run gets it."""
    from labs.kit.display import View
    from labs.kit.hardware import place
    from labs.kit.launch import Job

    return Job(function, place(2, "cpu", True), 30, View()).run()


def test_progress_of_rank_0_alone_is_heard():
    heard = []
    for number in (0, 1):
        rank = Rank(number, 2, number, 2, torch.device("cpu"), "gloo", ())
        rank.on_progress = lambda *what: heard.append(what)
        rank.progress(1, 4, "loss 2.3")
    assert heard == [(1, 4, "loss 2.3")]


def test_the_group_is_gone_after_a_run():
    def function():
        import torch.distributed

        assert torch.distributed.is_initialized()
        return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])

    (address, port), other = run_on_ranks(function)
    assert address == "127.0.0.1" and (address, port) == other
    import socket

    with socket.socket() as probe:
        assert probe.connect_ex((address, port)) != 0, "the port must be free again"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_pinned_rank_can_lend_its_workers_all_cores_of_the_job():
    def function(rank):
        import os
        import subprocess
        import sys

        def child():
            text = subprocess.check_output([sys.executable, "-c", "import os; print(sorted(os.sched_getaffinity(0)))"])
            return eval(text)

        with unpinned(rank):
            free, layout = child(), rank.record("n", "1", 1).layout
        assert layout["cores"] == len(free) and "cores" not in rank.record("n", "1", 1).layout
        return free, child(), sorted(os.sched_getaffinity(0)), list(rank.cores), list(rank.host_cores)

    free, pinned, after, cores, host = run_with_rank(function)[1]
    assert free == host == sorted(os.sched_getaffinity(0)) and pinned == after == cores and len(cores) == 1


def test_ranks_share_devices_where_the_environment_says_so(monkeypatch):
    many = len(os.sched_getaffinity(0)) + 1 if hasattr(os, "sched_getaffinity") else os.cpu_count() + 1
    monkeypatch.delenv("COURSE_OVERSUBSCRIBE", raising=False)
    with pytest.raises(BadInput, match="oversubscribe=True"):
        place(many, "cpu")
    monkeypatch.setenv("COURSE_OVERSUBSCRIBE", "1")
    assert len(place(many, "cpu")) == many
