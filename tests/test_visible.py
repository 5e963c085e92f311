"""Which GPUs CUDA would show, under which index: order, UUIDs, MIG, typos."""

from __future__ import annotations

from fakes import FakeNvml, card

from labs.kit import nvml
from labs.kit.nvml import nvml_index_of, visible

SAME = [card("GPU-aa01"), card("GPU-bb02"), card("GPU-bc03")]
MIXED = [card("GPU-aa01", "Tesla T4"), card("GPU-bb02", "NVIDIA H100 80GB HBM3")]


def seen(cards, **environ):
    """NVML index of each visible device."""
    return [v.nvml_index for v in visible(nvml.report(FakeNvml(cards)), environ)]


def test_cuda_visible_devices_as_cuda_reads_it():
    numbers = {"2,0": [2, 0], "": [], "-1": [], "0,7,1": [0], "0,0": [], "1gpu,2x": [1, 2], " 1 , 0 ": [1, 0]}
    names = {"GPU-bb,GPU-aa": [1, 0], "GPU-b": [], "GPU-bc03": [2], "GPU-zz,GPU-aa": [], "GPU-aa,GPU-aa01": []}
    for wanted, indices in (numbers | names).items():
        assert seen(SAME, CUDA_VISIBLE_DEVICES=wanted) == indices, wanted


def test_without_the_variable_equal_cards_keep_pci_order():
    assert seen(SAME) == [0, 1, 2]


def test_mixed_cards_are_ordered_by_speed_so_their_index_is_not_guessed():
    assert seen(MIXED) == [None, None]
    assert seen(MIXED, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [0, 1]
    assert seen(MIXED, CUDA_VISIBLE_DEVICES="GPU-bb") == [1]


def test_mig_shows_one_instance_by_uuid_or_the_first():
    cards = [card("GPU-aa01", mig=(1, 1), mig_uuids=["MIG-1", "MIG-2"])]
    (only,) = visible(nvml.report(FakeNvml(cards)), {"CUDA_VISIBLE_DEVICES": "MIG-2"})
    assert (only.nvml_index, only.uuid, only.mig) == (0, "MIG-2", True)
    (first,) = visible(nvml.report(FakeNvml(cards)), {})
    assert first.uuid == "MIG-1"
    both = visible(nvml.report(FakeNvml(cards)), {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"})
    assert [v.uuid for v in both] == ["MIG-1"]


def test_mig_mode_without_instances_cannot_be_used():
    assert seen([card("GPU-aa01", mig=(1, 1))]) == []


def test_unknown_when_nvml_cannot_be_read():
    assert visible(nvml.report(FakeNvml(init_error=12)), {}) is None


def test_uuid_mapping_ignores_prefix_case_and_order():
    cards = nvml.gpus(FakeNvml([card("GPU-AA01"), card("GPU-bb02"), card("GPU-cc03")]))
    assert nvml_index_of(["cc03", "aa01", "zz", "GPU-bb02"], cards) == [2, 0, None, 1]
