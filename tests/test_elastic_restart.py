"""Ranks are killed, from inside and outside: training ends as if nothing had happened, and leaves nothing behind."""

import dataclasses
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import HERE, MARK, PYTHON, SURVIVAL_S, assert_no_survivors, family, leftovers, new_environment, wait_for

from labs import elastic_restart
from labs.common.checkpoints import checkpoints, load_latest
from labs.common.checkpoints.resume import differences
from labs.common.elastic import journal, train
from labs.common.elastic.journal import PHASES, History
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.kit.restart import RESTART_COUNT, SHARED, _kept, use_fresh_store

SMOKE = elastic_restart.Config(smoke=True)


@pytest.fixture(scope="module")
def run():
    return launch("elastic_restart", nproc=1, smoke=True)


KILLED = {"killed": "training", "killed while saving": "saving"}


@pytest.mark.parametrize("case", KILLED)
def test_training_goes_on_from_the_last_checkpoint_to_the_identical_end(run, case):
    def at(metric):
        return run.one(metric, run=case).value

    assert at("state_equal") == 1
    whole, restarted = run.one("loss", run="uninterrupted"), run.one("loss", run=case)
    assert restarted.samples == whole.samples and len(whole.samples) == SMOKE.steps
    assert (at("restarts"), at("processes")) == (1, 4), "all ranks are started anew, not only the one that died"
    expected = elastic_restart.predict(SMOKE, KILLED[case])
    assert {name: at(name) for name in expected} == expected
    assert len(run.one("step_s", run=case).samples) == SMOKE.steps + expected["steps_redone"]


def test_an_uninterrupted_training_has_no_restart(run):
    assert run.one("restarts", run="uninterrupted").value == 0 and run.one("processes", run="uninterrupted").value == 2
    assert not run.where("restart_s", run="uninterrupted")


@pytest.mark.parametrize("case", KILLED)
def test_the_phases_of_a_restart_add_up(run, case):
    phases = run.where("phase_s", run=case)
    assert [r.case["phase"] for r in phases] == [name for name, _ in PHASES]
    assert all(r.value >= 0 for r in phases)
    assert sum(r.value for r in phases) == pytest.approx(run.one("restart_s", run=case).value)


@pytest.mark.drill
def test_nothing_is_left(run):
    assert [r.value for r in run.where("leftovers")] == [0, 0]


def test_predict_by_hand():
    config = elastic_restart.Config()  # 32 steps, 16 per epoch, saved every 5
    assert config.steps == 32
    assert elastic_restart.predict(config) == {"resumed_at_step": 20, "steps_redone": 2}
    assert elastic_restart.predict(config, "saving") == {"resumed_at_step": 20, "steps_redone": 5}
    last = dataclasses.replace(config, kill_at_step=32)
    assert elastic_restart.predict(last) == {"resumed_at_step": 30, "steps_redone": 1}
    assert elastic_restart.predict(last, "saving") == {"resumed_at_step": 30, "steps_redone": 2}
    assert elastic_restart.predict(dataclasses.replace(config, kill_at_step=3))["resumed_at_step"] == 0


def test_differences_see_a_single_bit():
    a = {"x": [torch.ones(2), (1, "a")]}
    assert not list(differences(a, {"x": [torch.ones(2), (1, "a")]}))
    for b in (
        {"x": [torch.tensor([1.0, 1.0 + 2**-23]), (1, "a")]},
        {"x": [torch.ones(2), (1, "b")]},
        {},
        {"x": [torch.ones(2).double(), (1, "a")]},
        {"x": [torch.ones(2)]},
    ):
        assert list(differences(a, b))


# Without an agent: two ranks that stop, and are called again


def trained(folder: str, values: dict) -> tuple[list[float], str]:
    """Losses of the steps of this call, and what it was refused with."""
    import torch.distributed as dist

    from labs.common.elastic import loop
    from labs.kit.rank import Rank

    rank, ranks = dist.get_rank(), dist.get_world_size()
    config = train.Config(folder=Path(folder), samples=256, save_every=3, **values)
    note = journal.Journal(config.folder, rank, time.time())
    try:
        loop.train_on(Rank(rank, ranks, rank, ranks, torch.device("cpu"), "gloo", ()), config, note)
    except BadInput as e:
        return [], str(e)
    rows = [e for e in journal.read(config.folder) if e["event"] == "step" and e["pid"] == os.getpid()]
    return [e["loss"] for e in rows], ""


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """Four epochs of four steps: losses by rank, and the folder with the checkpoints of steps 12, 15 and 16."""
    folder = tmp_path_factory.mktemp("reference")
    return [losses for losses, _ in run_on_ranks(trained, 2, str(folder), {"epochs": 4})], folder


