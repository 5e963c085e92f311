"""Exercises of notebook 11: right answers of another style pass, and one wrong answer that no known mistake covers."""

import math
import statistics

import pandas as pd
import pytest

from labs.exercises import nb11
from labs.kit.check import examine


def passes(exercise_id, answer):
    outcome = examine(exercise_id, answer)
    assert outcome.state == "passed", outcome.text


def merges(table, scaling):
    """A merge in place of a dictionary; NaN in place of None; a Series in place of a list."""
    table = table.assign(rate=table.gpus * table.batch_per_gpu / table.step_ms, whole=table.gpus * table.batch_per_gpu)
    batch = "batch_per_gpu" if scaling == "weak" else "whole"
    keys = ["model", "precision", batch]
    both = table.merge(table.loc[table.gpus == 1, [*keys, "rate"]], on=keys, how="left", suffixes=("", "_base"))
    return both.rate / both.rate_base


def loops(table, scaling):
    found = []
    for _, row in table.iterrows():
        batch = row.batch_per_gpu if scaling == "weak" else row.batch_per_gpu * row.gpus
        base = table.query(
            "gpus == 1 and model == @row.model and precision == @row.precision and batch_per_gpu == @batch"
        )
        found.append(row.gpus * row.batch_per_gpu / row.step_ms * base.step_ms.iloc[0] / batch if len(base) else None)
    return tuple(found)


@pytest.mark.parametrize("answer", [merges, loops])
def test_other_ways_to_find_the_baseline_pass(answer):
    passes("11.1", answer)


def test_a_wrong_answer_is_shown_where_it_differs():
    text = examine("11.1", lambda table, scaling: [1.0] * len(table)).text
    assert "weak: ResNet, 8 GPUs, 64 per GPU, BF16: expected 7.25, got 1" in text
    assert "not one speedup per row" in examine("11.1", lambda table, scaling: pd.Series([1.0])).text


def test_right_answers_of_another_form_pass():
    right = nb11.which_way(nb11.reports())
    passes("11.2", lambda reports: {n: [way, x if x is None else round(x, 2)] for n, (way, x) in right.items()})

    def medians(reports):
        """Ratios of medians and of means are within the tolerance."""
        said = dict(right)
        for n in (2, 4):
            a, b = (reports[n].rows[name] for name in ("A (ms)", "B (ms)"))
            said[n] = "sound", statistics.median(a) / statistics.median(b)
        said[3] = "weak as strong", sum(reports[3].rows["A (ms)"]) / sum(reports[3].rows["B, 64 per GPU (ms)"])
        return said

    passes("11.2", medians)


def test_feedback_never_gives_a_way_or_a_number_away():
    for answer in (lambda r: {n: ("busy", 1.0) for n in r}, lambda r: {n: (nb11.which_way(r)[n][0], 9.0) for n in r}):
        text = examine("11.2", answer).text
        assert "expected 'right'" in text or "no row of this report" in text
        assert "blocked" not in text


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda r: {1: ("lies", 1.0)}, "'lies' is not one of the names"),
        (lambda r: {1: "sound"}, "no (way, speedup) for report 1"),
        (lambda r: None, "no (way, speedup) for report 1"),
    ],
)
def test_what_is_no_answer_is_named(answer, words):
    assert words in examine("11.2", answer).text


def test_who_believes_the_last_line_is_wrong_wherever_a_report_fools():
    claimed, right = nb11._claimed(nb11.reports()), nb11.which_way(nb11.reports())
    assert sum(way == "sound" for way, _ in right.values()) == 2
    for n, (way, honest) in right.items():
        if honest is not None:
            assert math.isclose(claimed[n], honest, rel_tol=0.01) == (way == "sound")
