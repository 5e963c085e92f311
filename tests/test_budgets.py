"""Experiments under a time budget: what each refuses, equal rounds on unequal ranks, and what a slow machine gets."""

import dataclasses
import importlib

import pytest

from labs.kit.errors import BadInput
from labs.kit.lab import experiments
from labs.kit.launch import launch, run_on_ranks
from labs.kit.measure import LEAST_ROUNDS

LABS = {
    name: {f.name for f in dataclasses.fields(lab.Config)}
    for name in experiments()
    if hasattr(lab := importlib.import_module(f"labs.{name}"), "Config")
}
BUDGETED = [name for name, fields in LABS.items() if "seconds" in fields]
FIXED = ("rounds", "seeds", "timed", "repetitions")  # what wins over seconds: the first that an experiment has


def test_most_experiments_that_measure_have_a_budget():
    assert len(BUDGETED) >= 20


@pytest.mark.parametrize("name", BUDGETED)
def test_seconds_are_positive_and_a_fixed_number_is_an_option(name):
    lab = importlib.import_module(f"labs.{name}")
    assert lab.Config().seconds > 0
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(BadInput, match=r"^seconds must be a positive number, not [-\w.]+$"):
            lab.Config(seconds=seconds)
    fixed = next(f for f in FIXED if f in LABS[name])
    assert getattr(lab.Config(), fixed) is None
    with pytest.raises(BadInput, match=rf"^{fixed} must be at least \d+, not 0"):
        lab.Config(**{fixed: 0})


def test_an_experiment_with_one_slow_rank_takes_equally_many_rounds_on_both():
    def rounds():
        import time

        import torch
        import torch.distributed as dist

        from labs import gradient_accumulation as lab
        from labs.kit import measure
        from labs.kit.rank import Rank

        me, sync = dist.get_rank(), measure.sync
        measure.sync = lambda device: (time.sleep(0.02 * me), sync(device))
        rank = Rank(me, 2, me, 2, torch.device("cpu"), "gloo", ())
        records = list(lab.run(lab.Config(ways=("no_sync", "sync_every"), seconds=1.5), rank))
        return [len(r.samples) for r in records if r.metric == "step_s"]

    mine, yours = run_on_ranks(rounds)
    assert mine == yours and len({*mine}) == 1 and mine[0] >= LEAST_ROUNDS and mine[0] % 2 == 0


def samples(**given):
    """Numbers of samples of the steps' times."""
    found = launch("gradient_accumulation", 2, ways=("no_sync", "sync_every"), oversubscribe=True, **given)
    return {len(r.samples) for r in found.where("step_s")}


def test_no_time_at_all_still_gives_an_interval_and_rounds_win_over_seconds():
    assert samples(seconds=1e-6) == {LEAST_ROUNDS}
    assert samples(seconds=1e6, rounds=3) == {3}
    assert samples(seconds=1e6, smoke=True) == {2}
