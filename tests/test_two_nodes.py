"""Two machines out of one: the options, wrong settings, a machine that dies or freezes; and nothing is left."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from processes import HERE, MARK, PYTHON, SURVIVAL_S, assert_no_survivors, family, leftovers, new_environment, wait_for

from labs import two_nodes
from labs.kit.errors import BadInput
from labs.kit.lab import require_limits
from labs.kit.launch import launch
from labs.two_nodes import settings
from labs.two_nodes.settings import WRONG, first_error, options


@pytest.mark.long
def test_wrong_settings_print_an_error_and_the_right_ones_train():
    """A killed machine's job is the one with nothing wrong: it trains to the end, before and after."""
    run = launch("two_nodes", nproc=1, smoke=True, parts=("settings", "deaths"))
    assert {r.case["setting"] for r in run.where("computed")} == {w.name for w in WRONG[:2]}
    taken = run.one("computed", setting="port already taken")
    assert taken.value == 0 and "EADDRINUSE" in taken.case["machine_0"]
    for r in run.where("noticed_s"):
        case = {"fate": r.case["fate"]}
        assert run.one("same_bits", **case).value == 1 and run.one("redone", **case).value == 17 % 5
        assert (r.value >= run[0].config["group_timeout_s"]) == (r.case["fate"] == "frozen")
    assert two_nodes.category(run).count("same bits 1") == 2
    assert "with 0 of 2 wrong settings" in " ".join(two_nodes.answer(run))


def test_machines_differ_only_in_who_holds_the_store():
    first, second = (options(node, 29500, {"read_timeout": 2}) for node in (0, 1))
    assert {name for name in first if first[name] != second[name]} == {"--rdzv-conf"}
    assert "is_host=1" in first["--rdzv-conf"] and "is_host=0" in second["--rdzv-conf"]


def test_each_wrong_setting_changes_one_thing():
    right = options(1, 1, {})
    for wrong in WRONG:
        for changed in wrong.options.values():
            assert changed.keys() <= right.keys() and all(right[name] != changed[name] for name in changed)
        assert sum(map(bool, (wrong.options, wrong.environment, wrong.clock_off_s, wrong.port_taken))) == 1, wrong.name


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("Traceback (most recent call last):\n  File x\nValueError: no", "ValueError: no"),
        ("E1122 api.py:8] torch.distributed.DistNetworkError: late\nValueError: x", "DistNetworkError: late"),
        ("torch.elastic.rendezvous.api.RendezvousConnectionError: see inner\nRuntimeError: x", "RuntimeError: x"),
        ("a.b.RendezvousTimeoutError\n", "RendezvousTimeoutError"),
        ("  traceback : RuntimeError: [enforce fail at /a/b/device.cc:84] ifa", "RuntimeError: [device.cc:84] ifa"),
        ("all is well\n", ""),
    ],
)
def test_the_first_error(text, line):
    assert first_error(text) == line


@pytest.mark.parametrize("bad", [{"parts": ()}, {"steps": 1}, {"at_step": 24}, {"save_every": 0}])
def test_bad_input_is_refused_before_anything_starts(bad):
    with pytest.raises(BadInput):
        require_limits(two_nodes.Config(**bad))


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_with_a_wrong_clock_alone_a_rank_computes():
    run = launch("two_nodes", nproc=1, parts=("settings",))
    computed = {r.case["setting"]: (r.value, r.case["of"]) for r in run.where("computed")}
    assert computed.pop("clock five minutes slow") == (1, 1)
    assert set(computed) == {w.name for w in settings.WRONG[:-1]} and all(n == 0 for n, _ in computed.values())


@pytest.mark.drill
@pytest.mark.timeout(300)
@pytest.mark.parametrize("who", ["launcher", "lab"])
def test_killing_the_lab_leaves_no_process_and_no_folder(who):
    temporary = Path("/tmp") / f"t-{os.getpid()}-{who}"  # a short path, as sockets need it
    temporary.mkdir()
    environment = new_environment(TMPDIR=str(temporary))
    command = [*PYTHON, "-m", "labs.two_nodes", "--nproc", "1", "--parts", "deaths"]
    launcher = subprocess.Popen(
        command,
        env=environment,
        cwd=HERE.parent,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for(lambda: list(temporary.glob("labs-*/run-of-frozen/fate.json")), 120, "a frozen machine")
        drills = next(p for p in family(environment[MARK]) if "labs.two_nodes.drills" in p.cmdline())
        os.kill(launcher.pid if who == "launcher" else drills.ppid(), signal.SIGKILL)
        launcher.wait(timeout=250)
        assert_no_survivors(environment[MARK])
        wait_for(lambda: not leftovers(temporary), SURVIVAL_S, f"an empty folder, not {leftovers(temporary)}")
    finally:
        for process in family(environment[MARK]):
            process.kill()
        subprocess.run(["rm", "-rf", temporary], check=True)
