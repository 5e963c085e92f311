"""Experiments under a time budget: what each refuses, and what a slow machine gets."""

import dataclasses
import importlib

import pytest

from labs.kit.errors import BadInput
from labs.kit.lab import experiments
from labs.kit.launch import launch
from labs.kit.measure import LEAST_ROUNDS

LABS = {
    name: {f.name for f in dataclasses.fields(lab.Config)}
    for name in experiments()
    if hasattr(lab := importlib.import_module(f"labs.{name}"), "Config")
}
BUDGETED = [name for name, fields in LABS.items() if "seconds" in fields]
FIXED = ("rounds", "seeds", "timed", "repetitions")  # what wins over seconds: the first that an experiment has


def test_seconds_are_positive_and_a_fixed_number_is_an_option():
    assert len(BUDGETED) >= 20, "most experiments that measure have a budget"
    for name in BUDGETED:
        lab = importlib.import_module(f"labs.{name}")
        assert lab.Config().seconds > 0, name
        for seconds in (0.0, float("nan")):
            with pytest.raises(BadInput, match=r"^seconds must be a positive number, not [-\w.]+$"):
                lab.Config(seconds=seconds)
        fixed = next(f for f in FIXED if f in LABS[name])
        assert getattr(lab.Config(), fixed) is None, name
        with pytest.raises(BadInput, match=rf"^{fixed} must be at least \d+, not 0"):
            lab.Config(**{fixed: 0})


def samples(**given):
    """Numbers of samples of the steps' times."""
    found = launch("ddp_overlap", 2, oversubscribe=True, width=8, layers=2, **given)
    return {len(r.samples) for r in found.where("step_s")}


def test_no_time_at_all_still_gives_an_interval_and_rounds_win_over_seconds():
    assert samples(seconds=1e-6) == {LEAST_ROUNDS}
    assert samples(seconds=1e6, rounds=3) == {3}
    assert samples(seconds=1e6, smoke=True) == {2}
