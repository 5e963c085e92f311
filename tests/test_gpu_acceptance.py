"""The acceptance of a GPU, without one: every judge against a healthy and a misbehaving card, and the driver."""

from __future__ import annotations

import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from labs_for_tests import acceptance_steps

from labs.gpu_acceptance import attempts, main, stand_in
from labs.gpu_acceptance import steps as steps_module
from labs.gpu_acceptance.evidence import Evidence, Setting
from labs.gpu_acceptance.steps import STEPS
from labs.kit.launch import run_on_ranks
from labs.kit.record import Record, Records
from labs.kit.supervise import watched_folder

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-m", "labs.gpu_acceptance"]


def rec(metric, value, unit="1", layout=None, **case):
    there = {"world_size": 1, "rank": 0, "backend": "cpu:gloo,cuda:nccl", "device": "cpu"} | (layout or {})
    return Record("lab", metric, unit, (value,), "measured", case, {}, there)


def sums(**layout):
    return [rec("matmul_relative_error", 1e-7, layout=layout), rec("all_reduce_error", 0.0, layout=layout)]


def healthy(name) -> Evidence:
    """What a step finds on a healthy machine: a few records, and the stand-in's."""
    memory = {"part": "small", "model": "mlp", "batch": 32}
    two = {"world_size": 2, "backend": "gloo"}
    runs = {
        "launcher": {"correctness": sums()},
        "probe": {"probe": sums()},
        "copies": {"copies": []},
        "timing": {"timing": []},
        "utilisation": {"utilisation": []},
        "amp": {"amp": []},
        "memory": {
            "memory": [
                *(rec("peak_bytes", n, category=c, **memory) for c, n in (("a", 60), ("b", 40))),
                rec("measured_bytes", 100, **memory),
            ]
        },
        "recompute": {
            "recompute": [
                rec("peak_bytes", 100, part="pareto", policy="none"),
                rec("peak_bytes", 60, part="pareto", policy="block"),
                rec("gradient_difference", 0.0, policy="none"),
                rec("gradient_difference", 0.0, policy="block"),
            ]
        },
        "loader": {"loader": []},
        "nccl": {
            "nccl": [*sums(world_size=2), rec("busbw_b_s", 2e11, layout={"world_size": 2})],
            "ddp": [rec("gradient_relative_error", 1e-15, dtype="float64", sync_batchnorm=False, model="mlp")],
        },
        "pipeline": {"pipeline": [rec("gradient_relative_error", 1e-6, schedule="1f1b")]},
        "shared": {"shared": sums(**two)},
        "faults": {"again": [rec("sum", 256.0**3)]},
        "nvml": {"watched": sums()},
    }[name]
    facts = {
        "launcher": {
            "cuda_initialized": False,
            "libcuda_mapped": False,
            "libcuda_mapped_by_torch": False,
            "holds_gpu": False,
        },
        "nccl": {"gpus": 2},
        "faults": {
            "works_again": True,
            "faults": {
                fault: {"raised": f"x: {words}", "seconds": 2.0, "left": 0, "held_bytes": 0}
                for fault, words in (
                    ("oom", "CUDA out of memory"),
                    ("assert", "device-side assert triggered"),
                    ("sigkill", "rank 0 was killed by SIGKILL"),
                    ("timeout", "the run was stopped"),
                )
            },
        },
    }.get(name, {})
    return stand_in.complete(name, Evidence("cpu", {k: Records(v) for k, v in runs.items()}, facts))


@pytest.mark.parametrize("name", STEPS)
def test_a_healthy_card_passes(name):
    verdict = STEPS[name].judge(healthy(name))
    assert verdict.word == "pass" and verdict.reason, verdict


def changed(metric, factor=None, value=None, drop=False, layout=None, extra=None, **case):
    """A change of evidence: records of `metric` with this case are scaled, set, dropped, or joined by another."""

    def apply(e: Evidence) -> None:
        for key, run in e.runs.items():
            out = []
            for r in run:
                if r.metric == metric and all(r.case.get(k) == v for k, v in case.items()):
                    if drop:
                        continue
                    samples = (value if value is not None else r.value * (factor or 1.0),)
                    there = r.layout | (layout or {})
                    r = Record(r.lab, r.metric, r.unit, samples, r.kind, r.case, r.config, there, r.provenance)
                out.append(r)
            e.runs[key] = Records([*out, *(extra or [])])

    return apply


def fact(**values):
    return lambda e: e.facts.update(values)


def fault(name, **values):
    return lambda e: e.facts["faults"][name].update(values)


def elsewhere(e: Evidence) -> None:
    e.device = "cuda"  # and all records say cpu


