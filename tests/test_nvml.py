"""The inventory read from NVML: complete cards, cards that answer little, and no NVML at all."""

from __future__ import annotations

import sys

import pytest
from fakes import LIBRARY_NOT_FOUND, MISMATCH, FakeNvml, card

from labs.kit import nvml

OPTIONAL = [
    n
    for n in dir(FakeNvml)
    if n.startswith("nvmlDeviceGet")
    and n not in ("nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByUUID")
]


def test_reads_a_card_and_closes_the_session():
    fake = FakeNvml([card(processes=[(42, 3 * 2**30), (43, None)])])
    found = nvml.report(fake)
    (gpu,) = found.gpus
    assert (found.driver, found.cuda_driver, found.problem) == ("580.1", (13, 0), None)
    assert (gpu.name, gpu.compute_capability, gpu.memory_total_bytes) == ("NVIDIA H100 80GB HBM3", (9, 0), 80 * 2**30)
    assert (gpu.power_w, gpu.power_limit_w) == (70.5, 700.0)
    assert gpu.sm_clock_mhz == 345
    assert gpu.processes == (nvml.Process(42, 3 * 2**30), nvml.Process(43, None))
    assert gpu.throttle == () and gpu.mig is False
    assert fake.open == 0


@pytest.mark.parametrize("how", ["unsupported", "missing"])
def test_one_unanswered_query_costs_one_field_not_the_card(how):
    complete = vars(nvml.report(FakeNvml([card("GPU-01"), card("GPU-02")])).gpus[0])
    for function in OPTIONAL:
        found = nvml.report(FakeNvml([card("GPU-01"), card("GPU-02")], **{how: (function,)}))
        assert len(found.gpus) == 2 and found.problem is None, function
        lost = [k for k, v in vars(found.gpus[0]).items() if v != complete[k]]
        assert len(lost) <= 2, function  # memory total and used come from one query
        assert all(vars(found.gpus[0])[k] in (None, ()) or k == "sm_clock_mhz" for k in lost), function


def test_a_card_that_answers_nothing_is_all_none():
    (gpu,) = nvml.gpus(FakeNvml([card()], unsupported=OPTIONAL))
    assert {k for k, v in vars(gpu).items() if v not in (None, ())} == {"index"}


def test_no_nvml_is_a_problem_with_a_remedy():
    for code, words in (
        (LIBRARY_NOT_FOUND, "no NVIDIA driver"),
        (MISMATCH, "different versions"),
        (999, "NVML failed"),
    ):
        found = nvml.report(FakeNvml([card()], init_error=code))
        assert found.gpus == () and words in found.problem and found.remedy


def test_missing_python_package_is_a_problem(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py" in nvml.report().problem


def test_a_lost_card_does_not_hide_the_others():
    found = nvml.report(FakeNvml([card("GPU-01", lost=True), card("GPU-02")]))
    assert [(g.index, g.uuid) for g in found.gpus] == [(1, "GPU-02")]


def test_throttle_reasons_by_name_and_idle_is_none():
    (gpu,) = nvml.gpus(FakeNvml([card(throttle=0x1 | 0x4 | 0x40)]))
    assert gpu.throttle == ("power cap", "hardware thermal slowdown")


def test_mig_instances():
    (gpu,) = nvml.gpus(FakeNvml([card(mig=(1, 1), mig_uuids=["MIG-a", "MIG-b"])]))
    assert gpu.mig and gpu.mig_uuids == ("MIG-a", "MIG-b")


def test_memory_of_a_mig_instance_is_its_own_not_the_cards():
    found = nvml.report(FakeNvml([card(mig=(1, 1), mig_uuids=["MIG-a", "MIG-b"], mig_gib=20)]))
    assert found.gpus[0].mig_memory_bytes == (20 * 2**30,) * 2 and found.gpus[0].memory_total_bytes == 80 * 2**30
    (seen,) = nvml.visible(found, {"CUDA_VISIBLE_DEVICES": "MIG-b"})
    assert seen.memory_total_bytes == 20 * 2**30 and seen.uuid == "MIG-b"
    (seen,) = nvml.visible(nvml.report(FakeNvml([card()])), {})
    assert seen.memory_total_bytes == 80 * 2**30


def test_exclusive_process_mode_is_told():
    cards = nvml.report(FakeNvml([card("GPU-01"), card("GPU-02", mode=3), card("GPU-03", mode=9)]), brief=True)
    assert [g.compute_mode for g in cards.gpus] == ["default", "exclusive process", None]
    assert [v.exclusive for v in nvml.visible(cards, {})] == [False, True, False]


def eight() -> FakeNvml:
    return FakeNvml([card(f"GPU-0{i}") for i in range(8)])


def test_eight_gpus_cost_some_hundred_queries_and_a_launch_some_dozen():
    """A query takes from microseconds to a millisecond, by driver."""
    whole, brief = eight(), eight()
    assert len(nvml.report(whole).gpus) == 8 and whole.calls < 200
    assert len(nvml.report(brief, brief=True).gpus) == 8 and brief.calls < 60
    full, short = (nvml.visible(nvml.report(eight(), brief=b), {}) for b in (False, True))
    assert [(v.cuda_index, v.uuid, v.name) for v in full] == [(v.cuda_index, v.uuid, v.name) for v in short]
