"""Sentences of notebook 00: each is chosen by records, and records made up for it choose the other one."""

from __future__ import annotations

import re

import pytest
import torch

from labs import hardware_probe
from labs.chapters.nb00 import figures, figures_limits
from labs.common.timing import limits, probing
from labs.common.timing.roofline import training_step_work
from labs.kit import host
from labs.kit.check import predict
from labs.kit.monitor import Trace
from labs.kit.record import Record, Records

NARROW, WIDE = (0.99, 1.0, 1.01, 0.995, 1.005, 1.0, 0.998), (0.4, 1.0, 1.9, 0.5, 1.6, 1.0, 0.7)


def made(metric, value, unit="", spread=NARROW, device="cpu", kind="measured", **case):
    layout = {"world_size": 2, "rank": 0, "backend": "gloo", "device": device}
    return Record("hardware_probe", metric, unit, tuple(value * s for s in spread), kind, case, {}, layout)


@pytest.fixture(autouse=True)
def said(monkeypatch):
    """What the cell says; the figures are drawn, and their alternative texts are said, too."""
    texts: list[str] = []
    for module in (figures, figures_limits):
        monkeypatch.setattr(module, "say", texts.append)
        monkeypatch.setattr(module, "show", lambda fig, alt: texts.append(alt))
    return texts


def rates(fp32=(1e11, 2e11), bf16=(4e11, 3e11), fp16=(7e9, None)):
    """Best product and convolution of each format."""
    found = []
    for dtype, (product, convolution) in (("fp32", fp32), ("bf16", bf16), ("fp16", fp16)):
        found += [made("matmul_flop_s", product * k, "FLOP/s", dtype=dtype, side=n) for n, k in ((128, 0.5), (512, 1))]
        if convolution:
            found.append(made("convolution_flop_s", convolution, "FLOP/s", dtype=dtype))
    return Records(found)


def test_one_peak_per_format_is_the_faster_kernel(said):
    run = rates()
    best = limits.peaks(run)
    assert {d: r.value for d, r in best.items()} == {"fp32": 2e11, "bf16": 4e11, "fp16": 7e9}
    assert limits.kernel(best["fp32"]) == "a 3x3 convolution" and limits.kernel(best["bf16"]) == "a product, n = 512"
    figures.formats(run, predict(2, "ratio", "x"))
    assert "each with its fastest kernel: 2.00 x" in said[-1] and "too long: FP16 3x3 convolution." in said[-1]
    figures.formats(rates(fp16=(3e11, 3e11)), predict(2, "ratio", "x"))
    assert "too long" not in said[-1] and "FP32 slowest: bits alone do not" in said[-2]  # BF16 beats FP16
    figures.formats(rates(bf16=(4e11, 4e11), fp16=(4e11, 4e11)), predict(2, "ratio", "x"))
    assert "FP32 is slowest here. FP32" in said[-2]  # fewer bits, faster
    assert figures_limits.roof(Records([*run, made("memory_b_s", 4e10, "B/s", op="copy")])) == (2e11, 4e10)


def ceilings(arithmetic, memory, spread=NARROW):
    return Records(
        made("ceiling_speedup", v, "x", spread, job=j, ranks=2) for j, v in (("matmul", arithmetic), ("triad", memory))
    )


def copies(pinned, pageable):
    found = []
    for way in ("to device", "to host"):
        for memory, rate in (("pinned", pinned), ("pageable", pageable)):
            found.append(made("host_device_b_s", rate, "B/s", device="cuda", direction=way, memory=memory))
    return Records(found)


def all_reduces(latency, rate, spread=NARROW):
    sizes = [1024 * 8**k for k in range(6)]
    return Records(
        record
        for size in sizes
        for record in (
            made("all_reduce_s", latency + size / rate, "s", spread, bytes=size, ranks=2),
            made("busbw_b_s", size / (latency + size / rate), "B/s", spread, bytes=size, ranks=2),
        )
    )


def test_a_link_is_told_with_its_interval(said):
    figures.all_reduce(all_reduces(1e-4, 1e9), predict(90, "half", "KiB"))
    assert "Half of the bandwidth is reached at about" in said[0]
    value, low, high = (
        float(x) for x in re.search(r"reached at ([\d.]+) KiB \[([\d.]+), ([\d.]+)\]", said[1]).groups()
    )
    assert low <= 1e-4 * 1e9 / 1024 <= high and low <= value <= high


def passes(operator=5e-6, mlp=2e-3, small=2e-4, memory=4e10):
    found = [
        made("convolution_flop_s", 2e11, "FLOP/s", dtype="fp32"),
        made("memory_b_s", memory, "B/s", op="triad"),
        made("operator_s", operator, "s", of="pass"),
        made("operator_s", 1e-6, "s", of="add_"),
    ]
    for rows, flop, size, seconds in ((64, 1.9e8, 8.6e6, mlp), (1, 2.9e6, 5.8e6, small)):
        case = {"model": "mlp", "batch_size": rows}
        found += [made("model_flop_s", flop / seconds, "FLOP/s", **case)]
        found += [
            made(f"model_{what}", value, kind="modelled", spread=(1,), **case)
            for what, value in (("flop", flop), ("bytes", size), ("operators", 20))
        ]
    return Records(found)


