"""What the probe's preflight says of made-up machines: each trouble with its weight, wrong answers, the exit code."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from fakes import FakeNvml, card

from labs import hardware_probe
from labs.kit import nvml, preflight
from labs.kit.host import Container
from labs.kit.preflight import GIB, Check, Facts
from labs.kit.record import Record, Records

BUILD = {
    "torch": "2.13.0+cu130",
    "cuda": "13.0",
    "rocm": None,
    "cudnn": 1,
    "nccl": "2.28.9",
    "gloo": True,
    "arch_list": ["sm_80", "sm_90"],
}
CPU_BUILD = BUILD | {"torch": "2.13.0+cpu", "cuda": None, "nccl": None, "arch_list": []}
ROOMY = Container(8, tuple(range(8)), None, None, 32 * GIB, 8 * GIB, 8 * GIB, 65536, 100 * GIB)


def facts(fake=None, build=BUILD, container=None, environ=None, **changes) -> Facts:
    """A healthy machine, changed."""
    found = nvml.report(fake or FakeNvml([card()]))
    room = dataclasses.replace(ROOMY, **(container or {}))
    return Facts(found, nvml.visible(found, environ or {}), room, build, (3, 12), "2.13.0", **changes)


def trouble(made: Facts) -> dict[str, str]:
    """{words of the detail: status} of everything that did not pass; each has a remedy."""
    found = [c for c in preflight.machine_checks(made) if c.status != "pass"]
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
        ({"container": {"cores": 1}}, "warn", "share one core"),
        ({"container": {"open_files": 256}}, "warn", "at most 256"),
        ({"container": {"disk_free_bytes": 1000}}, "fail", "disk"),
        ({"build": BUILD | {"torch": "2.11.0+cu130"}}, "warn", "tested with 2.13.0"),
        ({"build": BUILD | {"cuda": "14.0"}}, "fail", "driver for CUDA 13.0"),
        ({"build": BUILD | {"arch_list": ["sm_80"]}}, "fail", "no kernels for sm_90"),
        ({"build": CPU_BUILD}, "warn", "CPU build"),
        ({"build": CPU_BUILD, "require_gpus": 1}, "fail", "1 required"),
        ({"jupyter": False}, "fail", "JupyterLab"),
        ({"environ": {"CUDA_VISIBLE_DEVICES": ""}}, "warn", "none visible"),
        ({"port_problem": "Permission denied"}, "fail", "Permission denied"),
        ({"fake": FakeNvml([card(mode=3)])}, "warn", "compute mode is exclusive process"),
        (
            {"fake": FakeNvml([card(processes=[(77, 2 * GIB)])]), "known_pids": frozenset({1, 77})},
            "warn",
            "also used by",
        ),
        (
            {"fake": FakeNvml([card(processes=[(90001, 2 * GIB)])]), "known_pids": frozenset({1, 77})},
            "warn",
            "2.0 GiB used by host processes (90001)",
        ),
        ({"fake": FakeNvml([card(mig=(1, 1), mig_uuids=["MIG-1"])])}, "warn", "MIG mode"),
    ],
)
def test_each_trouble_is_named_with_its_weight(changes, status, words):
    found, detail = one(facts(**changes))
    assert found == status and words in detail


def test_own_processes_are_not_strangers():
    assert trouble(facts(FakeNvml([card(processes=[(77, 1)])]), my_pids=frozenset({77}))) == {}


def test_no_gpu_is_no_failure_unless_required():
    broken = FakeNvml(init_error=12)
    assert trouble(facts(broken, CPU_BUILD)) == {}
    assert one(facts(broken, CPU_BUILD, require_gpus=1))[0] == "fail"


def test_a_card_that_answers_nothing_still_gets_a_report():
    silent = [n for n in dir(FakeNvml) if n.startswith("nvmlDeviceGet") and "Count" not in n and "Handle" not in n]
    assert trouble(facts(FakeNvml([card()], unsupported=silent))) == {}


def rank_record(metric, value, backend="gloo", device="cpu"):
    layout = {"world_size": 2, "rank": 0, "backend": backend, "device": device}
    return Record("hardware_probe", metric, "", (value,), layout=layout)


NAN_ERROR = hardware_probe.relative_error(torch.tensor([math.nan, 1.0]), torch.ones(2))


@pytest.mark.parametrize(
    "product, reduced, failed",
    [(1e-7, 0, set()), (0.5, 0, {"matrix product"}), (NAN_ERROR, 0, {"matrix product"}), (1e-7, 3, {"all-reduce"})],
)
def test_a_wrong_answer_fails(product, reduced, failed):
    records = Records([rank_record("matmul_relative_error", product), rank_record("all_reduce_error", reduced)])
    found = preflight.rank_checks(records, 1.0, facts())
    assert {c.name for c in found if c.status == "fail"} == failed


def test_exit_code_and_text():
    ok, warn, fail = Check("a", "pass", "fine"), Check("b", "warn", "hm", "do x"), Check("c", "fail", "no", "do y")
    assert [preflight.exit_code(c) for c in ([ok], [ok, warn], [ok, fail, warn])] == [0, 0, 1]
    assert preflight.as_text([ok, warn]).endswith("READY: 1 ok, 1 warning, 0 failed")
    assert "NOT READY" in preflight.as_text([fail]) and "-> do y" in preflight.as_text([fail])
