"""The launch files for clusters, without one: two network namespaces are two machines, joined by a virtual cable."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from machines import TOOLS, Machines, Pod, quoted, slurm
from processes import HERE, MARK, PYTHON, assert_no_survivors, wait_for
from test_elastic_restart import trained

from labs.common.checkpoints import load_latest
from labs.common.checkpoints.resume import differences
from labs.common.elastic import journal
from labs.common.elastic.journal import History
from labs.kit.launch import run_on_ranks
from labs.kit.record import load

CLUSTER = HERE.parent / "labs" / "recipes"
BATCH, JOB = CLUSTER / "ddp.sbatch", CLUSTER / "ddp.yaml"
EPOCHS, STEPS = 15, 60  # of 256 images, 32 per rank and step, as `trained` has them


@pytest.fixture
def machines(tmp_path):
    if os.geteuid() != 0 or not all(map(shutil.which, TOOLS)):
        pytest.skip("needs root, and ip, unshare, taskset and hostname, to make two machines out of this one")
    try:
        found = Machines(tmp_path).__enter__()
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"no network namespaces here: {getattr(e, 'stderr', '') or e}")
    try:
        yield found
        assert_no_survivors(found.environment[MARK])
        assert found.pids(0) == found.pids(1) == set()
    finally:
        found.__exit__()


# Slurm


@pytest.mark.drill
@pytest.mark.timeout(240)  # 8 s on a quiet machine; none of this may fail because others compute on it, too
def test_the_batch_file_trains_on_two_machines(machines, tmp_path):
    nodes = {f"ON_{n}": quoted(machines.on(n), tmp_path / f"on-{n}") for n in (0, 1)}
    environment = slurm(tmp_path, **nodes) | {MARK: machines.environment[MARK]}
    before = [machines.sent(n) for n in (0, 1)]
    lab = [
        "labs.data_parallel",
        "--smoke",
        "--model",
        "mlp",
        "--batch-size",
        "4",
        "--out",
        tmp_path / "it.jsonl",
    ]
    job = subprocess.run(["bash", BATCH, *lab], env=environment, capture_output=True, text=True, timeout=250)
    assert job.returncode == 0, job.stderr
    records = load(tmp_path / "it.jsonl")
    assert {r.layout["world_size"] for r in records} == {2}
    # At least 6 timed DDP steps and 6 all-reduces, of two ranks that send all gradients in each.
    least = 12 * records.one("gradient_bytes").value
    for n in (0, 1):
        assert machines.sent(n) - before[n] > least


@pytest.mark.drill
@pytest.mark.timeout(240)
def test_the_batch_file_starts_the_recipe_on_two_machines(machines, tmp_path):
    nodes = {f"ON_{n}": quoted(machines.on(n), tmp_path / f"on-{n}") for n in (0, 1)}
    environment = slurm(tmp_path, **nodes) | {MARK: machines.environment[MARK]}
    options = ["--cpu", "--steps", "4", "--log-every", "1", "--checkpoint", tmp_path / "c.pt"]
    job = subprocess.run(["bash", BATCH, *options], env=environment, capture_output=True, text=True, timeout=250)
    assert job.returncode == 0, job.stderr
    assert "step 4/4" in job.stdout and job.stdout.count("test loss") == 1, "rank 0 alone reports"
    state = torch.load(tmp_path / "c.pt", weights_only=True)
    assert state["step"] == 4 and len(state["random"]) == 2


@pytest.mark.drill
@pytest.mark.parametrize(
    ("codes", "starts", "ends"),
    [
        ([0], 1, 0),
        ([1], 1, 1),
        ([137, 0], 2, 0),
        ([137, 1], 2, 1),
        ([139, 143, 137, 0], 3, 137),
    ],
)
def test_a_killed_step_is_started_again_and_a_failed_one_is_not(tmp_path, codes, starts, ends):
    (tmp_path / "codes").write_text("\n".join(map(str, codes)) + "\n")
    (calls := tmp_path / "calls").touch()
    srun = f'#!/bin/bash\necho start >> {calls}\nexit $(sed -n "$(wc -l < {calls})p" {tmp_path}/codes)\n'
    job = subprocess.run(["bash", BATCH, "labs.x"], env=slurm(tmp_path, srun), capture_output=True, text=True)
    assert job.returncode == ends, job.stderr
    assert calls.read_text().count("start") == starts


@pytest.mark.parametrize(
    ("program", "again"),
    [
        ([], True),
        (["labs.x"], False),
        (["own.py", "--checkpoint=c.pt"], True),
        (["own.py", "--save", "c.pt"], False),
        (["copies/my_train_ddp_resume.py"], True),
        (["labs.elastic_train"], True),
    ],
)
def test_when_time_is_up_the_step_ends_and_what_can_go_on_is_requeued(tmp_path, program, again):
    srun = f"#!/bin/bash\necho $$ >> {tmp_path}/steps\nexec sleep 60\n"
    environment = slurm(tmp_path, srun)
    (scancel := tmp_path / "bin" / "scancel").write_text(f"#!/bin/bash\nkill -TERM $(cat {tmp_path}/steps)\n")
    scancel.chmod(0o755)
    requeue = f"[[ $1 == requeue ]] && echo $2 > {tmp_path}/requeued || printf 'node-0\\nnode-1\\n'"
    (tmp_path / "bin" / "scontrol").write_text(f"#!/bin/bash\n{requeue}\n")
    job = subprocess.Popen(["bash", BATCH, *program], env=environment)
    try:
        wait_for(lambda: (tmp_path / "steps").exists() and (tmp_path / "steps").read_text().strip(), 20, "a step")
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=20) == 128 + signal.SIGTERM
        assert len((tmp_path / "steps").read_text().split()) == 1
        assert (tmp_path / "requeued").exists() == bool(again)
    finally:
        job.kill()
    assert_no_survivors(environment[MARK])


def torchrun_options(tmp_path: Path, *args: str, **more: str) -> dict[str, str]:
    """The command line of torchrun on the second node."""
    show = '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nSLURM_NODEID=1 SLURMD_NODENAME=node-1 exec "$@"\n'
    environment = slurm(tmp_path, show, PYTHON="/bin/echo", **more)
    line = subprocess.check_output(["bash", BATCH, *args], env=environment, text=True).strip()
    found = dict(re.findall(r"--([\w-]+)=(\S+)", line))
    return {**found, "command": line.partition(" --local-addr=node-1 ")[2]}


def test_the_batch_file_fills_in_what_slurm_gave(tmp_path):
    found = torchrun_options(tmp_path, SLURM_GPUS_ON_NODE="8", SLURM_JOB_ID="123456789")
    assert found["nnodes"] == "2" and found["nproc-per-node"] == "8" and found["local-addr"] == "node-1"
    assert found["rdzv-endpoint"] == "node-0:26789" and found["rdzv-id"] == "123456789"
    assert found["rdzv-conf"] == "is_host=0", "the first node hosts the store, and no other"
    assert found["command"].endswith("labs/recipes/train_ddp_resume.py --checkpoint ddp-123456789.pt")


@pytest.mark.parametrize(
    ("args", "command"),
    [
        (["labs.x", "--a", "b c"], "-m labs.x --a b c"),
        (["--lr", "0.1"], "ddp-4711.pt --lr 0.1"),
        (["own.py", "--a"], "own.py --a"),
        (["x/train_ddp_resume.py", "--a"], "x/train_ddp_resume.py --checkpoint ddp-4711.pt --a"),
        (["x/train_ddp_resume.py", "--checkpoint=c.pt"], "x/train_ddp_resume.py --checkpoint=c.pt"),
    ],
)
def test_the_batch_file_takes_another_lab_or_options(tmp_path, args, command):
    assert torchrun_options(tmp_path, *args)["command"].endswith(command)


@pytest.mark.parametrize(
    ("gpus", "args", "code"),
    [
        ("2", ["own.py"], 2),
        ("2", ["own.py", "--cpu"], 0),
        ("2", ["labs.x", "--device", "cpu", "--a"], 0),
        ("0", [], 0),
    ],
)
def test_gpus_that_torch_does_not_see_end_the_job_at_once(tmp_path, gpus, args, code):
    if torch.cuda.is_available():
        pytest.skip("here torch sees GPUs")
    environment = slurm(tmp_path, f"#!/bin/bash\ntouch {tmp_path}/started\n", SLURM_GPUS_ON_NODE=gpus)
    job = subprocess.run(["bash", BATCH, *args], env=environment, capture_output=True, text=True)
    assert job.returncode == code, job.stderr
    assert (tmp_path / "started").exists() == (code == 0)
    assert ("GPUs that torch does not see" in job.stderr) == (code == 2)


KNOWN = {
    "job-name",
    "nodes",
    "ntasks-per-node",
    "gpus-per-node",
    "cpus-per-task",
    "time",
    "signal",
    "requeue",
    "open-mode",
    "output",
}


def test_options_of_the_batch_file():
    text = BATCH.read_text()
    head = text.partition("\nset -")[0]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(\S*)", head, re.MULTILINE))
    assert options.keys() == KNOWN and text.count("#SBATCH") == len(options), "Slurm reads none after the first command"
    assert all(line.startswith("#") for line in head.splitlines())
    assert options["ntasks-per-node"] == "1" and options["signal"].startswith("B:USR1@")
    assert subprocess.run(["bash", "-n", BATCH]).returncode == 0


# Kubernetes


def as_the_operator_does(job: dict, machines: Machines, n: int) -> dict[str, str]:
    """Environment of worker `n`, as setPodEnv of the operator's pkg/controller.v1/pytorch/envvar.go makes it."""
    spec, policy = job["spec"], job["spec"]["elasticPolicy"]
    port = worker()[2]["ports"][0]["containerPort"]
    own = {e["name"]: e.get("value", machines.address(n)) for e in worker()[2]["env"]}
    return {
        **own,
        "PET_RDZV_ENDPOINT": f"node-0:{port}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ID": policy["rdzvId"],
        "PET_NNODES": f"{policy['minReplicas']}:{policy['maxReplicas']}",
        "PET_MAX_RESTARTS": str(policy["maxRestarts"]),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"],
        "PET_LOG_DIR": str(machines.folder / "logs"),
        # A machine that is silent for 15 s counts as dead by default. A test cannot wait that long.
        "PET_RDZV_CONF": ",".join(
            [
                *(f"{c['key']}={c['value']}" for c in policy["rdzvConf"]),
                "keep_alive_interval=1",
                "keep_alive_max_attempt=3",
            ]
        ),
    }


