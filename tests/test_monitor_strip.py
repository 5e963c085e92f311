"""What is made of a monitor's trace: the strip under a cell, records, a sentence on neighbours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from labs.kit.display import strip_svg
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


@pytest.mark.parametrize(("ranks", "samples", "gpus"), [(1, 1, 0), (8, 1000, 8), (64, 1000, 0)])
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


def test_records_are_plain_data_with_the_owner_as_case():
    rows = example(2).records("ddp")
    assert {"lab", "metric", "unit", "samples", "kind", "case"} == set(rows[0])
    row = next(r for r in rows if r["metric"] == "resident_bytes" and r["case"] == {"rank": 1})
    assert row["lab"] == "ddp" and row["unit"] == "B" and None not in row["samples"]
