"""A resumed training ends as one that was never stopped, bit for bit, and each forgotten part is seen."""

import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from processes import MARK, PYTHON, assert_no_survivors, new_environment

from labs import training_checkpoint
from labs.kit.errors import BadInput
from labs.kit.launch import launch, run_on_ranks
from labs.training_checkpoint import corruption

Config = training_checkpoint.Config
ALL_PARTS = {"losses", "model", "optimizer", "scheduler", "scaler", "data", "random"}


@pytest.fixture(scope="module")
def files():
    """All trials on files, small."""
    return launch("training_checkpoint", nproc=1, smoke=True, trials=training_checkpoint.Trial.__args__[1:])


@pytest.fixture(scope="module")
def resumed():
    """Every part forgotten."""
    return launch("training_checkpoint", nproc=1, trials=("resume",), seeds=1)


@pytest.fixture(scope="module")
def on_two():
    """Two ranks with DDP."""
    return launch("training_checkpoint", nproc=2, trials=("resume",), forgotten=("nothing", "data"), seeds=0)


@pytest.fixture(params=[1, 2])
def ranks(request):
    """The same on one and on two ranks."""
    return request.getfixturevalue("resumed" if request.param == 1 else "on_two")


def equal(run, forgotten):
    return {r.case["part"] for r in run.where("bitwise_equal", forgotten=forgotten) if r.value == 1}


# -- resuming


def test_resumed_equals_uninterrupted_bit_for_bit(ranks):
    assert equal(ranks, "nothing") == ALL_PARTS
    losses = [ranks.one("loss", run=run, forgotten="nothing").samples for run in ("uninterrupted", "resumed")]
    assert losses[0] == losses[1] and len(losses[0]) == 70
    assert ranks.one("parameter_difference", forgotten="nothing").value == 0
    ends = {r.value for r in ranks.where("test_loss", forgotten="nothing", at="end") if r.case["run"] != "other seed"}
    assert len(ends) == 1


@pytest.mark.parametrize("forgotten", ["optimizer", "scheduler", "scaler", "random", "data"])
def test_a_forgotten_part_is_silent_and_changes_the_training(resumed, forgotten):
    assert not {"losses", "model", "optimizer"} & equal(resumed, forgotten)
    assert resumed.one("equal_losses", forgotten=forgotten).value < 5
    assert 1e-3 < resumed.one("parameter_difference", forgotten=forgotten).value < 1
    kept = resumed.one("test_loss", forgotten=forgotten, at="resume").value
    assert kept == resumed.one("test_loss", forgotten="nothing", at="resume").value, "the model came back"


def test_forgotten_buffers_show_in_evaluation_only(resumed):
    assert {"losses", "optimizer"} <= equal(resumed, "buffers") and "model" not in equal(resumed, "buffers")
    found, right = (resumed.one("test_loss", forgotten=f, at="resume").value for f in ("buffers", "nothing"))
    assert found > 1.3 * right


def test_a_forgotten_position_repeats_samples_as_predicted(ranks):
    predicted = ranks.one("predicted_repeated_samples").value
    assert predicted > 0
    for r in ranks.where("repeated_samples"):
        missed = ranks.one("missed_samples", forgotten=r.case["forgotten"]).value
        assert r.value == missed == (predicted if r.case["forgotten"] == "data" else 0)


def test_a_forgotten_scaler_searches_for_its_scale_again(resumed):
    skipped = {f: resumed.one("skipped_steps", run="resumed", forgotten=f).value for f in ("nothing", "scaler")}
    assert skipped["scaler"] >= skipped["nothing"] + 3


def test_restore_refuses_what_forgetting_lets_pass(resumed):
    for r in resumed.where("refused"):
        forgotten, words = r.case["forgotten"], r.case["words"]
        assert r.value == (forgotten != "nothing")
        assert forgotten in words or (
            forgotten in ("nothing", "buffers") and ("running_mean" in words or words == "none")
        )


def train_in_a_new_process(folder, first, last):
    """Train from the checkpoint in `folder`, if there is one, to step `last`, and save; returns the losses."""
    import os

    import torch
    import torch.distributed as dist

    from labs.common.checkpoints import load_latest, save
    from labs.common.checkpoints.training import Training
    from labs.common.data import fashion
    from labs.kit.rank import Rank

    torch.manual_seed(os.getpid())  # what a new process has not from the old one must not matter
    rank = Rank(dist.get_rank(), dist.get_world_size(), 0, 1, torch.device("cpu"), "gloo", ())
    training = Training(fashion.vectors(512, rank.device), 30, 32, 0, rank)
    if first:
        step, state = rank.gather(load_latest(folder) if rank.rank == 0 else None)[0]
        assert step == first
        training.resume(state)
    training.train(last - first)
    state = training.state()
    if rank.rank == 0:
        save(folder, last, state)
    return training.losses