@pytest.mark.drill
@pytest.mark.timeout(300)
def test_pods_that_are_killed_come_back(machines, tmp_path):
    folder, job = tmp_path / "training", manifests()[1]
    command = [
        *PYTHON,
        "-m",
        "torch.distributed.run",
        "-m",
        "labs.elastic_train",
        "--folder",
        str(folder),
        "--samples",
        "256",
        "--save-every",
        "3",
        "--epochs",
        str(EPOCHS),
    ]
    assert worker()[2]["command"] == ["torchrun"]
    pods = [Pod(machines, n, command, as_the_operator_does(job, machines, n)) for n in (0, 1)]
    try:
        for pod in pods:
            pod.start()
        wait_for_steps(folder, starts=1)
        machines.kill(1)
        history = wait_for_steps(folder, starts=2)
        assert pods[0].ended == [], "the torchrun that was left has waited for the other"
        places = [{p for p in history.pids if p in machines.pids(n)} for n in (0, 1)]
        assert [len(place) for place in places] == [1, 1], "one rank on each machine"
        machines.kill(0)  # where the rendezvous is: the other torchrun loses it, and fails
        wait_for(lambda: not any(pod.is_alive() for pod in pods), 60, "the end")
    finally:
        for pod in pods:
            pod.stopped = True
    assert [[code for code, _ in pod.ended] for pod in pods] == [[-9, 0], [-9, 1, 0]]
    whole = [losses for losses, _ in run_on_ranks(trained, 2, str(tmp_path / "whole"), {"epochs": EPOCHS})]
    history = History(journal.read(folder))
    assert len(whole[0]) == STEPS and [history.losses(rank) for rank in (0, 1)] == whole
    assert not list(differences(load_latest(folder), load_latest(tmp_path / "whole")))


