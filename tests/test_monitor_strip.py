"""What is made of a monitor's trace: the strip under a cell."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from labs.kit.display import alt_text, strip_svg
from labs.kit.monitor import Series, Trace


def example(ranks: int, samples: int = 50, gpus: int = 0, others: float = 4.0) -> Trace:
    t_s = [0.2 * (i + 1) for i in range(samples)]
    wave = [50.0 + 50 * ((i * 7 + 3) % 11 - 5) / 5 for i in range(samples)]
    series = [Series("cpu_percent", "%", wave, {"core": i}) for i in range(ranks)]
    series += [
        Series("resident_bytes", "B", [4e8 + 1e6 * i for i in range(samples)], {"rank": i}) for i in range(ranks)
    ]
    series += [Series("gpu_percent", "%", wave, {"gpu": i}) for i in range(gpus)]
    series += [Series("gpu_memory_bytes", "B", [2.5e10] * samples, {"gpu": i}) for i in range(gpus)]
    series.append(Series("neighbours_percent", "%", [others] * samples, {}))
    return Trace(t_s, series, 0.002, (), others, {i: i for i in range(ranks)})


@pytest.mark.parametrize(("ranks", "samples", "gpus"), [(0, 5, 0), (1, 1, 0), (8, 1000, 8), (64, 1000, 0)])
def test_strip_is_small_valid_and_described(ranks, samples, gpus):
    trace = example(ranks, samples, gpus)
    svg = strip_svg(trace)
    assert len(svg) < 6000
    ET.fromstring(svg)
    lanes = min(8, gpus or ranks) + 1
    assert len(re.findall("<g transform", svg)) == lanes and alt_text(trace).count(";") == lanes - 1
    assert ranks != 1 or "core 0, rank 0 30 %, 400 MB; others 4 % of CPU" in alt_text(trace)
