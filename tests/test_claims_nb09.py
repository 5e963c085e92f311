"""The verdict of notebook 09 follows its records, also when they turn round."""

from __future__ import annotations

from labs.kit.claims import claims, judge
from labs.kit.record import Record, Records

[E21] = [c for c in claims("09") if c.id == "E21"]


def planted(error=0.0, places=("data", "forward")):
    """Costs of 10 ms found as 10 ms and `error` percent more in the last place."""
    rows = []
    for place in places:
        case = {"place": place, "share": place, "ms": 10.0}
        spent = (0.0100, 0.0101, 0.0100, 0.0102, 0.0100, 0.0101)
        scale = 1 + error / 100 if place == places[-1] else 1.0
        rows += [
            Record("profile_step", "spent_s", "s", spent, case=case),
            Record("profile_step", "found_s", "s", tuple(s * scale for s in spent), case=case),
        ]
    return rows


def ranks(own=(0.060, 0.0601), late=(0.0, 0.030), steps=12):
    """Own timers of two ranks, and by how much each comes after the first."""
    rows = []
    for rank, (timer, after) in enumerate(zip(own, late, strict=True)):
        case = {"of_rank": rank, "late": "one rank"}
        layout = {"world_size": len(own)}
        rows += [
            Record("last_to_arrive", "own_step_s", "s", (timer,) * steps, case=case, layout=layout),
            Record("last_to_arrive", "late_s", "s", (after,) * steps, case=case, layout=layout),
        ]
    return rows


def verdict(*rows):
    return judge(E21, Records([r for part in rows for r in part]), strict=True)


def test_found_where_planted_but_a_late_rank_is_hidden():
    found = verdict(planted(), ranks())
    assert found.word == "depends" and "30 ms late" in found.because and "2 of 2 planted" in found.because


def test_holds_if_the_late_ranks_own_timer_shows_it():
    assert verdict(planted(), ranks(own=(0.030, 0.060))).word == "holds"


def test_own_timers_that_scatter_more_than_the_delay_decide_nothing():
    rows = ranks()
    scattered = (0.03, 0.09) * 6
    rows[2] = Record("last_to_arrive", "own_step_s", "s", scattered, case=rows[2].case, layout=rows[2].layout)
    found = verdict(planted(), rows)
    assert found.word == "depends" and "this run cannot tell" in found.because


def test_if_nobody_can_be_named_it_is_not_decided():
    rows = ranks(late=(0.0, 0.030))
    rows[1] = Record("last_to_arrive", "late_s", "s", (0.0, 0.031) * 6, case=rows[1].case, layout=rows[1].layout)
    rows[3] = Record("last_to_arrive", "late_s", "s", (0.030, 0.0) * 6, case=rows[3].case, layout=rows[3].layout)
    found = verdict(planted(), rows)
    assert found.word == "depends" and "this run cannot tell" in found.because


def test_a_cost_in_the_wrong_place():
    found = verdict(planted(error=40), ranks())
    assert found.word == "depends" and "not 10 ms in forward" in found.because
    assert verdict(planted(error=40, places=("data",)), ranks()).word == "does not hold"


def test_one_rank_hides_nothing():
    found = verdict(planted(), ranks(own=(0.06,), late=(0.0,)))
    assert found.word == "depends" and "that takes two" in found.because


def test_without_evidence_it_is_not_tried():
    assert verdict(ranks()).word == "not tried yet"
    assert "Nsight Systems was not run" in verdict(planted(), ranks()).because


def test_what_cannot_be_told_is_no_evidence_against():
    """The median is 30 % off, the interval reaches from -20 % to +60 %."""
    rows = planted(places=("data",))
    rows[1] = Record("profile_step", "found_s", "s", (0.008, 0.013, 0.013, 0.008, 0.016, 0.016), case=rows[1].case)
    found = verdict(rows, ranks())
    assert found.word == "not tried yet" and "of 1 this run cannot tell" in found.because
    found = verdict(planted(places=("forward",)), rows, ranks())
    assert found.word == "depends" and "1 of 2 planted" in found.because and "30 ms late" in found.because