def wait_for_steps(folder: Path, starts: int) -> History:
    """Until both ranks of the latest start have done 6 steps."""

    def found() -> History | None:
        history = History(journal.read(folder)) if folder.exists() else History([])
        done = {pid for pid in history.pids if len(history.of("step", pid=pid)) >= 6} if history.events else set()
        return history if len(done) >= 2 * starts else None

    return wait_for(found, 60, f"steps of start {starts}")


def manifests() -> tuple[dict, dict]:
    """The claim and the job of the file."""
    claim, job = yaml.safe_load_all(JOB.read_text())
    return claim, job


def worker() -> tuple[dict, dict, dict]:
    """The replica's specification, its pod's and its container's."""
    replica = manifests()[1]["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = replica["template"]["spec"]["containers"]
    return replica, replica["template"]["spec"], container


# Fields and values of kubeflow/training-operator, pkg/apis/kubeflow.org/v1: pytorch_types.go and common_types.go.
SPEC = {"runPolicy", "elasticPolicy", "pytorchReplicaSpecs", "nprocPerNode"}
ELASTIC = {
    "minReplicas": int,
    "maxReplicas": int,
    "rdzvBackend": str,
    "rdzvPort": int,
    "rdzvHost": str,
    "rdzvId": str,
    "rdzvConf": list,
    "standalone": bool,
    "nProcPerNode": int,
    "maxRestarts": int,
    "metrics": list,
}
RUN = {
    "cleanPodPolicy": str,
    "ttlSecondsAfterFinished": int,
    "activeDeadlineSeconds": int,
    "backoffLimit": int,
    "schedulingPolicy": dict,
    "suspend": bool,
}


def test_the_job_has_the_fields_of_the_api():
    claim, job = manifests()
    assert (claim["kind"], job["apiVersion"], job["kind"]) == ("PersistentVolumeClaim", "kubeflow.org/v1", "PyTorchJob")
    spec = job["spec"]
    assert spec.keys() <= SPEC and spec["pytorchReplicaSpecs"].keys() == {"Worker"}, "a Master sets RANK for torchrun"
    for part, fields in (("elasticPolicy", ELASTIC), ("runPolicy", RUN)):
        assert all(isinstance(value, fields[name]) for name, value in spec[part].items())
    replica, _, container = worker()
    assert replica.keys() == {"replicas", "restartPolicy", "template"} and container["name"] == "pytorch"
    assert replica["restartPolicy"] in {"Always", "OnFailure"}, "by ExitCode, a lost rendezvous (1) would be final"
    assert [p["name"] for p in container["ports"]] == ["pytorchjob-port"]


def test_the_job_keeps_its_promises():
    (claim, job), (replica, pod, container) = manifests(), worker()
    policy = job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] == policy["maxReplicas"] == replica["replicas"]
    assert job["spec"]["nprocPerNode"] == str(container["resources"]["limits"]["nvidia.com/gpu"])
    user = re.search(r"^ARG UID=(\d+)", dockerfile(), re.MULTILINE)[1]
    assert pod["securityContext"] == {
        "runAsNonRoot": True,
        "runAsUser": int(user),
        "fsGroup": int(user),
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    given = {e["name"]: e.get("value") for e in container["env"]}
    assert int(given["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    assert given["PET_LOG_DIR"].startswith("runs/"), "a path in the volume"
    mounts = {
        m["mountPath"]: next(v for v in pod["volumes"] if v["name"] == m["name"]) for m in container["volumeMounts"]
    }
    assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
    workdir = re.search(r"^WORKDIR (\S+)", dockerfile(), re.MULTILINE)[1]
    assert mounts[f"{workdir}/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]


def dockerfile() -> str:
    return (HERE.parent / "Dockerfile").read_text()
