"""Seats at one machine: nobody shares a core or GPU unknowingly; hyper-threads, NUMA nodes and command lines."""

import itertools
import json
import os
import shlex
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fakes import FakeNvml, card
from processes import PYTHON, new_environment

from labs import seats
from labs.classroom import seating
from labs.classroom.seating import Machine, SeatGpu, divide, seat_gpus
from labs.kit import hardware, nvml
from labs.kit.errors import BadInput
from labs.kit.hardware import one_per_core_first, place, usable_affinity, visible_gpu_names
from labs.kit.host import Core, as_cpu_list, cores, cpu_list, gpu_node
from labs.kit.launch import run_on_ranks
from labs.seats import Config, as_dict, as_text, plan

affinity_only = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system has no affinity")


def machine_tree(root: Path, sockets: int = 2, per_socket: int = 4, adjacent: bool = False) -> Path:
    """A /sys of a machine with 2 hyper-threads per core: numbered (0, n), (1, n + 1)... or `adjacent` (0, 1), (2, 3)...

    A GPU hangs on each node at PCI bus 10 x (node + 1), and one on bus 99 has no node.
    """
    n = sockets * per_socket
    for core in range(n):
        siblings = (2 * core, 2 * core + 1) if adjacent else (core, core + n)
        for cpu in siblings:
            write(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list", as_cpu_list(siblings))
    for node in range(sockets):
        own = range(node * per_socket, (node + 1) * per_socket)
        cpus = [cpu for c in own for cpu in ((2 * c, 2 * c + 1) if adjacent else (c, c + n))]
        write(root / f"sys/devices/system/node/node{node}/cpulist", as_cpu_list(cpus))
        write(root / f"sys/bus/pci/devices/0000:{node + 1}0:00.0/numa_node", str(node))
    write(root / "sys/bus/pci/devices/0000:99:00.0/numa_node", "-1")
    return root


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def plain_cores(n: int, nodes: int = 1) -> list[Core]:
    """`n` cores without hyper-threads."""
    return [Core(i, (i,), i * nodes // n) for i in range(n)]


# Topology


@pytest.mark.parametrize("adjacent", [False, True])
def test_hyper_threads_are_one_core_and_nodes_are_known(tmp_path, adjacent):
    found = cores(range(16), machine_tree(tmp_path, adjacent=adjacent))
    assert [c.cpus for c in found][:2] == ([(0, 1), (2, 3)] if adjacent else [(0, 8), (1, 9)])
    assert [c.node for c in found] == [0] * 4 + [1] * 4


def test_a_core_of_which_one_thread_may_be_used_keeps_its_name(tmp_path):
    assert cores([9], machine_tree(tmp_path)) == [Core(1, (9,), 0)]


@pytest.mark.parametrize("adjacent", [False, True])
def test_ranks_meet_on_a_core_only_when_no_other_is_left(tmp_path, adjacent):
    root = machine_tree(tmp_path, sockets=1, adjacent=adjacent)
    firsts, seconds = ((0, 2, 4, 6), (1, 3, 5, 7)) if adjacent else ((0, 1, 2, 3), (4, 5, 6, 7))
    assert one_per_core_first(range(8), root) == firsts + seconds
    assert one_per_core_first((2, 3, 5), root) == ((2, 5, 3) if adjacent else (2, 3, 5))
    assert one_per_core_first(range(8), tmp_path / "nothing") == tuple(range(8)), "nothing is known"


def test_ranks_get_cores_of_their_own_also_under_a_quota(tmp_path, monkeypatch):
    root = machine_tree(tmp_path, sockets=1, adjacent=True)
    monkeypatch.setattr(hardware, "affinity", lambda: tuple(range(8)))
    for quota, expected in ((8, (0, 2, 4, 6, 1, 3, 5, 7)), (3, (0, 2, 4))):
        monkeypatch.setattr(hardware, "core_count", lambda quota=quota: quota)
        assert usable_affinity(root) == expected


def test_without_sys_every_cpu_is_a_core(tmp_path):
    assert cores([0, 1], tmp_path) == [Core(0, (0,), 0), Core(1, (1,), 0)]


def test_cpu_lists_and_the_node_of_a_gpu(tmp_path):
    assert cpu_list("0-2,8\n") == (0, 1, 2, 8) and cpu_list("") == ()
    assert as_cpu_list((8, 0, 2, 1)) == "0-2,8" and as_cpu_list(()) == ""
    root = machine_tree(tmp_path)
    ids = ("00000000:20:00.0", "0000:10:00.0", "00000000:99:00.0", "00000000:77:00.0", None)
    assert [gpu_node(bus, root) for bus in ids] == [1, 0, None, None, None]


# Who gets what


@pytest.mark.parametrize("adjacent", [False, True])
def test_no_core_is_split_and_no_device_is_in_two_groups(tmp_path, adjacent):
    have = cores(range(16), machine_tree(tmp_path, adjacent=adjacent))
    for learners, ranks, gpus in itertools.product((1, 2, 3, 4, 5, 8, 30), (1, 2, 3, 8), (0, 1, 2, 3, 4, 8)):
        groups = divide(learners, ranks, have, [SeatGpu(f"GPU-{i}", i % 2) for i in range(gpus)])
        used = [core for group in groups for core in group.cores]
        assert len(used) == len(set(used)) and {len(g.cores) for g in groups} == {len(groups[0].cores)}
        assert all(len(g.cores) >= ranks for g in groups)
        held = [gpu for group in groups for gpu in group.gpus]
        assert len(held) == len(set(held)) and all(len(g.gpus) >= min(ranks, gpus) for g in groups)
        assert len(groups) == min([learners, 8 // ranks] + ([gpus // min(ranks, gpus)] if gpus else []))
        if not gpus:
            threads = [cpu for group in groups for cpu in group.cpus]
            assert len(threads) == len(used), "one hyper-thread of each core: ranks never meet on one"


def test_groups_keep_within_numa_nodes_where_they_fit():
    assert [g.nodes for g in divide(3, 2, plain_cores(8, nodes=2), [])] == [1, 1, 1]
    assert [len(g.cores) for g in divide(3, 2, plain_cores(8, nodes=2), [])] == [2, 2, 2]
    assert [g.nodes for g in divide(1, 2, plain_cores(2, nodes=2), [])] == [2], "nothing else is possible"


def test_gpus_get_the_cores_of_their_node_and_no_claim_is_made_without_knowing():
    have = plain_cores(8, nodes=2)
    crossed = [SeatGpu("GPU-a", 1), SeatGpu("GPU-b", 0)]
    groups = divide(2, 1, have, crossed)
    assert [(g.gpus[0].entry, g.cores[0].node, g.near) for g in groups] == [("GPU-b", 0, True), ("GPU-a", 1, True)]
    assert [g.near for g in divide(2, 1, have, [SeatGpu("GPU-a", None), SeatGpu("GPU-b", None)])] == [None, None]
    crowded = [SeatGpu("GPU-a", 0), SeatGpu("GPU-b", 0), SeatGpu("GPU-c", 0)]
    assert [g.near for g in divide(3, 1, plain_cores(4, nodes=2), crowded)] == [True, True, False], "two cores are near"


def test_too_few_cores_for_one_seat_is_one_line():
    with pytest.raises(BadInput, match="2 ranks need 2 cores and this machine has 1 that may be used: use fewer --ra"):
        divide(4, 2, plain_cores(1), [])


# GPUs of the instructor's own session


SAME = [card("GPU-aa10"), card("GPU-bb20"), card("GPU-cc99")]
MIG = [card("GPU-aa10", mig=(1, 1), mig_uuids=["MIG-1", "MIG-2"]), card("GPU-bb20")]
MIXED = [card("GPU-aa10", "Tesla T4"), card("GPU-bb20")]


@pytest.mark.parametrize(
    ("cards", "environ", "expected"),
    [
        (SAME, {}, ["GPU-aa10", "GPU-bb20", "GPU-cc99"]),
        (SAME, {"CUDA_VISIBLE_DEVICES": "2,0"}, ["GPU-cc99", "GPU-aa10"]),
        (SAME, {"CUDA_VISIBLE_DEVICES": "GPU-bb,9,0"}, ["GPU-bb20"]),
        (SAME, {"CUDA_VISIBLE_DEVICES": ""}, []),
        (SAME, {"CUDA_VISIBLE_DEVICES": "0,0"}, []),
        (MIG, {}, ["MIG-1", "MIG-2", "GPU-bb20"]),
        (MIG, {"CUDA_VISIBLE_DEVICES": "MIG-2,MIG-1"}, ["MIG-2", "MIG-1"]),
        (MIXED, {}, ["0", "1"]),
        (MIXED, {"CUDA_VISIBLE_DEVICES": "1"}, ["1"]),
        (MIXED, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ["GPU-aa10", "GPU-bb20"]),
        ([], {}, []),
    ],
)
def test_what_is_handed_out_is_what_the_instructor_sees(tmp_path, cards, environ, expected):
    found = seat_gpus(nvml.report(FakeNvml(cards)), environ, machine_tree(tmp_path))
    assert [gpu.entry for gpu in found] == expected
    nodes = {"GPU-aa10": 0, "MIG-1": 0, "MIG-2": 0, "GPU-bb20": 1}
    assert [gpu.node for gpu in found] == [nodes.get(entry) for entry in expected]


def test_a_mig_instance_is_a_seats_only_device():
    instances = [SeatGpu(f"MIG-{i}", 0, mig=True) for i in range(4)]
    assert [len(g.gpus) for g in divide(3, 2, plain_cores(8), instances)] == [1, 1, 1]


def test_a_cpu_build_hands_out_no_gpus_and_hides_them(monkeypatch, capsys):
    report = nvml.report(FakeNvml(SAME))
    monkeypatch.setattr(seating.nvml, "report", lambda **_: report)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = seating.machine_here()
    assert not machine.gpus and "without CUDA" in machine.notes[-1]
    assert plan(Config(learners=1, ranks=1), machine).seats[0].environment["CUDA_VISIBLE_DEVICES"] == ""


# The plan


EIGHT = Machine(tuple(plain_cores(8)))


def test_seats_that_share_are_named_and_their_wait_is_modelled(tmp_path):
    made = plan(Config(learners=8, ranks=2, queue=tmp_path), EIGHT)
    assert made.seats[0].shares_with == ("seat-05",) and made.seats[4].shares_with == ("seat-01",)
    text = " ".join(made.notes)
    assert "8 seats share 4 sets of cores" in text and "21 s with scope 'machine', which is used; 1.4 s with" in text
    assert "spoil each other's timings" in plan(replace(made.config, queue=None), EIGHT).notes[-1]
    assert plan(replace(made.config, learners=1), EIGHT).notes == ["One learner waits for nobody."]


def test_seats_with_gpus_exclude_each_other_by_device(tmp_path):
    gpus = tuple(SeatGpu(f"GPU-{i}", 0) for i in range(4))
    made = plan(Config(learners=2, queue=tmp_path), replace(EIGHT, gpus=gpus))
    assert [s.environment["CUDA_VISIBLE_DEVICES"] for s in made.seats] == ["GPU-0,GPU-1", "GPU-2,GPU-3"]
    assert {s.environment["COURSE_QUEUE_SCOPE"] for s in made.seats} == {"devices"}
    assert made.waiting_s("devices") == 0 and "0 s with scope 'devices', which is used" in made.notes[-1]
    few = plan(Config(learners=2, queue=tmp_path), replace(EIGHT, gpus=gpus[:1]))
    assert "fewer GPUs than 2" in " ".join(few.notes) and few.seats[0].shares_with == ("seat-02",)


def test_every_port_is_free_and_none_is_given_twice():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        first = taken.getsockname()[1]
        ports = [s.port for s in plan(Config(learners=3, port=first), EIGHT).seats]
    assert len(set(ports)) == 3 and min(ports) > first
    with pytest.raises(BadInput, match="not enough free ports from 65535 on"):
        plan(Config(learners=2, port=65535), EIGHT)


def test_command_and_script_survive_a_shell(tmp_path, monkeypatch, capsys):
    room = tmp_path / "a room's folder"
    monkeypatch.setattr(seats, "machine_here", lambda: EIGHT)
    monkeypatch.setattr(
        sys, "argv", ["seats", "--learners", "2", "--room", str(room), "--scripts", str(tmp_path / "s")]
    )
    seats.main()
    said = capsys.readouterr().out
    assert f"mkdir -p -m 1777 {shlex.quote(str(room))}" in said
    tools = tmp_path / "bin"
    for name in ("make", "taskset"):
        write(tools / name, f'#!/bin/sh\n[ {name} = make ] && echo "$COURSE_ROOM" "$@" || {{ shift 2; exec "$@"; }}')
        (tools / name).chmod(0o755)
    environment = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    script = str(tmp_path / "s" / "seat-02.sh")
    for command in ([script], ["sh", "-c", said.splitlines()[-1]]):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.startswith(f"{room} lab LAB_ARGS=--no-browser --port ")


def test_json_holds_everything_and_the_text_is_readable(tmp_path):
    made = plan(Config(learners=2, room=tmp_path), EIGHT)
    found = json.loads(json.dumps(as_dict(made)))
    assert found["waiting_kind"] == "modelled" and [s["cpus"] for s in found["seats"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert f"COURSE_NAME=seat-02 COURSE_ROOM={tmp_path} taskset -c 4-7 make lab" in found["seats"][1]["command"]
    assert "seat-01 none      4  0-3" in as_text(made)
    loose = plan(Config(learners=2), replace(EIGHT, pinned=False))
    assert "taskset" not in loose.seats[0].command and as_dict(loose)["seats"][0]["cpus"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--learners", "0"], "learners must be 1 to 999, not 0"),
        (["--port", "80"], "port must be 1024 to 65535"),
        (["--room", "room"], "room must be an absolute path"),
        (["--lerners", "3"], "did you mean '--learners'"),
        (["--queue", "/dev/null"], "is no folder: make it with `mkdir -m 1777 /dev/null`"),
        (["--ranks", "999"], "use fewer --ranks"),
        (["--scripts", "/dev/null"], "choose another folder with --scripts"),
    ],
)
def test_bad_input_is_one_line(monkeypatch, capsys, arguments, message):
    monkeypatch.setattr(seats, "machine_here", lambda: EIGHT)
    monkeypatch.setattr(sys, "argv", ["seats", *arguments])
    with pytest.raises(SystemExit) as left:
        seats.main()
    error = capsys.readouterr().err
    assert left.value.code == 2 and message in error and error.count("\n") == 1


# What labs make of a seat


@affinity_only
def test_ranks_stay_on_the_cores_of_their_seat():
    all_cores = os.sched_getaffinity(0)
    own = {max(all_cores)}
    os.sched_setaffinity(0, own)
    try:
        assert [d.cores for d in place(1, "cpu")] == [(max(all_cores),)]
        assert run_on_ranks(lambda: os.sched_getaffinity(0), 2) == [own, own]
        if len(all_cores) > 1:
            with pytest.raises(BadInput, match="this machine has 1 usable core"):
                place(2, "cpu")
    finally:
        os.sched_setaffinity(0, all_cores)


@affinity_only
@pytest.mark.skipif("ELSEWHERE" in os.environ, reason="its cores are there in appearance only")
def test_taskset_reaches_the_processes_that_look_for_cores():
    last = max(os.sched_getaffinity(0))
    code = "from labs.kit.hardware import devices; print(devices(1, kind='cpu')[0].cores)"
    command = ["taskset", "-c", str(last), *PYTHON, "-c", code]
    assert subprocess.check_output(command, env=new_environment(), text=True) == f"({last},)\n"


def test_ranks_see_the_gpus_of_their_seat(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    cards = [card(f"GPU-{i}{i}", f"card {i}") for i in range(4)]
    report = nvml.report(FakeNvml(cards))
    order = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    gpus = tuple(seat_gpus(report, order))
    made = plan(Config(learners=2), replace(EIGHT, gpus=gpus))
    seen = [visible_gpu_names(report, s.environment) for s in made.seats]
    assert seen == [["card 0", "card 1"], ["card 2", "card 3"]]
