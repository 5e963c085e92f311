"""Experiments under a time budget: what each refuses, and what a slow machine gets."""

import dataclasses
import importlib

import pytest

from labs.kit.errors import BadInput
from labs.kit.lab import experiments, require_limits
from labs.kit.launch import launch
from labs.kit.measure import LEAST_ROUNDS

LABS = {
    name: {f.name: f.default for f in dataclasses.fields(lab.Config)}
    for name in experiments()
    if hasattr(lab := importlib.import_module(f"labs.{name}"), "Config")
}
FIXED = ("rounds", "seeds", "timed", "repetitions")  # what wins over seconds: the first that an experiment has
BUDGETED = [
    name for name, fields in LABS.items() if "seconds" in fields and any(fields.get(f, 1) is None for f in FIXED)
]


def test_seconds_are_positive_and_a_fixed_number_is_an_option():
    assert BUDGETED
    for name in BUDGETED:
        lab = importlib.import_module(f"labs.{name}")
        assert lab.Config().seconds > 0, name
        for seconds in (0.0, float("nan")):
            with pytest.raises(BadInput, match=r"^seconds must be .*, not [-\w.]+$"):
                require_limits(lab.Config(seconds=seconds))
        fixed = next(f for f in FIXED if f in LABS[name])
        with pytest.raises(BadInput, match=rf"^{fixed} must be at least \d+, not 0"):
            require_limits(lab.Config(**{fixed: 0}))


def samples(**given):
    """Numbers of samples of the steps' times."""
    found = launch("slowest_rank", 2, oversubscribe=True, **given)
    return {len(r.samples) for r in found.where("step_s") if r.kind == "measured"}


def test_no_time_at_all_still_gives_an_interval_and_rounds_win_over_seconds():
    assert samples(seconds=1e-6) == {LEAST_ROUNDS}
    assert samples(seconds=1e6, rounds=3) == {3}
    assert samples(seconds=1e6, smoke=True) == {2}
