"""Formulas that are fed by measurements: noise that turns two times round must not end a learner's cell."""

import math

from hypothesis import given
from hypothesis import strategies as st

from labs.common.checkpoints import checkpoint_interval
from labs.common.elastic.journal import PHASES, History
from labs.common.timing import collectives

SIZES = (2**10, 2**16, 2**20, 2**24)  # bytes
SECONDS = st.sampled_from([0.0, 1e-9, 1e-7]) | st.floats(1e-9, 100.0)  # equal and zero-ish ones often, in any order
TIMES = st.lists(SECONDS, min_size=4, max_size=4)
POSITIVE = st.sampled_from([1e-9, 1e-6]) | st.floats(1e-9, 1e9)


def known(*values: float) -> None:
    """Not negative, and finite or inf, which stands for "this run cannot tell"."""
    assert all(v >= 0 for v in values), values  # nan is not


@given(TIMES)
def test_link_fits(times):
    fit = collectives.fit(SIZES, times)
    known(fit.latency_s, fit.b_s, fit.half_bytes)
    assert math.isfinite(fit.seconds(SIZES[-1]))


@given(POSITIVE, POSITIVE)
def test_checkpoint_intervals(save_s, mtbf_s):
    interval_s = checkpoint_interval.optimum(save_s, mtbf_s)
    assert 0 < interval_s < math.inf
    assert 0 < checkpoint_interval.lost_share(interval_s, save_s, mtbf_s) <= 1 + 1e-9


EVENTS = st.sampled_from(["killed", *(event for _, event in PHASES)])
NOTED = st.fixed_dictionaries(
    {"event": EVENTS, "time": st.floats(0, 1e9), "rank": st.integers(0, 1), "restart": st.integers(0, 1)}
)


@given(st.lists(NOTED, max_size=20))
def test_phases_of_a_restart_that_was_noted_in_part_by_clocks_that_jump(events):
    history = History(events)
    assert all(0 <= seconds < math.inf for seconds in history.phases().values())
    assert history.restarts in (0, 1)


def test_time_that_no_event_divides_belongs_to_the_next_phase():
    rows = [("killed", 10.0), ("starting", 11.0), ("step", 15.0)]
    events = [{"event": e, "time": t, "rank": 0, "restart": 1} for e, t in rows]
    assert History(events).phases() == {"stop and rendezvous": 1.0, "first step": 4.0}
