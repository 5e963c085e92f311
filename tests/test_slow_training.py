"""The slow training: each fault changes one line, its measurement shows it, and naming it is judged."""

import pytest

from labs.kit.errors import BadInput
from labs.kit.launch import launch
from labs.kit.measure import estimate
from labs.slow_training import Config, faults
from labs.slow_training.script import train

KINDS = faults.FAULTS + faults.HEALTHY
SEEDS = {faults.draw(seed): seed for seed in range(len(KINDS))}


@pytest.mark.parametrize("fault", KINDS, ids=lambda fault: fault.what)
def test_a_fault_changes_one_line(fault):
    changed = faults.difference(fault).splitlines()
    assert len(changed) == (2 if fault.old else 0)
    compile(faults.source(fault), "train", "exec")


def test_seeds_in_a_row_draw_each_kind_once():
    assert set(SEEDS) == set(KINDS)
    assert {faults.draw(seed) for seed in range(14, 28)} == set(KINDS)
    assert train.__name__ == "train" and faults.fixed().startswith("def train(")


def test_an_unknown_fault_is_named():
    with pytest.raises(BadInput, match="did you mean"):
        Config(fault="slow_loder")


SHOWN = {
    "slow_loader": ("shares", "data", lambda x, healthy: x > healthy + 0.1),
    "float64": ("settings", "bits of a new tensor", lambda x, healthy: x == 2 * healthy),
    "anomaly": ("settings", "anomaly detection", lambda x, healthy: x == 1 != healthy),
    "tiny_batches": ("settings", "images per step and rank", lambda x, healthy: x == healthy / 16),
    "validation": ("operators", "forward passes per backward pass", lambda x, healthy: x == 2 * healthy),
    "checkpoint": ("files", "MB written per step, files and connections", lambda x, healthy: x > 2 * healthy),
    "growing": ("memory", "MB left behind per step", lambda x, healthy: x > healthy + 0.09),
    "weight_averaging": ("exchange", "other all-reduces per step", lambda x, healthy: x > 10 > healthy == 0),
    "tiny_buckets": ("exchange", "buckets per step", lambda x, healthy: x > 5 * healthy),
    "straggler": ("arrivals", "rank 1 late", lambda x, healthy: x > 0.4),
    "own_code": ("operators", "aten::median", lambda x, healthy: x > 0.1),
}


@pytest.fixture(scope="module")
def healthy():
    seed = next(seed for fault, seed in SEEDS.items() if fault.what.endswith("should be"))
    names = ("shares", "settings", "operators", "files", "memory", "exchange", "arrivals")
    return launch("slow_training", 2, device="cpu", oversubscribe=True, seed=seed, measure=names, smoke=True)


@pytest.mark.quiet
@pytest.mark.parametrize("name", SHOWN)
def test_its_measurement_shows_it(healthy, name):
    measurement, what, shows = SHOWN[name]
    seed = next(seed for fault, seed in SEEDS.items() if fault.name == name)
    run = launch("slow_training", 2, device="cpu", oversubscribe=True, seed=seed, measure=(measurement,), smoke=True)
    without = [r.value for r in healthy.where("finding", what=what)]
    assert shows(run.one("finding", what=what).value, without[0] if without else 0.0)


def test_the_right_name_brings_the_gain_and_a_wrong_one_nothing():
    seed = next(seed for fault, seed in SEEDS.items() if fault.name == "tiny_batches")
    given = {"device": "cpu", "oversubscribe": True, "seed": seed, "smoke": True}
    right = launch("slow_training", 2, fault="tiny_batches", **given)
    assert right.one("right").value == 1 and "batch_size=64" in right.one("right").case["difference"]
    assert estimate(right.one("gain").samples).value > 1.5
    wrong = launch("slow_training", 2, fault="float64", **given)
    assert wrong.one("right").value == 0 and not wrong.where("gain") and "difference" not in wrong.one("right").case


def test_a_healthy_training_is_a_right_answer():
    seed = next(seed for fault, seed in SEEDS.items() if fault.name == "healthy")
    run = launch("slow_training", 2, device="cpu", oversubscribe=True, seed=seed, fault="healthy", smoke=True)
    assert run.one("right").value == 1 and not run.where("gain")
