"""What is made of a monitor's trace: the strip under a cell, records, a sentence on neighbours."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET

import pytest

from labs.kit.display import strip_html, strip_svg
from labs.kit.monitor import Series, Trace


def example(ranks: int, samples: int = 50, gpus: int = 0, others: float = 4.0) -> Trace:
    t_s = [0.2 * (i + 1) for i in range(samples)]
    wave = [50.0 + 50 * ((i * 7 + 3) % 11 - 5) / 5 for i in range(samples)]
    series = [Series("cpu_percent", "%", wave, {"core": i, "rank": i}) for i in range(ranks)]
    series += [
        Series("resident_bytes", "B", [4e8 + 1e6 * i for i in range(samples)], {"rank": i}) for i in range(ranks)
    ]
    series += [Series("gpu_percent", "%", wave, {"gpu": i}) for i in range(gpus)]
    series += [Series("gpu_memory_bytes", "B", [2.5e10] * samples, {"gpu": i}) for i in range(gpus)]
    series.append(Series("neighbours_percent", "%", [others] * samples, {}))
    return Trace(t_s, series, 0.002, (), others)


@pytest.mark.parametrize(
    ("ranks", "samples", "gpus"), [(1, 1, 0), (2, 50, 0), (2, 1000, 0), (8, 1000, 8), (64, 1000, 0)]
)
def test_strip_is_small_valid_and_described(ranks, samples, gpus):
    svg = strip_svg(example(ranks, samples, gpus))
    assert len(svg) < 4096
    root = ET.fromstring(svg)
    assert root.get("role") == "img" and root.get("aria-label") == root[0].text
    assert root[0].tag.endswith("title") and "%" in root[0].text
    assert len(re.findall("<g transform", svg)) == min(8, gpus or ranks) + 1


def test_strip_of_nothing_and_of_a_run_without_ranks():
    ET.fromstring(strip_svg(Trace()))
    ET.fromstring(strip_svg(example(0, 5)))


def test_strip_names_lanes_peaks_and_time():
    svg = strip_svg(example(2))
    for text in ("core 0, rank 0", "core 1, rank 1", "449 MB", "others", "mean, peak", ">10 s<"):
        assert text in svg
    assert ">GPU 0<" in strip_svg(example(2, gpus=1)) and "25.0 GB" in strip_svg(example(2, gpus=1))


def test_strip_lanes_have_the_colours_of_their_ranks():
    fills = re.findall(r'fill="(#0072B2|#D55E00|#999)"', strip_svg(example(2)))
    assert fills == ["#0072B2", "#D55E00", "#999"]


def test_a_core_that_got_its_rank_late_is_one_lane():
    early = Series("cpu_percent", "%", [10.0, None], {"core": 0})
    late = Series("cpu_percent", "%", [None, 90.0], {"core": 0, "rank": 0})
    svg = strip_svg(Trace([0.2, 0.4], [early, late]))
    assert svg.count("<g transform") == 1 and "core 0, rank 0" in svg and "50 %" in svg


def test_strip_is_cheap_to_draw():
    trace = example(2, 300)
    strip_svg(trace)
    best = min(_cpu_seconds(trace) for _ in range(20))
    assert best * 2 < 0.01  # two frames per second, CPU seconds: under one percent of a core


def _cpu_seconds(trace: Trace) -> float:
    start = time.thread_time()
    strip_svg(trace)
    return time.thread_time() - start


def test_strip_as_an_image_carries_the_same_text():
    found = re.fullmatch(r'<img alt="([^"]+)" src="data:image/svg\+xml,([^"]+)">', strip_html(example(2)))
    assert "core 0, rank 0" in found[1] and "#" not in found[2]


@pytest.mark.parametrize(("others", "disturbed"), [(4.0, False), (31.0, True), (float("nan"), False)])
def test_disturbance_is_said_in_words(others, disturbed):
    said = example(2, others=others).disturbance()
    assert bool(said) is disturbed and ("31 % of the CPU" in said) is disturbed


def test_records_are_plain_data_with_the_owner_as_case():
    rows = example(2).records("ddp")
    assert {"lab", "metric", "unit", "samples", "kind", "case"} == set(rows[0])
    row = next(r for r in rows if r["metric"] == "resident_bytes" and r["case"] == {"rank": 1})
    assert row["lab"] == "ddp" and row["unit"] == "B" and None not in row["samples"]