MISBEHAVING = [
    ("launcher", fact(cuda_initialized=True), "has initialised CUDA"),
    ("launcher", fact(libcuda_mapped=True), "mapped libcuda.so"),
    ("launcher", fact(holds_gpu=True), "NVML lists the launching process"),
    ("launcher", changed("matmul_relative_error", value=0.5), "relative error of 5e-01"),
    ("launcher", changed("matmul_relative_error", value=1e9), "relative error"),
    ("probe", changed("all_reduce_error", value=1.0), "all-reduce is wrong by 1"),
    ("probe", changed("matmul_share_of_peak", value=1.6, dtype="bf16"), "bf16 runs at 1.60 of the dense peak"),
    ("probe", changed("matmul_share_of_peak", value=0.05, dtype="fp16"), "fp16 reaches 5% of the dense peak"),
    ("probe", changed("memory_b_s", factor=0.2), "0.18 of the datasheet's"),
    ("probe", changed("memory_b_s", factor=2.0), "1.80 of the datasheet's"),
    ("copies", changed("host_device_b_s", value=1e9, direction="to host", memory="pinned"), "slower than pageable"),
    ("copies", changed("host_device_b_s", factor=3), "above the PCIe link's"),
    ("timing", changed("step_s", factor=0.01), "the clock does not wait for the device"),
    ("timing", changed("answer_s", factor=0.1, rung="synchronise"), "0.10 of the one that does not"),
    ("utilisation", changed("busy_share", value=0.1, job="large products"), "look 10% busy"),
    ("utilisation", changed("busy_share", value=0.99, job="waiting for data"), "waits for data 99%"),
    ("utilisation", changed("busy_share", value=1.7, job="large products"), "not between 0 and 1"),
    ("amp", changed("step_s", drop=True, precision="bf16"), "no matrix product was timed in bf16"),
    ("amp", changed("step_s", value=1.0, precision="fp16"), None),  # bf16 still pays
    (
        "amp",
        lambda e: [changed("step_s", value=1.0, precision=p)(e) for p in ("bf16", "fp16")],
        "times as fast as fp32",
    ),
    ("amp", changed("x", extra=[rec("not_possible", 1.0, precision="bf16", why="no kernel")]), "bf16 is not possible"),
    ("memory", changed("measured_bytes", factor=1.5), None),
    (
        "memory",
        lambda e: [changed(m, factor=1.5)(e) for m in ("measured_bytes", "allocated_bytes", "reserved_bytes")],
        "off by -33.3%",
    ),
    ("memory", changed("reserved_bytes", factor=0.1), "reserved 12"),
    ("memory", changed("measured_bytes", drop=True), "no step was really run"),
    ("recompute", changed("peak_bytes", value=110, policy="block"), "10% more memory"),
    ("recompute", changed("gradient_difference", value=1e-7, policy="block"), "gradients differ by 1e-07"),
    ("recompute", changed("gradient_difference", value=0.5), "two runs of one step"),
    (
        "recompute",
        lambda e: [changed("gradient_difference", value=v, policy=p)(e) for p, v in (("none", 1e-7), ("block", 1e-5))],
        "by 1e-07 if not",
    ),
    ("loader", changed("images_per_s", factor=0.1, pin_memory=True), "0.12 times as fast"),
    ("nccl", changed("all_reduce_error", value=2.0), "all-reduce is wrong by 2"),
    ("nccl", fact(gpus=4), "2 ranks for 4 GPUs"),
    ("nccl", changed("gradient_relative_error", value=1e-3), "differs from one process's by 1e-03"),
    ("pipeline", changed("gradient_relative_error", value=0.2), "1f1b has a gradient that differs"),
    ("shared", changed("matmul_relative_error", layout={"backend": "nccl"}), "over nccl, not 2 over gloo"),
    ("faults", fault("oom", raised=""), "oom: the launch ended as if nothing"),
    ("faults", fault("assert", raised="rank 0 failed"), "assert: told as 'rank 0 failed'"),
    ("faults", fault("sigkill", left=2), "sigkill: 2 processes were left behind"),
    ("faults", fault("timeout", held_bytes=5e9), "timeout: the GPU holds 5.0 GB more"),
    ("faults", fact(works_again=False), "does not work any more"),
    ("nvml", fact(full_queries=2000), "asks NVML 2000 times"),
    ("nvml", fact(brief_s=4.0), "takes 4.0 s"),
    ("nvml", fact(monitor_cost=0.2), "20.0% of a core"),
]
ALL_STEPS = [(name, elsewhere, "ranks ran on cpu, not on cuda") for name in STEPS if name != "nvml"]


