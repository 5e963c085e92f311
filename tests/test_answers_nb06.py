"""What the experiments of notebook 06 answer, and the figures' sentences: chosen by the records, not fixed."""

from __future__ import annotations

import pytest
from test_claims_nb06 import around, make

from labs import tensor_parallel
from labs.chapters.nb06 import figures_split
from labs.common.precision.rounding import METRIC
from labs.kit.record import Record, Records


def perceptrons(ratios: dict[int, float], width=256) -> Records:
    """labs.tensor_parallel: {rows: time of DDP over that of tensor parallel}."""
    found = [
        make("tensor_parallel", METRIC, "1", [1e-7], model="mlp"),
        make("tensor_parallel", "gradient_relative_error", "1", [1e-7], model="mlp", way="by hand", split="even"),
    ]
    for rows, ratio in ratios.items():
        for i, (mode, s) in enumerate({"single": 2.0, "tensor": 1.0, "ddp": ratio, "pipeline": 1.2}.items()):
            case = {"mode": mode, "width": width, "rows": rows}
            found.append(make("tensor_parallel", "step_s", "s", around(s, i), **case))
            if mode != "single":
                size = {"tensor": 4096.0 * rows, "ddp": 4.2e6, "pipeline": 1024.0 * rows}[mode]
                found.append(make("tensor_parallel", "sent_bytes_per_step", "B", [size], kind="modelled", **case))
    return Records(found)


@pytest.mark.parametrize(
    ("ratios", "between", "words"),
    [
        ({32: 1.5, 512: 1.2, 2048: 0.8}, (512, 2048), "In time DDP overtakes between 512 and 2,048 rows"),
        ({32: 1.5, 512: 1.2, 2048: 1.1}, None, "tensor parallel is shown to be faster with all of these rows"),
        ({32: 0.5, 512: 0.6, 2048: 0.8}, None, "DDP is shown to be faster with all of these rows"),
        ({32: 1.5, 512: 1.0, 2048: 1.0}, None, "this run cannot tell"),
        ({32: 0.5, 512: 1.5}, None, "this run cannot tell"),
    ],
)
def test_where_ddp_overtakes_is_told_by_the_intervals(ratios, between, words):
    run = perceptrons(ratios)
    assert tensor_parallel.times_cross_between(run, 256) == between
    assert words in figures_split._crossing(run, 256)
    assert tensor_parallel.bytes_cross_at(run, 256) == pytest.approx(4.2e6 / 4096)
    told = " ".join(tensor_parallel.answer(run))
    assert ("turns round between 512 and 2,048" in told) == bool(between)


def test_a_wrong_gradient_is_told_in_every_answer():
    wrong = [
        Record(**{**vars(r), "samples": (0.5,)}) if r.metric == "gradient_relative_error" else r
        for r in perceptrons({32: 1.0})
    ]
    assert "1 are WRONG" in next(tensor_parallel.answer(Records(wrong)))
