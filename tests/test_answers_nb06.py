"""What the experiments of notebook 06 answer, and the figures' sentences: chosen by the records, not fixed."""

from __future__ import annotations

import re

import pytest
from test_claims_nb06 import around, hybrid, make, pipeline, split, sums

from labs import broken_split, hybrid_parallel, pipeline_parallel, pipeline_split, point_to_point, tensor_parallel
from labs.chapters.nb06 import figures, figures_split
from labs.kit.measure import Estimate
from labs.kit.record import Record, Records
from labs.parts.precision.rounding import METRIC


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
    floor = [make("hybrid_parallel", METRIC, "1", [1e-7], world=4)]
    assert "up to rounding" in next(hybrid_parallel.answer(Records(hybrid() + floor)))
    assert "schemes are WRONG" in next(hybrid_parallel.answer(Records(hybrid(error=0.3) + floor)))


def test_bytes_that_are_not_those_of_the_forms_are_told():
    floor = [make("hybrid_parallel", METRIC, "1", [1e-7], world=4)]
    right, off = (" ".join(hybrid_parallel.answer(Records(hybrid(sent=s) + floor))) for s in (1.0, 2.0))
    assert "; as the closed forms" in right and "NOT as the closed forms" in off
    right, off = (" ".join(point_to_point.answer(Records(sums(counted=c)))) for c in (True, False))
    assert "; as the closed forms" in right and "NOT what the closed forms" in off


@pytest.mark.parametrize(("root", "word"), [(2.0, "slower"), (0.5, "faster")])
def test_point_to_point_says_slower_faster_or_neither(root, word):
    assert re.search(rf"root [^,]*\({word}\)|root .*?\({word}\)", " ".join(point_to_point.answer(Records(sums(root)))))
    assert "cannot be told" in " ".join(point_to_point.answer(Records(sums(1.0, 1.0, noisy=True))))


def test_the_half_that_never_trains_is_named_by_its_gradients():
    logits = [r for r in split() if r.case["loss"] == "logits"]
    said = list(broken_split.answer(Records(logits)))
    assert "own input, loss of logits: the first half never trains" in said[0] and "both halves train" in said[2]
    assert "both halves train" in next(broken_split.answer(Records(split(first=(2, 2, 2)))))


FLOOR = [make("pipeline_parallel", METRIC, "1", [1e-6], chain="char_gpt")]


def test_the_pipeline_s_answer_names_the_fastest_and_its_share_of_the_ceiling():
    said = " ".join(pipeline_parallel.answer(Records(pipeline() + FLOOR)))
    assert "1f1b with 8 micro-batches is the fastest" in said
    said = " ".join(pipeline_parallel.answer(Records(pipeline(best=1.3) + FLOOR)))
    assert "the rest is not the bubble's" in said
    said = " ".join(pipeline_parallel.answer(Records(pipeline(best=1.75, copies=1.8) + FLOOR)))
    assert "no other cost can be shown" in said
    said = " ".join(pipeline_parallel.answer(Records(pipeline(best=0.5) + FLOOR)))
    assert "naive with 1 micro-batch is the fastest" in said


def cuts(chosen, seconds):
    """labs.pipeline_split: what was chosen, and {cut: seconds}."""
    found = [
        make("pipeline_split", "chosen", "1", [c], kind="modelled", chain="mlp", by=by)
        for by, c in (("cost model", chosen), ("equally many layers", 4))
    ]
    for i, (cut, s) in enumerate(seconds.items()):
        for phase in ("all", "finalists"):
            found.append(make("pipeline_split", "step_s", "s", around(s, i), chain="mlp", cuts=[cut], phase=phase))
        found.append(make("pipeline_split", "step_s", "s", [s], kind="modelled", chain="mlp", cuts=[cut], phase="all"))
    return Records(found)


def test_the_chosen_cut_is_judged_by_what_was_measured():
    assert "the best of those tried" in next(pipeline_split.answer(cuts(2, {2: 1.0, 4: 1.5})))
    assert "1.50 x" in next(pipeline_split.answer(cuts(2, {2: 1.0, 4: 1.5})))
    assert "the time of another cut" in next(pipeline_split.answer(cuts(2, {2: 1.5, 4: 1.0})))


def test_the_figure_of_cuts_claims_no_more_than_its_intervals():
    def ratio(low, high):
        return Estimate((low + high) / 2, low, high, 8, "x")

    assert figures.cut_message([ratio(0.8, 0.9), ratio(0.7, 0.9)]) == "Each chosen cut is the best one"
    assert figures.cut_message([ratio(0.8, 0.9), ratio(0.9, 1.1)]) == "No cut is shown to be better than the chosen one"
    assert "A cut is shown to be better" in figures.cut_message([ratio(1, 1), ratio(1.1, 1.3)])