@pytest.mark.parametrize(
    ("change", "title", "words"),
    [
        ({"operator": 5e-6}, "memory and overhead are near", "arithmetic stands out"),
        ({"operator": 5e-5}, "but the calls themselves", "arithmetic and overhead are near one another"),
        ({"operator": 1e-7}, "the limit is memory", "arithmetic stands out"),
        ({"memory": 1e8}, "the limit is memory", "memory stands out"),
    ],
)
def test_which_of_three_limits_is_named(change, title, words, said):
    figures_limits.three_limits(passes(**change))
    assert title in said[0] and words in said[1].splitlines()[0]


def test_the_roofline_reports_shares_of_the_one_peak(said):
    figures_limits.roofline(passes(), predict(50, "rate", "GFLOP/s"))
    assert "The roof bends at 5.0 FLOP per byte (200 GFLOP/s, 40 GB/s)" in said[-1]
    assert "mlp, 64 rows 48%" in said[-1]  # 1.9e8 / 2e-3 of 2e11, and 47.5 is rounded up


def test_operators_are_those_that_a_profiler_sees():
    """An independent count: operators of the profiler's own list that compute, forward and backward."""
    workload = probing.tiny_mlp()
    step = probing.training_step(workload, 4, torch.device("cpu"))
    step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        step()
    names = (
        "aten::addmm",
        "aten::mm",
        "aten::relu",
        "aten::threshold_backward",
        "aten::sum",
        "aten::_log_softmax",
        "aten::nll_loss_forward",
        "aten::nll_loss_backward",
        "aten::_log_softmax_backward_data",
        "aten::ones_like",
    )
    seen = sum(e.count for e in trace.key_averages() if e.key in names)
    counted = training_step_work(probing.tiny_mlp(), 4).operators
    assert abs(counted - seen) <= 3, (counted, seen)  # detach and clones of gradients
    assert counted == training_step_work(hardware_probe.models.build("mlp"), 64).operators


def test_who_else_is_here_and_what_this_machine_is(said, tmp_path):
    for share in (2.0, 60.0, float("nan")):
        figures.who_else(trace=Trace(neighbours_percent=share))
    assert "2 %" in said[0] and "disturbed" not in said[0] and "disturbed" in said[1] and "Nobody can say" in said[2]
    here = host.Container(1, (0, 1), 1.5, 2**31, 2**30, 2**26, 2**26, 1024, None, 2**30)
    table = figures.machine({"cpu": "a processor"}, here)["here"]
    assert (table["ranks that fit"], table["CPU quota (cores)"], table["memory limit (GiB)"]) == (1, "1.5", "2.0")
    assert figures.caches(tmp_path) == "not told by this system"
    for i, (level, kind, size) in enumerate(
        (("1", "Data", "48K"), ("1", "Instruction", "32K"), ("2", "Unified", "1M"))
    ):
        (tmp_path / f"index{i}").mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (tmp_path / f"index{i}" / name).write_text(text + "\n")
    assert figures.caches(tmp_path) == "L1 48K, L2 1M"


def told(run):
    return " ".join(hardware_probe.answer(Records(run)))


@pytest.mark.parametrize(
    ("run", "words", "missing"),
    [
        (ceilings(1.9, 1.4), "less than arithmetic gains", True),
        (ceilings(1.5, 1.9), "more than arithmetic gains", True),
        (ceilings(1.9, 1.8, WIDE), "cannot tell", False),
        (ceilings(2.1, 2.1), "cannot tell", False),
    ],
)
def test_the_ceiling_says_what_its_intervals_say(run, words, missing, said):
    figures.ceiling(run, predict(2, "x", "x"))
    assert words in said[-1] and ("A guess" in said[-1]) == missing == ("not by 2." in said[-1])


def test_copies_on_a_gpu_and_what_a_cpu_shows_in_their_place(said):
    table = figures.copies(copies(2.4e10, 8e9))
    assert "faster than pageable memory to device: 3.00 x" in said[0]
    assert table.loc["pinned", "to host"].startswith("24.0 GB/s [")
    figures.copies(copies(8e9, 8e9))
    assert "not told apart from" in said[-1]
    figures.copies(copies(4e9, 8e9))
    assert "slower than" in said[-1]
    assert figures.copies(Records()) is None
    assert "nothing was measured" in said[-1] and "modelled" in said[-1] and "PCIe 4 x16 (32 GB/s each way)" in said[-1]
