"""Exercise 11.2: right answers of any form pass at every seat; each report has the fault that it is said to have."""

from __future__ import annotations

import collections
import re
import statistics

import pytest

from labs.chapters.nb11 import exercise_fooled as exercise
from labs.chapters.nb11.reports import WAYS, every, made
from labs.kit.check import Mistake, check
from labs.kit.errors import BadInput
from labs.kit.measure import Estimate, paired_ratio

SEATS = range(1, 201)


@pytest.fixture
def seat(monkeypatch, capsys):
    """Show the reports of a seat, for this test only."""
    monkeypatch.setattr(exercise, "_shown", [exercise.FIRST_SEAT])
    return exercise.show


def test_right_answers_of_any_form_pass_at_any_seat(seat):
    for n in (1, 2, 7, 40):
        seat(n)
        right = {k: (one.way, one.honest) for k, one in made(n).items()}
        exercise.check_which_way(lambda reports, r=right: r)
        exercise.check_which_way(lambda reports, r=right: {str(k): list(two) for k, two in r.items()})
        estimates = [(way, x if x is None else Estimate(x, x, x, 10)) for way, x in right.values()]
        exercise.check_which_way(lambda reports, e=estimates: e)
        rounded = {k: (f" {way} ", x if x is None else round(x, 2)) for k, (way, x) in right.items()}
        exercise.check_which_way(lambda reports, r=rounded: r)


def test_the_reference_is_judged_by_the_seat_that_it_is_of(seat, capsys):
    seat(2)
    check("11.2", None, solutions=True)
    assert "11.2 passed" in capsys.readouterr().out


def test_no_difference_is_not_an_answer_to_a_small_one(seat):
    """Where B is 2 % faster, 1.00 was not computed from the rows."""
    with pytest.MonkeyPatch.context() as patched:
        for seed in range(20):
            [one] = [one for one in every(seed) if one.way == "best_of_many"]
            patched.setattr(exercise, "made", lambda seat, one=one: {1: one})
            if one.honest > 1.012:
                with pytest.raises(Mistake, match="not how many times"):
                    exercise.check_which_way(lambda reports: {1: ("best_of_many", 1.0)})


def test_every_seat_has_two_sound_reports_one_without_a_number_and_its_own_places():
    places = collections.Counter()
    for n in SEATS:
        ways = [one.way for one in made(n).values()]
        assert ways.count("sound") == 2 and len(set(ways)) == 5
        assert sum(one.honest is None for one in made(n).values()) == 1
        places.update((k, way) for k, way in enumerate(ways, 1))
    assert {way for _, way in places} == set(WAYS)
    assert max(places.values()) < len(SEATS) / 2, "no place gives a way away"


def test_who_believes_line_1_is_wrong_in_every_report_that_fools():
    for seed in range(30):
        for one in every(seed):
            if one.way == "sound":
                assert one.honest == pytest.approx(one.claimed)
            elif one.honest is not None:
                assert abs(one.claimed / one.honest - 1) > 0.06, (one.way, one.claimed, one.honest)


def test_ratios_of_medians_and_of_means_are_within_the_tolerance_of_what_is_asked():
    """Where rows of one unit are compared: nobody's style of computing decides."""
    for seed in range(30):
        for one in every(seed):
            if one.honest is None or one.way in ("samples_rate", "one_clock", "two_units"):
                continue
            names = [one.report.lines[k - 1][:26].strip() for k in one.rows]
            a, b = (one.report.log[name] for name in names)
            if one.way == "debug_baseline":
                a, b = b, a
            for found in (statistics.median(a) / statistics.median(b), sum(a) / sum(b), paired_ratio(a, b).value):
                assert found == pytest.approx(one.honest, rel=exercise.TOLERANCE), one.way


def test_no_feedback_names_the_right_way_of_a_report_that_is_judged_wrongly():
    for one in every(5):
        for way in WAYS:
            said = exercise._way_problem(one, way)
            assert (said == "") == (way == one.way)
            words = re.sub(r'".*"', "", said).replace(f"you say {way}", "")
            assert one.way == "sound" or one.way not in words


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "you return None"),
        ("sound", "you return 'sound'"),
        ({1: "sound"}, "for report 1 you return 'sound'"),
        ({k: ("lies", 1.0) for k in range(1, 7)}, "'lies' is no name of a way"),
        ({k: ("sound", "1.2 x") for k in range(1, 7)}, "not a number"),
        ({k: ("sound", True) for k in range(1, 7)}, "for report 1 you return True, not a number"),
        ({k: ("sound", 1.0) for k in range(1, 6)}, "for report 6 you return None"),
    ],
)
def test_what_is_no_answer_is_told(answer, words):
    with pytest.raises(Mistake) as found:
        exercise.check_which_way(lambda reports: answer)
    assert words in str(found.value)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "1", None, 10**6])
def test_a_seat_that_cannot_be(wrong):
    with pytest.raises(BadInput, match="seat must be a whole number"):
        exercise.show(wrong)
