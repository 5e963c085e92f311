"""Two machines out of one: what ranks are told, wrong settings, a machine that is killed; and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from processes import HERE, MARK, PYTHON, SURVIVAL_S, assert_no_survivors, family, leftovers, new_environment, wait_for

from labs import two_nodes
from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.record import Record, Records
from labs.two_nodes import settings
from labs.two_nodes.settings import WRONG, first_telling_line, meet_at

ADDRESSES = ("127.0.0.1", "127.0.0.2")


@pytest.fixture(scope="module")
def run():
    return launch("two_nodes", nproc=1, parts=("environment", "wrong", "kill"), settings=("port taken",))


def told(run, name):
    return {r.case["on_rank"]: r.case["text"] for r in run.where("variable", name=name)}


@pytest.mark.long
def test_each_rank_is_told_who_it_is(run):
    assert told(run, "RANK") == {r: str(r) for r in range(4)}
    assert told(run, "LOCAL_RANK") == {0: "0", 1: "1", 2: "0", 3: "1"}, "counted on its own machine"
    assert told(run, "GROUP_RANK") == {0: "0", 1: "0", 2: "1", 3: "1"}, "the machine"
    for name, text in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2"), ("TORCHELASTIC_RUN_ID", "job")):
        assert set(told(run, name).values()) == {text}
    assert len(set(told(run, "MASTER_PORT").values())) == 1
    assert {r.value for r in run.where("sum")} == {1 + 2 + 3 + 4}


@pytest.mark.long
def test_a_taken_port_is_told_and_cured(run):
    record = run.one("told_s", setting="port taken")
    assert "EADDRINUSE" in record.case["line"] and record.case["node"] == 0
    assert run.one("went_on", setting="port taken").value == 0
    assert run.one("cured", setting="port taken").value == 1


@pytest.mark.long
def test_a_killed_machine_comes_back_and_nobody_can_tell(run):
    assert run.one("state_equal").value == 1
    whole, again = run.one("loss", run="undisturbed"), run.one("loss", run="killed")
    assert whole.samples == again.samples and len(whole.samples) == two_nodes.Config().steps
    assert run.one("killed_at_step").value == 18
    assert run.one("steps_redone").value == (18 - 1) % 5, "what was done since the last checkpoint"
    assert run.one("away_s").value > 0


def test_the_answer_names_settings_that_nobody_noticed():
    case = {"setting": "clock off", "what": "", "cure": "", "waits": ""}
    made = Record("two_nodes", "machines", "1", (2,), case={"how": "loopback"})
    went_on = Record("two_nodes", "went_on", "ranks", (1,), case={**case, "of": 1})
    said = " ".join(two_nodes.answer(Records([made, went_on])))
    assert "computed on in spite of: clock off" in said


def test_what_torchrun_needs_differs_between_machines_in_two_options_only():
    first, second = (meet_at(node, ADDRESSES, 29500) for node in (0, 1))
    assert {name for name in first if first[name] != second[name]} == {"--rdzv-conf", "--local-addr"}
    assert second["--rdzv-endpoint"] == "127.0.0.1:29500"
    assert "is_host=1" in first["--rdzv-conf"] and "is_host=0" in second["--rdzv-conf"]


def test_every_option_that_a_wrong_setting_changes_is_one_that_is_given():
    assert len(set(settings.NAMES)) == len(WRONG) >= 8
    for wrong in WRONG:
        right = meet_at(1, ADDRESSES, 1)
        for flags in wrong.flags.values():
            assert flags.keys() <= right.keys() and all(right[name] != flags[name] for name in flags)
        changes = [wrong.flags, wrong.environment, wrong.clock_off_s, wrong.missing, wrong.port]
        assert sum(map(bool, changes)) == 1, f"{wrong.name} is one wrong setting, not two"
        assert wrong.cure and wrong.waits


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: no", "ValueError: no"),
        (
            "E1122 api.py:836] torch.distributed.DistNetworkError: timed out\nValueError: later",
            "DistNetworkError: timed out",
        ),
        ("torch.elastic.rendezvous.api.RendezvousConnectionError: see inner\nRuntimeError: x", "RuntimeError: x"),
        ("a.b.RendezvousTimeoutError\n", "RendezvousTimeoutError"),
        ("  traceback : RuntimeError: [enforce fail at /a/b/device.cc:84] ifa", "RuntimeError: [device.cc:84] ifa"),
        (
            "torch.distributed.DistStoreError: wait timeout after 3000ms, keys: /none/torchelastic/role_info/0, "
            "/none/x/1",
            "DistStoreError: wait timeout after 3000ms",
        ),
        ("all is well\n", ""),
        ("", ""),
    ],
)
def test_the_first_telling_line(text, line):
    assert first_telling_line(text) == line


@pytest.mark.parametrize(
    "bad",
    [
        {"parts": ()},
        {"parts": ("kill", "kill")},
        {"settings": ("nonsense",)},
        {"steps": 1},
        {"kill_at_step": 40},
        {"kill_at_step": 0},
        {"save_every": 0},
    ],
)
def test_bad_input_is_told_before_anything_starts(bad):
    with pytest.raises(BadInput):
        two_nodes.Config(**bad)


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_every_wrong_setting_is_told_or_seen_and_every_cure_works():
    run = launch("two_nodes", nproc=1, parts=("wrong", "elastic"))
    for name in settings.NAMES:
        assert run.one("cured", setting=name).value == 1, name
        told, went_on = run.where("told_s", setting=name), run.one("went_on", setting=name)
        assert len(told) or went_on.value, f"{name}: nobody said anything, and nothing was computed"
        if name != "clock off":  # there one machine trains on alone, and says nothing
            assert went_on.value == 0 and told[0].case["line"], name
    assert [(r.case["moment"], r.value) for r in run.where("world_size")] == [("alone", 1), ("joined", 2), ("left", 1)]
    assert run.one("ended").value == 1


@pytest.mark.drill
@pytest.mark.timeout(900)
def test_ten_killed_machines_in_a_row_come_back_with_the_same_bits():
    losses = set()
    for _ in range(10):
        run = launch("two_nodes", nproc=1, parts=("kill",))
        assert run.one("state_equal").value == 1 and run.one("steps_redone").value == 2
        losses |= {r.value for r in run.where("final_loss")}
    assert len(losses) == 1, "twenty trainings, half of them disturbed"


@pytest.mark.drill
@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", ["launcher", "lab"])
def test_killing_the_lab_leaves_no_process_and_no_folder(who):
    temporary = Path("/tmp") / f"t-{os.getpid()}-{who}"  # a short path, as sockets need it
    temporary.mkdir()
    environment = new_environment(TMPDIR=str(temporary))
    command = [*PYTHON, "-m", "labs.two_nodes", "--nproc", "1", "--parts", "wrong", "kill"]
    launcher = subprocess.Popen(
        command,
        env=environment,
        cwd=HERE.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: list(temporary.glob("labs-*/torchrun-*-on-1.log")), 90, "a torchrun")
        server = next(p for p in family(environment[MARK]) if "labs.two_nodes.node_server" in p.cmdline())
        os.kill(launcher.pid if who == "launcher" else server.ppid(), signal.SIGKILL)
        launcher.wait(timeout=250)
        assert_no_survivors(environment[MARK])
        wait_for(lambda: not leftovers(temporary), SURVIVAL_S, f"an empty folder, not {leftovers(temporary)}")
    finally:
        for process in family(environment[MARK]):
            process.kill()
        subprocess.run(["rm", "-rf", temporary], check=True)
