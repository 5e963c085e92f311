"""What became of a finding: gone only where the second run shows it, whatever else kept it from being tried."""

import pytest
from doctor_facts import STEP_S, WELL, made

from labs.doctor import compare
from labs.doctor.diagnosis import diagnose
from labs.doctor.report import Report

WAITS = "no waiting line"


def report(*facts):
    return Report(list(facts), diagnose(list(facts)), [], [])


def became(before, after, name):
    """ "cured", "untold" or "left"; "" if it is none of them."""
    assert name in [f.name for f in before.findings if f.bound]
    found = compare.compare(before, after)
    places = {"cured": found.cured, "untold": found.untold, "left": [was for was, _ in found.left]}
    return next((place for place, findings in places.items() if name in [f.name for f in findings]), "")


def test_what_could_not_be_tried_again_is_not_cured():
    why = "its step took 9 times as long"
    before = report(made(modes={WAITS: STEP_S / 1.3}, device="cuda"))
    after = report(made(device="cuda", not_tried={WAITS: why}))
    assert became(before, after, "synchronise") == "untold"
    text = compare.page(before, after)
    assert "\nCURED" not in text and f"did not try it: {why}" in " ".join(text.split())


def test_what_is_not_there_any_more_is_cured_if_all_ranks_say_so():
    before = report(*(made(modes={WAITS: STEP_S / 1.3}, device="cuda", rank=rank, ranks=2) for rank in (0, 1)))
    gone = {"not_tried": {WAITS: "no line waits"}, "gone": [WAITS]}
    both = [made(device="cuda", rank=rank, ranks=2, **gone) for rank in (0, 1)]
    assert became(before, report(*both), "synchronise") == "cured"
    both[1].gone = []
    assert became(before, report(*both), "synchronise") == "untold"


PARTED = {
    "own_code": {"prepare": 0.3, "forward": 0.3, "backward": 0.4},
    "copies": {"copy": 0.3, "forward": 0.3, "backward": 0.4},
}


@pytest.mark.parametrize("name", PARTED)
def test_what_is_told_by_its_parts_is_cured_only_if_these_are_small(name):
    lines = [compare_line("copy")] if name == "copies" else []
    before = report(made(PARTED[name], lines=lines))
    assert became(before, report(made(lines=lines)), name) == "cured"
    few = made({**WELL, **dict.fromkeys(PARTED[name].keys() - {"forward", "backward"}, 0.2)}, steps=3)
    assert became(before, report(few), name) == "untold"


def compare_line(kind):
    from labs.doctor.facts import Line

    return Line(kind, "to", "/x/train.py", 3, "x.to(device)", 1.0, 5.0)


def test_a_late_rank_is_on_time_only_if_the_second_run_can_tell():
    late = {**WELL, "rest": 0.4}
    before = report(made(rank=0, ranks=2), made(late, rank=1, ranks=2))
    assert became(before, report(*(made(rank=rank, ranks=2) for rank in (0, 1))), "straggler") == "cured"
    assert became(before, report(*(made(rank=rank, ranks=2, steps=3) for rank in (0, 1))), "straggler") == "untold"


def test_graphs_that_are_not_made_any_more():
    jumps = made(steps=30, compiles={"in_steps": 8, "at": list(range(0, 30, 4))})
    jumps.step_s = [s * (3 if i % 4 == 0 else 1) for i, s in enumerate(jumps.step_s)]
    before = report(jumps)
    assert became(before, report(made(compiles={"in_steps": 0})), "recompiles") == "cured"
