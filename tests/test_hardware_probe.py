"""The probe as a lab and as a preflight: bad input, records, checks of made-up machines, exit codes."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
import sys

import pytest
import torch
from fakes import FakeNvml, card

from labs import hardware_probe
from labs.figures import nb00
from labs.kit import checks, gpu_checks, nvml, preflight, visible
from labs.kit.checks import GIB, Check, Facts
from labs.kit.cli import BadInput
from labs.kit.container import Container
from labs.kit.launch import launch
from labs.kit.record import Record, Records, load

BUILD = {"torch": "2.13.0+cu130", "cuda": "13.0", "rocm": None, "cudnn": 1, "nccl": "2.28.9", "gloo": True,
         "arch_list": ["sm_80", "sm_90"]}  # fmt: skip
CPU_BUILD = BUILD | {"torch": "2.13.0+cpu", "cuda": None, "nccl": None, "arch_list": []}
ROOMY = Container(8, tuple(range(8)), None, None, 32 * GIB, 8 * GIB, 8 * GIB, 65536, None, 100 * GIB)


def facts(fake=None, build=BUILD, container=None, environ=None, **changes) -> Facts:
    """A healthy machine, changed."""
    found = nvml.report(fake or FakeNvml([card()]))
    room = dataclasses.replace(ROOMY, **(container or {}))
    return Facts(found, visible.visible(found, environ or {}), room, build, (3, 12), "2.13.0", **changes)


def trouble(made: Facts) -> dict[str, str]:
    """{words of the detail: status} of everything that did not pass; each has a remedy."""
    found = [c for c in gpu_checks.machine_checks(made) if c.status != "pass"]
    assert all(c.remedy for c in found)
    return {f"{c.name}: {c.detail}": c.status for c in found}


def one(made: Facts) -> tuple[str, str]:
    ((detail, status),) = trouble(made).items()
    return status, detail


def test_a_healthy_machine_passes():
    assert trouble(facts()) == {}


@pytest.mark.parametrize(
    "changes, status, words",
    [
        ({"container": {"shm_free_bytes": 64 * 2**20}}, "warn", "bus error"),
        ({"container": {"memory_available_bytes": GIB}}, "fail", "3 GiB are needed"),
        ({"container": {"memory_available_bytes": 2 * GIB}}, "warn", "3 GiB are needed"),
        ({"container": {"cores": 1}}, "warn", "share one core"),
        ({"container": {"open_files": 256}}, "warn", "at most 256"),
        ({"container": {"disk_free_bytes": 1000}}, "fail", "disk"),
        ({"build": BUILD | {"torch": "2.11.0+cu130"}}, "warn", "tested with 2.13.0"),
        ({"build": BUILD | {"cuda": "14.0"}}, "fail", "driver for CUDA 13.0"),
        ({"build": BUILD | {"arch_list": ["sm_80"]}}, "fail", "no kernels for sm_90"),
        ({"build": BUILD | {"arch_list": ["compute_80"]}}, "warn", "PTX"),
        ({"build": CPU_BUILD}, "warn", "CPU build"),
        ({"build": CPU_BUILD, "require_gpus": 1}, "fail", "1 required"),
        ({"require_gpus": 2}, "fail", "2 required"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "warn", "none visible"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": ""}, "require_gpus": 1}, "fail", "none visible"),
        ({"jupyter": False}, "fail", "JupyterLab"),
        ({"port_problem": "Permission denied"}, "fail", "Permission denied"),
        ({"fake": FakeNvml([card(processes=[(77, 2 * GIB)])])}, "warn", "pid 77 2.0 GiB"),
        ({"fake": FakeNvml([card(persistence=0)])}, "warn", "persistence"),
        ({"fake": FakeNvml([card(throttle=0x40)])}, "warn", "hardware thermal slowdown"),
        ({"fake": FakeNvml([card(mig=(1, 1), mig_uuids=["MIG-1"])])}, "warn", "MIG mode"),
    ],
)
def test_each_trouble_is_named_with_its_weight(changes, status, words):
    found, detail = one(facts(**changes))
    assert found == status and words in detail


def test_own_processes_are_not_strangers():
    assert trouble(facts(FakeNvml([card(processes=[(77, 1)])]), my_pids=frozenset({77}))) == {}


@pytest.mark.parametrize("code", [4, 12, 18])
def test_no_gpu_is_no_failure_unless_required(code):
    broken = FakeNvml(init_error=code)
    assert trouble(facts(broken, CPU_BUILD)) == {}
    (sentence,) = [c.detail for c in gpu_checks.machine_checks(facts(broken, CPU_BUILD)) if c.name == "GPUs"]
    assert sentence == "no GPU here: devices are CPU cores, every notebook runs"
    assert one(facts(broken, CPU_BUILD, require_gpus=1))[0] == "fail"


def test_a_card_that_answers_nothing_still_gets_a_report():
    silent = [n for n in dir(FakeNvml) if n.startswith("nvmlDeviceGet") and "Count" not in n and "Handle" not in n]
    assert trouble(facts(FakeNvml([card()], unsupported=silent))) == {}


def rank_record(metric, value, backend="gloo", device="cpu"):
    layout = {"world_size": 2, "rank": 0, "backend": backend, "device": device}
    return Record("hardware_probe", metric, "", (value,), layout=layout)


NAN_ERROR = hardware_probe.relative_error(torch.tensor([math.nan, 1.0]), torch.ones(2))


@pytest.mark.parametrize("product, reduced, failed", [(1e-7, 0, set()), (0.5, 0, {"matrix product"}),
                                                      (NAN_ERROR, 0, {"matrix product"}),
                                                      (1e-7, 3, {"all-reduce"})])  # fmt: skip
def test_a_wrong_answer_fails(product, reduced, failed):
    records = Records([rank_record("matmul_relative_error", product), rank_record("all_reduce_error", reduced)])
    found = gpu_checks.rank_checks(records, 1.0, facts())
    assert {c.name for c in found if c.status == "fail"} == failed


def test_exit_code_and_text():
    ok, warn, fail = Check("a", "pass", "fine"), Check("b", "warn", "hm", "do x"), Check("c", "fail", "no", "do y")
    assert [preflight.exit_code(c) for c in ([ok], [ok, warn], [ok, fail, warn])] == [0, 0, 1]
    assert preflight.as_text([ok, warn]).endswith("READY: 1 ok, 1 warning, 0 failed")
    assert "NOT READY" in preflight.as_text([fail]) and "-> do y" in preflight.as_text([fail])


@pytest.mark.parametrize(
    "values, words",
    [({"dtypes": ("fp12",)}, "fp12"), ({"matmul_sizes": (0,)}, "matmul_sizes"), ({"array_mib": -1}, "array_mib"),
     ({"message_kib": (0.001,)}, "message_kib"), ({"batch_size": 0}, "batch_size"), ({"rounds": 1}, "rounds"),
     ({"budget_s": 0}, "budget_s"), ({"models": ("resnet",)}, "resnet"), ({"parts": ("disk",)}, "disk")],
)  # fmt: skip
def test_bad_input_is_one_line_that_names_the_parameter(values, words):
    with pytest.raises(BadInput, match=words) as e:
        hardware_probe.Config(**values)
    assert "\n" not in str(e.value)


def test_predict_counts_products_and_models():
    work = hardware_probe.predict(hardware_probe.Config(matmul_sizes=(96,), models=("mlp",)))
    assert work["matmul 96"].intensity == pytest.approx(16) and work["mlp"].flop > 1e8


@pytest.fixture(scope="module")
def run():
    return launch("hardware_probe", nproc=2, oversubscribe=True, device="cpu", smoke=True, array_mib=4)


def test_records_cover_every_part(run):
    metrics = {r.metric for r in run}
    assert metrics == {"matmul_relative_error", "all_reduce_error", "matmul_flop_s", "convolution_flop_s",
                       "memory_b_s", "model_flop_s", "model_flop", "model_bytes", "ceiling_rate", "ceiling_speedup",
                       "all_reduce_s", "busbw_b_s"}  # fmt: skip
    assert all(len(r.samples) == 3 for r in run if r.kind == "measured" and "error" not in r.metric)
    assert {r.kind for r in run.where("model_bytes")} == {"modelled"}
    assert len(run.where("matmul_relative_error")) == 2  # every rank answers for its own device


def test_ceiling_speedup_is_the_ratio_of_its_own_rates(run):
    for job in ("matmul", "triad"):
        alone, all_ranks = (run.one("ceiling_rate", job=job, ranks=n).samples for n in (1, 2))
        ratio = [b / a for a, b in zip(alone, all_ranks, strict=True)]
        assert run.one("ceiling_speedup", job=job).samples == pytest.approx(ratio)


def test_busbw_of_two_ranks_is_size_over_time(run):
    for r in run.where("all_reduce_s"):
        busbw = run.one("busbw_b_s", bytes=r.case["bytes"])
        assert busbw.samples == pytest.approx([r.case["bytes"] / s for s in r.samples])


def test_one_rank_has_no_ceiling_and_no_all_reduce():
    alone = launch("hardware_probe", nproc=1, device="cpu", smoke=True, parts=("ceiling", "all_reduce"))
    assert {r.metric for r in alone} == {"matmul_relative_error", "all_reduce_error"}
    nb00.ceiling(alone, 1.0)
    nb00.all_reduce(alone, 1.0)


def shell(*args, **environ):
    return subprocess.run(
        [sys.executable, "-m", "labs.hardware_probe", *args], capture_output=True, text=True, timeout=90,
        env=os.environ | environ,
    )  # fmt: skip


def test_preflight_as_json_saves_records_too(tmp_path):
    done = shell("--smoke", "--json", "--device", "cpu", "--oversubscribe", "--out", str(tmp_path / "p.jsonl"))
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["ready"] and {c["status"] for c in said["checks"]} <= {"pass", "warn"}
    assert said["inventory"]["container"]["cores"] >= 1
    assert {s["metric"] for s in said["speed_limits"]} >= {"memory_b_s", "busbw_b_s"}
    assert len(load(tmp_path / "p.jsonl")) == len(said["speed_limits"])


@pytest.fixture
def command(monkeypatch, capsys):
    """The command in this process, which has loaded torch: (exit code, what it printed, its errors)."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["hardware_probe", *args])
        with pytest.raises(SystemExit) as e:
            preflight.main("hardware_probe", hardware_probe.__doc__, hardware_probe.Config)
        return e.value.code, *capsys.readouterr()

    return run