@pytest.mark.parametrize(("damaged", "at"), [(False, 15), (True, 12)])  # in the middle, and at the end of an epoch
def test_it_goes_on_where_the_last_good_checkpoint_was_taken(reference, tmp_path, damaged, at):
    losses, folder = reference
    for path in checkpoints(folder)[:2]:
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if damaged:
        os.truncate(tmp_path / "step-00000015.pt", 1000)
    again = run_on_ranks(trained, 2, str(tmp_path), {"epochs": 4})
    assert again == [(whole[at:], "") for whole in losses]
    assert not list(differences(load_latest(tmp_path), load_latest(folder)))


@pytest.mark.parametrize(
    ("ranks", "values", "words"),
    [
        (2, {"lr": 0.3}, "with lr 0.05, not 0.3"),
        (1, {}, "with world_size 2, not 1"),
        (2, {"seed": 1}, "seed 0, not 1"),
        (2, {"batch_size": 200}, "samples must be at least 400"),
    ],
)
def test_another_training_does_not_go_on_from_here(reference, ranks, values, words):
    for losses, refused in run_on_ranks(trained, ranks, str(reference[1]), {"epochs": 5, **values}):
        assert losses == [] and words in refused


# Under torchrun, killed from outside


class Torchrun:
    """`torchrun ... -m labs.elastic_train` in a shell."""

    def __init__(self, folder: Path, *args: str) -> None:
        self.folder, environment = folder, new_environment(TMPDIR=str(folder.parent))
        self.mark = environment[MARK]
        self.process = subprocess.Popen(
            [
                *PYTHON,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "2",
                "-m",
                "labs.elastic_train",
                "--folder",
                str(folder),
                "--samples",
                "256",
                "--save-every",
                "3",
                *args,
            ],
            env=environment,
            cwd=HERE,
            text=True,
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def history(self) -> History:
        """So far."""
        return History(journal.read(self.folder)) if self.folder.exists() else History([])

    def wait_for_steps(self, n: int, restart: int = 0) -> History:
        """Until rank 0 has done `n` steps since that restart."""
        wait_for(lambda: len(self.history().of("step", rank=0, restart=restart)) >= n, 60, "steps")
        return self.history()


@pytest.fixture
def torchrun(tmp_path):
    started = []

    def start(*args: str) -> Torchrun:
        started.append(Torchrun(tmp_path / "training", *args))
        return started[-1]

    yield start
    for job in started:
        for process in family(job.mark):
            process.kill()
        job.process.communicate(timeout=250)


@pytest.mark.drill
def test_a_rank_killed_by_hand(torchrun, tmp_path):
    """The learner's own drill. 80 steps, so that there is time for the kill."""
    job = torchrun("--epochs", "20")
    victim = job.wait_for_steps(8).of("started", rank=1)[0]["pid"]
    os.kill(victim, signal.SIGKILL)
    out, complaint = job.process.communicate(timeout=250)
    assert job.process.returncode == 0, complaint
    assert_no_survivors(job.mark)
    history = job.history()
    assert (history.restarts, len(history.pids), len(history.losses())) == (1, 4, 80)
    assert len(history.of("saved", rank=0)) >= 80 // 3
    resumed = {int(step) for step in re.findall(r"start 2, from step (\d+)", out)}
    assert len(resumed) == 1 and resumed.pop() % 3 == 0
    whole = run_on_ranks(trained, 2, str(tmp_path / "whole"), {"epochs": 20})
    assert [losses for losses, _ in whole] == [history.losses(0), history.losses(1)]
    assert not list(differences(load_latest(job.folder), load_latest(tmp_path / "whole")))


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_ending_torchrun_ends_its_ranks(torchrun, number):
    job = torchrun("--epochs", "400")
    job.wait_for_steps(4)
    os.kill(job.process.pid, number)
    job.process.wait(timeout=250)
    assert_no_survivors(job.mark)
    assert load_latest(job.folder)[0] >= 3


# The lab itself is killed


@pytest.mark.drill
@pytest.mark.parametrize("who", ["launcher", "lab"])
def test_killing_the_lab_ends_all_processes_and_removes_its_folder(who, tmp_path):
    temporary = Path("/tmp") / f"t-{os.getpid()}-{who}"  # a short path, as sockets need it
    temporary.mkdir()
    environment = new_environment(TMPDIR=str(temporary))
    command = [*PYTHON, "-m", "labs.elastic_restart", "--nproc", "1", "--epochs", "400", "--timeout-s", "60"]
    launcher = subprocess.Popen(
        command,
        env=environment,
        cwd=HERE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: list(temporary.glob("labs-*/trainings/*/step-*.pt")), 60, "a checkpoint")
        agent = next(p for p in family(environment[MARK]) if "labs.common.elastic.agent_process" in p.cmdline())
        os.kill(launcher.pid if who == "launcher" else agent.ppid(), signal.SIGKILL)
        _, complaint = launcher.communicate(timeout=20)
        assert who == "launcher" or complaint.startswith("rank 0 was killed by SIGKILL")
        assert_no_survivors(environment[MARK])
        wait_for(lambda: not leftovers(temporary), SURVIVAL_S, f"an empty folder, not {leftovers(temporary)}")
    finally:
        for process in family(environment[MARK]):
            process.kill()
        subprocess.run(["rm", "-rf", temporary], check=True)


def failures() -> list[str]:
    """What is said of a training that fails, and when there is no agent any more."""
    from labs.elastic_restart.agent import elastic_agent
    from labs.kit.rank import Rank

    rank, told = Rank(0, 1, 0, 1, torch.device("cpu"), "gloo", (0,), tuple(range(os.cpu_count()))), []
    with elastic_agent(rank) as agent:
        for name in ("x", "y"):
            try:
                agent.train(name, ["--lr", "-1"], max_restarts=0)
            except RuntimeError as e:
                told.append(str(e))
            agent.process.kill()
    return told


@pytest.mark.long
def test_a_training_that_fails_says_why():
    failed, killed = run_on_ranks(failures, 1, timeout_s=60)[0]
    assert failed == "the run 'x' failed: python -m labs.elastic_train: lr must be positive, not -1.0"
    assert killed == "the elastic agent has ended with exit code -9"


# Parts


@pytest.mark.long
def test_torch_still_shares_the_store_of_the_last_start():
    """When this fails, torch has mended it: labs.kit.restart can go. See its docstring."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry

    handler = rendezvous_handler_registry.create_handler(
        RendezvousParameters("c10d", "127.0.0.1:0", "test", 1, 1, local_addr="127.0.0.1")
    )
    try:
        ports = [handler.next_rendezvous().bootstrap_store_info.master_port for _ in range(2)]
    finally:
        handler.shutdown()
    assert ports[0] == ports[1]


def test_a_fresh_store_does_not_hold_what_an_earlier_start_has_left(monkeypatch):
    from torch.distributed import TCPStore

    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent.set("0//cpu//0", "address of a rank that is dead")
    for name, value in {
        SHARED: "True",
        "RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(agent.port),
        RESTART_COUNT: "1",
    }.items():
        monkeypatch.setenv(name, value)
    use_fresh_store()
    port = int(os.environ["MASTER_PORT"])
    assert port != agent.port and os.environ[SHARED] == "False"
    assert not TCPStore("127.0.0.1", port, is_master=False).check(["0//cpu//0"])
    use_fresh_store()
    assert int(os.environ["MASTER_PORT"]) == port, "nothing is shared any more"
    _kept.clear()


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--epochs", "0"], "epochs must be"),
        (["--lr", "0"], "lr must be"),
        (["--save-every", "0"], "save_every must"),
        (["--kill-rank", "1", "--kill-while", "saving"], "only rank 0 saves"),
        ([], "start it with torchrun"),
        (["--batch-size", "0"], "batch_size must be"),
        (["--samples", "0"], "samples must be"),
        (["--seed", "-5"], "seed must be"),
    ],
)
def test_bad_input_of_the_training_is_one_line(args, words, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        train.entry(["--folder", str(tmp_path / "x"), *args])
    told = capsys.readouterr().err
    assert end.value.code == 2 and words in told and told.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_full_disk_ends_a_rank_in_one_line(monkeypatch, capsys):
    from contextlib import nullcontext
    from types import SimpleNamespace

    from labs.common.elastic import loop

    def full(*_):
        raise OSError(28, "No space left on device; step 5 is not saved, earlier ones are", "runs/x/step-00000005.pt")

    rank = SimpleNamespace(rank=0, device=torch.device("cpu"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    for name, value in (
        ("place", lambda *_: [None]),
        ("process_group", lambda _: nullcontext(rank)),
        ("same_bits_every_time", lambda _: None),
        ("train_on", full),
    ):
        monkeypatch.setattr(loop, name, value)
    monkeypatch.setattr(loop.os, "_exit", sys.exit)
    with pytest.raises(SystemExit) as end:
        loop.train(SimpleNamespace(device="cpu"), lambda *_: None)
    told = capsys.readouterr().out
    assert end.value.code == 1 and told.count("\n") == 1
    assert "step 5 is not saved, earlier ones are" in told and "make room" in told


def test_a_folder_that_cannot_be_written_to_is_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(train.supervise, "hold", lambda name: None)
    with pytest.raises(SystemExit) as end:
        train.entry(["--folder", str(tmp_path / "file" / "x")])
    told = capsys.readouterr().err
    assert end.value.code == 2 and "choose another --folder" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"epochs": 0}, "epochs must be"),
        ({"samples": 60}, "samples must be at least 64"),
        ({"kill_at_step": 33}, "kill_at_step must be between 1 and 32"),
        ({"save_every": 0}, "save_every must be"),
        ({"batch_size": 0}, "batch_size must be"),
        ({"kill_at_step": 0}, "kill_at_step must be between"),
        ({"seed": -5}, "seed must be"),
    ],
)
def test_bad_input_of_the_lab(values, words):
    with pytest.raises(BadInput, match=words):
        launch("elastic_restart", nproc=1, **values)