def test_new_processes_go_on_bit_for_bit(tmp_path):
    from labs.common.checkpoints import load_latest
    from labs.common.checkpoints.resume import differences

    whole, parts = str(tmp_path / "whole"), str(tmp_path / "parts")
    expected = run_on_ranks(train_in_a_new_process, 2, whole, 0, 30)
    first, second = (run_on_ranks(train_in_a_new_process, 2, parts, *span) for span in ((0, 19), (19, 30)))
    assert [a + b for a, b in zip(first, second, strict=True)] == expected
    assert not list(differences(load_latest(whole), load_latest(parts)))


# -- files


def test_a_save_has_a_time_and_a_size(files):
    assert files.one("checkpoint_bytes").value > 2**22
    assert 0 < sum(files.one("save_s").samples) < files.seconds


@pytest.mark.drill
def test_kills(files):
    for way in ("in place", "rename", "full"):
        lost, loadable = (files.one(m, way=way).samples for m in ("lost", "loadable"))
        moments = files.one("kill_moment", way=way).samples
        assert len(lost) == len(loadable) == len(moments) == 5 and 0 <= min(moments) <= max(moments) <= 1
        if way != "in place":
            assert not any(lost) and all(loadable)
    assert any(files.one("lost", way="in place").samples)
    assert files.one("leftovers", way="full").case["leftovers_after_next_save"] == 0


@pytest.mark.drill
def test_corruptions(files):
    load = files.where("files", reader="load")
    assert sum(r.value for r in load) == 200 == sum(r.value for r in load if r.case["verdict"] == "noticed")
    assert sum(r.value for r in files.where("files", reader="torch.load", verdict="silent")) > 10
    assert {r.case["damage"] for r in files.where("previous_used")} == set(corruption.KINDS)
    assert all(set(r.samples) == {1.0} for r in files.where("previous_used"))


def test_the_folder_to_try_is_used_and_left_empty(tmp_path):
    run = launch("training_checkpoint", nproc=2, smoke=True, trials=("save_time",), folder=str(tmp_path), rounds=1)
    assert run.where("save_s") and list(tmp_path.iterdir()) == []


@pytest.mark.drill
def test_interrupted_kills_leave_no_writer_and_no_file(tmp_path):
    environment = new_environment(TMPDIR=tempfile.mkdtemp(dir=tmp_path))
    command = [*PYTHON, "-m", "labs.training_checkpoint", "--nproc", "1", "--trials", "kills", "--kills", "9999"]
    command += ["--folder", str(tmp_path)]
    before = set(tmp_path.iterdir())
    with subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.PIPE) as process:
        for _ in range(600):
            if list(tmp_path.glob("*/kills/in place/*.pt")):
                break
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        _, complaint = process.communicate(timeout=250)
    assert process.returncode == 130 and complaint.startswith(b"interrupted")
    assert_no_survivors(environment[MARK])
    assert set(tmp_path.iterdir()) == before, "no checkpoint stays behind"


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux: no one can write to /proc")
def test_a_folder_that_cannot_be_written_to_is_named():
    config = training_checkpoint.Config(smoke=True, trials=("corruptions",), folder="/proc")
    with pytest.raises(BadInput, match=r"cannot write to /proc \(.*\): choose another --folder"):
        list(training_checkpoint.run(config, SimpleNamespace(device=torch.device("cpu"))))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trials": ()}, "trials must"),
        ({"forgotten": ()}, "forgotten must"),
        ({"samples": 0}, "samples must"),
        ({"batch_size": 1}, "batch_size must"),
        ({"interrupted_at": 160}, "interrupted_at must be from 1 to steps - 1"),
        ({"kills": 0}, "kills must"),
        ({"rounds": 0}, "rounds must"),
        ({"corruptions": 0}, "corruptions must"),
        ({"seeds": -1}, "seeds must"),
        ({"kill_bytes": 1}, "kill_bytes must"),
        ({"large_bytes": 1}, "large_bytes must"),
        ({"folder": "/missing"}, "/missing is not a folder"),
        ({"samples": 40}, r"samples must be at least 64"),
        ({"seed": -1}, "seed must be"),
        ({"seed": 2**31}, "seed must be"),
    ],
)
def test_bad_input(values, words):
    with pytest.raises(BadInput, match=words):
        launch("training_checkpoint", nproc=2, **values)