def test_requiring_more_gpus_than_there_are_fails_with_a_remedy(command):
    code, said, _ = command("--smoke", "--require-gpus", "99", "--device", "cpu", "--nproc", "1", "--parts", "copies")
    assert code == 1
    assert "99 required" in said and "NOT READY" in said


@pytest.mark.parametrize(
    "args, words",
    [
        (("--rounds", "1"), "rounds must be"),
        (("--require-gpus", "-1"), "require_gpus"),
        (("--rouns", "3"), "rounds"),
        (("--nproc", "0"), "nproc must be"),
        (("--nproc", "9999"), "oversubscribe"),
        (("--models", "no_such:factory", "--smoke"), "no_such"),
        (("--out", "."), "--out"),
        (("--report", "x.json"), "--report belongs to --preflight"),
    ],
)
def test_bad_input_in_a_shell_is_one_line_and_exit_code_2(args, words, command):
    code, said, errors = command(*args)
    assert (code, said) == (2, "") and words in errors and len(errors.strip().splitlines()) == 1


def test_recorded_runs_are_labelled_and_their_absence_is_said(tmp_path, capsys, monkeypatch):
    said = []
    monkeypatch.setattr(nb00, "say", said.append)
    nb00.recorded_runs(tmp_path)
    assert "No recorded GPU run" in said[0]
    layout = {"world_size": 1, "rank": 0, "backend": "gloo", "device": "cuda"}
    origin = {"gpus": ["NVIDIA H200"], "utc": "2026-11-01T00:00:00+00:00"}
    r = Record("hardware_probe", "matmul_flop_s", "FLOP/s", (7e14,), case={"dtype": "bf16", "side": 8192},
               layout=layout, provenance=origin)  # fmt: skip
    (tmp_path / "h200").mkdir()
    Records([r]).save(tmp_path / "h200" / "hardware_probe.jsonl")
    nb00.recorded_runs(tmp_path)
    assert "**recorded** on NVIDIA H200, 2026-11-01: BF16 700 TFLOP/s" in said[1]


def test_checks_of_this_machine_start_no_cuda():
    assert checks.gather().container.cores >= 1


def test_two_ranks_share_a_single_core_with_a_warning(monkeypatch):
    from labs.kit import cli, rank

    asked = []

    def place(nproc, device, oversubscribe):
        asked.append(oversubscribe)
        if not oversubscribe:
            raise BadInput("too few")

    monkeypatch.setattr(rank, "place", place)
    assert preflight._enough_or_shared(cli.Launch()).oversubscribe and asked == [False, True]
    with pytest.raises(BadInput):
        preflight._enough_or_shared(cli.Launch(nproc=3))


def test_ranks_that_fail_are_a_failed_check(monkeypatch, capsys):
    from labs.kit import cli
    from labs.kit.failure import RankFailed

    def broken(*_):
        raise RankFailed("Traceback\nRuntimeError: no route\nrank 1 on node-7 failed")

    monkeypatch.setattr(preflight, "_measure", broken)
    found, _, records = preflight.preflight("hardware_probe", {}, cli.Launch())
    assert (found[-1].status, found[-1].detail, len(records)) == ("fail", "rank 1 on node-7 failed", 0)
    assert "no route" in capsys.readouterr().err
