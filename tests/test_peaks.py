"""The hardware table: sourced, dense, and consistent with the arithmetic of bus width and data rate."""

from __future__ import annotations

import pytest

from labs.common.timing.roofline import Work, count, training_step_work
from labs.kit import hardware
from labs.kit.hardware import DTYPES, peak, spec, specs

ROWS = {s.gpu: s for s in specs()}


def test_every_row_has_a_source_and_sane_units():
    for row in ROWS.values():
        assert row.source and row.url.startswith("https://"), row.gpu
        assert 100 < row.bandwidth_gb_s < 10_000 and 50 <= row.tdp_w <= 1500, row.gpu
        assert row.memory_gb is None or 8 <= row.memory_gb <= 300, row.gpu
        assert row.l2_mib is None or 1 <= row.l2_mib <= 200, row.gpu
        assert all(v is None or 1 < v < 5000 for v in map(row.tflops, DTYPES)), row.gpu


def test_bandwidth_is_bus_width_times_data_rate():
    for row in (s for s in ROWS.values() if s.bus_bits):
        pins_gb_s = row.bus_bits * row.pin_gbit_s / 8  # pins x bits per second and pin, 8 bits per byte
        assert pins_gb_s == pytest.approx(row.bandwidth_gb_s, rel=0.01), row.gpu


def test_tensor_peaks_are_dense():
    """TF32 is half of BF16 on every card with both, and BF16 equals FP16: a sparse figure would break this."""
    for row in ROWS.values():
        if row.tensor_tf32:
            assert row.tensor_tf32 == pytest.approx(row.tensor_bf16 / 2, rel=0.03), row.gpu
        if row.tensor_bf16:
            assert row.tensor_bf16 == row.tensor_fp16, row.gpu


def test_the_articles_errors_are_not_repeated():
    assert ROWS["A100 80GB SXM"].bandwidth_gb_s == 2039 and ROWS["A100 40GB SXM"].bandwidth_gb_s == 1555
    assert peak("NVIDIA A100-SXM4-80GB", "fp16").flop_s == 312e12
    assert ROWS["RTX 4090"].bandwidth_gb_s == 1008 and ROWS["RTX 3090"].bandwidth_gb_s == 936


def test_names_match_in_full_and_the_unknown_is_none():
    assert spec("nvidia h200").gpu == "H200 SXM"
    for name in ("NVIDIA H200 NVL", "NVIDIA A100", "AMD EPYC", ""):
        assert spec(name) is None and peak(name, "bf16") is None
    assert peak("Tesla T4", "bf16") is None and peak("Tesla T4", "fp16").flop_s == 65e12


def test_usable_bytes_are_those_of_nvidia_smi_and_none_for_the_unknown():
    found = {name: hardware.usable_bytes(name) for name in ROWS}
    assert found["RTX 4090"] == 24_564 * 2**20 == hardware.usable_bytes("NVIDIA GeForce RTX 4090")
    assert found["A100 80GB SXM"] == 81_920 * 2**20 and found["H100 SXM"] == 81_559 * 2**20
    assert found["V100 SXM2"] is None and hardware.usable_bytes("NVIDIA H200 NVL") is None


def test_usable_bytes_have_a_source_and_lie_near_what_is_sold():
    """From as much as is sold (L4) to 7.4 % more, where GB were GiB (A100)."""
    for row in (s for s in ROWS.values() if s.usable_mib):
        assert row.usable_source, row.gpu
        if row.memory_gb:
            assert row.usable_mib * 2**20 / (row.memory_gb * 1e9) == pytest.approx(1.04, abs=0.04), row.gpu


def test_names_are_unique():
    names = [n for s in specs() for n in s.names]
    assert len(names) == len(set(names))


def test_training_step_of_the_mlp_has_the_closed_form_flops():
    """6 FLOPs per weight and row, except that nobody needs the gradient of the input: 2 less for the first layer."""
    from labs.common import models

    sizes = [(1024, 512), (512, 256), (256, 10)]
    want = sum(6 * 64 * a * b for a, b in sizes) - 2 * 64 * 1024 * 512
    assert training_step_work(models.build("mlp"), 64).flop == want


def test_bytes_are_inputs_and_outputs_once_and_views_are_free():
    import torch

    a = torch.empty(10, 10, device="meta")
    assert count(lambda: a + a) == Work(0, 2 * 400, 1)  # one tensor read, one written, by one operator
    assert count(lambda: a.t().reshape(-1, 5).view(10, 10) if a.is_contiguous() else a).bytes == 800  # one copy
    assert count(lambda: a.view(5, 20)).bytes == 0