@pytest.mark.parametrize(("name", "change", "words"), [m for m in [*MISBEHAVING, *ALL_STEPS] if m[2] is not None])
def test_a_card_that_misbehaves_fails_for_that_reason(name, change, words):
    evidence = copy.deepcopy(healthy(name))
    change(evidence)
    if change is elsewhere and name == "faults":
        return  # judged by what was told, wherever that was
    verdict = STEPS[name].judge(evidence)
    assert verdict.word == "fail" and words in verdict.reason, verdict


def test_what_is_made_up_says_so_in_every_record():
    for name in stand_in.ADDED:
        evidence = healthy(name)
        made = [r for run in evidence.runs.values() for r in run if r.lab == "pretend"]
        assert made, name
        assert {r.kind for r in made} == {"modelled"} and {r.provenance["source"] for r in made} == {stand_in.SOURCE}
        assert {r.layout["device"] for r in made} == {"cpu"}


# -- the driver


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_step_that_crashes_hangs_or_raises_is_its_own_failure_and_the_others_go_on(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    steps, before = acceptance_steps.STEPS, set(psutil.pids())
    with watched_folder(sockets=True) as root:
        listed = "labs_for_tests.acceptance_steps:STEPS"
        found = {o.step: o for o in attempts(list(steps), Setting("cpu"), root, steps, listed)}
    assert {name: o.word for name, o in found.items()} == {
        "crashes": "fail",
        "killed": "fail",
        "hangs": "fail",
        "raises": "fail",
        "lacks": "cannot",
        "unjudgeable": "fail",
        "fine": "pass",
    }
    reasons = {name: o.reason for name, o in found.items()}
    assert reasons["crashes"] == "its process ended with exit code 7 without a verdict: last words"
    assert "was killed by SIGKILL" in reasons["killed"] and reasons["hangs"] == "no answer after 6 s: it was stopped"
    assert reasons["raises"] == "ValueError: second line" and reasons["lacks"] == "this needs a second GPU"
    assert "cannot be judged: KeyError" in reasons["unjudgeable"] and reasons["fine"] == "n is 1"
    assert not [p for p in set(psutil.pids()) - before if _is_a_step(p)]


def _is_a_step(pid: int) -> bool:
    try:
        return "labs.gpu_acceptance.process" in psutil.Process(pid).cmdline()
    except psutil.Error:
        return False


def test_when_the_time_is_used_up_the_rest_says_so(tmp_path):
    found = list(attempts(["fine", "lacks"], Setting("cpu"), tmp_path, acceptance_steps.STEPS, budget_s=0.0))
    assert [(o.word, o.reason) for o in found] == [("fail", "no time was left: the steps before took it all")] * 2


def run(*options, **kwargs):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run([*COMMAND, *options], env=environment, capture_output=True, text=True, timeout=250, **kwargs)


def test_without_a_gpu_it_says_so_in_one_line(tmp_path):
    done = run(cwd=tmp_path)
    assert done.returncode == 3 and done.stdout == "" and len(done.stderr.splitlines()) == 1
    assert "no GPU for torch here" in done.stderr and "--pretend" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "coppies"], "did you mean 'copies'?"),
        (["--only", "nvml", "nvml"], "each step once"),
        (["--out", "/proc/1/x"], "cannot write to"),
        (["--lang"], "no option --lang: did you mean '--long'"),
    ],
)
def test_bad_input_is_one_line(options, words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    out, told = capsys.readouterr()
    assert (ended.value.code, out, told.count("\n")) == (2, "", 1) and words in told, told


@pytest.mark.drill
def test_ctrl_c_leaves_nothing(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    command = [*COMMAND, "--pretend", "--only", "utilisation", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    below, until = [], time.monotonic() + 60
    while not any(_is_rank(p) for p in below) and time.monotonic() < until:
        time.sleep(0.1)
        below = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=250)
    assert process.returncode == 130 and "interrupted" in said, said
    _, alive = psutil.wait_procs(below, timeout=10)
    assert alive == []
    assert [p.name for p in tmp_path.iterdir() if not p.name.startswith("torchinductor_")] == []  # that is torch's own


def _is_rank(process: psutil.Process) -> bool:
    try:
        return "forkserver" in " ".join(process.parent().cmdline())
    except (psutil.Error, AttributeError):
        return False


def test_ranks_that_are_left_are_counted():
    """A rank that a launch forgot would be a child of the fork server."""
    assert run_on_ranks(os.getpid, 1) and steps_module._wait_until_alone() == 0
    child = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,), daemon=True)
    child.start()
    try:
        assert steps_module._wait_until_alone(0.2) == 1
    finally:
        child.kill()
        child.join()


# -- what is told and kept
