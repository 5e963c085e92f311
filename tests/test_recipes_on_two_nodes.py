"""The recipes on two namespaces, started by what the Slurm and Kubernetes files run; stopped by SIGTERM, requeued."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

import pytest
import torch
from machines import SRUN, Pod, quoted, slurm
from processes import MARK, wait_for
from test_cluster import BATCH, CLUSTER, as_the_operator_does, machines, manifests, worker  # noqa: F401  (a fixture)

from labs.common.checkpoints.resume import differences

STEPS = 400
OPTIONS = ["--cpu", "--steps", str(STEPS), "--log-every", "5", "--save-every", "50", "--batch-size", "64"]


def batch(machines, tmp_path: Path, name: str) -> dict[str, str]:  # noqa: F811
    """What the batch file finds; scancel sends its signal to the torchruns, scontrol notes a requeue."""
    (folder := tmp_path / name).mkdir()
    nodes = {f"ON_{n}": quoted(machines.on(n), folder / f"on-{n}") for n in (0, 1)}
    srun = SRUN.replace("for _ in 0 1; do", f'echo "${{pids[@]}}" > {folder}/steps\nfor _ in 0 1; do')
    assert srun != SRUN
    environment = slurm(folder, srun, **nodes) | {MARK: machines.environment[MARK]}
    requeue = f"[[ $1 == requeue ]] && echo $2 > {folder}/requeued || printf 'node-0\\nnode-1\\n'"
    commands = {"scancel": f"kill -TERM $(cat {folder}/steps)", "scontrol": requeue}
    for command, text in commands.items():
        (folder / "bin" / command).write_text(f"#!/bin/bash\n{text}\n")
        (folder / "bin" / command).chmod(0o755)
    return environment


def submit(environment, *args: object) -> subprocess.Popen:
    return subprocess.Popen(
        ["bash", BATCH, *map(str, args)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.mark.drill
@pytest.mark.timeout(400)
def test_a_job_that_is_stopped_is_requeued_and_ends_as_if_nobody_had_stopped_it(machines, tmp_path):  # noqa: F811
    whole, stopped = tmp_path / "whole.pt", tmp_path / "stopped.pt"
    job = submit(batch(machines, tmp_path, "whole"), *OPTIONS, "--checkpoint", whole)
    said, _ = job.communicate(timeout=200)
    assert job.returncode == 0, said
    environment = batch(machines, tmp_path, "stopped")
    job = submit(environment, *OPTIONS, "--checkpoint", stopped)
    wait_for(stopped.exists, 100, "a checkpoint")
    job.send_signal(signal.SIGUSR1)  # what Slurm sends 60 s before the time limit
    said, _ = job.communicate(timeout=200)
    assert job.returncode != 0, "nobody must take a half trained model for a finished one"
    assert "stopped by SIGTERM and saved" in said, said
    assert (tmp_path / "stopped" / "requeued").read_text().strip() == environment["SLURM_JOB_ID"]
    assert 0 < torch.load(stopped, weights_only=True)["step"] < STEPS
    job = submit(environment, *OPTIONS, "--checkpoint", stopped)
    said, _ = job.communicate(timeout=200)
    assert job.returncode == 0, said
    states = [torch.load(path, weights_only=True) for path in (whole, stopped)]
    assert list(differences(*states)) == [] and states[0]["step"] == STEPS


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_fully_sharded_training_saves_and_goes_on_under_the_batch_file(machines, tmp_path):  # noqa: F811
    recipe, weights = CLUSTER / "train_fsdp.py", tmp_path / "weights"
    options = ["--cpu", "--steps", "4", "--log-every", "2"]
    for name, more in (("first", ["--save", weights]), ("second", ["--load", weights])):
        job = submit(batch(machines, tmp_path, name), recipe, *options, *more)
        said, _ = job.communicate(timeout=250)
        assert job.returncode == 0, said
        assert "step 4/4" in said and said.count("test loss") == 1, "rank 0 alone reports"
    assert len(list(weights.glob("*.distcp"))) == 2, "each machine has written its part"


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_pods_run_the_recipe_of_the_job(machines, tmp_path):  # noqa: F811
    args, job = worker()[2]["args"], manifests()[1]
    assert args[0] == "labs/recipes/train_ddp_resume.py" and "--checkpoint" in args
    command = [
        machines.environment["PYTHON"],
        "-m",
        "torch.distributed.run",
        str(CLUSTER / "train_ddp_resume.py"),
        "--checkpoint",
        str(tmp_path / "c.pt"),
        "--cpu",
        "--steps",
        "4",
        "--log-every",
        "2",
    ]
    pods = [Pod(machines, n, command, as_the_operator_does(job, machines, n)) for n in (0, 1)]
    try:
        for pod in pods:
            pod.start()
        wait_for(lambda: not any(pod.is_alive() for pod in pods), 150, "the end")
    finally:
        for pod in pods:
            pod.stopped = True
    assert [pod.ended[-1][0] for pod in pods] == [0, 0], pods[0].log.read_text()
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert state["step"] == 4 and len(state["random"]) == 2
